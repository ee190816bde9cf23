//! The standard streams of a restored program.
//!
//! A file is opened again by CRIU. A pipe that led out of the process tree has nobody at its
//! other end any more: in its place the program gets the stream of the same number of the
//! restoring command, so that its output goes where the user expects it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use crate::engine::error::Error;
use crate::host::criu::InheritFd;
use crate::image::{Process, Stdio};

/// What CRIU is to put in place of the pipes that the processes had as standard streams. With
/// `detached` that is `/dev/null`, since this command ends and takes its streams with it.
pub(super) fn inherited(processes: &[Process], detached: bool) -> Result<Vec<InheritFd>, Error> {
    let mut wanted: BTreeMap<u64, usize> = BTreeMap::new();
    for process in processes {
        for (number, stream) in process.stdio.iter().enumerate() {
            if let Stdio::Pipe { inode } = stream {
                wanted.entry(*inode).or_insert(number);
            }
        }
    }
    let failed = |source| Error::Io { what: "cannot pass a standard stream on".into(), source };
    wanted
        .into_iter()
        .map(|(inode, number)| {
            let fd = stream(number, detached).map_err(failed)?;
            Ok(InheritFd { key: format!("pipe:[{inode}]"), fd })
        })
        .collect()
}

fn stream(number: usize, detached: bool) -> std::io::Result<OwnedFd> {
    if detached {
        let null = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        return Ok(null.into());
    }
    match number {
        0 => std::io::stdin().as_fd().try_clone_to_owned(),
        1 => std::io::stdout().as_fd().try_clone_to_owned(),
        _ => std::io::stderr().as_fd().try_clone_to_owned(),
    }
}
