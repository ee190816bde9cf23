//! One file for each subcommand.

pub(crate) mod check;
pub(crate) mod diff;
pub(crate) mod dump;
pub(crate) mod gc;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod keeper;
pub(crate) mod ls;
pub(crate) mod ps;
pub(crate) mod report;
pub(crate) mod restore;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod trace;
pub(crate) mod transfer;
pub(crate) mod verify;
pub(crate) mod warm;

use gpucr_core::Error;

use crate::failure::{CliError, FAILED};

/// So many blocks or files are shown where nobody asks for all.
const LARGEST: usize = 20;

/// Prints a line on stdout. That nobody reads it any more is no failure of what was done.
macro_rules! say {
    ($($arg:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stdout().lock(), $($arg)*);
    }};
}
pub(crate) use say;

/// Prints a value as JSON on stdout.
fn print_json(value: &impl serde::Serialize) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CliError::new(FAILED, format!("cannot write JSON: {error}")))?;
    say!("{text}");
    Ok(())
}

pub(crate) fn io_error(what: &str) -> impl Fn(std::io::Error) -> CliError {
    move |source| Error::Io { what: what.to_owned(), source }.into()
}
