//! Images that share chunks: incremental ones, and those of a store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use proptest::prelude::*;

use super::catalogue::{gc_on, remove_on};
use super::tests::manifest;
use super::*;
use crate::base::progress::Quiet;
use crate::store::disk::{Disk, RealDisk};
use crate::store::tests::{noise, text};
use crate::store::{Compression, GcReport, MAX_CHUNK, StoreError};

/// The contents of file number `seed`: noise, text, or one repeated byte, of some length.
fn contents(seed: u64) -> Vec<u8> {
    let len = 200 + (seed as usize * 37) % 900;
    match seed % 4 {
        0 | 1 => noise(seed, len),
        2 => text(seed, len * 3),
        _ => vec![seed as u8; len],
    }
}

pub(super) fn begin(disk: &Arc<dyn Disk>, to: &Destination) -> Result<ImageWriter, ImageError> {
    ImageWriter::begin_on(disk.clone(), to, Compression::Level(1), &|| false)
}

pub(super) fn fill(
    writer: ImageWriter,
    seeds: impl IntoIterator<Item = u64>,
) -> Result<Committed, ImageError> {
    let mut manifest = manifest();
    for seed in seeds {
        manifest.criu.files.push(writer.add_bytes(&format!("{seed}"), 0o600, &contents(seed))?);
    }
    writer.commit(&manifest)
}

/// Writes an image with these files.
pub(super) fn write_on(
    disk: &Arc<dyn Disk>,
    to: &Destination,
    seeds: impl IntoIterator<Item = u64>,
) -> Result<Committed, ImageError> {
    fill(begin(disk, to)?, seeds)
}

pub(super) fn write(to: &Destination, seeds: impl IntoIterator<Item = u64>) -> Committed {
    write_on(&real(), to, seeds).unwrap()
}

pub(super) fn real() -> Arc<dyn Disk> {
    Arc::new(RealDisk)
}

/// Reads an image whole, and says which files it has; each has its contents.
pub(super) fn read(path: &Path) -> Result<BTreeSet<u64>, ImageError> {
    let image = ImageReader::open(path)?;
    let mut seeds = BTreeSet::new();
    for file in &image.manifest().criu.files {
        let seed = file.name.parse().unwrap();
        assert!(image.read_file(file)? == contents(seed), "file {seed} of {}", path.display());
        seeds.insert(seed);
    }
    Ok(seeds)
}

pub(super) fn stored(store: &Path, name: &str) -> Destination {
    Destination::Stored { store: store.to_owned(), name: name.to_owned() }
}

pub(super) fn on_top(path: &Path, parent: &Path) -> Destination {
    Destination::Incremental { path: path.to_owned(), parent: parent.to_owned() }
}

pub(super) fn collect_on(disk: &Arc<dyn Disk>, store: &Path) -> Result<GcReport, ImageError> {
    gc_on(disk, store, Duration::from_secs(20), &AtomicBool::new(false), &Quiet)
}

pub(super) fn collect(store: &Path) -> GcReport {
    collect_on(&real(), store).unwrap()
}

/// Every file below a directory.
pub(super) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn is_hidden(path: &Path, below: &Path) -> bool {
    format!("/{}", path.strip_prefix(below).unwrap().display()).contains("/.")
}

/// After a gc there is nothing but what the images need: no orphans, nothing hidden, and every
/// pack is at least half needed.
pub(super) fn assert_clean(store: &Path) {
    let listing = list(store).unwrap();
    assert!(listing.unreadable.is_empty(), "{:?}", listing.unreadable);
    let packs = files(&store.join("packs"));
    let data = listing.pack_bytes - 32 * packs.len() as u64;
    assert!(listing.needed_bytes * 2 >= data, "{listing:?}");
    for path in files(store) {
        assert!(!is_hidden(&path, store), "{}", path.display());
    }
    // Where chunks are stored several times, a gc can open the way for another; not for ever.
    let mut again = collect(store);
    for _ in 0..4 {
        assert_eq!(again.missing_chunks, 0);
        if (again.freed_bytes, again.removed_packs, again.moved_bytes) == (0, 0, 0) {
            break;
        }
        again = collect(store);
    }
    assert_eq!((again.freed_bytes, again.removed_packs, again.moved_bytes), (0, 0, 0), "{again:?}");
}

#[test]
fn an_incremental_image_holds_what_its_parent_lacks() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b, c] = ["a", "b", "c"].map(|name| dir.path().join(name));
    let first = write(&Destination::Alone(a.clone()), 0..40);
    assert_eq!(first.new_bytes, first.stored_bytes);
    let second = write(&on_top(&b, &a), 1..41);
    let third = write(&on_top(&c, &b), 2..42);
    for (committed, path) in [(first, &a), (second, &b), (third, &c)] {
        let on_disk: u64 = files(path).iter().map(|p| p.metadata().unwrap().len()).sum();
        assert_eq!(committed.new_bytes, on_disk);
    }
    assert!(third.new_bytes < first.new_bytes / 3, "{third:?} {first:?}");
    assert!(third.stored_bytes > first.new_bytes / 2, "{third:?} {first:?}");
    assert_eq!(read(&b).unwrap(), (1..41).collect());
    assert_eq!(read(&c).unwrap(), (2..42).collect());
    assert_eq!(ImageReader::open(&c).unwrap().ancestors().len(), 2);
    assert!(ImageReader::open(&c).unwrap().verify().is_empty());

    // Equal content has the same identity, wherever its chunks are.
    let whole = write(&Destination::Alone(dir.path().join("whole")), 2..42);
    assert_eq!(whole.id, third.id);
    let kept = write(&stored(&dir.path().join("store"), "kept"), 2..42);
    assert_eq!(kept.id, third.id);
}

#[test]
fn a_parent_is_found_where_it_was_or_beside_and_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let [here, there] = ["here", "there"].map(|name| dir.path().join(name));
    fs::create_dir(&here).unwrap();
    write(&Destination::Alone(here.join("a")), 0..9);
    write(&on_top(&here.join("b"), &here.join("a")), 1..10);
    // Both images move.
    fs::rename(&here, &there).unwrap();
    assert_eq!(read(&there.join("b")).unwrap(), (1..10).collect());
    // The child alone moves: the absolute path is the old one, so it is not found ...
    fs::rename(there.join("b"), dir.path().join("b")).unwrap();
    let error = read(&dir.path().join("b")).unwrap_err();
    assert!(matches!(error, ImageError::ParentMissing { .. }), "{error}");
    // ... unless the parent is back.
    fs::create_dir(&here).unwrap();
    fs::rename(there.join("a"), here.join("a")).unwrap();
    assert_eq!(read(&dir.path().join("b")).unwrap(), (1..10).collect());
    // Another image in its place.
    fs::remove_dir_all(here.join("a")).unwrap();
    write(&Destination::Alone(here.join("a")), 0..10);
    let error = read(&dir.path().join("b")).unwrap_err();
    assert!(matches!(error, ImageError::ParentChanged { .. }), "{error}");
    let error = write_on(&real(), &on_top(&here.join("c"), &dir.path().join("b")), 0..1);
    assert!(matches!(error.unwrap_err(), ImageError::ParentChanged { .. }));
}

#[test]
fn parents_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..3);
    let error = write_on(&real(), &on_top(&dir.path().join("b"), &store.join("images/a")), 0..1);
    assert!(matches!(error.unwrap_err(), ImageError::ParentInStore { .. }));
    let error = write_on(&real(), &on_top(&dir.path().join("b"), &dir.path().join("none")), 0..1);
    assert!(matches!(error.unwrap_err(), ImageError::Store(_)));
    // A chain of as many as there may be, and one more.
    let image = |n: usize| dir.path().join(format!("{n}"));
    write(&Destination::Alone(image(1)), [1]);
    for n in 2..=MAX_CHAIN {
        write(&on_top(&image(n), &image(n - 1)), [n as u64]);
    }
    assert_eq!(read(&image(MAX_CHAIN)).unwrap().len(), 1);
    let more = on_top(&image(MAX_CHAIN + 1), &image(MAX_CHAIN));
    let error = write_on(&real(), &more, [1]).unwrap_err();
    assert!(matches!(error, ImageError::ChainTooLong { .. }), "{error}");
    assert!(!files(dir.path()).iter().any(|path| is_hidden(path, dir.path())));
    // A circle, which only a forger can make: the identity says nothing about the base.
    let (identity, absolute) = (Manifest::identity(&image(1)).unwrap(), image(1));
    let circle = Base::Parent { identity, relative: "../1".into(), absolute };
    circle.write(&RealDisk, &image(1)).unwrap();
    let error = read(&image(1)).unwrap_err();
    assert!(matches!(error, ImageError::ChainTooLong { .. }), "{error}");
}

#[test]
fn a_store_keeps_equal_chunks_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let first = write(&stored(&store, "a"), 0..40);
    let second = write(&stored(&store, "b"), 0..40);
    // Nothing but manifest and base.
    let own: u64 = files(&store.join("images/b")).iter().map(|p| p.metadata().unwrap().len()).sum();
    assert_eq!(second.new_bytes, own);
    assert_eq!(files(&store.join("index")).len(), 1, "no segment without chunks");
    assert!(second.stored_bytes > first.stored_bytes / 2);
    write(&stored(&store, "c"), 20..60);
    for (name, seeds) in [("a", 0..40), ("b", 0..40), ("c", 20..60)] {
        assert_eq!(read(&store.join("images").join(name)).unwrap(), seeds.collect());
    }
    // A name is had once; a store is not an image, nor a folder of other things a store.
    let error = write_on(&real(), &stored(&store, "a"), 0..1).unwrap_err();
    assert!(matches!(error, ImageError::Output { .. }), "{error}");
    for name in ["", ".hidden", "a/b", "..", &"x".repeat(201)] {
        let error = write_on(&real(), &stored(&store, name), 0..1).unwrap_err();
        assert!(matches!(error, ImageError::Output { .. }), "{error}");
    }
    assert!(matches!(read(&store).unwrap_err(), ImageError::NotAnImage { .. }));
    let error = write_on(&real(), &stored(dir.path(), "a"), 0..1).unwrap_err();
    let ImageError::Store(StoreError::NotAStoreDir { .. }) = error else { panic!("{error}") };
    let alone = Destination::Alone(store.join("images/d"));
    assert!(matches!(write_on(&real(), &alone, 0..1).unwrap_err(), ImageError::Output { .. }));
}

#[test]
fn a_dump_stores_again_what_is_damaged() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..10);
    // A pack is lost: the image cannot be read, until a dump brings its chunks back.
    for pack in files(&store.join("packs")) {
        fs::remove_file(pack).unwrap();
    }
    assert!(read(&store.join("images/a")).is_err());
    write(&stored(&store, "b"), 0..10);
    assert_eq!(read(&store.join("images/b")).unwrap(), (0..10).collect());
    assert_eq!(read(&store.join("images/a")).unwrap(), (0..10).collect());
    // A segment is damaged: those of others are enough.
    write(&stored(&store, "c"), 20..25);
    let mut segments = files(&store.join("index"));
    segments.retain(|path| !fs::read(path).unwrap().is_empty());
    for segment in &segments {
        let whole = fs::read(segment).unwrap();
        fs::write(segment, &whole[..whole.len() - 1]).unwrap();
        let readable = ["a", "b", "c"].map(|n| read(&store.join("images").join(n)).is_ok());
        assert!(readable.contains(&true), "{readable:?}");
        fs::write(segment, whole).unwrap();
    }
}

/// Two dumps at once store everything twice; then one of each two copies is damaged.
#[test]
fn a_damaged_copy_is_made_up_for_by_a_sound_one() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let writers = ["a", "b"].map(|name| begin(&real(), &stored(&store, name)).unwrap());
    for writer in writers {
        fill(writer, 0..20).unwrap();
    }
    let image = store.join("images/a");
    let open = || ImageReader::open(&image).unwrap();
    let flip = |entry: &crate::store::Entry, pack: &Path| {
        let mut bytes = fs::read(pack).unwrap();
        bytes[entry.offset as usize] ^= 1;
        fs::write(pack, bytes).unwrap();
    };
    assert!(open().verify().is_empty());
    let reader = open();
    let with_data = reader.chunks().entries().iter().filter(|e| e.stored_len > 0);
    for entry in with_data.clone() {
        flip(entry, &reader.chunks().pack_path(entry));
    }
    assert_eq!(read(&image).unwrap(), (0..20).collect());
    // All the same each is named.
    let damage = crate::image::verify::verify(&image, &Quiet).unwrap().damage;
    assert_eq!(damage.len(), with_data.clone().count());
    for damage in &damage {
        assert!(damage.problem.ends_with("another copy of it is sound"), "{damage:?}");
        assert!(damage.file.is_some() && !damage.owners.is_empty(), "{damage:?}");
    }
    // Then the other copy of one of them too: it is lost, and the error names the first.
    let lost = with_data.clone().next().unwrap();
    for pack in files(&store.join("packs")) {
        if pack.file_name() != reader.chunks().pack_path(lost).file_name() {
            let mut bytes = fs::read(&pack).unwrap();
            bytes.iter_mut().rev().skip(32).for_each(|byte| *byte ^= 1);
            fs::write(pack, bytes).unwrap();
        }
    }
    let reader = open();
    let error = reader.chunks().get(&lost.id, &mut vec![0; lost.plain_len as usize]).unwrap_err();
    assert!(matches!(error, StoreError::DamagedChunk { id, .. } if id == lost.id), "{error}");
}

/// What was stored and then not needed is counted.
#[test]
fn unneeded_chunks_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let places = [
        Destination::Alone(dir.path().join("alone")),
        on_top(&dir.path().join("child"), &dir.path().join("alone")),
        stored(&dir.path().join("store"), "stored"),
    ];
    for (number, to) in places.iter().enumerate() {
        let writer = begin(&real(), to).unwrap();
        writer.chunks().put(&noise(100 + number as u64, 700)).unwrap();
        writer.chunks().put(&[7; 5000]).unwrap();
        let committed = fill(writer, [0, 1]).unwrap();
        assert_eq!(committed.unneeded_bytes, 700);
        let reader = ImageReader::open(&to.path()).unwrap();
        // The unneeded chunks in a store are no part of the image, and the next gc frees them.
        let own = if reader.store().is_some() { 0 } else { 700 };
        assert_eq!(reader.chunks().unneeded_bytes(), own);
    }
    let store = dir.path().join("store");
    let needed = list(&store).unwrap().needed_bytes;
    assert!(list(&store).unwrap().pack_bytes > needed + 700);
}

#[test]
fn an_open_image_outlives_its_removal() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..20);
    let image = ImageReader::open(&store.join("images/a")).unwrap();
    remove(&store.join("images/a"), false).unwrap();
    let stop = AtomicBool::new(false);
    assert!(gc_on(&real(), &store, Duration::from_millis(50), &stop, &Quiet).is_err());
    assert!(image.verify().is_empty());
    drop(image);
    assert_eq!(collect(&store).kept_bytes, 0);
}

#[test]
fn a_failed_or_killed_dump_leaves_nothing_in_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..20);
    let before = files(&store);
    let writer = begin(&real(), &stored(&store, "b")).unwrap();
    writer.add_bytes("x", 0o600, &contents(100)).unwrap();
    assert!(files(&store).len() > before.len());
    drop(writer);
    assert_eq!(files(&store), before);
    // Killed: nothing is dropped. The watchdog finds what there is by the name of the directory.
    let writer = begin(&real(), &stored(&store, "b")).unwrap();
    writer.add_bytes("x", 0o600, &contents(100)).unwrap();
    std::mem::forget(writer);
    assert!(files(&store).len() > before.len());
    remove_unfinished(&store.join("images/b"), std::process::id());
    assert_eq!(files(&store), before);
}

#[test]
fn what_others_build_on_is_not_removed() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = ["a", "b"].map(|name| dir.path().join(name));
    write(&Destination::Alone(a.clone()), 0..9);
    write(&on_top(&b, &a), 1..10);
    let error = remove(&a, false).unwrap_err();
    assert!(matches!(error, ImageError::HasChildren { ref children, .. } if children.len() == 1));
    assert!(a.exists());
    remove(&b, false).unwrap();
    remove_on(&RealDisk, &a, false).unwrap();
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    // Only images are removed.
    fs::create_dir(&a).unwrap();
    assert!(matches!(remove(&a, true).unwrap_err(), ImageError::NotAnImage { .. }));
}

#[derive(Debug, Clone)]
enum Step {
    Write { name: u8, seeds: BTreeSet<u64> },
    Remove { name: u8 },
    Collect,
}

fn step() -> impl Strategy<Value = Step> {
    let seeds = prop::collection::btree_set(0u64..24, 0..14);
    prop_oneof![
        4 => (0u8..6, seeds).prop_map(|(name, seeds)| Step::Write { name, seeds }),
        2 => (0u8..6).prop_map(|name| Step::Remove { name }),
        2 => Just(Step::Collect),
    ]
}

proptest! {
    // Each case syncs files.
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any images, with any overlap, in any order of writing, removing and collecting.
    #[test]
    fn any_images_survive(steps in prop::collection::vec(step(), 1..16)) {
        let dir = tempfile::tempdir_in(super::crash_tests::fast_place()).unwrap();
        let store = dir.path().join("store");
        let mut expected: BTreeMap<u8, BTreeSet<u64>> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Write { name, seeds } => {
                    let to = stored(&store, &name.to_string());
                    let written = write_on(&real(), &to, seeds.iter().copied());
                    prop_assert_eq!(written.is_ok(), !expected.contains_key(&name));
                    expected.entry(name).or_insert(seeds);
                }
                Step::Remove { name } => {
                    let removed = remove(&store.join("images").join(name.to_string()), false);
                    prop_assert_eq!(removed.is_ok(), expected.remove(&name).is_some());
                }
                Step::Collect if store.exists() => {
                    collect(&store);
                    assert_clean(&store);
                }
                Step::Collect => {}
            }
            for (name, seeds) in &expected {
                prop_assert_eq!(&read(&store.join("images").join(name.to_string())).unwrap(), seeds);
            }
        }
    }
}

/// Device memory: blocks, each of pieces of up to a chunk, of which each is noise, text or one byte.
fn blocks() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let chunk = prop_oneof![3 => Just(MAX_CHUNK), 1 => 1..MAX_CHUNK];
    let tail = (0u64..12, chunk);
    let block = (prop::collection::vec(0u64..12, 0..2), tail).prop_map(|(whole, (seed, len))| {
        let fill = |seed: u64, len| match seed % 3 {
            0 => noise(seed, len),
            1 => text(seed, len),
            _ => vec![seed as u8; len],
        };
        let mut bytes = whole.into_iter().flat_map(|s| fill(s, MAX_CHUNK)).collect::<Vec<_>>();
        bytes.extend(fill(seed, len));
        bytes
    });
    prop::collection::vec(block, 0..5)
}

proptest! {
    // Each case writes some ten MiB.
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Any allocations of two programs survive a store of both, the removal of one, and a gc.
    #[test]
    fn any_allocations_survive(programs in [blocks(), blocks()]) {
        let dir = tempfile::tempdir_in(super::crash_tests::fast_place()).unwrap();
        let store = dir.path().join("store");
        for (name, blocks) in ["a", "b"].into_iter().zip(&programs) {
            let writer = begin(&real(), &stored(&store, name)).unwrap();
            let mut manifest = manifest();
            let blocks = blocks.iter().enumerate().map(|(number, bytes)| Block {
                id: number as u64,
                device: [1; 16],
                size: bytes.len() as u64,
                kind: BlockKind::Heap,
                address: (number as u64 + 1) << 32,
                allocations: 1,
                chunks: bytes.chunks(MAX_CHUNK).map(|c| writer.chunks().put(c).unwrap()).collect(),
            });
            let blocks = blocks.collect();
            let cuda = CudaProcess { blocks, shim: None, counts: Counts::default() };
            manifest.processes[0].cuda = Some(cuda);
            writer.commit(&manifest).unwrap();
        }
        let is_there = |name: &str, blocks: &[Vec<u8>]| {
            let image = ImageReader::open(&store.join("images").join(name)).unwrap();
            let found = &image.manifest().processes[0].cuda.as_ref().unwrap().blocks;
            assert_eq!(found.len(), blocks.len());
            for (block, bytes) in found.iter().zip(blocks) {
                let mut read = vec![0xaa; bytes.len()];
                for (id, piece) in block.chunks.iter().zip(read.chunks_mut(MAX_CHUNK)) {
                    image.chunks().get(id, piece).unwrap();
                }
                assert!(read == *bytes, "block {} of {name}", block.id);
            }
        };
        is_there("a", &programs[0]);
        is_there("b", &programs[1]);
        remove(&store.join("images/a"), false).unwrap();
        collect(&store);
        is_there("b", &programs[1]);
        assert_clean(&store);
    }
}
