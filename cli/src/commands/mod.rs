//! One file for each subcommand.

pub(crate) mod check;
pub(crate) mod diff;
pub(crate) mod dump;
pub(crate) mod gc;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod keeper;
pub(crate) mod key;
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

pub(crate) use crate::say::{note, print_json, say};

use crate::failure::CliError;

/// So many blocks or files are shown where nobody asks for all.
const LARGEST: usize = 20;

pub(crate) fn io_error(what: &str) -> impl Fn(std::io::Error) -> CliError {
    move |source| Error::Io { what: what.to_owned(), source }.into()
}
