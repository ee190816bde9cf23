//! A short run of what the fuzz targets do, over the kept corpus in `fuzz/corpus`: every input as
//! it is, cut at every length, and changed in many ways. No panic, and bounded memory.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use gpucr_core::hostile::{TARGETS, feed, memory_bound};

/// Counts what is allocated at a time, on all threads.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

impl Counting {
    fn add(size: usize) {
        PEAK.fetch_max(NOW.fetch_add(size, Relaxed) + size, Relaxed);
    }
}

// SAFETY: everything is passed on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Numbers that look random and are the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit.max(1) as u64) as usize
    }
}

/// Feeds one input and checks the memory. Returns how much of the bound was used, in per cent.
fn try_one(target: &str, bytes: &[u8], scratch: &Path, what: &str) -> usize {
    let before = NOW.load(Relaxed);
    PEAK.store(before, Relaxed);
    let fed = std::panic::catch_unwind(|| feed(target, bytes, scratch));
    let peak = PEAK.load(Relaxed).saturating_sub(before);
    if fed.is_err() {
        let kept = std::env::temp_dir().join(format!("hostile-{target}"));
        let _ = std::fs::write(&kept, bytes);
        panic!("{target} panics on {what}; the input is in {}", kept.display());
    }
    let bound = memory_bound(target, bytes.len());
    assert!(peak <= bound, "{target} takes {peak} bytes, more than {bound}, for {what}");
    peak * 100 / bound
}

/// Changes some bytes: to anything, to what is often special, moved, repeated, or left out.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.below(bytes.len());
        let len = (1 + random.below(16)).min(bytes.len() - at);
        match random.below(7) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes[at..at + len].fill(0xff),
            3 => bytes[at..at + len].fill(0),
            4 => drop(bytes.drain(at..at + len)),
            5 => {
                let piece = bytes[at..at + len].to_vec();
                let to = random.below(bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let to = random.below(bytes.len() - len + 1);
                bytes.copy_within(at..at + len, to);
            }
        }
    }
}

/// Puts the sums of a tar's headers right, so that changes get past them.
fn mend_sums(tar: &mut [u8]) {
    for block in tar.chunks_exact_mut(512) {
        if block[257..262] == *b"ustar" {
            block[148..156].fill(b' ');
            let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
            block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
}

// One test for all: the memory of the whole process is counted.
#[test]
fn corpus_truncations_and_changes_are_survived() {
    let corpus = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus");
    // The files are in memory where that is possible: an import syncs.
    let shm = Path::new("/dev/shm");
    let scratch = if shm.is_dir() { tempfile::tempdir_in(shm) } else { tempfile::tempdir() };
    let scratch = scratch.unwrap();
    for target in TARGETS {
        let mut files: Vec<PathBuf> =
            corpus.join(target).read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        assert!(!files.is_empty(), "{target} has no corpus: run `cargo xtask fixtures`");
        let (mut inputs, mut most) = (0, 0);
        let mut random = Random(1);
        for file in &files {
            let bytes = std::fs::read(file).unwrap();
            let name = file.file_name().unwrap().to_string_lossy();
            let mut run = |bytes: &[u8], what: String| {
                inputs += 1;
                most = most.max(try_one(target, bytes, scratch.path(), &what));
            };
            // Twice, so that what is made once and kept is there already.
            run(&bytes, name.to_string());
            run(&bytes, name.to_string());
            // These two targets make files; and what a fuzzer has found is close to what it was made from.
            let slow = matches!(target, "tar" | "image");
            let found = name.starts_with("found-");
            let step = if slow || found { 61 } else { 1 + bytes.len() / 4000 };
            for len in (0..bytes.len()).step_by(step) {
                run(&bytes[..len], format!("{name} cut to {len} bytes"));
            }
            let changes = if slow { 500 } else { 5000 };
            for seed in 0..if found { changes / 50 } else { changes } {
                let mut changed = bytes.clone();
                change(&mut changed, &mut random);
                if target == "tar" && seed % 2 == 0 {
                    mend_sums(&mut changed);
                }
                run(&changed, format!("change {seed} of {name}"));
            }
        }
        println!("{target}: {inputs} inputs, at most {most} % of the memory that is allowed");
    }
}
