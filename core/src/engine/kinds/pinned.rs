//! Pinned and registered host memory. The driver pins it again, and CRIU has its bytes.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};
use crate::image;

pub(super) struct Pinned;

impl Kind for Pinned {
    fn name(&self) -> &'static str {
        "pinned host memory"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Driver
    }

    fn survey(&self, counts: &Counts) -> Amount {
        Amount::bytes(counts.pinned_bytes)
    }

    fn describe(&self, counts: &Counts, said: &mut image::Counts) {
        said.pinned_bytes = counts.pinned_bytes;
    }

    fn inspect(&self, said: &image::Counts) -> Option<(&'static str, u64)> {
        Some(("pinned_bytes", said.pinned_bytes))
    }
}
