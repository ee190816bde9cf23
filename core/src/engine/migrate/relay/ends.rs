//! The ends of the pipes that a program has as standard streams, held at the source.
//!
//! Each is opened anew, so that it need not wait, whatever the program's own do. While one is held, whoever writes to
//! the program's input finds a reader, and whoever reads its output finds no end, though the program has ended here.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::engine::error::Error;
use crate::engine::restore::stdio;
use crate::host::process::files;
use crate::image::{Process, Stdio};

/// The ends, and of which pipes they are.
#[derive(Debug, Default)]
pub(in crate::engine::migrate) struct Ends {
    /// Inodes.
    pipes: [Option<u64>; 3],
    /// None where there is no pipe, or nobody is at its other end any more.
    pub(super) ends: [Option<OwnedFd>; 3],
}

impl Ends {
    /// Opens those of the processes, which run.
    ///
    /// # Errors
    /// They have pipes that cannot be told apart, or cannot be opened.
    pub(in crate::engine::migrate) fn open(processes: &[Process]) -> Result<Self, Error> {
        let streams = processes.iter().map(|process| &process.stdio);
        let pipes = stdio::relayed(streams).map_err(|why| Error::NotRelayed { why })?;
        let mut ends = [None, None, None];
        for (number, inode) in pipes.iter().enumerate() {
            if let Some(inode) = inode {
                ends[number] = open(processes, number, *inode)?;
            }
        }
        Ok(Self { pipes, ends })
    }

    /// These.
    #[cfg(test)]
    pub(super) fn of(pipes: [Option<u64>; 3], ends: [Option<OwnedFd>; 3]) -> Self {
        Self { pipes, ends }
    }

    /// Which pipes they are of.
    pub(in crate::engine::migrate) fn pipes(&self) -> [Option<u64>; 3] {
        self.pipes
    }

    /// Checks that the processes with these pids, which are frozen, have the same pipes still.
    ///
    /// # Errors
    /// The program has changed its standard streams.
    pub(in crate::engine::migrate) fn check(&self, pids: &[u32]) -> Result<(), Error> {
        let inner: BTreeSet<u64> = files::inner_pipes(pids.iter().copied());
        let streams: Vec<[Stdio; 3]> = pids.iter().map(|pid| files::stdio(*pid, &inner)).collect();
        match stdio::relayed(streams.iter()) {
            Ok(pipes) if pipes == self.pipes => Ok(()),
            _ => Err(Error::NotRelayed { why: "it has changed its standard streams".into() }),
        }
    }
}

/// Opens the end of a pipe that the processes have as the stream of this number.
fn open(processes: &[Process], number: usize, inode: u64) -> Result<Option<OwnedFd>, Error> {
    let has = |process: &&Process| matches!(process.stdio[number], Stdio::Pipe { inode: own } if own == inode);
    let process = processes.iter().find(has);
    let pid = process.map_or(0, |process| process.pid);
    let path = PathBuf::from(format!("/proc/{pid}/fd/{number}"));
    let failed = |source: std::io::Error| Error::Io {
        what: format!("cannot open standard stream {number} of process {pid}"),
        source,
    };
    let access = if number == 0 { OFlags::RDONLY } else { OFlags::WRONLY };
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let end = match rustix::fs::open(&path, flags, Mode::empty()) {
        // Nobody reads what the program writes.
        Err(Errno::NXIO) => return Ok(None),
        end => end.map_err(|error| failed(error.into()))?,
    };
    let stat = rustix::fs::fstat(&end).map_err(|error| failed(error.into()))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Fifo || stat.st_ino != inode {
        return Err(Error::NotRelayed { why: "it has changed its standard streams".into() });
    }
    Ok(Some(end))
}
