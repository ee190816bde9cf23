use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::base::progress::Quiet;
use crate::image::tests::{make, manifest, tree};
use crate::image::{Destination, ImageReader, ImageWriter};
use crate::store::tests::{noise, text};
use crate::store::{Compression, Entry, MAX_CHUNK};

fn image(memory: &[u8], big: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, memory, big);
    (dir, path)
}

fn pack_of(reader: &ImageReader, entry: &Entry) -> PathBuf {
    reader.chunks().pack_path(entry)
}

fn flip(file: &Path, at: u64) {
    let handle = File::options().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    handle.read_exact_at(&mut byte, at).unwrap();
    handle.write_all_at(&[byte[0] ^ 4], at).unwrap();
}

#[test]
fn a_whole_image() {
    let (_dir, path) = image(&noise(1, MAX_CHUNK + 5), b"pages");
    let report = verify(&path, &Quiet).unwrap();
    assert!(report.whole && report.damage.is_empty());
    assert_eq!(report.id, Some(ImageReader::open(&path).unwrap().id()));
    // Two of memory, "registers", "pages", "shim".
    assert_eq!(report.chunks, 5);
    assert_eq!(report.bytes, (MAX_CHUNK + 5 + 9 + 5 + 4) as u64);
    let files = tree(&path).into_iter().filter(|path| path.is_file());
    assert_eq!(report.stored_bytes, files.map(|file| file.metadata().unwrap().len()).sum::<u64>());
}

#[test]
fn damaged_chunks_name_all_owners() {
    // The last chunk of the memory is CRIU's pages too.
    let memory = [&noise(1, MAX_CHUNK)[..], b"pages"].concat();
    let (_dir, path) = image(&memory, b"pages");
    let reader = ImageReader::open(&path).unwrap();
    let chunks = &reader.manifest().processes[0].cuda.as_ref().unwrap().blocks[0].chunks.clone();
    for id in chunks {
        let entry = reader.chunks().entry(id).unwrap();
        flip(&pack_of(&reader, entry), entry.offset + 1);
    }
    let report = verify(&path, &Quiet).unwrap();
    assert!(!report.whole && report.id == Some(reader.id()));
    assert_eq!(report.damage.len(), 2);
    let of = |id: &ChunkId| report.damage.iter().find(|d| d.chunk == Some(*id)).unwrap();
    let block = |offset: u64, bytes| Owner::Block {
        pid: 42,
        block: 1,
        device: crate::base::format::device_uuid(&[1; 16]),
        address: Some(0x7000_0000 + offset),
        offset,
        bytes,
    };
    let size = MAX_CHUNK as u64;
    let pages = Owner::Criu { name: "pages-1.img".into(), offset: 0, bytes: 5 };
    assert_eq!(of(&chunks[0]).owners, [block(0, size)]);
    assert_eq!(of(&chunks[1]).owners, [block(size, 5), pages]);
    let entry = reader.chunks().entry(&chunks[1]).unwrap();
    assert_eq!(of(&chunks[1]).file, Some(pack_of(&reader, entry)));
    assert_eq!(of(&chunks[1]).offset, Some(entry.offset));
    assert_eq!(
        of(&chunks[1]).owners[0].to_string(),
        "process 42, block 1, 0x70200000-0x70200005 on device GPU-01010101-0101-0101-0101-010101010101"
    );
}

#[test]
fn all_damage_is_reported_at_once() {
    let (_dir, path) = image(&noise(1, 3 * MAX_CHUNK), &noise(2, 100));
    let reader = ImageReader::open(&path).unwrap();
    let chunks = &reader.manifest().processes[0].cuda.as_ref().unwrap().blocks[0].chunks.clone();
    let entry = reader.chunks().entry(&chunks[1]).unwrap();
    flip(&pack_of(&reader, entry), entry.offset);
    // A byte of the host's name; one of the first record's reserved bytes.
    flip(&path.join("manifest"), 56 + 13);
    let index = fs::read(path.join("index")).unwrap();
    let packs = index[56] as u64;
    flip(&path.join("index"), 56 + 8 + 24 * packs + 34);
    let report = verify(&path, &Quiet).unwrap();
    let named = |what: &str| report.damage.iter().any(|d| d.file == Some(path.join(what)));
    assert!(named("manifest") && named("index") && report.id.is_none(), "{report:?}");
    let first = reader.chunks().entries()[0].id;
    let lost: HashSet<_> = report.damage.iter().filter_map(|d| d.chunk).collect();
    assert_eq!(lost, HashSet::from([first, chunks[1]]));
    assert!(report.damage.iter().filter(|d| d.chunk.is_some()).all(|d| !d.owners.is_empty()));
}

#[test]
fn missing_and_cut_packs() {
    let (_dir, path) = image(&noise(1, 4 * MAX_CHUNK), &noise(2, 100));
    let reader = ImageReader::open(&path).unwrap();
    let in_pack = |pack: &Path| -> HashSet<ChunkId> {
        let entries = reader.chunks().entries().iter();
        entries.filter(|e| e.stored_len > 0 && pack_of(&reader, e) == pack).map(|e| e.id).collect()
    };
    for file in tree(&path.join("packs")) {
        let bytes = fs::read(&file).unwrap();
        // With the last byte of the trailer, and with that of the last chunk before it.
        let (trailer, chunk) = (bytes.len() - 1, bytes.len() - 33);
        for cut in [None, Some(1), Some(chunk), Some(trailer)] {
            match cut {
                None => fs::remove_file(&file).unwrap(),
                Some(len) => fs::write(&file, &bytes[..len]).unwrap(),
            }
            let report = verify(&path, &Quiet).unwrap();
            let lost: HashSet<_> = report.damage.iter().filter_map(|d| d.chunk).collect();
            let all = in_pack(&file);
            assert!(
                report.damage.iter().any(|d| d.chunk.is_none() && d.file == Some(file.clone()))
            );
            if [Some(chunk), Some(trailer)].contains(&cut) {
                assert_eq!(lost.len(), usize::from(cut == Some(chunk)));
                assert!(lost.is_subset(&all));
            } else {
                assert_eq!(lost, all, "{cut:?} of {file:?}: {report:?}");
            }
            fs::write(&file, &bytes).unwrap();
        }
    }
    assert!(verify(&path, &Quiet).unwrap().whole);
}

#[test]
fn without_an_index_every_chunk_is_lost_and_named() {
    let (_dir, path) = image(&noise(1, 2 * MAX_CHUNK), &noise(2, 100));
    let bytes = fs::read(path.join("index")).unwrap();
    for len in [0, 10, 56, 60, 64] {
        fs::write(path.join("index"), &bytes[..len]).unwrap();
        let report = verify(&path, &Quiet).unwrap();
        assert_eq!(report.damage.iter().filter(|d| !d.owners.is_empty()).count(), 5, "{len}");
    }
}

#[test]
fn what_is_no_image_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    assert!(verify(dir.path(), &Quiet).is_err());
    assert!(verify(&dir.path().join("none"), &Quiet).is_err());
    // A manifest is missing where the rest of an image is: that is damage.
    let (_dir, path) = image(b"memory", b"pages");
    fs::remove_file(path.join("manifest")).unwrap();
    let report = verify(&path, &Quiet).unwrap();
    assert_eq!(report.damage.len(), 1);
}

/// Random bits of a larger image: each is found, and the chunk that it hits is named.
#[test]
fn random_flips_in_a_large_image() {
    let memory: Vec<u8> = (0..24).flat_map(|i| noise(i, MAX_CHUNK)).collect();
    let pages: Vec<u8> = (0..24).flat_map(|i| text(i, MAX_CHUNK)).collect();
    let (_dir, path) = image(&memory, &pages);
    let files: Vec<(PathBuf, u64)> = tree(&path)
        .into_iter()
        .filter(|file| file.is_file())
        .map(|file| (file.clone(), file.metadata().unwrap().len()))
        .collect();
    let total: u64 = files.iter().map(|(_, len)| len).sum();
    let random = noise(99, 8 * 40);
    for bytes in random.chunks_exact(8) {
        let mut at = u64::from_le_bytes(bytes.try_into().unwrap()) % total;
        let (file, _) = files
            .iter()
            .find(|(_, len)| {
                let here = at < *len;
                at -= if here { 0 } else { *len };
                here
            })
            .unwrap();
        flip(file, at);
        let report = verify(&path, &Quiet).unwrap();
        assert!(!report.whole, "byte {at} of {}", file.display());
        if file.extension().is_some() && at >= 32 {
            assert_eq!(report.damage.len(), 1);
            assert!(!report.damage[0].owners.is_empty());
        }
        flip(file, at);
    }
    assert!(verify(&path, &Quiet).unwrap().whole);
}

/// Files `names` of 5000 bytes each, in an image of any kind.
fn fill(to: &Destination, names: &[&str]) {
    let writer = ImageWriter::begin(to, Compression::None).unwrap();
    let mut manifest = manifest();
    for (seed, name) in names.iter().enumerate() {
        let file = writer.add_bytes(name, 0o600, &noise(seed as u64, 5000)).unwrap();
        manifest.criu.files.push(file);
    }
    writer.commit(&manifest).unwrap();
}

fn lost(report: &Report) -> Vec<String> {
    let owners = report.damage.iter().flat_map(|damage| &damage.owners);
    let mut names: Vec<String> = owners
        .map(|owner| match owner {
            Owner::Criu { name, .. } => name.clone(),
            other => panic!("{other}"),
        })
        .collect();
    names.sort();
    names
}

#[test]
fn damage_in_a_parent_is_damage_of_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let (parent, child) = (dir.path().join("parent"), dir.path().join("child"));
    fill(&Destination::Alone(parent.clone()), &["a", "b"]);
    fill(
        &Destination::Incremental { path: child.clone(), parent: parent.clone() },
        &["a", "b", "c"],
    );
    let reader = ImageReader::open(&child).unwrap();
    let of = |name: usize| reader.manifest().criu.files[name].chunks[0].id;
    let entry = reader.chunks().entry(&of(1)).unwrap();
    let pack = pack_of(&reader, entry);
    assert!(pack.canonicalize().unwrap().starts_with(parent.canonicalize().unwrap()));
    flip(&pack, entry.offset);
    let report = verify(&child, &Quiet).unwrap();
    assert_eq!((report.damage.len(), lost(&report)), (1, vec!["b".to_owned()]));
    flip(&pack, entry.offset);

    // Another image in the parent's place, then none.
    flip(&parent.join("manifest"), 70);
    let report = verify(&child, &Quiet).unwrap();
    assert_eq!(lost(&report), ["a", "b"]);
    assert_eq!(report.damage[0].file, Some(child.join("base")));
    flip(&parent.join("manifest"), 70);
    fs::rename(&parent, dir.path().join("away")).unwrap();
    let report = verify(&child, &Quiet).unwrap();
    assert_eq!(lost(&report), ["a", "b"]);
    fs::rename(dir.path().join("away"), &parent).unwrap();
    fs::write(child.join("base"), b"gpucrBAS").unwrap();
    assert_eq!(lost(&verify(&child, &Quiet).unwrap()), ["a", "b"]);
}

#[test]
fn damage_in_a_store_is_damage_of_those_who_need_it() {
    let dir = tempfile::tempdir().unwrap();
    let to = |name: &str| Destination::Stored { store: dir.path().into(), name: name.into() };
    fill(&to("one"), &["a"]);
    let first: Vec<PathBuf> = tree(&dir.path().join("index"));
    fill(&to("two"), &["a", "b"]);
    let second = tree(&dir.path().join("index")).into_iter().find(|s| !first.contains(s)).unwrap();
    let (one, two) = (to("one").path(), to("two").path());
    assert!(verify(&one, &Quiet).unwrap().whole && verify(&two, &Quiet).unwrap().whole);

    flip(&second, 80);
    assert!(verify(&one, &Quiet).unwrap().whole);
    let report = verify(&two, &Quiet).unwrap();
    assert_eq!(lost(&report), ["b"]);
    let named = |report: &Report, file: &Path| {
        let mut files = report.damage.iter().filter_map(|damage| damage.file.as_ref());
        files.any(|found| found.file_name() == file.file_name())
    };
    assert!(named(&report, &second), "{report:?}");
    flip(&second, 80);

    let reader = ImageReader::open(&one).unwrap();
    let pack = pack_of(&reader, &reader.chunks().entries()[0]);
    drop(reader);
    fs::rename(&pack, dir.path().join("away")).unwrap();
    for image in [&one, &two] {
        let report = verify(image, &Quiet).unwrap();
        assert_eq!(lost(&report), ["a"], "{report:?}");
        assert!(named(&report, &pack), "{report:?}");
    }
}
