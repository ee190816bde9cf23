//! `mbarrier` and the copies that report to it: single instructions, and barriers and pipelines of
//! libcu++ that nvcc compiled (`tests/programs/barriers.cu`).

use super::job::Argument::{Buffer, U32};
use super::job::{Argument, Job, Kind, Launch, Precision, bytes32};
use super::matrices::warp;
use super::table::Random;

pub(crate) fn jobs() -> Vec<Job> {
    let mut jobs = vec![arrivals(), bytes()];
    let architectures = [
        ("sm_80", include_str!("../programs/barriers_80.ptx")),
        ("sm_90", include_str!("../programs/barriers_90.ptx")),
    ];
    for (name, ptx) in architectures {
        jobs.extend([phases(name, ptx), pipeline(name, ptx), copy(name, ptx)]);
    }
    jobs.push(bulk("sm_90", architectures[1].1));
    jobs.push(cluster("sm_90", architectures[1].1));
    jobs
}

/// One thread acts on a barrier and asks for its phases; each answer is stored.
fn script(name: &str, lines: &[(&str, Option<bool>)]) -> Job {
    let mut body = ".reg .b64 %s<8>; setp.ne.u32 %p1, %r1, 0; @%p1 ret;\n".to_owned();
    let mut expected = Vec::new();
    for (line, answer) in lines {
        body += &format!("{line}\n");
        if let Some(answer) = answer {
            let at = 4 * expected.len();
            body += &format!("selp.u32 %r2, 1, 0, %p2; st.global.u32 [%d2+{at}], %r2;\n");
            expected.push(u32::from(*answer));
        }
    }
    warp(name.to_owned(), &body, vec![0; 16], Kind::B32, bytes32(&expected))
}

/// Three arrivals, of which one leaves for good, then two.
fn arrivals() -> Job {
    let (no, yes) = (Some(false), Some(true));
    script(
        "mbarrier.arrive, .arrive_drop and .test_wait",
        &[
            ("mbarrier.init.shared.b64 [%sm], 3;", None),
            ("mbarrier.test_wait.parity.shared.b64 %p2, [%sm], 0;", no),
            ("mbarrier.test_wait.parity.shared.b64 %p2, [%sm], 1;", yes),
            ("mbarrier.arrive.noComplete.shared.b64 %s1, [%sm], 1;", None),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s1;", no),
            ("mbarrier.arrive.shared.b64 %s2, [%sm];", None),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s2;", no),
            ("mbarrier.arrive_drop.shared.b64 %s3, [%sm];", None),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s3;", yes),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s1;", yes),
            ("mbarrier.test_wait.parity.shared.b64 %p2, [%sm], 0;", yes),
            ("mbarrier.test_wait.parity.shared.b64 %p2, [%sm], 1;", no),
            ("mbarrier.arrive.shared.b64 %s4, [%sm];", None),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s4;", no),
            // Without `.noinc` nothing changes in the end.
            ("cp.async.mbarrier.arrive.shared.b64 [%sm]; cp.async.wait_all;", None),
            ("mbarrier.test_wait.shared.b64 %p2, [%sm], %s4;", no),
            ("mbarrier.arrive.shared.b64 %s5, [%sm];", None),
            // That may take its time, though.
            ("again: mbarrier.test_wait.shared.b64 %p2, [%sm], %s5; @!%p2 bra again;", yes),
            ("mbarrier.test_wait.parity.shared.b64 %p2, [%sm], 1;", yes),
            ("mbarrier.inval.shared.b64 [%sm];", None),
        ],
    )
}

/// Bytes are expected before and after the last arrival.
fn bytes() -> Job {
    let (no, yes) = (Some(false), Some(true));
    let mut job = script(
        "mbarrier.expect_tx and .complete_tx",
        &[
            ("mbarrier.init.shared::cta.b64 [%sm], 2;", None),
            ("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%sm], 64;", None),
            ("mbarrier.arrive.release.cta.shared::cta.b64 %s1, [%sm], 2;", None),
            ("mbarrier.test_wait.acquire.cta.shared::cta.b64 %p2, [%sm], %s1;", no),
            ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%sm], 48;", None),
            ("mbarrier.test_wait.acquire.cta.shared::cta.b64 %p2, [%sm], %s1;", no),
            ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%sm], 16;", None),
            ("mbarrier.test_wait.acquire.cta.shared::cta.b64 %p2, [%sm], %s1;", yes),
            ("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 %s2, [%sm], 16;", None),
            ("mbarrier.arrive.shared::cta.b64 _, [%sm];", None),
            ("mbarrier.test_wait.shared::cta.b64 %p2, [%sm], %s2;", no),
            ("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%sm], 16;", None),
            ("mbarrier.try_wait.shared::cta.b64 %p2, [%sm], %s2;", yes),
            ("mbarrier.try_wait.parity.shared::cta.b64 %p2, [%sm], 1, 1000;", yes),
        ],
    );
    job.ptx = job.ptx.replace("sm_80", "sm_90");
    job
}

fn program(
    kernel: &'static str,
    (architecture, ptx): (&str, &str),
    shape: (u32, u32),
    arguments: Vec<Argument>,
    input: &[u32],
    expected: &[u32],
) -> Job {
    Job {
        name: format!("program barriers::{kernel} for {architecture}"),
        ptx: ptx.to_owned(),
        buffers: vec![bytes32(input), vec![0; 4 * expected.len()]],
        launches: vec![Launch { kernel, shape: (shape.0, shape.1, 0), arguments }],
        result: 1,
        kind: Kind::B32,
        expected: bytes32(expected),
        pictures: Vec::new(),
        precision: Precision::Exact,
        golden: Precision::Exact,
    }
}

fn numbers(count: usize) -> Vec<u32> {
    let mut random = Random::new(60);
    (0..count).map(|_| random.next() as u32).collect()
}

fn phases(architecture: &str, ptx: &str) -> Job {
    let rounds = 5;
    let sum = |thread: u32| {
        (0..rounds).map(|round| round * 1000 + (thread + 37 + round) % 128).sum::<u32>()
    };
    let expected: Vec<u32> = (0..256).map(|thread| sum(thread % 128)).collect();
    let arguments = vec![Buffer(1), U32(rounds)];
    program("phases", (architecture, ptx), (2, 128), arguments, &[0], &expected)
}

fn pipeline(architecture: &str, ptx: &str) -> Job {
    let input = numbers(5 * 256);
    let expected: Vec<u32> =
        input.chunks(256).flat_map(|tile| tile.iter().rev().map(|x| x.wrapping_mul(2))).collect();
    let arguments = vec![Buffer(0), Buffer(1), U32(5)];
    program("pipeline", (architecture, ptx), (1, 128), arguments, &input, &expected)
}

fn copy(architecture: &str, ptx: &str) -> Job {
    let input = numbers(3 * 256);
    let expected: Vec<u32> =
        input.chunks(256).flat_map(|tile| tile.iter().rev().map(|x| x.wrapping_add(1))).collect();
    let arguments = vec![Buffer(0), Buffer(1)];
    program("copy", (architecture, ptx), (3, 96), arguments, &input, &expected)
}

fn bulk(architecture: &str, ptx: &str) -> Job {
    let input = numbers(3 * 256);
    let expected: Vec<u32> = input
        .iter()
        .enumerate()
        .map(|(i, x)| x.wrapping_mul(3).wrapping_add(i as u32 % 256))
        .collect();
    let arguments = vec![Buffer(0), Buffer(1)];
    program("bulk", (architecture, ptx), (3, 128), arguments, &input, &expected)
}

/// A launch that says nothing of clusters has those of one block.
fn cluster(architecture: &str, ptx: &str) -> Job {
    let value = |thread: u32| (127 - thread) * 3 + 1 + thread;
    let expected: Vec<u32> = (0..256).map(|thread| value((thread ^ 1) % 128)).collect();
    program("cluster", (architecture, ptx), (2, 128), vec![Buffer(1)], &[0], &expected)
}
