//! Twins that are interrupted at barriers again and again compute what their kernels compute.

mod support;

use std::sync::atomic::Ordering;

use gpucr_rewrite::hostile::{LOOKS, haunted};
use gpucr_rewrite::{AtBarriers, How, Inside, Polls, control, rewrite, rewrite_with};
use support::{DYNAMIC, Memory, PLACE, Random, launch, module};

/// After so many launches nobody is interrupted any more.
const MOST_LAUNCHES: u32 = 400;

/// Kernels here have few turns, so that they are asked at every other one of two copies.
const OFTEN: Polls = Polls { every: 1, least: 48, part: 48, meetings: 2 };

fn judged(text: &str) -> (String, Result<AtBarriers, Inside>) {
    let how = How { polls: OFTEN, ..How::default() };
    let rewritten = rewrite_with(text, |_| true, how).expect("PTX");
    let [(_, Ok(twins))] = &rewritten.kernels[..] else { panic!("{:?}", rewritten.kernels) };
    assert!(twins.in_loops.is_err() || twins.at_barriers.is_err(), "one has both");
    (rewritten.text, twins.at_barriers.clone())
}

struct Case<'a> {
    text: &'a str,
    grid: [u32; 3],
    block: [u32; 3],
    words: usize,
    /// Places for blocks that are saved.
    slots: u64,
}

/// What came of a launch in parts.
#[derive(Debug, Default)]
struct Parts {
    launches: u32,
    /// Blocks that were saved in between.
    saved: usize,
}

impl Case<'_> {
    fn params(&self, memory: &Memory) -> Vec<u64> {
        vec![memory.address()]
    }

    fn expected(&self) -> Vec<u32> {
        let memory = Memory::new(self.words);
        launch(self.text, "k", &[&memory], self.grid, self.block, &self.params(&memory));
        memory.words()
    }

    fn blocks(&self) -> u64 {
        control::blocks(self.grid).expect("not too many")
    }

    fn control(&self, twin: &AtBarriers) -> Memory {
        let threads = self.block.iter().map(|size| u64::from(*size)).product();
        let together = twin.shared + twin.dynamic.map_or(0, |_| DYNAMIC.next_multiple_of(16));
        let all = control::AtBarriers::of(self.blocks(), threads, twin.saved, together, self.slots);
        let all = all.expect("little");
        assert_eq!(all.slots, self.slots.min(self.blocks()));
        let control = Memory::new(all.bytes as usize / 4);
        // What is not said to be zero has any value.
        let rest = control.0.iter().skip(all.zero as usize / 4);
        rest.for_each(|word| word.store(0xbad_bad, Ordering::SeqCst));
        control.0[control::SLOTS as usize / 4].store(all.slots as u32, Ordering::SeqCst);
        control
    }

    /// Launches the twin until it is done, with the flag raised for one of so many looks.
    fn interrupted(&self, every: u32, expected: &[u32]) -> Parts {
        let (text, twin) = judged(self.text);
        let twin = twin.unwrap_or_else(|why| panic!("{why}\n{text}"));
        let text = haunted(&text);
        let control = self.control(&twin);
        let memory = Memory::new(self.words);
        let params = [self.params(&memory), vec![control.address()]].concat();
        let [looks, of] = LOOKS.map(|at| &control.0[at as usize / 4]);
        let mut parts = Parts::default();
        let blocks = self.blocks();
        while control::done(&control.bytes(), blocks, 1) < blocks {
            let is_last = parts.launches == MOST_LAUNCHES;
            looks.store(1, Ordering::SeqCst);
            of.store(if is_last { u32::MAX } else { every }, Ordering::SeqCst);
            let memories = [&memory, &control];
            launch(&text, &twin.name, &memories, self.grid, self.block, &params);
            parts.launches += 1;
            let states = &control.words()[control::STATES as usize / 4..][..blocks as usize];
            parts.saved += states.iter().filter(|state| **state >= control::FIRST_SAVED).count();
            assert!(parts.launches <= MOST_LAUNCHES + 1, "it does not come to an end");
        }
        assert!(
            memory.words() == expected,
            "every {every}: {:?}\n{expected:?}\n{text}",
            memory.words()
        );
        parts
    }

    /// The same with a flag that somebody raises again and again.
    fn flagged(&self, random: &mut Random, expected: &[u32]) {
        let (text, twin) = judged(self.text);
        let twin = twin.expect("a twin");
        let control = self.control(&twin);
        let memory = Memory::new(self.words);
        let params = [self.params(&memory), vec![control.address()]].concat();
        let run = || {
            launch(&text, &twin.name, &[&memory, &control], self.grid, self.block, &params);
        };
        control.0[0].store(7, Ordering::SeqCst);
        run();
        assert_eq!(control::done(&control.bytes(), self.blocks(), 1), 0, "nobody begins");
        assert!(memory.words().iter().all(|word| *word == 0));
        for launches in 0.. {
            control.0[0].store(0, Ordering::SeqCst);
            let wait = std::time::Duration::from_micros(random.below(500));
            std::thread::scope(|scope| {
                if launches < 50 {
                    scope.spawn(|| {
                        std::thread::sleep(wait);
                        control.0[0].store(1, Ordering::SeqCst);
                        // Perhaps it is lowered while somebody saves.
                        std::thread::sleep(wait / 4);
                        control.0[0].store((launches & 1) as u32, Ordering::SeqCst);
                    });
                }
                run();
                if launches & 1 == 0 {
                    // Two at a time: each block is run by one.
                    scope.spawn(run);
                }
            });
            if control::done(&control.bytes(), self.blocks(), 1) == self.blocks() {
                break;
            }
            assert!(launches <= 52, "it does not come to an end");
        }
        assert!(memory.words() == expected, "{text}");
    }

    fn compare(&self, random: &mut Random) -> usize {
        let expected = self.expected();
        let mut saved = 0;
        for every in [1, 2 + random.below(5) as u32, 7 + random.below(100) as u32] {
            saved += self.interrupted(every, &expected).saved;
        }
        self.flagged(random, &expected);
        saved
    }
}

/// A kernel with shared memory.
fn kernel(declared: &str, body: &str) -> String {
    module(&format!("{declared}\n.visible .entry k(\n\t.param .u64 words\n)\n{{{PLACE}{body}\n}}"))
}

/// Each thread of a block takes its neighbour's number over and over; in shared memory of two kinds.
const NEIGHBOURS: &str = "
	.shared .align 4 .b8 table[1024];
	mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 2; mov.u32 %r6, table; add.u32 %r6, %r6, %r5;
	mov.u32 %r7, %ntid.x; add.u32 %r8, %r4, 1; rem.u32 %r8, %r8, %r7; shl.b32 %r8, %r8, 2;
	mov.u32 %r9, more; add.u32 %r9, %r9, %r8; mov.u32 %r12, more; add.u32 %r12, %r12, %r5;
	mov.u32 %r10, %r0; mov.u32 %r11, 0; setp.eq.u32 %p2, %r4, %r4;
NEXT:
	@%p2 st.shared.u32 [%r6], %r10; st.shared.u32 [%r12], %r11;
	bar.sync 0;
	xor.b32 %r13, %r5, 4; mov.u32 %r14, table; add.u32 %r14, %r14, %r13;
	ld.shared.u32 %r15, [%r14]; ld.shared.u32 %r16, [%r9];
	mad.lo.u32 %r10, %r10, 31, %r15; add.u32 %r10, %r10, %r16;
	shfl.sync.bfly.b32 %r17, %r10, 1, 31, -1; xor.b32 %r10, %r10, %r17;
	barrier.cta.sync.aligned 0;
	add.u32 %r11, %r11, 1; and.b32 %r18, %r10, 1; setp.eq.u32 %p2, %r18, 0; setp.lt.u32 %p0, %r11, 100;
	@%p0 bra NEXT;
	st.global.u32 [%rd0], %r10;
	red.global.add.u32 [%rd0+4000], 1;
	ret;";

#[test]
fn a_block_goes_on_behind_a_barrier() {
    let text = kernel(".extern .shared .align 16 .b8 more[];", NEIGHBOURS);
    let mut random = Random(3);
    for (grid, block) in [([5, 1, 1], [64, 1, 1]), ([2, 3, 2], [32, 1, 1]), ([1, 1, 1], [2, 1, 1])]
    {
        let case = Case { text: &text, grid, block, words: 2000, slots: 100 };
        let expected = case.expected();
        let parts = case.interrupted(1, &expected);
        // Most launches bring each block eight turns on: four until the flag is seen, and four until all hear of it.
        assert!(parts.launches >= 10 && parts.saved as u64 >= 10 * case.blocks(), "{parts:?}");
        case.compare(&mut random);
    }
}

#[test]
fn where_there_is_no_room_blocks_go_on() {
    let text = kernel(".extern .shared .align 16 .b8 more[];", NEIGHBOURS);
    let case = Case { text: &text, grid: [20, 1, 1], block: [32, 1, 1], words: 3000, slots: 2 };
    let expected = case.expected();
    let parts = case.interrupted(3, &expected);
    assert!(parts.saved > 0 && parts.saved <= 2 * parts.launches as usize, "{parts:?}");
    case.compare(&mut Random(5));
}

#[test]
fn threads_that_have_ended_do_not_come_back() {
    // Each turn some threads less are there; the first one is there to the end.
    let text = kernel(
        ".shared .u32 sum;",
        "
	mov.u32 %r4, %tid.x; mov.u32 %r5, 40; mov.u32 %r10, 0; setp.ne.u32 %p0, %r4, 0; @%p0 bra NEXT;
	st.shared.u32 [sum], 0;
NEXT:	bar.sync 0;
	atom.shared.add.u32 %r6, [sum], 1;
	bar.sync 0;
	ld.shared.u32 %r7, [sum]; mad.lo.u32 %r10, %r10, 7, %r7;
	st.global.u32 [%rd0], %r10; red.global.add.u32 [%rd0+4000], 1;
	sub.u32 %r5, %r5, 1; setp.gt.u32 %p1, %r4, %r5; @%p1 exit;
	setp.ne.u32 %p1, %r5, 0; @%p1 bra NEXT;
	ret;",
    );
    for slots in [1, 9] {
        let case = Case { text: &text, grid: [3, 1, 1], block: [70, 1, 1], words: 2000, slots };
        assert!(case.compare(&mut Random(17)) > 0);
    }
}

#[test]
fn warps_may_come_to_different_barriers() {
    // Even warps meet at one barrier of the text, and odd ones at another; threads of the last one each by itself.
    let text = kernel(
        ".shared .align 4 .b8 cells[1024];",
        "
	mov.u32 %r4, %tid.x; shr.u32 %r5, %r4, 5; and.b32 %r5, %r5, 1; setp.eq.u32 %p1, %r5, 0;
	shl.b32 %r6, %r4, 2; mov.u32 %r7, cells; add.u32 %r8, %r7, %r6; xor.b32 %r9, %r6, 128; add.u32 %r9, %r9, %r7;
	mov.u32 %r10, %r0; mov.u32 %r11, 0;
NEXT:	st.shared.u32 [%r8], %r10;
	@%p1 bra EVEN;
	mad.lo.u32 %r10, %r10, 3, 1;
	barrier.sync 0;
	add.u32 %r10, %r10, %r11;
	bra BOTH;
EVEN:	mad.lo.u32 %r10, %r10, 5, 2;
	barrier.sync 0;
	xor.b32 %r10, %r10, %r11;
BOTH:	ld.shared.u32 %r12, [%r9]; add.u32 %r10, %r10, %r12;
	barrier.sync 0;
	add.u32 %r11, %r11, 1; setp.lt.u32 %p2, %r11, 25; @%p2 bra NEXT;
	st.global.u32 [%rd0], %r10;
	ret;",
    );
    let case = Case { text: &text, grid: [3, 1, 1], block: [64, 1, 1], words: 200, slots: 3 };
    assert!(case.compare(&mut Random(23)) > 0);
}

#[test]
fn variables_of_all_kinds_are_kept() {
    let text = kernel(
        ".shared .b8 bytes[7], word;\n.extern .shared .b8 more[];\n.shared .v4 .f32 wide[3];",
        "
	.shared .align 2 .b16 half[5];
	.shared .u64 long;
	mov.u32 %r4, %tid.x; setp.ge.u32 %p1, %r4, 5; mov.u32 %r11, 0;
	shl.b32 %r5, %r4, 1; mov.u32 %r6, half; add.u32 %r6, %r6, %r5; mov.u32 %r7, bytes; add.u32 %r7, %r7, %r4;
	mov.u32 %r8, more; add.u32 %r8, %r8, %r4; shl.b32 %r5, %r4, 3; mov.u32 %r9, wide; add.u32 %r9, %r9, %r5;
	@%p1 bra NEXT;
	st.shared.u16 [%r6], %r4; st.shared.u8 [%r7], %r4; st.shared.u8 [%r8], %r4; cvt.u64.u32 %rd5, %r4;
	st.shared.u64 [%r9], %rd5; st.shared.u64 [long], %rd5; st.shared.u8 [word], %r4;
NEXT:	bar.sync 0;
	@%p1 bra MEET;
	ld.shared.u16 %r12, [%r6]; mad.lo.u32 %r12, %r12, 3, %r11; st.shared.u16 [%r6], %r12;
	ld.shared.u8 %r13, [%r7]; mad.lo.u32 %r13, %r13, 5, %r12; st.shared.u8 [%r7], %r13;
	ld.shared.u8 %r14, [%r8]; mad.lo.u32 %r14, %r14, 7, %r13; st.shared.u8 [%r8], %r14;
	ld.shared.u64 %rd5, [%r9]; mad.wide.u32 %rd5, %r14, 77, %rd5; st.shared.u64 [%r9], %rd5;
MEET:	bar.sync 0;
	setp.ne.u32 %p2, %r4, 0; @%p2 bra ON;
	ld.shared.u64 %rd6, [long]; mad.wide.u32 %rd6, %r14, 5, %rd6; st.shared.u64 [long], %rd6;
	ld.shared.u8 %r15, [word]; add.u32 %r15, %r15, %r13; st.shared.u8 [word], %r15;
ON:	add.u32 %r11, %r11, 1; setp.lt.u32 %p2, %r11, 20; @%p2 bra NEXT;
	bar.sync 0;
	ld.shared.u64 %rd6, [long]; cvt.u32.u64 %r16, %rd6; ld.shared.u8 %r17, [word]; add.u32 %r16, %r16, %r17;
	@%p1 bra DONE;
	cvt.u32.u64 %r17, %rd5; add.u32 %r16, %r16, %r17; add.u32 %r16, %r16, %r14; add.u32 %r16, %r16, %r12;
DONE:	st.global.u32 [%rd0], %r16;
	ret;",
    );
    let twin = judged(&text).1.expect("a twin");
    // 7 and 1 bytes, 48, 10 and 8, each from a multiple of 16 on.
    assert_eq!((twin.shared, twin.dynamic), (16 + 16 + 48 + 16 + 16, Some(1)));
    let case = Case { text: &text, grid: [2, 1, 1], block: [6, 1, 1], words: 100, slots: 2 };
    assert!(case.compare(&mut Random(29)) > 0);
}

#[test]
fn copies_to_shared_memory_are_waited_for() {
    let text = kernel(
        ".extern .shared .align 16 .b8 more[];",
        "
	mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 2; mov.u32 %r6, more; add.u32 %r6, %r6, %r5; mov.u32 %r11, 0;
	xor.b32 %r7, %r5, 4; mov.u32 %r8, more; add.u32 %r8, %r8, %r7; mov.u32 %r10, 1; st.global.u32 [%rd0], %r0;
	bar.sync 0;
NEXT:	cp.async.ca.shared.global [%r6], [%rd0], 4;
	cp.async.commit_group;
	bar.sync 0;
	cp.async.wait_group 0;
	bar.sync 0;
	ld.shared.u32 %r12, [%r8]; mad.lo.u32 %r10, %r10, 3, %r12; st.global.u32 [%rd0], %r10;
	bar.sync 0;
	add.u32 %r11, %r11, 1; setp.lt.u32 %p2, %r11, 45; @%p2 bra NEXT;
	ret;",
    );
    let case = Case { text: &text, grid: [3, 1, 1], block: [32, 1, 1], words: 200, slots: 3 };
    assert!(case.compare(&mut Random(31)) > 0);
}

/// Loops with barriers in loops, all with as many turns in all threads of a block; and between barriers anything.
fn loops(random: &mut Random, depth: u32, names: &mut u32) -> String {
    let mut body = String::new();
    for _ in 0..1 + random.below(2) {
        *names += 1;
        let (name, counter) = (*names, 20 + depth);
        let [to, a, b] = [(); 3].map(|()| 10 + random.below(6));
        let turns = 1 + random.below(4);
        body += &format!(
            "	mov.u32 %r{counter}, %ctaid.x; and.b32 %r{counter}, %r{counter}, 1; add.u32 %r{counter}, %r{counter}, {turns};\n"
        );
        body += &format!("T{name}:\n	st.shared.u32 [%r30], %r{a};\n");
        body += match random.below(4) {
            0 => "	barrier.sync 0;\n",
            1 => "	bar.red.popc.u32 %r28, 0, %p1; add.u32 %r10, %r10, %r28;\n",
            _ => "	bar.sync 0;\n",
        };
        body += &format!("	ld.shared.u32 %r{to}, [%r31]; mad.lo.u32 %r{to}, %r{to}, 5, %r{b};\n");
        body += &match random.below(5) {
            0 => format!("	shfl.sync.down.b32 %r{b}|%p2, %r{to}, 3, 31, -1;\n"),
            1 => format!("	setp.lt.u32 %p1, %r{a}, %r{b}; vote.sync.ballot.b32 %r{a}, %p1, -1;\n"),
            2 => format!("	@%p1 xor.b32 %r{a}, %r{b}, {name}; red.shared.add.u32 [other], %r4;\n"),
            3 => format!("	mad.wide.u32 %rd6, %r{a}, 7, %rd6;\n"),
            _ => format!(
                "	and.b32 %r28, %r{a}, 7;\nI{name}:	mad.lo.u32 %r{a}, %r{a}, 3, %r28;\n	sub.u32 %r28, %r28, 1; setp.gt.s32 %p3, %r28, 0; @%p3 bra I{name};\n"
            ),
        };
        body += "	bar.sync 0;\n";
        if depth < 3 && random.below(2) == 0 {
            body += &loops(random, depth + 1, names);
            body += "	bar.sync 0;\n";
        }
        body += &format!(
            "	sub.u32 %r{counter}, %r{counter}, 1; setp.ne.u32 %p2, %r{counter}, 0; @%p2 bra T{name};\n"
        );
    }
    body
}

#[test]
fn random_kernels() {
    let mut random = Random(0x1234_5678_9abc);
    let mut saved = 0;
    for _ in 0..16 {
        let threads = [32, 64, 96][random.below(3) as usize];
        let mut body = format!(
            "	.shared .align 4 .b8 cells[400];\n	mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 2; mov.u32 %r6, cells;
	add.u32 %r30, %r6, %r5; add.u32 %r5, %r5, {}; rem.u32 %r5, %r5, {}; add.u32 %r31, %r6, %r5;
	mul.wide.u32 %rd6, %r0, 9; setp.eq.u32 %p1, %r0, %r4; mov.u32 %r28, 7; st.shared.u32 [other], %r28; bar.sync 0;\n",
            4 + 4 * random.below(40),
            4 * threads
        );
        for register in 10..16 {
            body += &format!("	mad.lo.u32 %r{register}, %r0, {register}, 99;\n");
        }
        body += &loops(&mut random, 0, &mut 0);
        body += "	cvt.u32.u64 %r20, %rd6;\n";
        for register in 10..16 {
            body += &format!("	mad.lo.u32 %r20, %r20, 3, %r{register};\n");
        }
        body += "	bar.sync 0; ld.shared.u32 %r21, [other]; setp.eq.u32 %p1, %r4, 0; @%p1 add.u32 %r20, %r20, %r21;\n";
        let text = kernel(".shared .u32 other;", &(body + "	st.global.u32 [%rd0], %r20;\n	ret;"));
        let grid = [1 + random.below(5) as u32, 1, 1];
        let (block, words) = ([threads as u32, 1, 1], 100 * grid[0] as usize);
        let slots = 1 + random.below(4);
        saved += Case { text: &text, grid, block, words, slots }.compare(&mut random);
    }
    assert!(saved > 150, "{saved} blocks");
}

#[test]
fn who_is_not_interrupted_at_barriers() {
    let of = |declared: &str, inside: &str| {
        let text = kernel(declared, &format!("NEXT:	bar.sync 0;	{inside}\n	@%p0 bra NEXT;\n	ret;"));
        judged(&text).1
    };
    assert!(of("", "add.u32 %r0, %r0, 1;").is_ok());
    let straight =
        judged(&kernel("", "bar.sync 0; NEXT: add.u32 %r0, %r0, 1; @%p0 bra NEXT; ret;"));
    assert_eq!(straight.1, Err(Inside::Straight));
    let uses = |name: &str| Err(Inside::Uses(name.to_owned()));
    let some = |name: &str| uses(&format!("{name} for some threads or with a number"));
    assert_eq!(of("", "bar.sync 1;"), some("bar.sync"));
    assert_eq!(of("", "bar.sync 0, 64;"), some("bar.sync"));
    assert_eq!(of("", "barrier.sync %r1;"), some("barrier.sync"));
    assert_eq!(of("", "bar.red.or.pred %p1, 0, 64, %p2;"), some("bar.red.or.pred"));
    assert_eq!(of("", "bar.red.or.pred %p1, %r1, %p2;"), some("bar.red.or.pred"));
    assert_eq!(of("", "@%p1 bar.sync 0;"), Err(Inside::Form));
    assert_eq!(of("", "{ .reg .u32 %q; bar.sync 0; }"), Err(Inside::Form));
    for one in
        ["bar.arrive 0, 64", "call f", "ld.local.u32 %r1, [%r2]", "cvta.shared.u64 %rd1, %rd2"]
    {
        assert_eq!(
            of("", &format!("{one};")),
            uses(one.split(' ').next().expect("a word")),
            "{one}"
        );
    }
    for register in ["%clock", "%smid", "%warpid", "%globaltimer"] {
        assert_eq!(of("", &format!("mov.u32 %r1, {register};")), uses(register));
    }
    assert_eq!(
        of("", "add.cc.u32 %r0, %r0, 1; bar.sync 0; addc.u32 %r1, %r1, 1;"),
        Err(Inside::Carry)
    );
    assert_eq!(of("", "mov.u64 %rd1, words;"), uses("words"), "the address of a parameter");
    assert_eq!(of(".extern .shared .u32 x;", "ld.shared.u32 %r1, [x];"), Err(Inside::Form));
    assert_eq!(of("", "ld.shared.u32 %r1, [x];"), uses("x"));
    let many = "bar.sync 0;".repeat(200);
    assert_eq!(of("", &many), Err(Inside::Size));
}

#[test]
fn what_compilers_write() {
    let mut found = Vec::new();
    for (file, text) in support::texts() {
        let rewritten = rewrite(&text, |_| true).expect("PTX");
        let loaded = softcuda::ptx::Module::load(&rewritten.text);
        loaded.unwrap_or_else(|fault| panic!("{file}: {fault}"));
        let can = rewritten.kernels.into_iter();
        let can =
            can.filter(|(_, judged)| judged.as_ref().is_ok_and(|twins| twins.at_barriers.is_ok()));
        found.extend(can.map(|(name, _)| name));
    }
    found.sort();
    found.dedup();
    assert_eq!(found.join(" "), "matmul n_body");
}
