//! A pid namespace for one restored program, so that its pids are free there whatever runs outside; and the way
//! into it for a dump.
//!
//! The first process of the namespace is a gpucr, which makes the restore and then stays as what every
//! namespace needs: the process that waits for those whose parents have ended. If it dies the kernel
//! ends everything in the namespace.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use crate::image::Manifest;

/// The lowest pid that the kernel gives again when it has come to the end.
const FIRST: u32 = 300;
const HIGHEST: &str = "/proc/sys/kernel/pid_max";
const LAST: &str = "/proc/sys/kernel/ns_last_pid";

/// Starts a process as the first of a new pid namespace, and in a session of its own. It dies with the
/// calling thread, until it says [`outlive`].
///
/// # Errors
/// This user may not make namespaces, or the program cannot be started.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    // SAFETY: between fork and exec only the system calls prctl and setsid are made.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            rustix::process::setsid()?;
            Ok(())
        });
    }
    let own = File::open("/proc/self/ns/pid")?;
    // SAFETY: it affects only which namespace the children of this thread live in, and only up to
    // the end of this function.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }?;
    let child = command.spawn();
    let kind = Some(LinkNameSpaceType::ProcessID);
    rustix::thread::move_into_link_name_space(own.as_fd(), kind)?;
    child
}

/// The pid that process `pid` has in a pid namespace of its own, if gpucr can [go](spawn_in) there and find the
/// same files: not in a container with another root directory, nor where another user may mount.
pub fn inner_pid(pid: u32) -> Option<u32> {
    let own = gpucr_wire::pid_namespace(std::process::id()).ok()?;
    if gpucr_wire::pid_namespace(pid).ok()? == own {
        return None;
    }
    let root = |of: &str| std::fs::metadata(format!("/proc/{of}/root/")).ok().map(|it| id(&it));
    let ours = root("self")?;
    if ours != root(&pid.to_string())? {
        return None;
    }
    // It may have changed its root, to a place where this one is mounted: gpucr would be at that of its mounts.
    if root_of_mounts(&of(pid, "mnt").ok()?).ok()? != ours {
        return None;
    }
    // What is mounted there is executed by gpucr: only who could mount it here may have done so.
    if !["pid", "mnt"].iter().all(|kind| is_of_own_users(pid, kind)) {
        return None;
    }
    let status = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?.status().ok()?;
    u32::try_from(*status.nspid?.last()?).ok()
}

/// Whether a namespace of process `pid` belongs to the same user namespace as this process, so that nobody has power
/// over it who has none here. Any user can make namespaces that belong to a user namespace of their own.
fn is_of_own_users(pid: u32, kind: &str) -> bool {
    /// `NS_GET_USERNS` of ioctl_ns(2).
    const OWNER: libc::Ioctl = 0xb701;
    let Ok(namespace) = of(pid, kind) else { return false };
    // SAFETY: it takes no argument, and gives a new descriptor.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), OWNER) };
    if owner < 0 {
        return false;
    }
    // SAFETY: just made, and nobody else knows it.
    let owner = unsafe { File::from_raw_fd(owner) };
    let own = std::fs::metadata("/proc/self/ns/user").map(|meta| id(&meta)).ok();
    own.is_some() && owner.metadata().map(|meta| id(&meta)).ok() == own
}

/// A namespace of process `pid`.
fn of(pid: u32, kind: &str) -> io::Result<File> {
    File::open(format!("/proc/{pid}/ns/{kind}"))
}

fn id(meta: &std::fs::Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// The root directory, by device and number, of whoever goes into a mount namespace, whatever root others there have. A
/// thread of its own goes there.
fn root_of_mounts(namespace: &File) -> io::Result<(u64, u64)> {
    let visit = || {
        // SAFETY: this thread opens nothing, and ends here: nobody sees its directories but itself.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
        root_after_entering(namespace.as_fd())
    };
    std::thread::scope(|scope| {
        let visitor = std::thread::Builder::new().spawn_scoped(scope, visit)?;
        visitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Moves the calling thread, which shares its directories with no other, into a mount namespace, and says what its root is
/// then. Makes system calls alone.
fn root_after_entering(mounts: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    rustix::thread::move_into_link_name_space(mounts, Some(LinkNameSpaceType::Mount))?;
    let root = rustix::fs::stat(c"/")?;
    Ok((root.st_dev, root.st_ino))
}

/// Starts a process in the pid namespace of process `pid`, with that one's mounts and this process's directory. If the
/// calling thread ends, it is asked to end too.
///
/// # Errors
/// This user may not go there; the root directory there is another one than here, so that what is executed there may be
/// anything (`EXDEV`); the directory is not there; the program cannot be started.
pub fn spawn_in(pid: u32, command: &mut Command) -> io::Result<Child> {
    let (own, pids) = (File::open("/proc/self/ns/pid")?, of(pid, "pid")?);
    let (mounts, root) = (of(pid, "mnt")?, id(&std::fs::metadata("/")?));
    let directory = CString::new(std::env::current_dir()?.into_os_string().into_vec())?;
    // SAFETY: between fork and exec only the system calls prctl, setns, stat and chdir are made.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            if root_after_entering(mounts.as_fd())? != root {
                return Err(rustix::io::Errno::XDEV.into());
            }
            Ok(rustix::process::chdir(directory.as_c_str())?)
        });
    }
    let kind = Some(LinkNameSpaceType::ProcessID);
    rustix::thread::move_into_link_name_space(pids.as_fd(), kind)?;
    let child = command.spawn();
    rustix::thread::move_into_link_name_space(own.as_fd(), kind)?;
    child
}

/// Lets this process live on when the one that spawned it dies.
///
/// # Errors
/// None that the kernel documents.
pub fn outlive() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(None)?)
}

/// Makes the first process of a namespace at home there: it sees its own `/proc`, and the pids that come
/// next begin after `last`, or [are not low](leave_low_pids).
///
/// # Errors
/// This user may not mount.
pub fn settle(last: Option<u32>) -> io::Result<()> {
    // SAFETY: no other thread of this process shares anything of its mounts.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // What is mounted outside later is seen here too, and not the other way round.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", propagation)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    rustix::mount::mount("proc", "/proc", "proc", flags, None)?;
    begin_after(last.unwrap_or(FIRST - 1))
}

/// Has this namespace's next process get a pid that none of its first ones has: what is to be restored with its pids begins
/// there, so that whoever restores it, early in another namespace, has others.
///
/// # Errors
/// This user may not choose pids, or `/proc/sys` cannot be written.
pub fn leave_low_pids() -> io::Result<()> {
    begin_after(FIRST - 1)
}

/// Has this namespace's next process get the pid behind `last`, if that is free.
///
/// # Errors
/// This user may not choose pids, or `/proc/sys` cannot be written.
pub fn begin_after(last: u32) -> io::Result<()> {
    std::fs::write(LAST, last.to_string())
}

/// After which pid there are the most that no process or thread of the image has: pids for what makes
/// the restore.
///
/// # Errors
/// `/proc` cannot be read.
pub fn last_pid_for(manifest: &Manifest) -> io::Result<u32> {
    let highest = std::fs::read_to_string(HIGHEST)?;
    let highest = highest.trim().parse().map_err(|_| io::ErrorKind::InvalidData)?;
    Ok(largest_gap(&manifest.thread_ids(), highest))
}

/// The number before the most free ones, below `highest`.
fn largest_gap(taken: &[u32], highest: u32) -> u32 {
    let mut taken: Vec<u32> =
        taken.iter().copied().filter(|pid| (FIRST..highest).contains(pid)).collect();
    taken.extend([FIRST - 1, highest]);
    taken.sort_unstable();
    let gaps = taken.windows(2).map(|pair| (pair[1] - pair[0], pair[0]));
    gaps.max_by_key(|(size, _)| *size).map_or(FIRST - 1, |(_, before)| before)
}

/// The pid that a process has here, of which the pid in the namespace of process `first` is known.
pub fn outer_pid(first: u32, inner: u32) -> Option<u32> {
    let namespace = gpucr_wire::pid_namespace(first).ok()?;
    let processes = procfs::process::all_processes_with_root(Path::new("/proc")).ok()?;
    processes.filter_map(Result::ok).find_map(|process| {
        let pids = process.status().ok()?.nspid?;
        let found = pids.last() == Some(&(inner as i32))
            && gpucr_wire::pid_namespace(process.pid as u32).ok() == Some(namespace);
        found.then_some(process.pid as u32)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helpers_get_pids_where_the_image_has_none() {
        assert_eq!(largest_gap(&[], 4_194_304), FIRST - 1);
        assert_eq!(largest_gap(&[1, 7, 12], 32_768), FIRST - 1);
        assert_eq!(largest_gap(&[400, 401, 402], 32_768), 402);
        assert_eq!(largest_gap(&[30_000, 30_001], 32_768), FIRST - 1);
        assert_eq!(largest_gap(&[1000, 31_000, 5_000_000], 32_768), 1000);
    }
}
