//! One file for each subcommand.

pub(crate) mod check;
pub(crate) mod diff;
pub(crate) mod dry_run;
pub(crate) mod dump;
pub(crate) mod extract;
pub(crate) mod forget;
pub(crate) mod gc;
pub(crate) mod generate;
pub(crate) mod inside;
pub(crate) mod inspect;
pub(crate) mod key;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod migrate;
pub(crate) mod ps;
pub(crate) mod receive;
pub(crate) mod report;
pub(crate) mod restore;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod trace;
pub(crate) mod transfer;
pub(crate) mod verify;
pub(crate) mod warm;
pub(crate) mod watchdog;

pub(crate) use crate::failure::{Outcome, io_error};
pub(crate) use crate::say::{note, note_folded, print_json, say, say_folded};

/// So many blocks or files are shown where nobody asks for all.
const LARGEST: usize = 20;
