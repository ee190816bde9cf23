//! Kernels that are interrupted between two of their blocks or in their loops, and calls that come behind them.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use gpucr_wire::message::{Interrupted, Place};
use gpucr_wire::{GateState, Reply, Request, Rest};
use support::{Agent, ENV_PROGRAM};

/// More than run at the same time on any machine.
const BLOCKS: u64 = 512;
const NON_BLOCKING: u64 = 1;
const NOT_READY: u64 = 600;
/// How long a call that waits is watched, milliseconds. One that does not wait is not missed by this, only noticed
/// late.
const MOMENT: u64 = 150;
const LONG: u64 = 60_000;

/// A block waits until the host says so, and counts its run. The second kernel does so without a barrier, and the third
/// with one again and again, so that they can be interrupted while they wait.
const PTX: &str = ".version 8.0
.target sm_70
.address_size 64
.visible .entry waiting(.param .u64 go, .param .u64 counts)
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<4>;
	.reg .pred %p<1>;
	ld.param.u64 %rd0, [go];
	ld.param.u64 %rd1, [counts];
	mov.u32 %r0, %ctaid.x;
	mul.wide.u32 %rd2, %r0, 4;
	add.u64 %rd1, %rd1, %rd2;
	red.global.add.u32 [%rd0+8], 1;
	bar.sync 0;
WAIT:
	ld.volatile.global.u32 %r1, [%rd0];
	setp.eq.u32 %p0, %r1, 0;
	@%p0 bra WAIT;
	red.global.add.u32 [%rd1], 1;
	ret;
}
.visible .entry looping(.param .u64 go, .param .u64 counts)
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<4>;
	.reg .pred %p<1>;
	ld.param.u64 %rd0, [go];
	ld.param.u64 %rd1, [counts];
	mov.u32 %r0, %ctaid.x;
	mul.wide.u32 %rd2, %r0, 4;
	add.u64 %rd1, %rd1, %rd2;
	red.global.add.u32 [%rd0+8], 1;
WAIT:
	ld.volatile.global.u32 %r1, [%rd0];
	setp.eq.u32 %p0, %r1, 0;
	@%p0 bra WAIT;
	red.global.add.u32 [%rd1], 1;
	ret;
}
.visible .entry meeting(.param .u64 go, .param .u64 counts)
{
	.reg .b32 %r<4>;
	.reg .b64 %rd<4>;
	.reg .pred %p<2>;
	.shared .u32 seen;
	ld.param.u64 %rd0, [go];
	ld.param.u64 %rd1, [counts];
	mov.u32 %r0, %ctaid.x;
	mul.wide.u32 %rd2, %r0, 4;
	add.u64 %rd1, %rd1, %rd2;
	mov.u32 %r2, %tid.x;
	setp.ne.u32 %p1, %r2, 0;
	red.global.add.u32 [%rd0+8], 1;
WAIT:
	@%p1 bra MEET;
	ld.volatile.global.u32 %r1, [%rd0];
	st.shared.u32 [seen], %r1;
MEET:
	bar.sync 0;
	ld.shared.u32 %r1, [seen];
	bar.sync 0;
	setp.eq.u32 %p0, %r1, 0;
	@%p0 bra WAIT;
	red.global.add.u32 [%rd1], 1;
	ret;
}
.visible .entry repeated(.param .u64 from, .param .u64 to)
{
	.local .align 4 .b8 own[4];
	.reg .b32 %r<6>;
	.reg .b64 %rd<6>;
	.reg .pred %p<1>;
	ld.param.u64 %rd0, [from];
	ld.param.u64 %rd1, [to];
	mov.u32 %r0, %ctaid.x;
	mul.wide.u32 %rd2, %r0, 4;
	add.u64 %rd3, %rd0, %rd2;
	add.u64 %rd4, %rd1, %rd2;
	ld.global.u32 %r1, [%rd3];
	mov.u32 %r5, own;
	st.local.u32 [%r5], %r1;
	mov.u32 %r3, 2000;
NEXT:
	mad.lo.u32 %r1, %r1, 1664525, 1013904223;
	sub.u32 %r3, %r3, 1;
	setp.ne.u32 %p0, %r3, 0;
	@%p0 bra NEXT;
	ld.local.u32 %r2, [%r5];
	add.u32 %r1, %r1, %r2;
	st.global.u32 [%rd4], %r1;
	ret;
}
.visible .entry other(.param .u64 go, .param .u64 counts) { ret; }
";

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

struct Waiting {
    program: Caller,
    function: u64,
    module: u64,
    /// The word for which blocks wait. The next one counts those that have begun.
    go: u64,
    /// Pinned memory for a copy.
    copy: u64,
    /// How often each block has run.
    counts: u64,
}

impl Waiting {
    fn start() -> Self {
        Self::start_with("wait*")
    }

    fn start_with(kernels: &str) -> Self {
        let level = if kernels == "repeated" { "abort" } else { "loop" };
        let level = ("GPUCR_INTERRUPT_LEVEL", level);
        let mut program = Caller::start_with(&[("GPUCR_INTERRUPTIBLE", kernels), level]);
        let mut text = PTX.as_bytes().to_vec();
        text.resize(PTX.len().next_multiple_of(8) + 8, 0);
        for (word, bytes) in (200..).zip(text.chunks(8)) {
            program.poke(word, u64::from_le_bytes(bytes.try_into().expect("eight")));
        }
        let module = program.made("cuModuleLoadData", &[program.at(200)]);
        let kernel = match kernels {
            "looping" => b"looping\0",
            "meeting" => b"meeting\0",
            "repeated" => b"repeated",
            _ => b"waiting\0",
        };
        program.poke(190, u64::from_le_bytes(*kernel));
        program.poke(191, 0);
        let function = program.made("cuModuleGetFunction", &[module, program.at(190)]);
        let go = program.made("cuMemHostAlloc", &[4096, 2]);
        program.call("poke", &[go, 0]);
        program.call("poke", &[go + 8, 0]);
        let copy = program.made("cuMemHostAlloc", &[4 * BLOCKS, 2]);
        let counts = program.made("cuMemAlloc_v2", &[4 * BLOCKS]);
        program.must("cuMemsetD32_v2", &[counts, 0, BLOCKS]);
        program.must("cuCtxSynchronize", &[]);
        let (at_go, at_counts) = (program.at(180), program.at(181));
        program.poke(180, go);
        program.poke(181, counts);
        program.poke(182, at_go);
        program.poke(183, at_counts);
        Self { program, function, module, go, copy, counts }
    }

    /// Another kernel of the module.
    fn other(&mut self, name: &[u8; 8]) -> u64 {
        self.program.poke(190, u64::from_le_bytes(*name));
        self.program.made("cuModuleGetFunction", &[self.module, self.program.at(190)])
    }

    /// The blocks that begin next wait again; how many have begun.
    fn stop(&mut self) -> u64 {
        let go = self.go;
        self.program.call("poke", &[go, 0]);
        self.program.call("peek", &[go + 8])
    }

    fn stream(&mut self, flags: u64) -> u64 {
        self.program.made("cuStreamCreate", &[flags])
    }

    fn launch(&mut self, stream: u64) {
        let params = self.program.at(182);
        let all = [self.function, BLOCKS, 1, 1, 1, 1, 1, 0, stream, params, 0];
        self.program.must("cuLaunchKernel", &all);
    }

    /// Waits until one block more has begun than had before.
    fn begun(&mut self, before: u64) -> u64 {
        let place = self.go + 8;
        loop {
            let begun = self.program.call("peek", &[place]);
            if begun > before {
                return begun;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    fn go(&mut self) {
        let go = self.go;
        self.program.call("poke", &[go, 1]);
    }

    /// Has a thread copy what was counted.
    fn begin_copy(&mut self, thread: u32, stream: u64) {
        self.program.begin(
            thread,
            "cuMemcpyDtoHAsync_v2",
            &[self.copy, self.counts, 4 * BLOCKS, stream],
        );
    }

    /// Whether each block has run so often, as the last copy has it.
    fn copied(&mut self, times: u64) {
        for word in 0..BLOCKS / 2 {
            let counted = self.program.call("peek", &[self.copy + 8 * word]);
            assert_eq!(counted, times << 32 | times, "blocks of word {word}");
        }
    }

    /// Whether each block has run so often.
    fn have_run(&mut self, times: u64) {
        self.program.must("cuCtxSynchronize", &[]);
        self.begin_copy(0, 0);
        assert_eq!(self.program.answer(0, LONG), Some(0));
        self.program.must("cuCtxSynchronize", &[]);
        self.copied(times);
    }
}

fn halt(agent: &mut Agent, wait_ms: u64, interrupt_ms: u64) -> Rest {
    match agent.ask(&Request::Halt { wait_ms, timeout_ms: LONG, interrupt_ms }) {
        Reply::Rest { rest } => rest,
        other => panic!("{other:?}"),
    }
}

fn interrupted(agent: &mut Agent) -> Vec<Interrupted> {
    match agent.ask(&Request::Interrupted {}) {
        Reply::Interrupted { launches } => launches,
        other => panic!("{other:?}"),
    }
}

/// Interrupts the one launch, which then is not over.
fn interrupt(waiting: &mut Waiting, agent: &mut Agent) -> Interrupted {
    assert!(!halt(agent, 100, LONG).is_at_rest, "blocks that have begun wait");
    waiting.go();
    assert!(halt(agent, LONG, LONG).is_at_rest);
    let launches = interrupted(agent);
    let [one] = &launches[..] else { panic!("{launches:?}") };
    assert!(one.kernel == "waiting" && one.blocks == BLOCKS && one.done < BLOCKS, "{one:?}");
    assert_eq!(one.place, Place::Between {});
    one.clone()
}

/// Interrupts the one launch, which waits inside of its blocks.
fn interrupt_inside(agent: &mut Agent, kernel: &str) {
    assert!(halt(agent, LONG, LONG).is_at_rest);
    let place = if kernel == "looping" { Place::Loops {} } else { Place::Barriers {} };
    let waiting =
        Interrupted { kernel: kernel.to_owned(), done: 0, blocks: BLOCKS, place, again: 0 };
    assert_eq!(interrupted(agent), [waiting]);
}

#[test]
fn threads_go_on_in_their_loops() {
    go_on_inside("looping");
}

#[test]
fn blocks_go_on_at_their_barriers() {
    go_on_inside("meeting");
}

fn go_on_inside(kernel: &str) {
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    let begun = waiting.begun(0);
    waiting.begin_copy(1, stream);
    let (mut agent, _) = waiting.program.program.agent();
    // Nobody lets the blocks that have begun come to their end.
    interrupt_inside(&mut agent, kernel);
    assert_eq!(waiting.program.answer(1, MOMENT), None);
    // Its device memory is taken away and given back, and it waits once more.
    drop(agent.turn(&waiting.program.program));
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), NOT_READY);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt_inside(&mut agent, kernel);
    agent.must(&Request::OpenGate {});
    waiting.go();
    assert_eq!(waiting.program.answer(1, LONG), Some(0));
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
    let all = waiting.begun(0);
    assert!(all == BLOCKS && begun <= BLOCKS, "{all}: none has begun again");
    // The next launch finds nothing of this one.
    waiting.launch(stream);
    waiting.have_run(2);
}

/// So many launches of it had short blocks; whether the next one is interrupted between blocks.
fn is_interrupted_between(kernel: &str, short: u64) -> bool {
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    waiting.go();
    for _ in 0..short {
        waiting.launch(stream);
        waiting.program.must("cuStreamSynchronize", &[stream]);
    }
    let before = waiting.stop();
    waiting.launch(stream);
    waiting.begun(before);
    let (mut agent, _) = waiting.program.program.agent();
    // Those that can be interrupted inside of their blocks end at once, or else as soon as they may.
    if !halt(&mut agent, MOMENT, LONG).is_at_rest {
        waiting.go();
        assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    }
    let is_between = interrupted(&mut agent).iter().any(|one| one.place == Place::Between {});
    agent.must(&Request::OpenGate {});
    waiting.go();
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.have_run(short + 1);
    is_between
}

#[test]
fn blocks_that_were_short_in_several_launches_are_not_interrupted_inside() {
    for kernel in ["looping", "meeting"] {
        assert!(!is_interrupted_between(kernel, 7), "{kernel}");
        // On a busy machine short blocks may have taken long.
        assert!((0..10).any(|_| is_interrupted_between(kernel, 8)), "{kernel}");
    }
}

/// So many threads that the time is up before all are over: some are saved, and some have not begun.
#[test]
fn who_is_given_up_in_its_loops_goes_on_all_the_same() {
    is_given_up("looping");
}

#[test]
fn who_is_given_up_at_its_barriers_goes_on_all_the_same() {
    is_given_up("meeting");
}

fn is_given_up(kernel: &str) {
    const THREADS: u64 = 1024;
    let mut waiting = Waiting::start_with(kernel);
    let stream = waiting.stream(NON_BLOCKING);
    for round in 1..=5 {
        let go = waiting.go;
        waiting.program.call("poke", &[go, 0]);
        waiting.program.call("poke", &[go + 8, 0]);
        let params = waiting.program.at(182);
        let all = [waiting.function, BLOCKS, 1, 1, THREADS, 1, 1, 0, stream, params, 0];
        waiting.program.must("cuLaunchKernel", &all);
        waiting.begun(0);
        let (mut agent, _) = waiting.program.program.agent();
        // At rest or not.
        halt(&mut agent, 0, 1);
        halt(&mut agent, 20, 1);
        agent.must(&Request::OpenGate {});
        waiting.go();
        waiting.program.must("cuStreamSynchronize", &[stream]);
        waiting.have_run(round * THREADS);
    }
}

/// Launches that are aborted and begun again, at rest in time or not, leave what they leave undisturbed. `is_same`: it reads
/// what it writes, and is never aborted.
fn is_repeated(is_same: bool) -> usize {
    const THREADS: u64 = 1024;
    const FIRST: u32 = 9;
    let mut waiting = Waiting::start_with("repeated");
    let stream = waiting.stream(NON_BLOCKING);
    let to = waiting.counts;
    let from = if is_same { to } else { waiting.program.made("cuMemAlloc_v2", &[4 * BLOCKS]) };
    waiting.program.poke(180, from);
    waiting.program.poke(181, to);
    let steps = (0..2000)
        .fold(FIRST, |number, _| number.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    let expected = u64::from(steps.wrapping_add(FIRST));
    // Threads of a block that write what others of it read would race.
    let threads = if is_same { 1 } else { THREADS };
    let mut aborted = 0;
    for round in 0..4 {
        waiting.program.must("cuMemsetD32Async", &[to, 0, BLOCKS, stream]);
        waiting.program.must("cuMemsetD32Async", &[from, FIRST.into(), BLOCKS, stream]);
        let params = waiting.program.at(182);
        let all = [waiting.function, BLOCKS, 1, 1, threads, 1, 1, 0, stream, params, 0];
        waiting.program.must("cuLaunchKernel", &all);
        let (mut agent, _) = waiting.program.program.agent();
        let limit = if round % 2 == 0 { LONG } else { 1 };
        let wait = if round % 2 == 0 { LONG } else { 20 };
        if halt(&mut agent, wait, limit).is_at_rest {
            for one in interrupted(&mut agent) {
                assert!(one.done + one.again <= BLOCKS, "{one:?}");
                aborted += usize::from(one.place == Place::Aborted {});
            }
        }
        agent.must(&Request::OpenGate {});
        waiting.begin_copy(1, stream);
        assert_eq!(waiting.program.answer(1, LONG), Some(0));
        waiting.program.must("cuStreamSynchronize", &[stream]);
        for word in 0..BLOCKS / 2 {
            let found = waiting.program.call("peek", &[waiting.copy + 8 * word]);
            assert_eq!(found, expected << 32 | expected, "blocks of word {word}, round {round}");
        }
    }
    aborted
}

#[test]
fn launches_that_may_be_begun_again_are_aborted() {
    // Where the machine is busy they may be over.
    let aborted = (0..5).map(|_| is_repeated(false));
    assert!({ aborted }.any(|aborted| aborted > 0));
}

#[test]
fn launches_that_read_what_they_write_are_not_aborted() {
    assert_eq!(is_repeated(true), 0);
}

#[test]
fn a_launch_with_much_to_save_is_interrupted_between_blocks() {
    let mut waiting = Waiting::start_with("looping");
    let params = waiting.program.at(182);
    // Nobody waits.
    waiting.go();
    let threads = 1024;
    let all = [waiting.function, 1 << 14, 1, 1, threads, 1, 1, 0, 0, params, 0];
    let counts = waiting.program.made("cuMemAlloc_v2", &[4 << 14]);
    waiting.program.must("cuMemsetD32_v2", &[counts, 0, 1 << 14]);
    waiting.program.poke(181, counts);
    waiting.program.must("cuLaunchKernel", &all);
    waiting.program.must("cuCtxSynchronize", &[]);
    waiting.program.must("cuMemcpyDtoH_v2", &[waiting.copy, counts, 4 * BLOCKS]);
    waiting.copied(threads);
}

#[test]
fn what_is_queued_behind_it_comes_after_all_of_it() {
    let mut waiting = Waiting::start();
    let (stream, other) = (waiting.stream(NON_BLOCKING), waiting.stream(NON_BLOCKING));
    let event = waiting.program.made("cuEventCreate", &[0]);
    waiting.launch(stream);
    waiting.begun(0);
    // What has nothing to do with it goes on, and is not held.
    assert_eq!(waiting.program.call_on(1, "cuEventRecord", &[event, other]), 0);
    waiting.begin_copy(2, stream);
    waiting.program.begin(3, "cuStreamSynchronize", &[stream]);
    waiting.program.begin(4, "cuCtxSynchronize", &[]);
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), NOT_READY);
    // Another stream would wait for it by an event; a host function, of which the driver would say that there is none.
    let behind = waiting.program.made("cuEventCreate", &[0]);
    waiting.program.begin(6, "cuEventRecord", &[behind, stream]);
    waiting.program.begin(7, "cuLaunchHostFunc", &[stream, 0, 0]);
    let (mut agent, _) = waiting.program.program.agent();
    let done = interrupt(&mut waiting, &mut agent).done;
    assert!(done > 0, "a block had begun");
    waiting.program.begin(5, "cuStreamQuery", &[stream]);
    for thread in 2..=7 {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    // Its device memory is taken away and given back. The blocks that are left wait once more.
    let go = waiting.go;
    waiting.program.call("poke", &[go, 0]);
    let agent = agent.turn(&waiting.program.program);
    drop(agent);
    assert_eq!(waiting.program.answer(5, LONG), Some(NOT_READY));
    for thread in [3, 4] {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    waiting.go();
    for thread in [2, 3, 4, 6] {
        assert_eq!(waiting.program.answer(thread, LONG), Some(0), "thread {thread}");
    }
    assert!(waiting.program.answer(7, LONG).is_some());
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
    assert_eq!(waiting.program.call_on(5, "cuStreamQuery", &[stream]), 0);
}

#[test]
fn it_can_be_interrupted_again_and_again() {
    let mut waiting = Waiting::start();
    waiting.launch(0);
    waiting.begun(0);
    let (mut agent, _) = waiting.program.program.agent();
    let first = interrupt(&mut waiting, &mut agent);
    let go = waiting.go;
    waiting.program.call("poke", &[go, 0]);
    let before = waiting.program.call("peek", &[go + 8]);
    agent.must(&Request::OpenGate {});
    waiting.begun(before);
    assert_eq!(waiting.program.call_on(1, "cuStreamQuery", &[0]), NOT_READY);
    let second = interrupt(&mut waiting, &mut agent);
    assert!(second.done > first.done, "{first:?} {second:?}");
    // The end of the connection lets it go on too.
    drop(agent);
    waiting.have_run(1);
    waiting.launch(0);
    waiting.have_run(2);
    // Now there is none.
    let (mut agent, _) = waiting.program.program.agent();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
}

#[test]
fn who_has_waited_for_long_goes_on_and_it_is_like_any_other_launch() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "though the kernel waits for the host");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    agent.must(&Request::OpenGate {});
    waiting.copied(1);
}

#[test]
fn a_copy_that_waits_for_it_anyway_waits_for_ever() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(0);
    waiting.launch(stream);
    waiting.begun(0);
    let (to, counts) = (waiting.copy, waiting.counts);
    waiting.program.begin(1, "cuMemcpyDtoH_v2", &[to, counts, 4 * BLOCKS]);
    waiting.program.begin(2, "cuMemFree_v2", &[counts]);
    // For longer than others.
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, 1500), None, "thread {thread}");
    }
    let (mut agent, _) = waiting.program.program.agent();
    // Who waits has hold of nothing that the agent needs.
    assert!(matches!(agent.ask(&Request::Counts {}), Reply::Counts { .. }));
    interrupt(&mut waiting, &mut agent);
    assert!(matches!(agent.ask(&Request::Counts {}), Reply::Counts { .. }));
    agent.must(&Request::OpenGate {});
    assert_eq!(waiting.program.answer(2, LONG), Some(0));
    // One may have been quicker than the other.
    assert!(waiting.program.answer(1, LONG).is_some());
}

#[test]
fn two_threads_that_launch_at_once_launch_each_kernel_once() {
    let mut waiting = Waiting::start();
    let streams = [waiting.stream(1), waiting.stream(1)];
    waiting.go();
    let params = waiting.program.at(182);
    let rounds = 200;
    for _ in 0..rounds {
        for (thread, stream) in [1, 2].into_iter().zip(streams) {
            let all = [waiting.function, BLOCKS, 1, 1, 1, 1, 1, 0, stream, params, 0];
            waiting.program.begin(thread, "cuLaunchKernel", &all);
        }
        for thread in [1, 2] {
            assert_eq!(waiting.program.answer(thread, LONG), Some(0));
        }
    }
    waiting.have_run(2 * rounds);
}

#[test]
fn what_does_not_come_to_rest_goes_on_to_its_end() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.begin_copy(1, stream);
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, 200).is_at_rest);
    assert!(!halt(&mut agent, 500, 200).is_at_rest, "it is given up meanwhile");
    assert_eq!(waiting.program.answer(1, MOMENT), None, "the gate is shut");
    waiting.go();
    assert!(halt(&mut agent, LONG, 200).is_at_rest);
    assert_eq!(interrupted(&mut agent), [], "all blocks are done");
    agent.must(&Request::OpenGate {});
    assert_eq!(waiting.program.answer(1, LONG), Some(0));
    waiting.program.must("cuStreamSynchronize", &[stream]);
    waiting.copied(1);
}

#[test]
fn a_gate_that_cannot_be_closed_lets_it_go_on() {
    let mut waiting = Waiting::start();
    waiting.launch(0);
    waiting.begun(0);
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    agent.fails(&Request::CloseGate { timeout_ms: 20 });
    waiting.go();
    waiting.have_run(1);
    let (state, _) = (GateState::Open {}, agent);
    assert_eq!(waiting.program.program.agent().1.gate, state);
}

#[test]
fn streams_and_modules_are_not_taken_from_it() {
    let mut waiting = Waiting::start();
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.program.begin(1, "cuStreamDestroy_v2", &[stream]);
    waiting.program.begin(2, "cuModuleUnload", &[waiting.module]);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt(&mut waiting, &mut agent);
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, MOMENT), None, "thread {thread}");
    }
    agent.must(&Request::OpenGate {});
    for thread in [1, 2] {
        assert_eq!(waiting.program.answer(thread, LONG), Some(0), "thread {thread}");
    }
    waiting.have_run(1);
}

/// Longer than kernels take that are not long.
fn while_it_takes_long() {
    std::thread::sleep(std::time::Duration::from_millis(40));
}

#[test]
fn a_kernel_is_interrupted_if_it_took_long_before() {
    let mut waiting = Waiting::start_with("auto");
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begun(0);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "it waits for nothing");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 100, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    drop(agent);
    waiting.have_run(1);
    let before = waiting.stop();
    waiting.launch(stream);
    waiting.begun(before);
    let (mut agent, _) = waiting.program.program.agent();
    interrupt(&mut waiting, &mut agent);
    agent.must(&Request::OpenGate {});
    waiting.have_run(2);
    // Some that are short, of a kernel that was long.
    for round in 3..=30 {
        waiting.launch(stream);
        waiting.have_run(round);
    }
}

/// What runs might wait for the launch of a kernel whose twin is not loaded yet, and the driver for what runs.
#[test]
fn a_module_is_loaded_when_nothing_runs() {
    let mut waiting = Waiting::start_with("auto");
    let streams = [waiting.stream(NON_BLOCKING), waiting.stream(NON_BLOCKING)];
    waiting.launch(streams[0]);
    waiting.begun(0);
    while_it_takes_long();
    waiting.go();
    waiting.have_run(1);
    let mut before = waiting.stop();
    // The other kernel waits for the host, whose next call is the launch.
    let long = std::mem::replace(&mut waiting.function, 0);
    waiting.function = waiting.other(b"looping\0");
    waiting.launch(streams[1]);
    before = waiting.begun(before);
    waiting.function = long;
    waiting.launch(streams[0]);
    waiting.go();
    waiting.have_run(3);
    assert!(before > 0);
    // Now nothing is in the way, after some launches more.
    for round in 4..=6 {
        before = waiting.stop();
        waiting.launch(streams[0]);
        waiting.begun(before);
        let (mut agent, _) = waiting.program.program.agent();
        if round == 6 {
            interrupt(&mut waiting, &mut agent);
        } else {
            waiting.go();
        }
        drop(agent);
        waiting.have_run(round);
    }
}

#[test]
fn nothing_is_interrupted_that_was_not_asked_for() {
    let mut waiting = Waiting::start_with("other");
    let stream = waiting.stream(NON_BLOCKING);
    waiting.launch(stream);
    waiting.begin_copy(1, stream);
    assert_eq!(waiting.program.answer(1, LONG), Some(0), "it waits for nothing");
    let (mut agent, _) = waiting.program.program.agent();
    assert!(!halt(&mut agent, 300, LONG).is_at_rest);
    waiting.go();
    assert!(halt(&mut agent, LONG, LONG).is_at_rest);
    assert_eq!(interrupted(&mut agent), []);
    agent.must(&Request::OpenGate {});
    waiting.copied(1);
}
