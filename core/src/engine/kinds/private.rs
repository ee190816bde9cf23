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

    /// An agent counts its bytes with the bytes of [pools](super::pools).
    fn survey(&self, counts: &Counts) -> Amount {
        Amount::number(counts.private.into())
    }
}

/// Bytes of private memory and of pools.
pub(crate) fn bytes(counts: &Counts) -> u64 {
    if counts.private { counts.pool_bytes } else { 0 }
}
