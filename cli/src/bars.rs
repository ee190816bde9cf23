//! The progress bar that is on the terminal now, and lines above it.

use std::sync::{Mutex, PoisonError};

use indicatif::{ProgressBar, WeakProgressBar};

/// It is there for as long as somebody else has it.
static SHOWN: Mutex<Option<WeakProgressBar>> = Mutex::new(None);

/// From now on this is the bar that is shown.
pub(crate) fn show(bar: &ProgressBar) {
    *SHOWN.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar.downgrade());
}

/// Writes something to the terminal that is not to mix with a bar: if one is there it makes room, and is drawn again
/// below.
pub(crate) fn above<T>(write: impl FnOnce() -> T) -> T {
    let shown = SHOWN.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match shown.and_then(|bar| bar.upgrade()) {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
