//! Twins that are ended and begun again, as often as it may be, compute what their kernels compute, where doing these twice is
//! the same as doing them once.

mod support;

use std::sync::atomic::Ordering;

use gpucr_rewrite::hostile::{LOOKS, haunted};
use gpucr_rewrite::{Aborted, How, Inside, Polls, control, rewrite_with};
use support::{Memory, PLACE, Random, launch, loops, module, texts};

/// After so many launches nobody is interrupted any more.
const MOST_LAUNCHES: u32 = 100;
/// Words that a kernel reads.
const READ: usize = 256;

fn judged(text: &str) -> (String, Result<Aborted, [Inside; 2]>) {
    let how = How { polls: Polls { every: 1, least: 12, part: 12, meetings: 2 }, ..How::default() };
    let rewritten = rewrite_with(text, |_| true, how).expect("PTX");
    let [(_, Ok(twins))] = &rewritten.kernels[..] else { panic!("{:?}", rewritten.kernels) };
    (rewritten.text, twins.aborted.clone())
}

/// A kernel `k` that is given what it reads and what it writes.
fn kernel(before: &str, body: &str) -> String {
    let place = PLACE.replace("[words]", "[to]");
    module(&format!(
        "{before}.visible .entry k(\n\t.param .u64 from,\n\t.param .u64 to\n)\n{{{place}\
         	ld.param.u64 %rd5, [from];\n{body}\n}}"
    ))
}

struct Case<'a> {
    text: &'a str,
    grid: u32,
    block: u32,
    words: usize,
    /// It reads what it writes.
    is_in_place: bool,
}

impl Case<'_> {
    fn memories(&self) -> [Memory; 2] {
        let [read, written] = [READ, self.words].map(Memory::new);
        for memory in [&read, &written] {
            for (number, word) in memory.0.iter().enumerate() {
                word.store((number as u32).wrapping_mul(2_654_435_761), Ordering::SeqCst);
            }
        }
        [read, written]
    }

    fn params(&self, [read, written]: &[Memory; 2]) -> Vec<u64> {
        let read = if self.is_in_place { written } else { read };
        vec![read.address(), written.address()]
    }

    fn run(&self, text: &str, kernel: &str, memories: &[&Memory], params: &[u64]) {
        launch(text, kernel, memories, [self.grid, 1, 1], [self.block, 1, 1], params);
    }

    fn expected(&self) -> Vec<u32> {
        let memories = self.memories();
        self.run(self.text, "k", &[&memories[0], &memories[1]], &self.params(&memories));
        memories[1].words()
    }

    /// What the twin leaves that is launched until it is done, with the flag raised for one of so many looks; and how many
    /// blocks had begun and had to begin again.
    fn aborted(&self, every: u32) -> (Vec<u32>, u64) {
        let (text, twin) = judged(self.text);
        let twin = twin.unwrap_or_else(|why| panic!("{why:?}\n{text}"));
        let text = haunted(&text);
        let [blocks, threads] = [self.grid, self.block].map(u64::from);
        let states = if twin.by_blocks { 1 } else { threads };
        let bytes = control::bytes_in_loops(blocks * states, 0).expect("not too many");
        let control = Memory::new(bytes as usize / 4);
        let memories = self.memories();
        let params = [self.params(&memories), vec![control.address()]].concat();
        let [looks, of] = LOOKS.map(|at| &control.0[at as usize / 4]);
        let (mut launches, mut begun) = (0, 0);
        while control::done(&control.bytes(), blocks, states) < blocks {
            let is_last = launches == MOST_LAUNCHES;
            looks.store(1, Ordering::SeqCst);
            of.store(if is_last { u32::MAX } else { every }, Ordering::SeqCst);
            self.run(&text, &twin.name, &[&memories[0], &memories[1], &control], &params);
            launches += 1;
            begun += control::begun(&control.bytes(), blocks, states);
            assert!(launches <= MOST_LAUNCHES + 1, "it does not come to an end");
        }
        (memories[1].words(), begun)
    }

    /// Whether it is the same whenever it is interrupted; how many blocks had to begin again.
    fn compare(&self) -> u64 {
        let expected = self.expected();
        let mut begun = 0;
        for every in [2, 3, 7, 20, 91, 400] {
            let (found, again) = self.aborted(every);
            assert!(found == expected, "every {every}: {found:?}\n{expected:?}\n{}", self.text);
            begun += again;
        }
        begun
    }
}

/// Local memory, a function that is called, wide registers, and stores of what is not the end yet.
#[test]
fn threads_are_begun_again() {
    let function = ".func (.param .b32 r) f(.param .b32 x)
{
	.reg .b32 %q<3>; .reg .pred %s;
	ld.param.u32 %q0, [x]; mov.u32 %q1, 3;
TURN:	mad.lo.u32 %q0, %q0, 5, %q1; sub.u32 %q1, %q1, 1; setp.ne.u32 %s, %q1, 0; @%s bra.uni TURN;
	st.param.b32 [r], %q0;
	ret;
}
";
    let text = kernel(
        function,
        "	.local .align 4 .b8 own[64];
	.reg .b32 %own<4>;
	mov.u32 %r10, 0; and.b32 %r11, %r0, 15; add.u32 %r11, %r11, 3; mov.u32 %own0, own;
	st.local.u32 [%own0+8], %r0;
NEXT:
	ld.local.u32 %r12, [%own0+8]; and.b32 %r13, %r12, 255; mul.wide.u32 %rd6, %r13, 4; add.u64 %rd6, %rd5, %rd6;
	ld.global.u32 %r14, [%rd6];
	{ .param .b32 x; .param .b32 r; st.param.b32 [x], %r14; call.uni (r), f, (x); ld.param.b32 %r15, [r]; }
	{ setp.eq.u32 %p2, %r15, 0; @%p2 bra OVER; add.u32 %r15, %r15, %r10; OVER: st.local.u32 [%own0+8], %r15; }
	st.global.u32 [%rd0], %r15;
	add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, %r11; @%p0 bra.uni NEXT;
	ret;",
    );
    let case = Case { text: &text, grid: 5, block: 33, words: 200, is_in_place: false };
    assert!(case.compare() > 20);
    assert!(!judged(&text).1.expect("a twin").by_blocks);
}

/// What it is for a kernel that is not the same twice, which nobody may launch so.
#[test]
fn what_reads_what_it_writes_would_be_wrong() {
    let text = kernel(
        "",
        "	mov.u32 %r10, 0;
NEXT:	ld.global.u32 %r12, [%rd0]; mad.lo.u32 %r12, %r12, 3, 1; st.global.u32 [%rd0], %r12;
	add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, 9; @%p0 bra NEXT;
	ret;",
    );
    let case = Case { text: &text, grid: 2, block: 32, words: 64, is_in_place: true };
    assert!(case.aborted(u32::MAX).0 == case.expected());
    assert!(case.aborted(7).0 != case.expected());
}

/// Blocks fill shared memory, read what others of them wrote, and go by that.
#[test]
fn blocks_are_begun_again_as_one() {
    let text = kernel(
        ".shared .align 4 .b8 tile[256];\n",
        "	mov.u32 %r10, 0; mov.u32 %r11, 0; mov.u32 %r20, %tid.x; mov.u32 %r21, tile;
	mad.lo.u32 %r22, %r20, 4, %r21; xor.b32 %r23, %r20, 1; mad.lo.u32 %r23, %r23, 4, %r21;
NEXT:
	and.b32 %r13, %r11, 252; cvt.u64.u32 %rd6, %r13; add.u64 %rd6, %rd5, %rd6; ld.global.u32 %r14, [%rd6];
	st.shared.u32 [%r22], %r14;
	bar.sync 0;
	ld.shared.u32 %r15, [%r23]; shfl.sync.bfly.b32 %r16, %r15, 2, 31, -1; mad.lo.u32 %r11, %r11, 5, %r16;
	st.global.u32 [%rd0], %r11;
	barrier.sync 0;
	add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, 12; @%p0 bra NEXT;
	ret;",
    );
    let case = Case { text: &text, grid: 7, block: 64, words: 448, is_in_place: false };
    assert!(case.compare() > 20);
    assert!(judged(&text).1.expect("a twin").by_blocks);
}

#[test]
fn random_kernels() {
    let mut random = Random(0x9876_5432);
    let mut begun = 0;
    for _ in 0..60 {
        // Stores of what is not the end yet, to a place of the thread's that what it has computed tells.
        let more = |random: &mut Random| {
            let [a, b] = [(); 2].map(|()| 10 + random.below(6));
            match random.below(3) {
                0 => format!(
                    "	and.b32 %r30, %r{a}, 255; mul.wide.u32 %rd6, %r30, 4; add.u64 %rd6, %rd5, %rd6;
	ld.global.u32 %r{b}, [%rd6];\n"
                ),
                1 => format!(
                    "	and.b32 %r30, %r{a}, 7; mad.lo.u32 %r30, %r30, 384, 0; cvt.u64.u32 %rd6, %r30;
	add.u64 %rd6, %rd0, %rd6; st.global.u32 [%rd6], %r{b};\n"
                ),
                _ => format!("	st.local.u32 [%own+{}], %r{a};\n", 4 * random.below(6)),
            }
        };
        let mut body = String::from(
            "	.local .align 4 .b8 depot[24];\n	.reg .b32 %own; mov.u32 %own, depot;\n",
        );
        for place in 0..6 {
            body += &format!("	st.local.u32 [%own+{}], %r0;\n", 4 * place);
        }
        for register in 10..16 {
            body += &format!("	mad.lo.u32 %r{register}, %r0, {register}, 99;\n");
        }
        body += &loops(&mut random, 0, &mut 0, &more);
        for place in 0..6 {
            body += &format!(
                "	ld.local.u32 %r31, [%own+{}]; mad.lo.u32 %r10, %r10, 3, %r31;\n",
                4 * place
            );
        }
        let text = kernel("", &(body + "	st.global.u32 [%rd0], %r10;\n	ret;"));
        let case = Case { text: &text, grid: 3, block: 32, words: 8 * 96, is_in_place: false };
        begun += case.compare();
    }
    assert!(begun > 1000, "{begun} blocks");
}

#[test]
fn who_is_not_aborted() {
    let of = |before: &str, inside: &str| {
        let text = kernel(before, &format!("NEXT:	{inside}\n	@%p0 bra NEXT;\n	ret;"));
        judged(&text).1.map(|twin| twin.by_blocks)
    };
    let uses = |name: &str| Inside::Uses(name.to_owned());
    assert_eq!(of("", "add.u32 %r0, %r0, 1;"), Ok(false));
    assert_eq!(of("", "bar.sync 0;"), Ok(true));
    // Nobody looks at what is in registers.
    assert_eq!(of("", "{ .reg .b128 %w; .reg .v4 .f32 v; mov.u32 %r1, %clock; }"), Ok(false));
    let both = |name: &str| Err([uses(name), uses(name)]);
    for one in [
        "atom.global.add.u32 %r1, [%rd0], 1",
        "red.global.add.u32 [%rd0], 1",
        "ld.volatile.global.u32 %r1, [%rd0]",
        "st.release.gpu.global.u32 [%rd0], 1",
        "membar.gl",
        "mbarrier.inval.shared.b64 [%r1]",
        "griddepcontrol.wait",
        "unknown.u32 %r1, %r2",
    ] {
        assert_eq!(of("", &format!("{one};")), both(one.split(' ').next().expect("a word")));
    }
    // A block ends as one at barriers only: in loops without these it does not.
    let shared = of(".shared .b8 x[8];\n", "mov.u32 %r1, x;");
    assert_eq!(shared, Err([uses("x"), Inside::Straight]));
    let shuffled = of("", "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;");
    assert_eq!(shuffled, Err([uses("shfl.sync.bfly.b32"), Inside::Straight]));
    let counted = of("", "bar.sync 0; bar.sync 1, 64;");
    assert!(matches!(counted, Err([_, Inside::Uses(_)])), "{counted:?}");
    let at_times = of("", "@%p1 bar.sync 0;");
    assert_eq!(at_times, Err([uses("bar.sync"), Inside::Form]));
    let function =
        |inside: &str| format!(".func f()\n{{\n	.reg .b32 %q<3>;\n	{inside};\n	ret;\n}}\n");
    let called = |inside: &str| of(&function(inside), "call f;");
    assert_eq!(called("mov.u32 %q1, 1"), Ok(false));
    assert_eq!(called("red.global.add.u32 [%q1], 1"), both("red.global.add.u32"));
    assert_eq!(called("bar.sync 0"), both("bar.sync"));
    assert_eq!(called("ld.shared.u32 %q1, [%q2]"), Err([uses("ld.shared.u32"), Inside::Straight]));
    // Another label of that name is meant where it is.
    let hidden = of("", "{ NEXT: add.u32 %r0, %r0, 1; @%p1 bra NEXT; }");
    assert_eq!(hidden, Err([Inside::Form, Inside::Form]));
}

#[test]
fn what_compilers_write() {
    let mut found = [Vec::new(), Vec::new()];
    for (file, text) in texts() {
        let rewritten = rewrite_with(&text, |_| true, How::default()).expect("PTX");
        let loaded = softcuda::ptx::Module::load(&rewritten.text);
        loaded.unwrap_or_else(|fault| panic!("{file}: {fault}"));
        for (name, judged) in rewritten.kernels {
            if let Ok(twin) = judged.map_err(drop).and_then(|twins| twins.aborted.map_err(drop)) {
                found[usize::from(twin.by_blocks)].push(name);
            }
        }
    }
    let found = found.map(|mut names| {
        names.sort();
        names.dedup();
        names.join(" ")
    });
    let alone = "adam attn_project mlp_forward mlp_grad_input mlp_grad_weights scan_add slice_hidden slice_project \
                 small_update spmv stack_array";
    assert_eq!(found, [alone, "matmul n_body"]);
}
