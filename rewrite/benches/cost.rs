//! What twins add to kernels, on the software driver's interpreter: the instructions that it executes for a warp, and CPU time
//! of the process in launches of twins and kernel by turns, the median of the quotients. Ends with exit status 1 if a kernel for
//! which that is promised executes more instructions than the limit. They are counted: the same on any machine, however busy.

use std::process::ExitCode;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use gpucr_rewrite::{control, rewrite};
use rustix::time::{ClockId, clock_gettime};
use softcuda::ptx::{AddressSpace, Launch, Module, run};

/// Parts of the kernel's instructions that a twin may execute more.
const LIMIT: f64 = 0.03;
/// Kernels are launched until they have run for so many seconds, this often at least and at most.
const SECONDS: f64 = 1.5;
const ROUNDS: [usize; 2] = [5, 31];
const ATTENTION: &str = include_str!("attention.ptx");
const PROGRAMS: &str = include_str!("../../softcuda/tests/programs/programs.ptx");

/// A kernel whose threads make so many turns of a loop.
fn turns(turns: u32) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 words)\n{{
	.reg .b32 %r<4>;\n	.reg .b64 %rd<3>;\n	.reg .pred %p<1>;
	mov.u32 %r0, {turns};\n	mov.u32 %r1, %tid.x;
NEXT:\n	mad.lo.u32 %r1, %r1, 1664525, 1013904223;\n	sub.u32 %r0, %r0, 1;
	setp.ne.u32 %p0, %r0, 0;\n	@%p0 bra NEXT;
	ld.param.u64 %rd0, [words];\n	st.global.u32 [%rd0], %r1;\n	ret;\n}}\n"
    )
}

/// A product of square matrices of 32-bit floats, each element by one thread; the columns of a row are those of a block.
const PLAIN_MATMUL: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 size)
{
	.reg .b32 %r<6>;
	.reg .b64 %rd<8>;
	.reg .f32 %f<4>;
	.reg .pred %p<1>;
	ld.param.u64 %rd0, [a];
	ld.param.u64 %rd1, [b];
	ld.param.u64 %rd2, [c];
	ld.param.u32 %r0, [size];
	mov.u32 %r1, %ctaid.x;
	mov.u32 %r2, %tid.x;
	mul.lo.u32 %r3, %r1, %r0;
	mul.wide.u32 %rd3, %r3, 4;
	add.u64 %rd0, %rd0, %rd3;
	mul.wide.u32 %rd4, %r2, 4;
	add.u64 %rd1, %rd1, %rd4;
	add.u64 %rd5, %rd2, %rd3;
	add.u64 %rd5, %rd5, %rd4;
	mul.wide.u32 %rd6, %r0, 4;
	mov.f32 %f0, 0f00000000;
	mov.u32 %r4, 0;
NEXT:
	ld.global.f32 %f1, [%rd0];
	ld.global.f32 %f2, [%rd1];
	fma.rn.f32 %f0, %f1, %f2, %f0;
	add.u64 %rd0, %rd0, 4;
	add.u64 %rd1, %rd1, %rd6;
	add.u32 %r4, %r4, 1;
	setp.lt.u32 %p0, %r4, %r0;
	@%p0 bra NEXT;
	st.global.f32 [%rd5], %f0;
	ret;
}
";

struct Everything;

impl AddressSpace for Everything {
    fn is_mapped(&self, _: u64, _: usize) -> bool {
        true
    }

    fn is_writable(&self, _: u64, _: usize) -> bool {
        true
    }
}

/// What a launch took.
struct Took {
    seconds: f64,
    instructions: u64,
}

impl Took {
    /// The parts of another's that this one took more.
    fn more_than(&self, other: &Self) -> [f64; 2] {
        let instructions = self.instructions as f64 / other.instructions as f64;
        [instructions - 1.0, self.seconds / other.seconds - 1.0]
    }
}

fn launch(text: &str, kernel: &str, grid: u32, block: u32, params: &[u64]) -> Took {
    let module = Module::load(text).unwrap_or_else(|fault| panic!("{fault}"));
    let entry = module.entry(kernel).expect("the kernel");
    let mut bytes = vec![0; entry.param_bytes];
    for (param, value) in entry.params.iter().zip(params) {
        bytes[param.offset..][..param.size].copy_from_slice(&value.to_le_bytes()[..param.size]);
    }
    let globals = module.globals.iter().map(|global| {
        let mut bytes = global.init.clone();
        bytes.resize(global.size.next_multiple_of(16), 0);
        bytes
    });
    let globals: Vec<Vec<u8>> = globals.collect();
    let addresses: Vec<u64> = globals.iter().map(|bytes| bytes.as_ptr() as u64).collect();
    let plain = Launch::plain([grid, 1, 1], [block, 1, 1], &bytes);
    let executed = AtomicU64::new(0);
    let launch = Launch { global_addresses: &addresses, executed: Some(&executed), ..plain };
    let begin = clock_gettime(ClockId::ProcessCPUTime);
    run(&module, entry, &launch, &Everything).expect("no trap");
    let end = clock_gettime(ClockId::ProcessCPUTime);
    Took {
        seconds: (end.tv_sec - begin.tv_sec) as f64 + (end.tv_nsec - begin.tv_nsec) as f64 / 1e9,
        instructions: executed.load(Ordering::Relaxed),
    }
}

fn percent(part: f64) -> String {
    format!("{:.1} %", 100.0 * part)
}

fn main() -> ExitCode {
    let words: Vec<AtomicU32> = (0..4 << 18).map(|_| AtomicU32::new(0)).collect();
    let [a, b, c, d] = [0, 1, 2, 3].map(|part| words[part << 18..].as_ptr() as u64);
    let [few, some, thousand, many] = [10, 300, 1000, 3000].map(turns);
    let attention = vec![a, b, c, d, 1024];
    let kernels = [
        ("a loop of 10 turns", few.as_str(), "k", 2000, 128, vec![a], false),
        ("a loop of 300 turns", &some, "k", 200, 128, vec![a], false),
        ("3000 turns, 60 blocks of 1024", &many, "k", 60, 1024, vec![a], true),
        ("1000 turns, 1320 blocks", &thousand, "k", 1320, 1024, vec![a], true),
        ("matmul, 512 by 512", PROGRAMS, "matmul", 1024, 256, vec![a, b, c, 512], true),
        ("the same, no shared memory", PLAIN_MATMUL, "k", 512, 512, vec![a, b, c, 512], true),
        ("n-body, 2048 bodies", PROGRAMS, "n_body", 16, 128, vec![a, b, 2048], true),
        ("attention, 1024 keys", ATTENTION, "attention", 16, 128, attention, true),
    ];
    let mut failed = false;
    println!("Instructions more, and CPU time more");
    println!(
        "{:<30} {:>8} {:>18} {:>18} {:>18} {:>18}",
        "kernel", "CPU ms", "between blocks", "in loops", "at barriers", "by abort"
    );
    for (name, text, kernel, grid, block, params, promised) in kernels {
        let rewritten = rewrite(text, |name| name == kernel).expect("PTX");
        let twins = rewritten.kernels[0].1.as_ref().expect("twins");
        let threads = u64::from(grid) * u64::from(block);
        let in_loops = twins.in_loops.as_ref().ok().map(|twin| {
            (twin.name.as_str(), control::bytes_in_loops(threads, twin.saved).expect("few"))
        });
        let at_barriers = twins.at_barriers.as_ref().ok().map(|twin| {
            let (grid, block) = (grid.into(), block.into());
            let all = control::AtBarriers::of(grid, block, twin.saved, twin.shared, 1);
            (twin.name.as_str(), all.expect("little").bytes)
        });
        let aborted = twins.aborted.as_ref().ok().map(|twin| {
            let states = if twin.by_blocks { grid.into() } else { threads };
            (twin.name.as_str(), control::bytes_in_loops(states, 0).expect("few"))
        });
        let all = [Some((kernel, control::bytes(grid.into()))), in_loops, at_barriers, aborted];
        // Of each twin: the parts more by instructions, and by time once for each round.
        let mut more: [Option<(f64, Vec<f64>)>; 4] = [const { None }; 4];
        let mut times = Vec::new();
        while times.len() < ROUNDS[0]
            || times.len() < ROUNDS[1] && times.iter().sum::<f64>() < SECONDS
        {
            let original = launch(text, kernel, grid, block, &params);
            for (twin, more) in all.iter().zip(&mut more) {
                let Some((entry, bytes)) = twin else { continue };
                let control = vec![0u32; *bytes as usize / 4];
                let with = [params.clone(), vec![control.as_ptr() as u64]].concat();
                let took = launch(&rewritten.text, entry, grid, block, &with);
                let [instructions, time] = took.more_than(&original);
                let (counted, times) = more.get_or_insert((instructions, Vec::new()));
                assert!(*counted == instructions, "{entry} has executed other numbers");
                times.push(time);
            }
            times.push(original.seconds);
        }
        times.sort_by(f64::total_cmp);
        print!("{name:<30} {:>8.1}", 1000.0 * times[times.len() / 2]);
        for twin in more {
            let Some((instructions, mut times)) = twin else {
                print!(" {:>18}", "-");
                continue;
            };
            times.sort_by(f64::total_cmp);
            let both = [instructions, times[times.len() / 2]].map(percent);
            print!(" {:>18}", both.join(", "));
            failed |= promised && instructions > LIMIT;
        }
        println!();
    }
    println!("limit of instructions for all but the first two: {}", percent(LIMIT));
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
