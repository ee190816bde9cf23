//! A program that is dumped again and again: when the next dump is due, and what follows one that has failed.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::engine::error::{Error, Failure, Left};
use crate::host::process::ProcessInfo;

/// Times at each multiple of an interval. One that passes before somebody is ready for it is left out.
pub struct Schedule {
    interval: Duration,
    start: Instant,
    /// The number of the next time.
    due: u32,
}

impl Schedule {
    /// Begins now. The first time is `at_once`, or when the interval has passed.
    pub fn begin(interval: Duration, at_once: bool) -> Self {
        Self { interval, start: Instant::now(), due: u32::from(!at_once) }
    }

    /// How long it is to the next time; nothing if that has come.
    pub fn left(&self) -> Duration {
        (self.start + self.interval * self.due).saturating_duration_since(Instant::now())
    }

    /// Goes on to the next time, and gives the number of times that are left out since they have passed.
    pub fn advance(&mut self) -> u32 {
        let next = next(self.due, self.start.elapsed(), self.interval);
        let left_out = next - self.due - 1;
        self.due = next;
        left_out
    }
}

/// How often it is checked whether the program lives.
const POLL: Duration = Duration::from_millis(50);

/// Dumps of one program, at once and then at each multiple of an interval, until the program ends or the user asks for
/// the end. A time that passes during a dump is left out.
pub struct Series {
    process: ProcessInfo,
    stop: Arc<AtomicBool>,
    schedule: Schedule,
    taken: u64,
    images: VecDeque<PathBuf>,
}

/// What follows a dump of a series that has failed.
#[derive(Debug)]
pub enum AfterFailure {
    /// The next one is tried at its time.
    Another(Failure),
    /// Nothing: the program has ended, or the user has asked for the end.
    Over,
    /// Nothing: it was the first, and the others would fail as well.
    GiveUp(Failure),
}

impl Series {
    /// Begins now. `stop` is set to end it.
    ///
    /// # Errors
    /// There is no process `pid`.
    pub fn begin(pid: u32, interval: Duration, stop: Arc<AtomicBool>) -> Result<Self, Error> {
        let process = ProcessInfo::read(pid)?;
        let images = VecDeque::new();
        let schedule = Schedule::begin(interval, true);
        Ok(Self { process, stop, schedule, taken: 0, images })
    }

    /// Waits for the time of the next dump. `false` if there is to be none any more.
    pub fn wait(&self) -> bool {
        loop {
            if self.has_ended() || self.stop.load(Ordering::Relaxed) {
                return false;
            }
            let left = self.schedule.left();
            if left.is_zero() {
                return true;
            }
            std::thread::sleep(left.min(POLL));
        }
    }

    /// A dump has made this image.
    pub fn took(&mut self, image: PathBuf) {
        self.taken += 1;
        self.images.push_back(image);
    }

    /// A dump has failed.
    pub fn after(&self, failure: Failure) -> AfterFailure {
        if failure.left == Left::Ended || self.has_ended() || self.stop.load(Ordering::Relaxed) {
            AfterFailure::Over
        } else if self.taken == 0 {
            AfterFailure::GiveUp(failure)
        } else {
            AfterFailure::Another(failure)
        }
    }

    /// Forgets the oldest images, so that `keep` are left, and gives the forgotten ones.
    pub fn surplus(&mut self, keep: usize) -> impl Iterator<Item = PathBuf> + '_ {
        let surplus = self.images.len().saturating_sub(keep);
        self.images.drain(..surplus)
    }

    /// Goes on to the next dump, and gives the number of dumps that are left out since their time has passed.
    pub fn advance(&mut self) -> u32 {
        self.schedule.advance()
    }

    /// Whether the program has ended.
    pub fn has_ended(&self) -> bool {
        self.process.has_ended()
    }

    /// How many images were taken.
    pub fn taken(&self) -> u64 {
        self.taken
    }

    /// How many of them are left.
    pub fn kept(&self) -> usize {
        self.images.len()
    }
}

/// The number of the next time, after somebody was ready at `elapsed` who was due at that of number `due`.
fn next(due: u32, elapsed: Duration, interval: Duration) -> u32 {
    let passed = (elapsed.as_nanos() / interval.as_nanos()) as u32;
    passed.max(due) + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::phase::Phase;

    #[test]
    fn times_that_have_passed_are_left_out() {
        let second = Duration::from_secs(1);
        assert_eq!(next(0, Duration::from_millis(200), second), 1);
        assert_eq!(next(0, Duration::from_millis(999), second), 1);
        assert_eq!(next(1, Duration::from_millis(1100), second), 2);
        assert_eq!(next(1, Duration::from_millis(4100), second), 5);
    }

    #[test]
    fn only_the_first_failure_is_final() {
        let failure =
            |left| Failure { phase: Phase::Gate, error: Box::new(Error::CopyIncomplete), left };
        let stop = Arc::new(AtomicBool::new(false));
        let mut series =
            Series::begin(std::process::id(), Duration::from_secs(1), stop.clone()).unwrap();
        assert!(matches!(series.after(failure(Left::RolledBack)), AfterFailure::GiveUp(_)));
        assert!(matches!(series.after(failure(Left::Ended)), AfterFailure::Over));
        for image in ["a", "b", "c"] {
            series.took(image.into());
        }
        assert!(matches!(series.after(failure(Left::RolledBack)), AfterFailure::Another(_)));
        assert_eq!(series.surplus(2).collect::<Vec<_>>(), [PathBuf::from("a")]);
        assert_eq!((series.taken(), series.kept()), (3, 2));
        assert!(series.wait());
        stop.store(true, Ordering::Relaxed);
        assert!(!series.wait());
        assert!(matches!(series.after(failure(Left::RolledBack)), AfterFailure::Over));
    }
}
