//! What `gpucr trace` does: watch a program for a while, and tell what its launches read and write.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::time::{Duration, Instant};

use gpucr_wire::GateState;
use gpucr_wire::access::{
    Allocation, KernelUse, Operation, OperationUse, SlotUse, Touched, WHOLE_BUFFER,
};
use serde::Serialize;

pub use super::check::Checked;
use super::check::{Findings, check};
use super::twice::twice;
use super::written::touched_range;
use super::{Kernels, Tally};
use crate::base::stop::Stop;
use crate::base::timeline::Timeline;
use crate::cuda::Drivers;
use crate::engine::error::Error;
use crate::engine::held::Held;
use crate::engine::mapped::Mapped;
use crate::engine::memory::Bulk;
use crate::host::process::{Agent, Lock, Tree};
use crate::kernels::{Direction, Source};

/// How often the agents are asked, so that what they keep stays small.
const ASK: Duration = Duration::from_millis(250);
/// For so long kernels are learned of before memory that the programs have given back is let go of: they
/// wait for it a few seconds.
const LEARNING: Duration = Duration::from_secs(1);
/// How long is slept between looks at the clock.
const NAP: Duration = Duration::from_millis(20);
/// How long an agent may take to answer at first.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// Larger images of modules are not read, bytes.
pub(super) const LARGEST_IMAGE: u64 = 512 << 20;

/// What to trace, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// Root of the process tree.
    pub pid: u32,
    /// For how long.
    pub time: Duration,
    /// Also compare the device memory before and after.
    pub observe: bool,
    /// Stop the program after each launch, and compare what changed with what was expected to.
    pub check: bool,
    /// Ends the trace early, with what there is.
    pub stop: Stop,
}

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
    /// The kernels, those that may write most first.
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
    /// Whether it follows pointers beside its parameters; none if its code is not known.
    pub indirect: Option<bool>,
    /// Whether doing it twice is the same as doing it once; none if that is not known. Of kernels only
    /// their code can prove it.
    pub idempotent: Option<bool>,
    /// Why it is not, or why that is not known.
    pub idempotent_reason: Option<&'static str>,
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
    /// It may be anything besides.
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

/// What was seen of a process.
#[derive(Default)]
pub(super) struct Watched {
    pub(super) tally: Tally,
    pub(super) kernels: Kernels,
    findings: Option<Findings>,
}

/// The processes, and what was seen of each, in the same order.
pub(super) struct Session {
    pub(super) held: Vec<Held>,
    pub(super) watched: Vec<Watched>,
    /// The device memory of all, mapped in gpucr.
    pub(super) memory: Option<Bulk>,
    /// Keep a second gpucr away.
    _locks: Vec<Lock>,
}

/// Watches the CUDA processes of a tree for a while. They run on all the time.
///
/// # Errors
/// The tree has no process under gpucr, or another gpucr is at work on one. A process that ends
/// meanwhile is no error.
pub fn trace(options: &Options) -> Result<Report, Error> {
    let mut session = Session::attach(options)?;
    if options.check && session.held.len() > 1 {
        return Err(Error::SeveralProcesses { pid: options.pid, count: session.held.len() });
    }
    if options.observe || options.check {
        session.open_memory();
    }
    for agent in session.held.iter_mut().filter_map(|held| held.agent.as_mut()) {
        agent.record(true)?;
    }
    tracing::debug!(processes = session.held.len(), "recording");
    let since = Instant::now();
    if options.check {
        let findings = check(&mut session, options)?;
        session.watched[0].findings = Some(findings);
    } else {
        session.watch(options);
    }
    let seconds = since.elapsed().as_secs_f64();
    let observed = session.memory.is_some();
    let pairs = session.held.iter().zip(&session.watched);
    Ok(Report { seconds, processes: pairs.map(|(held, one)| one.report(held, observed)).collect() })
}

impl Session {
    /// Connects to all agents of a tree.
    fn attach(options: &Options) -> Result<Self, Error> {
        let pid = options.pid;
        let tree = Tree::read(pid)?;
        let drivers = Drivers::default();
        let mut session =
            Self { held: Vec::new(), watched: Vec::new(), memory: None, _locks: Vec::new() };
        for process in tree.processes.into_iter().filter(Agent::listens) {
            let pid = process.pid;
            let lock = Lock::take(&process).map_err(|source| Error::Io {
                what: format!("cannot take the lock of process {pid}"),
                source,
            })?;
            session._locks.push(lock.ok_or(Error::Busy { pid })?);
            if process.is_suspended() {
                return Err(Error::Suspended { pid });
            }
            let mut agent = Agent::connect(&process, FIRST_ANSWER, Some(options.stop.asked()))?;
            // The end of a trace asks once more.
            agent.set_stop(None);
            if agent.hello().gate == (GateState::Detached {}) {
                return Err(Error::Detached { pid });
            }
            let driver = match Mapped::of(&process, &drivers)? {
                Mapped::Host { library, .. } => library,
                mapped => return Err(mapped.refused(pid)),
            };
            let (agent, blocks, reserve) = (Some(agent), Vec::new(), Vec::new());
            session.held.push(Held {
                process,
                driver,
                agent,
                has_agent: true,
                blocks,
                reserve,
                freed: Vec::new(),
                guard: None,
                guard_failed: None,
            });
            session.watched.push(Watched::default());
        }
        if session.held.is_empty() { Err(Error::NoAgent { pid }) } else { Ok(session) }
    }

    pub(super) fn is_alive(&self) -> bool {
        self.held.iter().any(|held| held.agent.is_some())
    }

    /// Sums up for as long as was asked for.
    fn watch(&mut self, options: &Options) {
        let since = Instant::now();
        let mut next = since + ASK;
        while !options.stop.is_set() && self.is_alive() && since.elapsed() < options.time {
            if Instant::now() >= next {
                self.ask();
                next = Instant::now() + ASK;
            }
            let left = options.time.saturating_sub(since.elapsed());
            std::thread::sleep(NAP.min(left));
        }
        self.ask();
        self.observe();
        while !self.learn() && !options.stop.is_set() {}
    }

    /// Takes up what was launched since the last time, and lets go of memory that was given back.
    fn ask(&mut self) {
        let until = Instant::now() + LEARNING;
        for (held, watched) in self.held.iter_mut().zip(&mut self.watched) {
            let Some(agent) = held.agent.as_mut() else { continue };
            let asked = agent.accesses().and_then(|accesses| {
                watched.kernels.learn(agent, &accesses.kernels, LARGEST_IMAGE, until)?;
                Ok(accesses)
            });
            match asked {
                Ok(accesses) => watched.tally.add(accesses),
                Err(error) => {
                    tracing::debug!(%error, "a process is not watched any more");
                    held.agent = None;
                }
            }
        }
        self.with_memory(follow);
    }

    /// Learns of kernels for which there was no time so far. Says whether nothing is left to learn.
    fn learn(&mut self) -> bool {
        let until = Instant::now() + LEARNING;
        let mut all = true;
        for (held, watched) in self.held.iter_mut().zip(&mut self.watched) {
            let Some(agent) = held.agent.as_mut() else { continue };
            let Watched { tally, kernels, .. } = watched;
            match kernels.learn(agent, tally.kernels.values(), LARGEST_IMAGE, until) {
                Ok(done) => all &= done,
                Err(error) => {
                    tracing::debug!(%error, "a process is not watched any more");
                    held.agent = None;
                }
            }
        }
        self.with_memory(follow);
        all
    }

    /// Maps the memory and looks at it for the first time. It takes a context of gpucr's own on each
    /// device; where that cannot be had, nothing is observed.
    fn open_memory(&mut self) {
        match prepare(&mut self.held) {
            Ok(bulk) => self.memory = bulk,
            Err(error) => tracing::warn!(%error, "device memory cannot be looked at"),
        }
        self.with_memory(look);
    }

    /// Looks at the memory again and draws conclusions.
    fn observe(&mut self) {
        self.with_memory(look);
        let Some(bulk) = &self.memory else { return };
        for (program, watched) in self.watched.iter_mut().enumerate() {
            let Watched { tally, kernels, .. } = watched;
            let changed = |a: &Allocation| bulk.has_changed(program, a.address, a.size);
            kernels.observe(tally.kernels.values(), tally.allocations.values(), changed);
        }
    }

    /// Does something with the memory; without it from then on if that fails.
    pub(super) fn with_memory(
        &mut self,
        work: impl FnOnce(&mut Bulk, &mut [Held]) -> Result<bool, Error>,
    ) {
        let Some(mut bulk) = self.memory.take() else { return };
        match work(&mut bulk, &mut self.held) {
            Ok(true) => self.memory = Some(bulk),
            Ok(false) => tracing::warn!("the device has no room to look at its memory"),
            Err(error) => tracing::warn!(%error, "device memory is not looked at"),
        }
    }
}

fn prepare(held: &mut [Held]) -> Result<Option<Bulk>, Error> {
    let (mut wanted, mut bytes) = (Vec::new(), 0);
    for agent in held.iter_mut().filter_map(|held| held.agent.as_mut()) {
        let counts = agent.counts()?;
        wanted.extend(counts.devices);
        bytes += counts.bulk_bytes;
    }
    let driver = Drivers::default().open(&held[0].driver)?;
    let devices: Vec<_> =
        driver.devices()?.into_iter().filter(|device| wanted.contains(&device.uuid)).collect();
    let Some(mut bulk) = Bulk::prepare(&driver, &devices, bytes, Timeline::default())? else {
        return Ok(None);
    };
    Ok(bulk.prepare_hashing().then_some(bulk))
}

fn follow(bulk: &mut Bulk, held: &mut [Held]) -> Result<bool, Error> {
    let mut blocks = Vec::new();
    for held in held.iter_mut() {
        // One that has just ended has none; the others are followed all the same.
        blocks.push(held.export().unwrap_or_else(|error| {
            tracing::debug!(%error, "a process is not watched any more");
            held.agent = None;
            held.blocks.clear();
            Vec::new()
        }));
    }
    bulk.follow(held, &blocks)
}

pub(super) fn look(bulk: &mut Bulk, held: &mut [Held]) -> Result<bool, Error> {
    let fits = follow(bulk, held)?;
    if fits {
        bulk.look()?;
    }
    Ok(fits)
}

impl Watched {
    fn report(&self, held: &Held, observed: bool) -> Process {
        let tally = &self.tally;
        let mut kernels: Vec<Row> =
            tally.kernels.values().map(|kernel| self.kernel(kernel)).collect();
        let most = |row: &Row| (row.writes.everything, row.writes.bytes, row.launches);
        kernels.sort_by(|a, b| most(b).cmp(&most(a)).then_with(|| a.name.cmp(&b.name)));
        Process {
            pid: held.process.pid,
            command: held.process.command.clone(),
            ended: held.agent.is_none(),
            observed,
            launches: total(tally.kernels.values().map(|kernel| kernel.launches)),
            checked: self.findings.as_ref().map(|findings| findings.all),
            unknown_launches: tally.unknown_graphs.saturating_add(tally.unseen),
            host_functions: tally.host_functions,
            kernels,
            operations: operations(tally),
        }
    }

    fn kernel(&self, kernel: &KernelUse) -> Row {
        let (mut reads, mut writes) = (Touches::new(), Touches::new());
        let (mut sources, mut words) = (HashSet::new(), Vec::new());
        let mut everything = !kernel.known && kernel.slots.is_empty();
        for slot in &kernel.slots {
            let (direction, source) = self.kernels.direction(kernel.id, slot);
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
        let (idempotent, idempotent_reason) =
            twice(kernel, &self.kernels, &self.tally.allocations).told();
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
            indirect: self.kernels.is_indirect(kernel.id),
            idempotent,
            idempotent_reason,
            checked: self.findings.as_ref().and_then(|f| f.kernels.get(&kernel.id).copied()),
            words,
        }
    }

    fn pointed(&self, kernel: &KernelUse, slot: &SlotUse, touched: &Touched) -> Pointed {
        let allocation = self.tally.allocations.get(&touched.allocation);
        let range = allocation
            .map(|allocation| touched_range(&self.kernels, kernel, slot, touched, allocation));
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
            checked: None,
            words: Vec::new(),
        }
    };
    let mut rows: Vec<Row> = kinds.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.writes.bytes));
    rows
}

/// What operations of a kind are called.
pub(crate) fn operation_name(operation: Operation) -> &'static str {
    match operation {
        Operation::Copy {} => "copies",
        Operation::Fill {} => "fills",
        Operation::Value {} => "stream values",
        Operation::Discard {} => "discards",
        Operation::Decompress {} => "decompression",
    }
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
