//! Memory of `cuMemAlloc*`, which the shim serves from blocks of its own.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};
use crate::image;

pub(super) struct Heap;

impl Kind for Heap {
    fn name(&self) -> &'static str {
        "cuMemAlloc"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Gpucr
    }

    /// An agent counts the bytes of all blocks together, the bytes of [the program's own](super::program) among them.
    fn survey(&self, counts: &Counts) -> Amount {
        Amount { number: counts.allocations, bytes: counts.bulk_bytes }
    }

    /// Its blocks are in the manifest one by one.
    fn describe(&self, counts: &Counts, said: &mut image::Counts) {
        said.allocations = counts.allocations;
    }

    fn inspect(&self, said: &image::Counts) -> Option<(&'static str, u64)> {
        Some(("allocations", said.allocations))
    }
}
