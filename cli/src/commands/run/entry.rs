//! `gpucr run` as the entry point of a container, or anywhere else where the program would be the first process of its pid
//! namespace, or in a session whose leader is outside of that: CRIU cannot save such a session, and no restore can
//! make a first process, since that one makes the restore.

use std::fs::DirEntry;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::life::cannot_run;
use crate::commands::restore::namespace::reap;
use crate::commands::{Outcome, io_error};
use crate::signals;

/// How long a dump that has ended the program may take to say so, and how often it is looked for.
const LAST_WORDS: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);

/// Whether the program needs a session of its own.
pub(super) fn is_needed() -> bool {
    // SAFETY: it only asks. The kernel says 0 of a leader that has no pid here, which is no `Pid` of rustix.
    std::process::id() == 1 || unsafe { libc::getsid(0) } == 0
}

/// Makes this process the leader of a session, so that it can become the program. Whether it can: not the first process
/// of a namespace, which stays, and not the leader of a process group.
pub(super) fn lead() -> bool {
    std::process::id() != 1 && rustix::process::setsid().is_ok()
}

/// Has a command be started in a session of its own.
pub(super) fn in_own_session(command: &mut Command) {
    // SAFETY: between fork and exec only the system call setsid is made.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            Ok(())
        });
    }
}

/// A gpucr that has dumped the program, and so ended it, still has something to say: with the first process the kernel
/// would end it too.
fn let_dump_end() {
    let end = Instant::now() + LAST_WORDS;
    let is_dump = |entry: &DirEntry| -> Option<bool> {
        let dir = entry.path();
        let file = |path: &Path| path.metadata().map(|meta| (meta.dev(), meta.ino())).ok();
        let is_gpucr = file(&dir.join("exe"))? == file(Path::new("/proc/self/exe"))?;
        let command = std::fs::read(dir.join("cmdline")).ok()?;
        let word = command.split(|byte| *byte == 0).nth(1)?;
        Some(is_gpucr && [&b"dump"[..], b"migrate"].contains(&word))
    };
    let dumps = || {
        let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        all.into_iter().any(|entry| is_dump(&entry).unwrap_or(false))
    };
    while std::process::id() == 1 && dumps() && Instant::now() < end {
        std::thread::sleep(POLL);
    }
}

/// Starts the program in a session of its own, passes signals on to it, waits for it and for whatever loses its parents,
/// and ends with its exit status. If this is the first process of a namespace the kernel ends what is left then.
pub(super) fn stay(mut command: Command) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    in_own_session(&mut command);
    let child = command.spawn().map_err(|error| cannot_run(&command, &error))?;
    let root = Pid::from_child(&child);
    signals.pass_to(child.id());
    loop {
        match reap(Some(root), &signals).map_err(io_error("cannot wait for the program"))? {
            Some((pid, end)) if pid == root => {
                if end.signal == Some(libc::SIGKILL) {
                    let_dump_end();
                }
                return Ok(end.exit_code());
            }
            Some(_) => {}
            None => {
                return Err(io_error("cannot wait for the program")(
                    std::io::ErrorKind::NotFound.into(),
                ));
            }
        }
    }
}
