//! What all floors stand on: the system, progress and time, and faults that tests ask for.

pub mod careful;
pub(crate) mod clock;
pub(crate) mod concat;
pub(crate) mod cores;
pub(crate) mod faults;
pub mod file_tree;
pub(crate) mod foreign;
pub mod format;
pub(crate) mod helper;
pub(crate) mod io_error;
pub mod limits;
pub(crate) mod mapping;
pub(crate) mod memory;
pub(crate) mod names;
pub mod phase;
pub(crate) mod polite;
pub(crate) mod progress;
pub(crate) mod ranges;
pub(crate) mod runtime_dir;
pub(crate) mod scratch;
pub(crate) mod stage;
pub mod stop;
pub(crate) mod threads;
pub(crate) mod time_limit;
pub mod timeline;
