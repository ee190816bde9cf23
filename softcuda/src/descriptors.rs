//! Room for the descriptors of device memory in a program that has its own.
//!
//! A program may have more pieces of memory than its limit of open files allows. The kernel looks at the limit only
//! when a descriptor is made, and gives the program the lowest free number. So once half of the numbers are taken,
//! memory goes above the limit, which is raised for that moment.

use std::io;

use parking_lot::Mutex;
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::process::{Resource, Rlimit, getrlimit, prlimit, setrlimit};

/// One raises the limit at a time: it is that of the process.
static RAISING: Mutex<()> = Mutex::new(());

/// Makes a descriptor that is kept for long, out of the program's way where the system allows it.
///
/// # Errors
/// Those of `make`.
pub(crate) fn keep(make: impl Fn() -> io::Result<OwnedFd>) -> io::Result<OwnedFd> {
    let made = make();
    let soft = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if made.as_ref().is_ok_and(|fd| (fd.as_raw_fd() as u64) < soft / 2) {
        return made;
    }
    let _alone = RAISING.lock();
    let before = getrlimit(Resource::Nofile);
    let Some((raised, floor)) = raise(before) else { return made };
    let made = made.or_else(|_| make()).map(|fd| {
        let above = rustix::io::fcntl_dupfd_cloexec(&fd, floor);
        above.unwrap_or(fd)
    });
    put_back(raised, before);
    made
}

/// Raises the limit as far as this process may, to something that it would not choose itself; gives that, and the
/// lowest number that was not allowed before.
fn raise(before: Rlimit) -> Option<(Rlimit, i32)> {
    /// Beyond this the kernel's table of descriptors is itself large.
    const MOST: u64 = 1 << 19;
    let (soft, hard) = (before.current?, before.maximum?);
    let floor = i32::try_from(soft).ok()?;
    // Root may go beyond its own limit.
    [hard.max(MOST), hard].into_iter().find_map(|hard| {
        let raised = Rlimit { current: Some(hard - 1), maximum: Some(hard) };
        (hard - 1 > soft && setrlimit(Resource::Nofile, raised).is_ok()).then_some((raised, floor))
    })
}

/// Puts the limit back, unless the program has set another one meanwhile: then that stands.
fn put_back(raised: Rlimit, before: Rlimit) {
    let (mut last, mut next) = (raised, before);
    while let Ok(found) = prlimit(None, Resource::Nofile, next) {
        if found == last {
            return;
        }
        (last, next) = (next, found);
    }
}
