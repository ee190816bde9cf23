//! Divergence, barriers, shuffles, calls, atomics and traps.

use super::{Device, kernel, load};
use crate::ptx::Trap;

const REGISTERS: &str = ".reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<9>;\n\
    ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r0, %tid.x;\n\
    mul.wide.u32 %d2, %r0, 4; add.s64 %d3, %d0, %d2;\n";

/// What each of the threads of one block stores, by a body that leaves it in `%r1`.
fn values(threads: u32, body: &str) -> Vec<u32> {
    let module = load(&kernel(&format!("{REGISTERS}{body}\nst.global.u32 [%d3], %r1; ret;")));
    let mut device = Device::default();
    let out = device.alloc(4 * threads as usize);
    device.launch(&module, &[], "k", (1, threads, 0), &[out]).unwrap();
    device.download32(out, threads as usize)
}

#[test]
fn diverged_lanes_join_again() {
    // Nested branches, then a ballot that must see the whole warp.
    let found = values(
        32,
        "mov.u32 %r1, 0; and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0;\n\
         @%p1 bra even;\n\
         setp.lt.u32 %p2, %r0, 16; @!%p2 bra high;\n\
         add.u32 %r1, %r1, 1;\n\
         high: add.u32 %r1, %r1, 10; bra.uni join;\n\
         even: add.u32 %r1, %r1, 100;\n\
         join: activemask.b32 %r3; setp.eq.u32 %p3, %r3, 0xffffffff;\n\
         @%p3 add.u32 %r1, %r1, 1000;",
    );
    for (lane, value) in found.into_iter().enumerate() {
        let expected = match (lane % 2, lane < 16) {
            (0, _) => 1100,
            (_, true) => 1011,
            _ => 1010,
        };
        assert_eq!(value, expected, "lane {lane}");
    }
}

/// Takes a lock in `%d0`, adds 1 to the word after it, gives the lock back.
const LOCKED_COUNT: &str = "
    again: atom.global.cas.b32 %r2, [%d0], 0, 1; setp.ne.u32 %p1, %r2, 0;
    @%p1 bra again;
    ld.volatile.global.u32 %r3, [%d0+4]; add.u32 %r3, %r3, 1;
    st.volatile.global.u32 [%d0+4], %r3;
    membar.gl; atom.global.exch.b32 %r4, [%d0], 0;";

#[test]
fn lanes_of_a_warp_take_a_lock_in_turns() {
    // After it, the lanes are one warp again: for a shuffle, a vote and a barrier.
    let module = load(&kernel(&format!(
        "{REGISTERS}.reg .pred %q; .shared .u32 seen; setp.ne.u32 %p5, %r0, 0;
         @!%p5 st.shared.u32 [seen], 0; bar.sync 0;
         {LOCKED_COUNT}
         vote.sync.ballot.b32 %r5, 1, 0xffffffff;
         shfl.sync.bfly.b32 %r6, %r0, 1, 0x1f, 0xffffffff;
         atom.shared.add.u32 %r7, [seen], 1; bar.sync 0; ld.shared.u32 %r7, [seen];
         setp.eq.u32 %p2, %r5, 0xffffffff; xor.b32 %r8, %r0, 1; setp.eq.u32 %p3, %r6, %r8;
         and.pred %p2, %p2, %p3; setp.eq.u32 %p3, %r7, 96; and.pred %p2, %p2, %p3;
         selp.u32 %r1, 1, 2, %p2; add.s64 %d3, %d3, 8; st.global.u32 [%d3], %r1; ret;"
    )));
    let mut device = Device::default();
    let out = device.alloc(8 + 4 * 96);
    device.launch(&module, &[], "k", (1, 96, 0), &[out]).unwrap();
    let found = device.download32(out, 2 + 96);
    assert_eq!(found[..2], [0, 96]);
    assert_eq!(found[2..], [1; 96]);
}

#[test]
fn a_lock_is_taken_inside_of_a_diverged_loop() {
    // Lanes take the lock as often as their number says, in two nested loops.
    let module = load(&kernel(&format!(
        "{REGISTERS}mov.u32 %r10, %r0;
         loop: setp.eq.u32 %p4, %r10, 0; @%p4 bra done; sub.u32 %r10, %r10, 1;
         {LOCKED_COUNT}
         bra loop;
         done: activemask.b32 %r1; add.s64 %d3, %d3, 8; st.global.u32 [%d3], %r1; ret;"
    )));
    let mut device = Device::default();
    let out = device.alloc(8 + 4 * 32);
    device.launch(&module, &[], "k", (1, 32, 0), &[out, 0, 0, 0]).unwrap();
    let found = device.download32(out, 2 + 32);
    assert_eq!(found[..2], [0, 31 * 32 / 2]);
    assert_eq!(found[2..], [u32::MAX; 32]);
}

#[test]
fn a_lane_waits_for_what_another_does_after_it() {
    // Each lane waits until the lane before it has passed: the reverse of the order of paths.
    let module = load(&kernel(&format!(
        "{REGISTERS}
         again: ld.volatile.global.u32 %r2, [%d0]; setp.ne.u32 %p1, %r2, %r0; @%p1 bra again;
         add.u32 %r2, %r2, 1; st.volatile.global.u32 [%d0], %r2; ret;"
    )));
    let mut device = Device::default();
    let out = device.alloc(8);
    device.launch(&module, &[], "k", (1, 32, 0), &[out, 0, 0, 0]).unwrap();
    assert_eq!(device.download32(out, 1), [32]);
}

#[test]
fn a_lock_is_taken_through_a_function() {
    let source = ".version 9.0\n.target sm_80\n.address_size 64\n\
         .func (.param .b32 got) try(.param .b64 lock) { .reg .b32 %r<3>; .reg .b64 %d<2>;\n\
         ld.param.u64 %d1, [lock]; atom.global.cas.b32 %r1, [%d1], 0, 1;\n\
         st.param.b32 [got], %r1; ret; }\n\
         .visible .entry k(.param .u64 p0) { .reg .b32 %r<9>; .reg .b64 %d<2>; .reg .pred %p<2>;\n\
         ld.param.u64 %d1, [p0];\n\
         again: { .param .b64 a; .param .b32 b; st.param.b64 [a], %d1;\n\
         call (b), try, (a); ld.param.b32 %r1, [b]; }\n\
         setp.ne.u32 %p1, %r1, 0; @%p1 bra again;\n\
         ld.volatile.global.u32 %r3, [%d1+4]; add.u32 %r3, %r3, 1;\n\
         st.volatile.global.u32 [%d1+4], %r3; atom.global.exch.b32 %r4, [%d1], 0; ret; }\n";
    let module = load(source);
    let mut device = Device::default();
    let out = device.alloc(8);
    device.launch(&module, &[], "k", (2, 64, 0), &[out]).unwrap();
    assert_eq!(device.download32(out, 2), [0, 128]);
}

#[test]
fn lanes_leave_a_loop_at_different_times() {
    let found = values(
        64,
        "mov.u32 %r1, 0; mov.u32 %r2, %r0;\n\
         loop: setp.eq.u32 %p1, %r2, 0; @%p1 bra done;\n\
         add.u32 %r1, %r1, %r2; sub.u32 %r2, %r2, 1;\n\
         and.b32 %r4, %r2, 7; setp.eq.u32 %p2, %r4, 5; @%p2 bra loop;\n\
         add.u32 %r1, %r1, 1; bra loop;\n\
         done: activemask.b32 %r3; setp.ne.u32 %p3, %r3, 0xffffffff; @%p3 mov.u32 %r1, 0;",
    );
    for (thread, value) in found.into_iter().enumerate() {
        let n = thread as u32;
        let expected: u32 = (0..n).map(|left| left + 1 + u32::from(left & 7 != 5)).sum();
        assert_eq!(value, expected, "thread {thread}");
    }
}

#[test]
fn threads_that_exit_early_are_not_waited_for() {
    let found = values(
        64,
        ".shared .align 4 .b8 s[256]; mov.u32 %r1, 7;\n\
         setp.gt.u32 %p1, %r0, 40; @%p1 exit;\n\
         mov.u32 %r2, s; shl.b32 %r3, %r0, 2; add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r0;\n\
         bar.sync 0; ld.shared.u32 %r1, [s+160];",
    );
    assert!(found[..41].iter().all(|&value| value == 40), "{found:?}");
    assert!(found[41..].iter().all(|&value| value == 0));
}

#[test]
fn blocks_reduce_in_shared_memory() {
    let found = values(
        256,
        ".shared .align 4 .b8 s[1024]; mov.u32 %r2, s; shl.b32 %r3, %r0, 2;\n\
         add.u32 %r2, %r2, %r3; st.shared.u32 [%r2], %r0; mov.u32 %r4, 128;\n\
         loop: bar.sync 0; setp.ge.u32 %p1, %r0, %r4; @%p1 bra skip;\n\
         shl.b32 %r5, %r4, 2; add.u32 %r5, %r5, %r2; ld.shared.u32 %r6, [%r5];\n\
         ld.shared.u32 %r7, [%r2]; add.u32 %r7, %r7, %r6; st.shared.u32 [%r2], %r7;\n\
         skip: shr.u32 %r4, %r4, 1; setp.ne.u32 %p2, %r4, 0; @%p2 bra loop;\n\
         bar.sync 0; ld.shared.u32 %r1, [s];",
    );
    assert_eq!(found, [255 * 256 / 2; 256]);
}

#[test]
fn barriers_count_and_combine_predicates() {
    let body = "setp.lt.u32 %p1, %r0, 70; setp.lt.u32 %p4, %r0, 999;\n\
        bar.red.popc.u32 %r1, 0, %p1; bar.red.or.pred %p2, 1, !%p4;\n\
        bar.red.and.pred %p3, 2, %p4; @%p2 mov.u32 %r1, 0; @!%p3 mov.u32 %r1, 1;";
    assert_eq!(values(128, body), [70; 128]);
    // Two warps meet at one named barrier, two at another.
    let body = "shr.u32 %r2, %r0, 6; add.u32 %r2, %r2, 1; bar.sync %r2, 64; mov.u32 %r1, %r2;";
    let found = values(128, body);
    assert_eq!((found[0], found[127]), (1, 2));
}

#[test]
fn warps_that_wait_for_each_other_for_ever_are_reported() {
    let source = kernel(&format!(
        "{REGISTERS} setp.lt.u32 %p1, %r0, 32; @%p1 bra a; bar.sync 1, 64; ret; a: bar.sync 2, 64; ret;"
    ));
    let device = Device::default();
    let fault = device.launch(&load(&source), &[], "k", (1, 64, 0), &[]).unwrap_err();
    assert!(matches!(fault, Trap::Deadlock { .. }), "{fault}");
}

#[test]
fn shuffles_move_values_between_lanes() {
    type Case = (&'static str, fn(u32) -> u32);
    let cases: &[Case] = &[
        ("shfl.sync.down.b32 %r1, %r0, 3, 31, -1;", |lane| if lane > 28 { lane } else { lane + 3 }),
        ("shfl.sync.up.b32 %r1, %r0, 1, 0, -1;", |lane| lane.saturating_sub(1)),
        ("shfl.sync.bfly.b32 %r1, %r0, 5, 31, -1;", |lane| lane ^ 5),
        ("shfl.sync.idx.b32 %r1, %r0, 2, 0x1c1f, -1;", |lane| lane / 4 * 4 + 2),
        ("shfl.sync.down.b32 %r2|%p1, %r0, 1, 0x181f, -1; selp.u32 %r1, %r2, 99, %p1;", |lane| {
            if lane % 8 == 7 { 99 } else { lane + 1 }
        }),
        ("setp.gt.u32 %p1, %r0, 27; vote.sync.ballot.b32 %r1, %p1, -1;", |_| 0xf000_0000),
        ("shr.u32 %r2, %r0, 3; match.any.sync.b32 %r1, %r2, -1;", |lane| 0xff << (lane / 8 * 8)),
        ("redux.sync.add.u32 %r1, %r0, -1;", |_| 31 * 32 / 2),
        ("mov.u32 %r1, %lanemask_lt;", |lane| (1 << lane) - 1),
    ];
    for (body, host) in cases {
        let expected: Vec<u32> = (0..32).map(host).collect();
        assert_eq!(values(32, body), expected, "{body}");
    }
}

#[test]
fn indexed_branches_go_where_each_lane_wants() {
    let found = values(
        32,
        "and.b32 %r2, %r0, 3; mov.u32 %r1, 0;\n\
         table: .branchtargets a, b, c, a;\n\
         brx.idx %r2, table;\n\
         a: add.u32 %r1, %r1, 1; bra d;\n\
         b: add.u32 %r1, %r1, 10;\n\
         c: add.u32 %r1, %r1, 100;\n\
         d: activemask.b32 %r3; setp.eq.u32 %p1, %r3, -1; @!%p1 mov.u32 %r1, 0;",
    );
    let expected: Vec<u32> = (0..32).map(|lane| [1, 110, 100, 1][lane % 4]).collect();
    assert_eq!(found, expected);
}

#[test]
fn functions_call_themselves_with_divergent_arguments() {
    let source = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .func (.param .b32 r) fib(.param .b32 n)\n{\n.reg .b32 %r<9>; .reg .pred %p;\n\
        ld.param.b32 %r1, [n]; setp.lt.u32 %p, %r1, 2; @%p bra small;\n\
        sub.u32 %r2, %r1, 1; sub.u32 %r3, %r1, 2;\n\
        { .param .b32 a; .param .b32 o; st.param.b32 [a], %r2; call (o), fib, (a); ld.param.b32 %r4, [o]; }\n\
        { .param .b32 a; .param .b32 o; st.param.b32 [a], %r3; call.uni (o), fib, (a); ld.param.b32 %r5, [o]; }\n\
        add.u32 %r1, %r4, %r5;\n\
        small: st.param.b32 [r], %r1; ret;\n}\n\
        .visible .entry k(.param .u64 p)\n{\n.reg .b32 %r<9>; .reg .b64 %d<9>; .reg .pred %p;\n\
        mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 15; mov.u32 %r3, 77;\n\
        setp.ne.u32 %p, %r1, 5;\n\
        { .param .b32 a; .param .b32 o; st.param.b32 [a], %r2; @%p call (o), fib, (a); @%p ld.param.b32 %r3, [o]; }\n\
        ld.param.u64 %d1, [p]; mad.wide.u32 %d2, %r1, 4, %d1; st.global.u32 [%d2], %r3; ret;\n}";
    let module = load(source);
    let mut device = Device::default();
    let out = device.alloc(4 * 40);
    device.launch(&module, &[], "k", (1, 40, 0), &[out]).unwrap();
    fn fib(n: u32) -> u32 {
        if n < 2 { n } else { fib(n - 1) + fib(n - 2) }
    }
    let expected: Vec<u32> = (0..40).map(|t| if t == 5 { 77 } else { fib(t & 15) }).collect();
    assert_eq!(device.download32(out, 40), expected);
}

#[test]
fn endless_recursion_runs_out_of_stack() {
    let source = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .func f() { call f; ret; }\n.visible .entry k() { call f; ret; }";
    let device = Device::default();
    let fault = device.launch(&load(source), &[], "k", (1, 1, 0), &[]).unwrap_err();
    assert!(matches!(fault, Trap::StackOverflow { .. }), "{fault}");
}

#[test]
fn atomics_of_many_blocks_do_not_lose_updates() {
    let body = format!(
        "{REGISTERS} atom.global.add.u32 %r1, [%d0], 1; red.global.add.f32 [%d0+4], 0f3F800000;\n\
         atom.global.max.s32 %r2, [%d0+8], %r0; atom.inc.u32 %r3, [%d0+12], 9;\n\
         try: ld.global.u32 %r4, [%d0+16]; add.u32 %r5, %r4, 2;\n\
         atom.global.cas.b32 %r6, [%d0+16], %r4, %r5; setp.ne.u32 %p1, %r6, %r4; @%p1 bra try;\n\
         mov.u64 %d5, 3; red.add.u64 [%d0+24], %d5; ret;"
    );
    let module = load(&kernel(&body));
    let mut device = Device::default();
    let out = device.upload32(&[0, 0, -5i32 as u32, 0, 0, 0, 0, 0]);
    device.launch(&module, &[], "k", (50, 100, 0), &[out]).unwrap();
    let found = device.download32(out, 8);
    assert_eq!(found[..5], [5000, 5000f32.to_bits(), 99, 0, 10000]);
    assert_eq!(found[6], 15000);
}

#[test]
fn dynamic_shared_memory_follows_the_static() {
    let source = ".version 8.0\n.target sm_75\n.address_size 64\n\
        .extern .shared .align 16 .b8 dyn[];\n\
        .visible .entry k(.param .u64 p)\n{\n.shared .align 4 .b8 fixed[20];\n\
        .reg .b32 %r<9>; .reg .b64 %d<9>;\n\
        mov.u32 %r1, %tid.x; mov.u32 %r2, dyn; shl.b32 %r3, %r1, 2; add.u32 %r2, %r2, %r3;\n\
        st.shared.u32 [fixed], 1000; st.shared.u32 [%r2], %r1; bar.sync 0;\n\
        mov.u32 %r4, 63; sub.u32 %r4, %r4, %r1; shl.b32 %r4, %r4, 2;\n\
        mov.u64 %d1, dyn; cvta.shared.u64 %d1, %d1; cvt.u64.u32 %d2, %r4; add.u64 %d1, %d1, %d2;\n\
        ld.u32 %r5, [%d1]; ld.shared.u32 %r6, [fixed]; add.u32 %r5, %r5, %r6;\n\
        ld.param.u64 %d3, [p]; mad.wide.u32 %d4, %r1, 4, %d3; st.global.u32 [%d4], %r5; ret;\n}";
    let module = load(source);
    let mut device = Device::default();
    let out = device.alloc(256);
    device.launch(&module, &[], "k", (1, 64, 256), &[out]).unwrap();
    let expected: Vec<u32> = (0..64).map(|thread| 1063 - thread).collect();
    assert_eq!(device.download32(out, 64), expected);
    let fault = device.launch(&module, &[], "k", (1, 256, 16), &[out]).unwrap_err();
    assert!(matches!(fault, Trap::IllegalAddress { .. }), "{fault}");
}

#[test]
fn bad_accesses_and_traps_end_the_launch() {
    let run = |body: &str| {
        let mut device = Device::default();
        let out = device.alloc(64);
        let module = load(&kernel(&format!("{REGISTERS}{body} ret;")));
        device.launch(&module, &[], "k", (4, 64, 0), &[out, out + 64]).unwrap_err()
    };
    let fault = run("ld.global.u32 %r1, [%d1+0x100000];");
    assert!(matches!(&fault, Trap::IllegalAddress { kernel, .. } if kernel == "k"), "{fault}");
    assert!(matches!(run("mov.u64 %d4, 0; st.u32 [%d4], %r0;"), Trap::IllegalAddress { .. }));
    let fault = run("ld.global.u64 %d5, [%d0+4];");
    assert!(matches!(fault, Trap::Misaligned { size: 8, .. }), "{fault}");
    assert!(matches!(run("trap;"), Trap::Trapped { .. }));
    let fault = run("call %d0, ();");
    assert!(matches!(fault, Trap::IllegalInstruction { .. }), "{fault}");
}

#[test]
fn a_launch_can_be_cancelled() {
    let module = load(&kernel("loop: bra loop;"));
    let device = Device::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            device.cancel.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        let fault = device.launch(&module, &[], "k", (8, 64, 0), &[]).unwrap_err();
        assert_eq!(fault, Trap::Cancelled);
    });
}

#[test]
fn cooperative_blocks_wait_for_each_other() {
    // Every block adds one, then waits until all have.
    let body = format!(
        "{REGISTERS} setp.ne.u32 %p1, %r0, 0; @%p1 bra wait; red.global.add.u32 [%d0], 1;\n\
         wait: ld.volatile.global.u32 %r1, [%d0]; setp.lt.u32 %p2, %r1, 24; @%p2 bra wait;\n\
         bar.sync 0; @!%p1 red.global.add.u32 [%d0+4], 1; ret;"
    );
    let module = load(&kernel(&body));
    let mut device = Device { cooperative: true, ..Device::default() };
    let out = device.alloc(8);
    device.launch(&module, &[], "k", (24, 64, 0), &[out]).unwrap();
    assert_eq!(device.download32(out, 2), [24, 24]);
}

#[test]
fn launches_that_do_not_fit_are_refused() {
    let module = load(&kernel("ret;"));
    let device = Device::default();
    for shape in [(1, 0, 0), (0, 32, 0), (1, 1025, 0), (1, 32, 64 << 20)] {
        let fault = device.launch(&module, &[], "k", shape, &[]).unwrap_err();
        assert!(matches!(fault, Trap::InvalidLaunch { .. }), "{shape:?}: {fault}");
    }
}

#[test]
fn grid_barriers_work_as_libraries_write_them() {
    // Each block adds its share to a count whose top bit flips once all have arrived.
    let body = "ld.param.u64 %d0, [p0]; mov.u32 %r0, %tid.x;\n\
        mov.u32 %r9, %envreg2; cvt.u64.u32 %d7, %r9; mov.u32 %r10, %envreg1;\n\
        cvt.u64.u32 %d8, %r10; bfi.b64 %d1, %d8, %d7, 32, 32;\n\
        setp.ne.s64 %p4, %d1, 0; @!%p4 trap;\n\
        setp.ne.u32 %p1, %r0, 0; @!%p1 red.global.add.u32 [%d0], 1; barrier.sync 0;\n\
        @%p1 bra done; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;\n\
        setp.eq.u32 %p2, %r1, 0; mov.u32 %r3, -2147483647; sub.s32 %r3, %r3, %r2;\n\
        selp.b32 %r4, %r3, 1, %p2; atom.add.release.gpu.u32 %r5, [%d1+4], %r4;\n\
        wait: ld.acquire.gpu.u32 %r6, [%d1+4]; xor.b32 %r7, %r6, %r5;\n\
        setp.gt.s32 %p3, %r7, -1; @%p3 bra wait;\n\
        done: barrier.sync 0; ld.global.u32 %r8, [%d0]; mul.wide.u32 %d3, %r1, 4;\n\
        add.u64 %d3, %d3, %d0; @!%p1 st.global.u32 [%d3+4], %r8; ret;";
    let declared = ".reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<9>;\n";
    let module = load(&kernel(&format!("{declared}{body}")));
    let mut device = Device { cooperative: true, ..Device::default() };
    let out = device.alloc(4 * 20);
    device.launch(&module, &[], "k", (16, 64, 0), &[out]).unwrap();
    assert_eq!(device.download32(out, 17), [16; 17]);
    device.cooperative = false;
    let fault = device.launch(&module, &[], "k", (16, 64, 0), &[out]).unwrap_err();
    assert!(matches!(fault, Trap::Trapped { .. }), "{fault}");
}

#[test]
fn what_is_read_is_not_written_to() {
    // Buffers smaller than a page are known by parts, or not at all; one beside may be written to.
    let touch = "ld.global.u32 %r1, [%d4]; ld.u32 %r2, [%d4+4]; add.u32 %r1, %r1, %r2;\n\
                 st.global.u32 [%d1], %r1;";
    for write in [
        "",
        "st.global.u32 [%d4], %r1;",
        "st.v2.u32 [%d4], {%r1, %r2};",
        "atom.global.add.u32 %r1, [%d4], 1;",
        "red.add.u32 [%d4], 1;",
        "@%p1 st.global.u32 [%d4], %r1;",
    ] {
        for before in [touch, ""] {
            let module = load(&kernel(&format!(
                "{REGISTERS} mul.wide.u32 %d2, %r0, 64; add.s64 %d4, %d0, %d2;\n\
                 setp.eq.u32 %p1, %r0, 16; {before} {write} ret;"
            )));
            let mut device = Device::default();
            let (read_only, out) = (device.upload32(&[3; 512]), device.alloc(4));
            device.read_only.push(read_only);
            let outcome = device.launch(&module, &[], "k", (1, 32, 0), &[read_only, out]);
            if write.is_empty() {
                outcome.unwrap();
            } else {
                assert!(matches!(outcome, Err(Trap::IllegalAddress { .. })), "{before}{write}");
            }
            assert_eq!(device.download32(out, 1), [if before.is_empty() { 0 } else { 6 }]);
            assert_eq!(device.download32(read_only, 512), [3; 512], "{before}{write}");
        }
    }
}

/// Even and odd lanes are two groups that meet in the same instructions.
#[test]
fn groups_of_lanes_reduce_and_vote_apart() {
    let module = load(&kernel(
        ".reg .b32 %r<8>; .reg .b64 %rd<4>; .reg .pred %p<2>;\n\
        mov.u32 %r1, %tid.x;\nand.b32 %r2, %r1, 1;\n\
        match.any.sync.b32 %r3, %r2, -1;\n\
        redux.sync.max.s32 %r4, %r1, %r3;\n\
        setp.gt.u32 %p1, %r1, 29;\nvote.sync.ballot.b32 %r5, %p1, %r3;\n\
        ld.param.u64 %rd1, [p0];\nmul.wide.u32 %rd2, %r1, 8;\nadd.u64 %rd3, %rd1, %rd2;\n\
        st.global.u32 [%rd3], %r4;\nst.global.u32 [%rd3+4], %r5;\nret;",
    ));
    let mut device = Device::default();
    let out = device.alloc(256);
    device.launch(&module, &[], "k", (1, 32, 0), &[out, 0, 0, 0]).unwrap();
    let found = device.download32(out, 64);
    for lane in 0..32 {
        let wanted = [30 + lane as u32 % 2, 1 << (30 + lane % 2)];
        assert_eq!(found[2 * lane..2 * lane + 2], wanted, "lane {lane}");
    }
}

#[test]
fn other_blocks_see_a_vector_whole() {
    // Each thread of the first block writes vectors of equal elements where one of the second reads them.
    for (ty, register, elements) in
        [("u16", "s", 4), ("u32", "r", 2), ("u32", "r", 4), ("u64", "d", 2)]
    {
        let vector = |first: usize| {
            let all = (0..elements)
                .map(|at| format!("%{register}{}", if first == 0 { 30 } else { first + at }));
            all.collect::<Vec<_>>().join(", ")
        };
        let differ: String = (21..20 + elements)
            .map(|at| {
                format!(
                    "setp.ne.{ty} %p3, %{register}20, %{register}{at}; @%p3 add.u32 %r5, %r5, 1;\n"
                )
            })
            .collect();
        let body = format!(
            ".reg .b16 %s<40>; .reg .b32 %r<40>; .reg .b64 %d<40>; .reg .pred %p<9>;\n\
             ld.param.u64 %d0, [p0]; ld.param.u64 %d1, [p1]; mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 16;\n\
             add.u64 %d2, %d2, %d0; mov.u32 %r1, %ctaid.x; setp.ne.u32 %p1, %r1, 0; mov.u32 %r2, 0; mov.u32 %r5, 0;\n\
             loop: cvt.{ty}.u32 %{register}30, %r2;\n\
             @!%p1 st.global.v{elements}.{ty} [%d2], {{{}}};\n\
             @%p1 ld.global.v{elements}.{ty} {{{}}}, [%d2];\n\
             @!%p1 bra next;\n{differ}\
             next: add.u32 %r2, %r2, 1; setp.lt.u32 %p2, %r2, 2000; @%p2 bra loop;\n\
             red.global.add.u32 [%d1], %r5; ret;",
            vector(0),
            vector(20),
        );
        let module = load(&kernel(&body));
        let mut device = Device { cooperative: true, ..Device::default() };
        let vectors = device.alloc(16 * 513).next_multiple_of(16);
        let torn = device.alloc(4);
        device.launch(&module, &[], "k", (2, 512, 0), &[vectors, torn]).unwrap();
        assert_eq!(device.download32(torn, 1), [0], "v{elements}.{ty}");
    }
}

#[test]
fn a_block_waits_for_one_that_begins_after_it() {
    // All blocks but the last wait until that has written.
    let body = format!(
        "{REGISTERS} mov.u32 %r1, %ctaid.x; setp.eq.u32 %p1, %r1, 6; @%p1 st.volatile.global.u32 [%d0], 1;\n\
         wait: ld.volatile.global.u32 %r2, [%d0]; setp.eq.u32 %p2, %r2, 0; @%p2 bra wait;\n\
         red.global.add.u32 [%d0+4], 1; ret;"
    );
    let module = load(&kernel(&body));
    let mut device = Device::default();
    let out = device.alloc(8);
    device.launch(&module, &[], "k", (7, 64, 0), &[out]).unwrap();
    assert_eq!(device.download32(out, 2), [1, 7 * 64]);
}
