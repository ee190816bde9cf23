//! What happens at `fork`: CUDA does not survive it, so the child starts afresh.

use std::cell::UnsafeCell;
use std::ptr;
use std::sync::Once;

/// A value that the child of a fork replaces. The old one is forgotten, not dropped: another
/// thread of the parent may have been in the middle of changing it.
pub(crate) struct Resettable<T>(UnsafeCell<T>);

// SAFETY: shared access is that of `T`; `reset` asks that nobody else exists.
unsafe impl<T: Sync> Sync for Resettable<T> {}

impl<T> Resettable<T> {
    /// Holds `value`.
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// The value.
    pub(crate) fn get(&self) -> &T {
        // SAFETY: changed only by `reset`, while nobody holds this reference.
        unsafe { &*self.0.get() }
    }

    /// Replaces the value.
    ///
    /// # Safety
    /// No other thread exists, and no reference from [`Self::get`] is used afterwards.
    pub(crate) unsafe fn reset(&self, value: T) {
        // SAFETY: by the contract nobody looks.
        unsafe { ptr::write(self.0.get(), value) };
    }
}

/// Sees to it that children start afresh. Called before the first state is made.
pub(crate) fn watch() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the handler is a function of this library, which is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
}

unsafe extern "C" fn in_child() {
    // SAFETY: in the child of a fork there is one thread, and it is here, not in the tables.
    unsafe {
        crate::gate::reset();
        crate::contexts::reset();
        crate::usage::reset();
        crate::memory::reset();
        crate::access::reset();
        crate::recent::reset();
        crate::sharing::reset();
        crate::unknown::reset();
        crate::agent::reset();
    }
}
