//! A short run of what the fuzz targets do, over the kept corpus in `fuzz/corpus`: every input as it
//! is, cut and changed in many ways, given to the readers, and to the driver through its C
//! interface, where a panic would show as the error `UNKNOWN`.

mod support;

use std::path::PathBuf;

use softcuda::hostile::{TARGETS, feed};
use support::*;

/// What a call returns when the driver has a defect.
const UNKNOWN: u32 = 999;

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

/// Changes some bytes: to anything, to what is often special, moved, repeated, or left out.
fn change(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let at = random.below(bytes.len());
        let len = (1 + random.below(16)).min(bytes.len() - at);
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.below(256) as u8,
            2 => bytes[at] = b"0123456789%.,;[]{}()-+@!|:\n"[random.below(27)],
            3 => drop(bytes.drain(at..at + len)),
            4 => {
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

/// The kept inputs of a target, by name.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target);
    let mut inputs: Vec<_> = folder
        .read_dir()
        .expect("a corpus")
        .map(|entry| {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "{target} has a corpus");
    inputs
}

/// Each input of a target, then parts and changes of it.
fn each(target: &str, mut act: impl FnMut(&[u8], &str)) {
    let mut random = Random(1);
    for (name, bytes) in corpus(target) {
        act(&bytes, &name);
        for cut in 1..8 {
            let len = bytes.len() * cut / 8;
            act(&bytes[..len], &format!("{name} cut to {len} bytes"));
        }
        let changes = if name.starts_with("found-") { 50 } else { 1000 };
        for seed in 0..changes {
            let mut changed = bytes.clone();
            change(&mut changed, &mut random);
            act(&changed, &format!("change {seed} of {name}"));
        }
    }
}

#[test]
fn corpus_parts_and_changes_are_survived() {
    for target in TARGETS {
        each(target, |bytes, what| {
            if std::panic::catch_unwind(|| feed(target, bytes)).is_err() {
                let kept = std::env::temp_dir().join(format!("hostile-{target}"));
                let _ = std::fs::write(&kept, bytes);
                panic!("{target} panics on {what}; the input is in {}", kept.display());
            }
        });
    }
}

#[test]
fn no_panic_reaches_a_program_that_loads_them() {
    context();
    let mut loaded = 0;
    for target in TARGETS {
        each(target, |bytes, what| {
            let mut image = bytes.to_vec();
            // A container says how long it is; the driver believes a program that it is there.
            let header = image.get(..16).filter(|bytes| bytes.starts_with(&MAGIC));
            if let Some(header) = header {
                let own = u16::from_le_bytes([header[6], header[7]]);
                let rest = u64::from_le_bytes(header[8..16].try_into().unwrap());
                let size = u64::from(own).saturating_add(rest);
                if size > 1 << 20 {
                    return;
                }
                image.resize(image.len().max(size as usize), 0);
            }
            image.extend([0; 16]);
            let mut module = 0;
            // SAFETY: text that ends in NUL, or a container that is as long as it says.
            let code = unsafe { cuModuleLoadData(&mut module, image.as_ptr()) };
            assert_ne!(code, UNKNOWN, "{target}: {what}");
            if code == 0 {
                loaded += 1;
                ok(cuModuleUnload(module));
            }
        });
    }
    assert!(loaded > 20, "{loaded} of them are modules");
}

/// The first bytes of a container.
const MAGIC: [u8; 4] = 0xba55_ed50_u32.to_le_bytes();
