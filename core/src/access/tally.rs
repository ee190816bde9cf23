//! Adding up what the shim tells.

use std::collections::BTreeMap;

use gpucr_wire::Accesses;
use gpucr_wire::access::{Allocation, KernelUse, Operation, OperationUse, SlotUse, Touched};

/// What was launched over several questions.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// By id.
    pub kernels: BTreeMap<u64, KernelUse>,
    /// By what they do, whether they write, and the allocation.
    pub operations: BTreeMap<(Operation, bool, u64), OperationUse>,
    /// By id; those too that are gone by now, unless they were made and given back between two
    /// questions.
    pub allocations: BTreeMap<u64, Allocation>,
    /// As in [`Accesses`].
    pub unknown_graphs: u64,
    /// As in [`Accesses`].
    pub unseen: u64,
    /// As in [`Accesses`].
    pub host_functions: u64,
}

impl Tally {
    /// Adds the next answer.
    pub fn add(&mut self, new: Accesses) {
        for kernel in new.kernels {
            match self.kernels.get_mut(&kernel.id) {
                Some(old) => add_kernel(old, kernel),
                None => {
                    self.kernels.insert(kernel.id, kernel);
                }
            }
        }
        for used in new.operations {
            let key = (used.operation, used.write, used.allocation);
            let old = self.operations.entry(key);
            old.and_modify(|old| {
                old.count += used.count;
                old.bytes = old.bytes.saturating_add(used.bytes);
                old.low = old.low.min(used.low);
                old.end = old.end.max(used.end);
            })
            .or_insert(used);
        }
        self.allocations.extend(new.allocations.into_iter().map(|one| (one.id, one)));
        self.unknown_graphs += new.unknown_graphs;
        self.unseen += new.unseen;
        self.host_functions += new.host_functions;
    }

    /// Whether there were launches that may have touched anything.
    pub fn has_unknown(&self) -> bool {
        let blind = |kernel: &KernelUse| !kernel.known && kernel.slots.is_empty();
        let more = |kernel: &KernelUse| kernel.slots.iter().any(|slot| slot.more);
        self.unknown_graphs + self.unseen > 0
            || self.kernels.values().any(|kernel| blind(kernel) || more(kernel))
    }
}

fn add_kernel(old: &mut KernelUse, new: KernelUse) {
    old.launches += new.launches;
    old.in_graphs += new.in_graphs;
    for slot in new.slots {
        let place = (slot.param, slot.offset);
        match old.slots.iter_mut().find(|old| (old.param, old.offset) == place) {
            Some(old) => add_slot(old, slot),
            None => old.slots.push(slot),
        }
    }
}

fn add_slot(old: &mut SlotUse, new: SlotUse) {
    old.more |= new.more;
    let mut all: BTreeMap<u64, Touched> =
        old.touched.drain(..).map(|touched| (touched.allocation, touched)).collect();
    for touched in new.touched {
        let entry = all.entry(touched.allocation);
        entry
            .and_modify(|old| {
                old.low = old.low.min(touched.low);
                old.high = old.high.max(touched.high);
                old.launches += touched.launches;
            })
            .or_insert(touched);
    }
    old.touched = all.into_values().collect();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_add_up() {
        let answer = |launches, allocation, low| Accesses {
            kernels: vec![KernelUse {
                id: 1,
                known: true,
                launches,
                slots: vec![SlotUse {
                    touched: vec![Touched { allocation, low, high: low, launches }],
                    ..SlotUse::default()
                }],
                ..KernelUse::default()
            }],
            allocations: vec![Allocation { id: allocation, address: 0, size: 10 }],
            ..Accesses::default()
        };
        let mut tally = Tally::default();
        tally.add(answer(2, 5, 100));
        tally.add(answer(3, 5, 50));
        tally.add(answer(1, 6, 7));
        let kernel = &tally.kernels[&1];
        assert_eq!((kernel.launches, kernel.slots.len()), (6, 1));
        let touched = |allocation, low, high, launches| Touched { allocation, low, high, launches };
        assert_eq!(kernel.slots[0].touched, [touched(5, 50, 100, 5), touched(6, 7, 7, 1)]);
        assert_eq!(tally.allocations.len(), 2);
        assert!(!tally.has_unknown());
        tally.add(Accesses { unseen: 1, ..Accesses::default() });
        assert!(tally.has_unknown());
    }
}
