//! Threads of gpucr's own in the program.

use std::cell::Cell;

thread_local! {
    /// Whether this is a thread of gpucr's, which gets its errors itself.
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// This thread is one of gpucr's.
pub(crate) fn exempt_this_thread() {
    let _ = OURS.try_with(|ours| ours.set(true));
}

/// Whether this thread is one of gpucr's, or is ending.
pub(super) fn is_ours() -> bool {
    OURS.try_with(Cell::get).unwrap_or(true)
}
