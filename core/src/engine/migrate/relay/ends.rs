//! The ends of the pipes, and of the terminal, that a program has as standard streams, held at the source.
//!
//! Each is opened anew, so that it need not wait, whatever the program's own do. While one is held, whoever writes to
//! the program's input finds a reader, and whoever reads its output finds no end, though the program has ended here.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::engine::error::Error;
use crate::engine::restore::stdio::{self, Found};
use crate::host::process::files;
use crate::image::{Process, Stdio};

/// The ends, and of which pipes they are.
#[derive(Debug, Default)]
pub(in crate::engine::migrate) struct Ends {
    found: Found,
    /// None where there is nothing, or nobody is at its other end any more.
    pub(super) ends: [Option<OwnedFd>; 4],
}

impl Ends {
    /// Opens those of the processes, which run.
    ///
    /// # Errors
    /// They have pipes that cannot be told apart, or cannot be opened.
    pub(in crate::engine::migrate) fn open(processes: &[Process]) -> Result<Self, Error> {
        let streams = processes.iter().map(|process| &process.stdio);
        let found = stdio::found(streams, [false; 3]).map_err(|why| Error::NotRelayed { why })?;
        let mut ends = [None, None, None, None];
        for (number, pipe) in found.pipes.iter().enumerate() {
            if let Some(inode) = pipe {
                let is_it =
                    |stream: &Stdio| matches!(stream, Stdio::Pipe { inode: own } if own == inode);
                ends[number] = open(processes, [number].as_slice(), &is_it)?;
            }
        }
        if found.terminal.is_some() {
            let is_it = |stream: &Stdio| matches!(stream, Stdio::Terminal { .. });
            ends[3] = open(processes, &[1, 2, 0], &is_it)?;
        }
        Ok(Self { found, ends })
    }

    /// These.
    #[cfg(test)]
    pub(super) fn of(found: Found, ends: [Option<OwnedFd>; 4]) -> Self {
        Self { found, ends }
    }

    /// What they are of.
    pub(in crate::engine::migrate) fn found(&self) -> Found {
        self.found
    }

    /// Checks that the processes with these pids, which are frozen, have the same still.
    ///
    /// # Errors
    /// The program has changed its standard streams.
    pub(in crate::engine::migrate) fn check(&self, pids: &[u32]) -> Result<(), Error> {
        let inner: BTreeSet<u64> = files::inner_pipes(pids.iter().copied());
        let streams: Vec<[Stdio; 3]> = pids.iter().map(|pid| files::stdio(*pid, &inner)).collect();
        match stdio::found(streams.iter(), [false; 3]) {
            Ok(found) if found == self.found => Ok(()),
            _ => Err(Error::NotRelayed { why: "it has changed its standard streams".into() }),
        }
    }
}

/// Opens the first of these streams that is such a thing in one of the processes.
fn open(
    processes: &[Process],
    numbers: &[usize],
    is_it: &dyn Fn(&Stdio) -> bool,
) -> Result<Option<OwnedFd>, Error> {
    let has = |process: &Process| numbers.iter().find(|number| is_it(&process.stdio[**number]));
    let found = processes.iter().find_map(|process| Some((process, *has(process)?)));
    let Some((process, number)) = found else { return Ok(None) };
    let pid = process.pid;
    let path = PathBuf::from(format!("/proc/{pid}/fd/{number}"));
    let failed = |source: std::io::Error| Error::Io {
        what: format!("cannot open standard stream {number} of process {pid}"),
        source,
    };
    let is_input = numbers == [0];
    let access = if is_input { OFlags::RDONLY } else { OFlags::WRONLY };
    let flags = access | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let end = match rustix::fs::open(&path, flags, Mode::empty()) {
        // Nobody reads what the program writes, or the terminal is closed.
        Err(Errno::NXIO | Errno::IO) => return Ok(None),
        end => end.map_err(|error| failed(error.into()))?,
    };
    let stat = rustix::fs::fstat(&end).map_err(|error| failed(error.into()))?;
    let is_same = match &process.stdio[number] {
        Stdio::Pipe { inode } => {
            FileType::from_raw_mode(stat.st_mode) == FileType::Fifo && stat.st_ino == *inode
        }
        Stdio::Terminal { rdev, .. } => stat.st_rdev == *rdev,
        _ => false,
    };
    match is_same {
        true => Ok(Some(end)),
        false => Err(Error::NotRelayed { why: "it has changed its standard streams".into() }),
    }
}
