//! Where launches may write, and which.

use std::ops::Range;

use gpucr_wire::access::{Allocation, KernelUse, Operation, SlotUse, Touched};

use super::{Kernels, Tally};

/// A range of addresses of a program that may be written: its allocation, begin and end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Written {
    pub(crate) allocation: u64,
    pub(crate) low: u64,
    pub(crate) end: u64,
}

/// What writes.
pub(crate) enum Writer<'a> {
    Kernel(&'a str),
    Operation(Operation),
}

impl Writer<'_> {
    pub(crate) fn name(&self) -> String {
        match self {
            Self::Kernel("") => "a kernel without a name".to_owned(),
            Self::Kernel(name) => (*name).to_owned(),
            Self::Operation(operation) => operation_name(*operation).to_owned(),
        }
    }
}

/// Which kernels to suspect of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Blamed {
    /// The kernels that may write there by what is known of them.
    Writers,
    /// All kernels that point there: what was known of them may be wrong.
    All,
}

fn whole(allocation: &Allocation) -> Range<u64> {
    allocation.address..allocation.address.saturating_add(allocation.size)
}

/// What launches of a kernel touch of an allocation by way of a word: all of it, unless the kernel's code
/// tells how far it goes.
pub(super) fn touched_range(
    kernels: &Kernels,
    kernel: &KernelUse,
    slot: &SlotUse,
    touched: &Touched,
    allocation: &Allocation,
) -> Range<u64> {
    match kernels.reach(kernel.id, slot) {
        Some(reach) => reach.within(&kernel.sizes, touched.low, touched.high, whole(allocation)),
        None => whole(allocation),
    }
}

/// What was launched may write these ranges: what writes, and where. Launches that may write anything
/// ([`Tally::has_unknown`]) are not among them.
pub(crate) fn written<'a>(
    kernels: &'a Kernels,
    tally: &'a Tally,
    blamed: Blamed,
) -> impl Iterator<Item = (Writer<'a>, Written)> {
    let of_kernels = tally.kernels.values().flat_map(move |kernel| {
        let writes = move |slot: &&SlotUse| {
            blamed == Blamed::All || kernels.direction(kernel.id, slot).0.writes()
        };
        let slots = kernel.slots.iter().filter(writes);
        let touched =
            slots.flat_map(|slot| slot.touched.iter().map(move |touched| (slot, touched)));
        touched.filter_map(move |(slot, touched)| {
            let at = tally.allocations.get(&touched.allocation)?;
            let range = match blamed {
                Blamed::Writers => touched_range(kernels, kernel, slot, touched, at),
                Blamed::All => whole(at),
            };
            let written = Written { allocation: at.id, low: range.start, end: range.end };
            Some((Writer::Kernel(&kernel.name), written))
        })
    });
    let of_operations = tally.operations.values().filter(|used| used.write).map(|used| {
        let written = Written { allocation: used.allocation, low: used.low, end: used.end };
        (Writer::Operation(used.operation), written)
    });
    of_kernels.chain(of_operations)
}

/// What operations of a kind are called.
pub(super) fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Copy {} => "copies",
        Operation::Fill {} => "fills",
        Operation::Value {} => "stream values",
        Operation::Discard {} => "discards",
        Operation::Decompress {} => "decompression",
    }
}
