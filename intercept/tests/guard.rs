//! Launches that wait for memory that is being saved.

#[path = "support/accesses.rs"]
mod program_body;
mod support;

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use gpucr_wire::access::{KernelSummary, Reached, Slot};
use gpucr_wire::reach::{Index, Reach, Term};
use gpucr_wire::table::Range;
use gpucr_wire::{Reply, Request, Table};
use support::{Agent, ENV_PROGRAM, Program};

const MIB: u64 = 1 << 20;
/// How long a call that waits is watched, milliseconds. One that does not wait is not missed by this,
/// only noticed late.
const MOMENT: u64 = 150;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        program_body::run();
    }
}

/// A program whose allocation `large` has three chunks, some of which are pending.
struct Guarded {
    program: Program,
    agent: Agent,
    at: BTreeMap<String, u64>,
    table: Table,
}

fn start() -> (Program, BTreeMap<String, u64>) {
    let mut program = Program::start();
    let names = program.ask("where");
    let pair = |pair: &str| {
        let (name, address) = pair.split_once('=').expect("a pair");
        (name.to_owned(), address.parse().expect("an address"))
    };
    let at = names.split(' ').map(pair).collect();
    (program, at)
}

/// Starts the program with an agent, and also gives the id of the kernel that `kernel` launches.
fn start_with_kernel() -> (Program, Agent, BTreeMap<String, u64>, u64) {
    let (mut program, at) = start();
    let (mut agent, _) = program.agent();
    agent.must(&Request::Record { on: true });
    assert_eq!(program.ask("kernel"), "done");
    let Reply::Accesses { accesses } = agent.ask(&Request::Accesses {}) else { panic!("none") };
    (program, agent, at, accesses.kernels[0].id)
}

fn table(at: &BTreeMap<String, u64>, pending: &[usize]) -> (Table, OwnedFd) {
    let large = Range { address: at["large"], size: 6 * MIB };
    // Out of order, as the program's memory may be.
    let mapped = Range { address: at["mapped"], size: 2 * MIB };
    let (table, file) = Table::create(vec![mapped, large]).expect("a table");
    pending.iter().for_each(|chunk| table.chunks(1).pend(*chunk));
    (table, file)
}

fn install(
    agent: &mut Agent,
    (table, file): &(Table, OwnedFd),
    summaries: Vec<KernelSummary>,
    distrusted: &[&str],
) {
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    let distrusted = distrusted.iter().map(|name| (*name).to_owned()).collect();
    let request = Request::Guard { ranges: table.ranges().to_vec(), summaries, distrusted };
    assert_eq!(agent.guard(&request, file), Reply::Done {});
    agent.must(&Request::OpenGate {});
}

impl Guarded {
    fn with(program: Program, at: BTreeMap<String, u64>, pending: &[usize]) -> Self {
        let (mut agent, _) = program.agent();
        let made = table(&at, pending);
        install(&mut agent, &made, Vec::new(), &[]);
        Self { program, agent, at, table: made.0 }
    }

    fn start(pending: &[usize]) -> Self {
        let (program, at) = start();
        Self::with(program, at, pending)
    }

    /// Gives a command whose call has to wait, and sees it wait for these chunks.
    fn waits(&mut self, command: &str, chunks: &[usize]) {
        self.program.tell(command);
        assert_eq!(self.program.line(MOMENT), None, "{command} does not wait");
        let wanted: Vec<_> = std::iter::from_fn(|| self.table.claim_wanted()).collect();
        let expected: Vec<_> = chunks.iter().map(|chunk| (1, *chunk)).collect();
        assert_eq!(wanted, expected, "{command}");
    }

    fn finish(&self, chunks: &[usize]) {
        chunks.iter().for_each(|chunk| assert!(self.table.chunks(1).finish(*chunk)));
    }

    fn goes_on(&self) {
        assert_eq!(self.program.line(20_000).as_deref(), Some("done"));
    }

    fn blocked(&self) -> (u64, Duration) {
        let header = self.table.header();
        let time = Duration::from_nanos(header.blocked_ns.load(Ordering::Relaxed));
        (header.blocked.load(Ordering::Relaxed), time)
    }
}

#[test]
fn each_form_of_a_launch_waits_for_its_allocations() {
    for form in ["kernel", "cooperative", "ex", "extra"] {
        let mut guarded = Guarded::start(&[0, 2]);
        // The pointer is to the first chunk.
        guarded.waits(form, &[0, 2]);
        guarded.finish(&[2]);
        assert_eq!(guarded.program.line(MOMENT), None, "{form}: one chunk is not saved");
        guarded.finish(&[0]);
        guarded.goes_on();
        let (blocked, time) = guarded.blocked();
        assert_eq!(blocked, 1, "{form}: two of three launches need not wait");
        assert!(time > Duration::from_millis(MOMENT), "{form}: {time:?}");
        assert_eq!(guarded.program.ask(form), "done");
    }
}

#[test]
fn what_only_reads_goes_on() {
    let mut guarded = Guarded::start(&[0, 1, 2]);
    assert_eq!(guarded.program.ask("read"), "done");
    // Through a slot that is known to be read.
    let (mut program, mut agent, at, kernel) = start_with_kernel();
    for reads in [true, false] {
        let slot = Slot { param: 0, offset: if reads { 0 } else { 8 } };
        let summaries =
            KernelSummary { kernel, anywhere: false, reads: vec![slot], reaches: Vec::new() };
        let made = table(&at, &[1]);
        install(&mut agent, &made, vec![summaries], &[]);
        program.tell("kernel");
        assert_eq!(program.line(MOMENT).is_some(), reads);
        made.0.end();
        if !reads {
            assert_eq!(program.line(20_000).as_deref(), Some("done"));
        }
    }
}

#[test]
fn a_kernel_waits_for_as_much_as_it_reaches() {
    let (mut program, mut agent, at, kernel) = start_with_kernel();
    // From the second MiB on, one for each block: of three launches the last, of three blocks, comes to the
    // second chunk.
    let blocks = Term { index: Index::Block.number(0) as u8, bytes: 1 << 19 };
    let reach = Reach { low: 1 << 20, end: (1 << 20) + 4, terms: vec![blocks] };
    let slot = Slot { param: 0, offset: 0 };
    let reaches = vec![Reached { slot, reach }];
    let summaries =
        || KernelSummary { kernel, anywhere: false, reads: Vec::new(), reaches: reaches.clone() };
    for (pending, waits) in [(&[2][..], false), (&[1, 2], true)] {
        let made = table(&at, pending);
        install(&mut agent, &made, vec![summaries()], &[]);
        program.tell("kernel");
        assert_eq!(program.line(MOMENT).is_none(), waits, "{pending:?}");
        let wanted: Vec<_> = std::iter::from_fn(|| made.0.claim_wanted()).collect();
        assert_eq!(wanted, if waits { vec![(1, 1)] } else { Vec::new() });
        made.0.end();
        if waits {
            assert_eq!(program.line(20_000).as_deref(), Some("done"));
        }
    }
    // What is not trusted may write all of it.
    let made = table(&at, &[2]);
    install(&mut agent, &made, vec![summaries()], &["touch"]);
    program.tell("kernel");
    assert_eq!(program.line(MOMENT), None);
    made.0.end();
    assert_eq!(program.line(20_000).as_deref(), Some("done"));
}

#[test]
fn kernels_that_may_write_anywhere_wait_for_everything() {
    let (mut program, mut agent, at, kernel) = start_with_kernel();
    let slots = [(0, 0), (1, 0), (1, 8), (1, 16)];
    let reads = slots.map(|(param, offset)| Slot { param, offset });
    let summaries = |anywhere| {
        vec![KernelSummary { kernel, anywhere, reads: reads.into(), reaches: Vec::new() }]
    };
    for (summaries, distrusted) in [(summaries(true), &[][..]), (summaries(false), &["x", "touch"])]
    {
        // It would not write through any of its arguments.
        let made = table(&at, &[1]);
        made.0.chunks(0).pend(0);
        install(&mut agent, &made, summaries, distrusted);
        program.tell("kernel");
        assert_eq!(program.line(MOMENT), None);
        let wanted: Vec<_> = std::iter::from_fn(|| made.0.claim_wanted()).collect();
        assert_eq!(wanted, [(0, 0), (1, 1)]);
        made.0.end();
        assert_eq!(program.line(20_000).as_deref(), Some("done"));
    }
}

#[test]
fn copies_and_fills_wait_for_exactly_what_they_write() {
    // They write within the first chunk.
    let mut guarded = Guarded::start(&[1, 2]);
    assert_eq!(guarded.program.ask("copies"), "done");
    assert_eq!(guarded.blocked(), (0, Duration::ZERO));
    let mut guarded = Guarded::start(&[0, 1]);
    guarded.waits("copies", &[0]);
    guarded.finish(&[0]);
    guarded.goes_on();
}

#[test]
fn batches_wait_for_exactly_what_they_write() {
    // Where they write within `large`: a line in the first chunk, a box and a value in the second.
    for (command, chunk) in [("batches", 0), ("boxes", 1), ("write values", 1)] {
        let others: Vec<usize> = (0..3).filter(|other| *other != chunk).collect();
        let mut guarded = Guarded::start(&others);
        assert_eq!(guarded.program.ask(command), "done");
        assert_eq!(guarded.blocked(), (0, Duration::ZERO), "{command}");
        let mut guarded = Guarded::start(&[0, 1, 2]);
        guarded.waits(command, &[chunk]);
        guarded.finish(&[chunk]);
        guarded.goes_on();
    }
    // What is only read there does not wait.
    let mut guarded = Guarded::start(&[0, 1, 2]);
    assert_eq!(guarded.program.ask("values"), "done");
    // Captured values are written when the graph is launched.
    assert_eq!(guarded.program.ask("capture values"), "done");
    guarded.waits("graph", &[2]);
    guarded.finish(&[2]);
    guarded.goes_on();
    assert_eq!(guarded.blocked().0, 1);
}

#[test]
fn launches_with_arguments_set_before_wait_for_everything() {
    let mut guarded = Guarded::start(&[0, 2]);
    guarded.waits("legacy", &[0, 2]);
    guarded.finish(&[0, 2]);
    guarded.goes_on();
}

#[test]
fn a_graph_waits_when_it_is_launched_and_not_when_it_is_captured() {
    let (mut program, at) = start();
    assert_eq!(program.ask("make graph"), "done");
    let mut guarded = Guarded::with(program, at, &[1]);
    assert_eq!(guarded.program.ask("capture"), "done");
    guarded.waits("graph", &[1]);
    guarded.finish(&[1]);
    guarded.goes_on();
    assert_eq!(guarded.program.ask("graph"), "done");
}

#[test]
fn a_graph_with_conditional_nodes_waits_for_everything() {
    let (mut program, at) = start();
    assert_eq!(program.ask("make conditional graph"), "done");
    let mut guarded = Guarded::with(program, at, &[0, 1, 2]);
    guarded.waits("graph", &[0, 1, 2]);
    guarded.finish(&[0, 1, 2]);
    guarded.goes_on();
}

#[test]
fn an_allocation_of_the_programs_own_is_its_reservation() {
    let (mut program, at) = start();
    let (mut agent, _) = program.agent();
    let made = table(&at, &[]);
    made.0.chunks(0).pend(0);
    install(&mut agent, &made, Vec::new(), &[]);
    // The pointer is to the second block in the reservation, which is not in the table.
    program.tell("kernel");
    assert_eq!(program.line(MOMENT), None);
    assert_eq!(made.0.claim_wanted(), Some((0, 0)));
    assert!(made.0.chunks(0).finish(0));
    assert_eq!(program.line(20_000).as_deref(), Some("done"));
}

#[test]
fn the_end_of_the_connection_lets_everybody_go() {
    let mut guarded = Guarded::start(&[0, 1, 2]);
    guarded.waits("kernel", &[0, 1, 2]);
    let Guarded { program, agent, table, .. } = guarded;
    drop(agent);
    assert_eq!(program.line(20_000).as_deref(), Some("done"));
    assert!(!table.chunks(1).finish(0), "the copier is told");
}

#[test]
fn the_gate_can_be_closed_while_a_call_waits() {
    let mut guarded = Guarded::start(&[1]);
    guarded.waits("kernel", &[1]);
    guarded.table.end();
    guarded.agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    assert!(!shows(&guarded.program, "gpucr-chunks"), "the table is mapped still");
    guarded.agent.must(&Request::OpenGate {});
    guarded.goes_on();
    // Another table at once, though nothing was detached.
    let made = table(&guarded.at, &[0]);
    install(&mut guarded.agent, &made, Vec::new(), &[]);
    guarded.program.tell("kernel");
    assert_eq!(guarded.program.line(MOMENT), None);
    assert!(shows(&guarded.program, "gpucr-chunks"));
    made.0.end();
    guarded.goes_on();
}

/// Whether the program has mapped a file of this name.
fn shows(program: &Program, name: &str) -> bool {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", program.pid())).expect("it runs");
    maps.contains(name)
}

#[test]
fn memory_may_be_given_back_while_it_is_saved() {
    let mut guarded = Guarded::start(&[0, 1, 2]);
    let since = Instant::now();
    assert_eq!(guarded.program.ask("replace"), "done");
    assert!(since.elapsed() < Duration::from_secs(10));
    // What is new at the same place waits too, and that is all.
    guarded.program.tell("copies");
    let _ = guarded.program.line(MOMENT);
    guarded.table.end();
    drop(guarded.agent);
    assert_eq!(guarded.program.ask("read"), "done");
}

#[test]
fn a_table_is_refused_unless_the_gate_is_closed_and_it_fits() {
    let (program, at) = start();
    let (mut agent, _) = program.agent();
    let (table, file) = table(&at, &[]);
    let request = |ranges| Request::Guard { ranges, summaries: Vec::new(), distrusted: Vec::new() };
    let own = request(table.ranges().to_vec());
    assert!(matches!(agent.guard(&own, &file), Reply::Failed { .. }), "the gate is open");
    agent.must(&Request::CloseGate { timeout_ms: 20_000 });
    let larger = request(vec![Range { address: at["large"], size: 1 << 40 }]);
    assert!(matches!(agent.guard(&larger, &file), Reply::Failed { .. }), "it is too small");
    assert_eq!(agent.guard(&own, &file), Reply::Done {});
}
