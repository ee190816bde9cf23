//! Managed memory (`cuMemAllocManaged`), whose pages the driver moves between host and devices by itself.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};

pub(super) struct Managed;

impl Kind for Managed {
    fn name(&self) -> &'static str {
        "managed memory"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn survey(&self, counts: &Counts) -> Amount {
        Amount::number(counts.managed)
    }

    fn words(&self, amount: Amount) -> String {
        format!("managed memory ({} allocations)", amount.number)
    }
}
