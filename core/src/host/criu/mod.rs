//! The client of CRIU, which saves and restores the host side of a program.
//!
//! CRIU is run as `criu swrk FD`, one process per request, and spoken to over a socket in its
//! own protocol (protobuf messages, see `rpc.rs`). It is never linked, and its output is never
//! parsed, but for the error lines of its log, which are passed on to the user.
//!
//! CRIU runs with a clean environment and without plugins: device state is saved and restored by
//! gpucr, before CRIU freezes anything and after it has thawed everything.

mod dump;
mod find;
mod log;
mod pages;
mod pour;
mod restore;
mod rpc;
mod swrk;

#[cfg(test)]
mod tests;

pub use dump::{DumpError, DumpOptions, DumpWorker};
pub use find::{Criu, Features, MIN_VERSION, Version};
pub use log::Hint;
pub(crate) use log::read_anything;
pub(crate) use pages::leave_out_zeros;
pub use restore::{InheritFd, RestoreError, RestoreOptions, RestoreWorker};

use std::io;
use std::path::PathBuf;

/// Why CRIU could not be found, or did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// There is no CRIU on this host.
    #[error("no CRIU was found (looked at {})", looked.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NotFound {
        /// The paths that were tried.
        looked: Vec<PathBuf>,
    },
    /// The CRIU of this host cannot be used.
    #[error("{} has version {found}; {MIN_VERSION} or newer is needed", path.display())]
    TooOld {
        /// The program.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
    /// CRIU could not be run.
    #[error("cannot run {}: {source}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// CRIU could not be spoken to, or broke its protocol, or died.
    #[error("CRIU did not answer as expected while it should {action}: {reason}")]
    Protocol {
        /// What it was asked for, as a verb.
        action: &'static str,
        /// What happened, with what CRIU printed, if anything.
        reason: String,
    },
    /// gpucr was asked to end. CRIU has taken back what it had done.
    #[error("interrupted")]
    Interrupted,
    /// gpucr was asked to end, and CRIU does not answer. It has processes in its hands still.
    #[error("CRIU (process {pid}) does not answer, and has not let go of the program")]
    Stuck {
        /// CRIU.
        pid: u32,
    },
    /// The memory of a process could not be brought in.
    #[error("cannot bring the memory of a restored process in: {source}")]
    Memory {
        /// What happened.
        source: io::Error,
    },
    /// CRIU refused or failed.
    #[error("CRIU could not {action}{}", show_lines(errors))]
    Failed {
        /// What it was asked for, as a verb.
        action: &'static str,
        /// The error lines of its log, as they are; the first are the cause, as a rule.
        errors: Vec<String>,
        /// What would help, as far as the lines tell.
        hints: Vec<Hint>,
    },
}

fn show_lines(lines: &[String]) -> String {
    if lines.is_empty() {
        return String::from(" and gave no reason");
    }
    lines.iter().fold(String::from(":"), |text, line| text + "\n  " + line)
}

impl CriuError {
    /// Whether this host has no CRIU that can be used, as opposed to a dump or restore that
    /// failed.
    pub fn is_of_host(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::TooOld { .. } | Self::Run { .. })
    }

    /// Whether CRIU's log names this cause.
    pub fn has(&self, hint: Hint) -> bool {
        matches!(self, Self::Failed { hints, .. } if hints.contains(&hint))
    }
}
