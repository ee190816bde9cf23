//! Ending a transfer early: because the user asks for it, or because a part of it has failed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a transfer is to end early. The two reasons are kept apart, so that a failure is never
/// reported as the user's wish.
#[derive(Debug, Clone)]
pub struct Stop {
    asked: Arc<AtomicBool>,
    failed: Arc<AtomicBool>,
}

impl Stop {
    /// A transfer that ends early when `asked` is set, by a signal handler.
    pub fn new(asked: Arc<AtomicBool>) -> Self {
        Self { asked, failed: Arc::default() }
    }

    /// What a signal handler sets.
    pub fn asked(&self) -> &Arc<AtomicBool> {
        &self.asked
    }

    /// A part of the transfer has failed, or nobody wants its result any more.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether to end.
    pub fn is_set(&self) -> bool {
        self.asked.load(Ordering::Relaxed) || self.failed.load(Ordering::Relaxed)
    }
}
