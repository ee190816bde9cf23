//! All memory is loaded outside, into device memory of gpucr's own, before the processes run; or by the holder of a warm
//! image, which checked it when it was made, while the driver restores their contexts.

use crate::engine::error::Error;
use crate::engine::multicast;
use crate::engine::sections;

use super::super::bulk::{self, Loaded};
use super::super::loading::Loading;
use super::super::report::Report;
use super::super::under_way::UnderWay;
use super::{Arrival, Prepared, Programs, inside};

/// Loads all memory before the processes have to have it.
#[derive(Default)]
pub(super) struct EagerArrival {
    /// Whether all has to be loaded before the processes run.
    is_before: bool,
    under_way: Option<UnderWay>,
    loaded: Option<Loaded>,
    /// The holder has failed when the processes ran.
    has_failed: bool,
}

impl EagerArrival {
    /// `is_before`: all has to be loaded before the processes run.
    pub(super) fn new(is_before: bool) -> Self {
        Self { is_before, ..Self::default() }
    }
}

impl Arrival for EagerArrival {
    fn prepare(&mut self, loading: &Loading<'_, '_>) -> Result<Prepared, Error> {
        // If the holder fails, programs can load their own memory, but none of another process.
        let manifest = loading.image.manifest();
        let can_fail =
            sections::read_opened(manifest)?.is_empty() && multicast::read(manifest)?.is_empty();
        if !self.is_before && can_fail {
            self.under_way = loading.by_holder();
        }
        if self.under_way.is_none() {
            let Some(loaded) = loading.all()? else { return Ok(Prepared::NoRoom) };
            self.loaded = Some(loaded);
        }
        Ok(Prepared::Ready)
    }

    fn copied(&self) -> &'static str {
        if self.has_failed { "inside" } else { "outside" }
    }

    fn take_loaded(&mut self) -> Option<Loaded> {
        self.loaded.take()
    }

    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error> {
        if let Some(mut under_way) = self.under_way.take() {
            let Some(fds) = under_way.finish() else {
                if under_way.is_stopped() {
                    return Err(Error::Interrupted);
                }
                self.has_failed = true;
                return inside::load(programs);
            };
            tracing::debug!("the holder has loaded the memory");
            let loaded = bulk::by_process(programs.image.manifest(), fds)?;
            for (program, blocks) in programs.cuda_processes.iter_mut().zip(loaded) {
                program.blocks = blocks;
            }
        }
        programs.give(|agent, memory, _| Ok(agent.reattach(memory)?))
    }

    fn report(&self, report: &mut Report) {
        report.by_holder &= !self.has_failed;
    }
}
