//! Everything that gpucr says on its standard output and standard error.
//!
//! Much of it comes from programs, agents and images: command lines, paths, names of kernels, messages. All of
//! it passes one of these functions, so that a terminal shows such text and does not obey it. And what could
//! not be written is remembered: the command then ends with an error ([`settle`]).

use std::fmt::{Arguments, Display};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::escape::{escaped, escaped_json};
use crate::failure::{self, CliError, FAILED, Outcome};
use crate::paint::{self, Paint};
use crate::{bars, fold};

/// Prints a line on stdout. A line end in what is printed is shown as `\n`: one call, one line.
macro_rules! say {
    ($($arg:tt)*) => { $crate::say::line(format_args!($($arg)*)) };
}
/// Prints a line on stderr.
macro_rules! note {
    ($($arg:tt)*) => { $crate::say::note_line(format_args!($($arg)*)) };
}
/// Prints a line of prose on stdout, `say_folded!(INDENT, …)`. At a terminal it is folded between words, and the lines
/// after the first begin at the column INDENT. Not for a command to paste, unless it is in backquotes.
macro_rules! say_folded {
    ($indent:expr, $($arg:tt)*) => { $crate::say::folded_line($indent, format_args!($($arg)*)) };
}
/// The same on stderr, with two spaces before what follows the first line.
macro_rules! note_folded {
    ($($arg:tt)*) => { $crate::say::note_folded_line(format_args!($($arg)*)) };
}
pub(crate) use {note, note_folded, say, say_folded};

/// What could not be written, and why: the first such thing.
static LOST: Mutex<Option<(String, io::Error)>> = Mutex::new(None);

/// Whether only errors, warnings and JSON are to be printed.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From now on nothing is said that nobody has asked for: neither progress nor what was done.
pub(crate) fn quieten() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether [`quieten`] was called.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Prints a line on stdout, for [`say!`].
pub(crate) fn line(words: Arguments<'_>) {
    if is_quiet() {
        return;
    }
    text(&escaped(&words.to_string()));
}

/// Prints a line on stdout, for [`say_folded!`].
pub(crate) fn folded_line(indent: usize, words: Arguments<'_>) {
    painted_folded(indent, &[(Paint::Plain, &words.to_string())]);
}

/// The same of pieces, in colours if stdout is a terminal.
pub(crate) fn painted_folded(indent: usize, pieces: &[(Paint, &str)]) {
    if !is_quiet() {
        text(&fold::folded(&paint::line(pieces), fold::width(io::stdout()), indent));
    }
}

/// Prints a line of pieces on stdout, in colours if that is a terminal.
pub(crate) fn painted(pieces: &[(Paint, &str)]) {
    if !is_quiet() {
        text(&paint::line(pieces));
    }
}

/// Prints a line on stderr, for [`note!`]. That nobody can be told this is nothing that could be told.
pub(crate) fn note_line(words: Arguments<'_>) {
    note_escaped(&escaped(&words.to_string()));
}

/// Prints a line on stderr, for [`note_folded!`].
pub(crate) fn note_folded_line(words: Arguments<'_>) {
    note_escaped(&fold::folded(&escaped(&words.to_string()), fold::width(io::stderr()), 2));
}

fn note_escaped(text: &str) {
    // In one piece: a program may write to the same file.
    let line = format!("{text}\n");
    bars::above(|| {
        let _ = io::stderr().lock().write_all(line.as_bytes());
    });
}

/// Prints a text that is fit to be shown as it is, with its line ends, and one at its end.
pub(crate) fn text(text: &str) {
    if let Err(error) = writeln!(io::stdout().lock(), "{text}") {
        lost("standard output", error);
    }
}

/// Remembers that something could not be written. A reader of a pipe may stop reading: that is no failure.
pub(crate) fn lost(what: impl Display, error: io::Error) {
    if error.kind() != io::ErrorKind::BrokenPipe {
        let mut lost = LOST.lock().unwrap_or_else(PoisonError::into_inner);
        lost.get_or_insert_with(|| (what.to_string(), error));
    }
}

/// The exit code of a command: reports its error, if it has failed, and else what could not be written.
pub(crate) fn settle(outcome: Outcome) -> ExitCode {
    if let Err(error) = io::stdout().flush() {
        lost("standard output", error);
    }
    let lost = LOST.lock().unwrap_or_else(PoisonError::into_inner).take();
    match (outcome, lost) {
        (Err(error), _) => failure::report(error),
        (Ok(_), Some((what, error))) => {
            let error = CliError::new(FAILED, format!("cannot write to {what}: {error}"));
            failure::report(error.state("Everything else was done; only that output is lost."))
        }
        (Ok(code), None) => code,
    }
}

/// Prints a value as JSON on stdout, in several lines.
///
/// # Errors
/// It cannot be JSON.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let json = serde_json::to_string_pretty(value).map_err(no_json)?;
    text(&escaped_json(&json));
    Ok(())
}

/// Prints JSON on stderr.
///
/// # Errors
/// It cannot be JSON.
pub(crate) fn note_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let json = serde_json::to_string_pretty(value).map_err(no_json)?;
    if let Err(error) = writeln!(io::stderr().lock(), "{}", escaped_json(&json)) {
        lost("standard error", error);
    }
    Ok(())
}

/// Prints JSON on stdout in one line.
///
/// # Errors
/// It cannot be JSON.
pub(crate) fn print_json_line(value: &impl serde::Serialize) -> Result<(), CliError> {
    let json = serde_json::to_string(value).map_err(no_json)?;
    text(&escaped_json(&json));
    Ok(())
}

fn no_json(error: serde_json::Error) -> CliError {
    CliError::new(FAILED, format!("cannot write JSON: {error}"))
}

/// Where the log goes: to stderr, each event one line, in which the same holds. An event comes in one piece.
pub(crate) struct Log;

impl Write for Log {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        let words = String::from_utf8_lossy(event);
        note!("{}", words.trim_end_matches('\n'));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
