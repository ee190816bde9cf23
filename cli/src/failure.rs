//! From an error of the library to what the user reads: what happened, what state things are in,
//! what to do; and the exit code.

mod help;

pub(crate) use help::{for_terminal, set_image};

use std::borrow::Cow;
use std::io::Write;
use std::process::ExitCode;

use gpucr_core::image::ImageError;
use gpucr_core::library::LibraryError;
use gpucr_core::transfer::TarError;
use gpucr_core::{Error, Failure, Left};

use crate::bars;
use crate::escape::{escaped, escaped_lines, escaped_list};
use crate::fold;

/// Failed; the program runs on, or the image is as it was.
pub(crate) const FAILED: u8 = 1;
/// Wrong usage.
pub(crate) const USAGE: u8 = 2;
/// As shells and env(1) say of a command that is there and cannot be run.
pub(crate) const NOT_RUNNABLE: u8 = 126;
/// And of one that is not there.
pub(crate) const NOT_FOUND: u8 = 127;
/// This host cannot do it.
pub(crate) const HOST: u8 = 3;

/// What a subcommand gives back: the exit code, or what went wrong.
pub(crate) type Outcome = Result<ExitCode, CliError>;

/// An error as the user sees it.
#[derive(Debug)]
pub(crate) struct CliError {
    /// What happened.
    message: String,
    /// In which state things are.
    state: Option<String>,
    /// What to do.
    help: Option<String>,
    code: u8,
}

impl CliError {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { message: message.into(), state: None, help: None, code }
    }

    /// The exit status that goes with it.
    pub(crate) fn exit_code(&self) -> u8 {
        self.code
    }

    /// What happened.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// What to do about it.
    pub(crate) fn remedy(&self) -> Option<&str> {
        self.help.as_deref()
    }

    /// The same with another exit code.
    pub(crate) fn code(self, code: u8) -> Self {
        Self { code, ..self }
    }

    pub(crate) fn state(mut self, state: impl Into<String>) -> Self {
        self.state = Some(state.into());
        self
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        match &self.state {
            Some(state) => write!(f, "\n{state}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for CliError {}

impl miette::Diagnostic for CliError {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn std::fmt::Display>)
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        let code = if error.is_of_host() { HOST } else { FAILED };
        Self {
            message: error.to_string(),
            state: None,
            help: help::about(&error).map(Cow::into_owned),
            code,
        }
    }
}

/// Errors of a part of the checkpointer, as the whole of it would say them.
macro_rules! of_parts {
    ($($part:ty),*) => {
        $(impl From<$part> for CliError {
            fn from(error: $part) -> Self {
                Error::from(error).into()
            }
        })*
    };
}
of_parts!(ImageError, LibraryError, TarError);

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        let state = match failure.left {
            Left::Untouched => "Nothing was changed.".to_owned(),
            Left::RolledBack => format!(
                "The dump was rolled back in phase {}: the program keeps running, and there is no image.",
                failure.phase
            ),
            Left::Ended => "The program ended by itself, and there is no image.".to_owned(),
            Left::NotRestored => format!(
                "The restore failed in phase {}; the processes that it had made were ended before any of them \
                ran. The image is as it was.",
                failure.phase
            ),
            Left::NotRestoredButRan => format!(
                "The restore failed in phase {}; the processes that it had made were ended again. The image is \
                as it was, but the program's host side had begun to run, and files that it writes may have changed.",
                failure.phase
            ),
            Left::CompleteButLost(ref processes) => format!(
                "The image is complete. The program was not brought back to running: {}. The watchdog holds its \
                memory and keeps trying.",
                processes.join("; ")
            ),
            Left::Lost(ref processes) => format!(
                "There is no image, and the program was not brought back to running: {}. The watchdog holds its \
                memory and keeps trying.",
                processes.join("; ")
            ),
        };
        Self { state: Some(state), ..Self::from(*failure.error) }
    }
}

/// The error of a system call, by what could not be done.
pub(crate) fn io_error(what: &str) -> impl Fn(std::io::Error) -> CliError {
    move |source| Error::Io { what: what.to_owned(), source }.into()
}

/// Prints an error to stderr.
pub(crate) fn show(error: CliError) {
    let CliError { message, state, help, code } = error;
    let width = fold::width(std::io::stderr());
    let fitting = |text: &str, label| fitting(text, width.map(|width| width.saturating_sub(label)));
    let shown = CliError {
        message: fitting(&escaped_list(&message), 4),
        state: state.map(|state| fitting(&escaped(&state), 4)),
        help: help.map(|help| fitting(&escaped_lines(&help), 8)),
        code,
    };
    // It would part commands.
    let _ = miette::set_hook(Box::new(|_| {
        Box::new(miette::MietteHandlerOpts::new().wrap_lines(false).build())
    }));
    let report = miette::Report::new(shown);
    bars::above(|| {
        // If this cannot be printed there is nowhere left to say so.
        let _ = writeln!(std::io::stderr().lock(), "{report:?}");
    });
}

/// Text whose lines fit into so many columns. Those of a list go on where its items begin.
fn fitting(text: &str, width: Option<usize>) -> String {
    let line = |line: &str| fold::folded(line, width, line.len() - line.trim_start().len());
    text.split('\n').map(line).collect::<Vec<_>>().join("\n")
}

/// Prints an error to stderr and gives its exit code.
pub(crate) fn report(error: CliError) -> ExitCode {
    let code = error.code;
    show(error);
    ExitCode::from(code)
}
