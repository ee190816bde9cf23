//! What processes do with multicast objects that is not followed. Those that are gpucr undoes and makes again
//! ([`multicast`](crate::engine::multicast)).

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
