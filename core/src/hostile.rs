//! What reads bytes that anybody may have made. The fuzz targets in `fuzz/` call these, and so
//! does `tests/hostile.rs` with a kept corpus. No part of the library's interface.
//!
//! Each must come back whatever it is given: without a panic, and without more memory than
//! [`memory_bound`] says.

use std::path::Path;
use std::sync::Arc;

use crate::image::{Destination, Manifest};
use crate::phase::Quiet;
use crate::stop::Stop;
use crate::store::index::Index;
use crate::store::{ChunkId, Encoding, Entry, decode_stored, stored_check};

/// Names of the targets.
pub const TARGETS: [&str; 4] = ["manifest", "index", "chunk", "tar"];

/// Gives `bytes` to the reader of this name. `scratch` is a directory in which an image may be made
/// and is removed again.
///
/// # Panics
/// If a reader has a fault, or there is none of this name.
pub fn feed(target: &str, bytes: &[u8], scratch: &Path) {
    match target {
        "manifest" => manifest(bytes),
        "index" => index(bytes),
        "chunk" => chunk(bytes),
        "tar" => tar(bytes, scratch),
        _ => panic!("there is no target {target}"),
    }
}

/// The most bytes that a target may have allocated at a time, for an input of `len` bytes.
pub fn memory_bound(target: &str, len: usize) -> usize {
    match target {
        // A list that claims to be long is given up to 1 MiB beforehand; few can be open at once.
        "manifest" => (8 << 20) + 64 * len,
        "index" => (1 << 20) + 4 * len,
        "chunk" => (3 << 20) + len,
        // A buffer of 16 MiB, one of 2 MiB for each thread, and what the two above need.
        "tar" => (40 << 20) + 68 * len,
        _ => 0,
    }
}

/// The body of a manifest file.
fn manifest(body: &[u8]) {
    let Ok(manifest) = Manifest::decode(body) else { return };
    // What is accepted must be safe to work with.
    for part in manifest.parts() {
        let mut end = 0;
        for piece in part.pieces() {
            assert_eq!(piece.offset, end);
            end += piece.len as u64;
        }
        assert_eq!(end, part.size());
        let _ = part.to_string();
    }
    let _ = manifest.written_identity();
}

/// The body of an index file.
fn index(body: &[u8]) {
    let Ok(mut index) = Index::decode(body) else { return };
    let file = index.encode_file().expect("what was decoded can be written");
    assert!(file.ends_with(body), "an index has one form only");
}

/// A chunk: its encoding (two bytes), its plain length (four), its stored bytes.
fn chunk(bytes: &[u8]) {
    let Some((head, stored)) = bytes.split_first_chunk::<6>() else { return };
    let Some(encoding) = Encoding::from_bytes([head[0], head[1]]) else { return };
    let plain_len = u32::from_le_bytes([head[2], head[3], head[4], head[5]]);
    let entry = Entry {
        id: ChunkId([0; 32]),
        encoding,
        pack: 0,
        offset: 0,
        stored_len: stored.len() as u32,
        plain_len,
        // As somebody would who wants to get past it.
        check: stored_check(stored),
    };
    let mut plain = Vec::new();
    // Nobody finds bytes for this address.
    assert!(decode_stored(&entry, stored, &mut plain).is_err());
}

/// The file that `gpucr import` reads.
fn tar(mut bytes: &[u8], scratch: &Path) {
    let image = scratch.join("image");
    let stop = Stop::new(Arc::default());
    match crate::transfer::import(&mut bytes, &Destination::Alone(image.clone()), &stop, &Quiet) {
        Ok(imported) => {
            let report = crate::verify::verify(&image, &Quiet).expect("there is an image");
            assert!(report.whole && report.id.map(|id| crate::hex(&id)) == Some(imported.id));
            std::fs::remove_dir_all(&image).expect("it can be removed");
        }
        Err(_) => assert!(!image.exists(), "something is left behind"),
    }
    let left = scratch.read_dir().expect("the scratch directory is there").count();
    assert_eq!(left, 0, "something is left behind");
}
