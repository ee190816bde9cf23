//! All memory is loaded outside, into device memory of gpucr's own, before the processes run.

use crate::engine::error::Error;

use super::super::bulk::Loaded;
use super::super::loading::Loading;
use super::{Arrival, Prepared, Programs};

/// Loads all memory before the processes run.
#[derive(Default)]
pub(super) struct EagerArrival {
    loaded: Option<Loaded>,
}

impl Arrival for EagerArrival {
    fn prepare(&mut self, loading: &Loading<'_, '_>) -> Result<Prepared, Error> {
        let Some(loaded) = loading.all()? else { return Ok(Prepared::NoRoom) };
        self.loaded = Some(loaded);
        Ok(Prepared::Ready)
    }

    fn take_loaded(&mut self) -> Option<Loaded> {
        self.loaded.take()
    }

    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error> {
        programs.give(|agent, memory, _| Ok(agent.reattach(memory)?))
    }
}
