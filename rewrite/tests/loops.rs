//! Twins that are interrupted in their loops again and again compute what their kernels compute.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};

use gpucr_rewrite::hostile::{LOOKS, haunted};
use gpucr_rewrite::{How, InLoops, Inside, Polls, Twins, control, rewrite, rewrite_with};
use support::{Memory, Random, kernel, launch, loops, module, texts};

/// Each thread looks at the end of each loop of some instructions.
const OFTEN: Polls = Polls { every: 1, least: 12, part: 12, meetings: 1 };
/// After so many launches nobody is interrupted any more.
const MOST_LAUNCHES: u32 = 300;

fn twin(text: &str, polls: Polls) -> (String, InLoops) {
    let rewritten = rewrite_with(text, |_| true, How { polls, ..How::default() }).expect("PTX");
    let [(_, Ok(twins))] = &rewritten.kernels[..] else { panic!("{:?}", rewritten.kernels) };
    let in_loops = twins.in_loops.clone().unwrap_or_else(|why| panic!("{why}\n{text}"));
    (rewritten.text, in_loops)
}

fn why(text: &str) -> Result<InLoops, Inside> {
    let rewritten = rewrite(text, |_| true).expect("PTX");
    let [(_, Ok(twins))] = &rewritten.kernels[..] else { panic!("{:?}", rewritten.kernels) };
    twins.in_loops.clone()
}

struct Case<'a> {
    text: &'a str,
    grid: [u32; 3],
    block: [u32; 3],
    words: usize,
    more: &'a [u64],
}

/// A control block, and how many threads there are.
fn control_of(case: &Case<'_>, in_loops: &InLoops) -> (Memory, u64) {
    let threads = case.grid.iter().chain(&case.block).map(|size| u64::from(*size)).product();
    let bytes = control::bytes_in_loops(threads, in_loops.saved).expect("not too many");
    (Memory::new(bytes as usize / 4), threads)
}

impl Case<'_> {
    fn params(&self, memory: &Memory) -> Vec<u64> {
        [&[memory.address()], self.more].concat()
    }

    fn expected(&self) -> Vec<u32> {
        let memory = Memory::new(self.words);
        launch(self.text, "k", &[&memory], self.grid, self.block, &self.params(&memory));
        memory.words()
    }

    /// Launches the twin until it is done, with the flag raised for one of so many looks; how many launches that were, and
    /// how many threads are saved in between.
    fn interrupted(&self, polls: Polls, every: u32, expected: &[u32]) -> (u32, usize) {
        let (text, in_loops) = twin(self.text, polls);
        let text = haunted(&text);
        let (control, threads) = control_of(self, &in_loops);
        let memory = Memory::new(self.words);
        let params = [self.params(&memory), vec![control.address()]].concat();
        let [looks, of] = LOOKS.map(|at| &control.0[at as usize / 4]);
        let (mut launches, mut saved) = (0, 0);
        while control::done(&control.bytes(), threads, 1) < threads {
            let is_last = launches == MOST_LAUNCHES;
            looks.store(1, Ordering::SeqCst);
            of.store(if is_last { u32::MAX } else { every }, Ordering::SeqCst);
            let memories = [&memory, &control];
            launch(&text, &in_loops.name, &memories, self.grid, self.block, &params);
            launches += 1;
            let states = &control.words()[control::STATES as usize / 4..][..threads as usize];
            saved += states.iter().filter(|state| **state >= control::FIRST_SAVED).count();
            assert!(launches <= MOST_LAUNCHES + 1, "it does not come to an end");
        }
        assert!(
            memory.words() == expected,
            "every {every}, {polls:?}: {:?}\n{expected:?}\n{text}",
            memory.words()
        );
        (launches, saved)
    }

    /// The same with a flag that somebody raises again and again.
    fn flagged(&self, random: &mut Random, expected: &[u32]) {
        let (text, in_loops) = twin(self.text, Polls::default());
        let (control, threads) = control_of(self, &in_loops);
        let memory = Memory::new(self.words);
        let params = [self.params(&memory), vec![control.address()]].concat();
        let run = || {
            let memories = [&memory, &control];
            launch(&text, &in_loops.name, &memories, self.grid, self.block, &params);
        };
        control.0[0].store(7, Ordering::SeqCst);
        run();
        let states = &control.words()[control::STATES as usize / 4..];
        assert!(states.iter().all(|state| *state == 0), "nobody begins");
        for launches in 0.. {
            control.0[0].store(0, Ordering::SeqCst);
            let wait = std::time::Duration::from_micros(random.below(500));
            let is_over = AtomicBool::new(launches >= 50);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(wait);
                    if !is_over.load(Ordering::SeqCst) {
                        control.0[0].store(1, Ordering::SeqCst);
                    }
                });
                run();
                is_over.store(true, Ordering::SeqCst);
            });
            if control::done(&control.bytes(), threads, 1) == threads {
                break;
            }
            assert!(launches <= 51, "it does not come to an end");
        }
        assert!(memory.words() == expected, "{text}");
    }

    fn compare(&self, random: &mut Random) -> usize {
        let expected = self.expected();
        let mut saved = 0;
        for every in [1, 2 + random.below(5) as u32, 7 + random.below(200) as u32] {
            saved += self.interrupted(OFTEN, every, &expected).1;
            saved += self
                .interrupted(Polls { every: 3, least: 40, part: 120, ..OFTEN }, every, &expected)
                .1;
        }
        saved += self.interrupted(Polls::default(), 2, &expected).1;
        self.flagged(random, &expected);
        saved
    }
}

#[test]
fn a_thread_goes_on_where_it_was() {
    // Each thread makes as many turns as its number says, adds at each to its word, and counts its turns by an atomic.
    let text = kernel(
        "	mov.u32 %r10, %r0; mov.u32 %r11, 0;
NEXT:
	ld.global.u32 %r12, [%rd0]; mad.lo.u32 %r12, %r12, 31, %r10; st.global.u32 [%rd0], %r12;
	ld.param.u64 %rd5, [words]; red.global.add.u32 [%rd5+4000], 1;
	add.u32 %r11, %r11, 1; setp.le.u32 %p0, %r11, %r10; @%p0 bra.uni NEXT;
	ret;",
    );
    let mut random = Random(3);
    for (grid, block) in [([5, 1, 1], [33, 1, 1]), ([2, 3, 2], [3, 4, 2]), ([1, 1, 1], [1, 1, 1])] {
        let case = Case { text: &text, grid, block, words: 1001, more: &[] };
        let expected = case.expected();
        let (launches, saved) = case.interrupted(OFTEN, 1, &expected);
        let threads: u32 = grid.iter().chain(&block).product();
        // Each launch brings each thread three turns on.
        assert!(launches >= threads / 4 && saved >= threads as usize / 4, "{launches} {saved}");
        case.compare(&mut random);
    }
}

/// A loop with a counter of so many bits, which begins as `first` less what is added once for each thread before.
fn counting(bits: u32, [add, compare]: [&str; 2], first: &str, limit: &str) -> String {
    let wide = if bits == 64 { "cvt.u64.u32 %c1, %r0;" } else { "mov.b32 %c1, %r0;" };
    let narrow = if bits == 64 { "cvt.u32.u64 %r13, %c0;" } else { "mov.b32 %r13, %c0;" };
    kernel(&format!(
        "	.reg .b{bits} %c<3>;
	{wide} mov.b{bits} %c2, {limit}; mov.b{bits} %c0, {first}; mul.lo.s{bits} %c1, %c1, 3; sub.s{bits} %c0, %c0, %c1;
	mov.u32 %r10, 1; mov.u32 %r11, 0; setp.eq.u32 %p0, %r0, %r0;
NEXT:	@!%p0 add.u32 %r10, %r10, 5; {narrow} mad.lo.u32 %r10, %r10, 31, %r13; add.u32 %r11, %r11, 1;
	{add}; setp.{compare}; @%p0 bra NEXT;
	{narrow} mad.lo.u32 %r10, %r10, 31, %r13; mad.lo.u32 %r10, %r10, 31, %r11;
	@%p0 add.u32 %r10, %r10, 1;
	st.global.u32 [%rd0], %r10;
	ret;"
    ))
}

#[test]
fn loops_that_count_are_run_in_parts() {
    let [up, by_7, down, less] = [
        "add.s32 %c0, %c0, 1",
        "add.u32 %c0, %c0, 7",
        "add.s32 %c0, %c0, -1",
        "sub.u32 %c0, %c0, 3",
    ];
    let all = [
        (32, up, "lt.s32 %p0, %c0, %c2", "-40", "17"),
        (32, up, "lt.s32 %p0, %c0, 17", "-40", "0"),
        (32, up, "lt.s32 %p0, %c0, %c2", "900", "17"),
        (32, up, "lt.s32 %p0, %c0, %c2", "2147483600", "2147483647"),
        (32, up, "le.s32 %p0, %c0, %c2", "-2147483600", "-2147483601"),
        (32, "add.s32 %c0, %c0, 1048576", "lt.s32 %p0, %c0, %c2", "-2147483000", "2146435000"),
        (32, by_7, "le.u32 %p0, %c0, %c2", "2147483640", "2147484000"),
        (32, by_7, "lo.u32 %p0, %c0, %c2", "4294966800", "4294967280"),
        (32, by_7, "ls.u32 %p0, %c0, 710", "100", "0"),
        (32, up, "ne.s32 %p0, %c0, %c2", "-40", "17"),
        (32, up, "ne.b32 %p0, %c0, %c2", "4294967200", "19"),
        (32, down, "ne.u32 %p0, %c0, %c2", "90", "4294967290"),
        (32, down, "gt.s32 %p0, %c0, -21", "90", "0"),
        (32, down, "ge.s32 %p0, %c0, %c2", "90", "-20"),
        (32, less, "hi.u32 %p0, %c0, %c2", "2147483800", "2147483500"),
        (32, less, "hs.u32 %p0, %c0, %c2", "500", "12"),
        (32, less, "ge.u32 %p0, %c0, %c2", "90", "500"),
        (64, "add.s64 %c0, %c0, 5", "lt.s64 %p0, %c0, %c2", "-4294967400", "-4294967000"),
        (64, "add.s64 %c0, %c0, 1", "ne.s64 %p0, %c0, %c2", "4294967200", "4294967300"),
        (
            64,
            "add.u64 %c0, %c0, -9",
            "hs.u64 %p0, %c0, %c2",
            "9223372036854775900",
            "9223372036854775007",
        ),
    ];
    let mut random = Random(41);
    for (bits, add, compare, first, limit) in all {
        let text = counting(bits, [add, compare], first, limit);
        let case = Case { text: &text, grid: [2, 1, 1], block: [9, 1, 1], words: 20, more: &[] };
        let parts = twin(&text, OFTEN).0.matches("$gpucr_turn_0:").count();
        // The twin that is aborted has them too.
        assert_eq!(parts, 2, "{text}");
        case.compare(&mut random);
    }
}

/// The turns that the first loop has in a part, if it is run in parts.
fn turns(text: &str) -> Option<u32> {
    let text = twin(text, Polls::default()).0;
    let (_, behind) = text.split_once("setp.gt.u32 %gpucr_is, %gpucr_near_0, ")?;
    behind.split_once(';').map(|(turns, _)| turns.parse().expect("a number"))
}

/// A compiler may make one instruction of a product and a sum, and round once; of two turns too, where no branch is between.
#[test]
fn turns_follow_each_other_unless_it_could_round_otherwise() {
    let copied = |body: &str| {
        let text = kernel(&format!(
            "	mov.u32 %r10, 0; mov.b32 %f0, 0f3f800001; mov.b32 %f1, 0f3f000001;
NEXT:	{body} add.u32 %r10, %r10, 1; setp.lt.u32 %p0, %r10, 50000; @%p0 bra NEXT;
	st.global.f32 [%rd0], %f0;
	ret;"
        ));
        let text = text.replacen("\n{", "\n{ .reg .f32 %f<2>;", 1);
        let twins = twin(&text, Polls::default()).0;
        // The twin that is aborted has them too.
        assert_eq!(twins.matches("$gpucr_turn_0:").count(), 2, "{twins}");
        [0, 2].contains(&twins.matches("$gpucr_last_0:").count())
            && twins.contains("$gpucr_last_0:")
    };
    assert!(copied("mul.rn.f32 %f0, %f0, %f1; add.f32 %f0, %f0, %f1;"));
    assert!(copied("fma.rn.f32 %f0, %f0, %f1, %f0;"));
    assert!(!copied("mul.f32 %f0, %f0, %f1; add.f32 %f0, %f0, %f1;"));
    assert!(!copied("sub.ftz.f32 %f0, %f0, %f1; mul.ftz.f32 %f0, %f0, %f1;"));
    let long = "add.f32 %f0, %f0, %f1; ".repeat(200);
    assert!(!copied(&long), "it is long by itself");
}

#[test]
fn parts_are_as_long_as_they_may_be() {
    let cases = [
        (32, ["add.s32 %c0, %c0, 1", "lt.s32 %p0, %c0, %c2"], ["-9", "50000"]),
        (32, ["sub.u32 %c0, %c0, 1", "ne.u32 %p0, %c0, %c2"], ["50000", "9"]),
        (32, ["add.s32 %c0, %c0, 1048576", "lt.s32 %p0, %c0, %c2"], ["-2147483000", "2146435000"]),
        (64, ["add.s64 %c0, %c0, -3", "ge.s64 %p0, %c0, %c2"], ["100000", "-50000"]),
    ];
    for (bits, instructions, [first, limit]) in cases {
        let text = counting(bits, instructions, first, limit);
        let case = Case { text: &text, grid: [2, 1, 1], block: [9, 1, 1], words: 20, more: &[] };
        let expected = case.expected();
        for every in [1, 2, 3] {
            let (launches, saved) = case.interrupted(Polls::default(), every, &expected);
            assert!(launches > 1 && saved > 0, "{text}");
        }
    }
}

#[test]
fn parts_take_little_time() {
    let loops = |inside: &str, around: [&str; 2]| {
        let [begin, end] = around;
        kernel(&format!(
            "	ld.param.u64 %rd5, [words]; mov.u32 %r11, 0;
	{begin}
	mov.u32 %r10, 0;
NEXT:	{inside} add.u32 %r10, %r10, 1; setp.ne.u32 %p0, %r10, 999; @%p0 bra NEXT;
	{end}
	ret;"
        ))
    };
    let [none, one] =
        [["", ""], ["AGAIN:", "add.u32 %r11, %r11, 1; setp.ne.u32 %p1, %r11, 9; @%p1 bra AGAIN;"]];
    // Full turns of what a compiler may have made of them.
    assert_eq!(turns(&loops("", none)), Some((1 << 16) / 3 / 16 * 16));
    assert_eq!(turns(&loops("add.u32 %r13, %r10, 7;", none)), Some(1 << 14));
    assert_eq!(turns(&loops("ld.global.u32 %r12, [%rd5];", none)), Some((1 << 16) / 35 / 16 * 16));
    let atomic = "atom.global.add.u32 %r12, [%rd5], 1;";
    assert_eq!(turns(&loops(atomic, none)), Some((1 << 16) / 259 / 16 * 16));
    assert_eq!(
        turns(&loops("nanosleep.u32 9;", none)),
        Some(15),
        "fewer than a compiler makes of them"
    );
    // The loop inside is the second one.
    let nested = twin(&loops("", one), Polls::default()).0;
    let inside = format!("setp.gt.u32 %gpucr_is, %gpucr_near_1, {};", (1 << 14) / 3 / 16 * 16);
    assert!(nested.contains(&inside) && !nested.contains("%gpucr_near_0"), "{nested}");
}

#[test]
fn who_does_not_count() {
    let up = "add.s32 %c0, %c0, 1";
    for [add, compare] in [
        ["add.s32 %c0, %c0, -1", "lt.s32 %p0, %c0, %c2"],
        ["add.s32 %c0, %c0, 1048577", "lt.s32 %p0, %c0, %c2"],
        ["add.s32 %c0, %c0, %c2", "lt.s32 %p0, %c0, %c2"],
        ["@%p1 add.s32 %c0, %c0, 1", "lt.s32 %p0, %c0, %c2"],
        ["add.s32 %c0, %c0, 1; add.s32 %c0, %c0, 1", "lt.s32 %p0, %c0, %c2"],
        ["add.s32 %c2, %c2, 1; add.s32 %c0, %c0, 1", "lt.s32 %p0, %c0, %c2"],
        ["@%p1 bra OVER; OVER: add.s32 %c0, %c0, 1", "lt.s32 %p0, %c0, %c2"],
        [up, "gt.s32 %p0, %c0, %c2"],
        [up, "eq.s32 %p0, %c0, %c2"],
        [up, "lt.and.s32 %p0, %c0, %c2, %p1"],
        [up, "lt.s32 %p0|%p1, %c0, %c2"],
        [up, "lt.s32 %p0, %c2, %c0"],
        [up, "lt.f32 %p0, %c0, %c2"],
        [up, "lt.s32 %p0, %c0, %c2; xor.pred %p0, %p0, %p1"],
    ] {
        let text = counting(32, [add, compare], "3", "9");
        assert!(!twin(&text, OFTEN).0.contains("$gpucr_turn_"), "{text}");
    }
}

#[test]
fn what_is_saved_is_what_changes() {
    // What the launch tells each thread alike is computed again: the counter and the sum are saved.
    let text = kernel(
        "	mov.u32 %r10, 0; mov.u32 %r11, 0; ld.param.u64 %rd5, [words];
NEXT:	ld.global.u32 %r12, [%rd5]; add.u32 %r10, %r10, %r12;
	add.u32 %r11, %r11, 1; setp.le.u32 %p0, %r11, 9; @%p0 bra NEXT;
	st.global.u32 [%rd0], %r10;
	ret;",
    );
    // `%rd0` has two writers.
    assert_eq!(twin(&text, OFTEN).1.saved, 16);
}

#[test]
fn each_kind_of_register_is_kept() {
    let text = module(
        ".visible .entry k(.param .u64 words, .param .u32 times) {
	.reg .b64 a, b<2>; .reg .f64 d; .reg .f32 %f<2>; .reg .f16 h; .reg .b16 s; .reg .u16 t;
	.reg .pred p, q, z, y; .reg .b32 n, i, at, w;
	ld.param.u64 a, [words]; mov.u32 at, %tid.x; mul.wide.u32 b0, at, 64; add.u64 a, a, b0;
	mov.u32 i, 0; ld.param.u32 n, [times]; mov.u64 b1, 77; mov.f64 d, 0d3FF0000000000000;
	mov.f32 %f0, 0f3F800000; mov.b16 h, 15360; mov.u16 s, 3; mov.u16 t, 5; setp.ne.u32 q, at, at;
	setp.eq.u32 z, at, at; mov.u32 w, 4;
	{ .reg .b32 n; mov.u32 n, 8; add.u32 at, at, n; }
HEAD: .pragma \"nounroll\";
	.loc 1 2 3
	not.pred q, q; @q add.u64 b1, b1, 13; @!q mad.lo.u64 b1, b1, 5, 1;
	fma.rn.f64 d, d, 0d3FF199999999999A, 0d3FF0000000000000; fma.rn.f32 %f0, %f0, 0f3F8CCCCD, %f0;
	add.f16 h, h, h; mad.lo.u16 s, s, t, 9; @z xor.b16 t, t, s;
	setp.eq.u32 y, i, 5; @y mov.u32 w, 123;
	{ .reg .b32 n; mad.lo.u32 n, i, 3, 7; add.u32 at, at, n; }
	add.u32 i, i, 1; setp.ge.u32 p, i, n; @!p bra HEAD;
	st.global.u64 [a], b1; st.global.f64 [a+8], d; st.global.f32 [a+16], %f0; st.global.b16 [a+20], h;
	st.global.u16 [a+22], s; st.global.u16 [a+24], t; st.global.u32 [a+28], at;
	st.global.u32 [a+36], w;
	selp.u32 i, 1, 0, q; st.global.u32 [a+32], i;
	ret;
}",
    );
    let (grid, block) = ([1, 1, 1], [40, 1, 1]);
    let case = Case { text: &text, grid, block, words: 640, more: &[67] };
    assert!(case.compare(&mut Random(9)) > 0);
}

/// Blocks of instructions, each of which goes on with any other until its thread has made so many steps.
fn any_flow(random: &mut Random) -> String {
    let count = 2 + random.below(8);
    let mut body =
        String::from("	mov.u32 %r30, 60; and.b32 %r31, %r0, 31; add.u32 %r30, %r30, %r31;\n");
    body += "	ld.param.u64 %rd5, [words]; mul.wide.u32 %rd6, %r0, 9; setp.eq.u32 %p1, %r0, %r0;\n";
    for register in 10..16 {
        body += &format!("	mad.lo.u32 %r{register}, %r0, {register}, 77;\n");
    }
    for block in 0..count {
        body += &format!("B{block}:\n");
        for _ in 0..random.below(5) {
            let [to, a, b] = [(); 3].map(|()| 10 + random.below(6));
            let number = random.below(1000);
            body += &match random.below(8) {
                0 => format!("	mad.lo.u32 %r{to}, %r{a}, {number}, %r{b};\n"),
                1 => format!("	setp.lt.u32 %p1, %r{a}, %r{b};\n"),
                2 => format!("	@%p1 xor.b32 %r{to}, %r{a}, {number};\n"),
                3 => format!("	@!%p1 shr.u32 %r{to}, %r{a}, 3;\n"),
                4 => format!("	mad.wide.u32 %rd6, %r{a}, 7, %rd6;\n"),
                5 => format!("	red.global.add.u32 [%rd5], %r{a};\n"),
                6 => {
                    format!("	add.cc.u32 %r{to}, %r{a}, %r{b}; addc.u32 %r{b}, %r{a}, {number};\n")
                }
                _ => format!(
                    "	{{ .reg .b32 %q; add.u32 %q, %r{a}, {number}; xor.b32 %r{to}, %r{b}, %q; }}\n"
                ),
            };
        }
        body += "	sub.u32 %r30, %r30, 1; setp.eq.u32 %p2, %r30, 0; @%p2 bra DONE;\n";
        let [to, other] = [(); 2].map(|()| random.below(count));
        body += &match random.below(6) {
            0 => format!("	bra.uni B{to};\n"),
            1 | 2 => format!("	@%p1 bra B{block};\n"),
            3 => format!("	and.b32 %r32, %r10, 1; setp.eq.u32 %p3, %r32, 0; @!%p3 bra B{to};\n"),
            4 => format!(
                "	and.b32 %r32, %r11, 1;\nL{block}: .branchtargets B{to}, B{other};\n	brx.idx %r32, L{block};\n"
            ),
            _ => String::new(),
        };
    }
    body += "DONE:\n	cvt.u32.u64 %r20, %rd6;\n";
    for register in 10..16 {
        body += &format!("	mad.lo.u32 %r20, %r20, 13, %r{register};\n");
    }
    body + "	st.global.u32 [%rd0+4], %r20;\n	ret;"
}

#[test]
fn random_kernels() {
    let mut random = Random(0x1234_5678_9abc);
    let (mut compared, mut saved) = (0, 0);
    for round in 0..80 {
        let body = if round % 2 == 0 {
            any_flow(&mut random)
        } else {
            let registers = (10..16).map(|r| format!("	mad.lo.u32 %r{r}, %r0, {r}, 99;\n"));
            let loops = loops(&mut random, 0, &mut 0, &|_| String::new());
            let ends = (10..16).map(|r| format!("	mad.lo.u32 %r10, %r10, 3, %r{r};\n"));
            let [begin, end] = [registers.collect::<String>(), ends.collect()];
            begin + &loops + &end + "	st.global.u32 [%rd0], %r10;\n	ret;"
        };
        let text = kernel(&body);
        if why(&text) == Err(Inside::Straight) {
            continue;
        }
        let (grid, block) = ([1 + random.below(4) as u32, 1, 1], [32, 2, 1]);
        let words = 2 + 64 * grid[0] as usize;
        let case = Case { text: &text, grid, block, words, more: &[] };
        saved += case.compare(&mut random);
        compared += 1;
    }
    assert!(compared > 60 && saved > 10_000, "{compared} kernels, {saved} threads");
}

#[test]
fn who_is_not_interrupted_in_loops() {
    let of = |declared: &str, inside: &str| {
        why(&kernel(&format!("	{declared}\nNEXT:	{inside}\n	@%p0 bra NEXT;\n	ret;")))
    };
    assert!(of("", "add.u32 %r0, %r0, 1;").is_ok());
    assert_eq!(why(&kernel("	ret;")), Err(Inside::Straight));
    let uses = |name: &str| Err(Inside::Uses(name.to_owned()));
    for one in [
        "bar.sync 0",
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1",
        "vote.sync.any.pred %p1, %p2, -1",
        "activemask.b32 %r1",
        "redux.sync.add.u32 %r1, %r2, -1",
        "bar.warp.sync -1",
        "match.any.sync.b32 %r1, %r2, -1",
        "ld.shared.u32 %r1, [%r2]",
        "st.local.u32 [%r1], %r2",
        "cvta.to.shared.u64 %rd1, %rd2",
        "call f",
        "alloca.u64 %rd1, 8",
        "grid.sync",
        "unknown.u32 %r1, %r2",
    ] {
        assert_eq!(
            of("", &format!("{one};")),
            uses(one.split(' ').next().expect("a word")),
            "{one}"
        );
    }
    for register in ["%clock", "%clock64", "%globaltimer", "%smid", "%warpid", "%nsmid", "%gridid"]
    {
        assert_eq!(of("", &format!("mov.u32 %r1, {register};")), uses(register));
    }
    assert_eq!(of(".local .b8 x[4];", "add.u32 %r0, %r0, 1;"), uses(".local"));
    assert_eq!(of(".shared .b8 x[4];", "add.u32 %r0, %r0, 1;"), uses(".shared"));
    assert_eq!(of("", "mov.u64 %rd1, words;"), uses("words"), "the address of a parameter");
    assert_eq!(of("add.cc.u32 %r0, %r0, 1;", "addc.u32 %r1, %r1, 1;"), Err(Inside::Carry));
    assert_eq!(of(".reg .b128 %x;", "add.u32 %r0, %r0, 1;"), uses(".reg .b128"));
    assert_eq!(of("", "{ HERE: add.u32 %r0, %r0, 1; }"), Err(Inside::Form));
    assert_eq!(of("", "@%p0 bra NOWHERE;"), Err(Inside::Form));
    let shared = format!(".shared .u32 x; {}", kernel("NEXT: mov.u32 %r1, x; @%p0 bra NEXT; ret;"));
    assert_eq!(why(&shared), uses("x"));
}

#[test]
fn what_compilers_write() {
    let mut found = Vec::new();
    for (file, text) in texts() {
        for polls in [OFTEN, Polls::default()] {
            let rewritten =
                rewrite_with(&text, |_| true, How { polls, ..How::default() }).expect("PTX");
            let loaded = softcuda::ptx::Module::load(&rewritten.text);
            loaded.unwrap_or_else(|fault| panic!("{file}: {fault}"));
            let in_loops =
                |judged: Result<Twins, _>| judged.is_ok_and(|twins| twins.in_loops.is_ok());
            let kernels = rewritten.kernels.into_iter();
            found.extend(
                kernels.filter(|(_, judged)| in_loops(judged.clone())).map(|(name, _)| name),
            );
        }
    }
    found.sort();
    found.dedup();
    let expected = "adam adversary_long attn_project bfs lists_walk meet mlp_forward mlp_grad_input \
                    mlp_grad_weights scan_add slice_hidden slice_project small_update spmv";
    assert_eq!(found.join(" "), expected);
}
