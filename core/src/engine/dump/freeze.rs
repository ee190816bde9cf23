//! The phase in which CRIU saves the processes.

use std::os::fd::AsFd;

use super::copy::Copy;
use super::{Dump, describe};
use crate::base::scratch;
use crate::engine::error::Error;
use crate::host::criu::{CriuError, DumpError, Hint};
use crate::host::process::{ProcessInfo, queue};

/// How often CRIU is asked while strangers are in its way.
const ATTEMPTS: usize = 5;

impl Dump<'_> {
    /// Lets CRIU freeze and save the processes, and commits the image before it lets go of them:
    /// it ends them only if the commit has succeeded.
    pub(super) fn freeze_and_commit(&mut self, copy: Copy) -> Result<(), Error> {
        let mut copy = Some(copy);
        let _places = self.keep_strangers_out();
        for attempt in 1..=ATTEMPTS {
            let (error, after_callback) = match self.ask_criu(&mut copy)? {
                Ok(()) => return Ok(()),
                Err(DumpError::Callback(error)) => return Err(error),
                Err(DumpError::Criu { error, after_callback }) => (error, after_callback),
            };
            if after_callback {
                // The image is complete; `settle` sees to the processes.
                tracing::warn!(%error, "CRIU failed after the commit");
                if !self.options.leave_running {
                    self.processes().for_each(ProcessInfo::kill);
                }
                return Ok(());
            }
            if let CriuError::Stuck { pid } = error {
                self.stuck = Some(pid);
            }
            if attempt == ATTEMPTS || !self.is_of_strangers(&error, attempt) {
                return Err(error.into());
            }
            tracing::warn!(%error, "somebody has connected to the program; CRIU is asked once more");
            self.image.as_ref().expect("not committed yet").clear_staging()?;
            self.criu = Some(self.plan.criu.start_dump()?);
        }
        unreachable!("the last attempt has returned")
    }

    /// Whether CRIU has failed because somebody was just connecting to a socket of the program, such as an agent's,
    /// to which anybody on the host may. That is over a moment later.
    fn is_of_strangers(&self, error: &CriuError, attempt: usize) -> bool {
        // It may be accepted already, and be told from a connection of the program's own in that it does not last.
        let was_accepted = error.has(Hint::ExtUnixSk) && !self.options.criu.ext_unix_sk;
        error.has(Hint::InFlight) || was_accepted && attempt == 1
    }

    /// Takes the places of strangers in the queues of the agents.
    fn keep_strangers_out(&self) -> Vec<queue::Place> {
        let take = |process: &ProcessInfo| {
            queue::take(process).unwrap_or_else(|error| {
                tracing::warn!(%error, pid = process.pid, "strangers may wait for its agent");
                None
            })
        };
        let with_agent = self.held.iter().filter(|program| program.has_agent);
        with_agent.filter_map(|program| take(&program.process)).collect()
    }

    fn ask_criu(&mut self, copy: &mut Option<Copy>) -> Result<Result<(), DumpError<Error>>, Error> {
        let image = self.image.as_ref().expect("not committed yet");
        let staging = image.staging_dir();
        let staging = std::fs::File::open(&staging).map_err(|source| Error::Io {
            what: format!("cannot open {}", staging.display()),
            source,
        })?;
        // CRIU's log goes elsewhere: on a full disk it is what tells that the disk is full.
        let log = scratch::file_system()?;
        let mut options = describe::criu_options(self.options, &self.plan, staging.as_fd());
        options.work = Some(log.as_fd());
        let criu = self.criu.take().expect("started before it is asked");
        let commit = &mut || self.commit(copy.take().expect("CRIU asks for the commit once"));
        Ok(criu.dump(&options, commit))
    }
}
