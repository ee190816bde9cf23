//! Memory from stream-ordered pools of captures, and what the driver itself gives where memory is
//! [private](super::private). That of other pools is bulk memory.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};
use crate::image;

pub(super) struct Pools;

impl Kind for Pools {
    fn name(&self) -> &'static str {
        "memory of stream-ordered pools"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Driver
    }

    fn survey(&self, counts: &Counts) -> Amount {
        Amount::bytes(counts.pool_bytes)
    }

    fn describe(&self, counts: &Counts, said: &mut image::Counts) {
        said.pool_bytes = counts.pool_bytes;
    }

    fn inspect(&self, said: &image::Counts) -> Option<(&'static str, u64)> {
        Some(("pool_bytes", said.pool_bytes))
    }
}
