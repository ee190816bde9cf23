//! With whom this process shares memory: what it is called, and who has opened memory of it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Mutex, OnceLock};

use gpucr_wire::peers::Identity;
use gpucr_wire::{Counts, Opener};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

use crate::resettable::Resettable;

/// A process that has blocks of this one open.
struct Peer {
    /// Its pid, as this process sees it; 0 if it does not.
    pid: u32,
    blocks: BTreeSet<u64>,
}

static IDENTITY: Resettable<OnceLock<Identity>> = Resettable::new(OnceLock::new());
static OPENERS: Resettable<Mutex<BTreeMap<Identity, Peer>>> =
    Resettable::new(Mutex::new(BTreeMap::new()));

/// What others call this process; random at the first call. None if the kernel has no random numbers.
pub(crate) fn identity() -> Option<Identity> {
    if let Some(known) = IDENTITY.get().get() {
        return Some(*known);
    }
    let mut random = [0; 16];
    let got = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty()).ok()?;
    (got == random.len()).then(|| *IDENTITY.get().get_or_init(|| random))
}

/// A process has opened a block of this one.
pub(crate) fn opened(opener: Identity, pid: u32, block: u64) {
    let mut openers = OPENERS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let peer = openers.entry(opener).or_insert_with(|| Peer { pid, blocks: BTreeSet::new() });
    peer.pid = pid;
    peer.blocks.insert(block);
}

/// A process has closed a block of this one.
pub(crate) fn closed(opener: Identity, block: u64) {
    let mut openers = OPENERS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(peer) = openers.get_mut(&opener) {
        peer.blocks.remove(&block);
        if peer.blocks.is_empty() {
            openers.remove(&opener);
        }
    }
}

/// Whether a process that lives has this of this one's open.
pub(crate) fn is_open(block: u64) -> bool {
    let openers = OPENERS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let having = |peer: &Peer| peer.blocks.contains(&block);
    openers.values().any(|peer| having(peer) && (peer.pid == 0 || is_alive(peer.pid)))
}

/// Writes what is known here. Who has ended has nothing open any more, and is forgotten.
pub(crate) fn fill(counts: &mut Counts) {
    let mut openers = OPENERS.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    openers.retain(|_, peer| peer.pid == 0 || is_alive(peer.pid));
    let listed =
        openers.iter().map(|(identity, peer)| Opener { identity: *identity, pid: peer.pid });
    counts.openers = listed.collect();
    counts.identity = IDENTITY.get().get().copied().unwrap_or_default();
}

/// Whether this process sees one of that pid that has not ended. One that has ended, and that its parent has not waited for
/// yet, has no memory any more: it may stay so for as long as the parent lives.
pub(crate) fn is_alive(pid: u32) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => !has_ended(&process),
        Err(Errno::SRCH) => false,
        // There is no descriptor left, or it is not allowed. A process of another user is there too.
        Err(_) => !matches!(test_kill_process(pid), Err(Errno::SRCH)),
    })
}

/// Whether all threads of a process have ended.
fn has_ended(process: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(process, PollFlags::IN)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut poll, Some(&now)).is_ok() && !poll[0].revents().is_empty()
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe {
        IDENTITY.reset(OnceLock::new());
        OPENERS.reset(Mutex::new(BTreeMap::new()));
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::is_alive;

    #[test]
    fn who_has_ended_does_not_live_though_nobody_has_waited_for_it() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        assert!(is_alive(child.id()) && is_alive(std::process::id()));
        drop(child.stdin.take());
        let deadline = Instant::now() + Duration::from_secs(60);
        while is_alive(child.id()) {
            assert!(Instant::now() < deadline, "it has ended");
            thread::sleep(Duration::from_millis(2));
        }
        assert!(child.wait().unwrap().success());
        assert!(!is_alive(child.id()));
    }
}
