//! The standard streams of a program that goes.

use super::Outgoing;
use crate::engine::error::Error;
use crate::engine::migrate::link::LinkError;
use crate::engine::migrate::outputs;
use crate::engine::migrate::relay::Ends;
use crate::engine::migrate::relayed::Relayed;
use crate::engine::restore::stdio;
use crate::host::process::ProcessInfo;
use crate::image::{Manifest, Stdio};

impl Outgoing {
    /// Takes hold of the ends of the program's standard streams, if they are relayed.
    pub(super) fn hold_streams(&self, outline: &Manifest) -> Result<Option<Relayed>, Error> {
        if !self.relays {
            return Ok(None);
        }
        let ends = Ends::open(&outline.processes)?;
        let relayed = Relayed::of(ends.found());
        *self.ends.lock() = Some(ends);
        Ok(Some(relayed))
    }

    /// Notes which outputs of the program nobody reads there, where these `outputs` go to files.
    ///
    /// # Errors
    /// There are no such outputs.
    pub(super) fn note_unread(&self, outline: &Manifest, outputs: u32) -> Result<(), LinkError> {
        let unknown = || LinkError::Protocol("its answer: there are no such outputs".into());
        let named = outputs::from_wire(outputs).ok_or_else(unknown)?;
        if self.relays {
            return Ok(());
        }
        let mut unread = stdio::lost(&outline.processes, named);
        let mut streams = outline.processes.iter().flat_map(|process| &process.stdio);
        if streams.any(|stream| matches!(stream, Stdio::Terminal { .. })) {
            unread.push("terminal");
        }
        *self.unread.lock() = unread;
        Ok(())
    }

    /// The ends of the program's standard streams, if they are relayed.
    pub(in crate::engine::migrate) fn take_ends(&self) -> Option<Ends> {
        self.ends.lock().take()
    }

    /// Outputs of the program that were read here and are not there.
    pub(in crate::engine::migrate) fn unread(&self) -> Vec<&'static str> {
        self.unread.lock().clone()
    }

    /// Checks that the processes, which are frozen, have the same standard streams still, if these are relayed.
    ///
    /// # Errors
    /// They have changed them.
    pub(super) fn check_streams<'p>(
        &self,
        processes: impl Iterator<Item = &'p ProcessInfo>,
    ) -> Result<(), Error> {
        let Some(ends) = &*self.ends.lock() else { return Ok(()) };
        ends.check(&processes.map(|process| process.pid).collect::<Vec<u32>>())
    }
}
