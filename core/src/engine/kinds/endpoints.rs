//! Logical endpoints, by which devices of several hosts reach memory.

use super::kind::{Carrier, Kind};

pub(super) struct Endpoints;

impl Kind for Endpoints {
    fn name(&self) -> &'static str {
        "logical endpoints"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn functions(&self) -> &'static [&'static str] {
        &["cuLogicalEndpoint"]
    }
}
