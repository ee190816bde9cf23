//! Arrays and mipmapped arrays with memory of their own. Arrays that have other memory are
//! [sparse](super::sparse) or [external](super::external).

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};
use crate::image;

pub(super) struct Arrays;

impl Kind for Arrays {
    fn name(&self) -> &'static str {
        "arrays"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Driver
    }

    fn survey(&self, counts: &Counts) -> Amount {
        Amount::number(counts.arrays)
    }

    fn describe(&self, counts: &Counts, said: &mut image::Counts) {
        said.arrays = counts.arrays;
    }

    fn inspect(&self, said: &image::Counts) -> Option<(&'static str, u64)> {
        Some(("arrays", said.arrays))
    }
}
