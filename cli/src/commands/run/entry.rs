//! `gpucr run` as the entry point of a container, or anywhere else where the program would be the first process of its pid
//! namespace, or in a session whose leader is outside of that: CRIU cannot save such a session, and no restore can
//! make a first process, since that one makes the restore.

use std::fs::DirEntry;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use gpucr_core::{Error, namespace};
use rustix::fs::{FileType, Mode, OFlags, SeekFrom};
use rustix::io::FdFlags;
use rustix::process::Pid;

use super::life::cannot_run;
use crate::commands::inside::again;
use crate::commands::restore::End;
use crate::commands::restore::namespace::reap;
use crate::commands::{Outcome, io_error};
use crate::failure::CliError;
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

/// Runs this command again as the first process of a pid namespace, passes signals on to it, and ends with its exit status.
pub(super) fn in_new_namespace() -> Outcome {
    if !rustix::process::geteuid().is_root() {
        return Err(CliError::from(Error::NotRoot).state("The program was not started."));
    }
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let mut child = namespace::spawn(&mut again("run", &["--inside".as_ref()]))
        .map_err(io_error("cannot make a pid namespace for the program"))?;
    signals.pass_to_init(child.id());
    let status = child.wait();
    signals.keep();
    Ok(End::from(status.map_err(io_error("cannot wait for the program"))?).exit_code())
}

/// There, before anything else.
///
/// # Errors
/// `/proc` cannot be mounted.
pub(super) fn settle() -> Result<(), CliError> {
    namespace::settle(None).map_err(io_error("cannot settle in the new pid namespace"))?;
    let inherited = std::fs::read_dir("/proc/self/fd").map_err(io_error("cannot read /proc"))?;
    let numbers = inherited.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    for number in numbers.collect::<Vec<i32>>() {
        if let Err(error) = open_anew(number) {
            // A dump says of which file that is.
            tracing::warn!(%error, number, "stays as it was opened outside");
        }
    }
    Ok(())
}

/// Opens what the program inherits by the mounts of this namespace, if it is a standard stream that is a file, or
/// `/dev/null`. A pipe, a socket or a terminal stays what it is, and other files, which may be locked.
fn open_anew(number: i32) -> io::Result<()> {
    // SAFETY: it is used for these calls only. Where it is closed they fail.
    let old = unsafe { BorrowedFd::borrow_raw(number) };
    let path = std::fs::read_link(format!("/proc/self/fd/{number}"))?;
    let meta = rustix::fs::fstat(old)?;
    let is_file = FileType::from_raw_mode(meta.st_mode) == FileType::RegularFile;
    let is_wanted = if is_file { number < 3 } else { path == Path::new("/dev/null") };
    if !is_wanted || rustix::io::fcntl_getfd(old)?.contains(FdFlags::CLOEXEC) {
        return Ok(());
    }
    let mode = rustix::fs::fcntl_getfl(old)? & OFlags::RWMODE;
    let append = if is_file && mode != OFlags::RDONLY { OFlags::APPEND } else { OFlags::empty() };
    let flags = mode | append | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NOCTTY;
    let new = rustix::fs::open(&path, flags, Mode::empty())?;
    let found = rustix::fs::fstat(&new)?;
    if (found.st_dev, found.st_ino) != (meta.st_dev, meta.st_ino) {
        return Err(io::ErrorKind::NotFound.into());
    }
    if append.is_empty() && is_file {
        rustix::fs::seek(&new, SeekFrom::Start(rustix::fs::tell(old)?))?;
    }
    // SAFETY: it is open, and what it was nobody here holds: it was inherited, for the program.
    match unsafe { libc::dup2(new.as_raw_fd(), number) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Has the program begin with a pid that whoever restores it in another namespace does not have.
pub(super) fn leave_low_pids() {
    if std::process::id() == 1
        && let Err(error) = namespace::leave_low_pids()
    {
        tracing::warn!(%error, "the program may have a pid that is in use where it is restored");
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

/// Has signals to this thread, and to what it starts from now on, wait. Gives which have waited so far.
fn hold_signals() -> libc::sigset_t {
    // SAFETY: a set is made, filled and used; the call fills the other.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        before
    }
}

/// Has these signals to this thread wait, and no others.
fn hold_only(signals: &libc::sigset_t) {
    // SAFETY: a set is used that the kernel has filled. No lock is taken and nothing is allocated, so this may be called
    // between fork and exec.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, signals, std::ptr::null_mut()) };
}

/// Starts the program in a session of its own, passes signals on to it, waits for it and for whatever loses its parents,
/// and ends with its exit status. If this is the first process of a namespace the kernel ends what is left then.
pub(super) fn stay(mut command: Command) -> Outcome {
    // What comes before there is somebody to pass it on to waits.
    let held_before = hold_signals();
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    in_own_session(&mut command);
    // SAFETY: it may be called between fork and exec. A program keeps the signals that wait across exec.
    unsafe {
        command.pre_exec(move || {
            hold_only(&held_before);
            Ok(())
        });
    }
    leave_low_pids();
    let child = command.spawn().map_err(|error| cannot_run(&command, &error))?;
    let root = Pid::from_child(&child);
    signals.pass_to(child.id());
    hold_only(&held_before);
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
