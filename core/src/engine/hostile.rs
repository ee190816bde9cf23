//! Readers of bytes that anybody may have made. The fuzz targets in `fuzz/` call these, and so
//! does `tests/hostile.rs` with a kept corpus. No part of the library's interface.
//!
//! Each reader must come back whatever it is given: without a panic, and without more memory than
//! [`memory_bound`] says.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use gpucr_wire::{Reply, Stream};

use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::base::timeline::{self, Trace};
use crate::engine::access::Tally;
use crate::host::process::answers;
use crate::image::trust::Trust;
use crate::image::{Base, Destination, ImageReader, MANIFEST_VERSION, Manifest};
use crate::kernels;
use crate::store::index::{Index, PackId, frame_header};
use crate::store::{ChunkId, Encoding, Entry, decode_stored, stored_check};

/// Names of the targets.
pub const TARGETS: [&str; 10] =
    ["manifest", "index", "base", "chunk", "image", "tar", "reply", "criu", "timeline", "code"];

/// Gives `bytes` to the reader of this name. `scratch` is an empty directory in which files may be
/// made; they are removed again.
///
/// # Panics
/// If a reader has a fault, or there is none of this name.
pub fn feed(target: &str, bytes: &[u8], scratch: &Path) {
    match target {
        "manifest" => manifest(bytes),
        "index" => index(bytes, scratch),
        "base" => base(bytes),
        "chunk" => chunk(bytes),
        "image" => image(bytes, scratch),
        "tar" => tar(bytes, scratch),
        "reply" => reply(bytes),
        "criu" => crate::host::criu::read_anything(bytes),
        "timeline" => timeline(bytes),
        "code" => code(bytes),
        _ => panic!("there is no target {target}"),
    }
}

/// The most bytes that a target may have allocated at a time, for an input of `len` bytes.
pub fn memory_bound(target: &str, len: usize) -> usize {
    // For each thread: a chunk's plain bytes, its planes before they are joined, its stored bytes.
    let decoding = rayon::current_num_threads() * (6 << 20);
    match target {
        // A list that claims to be long is given up to 1 MiB beforehand; few can be open at once.
        "manifest" => (8 << 20) + 64 * len,
        // Read in one piece, and in batches of 1 MiB.
        "index" => (3 << 20) + 8 * len,
        "base" => (64 << 10) + 4 * len,
        // The bytes of one thread; the stored bytes are the input.
        "chunk" => (5 << 20) + len,
        // What manifest and index need, and one more decoder where there are damaged chunks.
        "image" => (17 << 20) + decoding + 80 * len,
        // A buffer of 16 MiB, and what manifest and index need.
        "tar" => (24 << 20) + decoding + 68 * len,
        // A list of nothing but empty texts and lists grows most; and all is added up a second time.
        "reply" => (1 << 20) + 64 * len,
        // Two kinds of text, and some lines of one.
        "criu" => (64 << 10) + 16 * len,
        // Slices and points, and the page with them.
        "timeline" => (1 << 20) + 256 * len,
        // PTX that is packed in a module, and what is known at each of its instructions.
        "code" => (16 << 20) + 4096 * len,
        _ => 0,
    }
}

/// Writes the manifest of the image at `image` anew, as somebody does who can write the image and wants
/// something of the user who opens it.
///
/// # Panics
/// If there is no image that can be read.
pub fn forge(image: &Path, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = Manifest::read(image).expect("an image");
    change(&mut manifest);
    let (version, body) = manifest.body().expect("it can be encoded");
    let header = frame_header(b"gpucrIMG", version, &body);
    let file = [&header[..], &body].concat();
    fs::write(image.join("manifest"), file).expect("it can be written");
}

/// The body of a manifest file, of any version.
fn manifest(body: &[u8]) {
    (1..=MANIFEST_VERSION).for_each(|version| manifest_of(version, body));
}

fn manifest_of(version: u32, body: &[u8]) {
    let Ok(manifest) = Manifest::decode(version, body) else { return };
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

/// The body of an index file: decoded in one piece, and read as a file.
fn index(body: &[u8], scratch: &Path) {
    let path = scratch.join("index");
    fs::write(&path, framed(b"gpucrIDX", body)).expect("the scratch directory takes a file");
    let read = Index::read(&path);
    fs::remove_file(&path).expect("it can be removed");
    let Ok(mut index) = Index::decode(body) else {
        return assert!(read.is_err(), "a file is read that cannot be decoded");
    };
    let read = read.expect("what can be decoded can be read");
    assert!(read.packs == index.packs && read.entries == index.entries);
    let file = index.encode_file().expect("what was decoded can be written");
    assert!(file.ends_with(body), "an index has one form only");
}

/// The body of a base file.
fn base(body: &[u8]) {
    let Ok(base) = Base::decode(body) else { return };
    assert!(base.encode() == body, "a base has one form only");
}

/// A body behind a header that fits it.
fn framed(magic: &[u8; 8], body: &[u8]) -> Vec<u8> {
    [&frame_header(magic, 1, body)[..], body].concat()
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
        // As an attacker would who wants to get past the check.
        check: stored_check(stored),
    };
    let mut plain = Vec::new();
    // Nobody finds bytes for this address.
    assert!(decode_stored(&entry, stored, &mut plain).is_err());
}

/// The files of an image: flags (one byte), the lengths of manifest, index and base (four bytes
/// each), these three, and packs, each from its magic bytes to the next one's. Where a flag is set
/// (1 manifest, 2 index, 4 base) a file is given a header that fits it. A base that says so puts the
/// image into a store.
///
/// `verify` must not take for whole what a restore would refuse, nor the other way round.
fn image(bytes: &[u8], scratch: &Path) {
    let Some((head, mut rest)) = bytes.split_first_chunk::<13>() else { return };
    let mut file = |number: usize, magic: &[u8; 8]| {
        let len = u32::from_le_bytes(std::array::from_fn(|i| head[1 + 4 * number + i]));
        let (file, behind) = rest.split_at((len as usize).min(rest.len()));
        rest = behind;
        if head[0] >> number & 1 == 1 { framed(magic, file) } else { file.to_vec() }
    };
    let (manifest, index) = (file(0, b"gpucrIMG"), file(1, b"gpucrIDX"));
    let base = file(2, b"gpucrBAS");
    let begins = |at: &usize| *at == 0 || rest[*at..].starts_with(b"gpucrPAK");
    let mut begin: Vec<usize> = (0..rest.len()).filter(begins).collect();
    begin.push(rest.len());
    let packs: Vec<&[u8]> = begin.windows(2).map(|at| &rest[at[0]..at[1]]).collect();

    let store = scratch.join("store");
    let image = store.join("images/image");
    let put = |path: &Path, bytes: &[u8]| {
        fs::write(path, bytes).expect("the scratch directory takes a file");
    };
    for dir in [store.join("index"), store.join("packs"), image.join("packs")] {
        fs::create_dir_all(dir).expect("the scratch directory takes directories");
    }
    for lock in ["lock", "gc.lock", "queue.lock"] {
        put(&store.join(lock), b"");
    }
    put(&image.join("manifest"), &manifest);
    if !base.is_empty() {
        put(&image.join("base"), &base);
    }
    for (index_path, dir) in [
        (image.join("index"), &image),
        (store.join("index/000000000000000000000000.index"), &store),
    ] {
        put(&index_path, &index);
        for pack in &packs {
            let id = pack.get(16..32).map_or([0; 16], |id| std::array::from_fn(|i| id[i]));
            put(&dir.join("packs").join(PackId(id).file_name()), pack);
        }
    }

    let readable = ImageReader::open(&image).is_ok_and(|reader| reader.verify().is_empty());
    let report = crate::image::verify::verify(&image, &Quiet);
    assert_eq!(report.is_ok_and(|report| report.whole), readable, "verify and restore disagree");
    fs::remove_dir_all(&store).expect("it can be removed");
}

/// What an agent answers, as gpucr takes it in.
fn reply(bytes: &[u8]) {
    let Ok(reply) = Reply::from_bytes(bytes) else { return };
    assert!(reply.to_bytes() == bytes, "an answer has one form only");
    let Some(accesses) = answers::believed(reply) else { return };
    let mut tally = Tally::default();
    tally.add(accesses.clone());
    tally.add(accesses);
}

/// What `gpucr report` reads.
fn timeline(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    if let Ok(trace) = Trace::read(text) {
        timeline::page(&trace, "title");
    }
}

/// A module that a program has loaded: device code, text, or both.
fn code(bytes: &[u8]) {
    let (texts, _) = gpucr_fatbin::texts(bytes, 1 << 20);
    let _ = gpucr_fatbin::what_runs(bytes, 90, 1 << 20);
    let kernels = texts.iter().filter_map(|text| kernels::from_ptx(text).ok());
    let machine = kernels::from_cubin(bytes).unwrap_or_default();
    for kernel in kernels.flatten().chain(machine) {
        let _ = (kernels::from_name(&kernel.name), kernels::readable(&kernel.name));
    }
}

/// The file that `gpucr import` reads.
fn tar(mut bytes: &[u8], scratch: &Path) {
    let image = scratch.join("image");
    let stop = Stop::new(Arc::default());
    let (to, trust) = (Destination::Alone(image.clone()), Trust::default());
    match crate::image::transfer::import(&mut bytes, &to, &trust, &stop, &Quiet) {
        Ok(imported) => {
            let report = crate::image::verify::verify(&image, &Quiet).expect("there is an image");
            assert!(
                report.whole
                    && report.id.map(|id| crate::base::format::hex(&id)) == Some(imported.id)
            );
            fs::remove_dir_all(&image).expect("it can be removed");
        }
        Err(_) => assert!(!image.exists(), "something is left behind"),
    }
    let left = scratch.read_dir().expect("the scratch directory is there").count();
    assert_eq!(left, 0, "something is left behind");
}
