//! Keeping the program's signals away from threads of ours.

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

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: a mask that this thread had before.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, ptr::null_mut()) };
    }
}
