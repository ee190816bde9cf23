//! Threads that the program cancels while they are in a call.
//!
//! Calls of the driver are no points of cancellation that anybody promises, but a driver sleeps and reads, and
//! these are. Cancelling unwinds the stack. Where a function of ours is little more than the driver's it is
//! unwound with it, and leaves the gate; see [`crate::exports`]. Where it has tables of its own to keep in order
//! the thread is cancelled after the call instead.

use std::ffi::c_int;
use std::marker::PhantomData;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, before: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`
const DISABLE: c_int = 1;

/// This thread is not cancelled until this is dropped.
pub(crate) struct Uncancelled {
    before: c_int,
    /// It belongs to the thread.
    _thread: PhantomData<*const ()>,
}

/// Keeps this thread from being cancelled.
pub(crate) fn not_now() -> Uncancelled {
    let mut before = DISABLE;
    // SAFETY: writes one value.
    unsafe { pthread_setcancelstate(DISABLE, &mut before) };
    Uncancelled { before, _thread: PhantomData }
}

impl Drop for Uncancelled {
    fn drop(&mut self) {
        // SAFETY: the state that this thread had before.
        unsafe { pthread_setcancelstate(self.before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{c_uint, c_void};
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::{Duration, Instant};

    use crate::abi::slots::SLOTS;
    use crate::abi::table::index;
    use crate::exports::cuMemcpyDtoH_v2;
    use crate::state::{gate, memory};
    use crate::track::cuCtxDestroy_v2;

    unsafe extern "C-unwind" {
        fn sleep(seconds: c_uint) -> c_uint;
        fn pthread_create(
            thread: *mut libc::pthread_t,
            attributes: *const c_void,
            start: extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            argument: *mut c_void,
        ) -> i32;
        fn pthread_testcancel();
    }

    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> i32;
    }

    static SLEEPS: AtomicBool = AtomicBool::new(false);
    static AWOKE: AtomicBool = AtomicBool::new(false);

    /// Stands in for a function of the driver: a point of cancellation.
    unsafe extern "C-unwind" fn nap() -> u32 {
        SLEEPS.store(true, Ordering::SeqCst);
        // SAFETY: takes no pointers.
        unsafe { sleep(1) };
        AWOKE.store(true, Ordering::SeqCst);
        0
    }

    extern "C-unwind" fn copies(_: *mut c_void) -> *mut c_void {
        // SAFETY: what stands in for the driver looks at no argument.
        unsafe { cuMemcpyDtoH_v2(0, 0, 0) };
        ptr::null_mut()
    }

    extern "C-unwind" fn destroys(_: *mut c_void) -> *mut c_void {
        // SAFETY: what stands in for the driver looks at no argument.
        unsafe { cuCtxDestroy_v2(0) };
        // SAFETY: ends this thread, in which nothing is to be dropped.
        unsafe { pthread_testcancel() };
        ptr::null_mut()
    }

    /// Cancels a thread that does this, in the middle of the driver's function in the slot. Says whether
    /// that has come to its end.
    fn cancelled(slot: usize, start: extern "C-unwind" fn(*mut c_void) -> *mut c_void) -> bool {
        SLOTS[slot].store(nap as *mut (), Ordering::SeqCst);
        SLEEPS.store(false, Ordering::SeqCst);
        AWOKE.store(false, Ordering::SeqCst);
        let mut thread = MaybeUninit::uninit();
        let mut result = ptr::null_mut();
        // SAFETY: the thread gets no argument, is cancelled while it lives, and is waited for.
        unsafe {
            let made = pthread_create(thread.as_mut_ptr(), ptr::null(), start, ptr::null_mut());
            assert_eq!(made, 0);
            while !SLEEPS.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            assert_eq!(pthread_cancel(thread.assume_init()), 0);
            assert_eq!(libc::pthread_join(thread.assume_init(), &mut result), 0);
        }
        assert_eq!(result as isize, -1, "it was not cancelled");
        AWOKE.load(Ordering::SeqCst)
    }

    /// The slots are those of the process.
    static ALONE: Mutex<()> = Mutex::new(());

    #[test]
    fn a_thread_that_is_cancelled_in_a_call_has_left_the_gate() {
        let _alone = ALONE.lock();
        assert!(!cancelled(index::cuMemcpyDtoH_v2, copies), "the call was not broken off");
        let closed = gate::close(Instant::now() + Duration::from_secs(10));
        assert!(closed.is_ok(), "{closed:?}");
        gate::open();
    }

    #[test]
    fn a_thread_is_not_cancelled_while_it_changes_tables() {
        let _alone = ALONE.lock();
        assert!(cancelled(index::cuCtxDestroy_v2, destroys), "the call was broken off");
        drop(memory::lock());
        let closed = gate::close(Instant::now() + Duration::from_secs(10));
        assert!(closed.is_ok(), "{closed:?}");
        gate::open();
    }
}
