//! Keeping the program's signals away from threads of ours, and one that is for the agent alone.

use std::mem::MaybeUninit;
use std::ptr;

/// All signals are blocked on this thread until this is dropped.
pub(crate) struct Blocked(libc::sigset_t);

/// Blocks all signals on this thread.
pub(crate) fn block_all() -> Blocked {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call fills `all`; the second reads it and fills `before`, and cannot fail
    // with these arguments.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        Blocked(before.assume_init())
    }
}

/// Waits until gpucr has sent this thread [`gpucr_wire::WAKE`], which has to be blocked here.
pub(crate) fn wait_to_be_woken() {
    while !woken(ptr::null()) {}
}

/// Takes away what was sent so far.
pub(crate) fn forget_to_be_woken() {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    while woken(&now) {}
}

/// Whether that came in so long; for ever is null, and then it may be that something else has ended the wait.
fn woken(limit: *const libc::timespec) -> bool {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the first call fills the set, to which the second adds a signal that there is; the third reads it,
    // and reads a limit that is null or lives in the caller.
    let signal = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), gpucr_wire::WAKE);
        libc::sigtimedwait(set.as_ptr(), ptr::null_mut(), limit)
    };
    signal == gpucr_wire::WAKE
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: a mask that this thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}
