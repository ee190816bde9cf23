use std::fmt;

/// What kind of fault a [`Diagnostic`] reports.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum DiagnosticKind {
    /// The text is not PTX.
    Syntax,
    /// An opcode, modifier or directive that this executor does not have; holds its name.
    Unsupported(String),
    /// `.target` or `.version` is outside what this executor takes.
    UnsupportedTarget,
    /// A name that nothing declares.
    Undefined,
    /// A name that is declared twice.
    Redefined,
    /// Operands of the wrong number, type or width.
    Type,
    /// A size or count beyond what this executor takes.
    Limit,
}

/// Why a module was not loaded, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Line in the source, from 1.
    pub line: u32,
    /// Column in the source, in bytes from 1.
    pub column: u32,
    /// What is wrong, in words.
    pub message: String,
    /// What is wrong, for programs.
    pub kind: DiagnosticKind,
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for Diagnostic {}

/// A place in the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Position {
    pub(crate) line: u32,
    pub(crate) column: u32,
}

impl Position {
    /// A diagnostic at this place.
    pub(crate) fn fault(self, kind: DiagnosticKind, message: impl Into<String>) -> Diagnostic {
        Diagnostic { line: self.line, column: self.column, message: message.into(), kind }
    }

    pub(crate) fn syntax(self, message: impl Into<String>) -> Diagnostic {
        self.fault(DiagnosticKind::Syntax, message)
    }

    pub(crate) fn mistyped(self, message: impl Into<String>) -> Diagnostic {
        self.fault(DiagnosticKind::Type, message)
    }

    pub(crate) fn undefined(self, name: &str) -> Diagnostic {
        self.fault(DiagnosticKind::Undefined, format!("undefined name `{name}`"))
    }

    pub(crate) fn limit(self, message: impl Into<String>) -> Diagnostic {
        self.fault(DiagnosticKind::Limit, message)
    }

    /// `what` names the instruction or directive that is missing.
    pub(crate) fn unsupported(self, what: impl Into<String>) -> Diagnostic {
        let what = what.into();
        self.fault(DiagnosticKind::Unsupported(what.clone()), format!("unsupported: `{what}`"))
    }
}
