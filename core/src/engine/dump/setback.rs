//! A failure on the way to an image, from which the programs have to come back.

use crate::engine::error::Error;

/// Why a phase has failed, and what its state had made, which is let go of only when the programs are back: to remove
/// an image or a context takes time.
pub(super) struct Setback {
    pub(super) error: Error,
    /// What the state had made; it is only dropped.
    remains: Box<dyn Remains>,
}

trait Remains {}

impl<T> Remains for T {}

impl Setback {
    pub(super) fn new(error: impl Into<Error>, remains: impl Sized + 'static) -> Self {
        Self { error: error.into(), remains: Box::new(remains) }
    }

    /// Adds to the setback something else that is let go of when the programs are back.
    pub(super) fn with(self, more: impl Sized + 'static) -> Self {
        let Self { error, remains } = self;
        Self::new(error, (remains, more))
    }
}

/// What work on a state has come to: the state and what was found, or after a failure the state as it is left.
pub(super) fn or_keep<S: 'static, T>(
    state: S,
    outcome: Result<T, Error>,
) -> Result<(S, T), Setback> {
    match outcome {
        Ok(found) => Ok((state, found)),
        Err(error) => Err(Setback::new(error, state)),
    }
}
