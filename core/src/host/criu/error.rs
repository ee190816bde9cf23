//! Why CRIU did not do what it was asked for, and what would help.

use std::io;
use std::path::PathBuf;

use super::version::{MIN_VERSION, Version};

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
    /// gpucr was asked to end, and CRIU does not answer. It still has processes in its hands.
    #[error("CRIU (process {pid}) does not answer, and has not let go of the program")]
    Stuck {
        /// CRIU.
        pid: u32,
    },
    /// The memory of a process could not be brought in.
    #[error("cannot load the memory of a restored process: {source}")]
    Memory {
        /// What happened.
        source: io::Error,
    },
    /// A process has changed memory that was not there yet in a way of which the kernel tells too little to bring it.
    #[error("a process changed its mappings while its memory was being loaded")]
    Untold,
    /// CRIU refused or failed.
    #[error("CRIU could not {action}{}", show_lines(errors))]
    Failed {
        /// What it was asked for, as a verb.
        action: &'static str,
        /// The error lines of its log, as they are; the first are the cause, as a rule.
        errors: Vec<String>,
        /// What would help, as far as the lines tell.
        hints: Vec<Hint>,
        /// Where its whole log is kept for a while.
        log: Option<PathBuf>,
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

/// What would let CRIU succeed, as far as its error lines tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hint {
    /// The program uses a terminal, or a session, that is not its own: `--shell-job`.
    ShellJob,
    /// The program has TCP connections: `--tcp-established` or `--tcp-close`.
    TcpEstablished,
    /// The program holds file locks: `--file-locks`.
    FileLocks,
    /// The program is connected to a Unix socket of a process outside: `--ext-unix-sk`.
    ExtUnixSk,
    /// A file that the program uses has another size or build id than at the dump, or is gone.
    FileChanged,
    /// A pid of the image is in use.
    PidInUse,
    /// A TCP or UDP port of the image is in use.
    PortInUse,
    /// A privilege is missing.
    Permission,
    /// A device or another file is open that CRIU cannot save.
    Device,
    /// An io_uring is open, which processes cannot hand to CRIU (Linux 6.7; an older one has CRIU refuse it as a device).
    IoUring,
    /// A file is open that was opened in another mount namespace.
    OtherMounts,
    /// A deleted file is larger than the limit: [`ghost_limit`](crate::host::criu::DumpOptions::ghost_limit).
    GhostLimit,
    /// The disk is full.
    NoSpace,
    /// A process had tried to connect to a socket of the program, and gone away before it was accepted.
    InFlight,
    /// There is no network to try TCP with, not even within the host.
    NoLoopback,
    /// The program has System V shared memory.
    SharedSegment,
    /// The program is to get this command's terminal, and there is none, or it is that of another session.
    NoTerminal,
    /// The program has its terminal open by the name `/dev/tty` alone.
    ControllingTerminal,
    /// There are not enough descriptors or pipes for memory that CRIU is to leave in the processes: it takes hold of
    /// all of it with pipes.
    Pipes,
}

impl Hint {
    /// The option that helps, where there is one.
    pub fn option(self) -> Option<&'static str> {
        match self {
            Self::ShellJob => Some("--shell-job"),
            Self::TcpEstablished => Some("--tcp-established"),
            Self::FileLocks => Some("--file-locks"),
            Self::ExtUnixSk => Some("--ext-unix-sk"),
            _ => None,
        }
    }
}
