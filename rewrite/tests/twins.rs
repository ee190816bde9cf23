//! Twins that are interrupted again and again compute what their kernels compute, on the software driver's interpreter.

mod support;

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpucr_rewrite::{Why, control, rewrite};
use support::{Memory, PLACE, Random, kernel, launch, module};

fn twin(text: &str) -> String {
    let rewritten = rewrite(text, |_| true).expect("PTX");
    assert!(matches!(&rewritten.kernels[..], [(name, Ok(_))] if name == "k"));
    rewritten.text
}

/// Runs the kernel `k` and its twin, and compares what they have made of `words` words. The twin's blocks are run in parts
/// which are drawn, and then with a flag that somebody raises at some moment.
fn compare(text: &str, grid: [u32; 3], block: [u32; 3], words: usize, more: &[u64]) {
    compare_in(0..4, text, grid, block, words, more);
}

/// In the first two rounds the parts are drawn, in the others there is the flag.
fn compare_in(
    rounds: Range<u32>,
    text: &str,
    grid: [u32; 3],
    block: [u32; 3],
    words: usize,
    more: &[u64],
) {
    let expected = Memory::new(words);
    let of = |memory: &Memory| [&[memory.address()], more].concat();
    launch(text, "k", &[&expected], grid, block, &of(&expected));
    let twin = twin(text);
    let blocks = control::blocks(grid).expect("not too many");
    let control_words = (control::bytes(blocks) / 4) as usize;
    let first = (control::CLAIMS / 4) as usize;
    let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ blocks);
    for round in rounds {
        let (memory, control) = (Memory::new(words), Memory::new(control_words));
        let params = [of(&memory), vec![control.address()]].concat();
        let run = || launch(&twin, "k", &[&memory, &control], grid, block, &params);
        if round < 2 {
            // Each of three launches finds what it is not to run claimed.
            let parts: Vec<u64> = (0..blocks).map(|_| random.next() % 3).collect();
            for part in 0..3 {
                for (block, own) in parts.iter().enumerate() {
                    let (word, bit) = (&control.0[first + block / 32], 1 << (block % 32));
                    if *own == part {
                        word.fetch_and(!bit, Ordering::SeqCst);
                    } else {
                        word.fetch_or(bit, Ordering::SeqCst);
                    }
                }
                run();
                assert_eq!(control::claimed(&control.bytes()), blocks);
            }
        } else {
            let mut launches = 0;
            while control::claimed(&control.bytes()) < blocks {
                let wait = Duration::from_micros(random.next() % 300);
                std::thread::scope(|scope| {
                    // Flagged launches end at some time.
                    if launches < 20 {
                        scope.spawn(|| {
                            std::thread::sleep(wait);
                            control.0[0].store(1, Ordering::SeqCst);
                        });
                    }
                    run();
                });
                control.0[0].store(0, Ordering::SeqCst);
                launches += 1;
            }
        }
        assert!(memory.words() == expected.words(), "round {round}\n{twin}");
    }
    // A flag that is set before the launch lets no block begin.
    let (memory, control) = (Memory::new(words), Memory::new(control_words));
    control.0[0].store(7, Ordering::SeqCst);
    let params = [of(&memory), vec![control.address()]].concat();
    launch(&twin, "k", &[&memory, &control], grid, block, &params);
    assert_eq!(control::claimed(&control.bytes()), 0);
    assert!(memory.words().iter().all(|word| *word == 0));
}

#[test]
fn each_block_runs_once() {
    // Each thread counts its runs.
    let text = kernel("	red.global.add.u32 [%rd0], 1;\n	ret;");
    for (grid, block) in [
        ([1, 1, 1], [1, 1, 1]),
        ([33, 1, 1], [1, 1, 1]),
        ([100, 1, 1], [40, 1, 1]),
        ([5, 4, 3], [4, 3, 5]),
        ([1, 1, 70], [1, 33, 1]),
    ] {
        let threads = grid.iter().chain(&block).product::<u32>() as usize;
        compare(&text, grid, block, threads, &[]);
    }
}

#[test]
fn barriers_shared_memory_and_early_ends() {
    // The threads of a block hand numbers round; odd threads end early, some in a function.
    let text = module(&format!(
        ".shared .align 4 .b8 table[1024];
.extern .shared .align 16 .b8 more[];
.func quit(.param .u32 number)
{{
	.reg .b32 %r<2>;
	.reg .pred %p<1>;
	ld.param.u32 %r0, [number];
	and.b32 %r0, %r0, 3;
	setp.eq.u32 %p0, %r0, 3;
	@%p0 exit;
	ret;
}}
.visible .entry k(.param .u64 words, .param .u32 factor) .maxntid 256, 1, 1
{{{PLACE}
	mov.u32 %r4, %tid.x; shl.b32 %r5, %r4, 2; mov.u32 %r6, table; add.u32 %r6, %r6, %r5;
	st.shared.u32 [%r6], %r0;
	bar.sync 0;
	xor.b32 %r5, %r5, 124; mov.u32 %r6, table; add.u32 %r6, %r6, %r5;
	ld.shared.u32 %r7, [%r6];
	ld.param.u32 %r8, [factor];
	mad.lo.u32 %r7, %r7, %r8, %r0;
	{{ .param .u32 given; st.param.u32 [given], %r4; call quit, (given); }}
	and.b32 %r9, %r4, 1; setp.eq.u32 %p1, %r9, 1; @%p1 bra DONE;
	atom.global.add.u32 %r10, [%rd0], %r7;
DONE:
	ret;
}}"
    ));
    compare(&text, [37, 2, 1], [64, 1, 1], 37 * 2 * 64, &[12345]);
}

#[test]
fn the_last_block_does_what_the_last_block_does() {
    // Blocks add to a sum; which of them is the last counts in memory, and so do blocks of earlier launches.
    let text = kernel(
        "	ld.param.u64 %rd2, [words];
	red.global.add.u32 [%rd2], %r0;
	bar.sync 0;
	mov.u32 %r4, %tid.x; setp.ne.u32 %p0, %r4, 0; @%p0 ret;
	membar.gl;
	atom.global.add.u32 %r5, [%rd2+4], 1;
	mov.u32 %r6, %nctaid.x; sub.u32 %r6, %r6, 1;
	setp.ne.u32 %p1, %r5, %r6; @%p1 ret;
	ld.volatile.global.u32 %r7, [%rd2];
	st.global.u32 [%rd2+8], %r7;
	ret;",
    );
    compare(&text, [200, 1, 1], [32, 1, 1], 8, &[]);
}

/// A scan in which each block waits for the sum of the one before, be that by tickets, which blocks draw as they begin, or
/// by the numbers of blocks: these begin in their order, and so do those that are left.
#[test]
fn blocks_look_back() {
    for (number, rounds) in
        [("atom.global.add.u32 %r5, [%rd2], 1;", 0..4), ("mov.u32 %r5, %ctaid.x;", 2..4)]
    {
        let text = kernel(&format!(
            "	mov.u32 %r4, %tid.x; setp.ne.u32 %p0, %r4, 0; @%p0 ret;
	ld.param.u64 %rd2, [words];
	{number}
	mul.wide.u32 %rd3, %r5, 8; add.u64 %rd3, %rd3, %rd2;
	mov.u32 %r6, 0;
	setp.eq.u32 %p1, %r5, 0; @%p1 bra SUM;
WAIT:
	ld.volatile.global.u32 %r7, [%rd3];
	setp.eq.u32 %p2, %r7, 0; @%p2 bra WAIT;
	membar.gl;
	ld.volatile.global.u32 %r6, [%rd3+4];
SUM:
	mad.lo.u32 %r6, %r5, 3, %r6; add.u32 %r6, %r6, 1;
	st.volatile.global.u32 [%rd3+12], %r6;
	membar.gl;
	st.volatile.global.u32 [%rd3+8], 1;
	ret;"
        ));
        compare_in(rounds, &text, [150, 1, 1], [32, 1, 1], 2 * 151 + 2, &[]);
    }
}

#[test]
fn random_kernels() {
    let mut random = Random(42);
    for _ in 0..30 {
        let mut body = String::from("	xor.b32 %r10, %r0, 77; mov.u32 %r11, %tid.x;\n");
        for register in 12..16 {
            body += &format!("	mov.u32 %r{register}, {register};\n");
        }
        for step in 0..random.next() % 12 {
            let [to, a, b] = [(); 3].map(|()| 10 + random.next() % 6);
            match random.next() % 5 {
                0 => body += &format!("	mad.lo.u32 %r{to}, %r{a}, {}, %r{b};\n", step * 7 + 3),
                1 => {
                    body +=
                        &format!("	setp.lt.u32 %p2, %r{a}, %r{b}; @%p2 add.u32 %r{to}, %r{a}, 1;\n")
                }
                2 => body += &format!("	shfl.sync.bfly.b32 %r{to}, %r{a}, 1, 31, -1;\n"),
                3 => body += "	bar.sync 0;\n",
                _ => {
                    body += &format!(
                        "	and.b32 %r20, %r{a}, 7;\nLOOP{step}: xor.b32 %r{to}, %r{to}, %r{b}; \
                         setp.ne.u32 %p3, %r20, 0; sub.u32 %r20, %r20, 1; @%p3 bra LOOP{step};\n"
                    );
                }
            }
        }
        body += "	st.global.u32 [%rd0], %r10; red.global.add.u32 [%rd0], %r11;\n	ret;";
        let grid = [1 + (random.next() % 90) as u32, 1, 1];
        compare(&kernel(&body), grid, [64, 1, 1], grid[0] as usize * 64, &[]);
    }
}

#[test]
fn where_there_are_no_parameters() {
    for head in [".entry k", ".entry k()", ".visible .entry k ( )", ".entry k .minnctapersm 1"] {
        let twin = twin(&module(&format!("{head}\n{{ ret; }}")));
        let control = Memory::new(8);
        launch(&twin, "k", &[&control], [3, 1, 1], [2, 1, 1], &[control.address()]);
        assert_eq!(control::claimed(&control.bytes()), 3);
    }
}

#[test]
fn who_has_no_twin() {
    let why = |rest: &str| {
        let rewritten = rewrite(&module(rest), |name| name == "k").expect("PTX");
        let [(_, why)] = &rewritten.kernels[..] else { panic!("{:?}", rewritten.kernels) };
        if why.is_err() {
            assert_eq!(rewritten.text, module(rest));
        }
        why.clone().map(drop)
    };
    let cluster = ".entry k .reqnctapercluster 2, 1, 1 { ret; }";
    assert_eq!(why(cluster), Err(Why::Cluster));
    assert_eq!(why(".entry k { .reg .b32 %gpucr_x; ret; }"), Err(Why::Names));
    for name in ["cudaLaunchDeviceV2", "__cudaCDP2LaunchDeviceV2_ptsz"] {
        let launching =
            format!(".extern .func {name}; .func f {{ call {name}; }} .entry k {{ call f; }}");
        assert_eq!(why(&launching), Err(Why::Launches));
    }
    for declared in [
        ".global .u32 x;",
        ".visible .global .align 4 .b8 y[12], x[4] = {1, 2, 3, 4};",
        ".const .v4 .f32 x = {0f00000000, 1.5, -1, 2};",
        ".global .attribute(.managed) .u32 x;",
        ".global .texref x;",
    ] {
        let variable = Err(Why::Variable("x".to_owned()));
        assert_eq!(why(&format!("{declared} .entry k {{ ld.global.u32 %r, [x]; }}")), variable);
        let called = ".func f { call g; } .func g { mov.u64 %r, x; } .entry k { call f; }";
        assert_eq!(why(&format!("{declared} {called}")), variable, "in a function of a function");
        let other = ".func f { mov.u64 %r, x; } .entry l { call f; } .entry k { ret; }";
        assert_eq!(why(&format!("{declared} {other}")), Ok(()), "another kernel uses it");
    }
    assert_eq!(why(".global .u32 x<4>; .entry k { ret; }"), Err(Why::Nameless));
    assert_eq!(why(".entry k { .global .u32 x; ret; }"), Err(Why::Nameless));
    assert_eq!(why(".shared .u32 x; .entry k { ld.shared.u32 %r, [x]; }"), Ok(()));
    let narrow = module(".entry k { ret; }").replace("64", "32");
    assert_eq!(rewrite(&narrow, |_| true).expect("PTX").kernels[0].1, Err(Why::Addresses));
}

#[test]
fn the_rest_of_the_text_stays() {
    let text = module(
        "// { a brace\n.file 1 \"a.cu\", 12, 13\n.section .debug_str { .b8 1, 2 }\n@@DWARF .byte {\n\
         .func (.param .b32 r) f(.param .b32 a) { ret; }\n.extern .func g ;\n.pragma \"x;{\" ;\n\
         .entry a(.param .u32 p) { /* } */ ret; }\n.entry b(.param .u32 p) { ret; }\n.entry c(.param .u32 q);",
    );
    let rewritten = rewrite(&text, |name| name != "a").expect("PTX");
    assert!(matches!(&rewritten.kernels[..], [(name, Ok(_))] if name == "b"));
    let (before, after) = text.split_once(".entry b(.param .u32 p").expect("it is there");
    assert!(rewritten.text.starts_with(before) && rewritten.text.ends_with(&after[3..]));
    assert_eq!(rewrite(&text, |_| false).expect("PTX").text, text);
    assert!(rewrite(".entry k {", |_| true).is_err());
}
