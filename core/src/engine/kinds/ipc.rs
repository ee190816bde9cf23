//! What is shared with other processes: memory, by legacy IPC or by descriptors, which is counted; events, pools, and
//! descriptors of ranges.

use gpucr_wire::Counts;

use super::kind::{Amount, Carrier, Kind};

pub(super) struct Ipc;

impl Kind for Ipc {
    fn name(&self) -> &'static str {
        "memory shared with other processes"
    }

    fn carrier(&self) -> Carrier {
        Carrier::Nobody
    }

    fn survey(&self, counts: &Counts) -> Amount {
        Amount::number(counts.shared)
    }

    fn functions(&self) -> &'static [&'static str] {
        &[
            "cuIpcGetEventHandle",
            "cuIpcOpenEventHandle",
            "cuMemExportToShareableHandle",
            "cuMemGetHandleForAddressRange",
            "cuMemPoolExportToShareableHandle",
            "cuMemPoolImportFromShareableHandle",
        ]
    }

    fn words(&self, amount: Amount) -> String {
        format!("memory shared with other processes ({} handles)", amount.number)
    }
}
