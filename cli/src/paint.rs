//! Colours of what is said on a terminal.
//!
//! They are put around text that has been made fit to be shown, and only where standard output is a terminal that
//! knows them: `NO_COLOR` (<https://no-color.org>) and `TERM=dumb` turn them off.

use std::ffi::OsStr;
use std::io::IsTerminal;
use std::sync::OnceLock;

use crate::escape::escaped;

/// What a piece of a line is, by which it has its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Paint {
    Plain,
    /// The heads of a table.
    Head,
    Good,
    Bad,
    /// Worth a look, and no failure.
    Warning,
}

impl Paint {
    /// What turns it on (ECMA-48, SGR), of the sixteen colours that every terminal's user has chosen.
    fn code(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Head => Some("1"),
            Self::Good => Some("32"),
            Self::Bad => Some("1;31"),
            Self::Warning => Some("33"),
        }
    }
}

/// Whether standard output gets colours.
fn is_coloured() -> bool {
    static COLOURED: OnceLock<bool> = OnceLock::new();
    *COLOURED.get_or_init(|| has_colours(&std::io::stdout()))
}

/// Whether what is written there is shown in colours.
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    let variable = |name| std::env::var_os(name);
    stream.is_terminal() && are_wanted(variable("NO_COLOR").as_deref(), variable("TERM").as_deref())
}

/// Whether the user of a terminal wants colours, by these variables.
fn are_wanted(no_color: Option<&OsStr>, term: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty) && term.is_some_and(|term| term != "dumb")
}

/// A line of pieces, escaped, and painted if standard output gets colours.
pub(crate) fn line(pieces: &[(Paint, &str)]) -> String {
    painted(pieces, is_coloured())
}

fn painted(pieces: &[(Paint, &str)], coloured: bool) -> String {
    let piece = |(paint, text): &(Paint, &str)| match paint.code().filter(|_| coloured) {
        Some(code) if !text.is_empty() => format!("\x1b[{code}m{}\x1b[0m", escaped(text)),
        _ => escaped(text).into_owned(),
    };
    pieces.iter().map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_that_want_them() {
        let wanted = |no_color: Option<&str>, term: Option<&str>| {
            are_wanted(no_color.map(OsStr::new), term.map(OsStr::new))
        };
        assert!(wanted(None, Some("xterm-256color")) && wanted(Some(""), Some("linux")));
        assert!(!wanted(Some("1"), Some("xterm")) && !wanted(Some("0"), Some("xterm")));
        assert!(!wanted(None, Some("dumb")) && !wanted(None, None));
    }

    #[test]
    fn what_is_painted_is_escaped_first() {
        let pieces = [(Paint::Good, "ok"), (Paint::Plain, " a\x1b[31mb"), (Paint::Bad, "")];
        assert_eq!(painted(&pieces, true), "\x1b[32mok\x1b[0m a\\u{1b}[31mb");
        assert_eq!(painted(&pieces, false), "ok a\\u{1b}[31mb");
    }
}
