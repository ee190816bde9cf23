//! Clusters of several blocks.

use super::{Device, kernel, load};
use crate::ptx::Trap;

const REGISTERS: &str = ".reg .b32 %r<20>; .reg .b64 %d<20>; .reg .pred %p<9>;\n\
    .shared .align 8 .u32 mine[2];\n\
    ld.param.u64 %d0, [p0]; mov.u32 %r0, %ctaid.x; mul.wide.u32 %d1, %r0, 32; add.s64 %d1, %d0, %d1;\n\
    mov.u32 %r1, %tid.x; setp.eq.u32 %p0, %r1, 0; mov.u32 %r2, %cluster_ctarank;\n\
    xor.b32 %r3, %r2, 1; mov.u32 %r4, mine;\n";
const MEET: &str =
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n";

/// Runs blocks of 64 threads in clusters of two; each has eight words.
fn run(blocks: u32, body: &str) -> Result<Vec<u32>, Trap> {
    let body = body.replace("MEET;", MEET);
    let module = load(&kernel(&format!("{REGISTERS}{body}\nret;")));
    let mut device = Device { cluster: 2, ..Device::default() };
    let words = 8 * blocks as usize;
    let out = device.alloc(4 * words);
    device.launch(&module, &[], "k", (blocks, 64, 0), &[out])?;
    Ok(device.download32(out, words))
}

#[test]
fn blocks_of_a_cluster_see_each_others_shared_memory() {
    let found = run(
        6,
        "add.u32 %r5, %r0, 100;
         @%p0 st.shared.u32 [mine], %r5; @%p0 st.shared::cta.u32 [mine+4], %r0;
         MEET;
         // The other's, by its address in the cluster and by a generic one.
         mapa.shared::cluster.u32 %r6, %r4, %r3;
         ld.shared::cluster.v2.u32 {%r7, %r8}, [%r6];
         cvta.shared.u64 %d2, mine; mapa.u64 %d3, %d2, %r3; ld.u32 %r9, [%d3+4];
         setp.ne.u32 %p1, %r8, %r9; @%p1 trap;
         getctarank.shared::cluster.u32 %r10, %r6; getctarank.u64 %r11, %d2;
         MEET;
         // All threads count in the first block's, which is also its own.
         mov.u32 %r12, 0; mapa.shared::cluster.u32 %r13, %r4, %r12;
         atom.shared::cluster.add.u32 %r14, [%r13+4], 1;
         @%p0 st.shared::cluster.u32 [%r6], %r0;
         MEET;
         ld.shared.u32 %r15, [mine]; ld.shared::cluster.u32 %r16, [%r13+4];
         @!%p0 bra end;
         st.global.u32 [%d1], %r7; st.global.u32 [%d1+4], %r8; st.global.u32 [%d1+8], %r10;
         st.global.u32 [%d1+12], %r11; st.global.u32 [%d1+16], %r15; st.global.u32 [%d1+20], %r16;
         end:",
    );
    for (block, words) in found.unwrap().chunks(8).enumerate() {
        let (block, rank) = (block as u32, block as u32 % 2);
        let (first, other) = (block - rank, block ^ 1);
        let expected = [other + 100, other, 1 - rank, rank, other, first + 128, 0, 0];
        assert_eq!(words, expected, "block {block}");
    }
}

#[test]
fn special_registers_tell_the_place_in_the_cluster() {
    let found = run(
        4,
        "mov.u32 %r5, %cluster_nctarank; mov.u32 %r6, %cluster_ctaid.x; mov.u32 %r7, %cluster_nctaid.x;
         mov.u32 %r8, %clusterid.x; mov.u32 %r9, %nclusterid.x; mov.u32 %r10, %cluster_nctaid.y;
         mov.pred %p1, %is_explicit_cluster; selp.u32 %r11, 1, 0, %p1; mov.u32 %r12, %nctaid.x;
         @!%p0 bra end;
         st.global.u32 [%d1], %r2; st.global.u32 [%d1+4], %r5; st.global.u32 [%d1+8], %r6;
         st.global.u32 [%d1+12], %r7; st.global.u32 [%d1+16], %r8; st.global.u32 [%d1+20], %r9;
         st.global.u32 [%d1+24], %r10; add.u32 %r12, %r12, %r11; st.global.u32 [%d1+28], %r12;
         end:",
    );
    for (block, words) in found.unwrap().chunks(8).enumerate() {
        let (rank, cluster) = (block as u32 % 2, block as u32 / 2);
        assert_eq!(words, [rank, 2, rank, 2, cluster, 2, 1, 5], "block {block}");
    }
}

#[test]
fn whoever_has_ended_is_not_waited_for() {
    let found = run(
        2,
        "setp.ne.u32 %p1, %r2, 0; @%p1 bra end;
         MEET;
         @%p0 st.global.u32 [%d1], 7;
         end:",
    );
    assert_eq!(found.unwrap()[0], 7);
}

#[test]
fn what_is_wrong_ends_the_launch() {
    // One block at the cluster's barrier, the other at one of its own that nobody else comes to.
    let stuck = run(
        2,
        "setp.ne.u32 %p1, %r2, 0; @%p1 bra other; MEET; bra end;
         other: barrier.sync 1, 96;
         end:",
    );
    assert!(matches!(stuck, Err(Trap::Deadlock { .. })), "{stuck:?}");
    let rank = run(2, "mov.u32 %r5, 2; mapa.shared::cluster.u32 %r6, %r4, %r5;");
    assert!(matches!(rank, Err(Trap::IllegalInstruction { .. })), "{rank:?}");
    for beyond in ["ld.shared::cluster.u32 %r7, [%r6+8];", "st.shared::cluster.u32 [%r6+8], 1;"] {
        let body =
            format!("mapa.shared::cluster.u32 %r6, %r4, %r3; add.u32 %r6, %r6, 65536; {beyond}");
        let fault = run(2, &body);
        assert!(matches!(fault, Err(Trap::IllegalAddress { .. })), "{fault:?}");
    }
    let odd = run(3, "");
    assert!(matches!(odd, Err(Trap::InvalidLaunch { .. })), "{odd:?}");
}
