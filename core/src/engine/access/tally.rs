//! Adding up what the shim tells.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, HashMap};

use gpucr_wire::Accesses;
use gpucr_wire::access::{Allocation, KernelUse, Operation, OperationUse, SlotUse, Touched};
use gpucr_wire::twice::merge;

/// Kernels that are told apart. A program that loads its modules again and again has ever new ones.
const KERNELS: usize = 1 << 16;
/// Pairs of a slot and an allocation that are told apart. A program that allocates at each step has ever
/// new ones.
const PAIRS: usize = 1 << 18;
/// Operations on allocations that are told apart.
const OPERATIONS: usize = 1 << 16;

/// Places in classes of launches that are kept.
const PLACES: usize = 1 << 22;

/// What was launched over several questions. It is bounded, however long that takes: what there is no
/// room for is counted.
#[derive(Debug, Clone, Default)]
pub struct Tally {
    /// Kernels by id.
    pub kernels: BTreeMap<u64, KernelUse>,
    /// Operations by what they do, whether they write, and the allocation.
    pub operations: BTreeMap<(Operation, bool, u64), OperationUse>,
    /// Allocations by id, with those that are gone by now, unless they were made and given back between two
    /// questions.
    pub allocations: BTreeMap<u64, Allocation>,
    /// The sum of [`Accesses::unknown_graphs`].
    pub unknown_graphs: u64,
    /// The sum of [`Accesses::unseen`], and launches for which there was no room here.
    pub unseen: u64,
    /// The sum of [`Accesses::host_functions`].
    pub host_functions: u64,
    /// Pairs of a slot and an allocation.
    pairs: usize,
    /// Places in classes.
    places: usize,
}

impl Tally {
    /// Adds the next answer.
    pub fn add(&mut self, new: Accesses) {
        for mut kernel in new.kernels {
            if self.kernels.len() >= KERNELS && !self.kernels.contains_key(&kernel.id) {
                self.unseen = self.unseen.saturating_add(kernel.launches);
                continue;
            }
            let slots = std::mem::take(&mut kernel.slots);
            let classes = std::mem::take(&mut kernel.classes);
            let mut room = PLACES - self.places;
            match self.kernels.entry(kernel.id) {
                Entry::Vacant(vacant) => {
                    let kernel = vacant.insert(kernel);
                    merge(&mut kernel.classes, &classes, &mut room);
                    add_slots(kernel, slots, &mut self.pairs);
                }
                Entry::Occupied(mut occupied) => {
                    let old = occupied.get_mut();
                    old.launches = old.launches.saturating_add(kernel.launches);
                    old.in_graphs = old.in_graphs.saturating_add(kernel.in_graphs);
                    old.sizes.include(&kernel.sizes);
                    merge(&mut old.classes, &classes, &mut room);
                    add_slots(old, slots, &mut self.pairs);
                }
            }
            self.places = PLACES - room;
        }
        for used in new.operations {
            let key = (used.operation, used.write, used.allocation);
            if self.operations.len() >= OPERATIONS && !self.operations.contains_key(&key) {
                self.unseen = self.unseen.saturating_add(used.count);
                continue;
            }
            let old = self.operations.entry(key);
            old.and_modify(|old| {
                old.count = old.count.saturating_add(used.count);
                old.bytes = old.bytes.saturating_add(used.bytes);
                old.low = old.low.min(used.low);
                old.end = old.end.max(used.end);
            })
            .or_insert(used);
        }
        for one in new.allocations {
            if self.allocations.len() < PAIRS + OPERATIONS {
                self.allocations.insert(one.id, one);
            }
        }
        self.unknown_graphs = self.unknown_graphs.saturating_add(new.unknown_graphs);
        self.unseen = self.unseen.saturating_add(new.unseen);
        self.host_functions = self.host_functions.saturating_add(new.host_functions);
    }

    /// Whether there was any launch of a kernel or graph.
    pub fn has_launched(&self) -> bool {
        self.unknown_graphs > 0
            || self.unseen > 0
            || self.kernels.values().any(|kernel| kernel.launches > 0)
    }

    /// Whether there were launches that may have touched anything.
    pub fn has_unknown(&self) -> bool {
        let blind = |kernel: &KernelUse| !kernel.known && kernel.slots.is_empty();
        let more = |kernel: &KernelUse| kernel.slots.iter().any(|slot| slot.more);
        self.unknown_graphs > 0
            || self.unseen > 0
            || self.kernels.values().any(|kernel| blind(kernel) || more(kernel))
    }
}

fn add_slots(old: &mut KernelUse, new: Vec<SlotUse>, pairs: &mut usize) {
    let places = old.slots.iter().enumerate().map(|(at, slot)| ((slot.param, slot.offset), at));
    let places: HashMap<_, _> = places.collect();
    for mut slot in new {
        let touched = std::mem::take(&mut slot.touched);
        // Each allocation comes once in an answer.
        let at = places.get(&(slot.param, slot.offset)).copied().unwrap_or_else(|| {
            old.slots.push(SlotUse { more: false, ..slot.clone() });
            old.slots.len() - 1
        });
        let old = &mut old.slots[at];
        old.more |= slot.more;
        add_touched(old, touched, pairs);
    }
}

fn add_touched(old: &mut SlotUse, new: Vec<Touched>, pairs: &mut usize) {
    let mut all: BTreeMap<u64, Touched> =
        old.touched.drain(..).map(|touched| (touched.allocation, touched)).collect();
    for touched in new {
        match all.entry(touched.allocation) {
            Entry::Occupied(mut occupied) => {
                let old = occupied.get_mut();
                old.low = old.low.min(touched.low);
                old.high = old.high.max(touched.high);
                old.launches = old.launches.saturating_add(touched.launches);
            }
            Entry::Vacant(vacant) if *pairs < PAIRS => {
                *pairs += 1;
                vacant.insert(touched);
            }
            Entry::Vacant(_) => old.more = true,
        }
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

    #[test]
    fn a_tally_is_bounded_and_says_what_is_missing() {
        let at = |allocation| Touched { allocation, low: 0, high: 0, launches: 1 };
        let kernel = |id, allocations: std::ops::Range<u64>| KernelUse {
            id,
            known: true,
            launches: 1,
            slots: vec![SlotUse { touched: allocations.map(at).collect(), ..SlotUse::default() }],
            ..KernelUse::default()
        };
        let mut tally = Tally::default();
        let most = PAIRS as u64;
        tally.add(Accesses { kernels: vec![kernel(1, 0..most)], ..Accesses::default() });
        assert!(!tally.has_unknown());
        let kernels = vec![kernel(1, most - 1..most + 10), kernel(2, 0..1)];
        tally.add(Accesses { kernels, ..Accesses::default() });
        let found =
            |id| (tally.kernels[&id].slots[0].touched.len(), tally.kernels[&id].slots[0].more);
        assert_eq!((found(1), found(2)), ((PAIRS, true), (0, true)));
        assert_eq!(
            tally.kernels[&1].slots[0].touched[PAIRS - 1].launches,
            2,
            "known pairs are kept up"
        );
        assert!(tally.has_unknown());

        let mut tally = Tally::default();
        let kernels = (0..KERNELS as u64 + 3).map(|id| kernel(id, 0..0)).collect();
        let operation = |allocation| OperationUse {
            operation: Operation::Copy {},
            write: true,
            allocation,
            count: 1,
            bytes: 1,
            low: 0,
            end: 1,
        };
        let operations = (0..OPERATIONS as u64 + 4).map(operation).collect();
        let one = |id| Allocation { id, address: 0, size: 1 };
        let allocations = (0..2 * most).map(one).collect();
        tally.add(Accesses { kernels, operations, allocations, ..Accesses::default() });
        assert_eq!((tally.kernels.len(), tally.operations.len()), (KERNELS, OPERATIONS));
        assert_eq!((tally.allocations.len(), tally.unseen), (PAIRS + OPERATIONS, 7));
    }
}
