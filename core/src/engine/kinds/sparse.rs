//! Sparse arrays, of which the program maps parts to memory of its own; nobody follows which.

use super::kind::{Carrier, Kind};

pub(super) struct Sparse;

impl Kind for Sparse {
    fn name(&self) -> &'static str {
        "sparse arrays"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuMemMapArrayAsync"]
    }
}
