//! Memory of a device whose memory cannot be handed to another process: there are no blocks of it, and the driver
//! itself serves `cuMemAlloc*`.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};

pub(super) struct Private;

impl Kind for Private {
    fn name(&self) -> &'static str {
        "memory that cannot be handed to another process"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Driver
    }

    /// Its bytes are counted with those of [pools](super::pools).
    fn survey(&self, counts: &Counts) -> Amount {
        Amount::number(counts.private.into())
    }
}

/// Bytes of such memory, with those of pools.
pub(crate) fn bytes(counts: &Counts) -> u64 {
    if counts.private { counts.pool_bytes } else { 0 }
}
