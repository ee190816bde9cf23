//! The end of a dump: the program goes on or is gone, its image is completed, and all is reported.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::speculate::Blamed;
use super::{Dump, Pending, Report, defer, describe};
use crate::base::format::milliseconds;
use crate::base::phase::Phase;
use crate::base::timeline::Track;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::held::{Held, resume_all};
use crate::host::criu::CriuError;
use crate::host::process::ProcessInfo;

/// How long CRIU may take to end the processes after the commit.
const ENDING: Duration = Duration::from_secs(5);

/// How things stand after the stopped phases.
struct GoneOn {
    saved: Result<(), Error>,
    failed_in: Phase,
    /// Whether the program was to run on.
    resume: bool,
    /// Processes that do not, and why.
    lost: Vec<(u32, Error)>,
}

/// A process that CRIU does not let go of.
fn held_up(held: &Held, criu: u32) -> (u32, Error) {
    (held.process.pid, CriuError::Stuck { pid: criu }.into())
}

impl Dump<'_> {
    /// What is left after the stopped phases: the program goes on, or is gone, and the image of one
    /// that goes on is completed.
    fn go_on(&mut self, mut saved: Result<(), Error>) -> GoneOn {
        let mut failed_in = self.clock.phase();
        let resume = saved.is_err() || self.options.leave_running;
        let mut lost = Vec::new();
        if resume {
            let injected = self.clock.enter(Phase::Resume, None);
            self.before_running();
            lost = match self.stuck {
                // Neither driver nor agent of a frozen process answers.
                Some(pid) => self.held.iter().map(|held| held_up(held, pid)).collect(),
                None => {
                    let keeper = Some(&mut self.keeper);
                    resume_all(&mut self.held, &self.drivers, keeper, Some(&self.options.stop))
                }
            };
            if let Err(error) = injected {
                tracing::warn!(%error, "the way back goes on all the same");
            }
        } else {
            self.ensure_ended();
        }
        let stopped = match &self.committed {
            Some((_, until_commit)) if !resume => *until_commit,
            _ => self.stopped_at.elapsed(),
        };
        if self.was_stopped {
            self.options.timeline.lasted(Track::Program, "stopped", self.stopped_at, stopped);
        }
        self.stopped = self.stopped_before + stopped;
        if let Some(pending) = self.pending.take()
            && lost.is_empty()
        {
            saved = self.check_guards().and_then(|()| self.complete(pending));
            failed_in = self.clock.phase();
        }
        let again = matches!(saved, Err(Error::Misspeculated { .. }));
        if !again {
            self.unguard();
        }
        GoneOn { saved, failed_in, resume, lost }
    }

    /// Brings the dump to its end, and lets the keeper go.
    pub(super) fn settle(mut self, saved: Result<(), Error>) -> Result<Report, Failure> {
        let mut gone_on = self.go_on(saved);
        if matches!(gone_on.saved, Err(Error::Misspeculated { .. })) && !self.fallen_back {
            let saved = self.save_again();
            gone_on = self.go_on(saved);
        }
        let GoneOn { saved, failed_in, resume, lost } = gone_on;
        self.clock.end();
        // An image that was not committed is removed here, before anything is reported.
        self.image = None;
        let ended = resume && self.processes().any(|p| p.pid == self.options.pid && p.has_ended());
        if lost.is_empty() {
            self.keeper.done();
        } else {
            // The keeper tries for longer than this.
            drop(self.keeper);
        }
        let lost: Vec<String> = lost.iter().map(|(pid, e)| format!("process {pid}: {e}")).collect();
        // Not before: this takes time, and the program runs now.
        if let Some(found) = &mut self.validation {
            found.misspeculations =
                self.speculation.blame(&self.missed, &self.held, Blamed::Writers);
            self.options.timeline.mark(self.missed_at, &found.misspeculations);
        }
        let left = match &self.committed {
            Some(_) => Left::CompleteButLost(lost.clone()),
            None if !lost.is_empty() => Left::Lost(lost.clone()),
            None if ended => Left::Ended,
            None => Left::RolledBack,
        };
        match (saved, self.committed) {
            (Ok(()), Some((committed, _))) if lost.is_empty() => Ok(Report {
                image: self.options.destination.path(),
                id: crate::base::format::hex(&committed.id),
                pid: self.options.pid,
                protocol: self.protocol,
                copied: if self.bulk_bytes == 0 { "driver" } else { self.copied },
                left_running: resume && !ended,
                bulk_bytes: self.bulk_bytes,
                stored_bytes: committed.stored_bytes,
                precopied_chunks: self.precopied,
                validation: self.validation,
                private_bytes: self.plan.private_bytes(),
                shadowed_bytes: self.shadowed,
                deferral: self.deferral,
                new_bytes: committed.new_bytes,
                unneeded_bytes: committed.unneeded_bytes,
                stopped_ms: milliseconds(self.stopped),
                total_ms: milliseconds(self.clock.total()),
                phases: self.clock.times().to_vec(),
            }),
            (Ok(()), _) => {
                let error = Error::NotResumed(lost.join("; "));
                Err(Failure { phase: Phase::Resume, error: Box::new(error), left })
            }
            (Err(error), _) => {
                let error = match error {
                    _ if left == Left::Ended => Error::ProgramEnded,
                    Error::CopyIncomplete if self.options.stop.load(Ordering::Relaxed) => {
                        Error::Interrupted
                    }
                    error => error,
                };
                Err(Failure { phase: failed_in, error: Box::new(error), left })
            }
        }
    }

    /// Waits until all processes are gone, as CRIU has ended them; ends them if it has not.
    fn ensure_ended(&self) {
        let since = Instant::now();
        while !self.processes().all(ProcessInfo::has_ended) {
            if since.elapsed() > ENDING {
                self.processes().for_each(ProcessInfo::kill);
            }
            if since.elapsed() > 2 * ENDING {
                tracing::warn!("a process of the program does not end, though it was killed");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Completes the image of a program that runs again.
    fn complete(&mut self, pending: Pending) -> Result<(), Error> {
        let Pending { mut manifest, copy } = pending;
        let patience = self.patience(&copy);
        // Memory that the program gives back from now on is the device's.
        self.held.iter_mut().for_each(|held| held.blocks.clear());
        if let Err(error) = self.keeper.resumed() {
            // All that is left for it to do is to remove the image, should gpucr die.
            tracing::warn!(%error, "the keeper has died");
        }
        self.enter(Phase::Store, Some(self.shadowed))?;
        let files = self.take_staged()?;
        let saved = copy.settled();
        self.settled();
        if saved {
            self.unguard();
        }
        let (bulk, saved) = copy.finish();
        if let Err(Error::Misspeculated { .. }) = &saved
            && let Some(mut bulk) = bulk
        {
            self.learn(&mut bulk);
            bulk.forget();
            self.bulk = Some(bulk);
        }
        if patience.is_some_and(|patience| patience.has_ended()) {
            return Err(Error::Stalled { seconds: defer::LIMIT.as_secs() });
        }
        describe::set_saved(&mut manifest, saved?);
        self.write(manifest, files, Some(self.stopped))
    }
}
