//! The client of CRIU, which saves and restores the host side of a program.
//!
//! CRIU is run as `criu swrk FD`, one process per request, and spoken to over a socket in its
//! own protocol (protobuf messages, see `rpc.rs`). It is never linked, and its output is never
//! parsed, but for the error lines of its log, which are passed on to the user.
//!
//! CRIU runs with a clean environment and without plugins: device state is saved and restored by
//! gpucr, before CRIU freezes anything and after it has thawed everything.

mod dump;
mod error;
mod find;
mod kept_logs;
mod left_memory;
mod links;
mod log;
mod mappings;
mod memory;
mod open_files;
mod pages;
mod process_tree;
mod restore;
mod rpc;
mod swrk;
mod version;

pub use dump::{DumpError, DumpOptions, DumpWorker};
pub use error::{CriuError, Hint};
pub use find::{Criu, Features};
pub use kept_logs::kept_logs;
pub use left_memory::LeftMemory;
pub(crate) use links::settle as settle_links;
pub(crate) use log::read_anything;
pub(crate) use memory::{Keep, OnDemandError, OnDemandMemory, PagesFile, Part, Plan, is_alive};
pub(crate) use open_files::{FILES, open_files, with_sizes};
pub(crate) use pages::{
    MEMFD, Mapped, Mappings, Memfds, Pages, leave_out_zeros, mappings_file, pages_file,
    shared_pages_file,
};
pub(crate) use process_tree::{PROCESS_TREE, leads_its_session};
pub use restore::{InheritFd, OnDemand, RestoreError, RestoreOptions, RestoreWorker};
pub use version::{MIN_VERSION, Version};

#[cfg(test)]
mod tests;
