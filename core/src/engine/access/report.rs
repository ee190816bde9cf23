//! What a trace tells of a program.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;

use gpucr_wire::access::{KernelUse, Operation, OperationUse, SlotUse, Touched, WHOLE_BUFFER};
use serde::Serialize;

use super::Tally;
use super::check::{Checked, Findings, MadeTwice};
use super::session::Watched;
use super::twice::{Repeated, repeated, together};
use super::written::{operation_name, touched_range};
use crate::engine::cuda_process::CudaProcess;
use crate::engine::interrupted::Level;
use crate::kernels::{Direction, Source};

/// What a program has launched.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// For how long it was watched.
    pub seconds: f64,
    /// The CUDA processes of the tree.
    pub processes: Vec<Process>,
}

/// What one process has launched.
#[derive(Debug, Clone, Serialize)]
pub struct Process {
    /// Its pid.
    pub pid: u32,
    /// Its command line.
    pub command: Vec<String>,
    /// Whether it ended meanwhile.
    pub ended: bool,
    /// Whether its memory was compared before and after.
    pub observed: bool,
    /// Kernels launched, within graphs too.
    pub launches: u64,
    /// How its launches, one by one, compare with what was thought of them; none without a check.
    pub checked: Option<Checked>,
    /// Launches that could not be looked into, of graphs or because there were too many kinds.
    pub unknown_launches: u64,
    /// Host functions in streams.
    pub host_functions: u64,
    /// The kernels; first the ones that may write most.
    pub kernels: Vec<Row>,
    /// Copies, fills and the like, by kind.
    pub operations: Vec<Row>,
}

/// A kernel, or operations of one kind.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The kernel's name, mangled, or what the operations are.
    pub name: String,
    /// How often, within graphs too.
    pub launches: u64,
    /// How often within graphs.
    pub in_graphs: u64,
    /// The kernel's parameters; none if they are not known, or for operations.
    pub arguments: Option<usize>,
    /// What it reads.
    pub reads: Set,
    /// What it may write.
    pub writes: Set,
    /// What says so: `code`, `name`, `observed`, `assumed`; `exact` for operations. The weakest last.
    pub derived: Vec<&'static str>,
    /// Whether it follows pointers other than its parameters; none if its code is not known.
    pub indirect: Option<bool>,
    /// Whether doing it twice is the same as doing it once; none if that is not known, or not the same for all
    /// launches. Of kernels only their code can prove it.
    pub idempotent: Option<bool>,
    /// Why it is not, or why that is not known.
    pub idempotent_reason: Option<&'static str>,
    /// The same of each class of its launches: those whose arguments point to each other's allocations in the same way.
    pub repeated: Vec<Repeated>,
    /// Where `gpucr run --interruptible` can interrupt it: `block`, between two of its blocks, or `loop`, in loops of its
    /// threads, if a launch has not too many of them, or `barrier`, at barriers of its blocks, or `abort`, anywhere, if all of
    /// its launches were idempotent. None where it cannot, and for operations.
    pub interruptible: Option<Level>,
    /// Why a kernel cannot be interrupted.
    pub interruptible_reason: Option<String>,
    /// How launches that are idempotent turned out when they were made a second time; none if they were not.
    pub twice: Option<MadeTwice>,
    /// How its launches compare with what was thought of them; none without a check, or if it was
    /// launched in graphs only.
    pub checked: Option<Checked>,
    /// The words of its parameters that have pointed to device memory.
    pub words: Vec<Word>,
}

/// A set of allocations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Set {
    /// How many.
    pub allocations: usize,
    /// Their bytes; of copies and fills the range of each.
    pub bytes: u64,
    /// Any other memory may be touched as well.
    pub everything: bool,
}

/// A word of a kernel's parameters.
#[derive(Debug, Clone, Serialize)]
pub struct Word {
    /// The parameter, counted from 0; none if the parameters are not known one by one.
    pub parameter: Option<u32>,
    /// First byte in the parameter.
    pub offset: u32,
    /// `none`, `read`, `write`, `read-write` or `unknown`.
    pub direction: &'static str,
    /// `code`, `name`, `observed` or `assumed`.
    pub source: &'static str,
    /// It has pointed to more allocations than these.
    pub more: bool,
    /// Where it has pointed.
    pub allocations: Vec<Pointed>,
}

/// An allocation that a word has pointed to.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Pointed {
    /// Where the allocation begins; none if it was gone when that was asked.
    pub address: Option<u64>,
    /// Its bytes.
    pub size: Option<u64>,
    /// The lowest address that the word held.
    pub low: u64,
    /// The highest one.
    pub high: u64,
    /// Where begins what is touched: the allocation, unless the kernel's code tells how far it goes from
    /// these addresses.
    pub from: Option<u64>,
    /// Where it ends.
    pub to: Option<u64>,
    /// In so many launches.
    pub launches: u64,
}

/// What was seen of a process, and what a check has found.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) watched: &'a Watched,
    pub(super) findings: Option<&'a Findings>,
}

impl Seen<'_> {
    /// What there is to say of the process.
    pub(super) fn report(self, program: &CudaProcess, observed: bool) -> Process {
        let tally = &self.watched.tally;
        let mut kernels: Vec<Row> =
            tally.kernels.values().map(|kernel| self.kernel(kernel)).collect();
        let most = |row: &Row| (row.writes.everything, row.writes.bytes, row.launches);
        kernels.sort_by(|a, b| most(b).cmp(&most(a)).then_with(|| a.name.cmp(&b.name)));
        Process {
            pid: program.process.pid,
            command: program.process.command.clone(),
            ended: program.agent.is_none(),
            observed,
            launches: total(tally.kernels.values().map(|kernel| kernel.launches)),
            checked: self.findings.map(|findings| findings.all),
            unknown_launches: tally.unknown_graphs.saturating_add(tally.unseen),
            host_functions: tally.host_functions,
            kernels,
            operations: operations(tally),
        }
    }

    fn kernel(self, kernel: &KernelUse) -> Row {
        let (mut reads, mut writes) = (Touches::new(), Touches::new());
        let (mut sources, mut words) = (HashSet::new(), Vec::new());
        let mut everything = !kernel.known && kernel.slots.is_empty();
        for slot in &kernel.slots {
            let (direction, source) = self.watched.kernels.direction(kernel.id, slot);
            everything |= slot.more;
            sources.insert(source);
            let pointed: Vec<Pointed> =
                slot.touched.iter().map(|touched| self.pointed(kernel, slot, touched)).collect();
            for (touched, pointed) in slot.touched.iter().zip(&pointed) {
                let range = pointed.from.zip(pointed.to).map(|(from, to)| from..to);
                if direction.reads() {
                    reads.entry(touched.allocation).or_default().push(range.clone());
                }
                if direction.writes() {
                    writes.entry(touched.allocation).or_default().push(range);
                }
            }
            words.push(Word {
                parameter: (slot.param != WHOLE_BUFFER).then_some(slot.param),
                offset: slot.offset,
                direction: direction_name(direction),
                source: source_name(source),
                more: slot.more,
                allocations: pointed,
            });
        }
        let repeated = repeated(kernel, &self.watched.kernels);
        let (idempotent, idempotent_reason) = together(&repeated);
        let twin = self.watched.kernels.twin(kernel.id);
        let set = |touched: &Touches| Set {
            allocations: touched.len(),
            bytes: total(touched.values().map(|ranges| covered(ranges))),
            everything,
        };
        Row {
            name: kernel.name.clone(),
            launches: kernel.launches,
            in_graphs: kernel.in_graphs,
            arguments: kernel.known.then_some(kernel.params.len()),
            reads: set(&reads),
            writes: set(&writes),
            derived: ranked(&sources),
            indirect: self.watched.kernels.is_indirect(kernel.id),
            idempotent,
            idempotent_reason,
            repeated,
            interruptible: twin.as_ref().ok().map(|level| match level {
                Level::Abort if idempotent != Some(true) => Level::Block,
                level => *level,
            }),
            interruptible_reason: twin.err(),
            twice: self.findings.and_then(|f| f.twice.get(&kernel.id).copied()),
            checked: self.findings.and_then(|f| f.kernels.get(&kernel.id).copied()),
            words,
        }
    }

    fn pointed(self, kernel: &KernelUse, slot: &SlotUse, touched: &Touched) -> Pointed {
        let allocation = self.watched.tally.allocations.get(&touched.allocation);
        let range = allocation.map(|allocation| {
            touched_range(&self.watched.kernels, kernel, slot, touched, allocation)
        });
        Pointed {
            from: range.as_ref().map(|range| range.start),
            to: range.map(|range| range.end),
            address: allocation.map(|allocation| allocation.address),
            size: allocation.map(|allocation| allocation.size),
            low: touched.low,
            high: touched.high,
            launches: touched.launches,
        }
    }
}

/// What is touched of each allocation, by its id; `None` of one that was gone when that was asked.
type Touches = BTreeMap<u64, Vec<Option<Range<u64>>>>;

/// The sum of what a program says of itself, which may be anything.
fn total(numbers: impl IntoIterator<Item = u64>) -> u64 {
    numbers.into_iter().fold(0, u64::saturating_add)
}

/// How many bytes lie in at least one of the ranges.
fn covered(ranges: &[Option<Range<u64>>]) -> u64 {
    let mut ranges: Vec<Range<u64>> = ranges.iter().flatten().cloned().collect();
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut bytes, mut end) = (0, 0);
    for range in ranges {
        bytes = total([bytes, range.end.saturating_sub(range.start.max(end))]);
        end = end.max(range.end);
    }
    bytes
}

/// Copies, fills and the like, by what they do.
fn operations(tally: &Tally) -> Vec<Row> {
    let mut kinds: BTreeMap<Operation, Vec<&OperationUse>> = BTreeMap::new();
    for used in tally.operations.values() {
        kinds.entry(used.operation).or_default().push(used);
    }
    let row = |(operation, used): (Operation, Vec<&OperationUse>)| {
        let set = |write: bool| {
            let used = used.iter().filter(|used| used.write == write);
            let bytes = total(used.clone().map(|used| used.end.saturating_sub(used.low)));
            Set { allocations: used.count(), bytes, everything: false }
        };
        let count = |write: bool| -> u64 {
            total(used.iter().filter(|used| used.write == write).map(|used| used.count))
        };
        let apart = |a: &OperationUse, b: &OperationUse| {
            a.allocation != b.allocation || a.end <= b.low || b.end <= a.low
        };
        let reads = used.iter().filter(|used| !used.write);
        let disjoint = reads
            .clone()
            .all(|read| used.iter().filter(|used| used.write).all(|write| apart(read, write)));
        let (idempotent, idempotent_reason) = match operation {
            // What they wait for may have changed again.
            Operation::Value {} => (None, Some("orders streams")),
            _ if disjoint => (Some(true), None),
            _ => (None, Some("reads and writes one allocation")),
        };
        Row {
            name: operation_name(operation).to_owned(),
            // A copy within the device is both a read and a write of it.
            launches: count(false).max(count(true)),
            in_graphs: 0,
            arguments: None,
            reads: set(false),
            writes: set(true),
            derived: vec!["exact"],
            indirect: Some(false),
            idempotent,
            idempotent_reason,
            repeated: Vec::new(),
            interruptible: None,
            interruptible_reason: None,
            twice: None,
            checked: None,
            words: Vec::new(),
        }
    };
    let mut rows: Vec<Row> = kinds.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.writes.bytes));
    rows
}

/// The names of sources, the strongest first.
fn ranked(sources: &HashSet<Source>) -> Vec<&'static str> {
    let all = [Source::Ptx, Source::Name, Source::Observed, Source::Assumed];
    all.into_iter().filter(|source| sources.contains(source)).map(source_name).collect()
}

fn source_name(source: Source) -> &'static str {
    match source {
        Source::Ptx => "code",
        Source::Name => "name",
        Source::Observed => "observed",
        Source::Assumed => "assumed",
    }
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::None => "none",
        Direction::Read => "read",
        Direction::Write => "write",
        Direction::ReadWrite => "read-write",
        Direction::Unknown => "unknown",
    }
}
