//! Room for many file descriptors in a program that has its own.
//!
//! A block that was put back keeps its file descriptor, and a program may have thousands of
//! blocks but a limit of 1024 descriptors. So they live above that limit: the kernel checks it
//! only when a descriptor is made, and gives the program the lowest free number.

use std::os::fd::OwnedFd;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit is raised until this is dropped.
pub(super) struct Room {
    before: Rlimit,
}

impl Room {
    /// Raises the limit as far as this process may.
    pub(super) fn make() -> Self {
        let before = getrlimit(Resource::Nofile);
        // Refused in some sandboxes: then what there is has to do.
        let raised = Rlimit { current: before.maximum, maximum: before.maximum };
        let _ = setrlimit(Resource::Nofile, raised);
        Self { before }
    }

    /// Moves a descriptor out of the program's way, if there is room.
    pub(super) fn park(&self, fd: OwnedFd) -> OwnedFd {
        let floor = floor(&self.before);
        floor.and_then(|floor| rustix::io::fcntl_dupfd_cloexec(&fd, floor).ok()).unwrap_or(fd)
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

impl Drop for Room {
    fn drop(&mut self) {
        let _ = setrlimit(Resource::Nofile, self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn parked_descriptors_stay_usable_above_the_limit() {
        let limit = getrlimit(Resource::Nofile);
        let fd = rustix::fs::memfd_create("parked", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        let room = Room::make();
        let parked = room.park(fd);
        drop(room);
        assert_eq!(getrlimit(Resource::Nofile), limit);
        rustix::fs::fstat(&parked).expect("usable");
        if let Some(floor) = floor(&limit) {
            assert!(parked.as_raw_fd() >= floor);
        }
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
