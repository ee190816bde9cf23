use std::path::Path;

use super::*;
use crate::image::tests::{block, manifest};
use crate::image::{CudaProcess, ImageWriter, Process};
use crate::store::tests::noise;
use crate::store::{Compression, MAX_CHUNK};

/// An image with these blocks (id, address, contents) of process 42, and these files.
fn image(
    path: &Path,
    blocks: &[(u64, u64, Vec<u8>)],
    files: &[(&str, &[u8])],
    pids: &[u32],
) -> ImageReader {
    let writer = ImageWriter::create(path, Compression::Level(1)).unwrap();
    let mut manifest = manifest();
    let mut made = Vec::new();
    for (id, address, bytes) in blocks {
        let chunks = bytes.chunks(MAX_CHUNK).map(|c| writer.chunks().put(c).unwrap()).collect();
        let mut one = block(chunks, bytes.len() as u64).blocks.remove(0);
        (one.id, one.address) = (*id, *address);
        made.push(one);
    }
    manifest.processes[0].cuda = Some(CudaProcess { blocks: made, ..block(vec![], 0) });
    for pid in pids {
        let more = Process { pid: *pid, ppid: 42, cuda: None, ..manifest.processes[0].clone() };
        manifest.processes.push(more);
    }
    manifest.criu.files =
        files.iter().map(|(name, bytes)| writer.add_bytes(name, 0o600, bytes).unwrap()).collect();
    writer.commit(&manifest).unwrap();
    ImageReader::open(path).unwrap()
}

fn of<'a>(diff: &'a Diff, name: &str) -> &'a PartDiff {
    let found = diff.parts.iter().find(|part| part.name.to_string() == name);
    found.unwrap_or_else(|| panic!("no {name} in {:#?}", diff.parts))
}

#[test]
fn an_image_and_itself() {
    let dir = tempfile::tempdir().unwrap();
    let a = image(&dir.path().join("a"), &[(1, 16, noise(1, 5000))], &[("f", b"x")], &[43]);
    let diff = diff(&a, &a);
    assert_eq!(diff.a, diff.b);
    assert!(diff.parts.iter().all(|part| part.change == Change::Same && part.share == 0.0));
    assert!(diff.processes.iter().all(|process| process.change == Change::Same));
    assert_eq!(diff.cost, Cost { of_chunks: 2, ..Cost::default() });
    assert_eq!((diff.memory.bytes, diff.memory.changed_bytes), (5000, 0));
}

#[test]
fn what_changed_is_measured_and_sorted() {
    let dir = tempfile::tempdir().unwrap();
    let big = noise(1, 3 * MAX_CHUNK + 100);
    let mut touched = big.clone();
    touched[MAX_CHUNK + 7] ^= 1;
    touched[3 * MAX_CHUNK] ^= 1;
    let small = noise(2, 1000);
    let a = image(
        &dir.path().join("a"),
        &[(1, 0x1000, big), (2, 0x2000, small.clone()), (3, 0x3000, noise(3, 70))],
        &[("pages-1.img", b"pages"), ("same.img", b"same"), ("old.img", b"old")],
        &[43, 44],
    );
    let b = image(
        &dir.path().join("b"),
        // Block 2 has another number at its old address; 3 is gone; 9 is new.
        &[(1, 0x1000, touched), (5, 0x2000, small), (9, 0x9000, noise(4, 300))],
        &[("pages-1.img", b"other"), ("same.img", b"same"), ("new.img", b"new!")],
        &[44, 45],
    );
    let diff = diff(&a, &b);
    let changed = (MAX_CHUNK + 100) as u64;
    let block = of(&diff, "process 42, block 1 at 0x1000");
    assert_eq!((block.change, block.changed_bytes), (Change::Changed, changed));
    assert!((block.share - changed as f64 / (3 * MAX_CHUNK + 100) as f64).abs() < 1e-12);
    assert_eq!(of(&diff, "process 42, block 5 at 0x2000").change, Change::Same);
    let gone = of(&diff, "process 42, block 3 at 0x3000");
    assert_eq!((gone.change, gone.changed_bytes, gone.size), (Change::Gone, 70, None));
    let new = of(&diff, "process 42, block 9 at 0x9000");
    assert_eq!((new.change, new.changed_bytes, new.size_before), (Change::New, 300, None));
    assert_eq!(of(&diff, "CRIU's file pages-1.img").changed_bytes, 5);
    assert_eq!(of(&diff, "CRIU's file same.img").change, Change::Same);
    assert_eq!(of(&diff, "CRIU's file old.img").change, Change::Gone);
    assert_eq!(of(&diff, "CRIU's file new.img").change, Change::New);
    assert!(diff.parts.is_sorted_by(|x, y| x.changed_bytes >= y.changed_bytes));
    assert_eq!(diff.memory.changed_bytes, changed + 300);
    assert_eq!((diff.host.bytes_before, diff.host.bytes, diff.host.changed_bytes), (12, 13, 9));
    // Two of block 1, one of block 9, two files; none compresses.
    assert_eq!((diff.cost.chunks, diff.cost.bytes), (5, changed + 300 + 9));
    assert_eq!(diff.cost.stored_bytes, diff.cost.bytes);
    let change = |pid| diff.processes.iter().find(|p| p.pid == pid).unwrap().change;
    let changes = [42, 43, 44, 45].map(change);
    assert_eq!(changes, [Change::Same, Change::Gone, Change::Same, Change::New]);
}

#[test]
fn blocks_that_grow_and_shrink() {
    let dir = tempfile::tempdir().unwrap();
    let long = noise(1, 2 * MAX_CHUNK);
    let a = image(&dir.path().join("a"), &[(1, 16, long[..MAX_CHUNK].to_vec())], &[], &[]);
    let b = image(&dir.path().join("b"), &[(1, 16, long)], &[], &[]);
    let grown = &diff(&a, &b).parts[0];
    assert_eq!((grown.change, grown.changed_bytes), (Change::Changed, MAX_CHUNK as u64));
    let shrunk = &diff(&b, &a).parts[0];
    assert_eq!((shrunk.change, shrunk.changed_bytes), (Change::Changed, 0));
}
