//! Threads of a scope.

use std::thread::{JoinHandle, ScopedJoinHandle};

/// What a thread gives. Its panic goes on here.
pub(crate) fn joined<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// What a thread has come to; a panic goes on here.
pub(crate) fn ended<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
