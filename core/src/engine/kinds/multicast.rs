//! Multicast objects, which map memory of several devices at one address.

use super::kind::{Carrier, Kind};

pub(super) struct Multicast;

impl Kind for Multicast {
    fn name(&self) -> &'static str {
        "multicast objects"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuMulticast"]
    }
}
