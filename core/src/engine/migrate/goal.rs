//! When the source stops a program: at the rate that the link has shown, what is left has to go over in so much time.

use std::time::Duration;

use parking_lot::Mutex;

use crate::engine::error::Error;

/// The rate is that of the last while: what was measured counts for half once so much more was.
const WHILE: Duration = Duration::from_secs(4);
/// What was measured in less time says little.
const LEAST: Duration = Duration::from_millis(50);

/// For how long the link may hold a program up, and what follows if that cannot be kept to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Goal {
    /// In so much time what is left when the program is stopped has to go over the link.
    pub max_downtime: Duration,
    /// The program writes too fast for that.
    pub on_stall: OnStall,
}

/// What to do with a program that writes faster than the link carries it off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStall {
    /// It is stopped all the same, and for longer.
    Continue,
    /// The migration is given up.
    Abort,
}

impl Goal {
    /// After the last pass over the memory: whether the program is to be stopped though so many bytes are left, which
    /// take so long.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn check(self, left: u64, takes: Duration) -> Result<(), Error> {
        if takes <= self.max_downtime {
            return Ok(());
        }
        match self.on_stall {
            OnStall::Abort => Err(Error::TooFast {
                left,
                seconds: takes.as_secs_f64(),
                most: self.max_downtime.as_secs_f64(),
            }),
            OnStall::Continue => {
                tracing::warn!(
                    left,
                    ?takes,
                    "the program writes too fast, and is stopped for longer"
                );
                Ok(())
            }
        }
    }
}

/// How fast memory goes over, compressed and found to be there already as it is.
#[derive(Debug, Default)]
pub(super) struct Meter(Mutex<(u64, Duration)>);

impl Meter {
    /// So many bytes of memory have gone over in that time.
    pub(super) fn add(&self, bytes: u64, took: Duration) {
        let mut measured = self.0.lock();
        let (all, time) = (measured.0 + bytes, measured.1 + took);
        *measured = if time > WHILE { (all / 2, time / 2) } else { (all, time) };
    }

    /// Bytes a second; `None` if that is not known yet.
    pub(super) fn rate(&self) -> Option<f64> {
        let (bytes, time) = *self.0.lock();
        (time >= LEAST && bytes > 0).then(|| bytes as f64 / time.as_secs_f64())
    }

    /// How long so many bytes take.
    pub(super) fn takes(&self, bytes: u64) -> Option<Duration> {
        let seconds = bytes as f64 / self.rate()?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_is_that_of_the_last_while() {
        let meter = Meter::default();
        assert_eq!(meter.rate(), None);
        meter.add(1 << 20, Duration::from_millis(1));
        assert_eq!(meter.rate(), None, "that says little");
        (0..20).for_each(|_| meter.add(100, Duration::from_secs(1)));
        let slow = meter.rate().unwrap();
        assert!((90.0..200_000.0).contains(&slow), "{slow}");
        (0..20).for_each(|_| meter.add(1000, Duration::from_secs(1)));
        let fast = meter.rate().unwrap();
        assert!((900.0..1100.0).contains(&fast), "{fast}");
        let takes = meter.takes(2000).unwrap().as_secs_f64();
        assert!((1.8..2.3).contains(&takes), "{takes}");
    }

    #[test]
    fn a_program_that_writes_too_fast_is_stopped_only_if_that_was_wanted() {
        let goal = |on_stall| Goal { max_downtime: Duration::from_secs(1), on_stall };
        let (short, long) = (Duration::from_millis(999), Duration::from_secs(2));
        assert!(goal(OnStall::Abort).check(1, short).is_ok());
        assert!(goal(OnStall::Continue).check(1, long).is_ok());
        let error = goal(OnStall::Abort).check(7, long).unwrap_err();
        assert!(matches!(error, Error::TooFast { left: 7, .. }), "{error}");
    }
}
