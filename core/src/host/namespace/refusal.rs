//! Why gpucr does not go into a pid namespace.

use std::io;

/// Why gpucr does not go there.
#[derive(Debug, thiserror::Error)]
pub enum EntryError {
    /// Something there could make gpucr do as it likes.
    #[error(
        "process {by}, in the container of process {pid}, has the capability CAP_SYS_PTRACE and so could take over gpucr"
    )]
    MayTrace {
        /// The process that is wanted.
        pid: u32,
        /// The process that has it.
        by: u32,
    },
    /// That cannot be told.
    #[error(
        "it cannot be told whether process {by}, in the container of process {pid}, could take over gpucr: {source}"
    )]
    Unknown {
        /// The process that is wanted.
        pid: u32,
        /// The process that cannot be looked at.
        by: u32,
        /// Why.
        source: io::Error,
    },
    /// The processes there come and go too fast.
    #[error(
        "so many processes start and end in the container of process {pid} that it cannot be told whether one could take \
         over gpucr"
    )]
    Restless {
        /// The process that is wanted.
        pid: u32,
    },
}
