//! A pid namespace for one restored program, so that its pids are free there whatever runs outside; and the way
//! into it for a dump.
//!
//! The first process of the namespace is a gpucr, which makes the restore and then stays as what every
//! namespace needs: the process that waits for those whose parents have ended. If it dies the kernel
//! ends everything in the namespace.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

use super::container::has_own_root;
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

/// How gpucr gets to a process in a pid namespace of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// The process.
    pid: u32,
    /// Its pid there.
    pub inner: u32,
    /// Whether gpucr takes its mounts too. In a container it keeps its own, and sees only the processes.
    takes_mounts: bool,
}

impl Entry {
    /// Whether it leads into a container.
    pub fn is_of_container(&self) -> bool {
        !self.takes_mounts
    }

    /// The first process of the namespace, with which the kernel ends all others there.
    pub fn first_process(&self) -> Option<u32> {
        outer_pid(self.pid, 1)
    }
}

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
}

/// How gpucr can [go](spawn_in) to process `pid`, if that is in a pid namespace of its own and gpucr can go there: not where
/// another user may mount what gpucr would execute, nor to users of its own.
///
/// # Errors
/// It would not be safe there.
pub fn entry(pid: u32) -> Result<Option<Entry>, EntryError> {
    let Some(entry) = possible_entry(pid) else { return Ok(None) };
    match may_trace(pid).filter(|_| !entry.takes_mounts) {
        Some(by) => Err(EntryError::MayTrace { pid, by }),
        None => Ok(Some(entry)),
    }
}

fn possible_entry(pid: u32) -> Option<Entry> {
    let own = gpucr_wire::pid_namespace(std::process::id()).ok()?;
    if gpucr_wire::pid_namespace(pid).ok()? == own {
        return None;
    }
    let takes_mounts = !has_own_root(pid)?;
    // What is mounted there is executed by gpucr: only who could mount it here may have done so.
    let mut kinds = ["pid", "mnt"].iter().take(if takes_mounts { 2 } else { 1 });
    if !kinds.all(|kind| is_of_own_users(pid, kind)) || !has_own_users(pid) {
        return None;
    }
    let status = procfs::process::Process::new(i32::try_from(pid).ok()?).ok()?.status().ok()?;
    let inner = u32::try_from(*status.nspid?.last()?).ok()?;
    Some(Entry { pid, inner, takes_mounts })
}

/// A process in the pid namespace of process `pid` that may trace others without being root of the host in all but name: it
/// could take over a gpucr that comes there, which is one.
fn may_trace(pid: u32) -> Option<u32> {
    /// Of capabilities(7).
    const SYS_PTRACE: u64 = 1 << 19;
    const SYS_ADMIN: u64 = 1 << 21;
    let namespace = gpucr_wire::pid_namespace(pid).ok()?;
    let all = procfs::process::all_processes().ok()?.filter_map(Result::ok);
    let mut pids = all.filter_map(|process| Some((u32::try_from(process.pid).ok()?, process)));
    pids.find_map(|(pid, process)| {
        if gpucr_wire::pid_namespace(pid).ok()? != namespace || !has_own_users(pid) {
            return None;
        }
        // What it has not now it may get by what it executes.
        let all = process.status().ok()?.capbnd?;
        (all & SYS_PTRACE != 0 && all & SYS_ADMIN == 0).then_some(pid)
    })
}

/// Whether a process is in the user namespace of this one.
fn has_own_users(pid: u32) -> bool {
    let of = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/user")).ok();
    of("self").is_some_and(|own| of(&pid.to_string()) == Some(own))
}

/// Whether a namespace of process `pid` belongs to the same user namespace as this process, so that nobody has power
/// over it who has none here. Any user can make namespaces that belong to a user namespace of their own.
fn is_of_own_users(pid: u32, kind: &str) -> bool {
    /// `NS_GET_USERNS` of ioctl_ns(2).
    const OWNER: libc::Ioctl = 0xb701;
    let Ok(namespace) = File::open(format!("/proc/{pid}/ns/{kind}")) else { return false };
    // SAFETY: it takes no argument, and gives a new descriptor.
    let owner = unsafe { libc::ioctl(namespace.as_raw_fd(), OWNER) };
    if owner < 0 {
        return false;
    }
    // SAFETY: just made, and nobody else knows it.
    let owner = unsafe { File::from_raw_fd(owner) };
    let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    let own = std::fs::metadata("/proc/self/ns/user").map(id).ok();
    own.is_some() && owner.metadata().map(id).ok() == own
}

/// Starts a process in a pid namespace, with the mounts there or, in a container, this process's own, but for a `/proc` that
/// shows the processes there; with this process's directory. If the calling thread ends, it is asked to end too.
///
/// # Errors
/// This user may not go there; the directory is not there; the program cannot be started.
pub fn spawn_in(entry: Entry, command: &mut Command) -> io::Result<Child> {
    let Entry { pid, takes_mounts, .. } = entry;
    let of = |pid: &str, kind: &str| File::open(format!("/proc/{pid}/ns/{kind}"));
    let (own, pids) = (of("self", "pid")?, of(&pid.to_string(), "pid")?);
    let mounts = takes_mounts.then(|| of(&pid.to_string(), "mnt")).transpose()?;
    let directory = CString::new(std::env::current_dir()?.into_os_string().into_vec())?;
    // SAFETY: between fork and exec only the system calls prctl, setns and chdir are made, or unshare and mount instead of
    // setns; paths are constants.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            match &mounts {
                Some(mounts) => {
                    let kind = Some(LinkNameSpaceType::Mount);
                    rustix::thread::move_into_link_name_space(mounts.as_fd(), kind)?;
                }
                None => own_mounts()?,
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
    own_mounts()?;
    begin_after(last.unwrap_or(FIRST - 1))
}

/// Gives this process mounts of its own, with a `/proc` of its pid namespace. Makes system calls alone.
fn own_mounts() -> io::Result<()> {
    // SAFETY: no other thread of this process shares anything of its mounts.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // What is mounted outside later is seen here too, and not the other way round.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change(c"/", propagation)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount(c"proc", c"/proc", c"proc", flags, None)?)
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
