//! A process whose memory is copied ahead and tracked meanwhile.

use std::io;

use rayon::prelude::*;

use super::copied::{Copied, placed, stretches};
use super::polite::Polite;
use crate::base::cores::Cores;
use crate::base::faults::skipped;
use crate::base::ranges::Ranges;
use crate::base::stop::Stop;
use crate::host::process::{Look, Run, RunningMemory, State, Tracking};
use crate::image::{ImageError, ImageWriter};

/// A process, and what is known of its memory.
pub(super) struct Watched {
    pub(super) pid: u32,
    /// `None` once it is not tracked any more.
    tracking: Option<Tracking>,
    /// In the order of the addresses. All of it was protected when it was read.
    copied: Vec<Copied>,
    /// Pages that are written again and again: they are left to the stop, and not protected any more.
    hot: Ranges,
    /// Pages that were protected last, and would be hot if they were written now.
    tried: Ranges,
    /// Pages that devices may write.
    pinned: Ranges,
}

/// What there is to be copied.
pub(super) struct Found {
    runs: Vec<Run>,
    /// What is to be protected first.
    unprotected: Ranges,
    wanted: Ranges,
}

impl Found {
    /// Bytes that are to be copied.
    pub(super) fn left(&self) -> u64 {
        self.wanted.len()
    }

    /// Bytes that can be copied ahead, copied or not.
    pub(super) fn all(&self) -> u64 {
        let is_tracked = |run: &&Run| run.state != State::Untracked;
        self.runs.iter().filter(is_tracked).map(|run| run.len).sum()
    }
}

impl Watched {
    /// Tracks a process, of which devices may write some memory, and protects all else that it has.
    ///
    /// # Errors
    /// The process has ended, or must not be looked at.
    pub(super) fn begin(pid: u32, mut tracking: Tracking, pinned: Ranges) -> io::Result<Self> {
        let look = tracking.look()?;
        let tried = of(&look.runs, State::Written).without(&pinned);
        tracking.protect(&tried)?;
        let (copied, hot) = (Vec::new(), Ranges::default());
        Ok(Self { pid, tracking: Some(tracking), copied, hot, tried, pinned })
    }

    /// What was copied, in the order of the addresses.
    pub(super) fn copied(&self) -> &[Copied] {
        &self.copied
    }

    pub(super) fn pinned_bytes(&self) -> u64 {
        self.pinned.len()
    }

    pub(super) fn copied_bytes(&self) -> u64 {
        self.copied.par_iter().map(|copied| u64::from(copied.chunk.len)).sum()
    }

    /// Finds what is to be copied: all that is tracked, but for what is copied and has not changed, and what is hot.
    /// `None` if nothing is tracked.
    pub(super) fn look(&mut self) -> Option<Found> {
        let tracking = self.tracking.as_mut()?;
        match tracking.look() {
            Ok(look) => Some(self.sort(look)),
            Err(error) => {
                tracing::debug!(%error, pid = self.pid, "it is not tracked any more");
                self.give_up();
                None
            }
        }
    }

    fn sort(&mut self, look: Look) -> Found {
        let Look { runs, new } = look;
        let (clean, written) = (of(&runs, State::Clean), of(&runs, State::Written));
        self.copied.retain(|copied| copied.lies_in(&clean) && !copied.touches(&new));
        self.hot = self.hot.all(&written.both(&self.tried));
        let left_alone = self.hot.all(&self.pinned);
        let copied: Ranges = self.copied.iter().flat_map(|copied| copied.pieces.clone()).collect();
        let unprotected = written.without(&left_alone);
        let wanted = clean.all(&unprotected).without(&left_alone).without(&copied);
        Found { runs, unprotected, wanted }
    }

    /// Copies what was found and has been protected for a moment, by the threads of the pool that this is called in.
    /// Gives the number of bytes.
    ///
    /// # Errors
    /// A chunk cannot be written, or the stop is set.
    pub(super) fn copy(
        &mut self,
        found: &Found,
        image: &ImageWriter,
        cores: &Cores,
        stop: &Stop,
    ) -> Result<u64, ImageError> {
        if !self.sees_writes() {
            return Ok(0);
        }
        let memory = match RunningMemory::with(self.pid as i32, &found.runs, stop.clone()) {
            Ok(memory) => memory,
            Err(error) => {
                tracing::debug!(%error, pid = self.pid, "its memory cannot be read");
                self.give_up();
                return Ok(0);
            }
        };
        let stretches = stretches(&memory, &found.wanted);
        let stored = image.add_stretches(&Polite { memory: &memory, cores }, &stretches)?;
        self.copied.extend(placed(memory.places(), stored.into_iter().flatten()));
        let unread: Ranges = memory.unread().into_iter().collect();
        self.copied.retain(|copied| !copied.touches(&unread));
        self.copied.sort_unstable_by_key(|copied| copied.pieces.first().copied());
        Ok(found.left())
    }

    /// Protects what was found. A moment later it can be copied.
    pub(super) fn protect(&mut self, found: &Found) {
        let Some(tracking) = &self.tracking else { return };
        match tracking.protect(&found.unprotected) {
            Ok(()) => self.tried = found.unprotected.clone(),
            Err(error) => {
                tracing::debug!(%error, pid = self.pid, "it is not tracked any more");
                self.give_up();
            }
        }
    }

    /// Whether it is tracked, and all writes since pages were protected are seen. It is not tracked any more if not.
    fn sees_writes(&mut self) -> bool {
        let Some(tracking) = &self.tracking else { return false };
        match tracking.obstacle() {
            Ok(None) => return true,
            Ok(Some(obstacle)) => {
                tracing::info!(pid = self.pid, obstacle, "its host memory is not copied ahead");
            }
            Err(error) => tracing::debug!(%error, pid = self.pid, "it is not tracked any more"),
        }
        self.give_up();
        false
    }

    /// Devices may have written these pages.
    pub(super) fn except(&mut self, pinned: &Ranges) {
        self.pinned = self.pinned.all(pinned);
    }

    /// Once the process is frozen: what was not written since it was protected. `None` if that is not known.
    pub(super) fn unchanged(&mut self) -> Option<Ranges> {
        // A test asks for trust in what was copied, whatever was written since.
        if skipped("host-memory") {
            return Some([(0, u64::MAX)].into_iter().collect());
        }
        let tracking = self.tracking.as_ref()?;
        // In this order: what hides writes was there while they were made.
        let seen = tracking.obstacle().and_then(|obstacle| match obstacle {
            None => Ok(tracking.clean()?.without(&self.pinned)),
            Some(obstacle) => Err(io::Error::other(obstacle)),
        });
        match seen {
            Ok(clean) => Some(clean),
            Err(error) => {
                tracing::info!(%error, pid = self.pid, "all of its host memory is read");
                self.give_up();
                None
            }
        }
    }

    /// Ends tracking: nothing that was copied counts any more.
    pub(super) fn give_up(&mut self) {
        self.tracking = None;
        self.copied.clear();
    }
}

/// The pages of one state.
fn of(runs: &[Run], state: State) -> Ranges {
    runs.iter().filter(|run| run.state == state).map(|run| (run.address, run.end())).collect()
}
