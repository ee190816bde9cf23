//! The thread that takes CRIU's files out of the image while host and image are checked.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::source::{CriuFiles, Source};
use crate::engine::error::Error;

/// The thread, and what it has come to. What it has made is let go of with it.
pub(super) struct Extracting(Option<JoinHandle<Result<CriuFiles, Error>>>);

impl Extracting {
    /// Starts it. There has to be room for the files.
    pub(super) fn start(image: Arc<Source>) -> Self {
        Self(Some(std::thread::spawn(move || image.extract())))
    }

    /// Waits until the files are there.
    ///
    /// # Errors
    /// One cannot be read, or there is no room.
    pub(super) fn finish(mut self) -> Result<CriuFiles, Error> {
        self.join().expect("it is waited for once")
    }

    fn join(&mut self) -> Option<Result<CriuFiles, Error>> {
        let joined = self.0.take()?.join();
        Some(joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Drop for Extracting {
    /// After a failure, or a signal, nothing of it goes on.
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            // Why it has failed, even with a panic, does not matter any more.
            let _ = thread.join();
        }
    }
}
