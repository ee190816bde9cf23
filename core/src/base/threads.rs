//! Threads of a scope.

use std::thread::ScopedJoinHandle;

/// What a thread gives. Its panic goes on here.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
