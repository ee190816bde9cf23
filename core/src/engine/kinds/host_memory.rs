//! Host memory that the program makes with `cuMemCreate`. Device memory that it makes so is
//! [the program's own](super::program).

use super::kind::{Carrier, Kind};

pub(super) struct HostMemory;

impl Kind for HostMemory {
    fn name(&self) -> &'static str {
        "host memory of cuMemCreate"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuMemCreate"]
    }
}
