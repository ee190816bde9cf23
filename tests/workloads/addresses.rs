//! Memory of each kind that stays as it is, with its address, its size and a hash of it: what is read from an image of
//! this program can be compared with what it had.

use std::ptr;

use anyhow::{Result, ensure};

use crate::gpu::{Buffer, Gpu, bytes_of};
use crate::numbers::mix;
use crate::report::Run;

const PAGE: usize = 4096;
/// Two chunks and a part of one.
const DEVICE: usize = (5 << 20) + PAGE;
/// More than one chunk of host memory, and pages that are never touched.
const PRIVATE: usize = 700 * PAGE;
const SHARED: usize = 48 * PAGE;
/// Pages that are addresses alone.
const KEPT: usize = 16 * PAGE;

fn words(seed: u32, bytes: usize) -> Vec<u32> {
    (0..(bytes / 4) as u32).map(|word| mix(seed ^ word)).collect()
}

/// New memory, of which some pages are written.
fn map(bytes: usize, access: i32, flags: i32) -> Result<*mut u8> {
    // SAFETY: a new mapping, in nobody's place.
    let at =
        unsafe { libc::mmap(ptr::null_mut(), bytes, access, flags | libc::MAP_ANONYMOUS, -1, 0) };
    ensure!(at != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    Ok(at.cast())
}

/// Writes all pages of new memory but those whose number is a multiple of `hole`, and gives all its bytes.
fn fill(at: *mut u8, bytes: usize, seed: u32, hole: usize) -> &'static [u8] {
    // SAFETY: the mapping is as long, stays as long as the program runs, and nobody else knows it.
    let memory = unsafe { std::slice::from_raw_parts_mut(at, bytes) };
    let words = words(seed, bytes);
    for (number, page) in memory.chunks_mut(PAGE).enumerate().filter(|(page, _)| page % hole != 0) {
        page.copy_from_slice(&bytes_of(&words)[number * PAGE..][..PAGE]);
    }
    memory
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(20, 200, 200);
    let gpu = Gpu::open()?;
    let of_device = words(run.seed, DEVICE);
    let buffer = Buffer::holding(&of_device)?;
    gpu.synchronize()?;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let own = map(PRIVATE, access, libc::MAP_PRIVATE)?;
    let own = fill(own, PRIVATE, run.seed ^ 1 << 30, 7);
    let shared = map(SHARED, access, libc::MAP_SHARED)?;
    let shared = fill(shared, SHARED, run.seed ^ 2 << 30, 3);
    let kept = map(KEPT, libc::PROT_NONE, libc::MAP_PRIVATE)?;
    let place = |bytes: &[u8]| bytes.as_ptr() as u64;
    let all: [(&str, u64, &[u8]); 3] = [
        ("device", buffer.address(), bytes_of(&of_device)),
        ("private", place(own), own),
        ("shared", place(shared), shared),
    ];
    for (name, address, bytes) in all {
        let hash = blake3::hash(bytes).to_hex();
        run.line(format!("memory {name} {address:#x} {} {hash}", bytes.len()))?;
    }
    run.line(format!("memory kept {:#x} {KEPT} -", kept as u64))?;
    let code = words as fn(u32, usize) -> Vec<u32> as usize & !(PAGE - 1);
    run.line(format!("memory code {code:#x} {PAGE} -"))?;
    run.ready()?;
    for step in 0..steps {
        let word: u32 = buffer.read_one(mix(step) as usize % (DEVICE / 4))?;
        run.step(step, format_args!("has {word:08x}"))?;
    }
    run.absorb(&of_device);
    run.finish()
}
