//! What this machine can do at best, whatever a dump or a restore does: the rates that stand
//! behind theirs.

use std::hint::black_box;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use gpucr_core::store::{ChunkId, MAX_CHUNK};
use rayon::prelude::*;

use crate::print_table;

/// The rate of `work` on so many bytes, in bytes per second: the best of five runs, since a limit
/// is wanted and other programs only take away.
fn best(bytes: usize, mut work: impl FnMut()) -> f64 {
    let rate = |_| {
        let start = Instant::now();
        work();
        bytes as f64 / start.elapsed().as_secs_f64()
    };
    (0..5).map(rate).fold(0.0, f64::max)
}

/// Measures hashing, compressing and copying (to memory that is there, and to memory that the kernel
/// must first make, as for a file on tmpfs or the software driver's device memory) of `plain`, with `scratch` of the same length to copy
/// to, and prints the rates.
pub fn print(plain: &[u8], scratch: &mut [u8]) {
    let part = plain.len().min(80 << 20);
    let hash = best(part, || {
        for chunk in plain[..part].chunks(MAX_CHUNK) {
            black_box(ChunkId::of(chunk));
        }
    });
    let mut compressor = zstd::bulk::Compressor::new(1).ok();
    let mut out = vec![0; zstd::zstd_safe::compress_bound(MAX_CHUNK)];
    let zstd = best(part, || {
        for chunk in plain[..part].chunks(MAX_CHUNK) {
            let length = compressor.as_mut().map(|c| c.compress_to_buffer(chunk, &mut out));
            black_box(length).and_then(Result::ok).expect("zstd compresses");
        }
    });
    let one = best(part, || scratch[..part].copy_from_slice(black_box(&plain[..part])));
    let all = best(plain.len(), || {
        let pairs = scratch.par_chunks_mut(MAX_CHUNK).zip(plain.par_chunks(MAX_CHUNK));
        pairs.for_each(|(to, from)| to.copy_from_slice(from));
    });
    let file_in_memory = || {
        let file = rustix::fs::memfd_create("bench", rustix::fs::MemfdFlags::CLOEXEC);
        std::fs::File::from(file.expect("a file in memory"))
    };
    let fresh_one = best(part, || {
        file_in_memory().write_all_at(&plain[..part], 0).expect("memory for the file");
    });
    let fresh_all = best(plain.len(), || {
        let file = file_in_memory();
        plain.par_chunks(MAX_CHUNK).enumerate().for_each(|(i, chunk)| {
            file.write_all_at(chunk, (i * MAX_CHUNK) as u64).expect("memory for the file");
        });
    });
    let rows: Vec<_> = [
        ("BLAKE3, one core", hash),
        ("zstd level 1, one core", zstd),
        ("memory copy, one core", one),
        ("memory copy, all cores", all),
        ("copy to new pages of a file in memory, one core", fresh_one),
        ("copy to new pages of a file in memory, all cores", fresh_all),
    ]
    .into_iter()
    .map(|(name, rate)| vec![name.to_owned(), format!("{:.2} GB/s", rate / 1e9)])
    .collect();
    print_table(&["what the machine can do", "rate"], &rows);
}
