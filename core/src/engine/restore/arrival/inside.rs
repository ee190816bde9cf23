//! Each program loads its memory by its own agent, in its own context: where the device has no room for gpucr's.

use crate::engine::error::Error;
use crate::engine::sections;

use super::super::bulk;
use super::super::loading::Loading;
use super::super::report::Report;
use super::{Arrival, Prepared, Programs};

/// Has each program load its memory through its own agent.
pub(super) struct InsideArrival {
    asked_for: Box<dyn Arrival>,
}

impl InsideArrival {
    /// There is no room for the way that was asked for.
    pub(super) fn in_place_of(asked_for: Box<dyn Arrival>) -> Self {
        Self { asked_for }
    }
}

/// Has each program load its memory through its own agent.
///
/// # Errors
/// An agent failed, or the image; a program has memory of another process.
pub(super) fn load(programs: &mut Programs<'_>) -> Result<(), Error> {
    let (image, progress) = (programs.image, programs.progress);
    if let Some((pid, _)) = sections::read_opened(image.manifest())?.first() {
        let what = "memory of another process, for which gpucr has no room on the device".into();
        return Err(Error::Unsupported { pid: *pid, what });
    }
    programs.give(|agent, _, blocks| bulk::load_inside(agent, image, blocks, progress))
}

impl Arrival for InsideArrival {
    fn needs_parent(&self) -> bool {
        self.asked_for.needs_parent()
    }

    fn prepare(&mut self, _loading: &Loading<'_, '_>) -> Result<Prepared, Error> {
        Ok(Prepared::Ready)
    }

    fn copied(&self) -> &'static str {
        "inside"
    }

    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error> {
        load(programs)
    }

    /// Says that nothing came of the way that was asked for.
    fn report(&self, report: &mut Report) {
        self.asked_for.report(report);
    }
}
