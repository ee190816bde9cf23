//! How far CRIU is with the processes, for those who bring their memory.

use std::sync::atomic::{AtomicBool, Ordering};

/// How far CRIU is.
#[derive(Default)]
pub(super) struct Stage {
    is_complete: AtomicBool,
    is_over: AtomicBool,
}

impl Stage {
    /// All memory has its place.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete.load(Ordering::SeqCst)
    }

    /// The memory is not wanted any more, or bringing it has failed.
    pub(super) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    pub(super) fn complete(&self) {
        self.is_complete.store(true, Ordering::SeqCst);
    }

    pub(super) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}
