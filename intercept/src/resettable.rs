//! Values that the child of a fork replaces.

use std::cell::UnsafeCell;
use std::ptr;

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
