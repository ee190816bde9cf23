//! A program with kernels that wait until they may go on, and a checkpointer that interrupts them.

// Each test uses a part of it.
#![allow(dead_code)]

use gpucr_wire::message::Interrupted;
use gpucr_wire::{Reply, Request, Rest};

use crate::caller::Caller;
use crate::support::Agent;

/// More than run at the same time on any machine.
pub(crate) const BLOCKS: u64 = 512;
pub(crate) const NON_BLOCKING: u64 = 1;
pub(crate) const NOT_READY: u64 = 600;
/// How long a call that waits is watched, milliseconds. One that does not wait is not missed by this, only noticed
/// late.
pub(crate) const MOMENT: u64 = 150;
pub(crate) const LONG: u64 = 60_000;

/// A block waits until the host says so, and counts its run. The second kernel does so without a barrier, and the third
/// with one again and again, so that they can be interrupted while they wait.
pub(crate) const PTX: &str = ".version 8.0
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
pub(crate) struct Waiting {
    pub(crate) program: Caller,
    pub(crate) function: u64,
    pub(crate) module: u64,
    /// The word for which blocks wait. The next one counts those that have begun.
    pub(crate) go: u64,
    /// Pinned memory for a copy.
    pub(crate) copy: u64,
    /// How often each block has run.
    pub(crate) counts: u64,
}

impl Waiting {
    pub(crate) fn start() -> Self {
        Self::start_with("wait*")
    }

    pub(crate) fn start_with(kernels: &str) -> Self {
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
    pub(crate) fn other(&mut self, name: &[u8; 8]) -> u64 {
        self.program.poke(190, u64::from_le_bytes(*name));
        self.program.made("cuModuleGetFunction", &[self.module, self.program.at(190)])
    }

    /// The blocks that begin next wait again; how many have begun.
    pub(crate) fn stop(&mut self) -> u64 {
        let go = self.go;
        self.program.call("poke", &[go, 0]);
        self.program.call("peek", &[go + 8])
    }

    pub(crate) fn stream(&mut self, flags: u64) -> u64 {
        self.program.made("cuStreamCreate", &[flags])
    }

    pub(crate) fn launch(&mut self, stream: u64) {
        let params = self.program.at(182);
        let all = [self.function, BLOCKS, 1, 1, 1, 1, 1, 0, stream, params, 0];
        self.program.must("cuLaunchKernel", &all);
    }

    /// Waits until one block more has begun than had before.
    pub(crate) fn begun(&mut self, before: u64) -> u64 {
        let place = self.go + 8;
        loop {
            let begun = self.program.call("peek", &[place]);
            if begun > before {
                return begun;
            }
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    pub(crate) fn go(&mut self) {
        let go = self.go;
        self.program.call("poke", &[go, 1]);
    }

    /// Has a thread copy what was counted.
    pub(crate) fn begin_copy(&mut self, thread: u32, stream: u64) {
        self.program.begin(
            thread,
            "cuMemcpyDtoHAsync_v2",
            &[self.copy, self.counts, 4 * BLOCKS, stream],
        );
    }

    /// Whether each block has run so often, as the last copy has it.
    pub(crate) fn copied(&mut self, times: u64) {
        for word in 0..BLOCKS / 2 {
            let counted = self.program.call("peek", &[self.copy + 8 * word]);
            assert_eq!(counted, times << 32 | times, "blocks of word {word}");
        }
    }

    /// Whether each block has run so often.
    pub(crate) fn have_run(&mut self, times: u64) {
        self.program.must("cuCtxSynchronize", &[]);
        self.begin_copy(0, 0);
        assert_eq!(self.program.answer(0, LONG), Some(0));
        self.program.must("cuCtxSynchronize", &[]);
        self.copied(times);
    }
}

pub(crate) fn halt(agent: &mut Agent, wait_ms: u64, interrupt_ms: u64) -> Rest {
    match agent.ask(&Request::Halt { wait_ms, timeout_ms: LONG, interrupt_ms }) {
        Reply::Rest { rest } => rest,
        other => panic!("{other:?}"),
    }
}

pub(crate) fn interrupted(agent: &mut Agent) -> Vec<Interrupted> {
    match agent.ask(&Request::Interrupted {}) {
        Reply::Interrupted { launches } => launches,
        other => panic!("{other:?}"),
    }
}
