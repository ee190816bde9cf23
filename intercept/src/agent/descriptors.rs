//! Room for many file descriptors in a program that has its own.
//!
//! A block that was put back keeps its file descriptor, and a program may have thousands of
//! blocks but a limit of 1024 descriptors. So they live above that limit: the kernel checks it
//! only when a descriptor is made, and gives the program the lowest free number.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use gpucr_wire::open_files::Raised;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit is raised until this is dropped. There is one at a time: the agent has one thread.
pub(super) struct Room {
    before: Rlimit,
    raised: Option<Raised>,
}

/// The program's limit while a [`Room`] has raised it to [`RAISED`].
static PROGRAMS: AtomicU64 = AtomicU64::new(0);
/// What a [`Room`] has raised the limit to; 0 if none has.
static RAISED: AtomicU64 = AtomicU64::new(0);

impl Room {
    /// Raises the limit as far as this process may.
    pub(super) fn make() -> Self {
        let before = getrlimit(Resource::Nofile);
        // One less than what a program that wants as many as it can get sets itself.
        let most = before.maximum.map(|most| most - 1).filter(|most| Some(*most) > before.current);
        let raised = most.and_then(|most| {
            let raised = Rlimit { current: Some(most), maximum: before.maximum };
            // Before it is raised: a child may be made at any time.
            PROGRAMS.store(before.current.unwrap_or(0), Ordering::Relaxed);
            RAISED.store(most, Ordering::Release);
            // Refused in some sandboxes: then what there is has to do.
            Raised::new(None, before, raised).ok()
        });
        Self { before, raised }
    }

    /// Moves a descriptor out of the program's way, if there is room.
    pub(super) fn park(&self, fd: OwnedFd) -> OwnedFd {
        let floor = floor(&self.before);
        floor.and_then(|floor| rustix::io::fcntl_dupfd_cloexec(&fd, floor).ok()).unwrap_or(fd)
    }
}

/// Gets room for parked descriptors, if there is none: the kernel makes a larger table then, and in a process with several
/// threads that waits for all processors, some hundredths of a second (expand_fdtable() of fs/file.c). A restored program has
/// the smallest table that is enough. `any` is a descriptor.
pub(super) fn make_table(any: impl AsFd) {
    let room = Room::make();
    // If it cannot be had, blocks find no room there either.
    let _ = floor(&room.before).map(|floor| rustix::io::fcntl_dupfd_cloexec(any, floor));
}

impl Drop for Room {
    fn drop(&mut self) {
        drop(self.raised.take());
        RAISED.store(0, Ordering::Release);
    }
}

/// In the child of a fork, which has no agent: puts back the limit if the agent of the parent had just raised it.
pub(super) fn reset() {
    let raised = RAISED.swap(0, Ordering::Acquire);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if raised != 0 && current == Some(raised) {
        let current = Some(PROGRAMS.load(Ordering::Relaxed));
        // Lowering a limit is not refused.
        let _ = setrlimit(Resource::Nofile, Rlimit { current, maximum });
    }
}

/// The lowest number that is out of the program's way: above its limit, or where that cannot be
/// exceeded, in the upper half of a generous one.
fn floor(limit: &Rlimit) -> Option<i32> {
    const GENEROUS: u64 = 8192;
    let soft = limit.current.unwrap_or(u64::MAX);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    let floor = match soft {
        _ if soft < hard => soft,
        GENEROUS.. => soft / 2,
        _ => return None,
    };
    // The kernel's own limit on descriptors lies far below this.
    i32::try_from(floor.min(1 << 19)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    /// A low limit of open files, so that there is something to raise; what it was comes back when this is dropped.
    struct Low {
        before: Rlimit,
        limit: Rlimit,
    }

    impl Low {
        fn set() -> Self {
            let before = getrlimit(Resource::Nofile);
            let limit = Rlimit { current: Some(64), ..before };
            setrlimit(Resource::Nofile, limit).expect("lower");
            Self { before, limit }
        }
    }

    impl Drop for Low {
        fn drop(&mut self) {
            setrlimit(Resource::Nofile, self.before).expect("not above the maximum");
        }
    }

    #[test]
    fn parked_descriptors_stay_usable_above_the_limit() {
        let low = Low::set();
        let limit = low.limit;
        let fd = rustix::fs::memfd_create("parked", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        let room = Room::make();
        assert_ne!(getrlimit(Resource::Nofile), limit);
        let parked = room.park(fd);
        drop(room);
        assert_eq!(getrlimit(Resource::Nofile), limit);
        // What the program sets meanwhile stands.
        let own = Rlimit { current: limit.current.map(|files| files / 2), ..limit };
        let room = Room::make();
        setrlimit(Resource::Nofile, own).expect("lower");
        drop(room);
        assert_eq!(getrlimit(Resource::Nofile), own);
        rustix::fs::fstat(&parked).expect("usable");
        if let Some(floor) = floor(&limit) {
            assert!(parked.as_raw_fd() >= floor);
        }
    }

    /// In a process of its own, like each test: the limit is the process's.
    #[test]
    fn a_child_that_is_made_meanwhile_has_the_programs_limit() {
        let low = Low::set();
        let programs = low.limit;
        let room = Room::make();
        assert_ne!(getrlimit(Resource::Nofile), programs);
        // SAFETY: the child calls nothing that takes a lock, and ends without leaving this block.
        let child = unsafe {
            let child = libc::fork();
            if child == 0 {
                reset();
                libc::_exit(i32::from(getrlimit(Resource::Nofile) != programs));
            }
            child
        };
        let mut status = 0;
        // SAFETY: waits for the child just made.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "its limit is another one");
        drop(room);
        assert_eq!(getrlimit(Resource::Nofile), programs);
        reset();
        assert_eq!(getrlimit(Resource::Nofile), programs);
    }

    #[test]
    fn the_floor_is_above_the_limit_or_in_the_upper_half() {
        let floor = |soft, hard| floor(&Rlimit { current: soft, maximum: hard });
        assert_eq!(floor(Some(1024), Some(4096)), Some(1024));
        assert_eq!(floor(Some(1024), None), Some(1024));
        assert_eq!(floor(Some(1024), Some(1024)), None, "too few to take half");
        assert_eq!(floor(Some(20_000), Some(20_000)), Some(10_000));
        assert_eq!(floor(None, None), Some(1 << 19));
    }
}
