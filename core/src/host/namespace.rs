//! A pid namespace for one restored program, so that its pids are free there whatever runs outside; and the way
//! into it for a dump.
//!
//! The first process of the namespace is a gpucr, which makes the restore and then stays as what every
//! namespace needs: the process that waits for those whose parents have ended. If it dies the kernel
//! ends everything in the namespace.

mod entry;
mod pids;
mod process;
mod refusal;
mod tracers;

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::process::Signal;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

pub use entry::{Entry, entry, spawn_in};
pub use pids::outer_pid;
pub use process::HeldProcess;
pub use refusal::EntryError;

use super::ns::own_mounts;
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
