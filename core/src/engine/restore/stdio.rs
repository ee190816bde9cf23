//! The standard streams of a restored program.
//!
//! A file is opened again by CRIU. A pipe that led out of the process tree has nobody at its
//! other end any more: in its place the program gets the stream of the same number of the
//! restoring command, so that its output goes where the user expects it, or a file that the user has named for it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use rustix::termios::{OptionalActions, OutputModes};

use crate::engine::error::Error;
use crate::host::criu::InheritFd;
use crate::host::process::tree::raw_pid;
use crate::image::{Process, Stdio};

/// Where a program's standard output and standard error go, if they were pipes.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// Where its standard input comes from, if that was a pipe; none takes that of this process, or `/dev/null` for a
    /// program that is detached.
    pub stdin: Option<Arc<File>>,
    /// Its standard output; none takes that of this process, or `/dev/null` for a program that is detached.
    pub stdout: Option<Arc<File>>,
    /// Its standard error.
    pub stderr: Option<Arc<File>>,
    /// Whether its terminal stands in for another, which processes what the program writes there.
    pub stands_in: bool,
}

/// Files that the user has named for a program's standard output and standard error, if they were pipes.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct OutputFiles {
    /// For its standard output; none if it is to go nowhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdout: Option<PathBuf>,
    /// For its standard error.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stderr: Option<PathBuf>,
}

impl OutputFiles {
    /// Whether none is named.
    pub fn is_empty(&self) -> bool {
        self.stdout.is_none() && self.stderr.is_none()
    }

    pub(in crate::engine) fn named(&self) -> Named {
        [false, self.stdout.is_some(), self.stderr.is_some()]
    }
}

/// Which standard streams have a place that somebody has named for them, if they were pipes.
pub(in crate::engine) type Named = [bool; 3];

/// What each stream of a program is called.
const NAMES: [&str; 3] = ["stdin", "stdout", "stderr"];

impl Outputs {
    pub(in crate::engine) fn named(&self) -> Named {
        [0, 1, 2].map(|number| self.of(number).is_some())
    }

    fn of(&self, number: usize) -> Option<&Arc<File>> {
        match number {
            0 => self.stdin.as_ref(),
            1 => self.stdout.as_ref(),
            2 => self.stderr.as_ref(),
            _ => None,
        }
    }
}

/// The pipes that the processes had as standard streams, each by its inode: the numbers of these streams.
fn pipes(processes: &[Process]) -> BTreeMap<u64, Vec<usize>> {
    pipes_of(processes.iter().map(|process| &process.stdio))
}

fn pipes_of<'s>(streams: impl Iterator<Item = &'s [Stdio; 3]>) -> BTreeMap<u64, Vec<usize>> {
    let mut pipes: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for streams in streams {
        for (number, stream) in streams.iter().enumerate() {
            if let Stdio::Pipe { inode } = stream {
                pipes.entry(*inode).or_default().push(number);
            }
        }
    }
    pipes
}

/// What all processes of a program have as standard streams, as far as that can be relayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::engine) struct Found {
    /// The pipe that is each of them, by its inode. A pipe that is both outputs is the first of them.
    pub(in crate::engine) pipes: [Option<u64>; 3],
    /// The terminal that is any of them, by its number.
    pub(in crate::engine) terminal: Option<u64>,
}

/// Finds the pipes and the terminal that the processes with these standard streams have, but for pipes that have a place
/// which somebody has `named`.
///
/// # Errors
/// They have several as one stream, or a pipe for input and output: what reaches one place cannot be told apart any more.
pub(in crate::engine) fn found<'s>(
    streams: impl Iterator<Item = &'s [Stdio; 3]> + Clone,
    named: Named,
) -> Result<Found, String> {
    let mut found = Found::default();
    for (inode, numbers) in pipes_of(streams.clone()) {
        if numbers.iter().any(|number| named[*number]) {
            continue;
        }
        let first = numbers.iter().copied().min().unwrap_or(1);
        if first == 0 && numbers.iter().any(|number| *number != 0) {
            return Err("a pipe is both its input and its output".into());
        }
        if found.pipes[first].replace(inode).is_some() {
            return Err(format!("its processes have different pipes as {}", NAMES[first]));
        }
    }
    for stream in streams.flatten() {
        if let Stdio::Terminal { rdev, .. } = stream
            && found.terminal.replace(*rdev).is_some_and(|other| other != *rdev)
        {
            return Err("it has several terminals".into());
        }
    }
    Ok(found)
}

/// Checks that the streams for which the user has named files were pipes.
///
/// # Errors
/// [`Error::NoPipe`].
pub(in crate::engine) fn check(processes: &[Process], named: Named) -> Result<(), Error> {
    let pipes = pipes(processes);
    for number in [0, 1, 2] {
        if named[number] && !pipes.values().any(|numbers| numbers.contains(&number)) {
            let now = match &processes[0].stdio[number] {
                Stdio::File { path } => path.display().to_string(),
                Stdio::Terminal { path, .. } => format!("the terminal {}", path.display()),
                Stdio::Closed => "closed".to_owned(),
                Stdio::DevNull => "/dev/null".to_owned(),
                Stdio::Pipe { .. } | Stdio::Other { .. } => "something else".to_owned(),
            };
            return Err(Error::NoPipe { stream: NAMES[number], now });
        }
    }
    Ok(())
}

/// The outputs of a program that go to `/dev/null` if it is detached, though it had them read.
pub(in crate::engine) fn lost(processes: &[Process], named: Named) -> Vec<&'static str> {
    let mut lost = [false; 3];
    for numbers in pipes(processes).values() {
        if numbers.iter().all(|number| !named[*number]) {
            numbers.iter().for_each(|number| lost[*number] = true);
        }
    }
    [1, 2].into_iter().filter(|number| lost[*number]).map(|number| NAMES[number]).collect()
}

/// What CRIU is to put in place of the pipes that the processes had as standard streams. With
/// `detached` that is `/dev/null`, since this command ends and takes its streams with it, or what `outputs` name.
pub(super) fn inherited(
    processes: &[Process],
    detached: bool,
    outputs: &Outputs,
) -> Result<Vec<InheritFd>, Error> {
    let failed = |source| Error::Io { what: "cannot pass a standard stream on".into(), source };
    pipes(processes)
        .into_iter()
        .map(|(inode, numbers)| {
            let named = numbers.iter().find_map(|number| outputs.of(*number));
            let first = numbers.first().copied().unwrap_or(1);
            let fd = match named {
                Some(file) => file.as_fd().try_clone_to_owned(),
                None => stream(first, detached),
            };
            Ok(InheritFd { key: format!("pipe:[{inode}]"), fd: fd.map_err(failed)? })
        })
        .collect()
}

/// Has the processes, which do not run yet, add to the ends of files that they got in place of pipes: CRIU has opened
/// these anew, to be written from their beginnings.
pub(super) fn append(processes: &[Process]) {
    for process in processes {
        for (number, stream) in process.stdio.iter().enumerate() {
            if matches!(stream, Stdio::Pipe { .. })
                && let Err(error) = append_to(process.pid, number as i32)
            {
                let (pid, stream) = (process.pid, NAMES[number]);
                tracing::warn!(%error, pid, stream, "it may write over what is in the file");
            }
        }
    }
}

fn append_to(pid: u32, number: i32) -> std::io::Result<()> {
    let file = stream_of(pid, number)?;
    if file.metadata()?.is_file() {
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags | OFlags::APPEND)?;
    }
    Ok(())
}

/// Has the terminal of the processes, which do not run yet, pass on what they write as it is, if it stands in for another:
/// that makes of it what it did before.
pub(super) fn pass_on_unprocessed(processes: &[Process], outputs: &Outputs) {
    if !outputs.stands_in {
        return;
    }
    for process in processes {
        let is_terminal = |number: &usize| matches!(process.stdio[*number], Stdio::Terminal { .. });
        let Some(number) = [0, 1, 2].iter().find(|number| is_terminal(number)) else { continue };
        if let Err(error) = unprocessed(process.pid, *number as i32) {
            tracing::warn!(%error, pid = process.pid, "what it writes to its terminal is processed twice");
        }
        return;
    }
}

fn unprocessed(pid: u32, number: i32) -> std::io::Result<()> {
    let terminal = stream_of(pid, number)?;
    let mut modes = rustix::termios::tcgetattr(&terminal)?;
    modes.output_modes.remove(OutputModes::OPOST);
    // SAFETY: sets are made and used; the mask is this thread's, and is put back. Without SIGTTOU a process that is not in
    // the foreground of its terminal, as this one by now, would be stopped here.
    unsafe {
        let (mut set, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGTTOU);
        libc::pthread_sigmask(libc::SIG_BLOCK, &set, &mut before);
        let done = rustix::termios::tcsetattr(&terminal, OptionalActions::Now, &modes);
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        Ok(done?)
    }
}

/// The same open file as that of the process.
fn stream_of(pid: u32, number: i32) -> std::io::Result<File> {
    let pid = raw_pid(pid).ok_or(std::io::ErrorKind::NotFound)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    Ok(File::from(pidfd_getfd(process, number, PidfdGetfdFlags::empty())?))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_reaches_one_place_can_be_told_apart_or_is_refused() {
        let pipe = |inode| Stdio::Pipe { inode };
        let terminal = |rdev| Stdio::Terminal { path: "/dev/pts/1".into(), rdev, dev: 1 };
        let named = |streams: &[[Stdio; 3]], named| found(streams.iter(), named);
        let found = |streams: &[[Stdio; 3]]| found(streams.iter(), [false; 3]);
        let both = [[pipe(1), pipe(2), pipe(2)], [Stdio::DevNull, pipe(2), terminal(5)]];
        let expected = Found { pipes: [Some(1), Some(2), None], terminal: Some(5) };
        assert_eq!(found(&both), Ok(expected));
        assert_eq!(found(&[]), Ok(Found::default()));
        // A pipe that is both outputs has another place if either is named.
        let expected = Found { pipes: [Some(1), None, None], terminal: Some(5) };
        assert_eq!(named(&both, [false, false, true]), Ok(expected));
        assert_eq!(named(&both, [false, true, false]), Ok(expected));
        for refused in [
            [[pipe(1), pipe(2), pipe(3)], [pipe(1), pipe(4), pipe(3)]],
            [[pipe(1), pipe(1), pipe(3)], [pipe(1), pipe(1), pipe(3)]],
            [[terminal(5), pipe(1), pipe(1)], [terminal(6), pipe(1), pipe(1)]],
        ] {
            assert!(found(&refused).is_err(), "{refused:?}");
        }
    }
}
