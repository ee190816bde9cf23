//! Whether this process is the child of one that used the library, where every call is refused.

use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

/// Notes that it is, in the child of a fork.
pub(crate) fn set() {
    FORKED.store(true, Ordering::SeqCst);
}

/// Whether this process is the child of an initialised one.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::SeqCst)
}
