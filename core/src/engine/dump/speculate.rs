//! What the programs' launches may write: which chunks are better copied late, and which kernels are
//! to blame for chunks that changed after they had been copied.
//!
//! The judgement is a guess that costs or saves time; see `docs/access-sets.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use gpucr_wire::access::{Allocation, KernelSummary};

use crate::base::timeline::Misspeculation;
pub(super) use crate::engine::access::Blamed;
use crate::engine::access::{Extent, Kernels, Tally, Written, sharing, written};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::launched::{self, Launched};
use crate::engine::memory::{Bulk, Miss};
use crate::host::process::Agent;
use crate::image;

/// Larger images of modules are not read for the sake of a dump, bytes.
const LARGEST_IMAGE: u64 = 4 << 20;
/// For so long kernels are learned of between two hash passes: programs wait a few seconds for memory that they
/// have given back, and what there is no time for is taken to be written.
pub(super) const LEARNING: Duration = Duration::from_secs(1);
/// So many misspeculations are named.
const NAMED: usize = 100;

/// What is known of the programs' launches, each by its place among them.
#[derive(Default)]
pub(super) struct Speculation {
    programs: Vec<Program>,
}

#[derive(Default)]
struct Program {
    kernels: Kernels,
    /// What was launched between the questions, in their order.
    intervals: Vec<Tally>,
}

impl Speculation {
    /// Begins to record what is launched.
    pub(super) fn start(&mut self, cuda_processes: &mut [CudaProcess]) -> Result<(), Error> {
        self.programs = cuda_processes.iter().map(|_| Program::default()).collect();
        for agent in cuda_processes.iter_mut().filter_map(|program| program.agent.as_mut()) {
            agent.record(true)?;
        }
        Ok(())
    }

    /// A program has ended; the programs behind it move up.
    pub(super) fn forget(&mut self, program: usize) {
        // None before recording began.
        if program < self.programs.len() {
            self.programs.remove(program);
        }
    }

    /// Takes up what was launched since the last time, and finds out about new kernels for `learning`
    /// at most.
    pub(super) fn ask(
        &mut self,
        cuda_processes: &mut [CudaProcess],
        learning: Duration,
    ) -> Result<(), Error> {
        let until = Instant::now() + learning;
        let mut asked = Ok(());
        for (program, process) in self.programs.iter_mut().zip(cuda_processes) {
            let mut interval = Tally::default();
            let mut answer = |agent: &mut Agent| -> Result<(), Error> {
                let accesses = agent.accesses()?;
                program.kernels.learn(agent, &accesses.kernels, LARGEST_IMAGE, until)?;
                interval.add(accesses);
                Ok(())
            };
            if let Some(agent) = process.agent.as_mut().filter(|_| asked.is_ok()) {
                asked = answer(agent);
            }
            // Also for programs that did not answer: intervals are told apart by their numbers.
            program.intervals.push(interval);
        }
        asked
    }

    /// How often was asked.
    pub(super) fn intervals(&self) -> usize {
        self.programs.first().map_or(0, |program| program.intervals.len())
    }

    /// Learns from the last two hash passes, with a question just before each.
    pub(super) fn observe(&mut self, bulk: &Bulk) {
        for (number, program) in self.programs.iter_mut().enumerate() {
            let Some(last) = program.intervals.last() else { continue };
            let changed = |a: &Allocation| bulk.has_changed(number, a.address, a.size);
            program.kernels.observe(last.kernels.values(), last.allocations.values(), changed);
        }
    }

    /// Marks the chunks that launches so far may write again. Says whether there are any.
    pub(super) fn hold_back(&self, bulk: &mut Bulk) -> bool {
        let mut any = false;
        for (number, program) in self.programs.iter().enumerate() {
            // If launches may have written anything there is nothing to tell chunks apart by.
            if program.intervals.iter().any(Tally::has_unknown) {
                continue;
            }
            let of = |tally| written(&program.kernels, tally, Blamed::Writers);
            let all = program.intervals.iter().flat_map(of);
            // Most kernels write what others write too.
            let ranges: BTreeSet<Written> = all.map(|(_, written)| written).collect();
            for Written { low, end, .. } in ranges {
                any |= bulk.hold_back(number, low, end);
            }
        }
        any
    }

    /// What is known of the kernels of a program.
    pub(super) fn summaries(&self, program: usize) -> Vec<KernelSummary> {
        self.programs.get(program).map_or_else(Vec::new, |program| program.kernels.summaries())
    }

    /// Brings the blocks to the front that launches have touched since recording began, as far as that is
    /// known.
    pub(super) fn sort_by_use(&self, program: usize, blocks: &mut [image::Block]) {
        let Some(program) = self.programs.get(program) else { return };
        let used = program.intervals.iter().flat_map(|tally| tally.allocations.values());
        let mut used: Vec<(u64, u64)> =
            used.map(|one| (one.address, one.address.saturating_add(one.size))).collect();
        sort_by_use(&mut used, blocks);
    }

    /// What instances of a program may share, and by what its launches are judged; of blocks that have stayed
    /// unchanged.
    pub(super) fn sharing(
        &self,
        program: usize,
        unchanged: Vec<Extent>,
    ) -> (Vec<u64>, Vec<KernelSummary>) {
        let program = self.programs.get(program);
        program.map_or_else(Default::default, |p| sharing(&p.kernels, &p.intervals, unchanged))
    }

    /// The kernels that a program has launched since recording began, for people.
    pub(super) fn launched_kernels(&self, program: usize) -> Vec<Launched> {
        let program = self.programs.get(program);
        program.map_or_else(Vec::new, |p| launched::of(&p.kernels, &p.intervals))
    }

    /// The names of the kernels that a program has launched from that interval on.
    pub(super) fn launched(&self, program: usize, since: usize) -> BTreeSet<String> {
        let intervals = self.programs.get(program).map_or(&[][..], |program| &program.intervals);
        let tallies = intervals.iter().skip(since);
        let kernels = tallies.flat_map(|tally| tally.kernels.values());
        kernels.map(|kernel| kernel.name.clone()).collect()
    }

    /// Names what changed and who may have done it, the largest first.
    pub(super) fn blame(
        &self,
        missed: &[Miss],
        cuda_processes: &[CudaProcess],
        blamed: Blamed,
    ) -> Vec<Misspeculation> {
        let mut named = Vec::new();
        for (number, (program, process)) in self.programs.iter().zip(cuda_processes).enumerate() {
            let mut missed: Vec<Miss> =
                missed.iter().filter(|miss| miss.program == number).copied().collect();
            missed.sort_by_key(|miss| miss.address);
            let of = |((address, size), suspects): (Place, BTreeSet<String>)| Misspeculation {
                pid: process.process.pid,
                address,
                size,
                suspects: suspects.into_iter().collect(),
            };
            named.extend(program.blame(&missed, blamed).into_iter().map(of));
        }
        named.sort_by_key(|one| (one.suspects.is_empty(), std::cmp::Reverse(one.size)));
        named.truncate(NAMED);
        named
    }
}

/// Address and size.
type Place = (u64, u64);

impl Program {
    /// The places in which chunks that changed lie, given in order of address, each with the names of
    /// the kernels that may have written it since it was copied: allocations where they are known, else the
    /// chunks.
    fn blame(&self, missed: &[Miss], blamed: Blamed) -> BTreeMap<Place, BTreeSet<String>> {
        let mut places: BTreeMap<Place, BTreeSet<String>> = BTreeMap::new();
        let mut explained = vec![false; missed.len()];
        for (interval, tally) in self.intervals.iter().enumerate() {
            let mut writers: BTreeMap<Written, BTreeSet<String>> = BTreeMap::new();
            for (writer, written) in written(&self.kernels, tally, blamed) {
                writers.entry(written).or_default().insert(writer.name());
            }
            for (written, names) in writers {
                let hit = overlapping(missed, written.low, written.end)
                    .filter(|at| missed[*at].interval <= interval);
                if hit.inspect(|at| explained[*at] = true).count() > 0 {
                    let place = tally.allocations.get(&written.allocation);
                    let place = place
                        .map_or((written.low, written.end.saturating_sub(written.low)), |a| {
                            (a.address, a.size)
                        });
                    places.entry(place).or_default().extend(names);
                }
            }
        }
        for allocation in self.intervals.iter().flat_map(|tally| tally.allocations.values()) {
            let end = allocation.address.saturating_add(allocation.size);
            let place = (allocation.address, allocation.size);
            let hit = overlapping(missed, allocation.address, end)
                .filter(|at| !explained[*at] || places.contains_key(&place));
            if hit.count() > 0 {
                places.entry(place).or_default();
            }
        }
        let known: Vec<Place> = places.keys().copied().collect();
        for (address, size) in known {
            overlapping(missed, address, address.saturating_add(size))
                .for_each(|at| explained[at] = true);
        }
        let unknown = missed.iter().zip(&explained).filter(|(_, explained)| !**explained);
        places.extend(unknown.map(|(miss, _)| ((miss.address, miss.size), BTreeSet::new())));
        places
    }
}

/// The chunks, given in order of address, that have bytes between two addresses.
fn overlapping(missed: &[Miss], low: u64, end: u64) -> std::ops::Range<usize> {
    let first = missed.partition_point(|miss| miss.address.saturating_add(miss.size) <= low);
    let last = missed.partition_point(|miss| miss.address < end);
    first..last.max(first)
}

/// Brings blocks to the front that have bytes between the addresses of one of the pairs.
fn sort_by_use(used: &mut [(u64, u64)], blocks: &mut [image::Block]) {
    used.sort_unstable();
    // Allocations that followed each other at one place may overlap.
    let mut last = 0;
    for (_, end) in used.iter_mut() {
        last = last.max(*end);
        *end = last;
    }
    let is_used = |block: &image::Block| {
        let end = block.address.saturating_add(block.size);
        let before = used.partition_point(|(low, _)| *low < end);
        before.checked_sub(1).is_some_and(|at| used[at].1 > block.address)
    };
    blocks.sort_by_cached_key(|block| !is_used(block));
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpucr_wire::Accesses;
    use gpucr_wire::access::{KernelUse, Operation, OperationUse, Param, SlotUse, Touched};

    const MIB: u64 = 1 << 20;
    const CHUNK: u64 = 2 * MIB;

    /// A launch of a kernel of unknown direction with a pointer to an allocation of 4 MiB at so many
    /// MiB.
    fn launch(name: &str, at: u64) -> Tally {
        let touched = vec![Touched { allocation: at, low: at * MIB, high: at * MIB, launches: 1 }];
        let mut tally = Tally::default();
        tally.add(Accesses {
            kernels: vec![KernelUse {
                id: 1,
                name: name.to_owned(),
                known: true,
                params: vec![Param { offset: 0, size: 8 }],
                launches: 1,
                slots: vec![SlotUse { touched, ..SlotUse::default() }],
                ..KernelUse::default()
            }],
            allocations: vec![Allocation { id: at, address: at * MIB, size: 4 * MIB }],
            ..Accesses::default()
        });
        tally
    }

    fn miss(at: u64, interval: usize) -> Miss {
        Miss { program: 0, address: at * MIB, size: CHUNK, interval }
    }

    fn found(intervals: Vec<Tally>, missed: &[Miss]) -> Vec<(u64, u64, Vec<String>)> {
        let program = Program { intervals, ..Program::default() };
        let places = program.blame(missed, Blamed::Writers).into_iter();
        places.map(|((at, size), names)| (at / MIB, size / MIB, Vec::from_iter(names))).collect()
    }

    #[test]
    fn those_that_ran_since_the_copy_are_suspected() {
        let intervals = || vec![launch("before", 8), launch("since", 8), launch("elsewhere", 32)];
        let suspects = found(intervals(), &[miss(8, 1), miss(10, 1)]);
        assert_eq!(suspects, [(8, 4, vec!["since".to_owned()])]);
        let suspects = found(intervals(), &[miss(10, 0)]);
        assert_eq!(suspects, [(8, 4, vec!["before".to_owned(), "since".to_owned()])]);
    }

    #[test]
    fn what_nobody_is_suspected_of_is_named_too() {
        let intervals = vec![launch("before", 8)];
        let nobody = Vec::<String>::new;
        // Within an allocation that is known, and outside of all of them.
        assert_eq!(
            found(intervals, &[miss(10, 1), miss(64, 1)]),
            [(8, 4, nobody()), (64, 2, nobody())]
        );
    }

    #[test]
    fn operations_are_suspected_by_what_they_are() {
        let mut tally = launch("reader", 8);
        let operation = Operation::Fill {};
        let (low, end) = (30 * MIB, 31 * MIB);
        let used =
            OperationUse { operation, write: true, allocation: 7, count: 1, bytes: 1, low, end };
        tally.operations.insert((operation, true, 7), used);
        let names = |miss| found(vec![tally.clone()], &[miss]);
        assert_eq!(names(miss(30, 0)), [(30, 1, vec!["fills".to_owned()])]);
        assert_eq!(names(miss(28, 0)), [(28, 2, Vec::new())], "outside of it");
    }

    #[test]
    fn used_blocks_come_first_and_keep_their_order() {
        let block = |id: u64| image::Block {
            id,
            device: [0; 16],
            size: 100,
            kind: image::BlockKind::Heap,
            address: 1000 * id,
            allocations: 1,
            chunks: Vec::new(),
        };
        let sorted = |used: &[(u64, u64)]| -> Vec<u64> {
            let mut blocks: Vec<_> = (1..=5).map(block).collect();
            sort_by_use(&mut used.to_vec(), &mut blocks);
            blocks.into_iter().map(|block| block.id).collect()
        };
        assert_eq!(sorted(&[]), [1, 2, 3, 4, 5]);
        assert_eq!(sorted(&[(4099, 4100), (2000, 2001)]), [2, 4, 1, 3, 5]);
        assert_eq!(sorted(&[(2100, 3000), (5100, 9000), (0, 1000)]), [1, 2, 3, 4, 5]);
        // A large one that is gone, and a small one within it.
        assert_eq!(sorted(&[(2500, 5050), (2600, 2601)]), [3, 4, 5, 1, 2]);
    }
}
