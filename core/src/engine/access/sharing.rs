//! Which memory instances of a program could share: that which nothing writes.
//!
//! A dump that copies while the program runs sees which blocks stay unchanged, and what is launched meanwhile.
//! From that it is judged here through which words of their parameters kernels only read. The code of a
//! kernel tells for certain, and its name nearly so; of others it counts to what a word has pointed. If that
//! was memory that stayed unchanged, and the kernel has other words through which it must have written, then it
//! reads through this one.
//!
//! The judgement is a guess, for a kernel may write what is there already. So what is shared is mapped read-only.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gpucr_wire::access::{Allocation, KernelSummary, Slot, SlotUse, WHOLE_BUFFER};

use super::{Kernels, Tally};
use crate::engine::memory::Extent;
use crate::kernels::Source;

/// A word of a kernel's parameters.
struct Word {
    slot: Slot,
    /// Whether it is written through, if its kernel's code or name says so.
    writes: Option<bool>,
    /// Where it has pointed to: beginning and end of each allocation.
    touched: Vec<(u64, u64)>,
}

/// The blocks, of those that have stayed `unchanged` while all of this was launched, that nothing seems to write;
/// and the kernels, with the words through which they seem to read only. Nothing if launches may have
/// touched anything.
pub(crate) fn sharing<'a>(
    kernels: &Kernels,
    tallies: impl IntoIterator<Item = &'a Tally>,
    mut unchanged: Vec<Extent>,
) -> (Vec<u64>, Vec<KernelSummary>) {
    let mut launched: BTreeMap<u64, Vec<Word>> = BTreeMap::new();
    unchanged.sort_unstable_by_key(|block| block.low);
    for tally in tallies {
        if tally.has_unknown() {
            return (Vec::new(), Vec::new());
        }
        let written = tally.operations.values().filter(|operation| operation.write);
        written.for_each(|operation| remove(&mut unchanged, (operation.low, operation.end)));
        for kernel in tally.kernels.values() {
            let words = launched.entry(kernel.id).or_default();
            for slot in &kernel.slots {
                add(words, kernels, kernel.id, slot, &tally.allocations);
            }
        }
    }
    // What is written is not shared, and what is not shared may be written: until nothing more follows.
    let mut reads = BTreeSet::new();
    loop {
        let before = (unchanged.len(), reads.len());
        reads.clear();
        for (kernel, words) in &launched {
            let is_unchanged =
                |word: &Word| word.touched.iter().all(|range| covers(&unchanged, *range));
            let seems_read = |word: &&Word| match word.writes {
                Some(writes) => !writes,
                None => word.slot.param != WHOLE_BUFFER && is_unchanged(word),
            };
            let (read, written): (Vec<&Word>, Vec<&Word>) = words.iter().partition(seems_read);
            // The kernel must write somewhere.
            let guessed = |word: &&Word| word.writes.is_none() && written.is_empty();
            let (doubtful, read): (Vec<&Word>, Vec<&Word>) = read.into_iter().partition(guessed);
            reads.extend(read.iter().map(|word| (*kernel, word.slot)));
            for range in written.iter().chain(&doubtful).flat_map(|word| &word.touched) {
                remove(&mut unchanged, *range);
            }
        }
        if before == (unchanged.len(), reads.len()) {
            break;
        }
    }
    let mut summaries: HashMap<u64, KernelSummary> = kernels
        .summaries()
        .into_iter()
        .map(|of_code| (of_code.kernel, KernelSummary { anywhere: false, ..of_code }))
        .collect();
    for (kernel, slot) in reads {
        let reads = Vec::new;
        let none =
            || KernelSummary { kernel, anywhere: false, reads: reads(), reaches: Vec::new() };
        let summary = summaries.entry(kernel).or_insert_with(none);
        if let Err(at) = summary.reads.binary_search(&slot) {
            summary.reads.insert(at, slot);
        }
    }
    let mut summaries: Vec<KernelSummary> = summaries.into_values().collect();
    summaries.sort_unstable_by_key(|summary| summary.kernel);
    (unchanged.into_iter().map(|block| block.id).collect(), summaries)
}

fn add(
    words: &mut Vec<Word>,
    kernels: &Kernels,
    kernel: u64,
    used: &SlotUse,
    allocations: &BTreeMap<u64, Allocation>,
) {
    let slot = Slot { param: used.param, offset: used.offset };
    let at = words.iter().position(|word| word.slot == slot).unwrap_or_else(|| {
        let (direction, source) = kernels.direction(kernel, used);
        let told = matches!(source, Source::Ptx | Source::Name);
        let writes = told.then(|| direction.writes());
        words.push(Word { slot, writes, touched: Vec::new() });
        words.len() - 1
    });
    let place = |id: &u64| match allocations.get(id) {
        Some(a) => (a.address, a.address.saturating_add(a.size)),
        // Made and given back in between: nothing that is shared.
        None => (0, 1),
    };
    let touched = &mut words[at].touched;
    touched.extend(used.touched.iter().map(|touched| place(&touched.allocation)));
    touched.sort_unstable();
    touched.dedup();
}

/// Whether all of a range lies within blocks.
fn covers(blocks: &[Extent], (low, end): (u64, u64)) -> bool {
    let first = blocks.partition_point(|block| block.end <= low);
    let mut at = low;
    for block in &blocks[first..] {
        if at >= end || block.low > at {
            break;
        }
        at = block.end;
    }
    at >= end
}

/// Takes out the blocks that have bytes of a range.
fn remove(blocks: &mut Vec<Extent>, (low, end): (u64, u64)) {
    blocks.retain(|block| block.end <= low || end <= block.low);
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpucr_wire::Accesses;
    use gpucr_wire::access::{KernelUse, Operation, OperationUse, Param, Touched};

    /// Allocation and block number `n` lie at `n * 100`, 100 bytes each.
    fn blocks(numbers: &[u64]) -> Vec<Extent> {
        numbers.iter().map(|&id| Extent { id, low: id * 100, end: id * 100 + 100 }).collect()
    }

    /// A kernel, of each word of which it is said to what it has pointed.
    fn kernel(id: u64, words: &[&[u64]]) -> KernelUse {
        let touched =
            |n: &u64| Touched { allocation: *n, low: n * 100, high: n * 100, launches: 1 };
        let slot = |(param, numbers): (usize, &&[u64])| SlotUse {
            param: param as u32,
            touched: numbers.iter().map(touched).collect(),
            ..SlotUse::default()
        };
        KernelUse {
            id,
            known: true,
            launches: 1,
            params: words.iter().map(|_| Param { offset: 0, size: 8 }).collect(),
            slots: words.iter().enumerate().map(slot).collect(),
            ..KernelUse::default()
        }
    }

    fn tally(kernels: Vec<KernelUse>) -> Tally {
        let mut tally = Tally::default();
        let allocations = (0..20).map(|id| Allocation { id, address: id * 100, size: 100 });
        tally.add(Accesses { kernels, allocations: allocations.collect(), ..Accesses::default() });
        tally
    }

    fn reads(summaries: &[KernelSummary]) -> Vec<(u64, Vec<u32>)> {
        let params =
            |summary: &KernelSummary| summary.reads.iter().map(|slot| slot.param).collect();
        summaries.iter().map(|summary| (summary.kernel, params(summary))).collect()
    }

    #[test]
    fn what_stays_unchanged_is_read_by_kernels_that_write_elsewhere() {
        // out = weights * in; block 9 is touched by nobody.
        let tally = tally(vec![kernel(1, &[&[5, 6], &[1, 2], &[5, 7]])]);
        let (shared, summaries) = sharing(&Kernels::default(), [&tally], blocks(&[1, 2, 3, 9]));
        assert_eq!((shared, reads(&summaries)), (vec![1, 2, 3, 9], vec![(1, vec![1])]));
    }

    #[test]
    fn a_kernel_that_writes_nowhere_else_writes_what_stayed_unchanged() {
        // The kernel fills block 3 with what is there already, and so does another by way of a word that has
        // pointed to block 4, which is then taken to be written; a kernel that writes there need not write 2.
        let kernels = vec![
            kernel(1, &[&[3]]),
            kernel(2, &[&[3, 4], &[1]]),
            kernel(3, &[&[4], &[2]]),
            kernel(4, &[&[2], &[8]]),
        ];
        let (shared, summaries) =
            sharing(&Kernels::default(), [&tally(kernels)], blocks(&[1, 2, 3, 4]));
        assert_eq!(shared, [1, 2]);
        assert_eq!(reads(&summaries), [(2, vec![1]), (3, vec![1]), (4, vec![0])]);
    }

    #[test]
    fn all_looks_count_and_operations_too() {
        let first = tally(vec![kernel(1, &[&[8], &[1, 2]])]);
        let mut second = tally(vec![kernel(1, &[&[8], &[7]])]);
        let (shared, _) = sharing(&Kernels::default(), [&first], blocks(&[1, 2]));
        assert_eq!(shared, [1, 2]);
        let (shared, summaries) = sharing(&Kernels::default(), [&first, &second], blocks(&[1, 2]));
        assert_eq!(
            (shared, reads(&summaries)),
            (vec![], vec![]),
            "its word points to what changes"
        );
        let (operation, write) = (Operation::Fill {}, true);
        let (allocation, count, bytes) = (2, 1, 1);
        let fill = OperationUse { operation, write, allocation, count, bytes, low: 200, end: 201 };
        second = Tally::default();
        second.operations.insert((operation, write, 2), fill);
        let (shared, _) = sharing(&Kernels::default(), [&first, &second], blocks(&[1, 2, 3]));
        assert_eq!(shared, [3], "block 1 shares a word with block 2");
        let mut blind = Tally::default();
        blind.unseen = 1;
        let (shared, summaries) = sharing(&Kernels::default(), [&first, &blind], blocks(&[1, 2]));
        assert_eq!((shared, summaries), (vec![], vec![]));
    }

    #[test]
    fn an_allocation_of_several_blocks_is_unchanged_if_all_are() {
        let mut tally = tally(vec![kernel(1, &[&[8], &[1]])]);
        tally.allocations.insert(1, Allocation { id: 1, address: 150, size: 200 });
        let (shared, _) = sharing(&Kernels::default(), [&tally], blocks(&[1, 2, 3]));
        assert_eq!(shared, [1, 2, 3]);
        let (shared, _) = sharing(&Kernels::default(), [&tally], blocks(&[1, 3]));
        assert!(shared.is_empty(), "block 2 has changed");
    }
}
