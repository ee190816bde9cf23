//! Memory that the program makes with `cuMemCreate` and that the shim does not follow: what the driver gives only if
//! nothing is added to what was asked for. Device memory that it makes so is [the program's own](super::program), and host
//! memory is [pinned](super::pinned) memory of the kernel's.

use super::kind::{Carrier, Kind};

pub(super) struct Created;

impl Kind for Created {
    fn name(&self) -> &'static str {
        "other memory of cuMemCreate"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuMemCreate"]
    }
}
