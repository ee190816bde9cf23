//! How device memory gets into the image: what tells one dump from another.

use super::preflight::DumpPlan;
use super::report::Options;
use crate::engine::memory::Bulk;
use crate::image::Protocol;

/// The order in which memory is copied. What a phase does differently for one of the orders it asks here.
///
/// |          | while the programs run | while they are stopped    | after they go on     |
/// |----------|------------------------|---------------------------|----------------------|
/// | `Driver` |                        | the driver saves it       |                      |
/// | `Stop`   |                        | all is copied             |                      |
/// | `Recopy` | what is clean: copied  | what was dirtied: copied  |                      |
/// | `Cow`    | what is clean: copied  | what was dirtied: copied aside within the device | the rest is saved |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Strategy {
    /// The programs run without gpucr's shim.
    Driver,
    /// The programs are stopped until all is copied.
    Stop,
    /// What changed after it was copied is copied once more.
    Recopy,
    /// The programs go on before all is saved.
    Cow {
        /// Memory that found no room for a copy is saved while launches that may write it wait.
        defers: bool,
    },
}

impl Strategy {
    /// The strategy that was asked for, where it can be done. Copying while the program runs needs a context of gpucr's
    /// own that can hash, and memory to copy.
    pub(super) fn choose(options: &Options, plan: &DumpPlan, bulk: Option<&mut Bulk>) -> Self {
        if plan.shims().next().is_none() {
            return Self::Driver;
        }
        let Some(bulk) = bulk.filter(|_| plan.bulk_bytes() > 0) else { return Self::Stop };
        if options.protocol == Some(Protocol::Stop) || !bulk.prepare_hashing() {
            return Self::Stop;
        }
        bulk.prepare_bounce(plan.bulk_bytes());
        match options.protocol {
            Some(Protocol::Recopy) => Self::Recopy,
            // A program that is ended need not be let go early.
            _ if !options.leave_running => Self::Recopy,
            _ => Self::Cow { defers: true },
        }
    }

    /// The protocol's name in reports and images.
    pub(super) fn protocol(self) -> Protocol {
        match self {
            Self::Driver => Protocol::Driver,
            Self::Stop => Protocol::Stop,
            Self::Recopy => Protocol::Recopy,
            Self::Cow { .. } => Protocol::Cow,
        }
    }

    /// Whether memory is copied while the programs run, and hashed once they are stopped.
    pub(super) fn copies_ahead(self) -> bool {
        matches!(self, Self::Recopy | Self::Cow { .. })
    }

    /// Whether programs are detached while their memory is hashed. That takes the longer the more memory they have,
    /// and gpucr reads it without them. With `Cow` they keep it until it is copied aside: what their stacks give
    /// back at the detach is theirs, not room for copies.
    pub(super) fn detaches_early(self) -> bool {
        self == Self::Recopy
    }

    /// Whether what is left is copied aside within the devices.
    pub(super) fn copies_aside(self) -> bool {
        matches!(self, Self::Cow { .. })
    }

    /// Whether what found no room there is saved while launches that may write it wait.
    pub(super) fn defers(self) -> bool {
        self == Self::Cow { defers: true }
    }

    /// Whether the programs go on before the image is complete.
    pub(super) fn goes_on_early(self) -> bool {
        matches!(self, Self::Cow { .. })
    }

    /// The strategy that is left where gpucr cannot map the memory of the programs any more.
    pub(super) fn without_memory(self) -> Self {
        if self.copies_ahead() { Self::Stop } else { self }
    }

    /// The strategy that follows after memory was written before it was saved: nothing is deferred.
    pub(super) fn after_miss(self) -> Self {
        match self {
            Self::Cow { .. } => Self::Cow { defers: false },
            other => other,
        }
    }
}
