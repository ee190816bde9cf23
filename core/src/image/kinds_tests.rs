//! Images that share chunks: incremental ones, and those of a store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::shelf::{gc_on, remove_on};
use super::tests::manifest;
use super::*;
use crate::phase::Quiet;
use crate::store::disk::{Disk, RealDisk};
use crate::store::tests::{noise, text};
use crate::store::{Compression, GcReport};

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

fn write(to: &Destination, seeds: impl IntoIterator<Item = u64>) -> Committed {
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

fn collect(store: &Path) -> GcReport {
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

    // The same content has the same identity, wherever its chunks are.
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
    // Both move.
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
fn a_gc_frees_what_no_image_needs() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..40);
    write(&stored(&store, "b"), 30..70);
    write(&stored(&store, "c"), 70..90);
    assert_eq!(collect(&store).freed_bytes, 0);
    let listing = list(&store).unwrap();
    assert_eq!(listing.images.len(), 3);
    let own: u64 = listing.images.iter().map(|i| i.own_bytes).sum();
    assert!(own < listing.needed_bytes, "some are shared: {listing:?}");

    let removed = remove(&store.join("images/a"), false).unwrap();
    assert_eq!(removed.store.as_deref(), Some(store.canonicalize().unwrap().as_path()));
    let before: u64 = files(&store).iter().map(|p| p.metadata().unwrap().len()).sum();
    let report = collect(&store);
    let after: u64 = files(&store).iter().map(|p| p.metadata().unwrap().len()).sum();
    assert_eq!(report.freed_bytes, before - after, "{report:?}");
    assert!(report.freed_bytes > 5000 && report.moved_bytes > 0, "{report:?}");
    assert_eq!(report.images, 2);
    assert_eq!(read(&store.join("images/b")).unwrap(), (30..70).collect());
    assert_eq!(read(&store.join("images/c")).unwrap(), (70..90).collect());
    assert_clean(&store);

    remove(&store.join("images/b"), false).unwrap();
    remove(&store.join("images/c"), false).unwrap();
    let report = collect(&store);
    assert_eq!((report.images, report.kept_bytes), (0, 0));
    assert_eq!(files(&store), ["gc.lock", "lock", "queue.lock"].map(|name| store.join(name)));
    write(&stored(&store, "d"), 0..5);
    assert_clean(&store);
}

#[test]
fn a_gc_harms_no_image_that_it_cannot_read() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..10);
    write(&stored(&store, "b"), 10..20);
    let manifest = store.join("images/a/manifest");
    let whole = fs::read(&manifest).unwrap();
    fs::write(&manifest, &whole[..100]).unwrap();
    let before = files(&store);
    assert!(collect_on(&real(), &store).is_err());
    assert_eq!(files(&store), before);
    assert_eq!(list(&store).unwrap().unreadable.len(), 1);
    fs::write(&manifest, whole).unwrap();
    // Nor with a segment that is damaged.
    let segment = files(&store.join("index")).remove(0);
    let whole = fs::read(&segment).unwrap();
    let mut bad = whole.clone();
    bad[100] ^= 1;
    fs::write(&segment, bad).unwrap();
    assert!(collect_on(&real(), &store).is_err());
    assert_eq!(files(&store), before);
    fs::write(&segment, whole).unwrap();
    collect(&store);
    assert_eq!(read(&store.join("images/a")).unwrap(), (0..10).collect());
}

/// Of two copies a gc keeps the sound one, whichever it would choose by itself.
#[test]
fn a_gc_drops_no_copy_for_a_damaged_one() {
    for damaged in 0..2 {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        // Both begin before one has stored anything, so each stores everything.
        let writers = ["a", "b"].map(|name| begin(&real(), &stored(&store, name)).unwrap());
        let packs = writers.map(|writer| {
            let before = files(&store.join("packs"));
            fill(writer, 0..20).unwrap();
            let mut packs = files(&store.join("packs"));
            packs.retain(|path| !before.contains(path));
            packs
        });
        assert!(packs.iter().all(|packs| !packs.is_empty()), "{packs:?}");
        for pack in &packs[damaged] {
            let mut bytes = fs::read(pack).unwrap();
            bytes.iter_mut().skip(32).step_by(100).for_each(|byte| *byte ^= 4);
            fs::write(pack, bytes).unwrap();
        }
        collect(&store);
        collect(&store);
        // With the damaged files out of the way, everything is there.
        for pack in &packs[damaged] {
            let _ = fs::remove_file(pack);
        }
        for name in ["a", "b"] {
            assert_eq!(read(&store.join("images").join(name)).unwrap(), (0..20).collect());
        }
    }
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

#[test]
fn two_writers_and_a_gc_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "old"), 0..20);
    write(&stored(&store, "gone"), 20..60);
    remove(&store.join("images/gone"), false).unwrap();
    // Two dumps begin; both rely on chunks of the image that is gone.
    let first = begin(&real(), &stored(&store, "first")).unwrap();
    let second = begin(&real(), &stored(&store, "second")).unwrap();
    // A gc beside them prepares, and gives up waiting for them.
    let stop = AtomicBool::new(false);
    let error = gc_on(&real(), &store, Duration::from_millis(100), &stop, &Quiet).unwrap_err();
    assert!(matches!(error, ImageError::Store(StoreError::Busy { .. })), "{error}");
    // Another waits, and a third is refused meanwhile.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| collect(&store));
        std::thread::sleep(Duration::from_millis(300));
        let error = collect_on(&real(), &store).unwrap_err();
        assert!(matches!(error, ImageError::Store(StoreError::Busy { .. })), "{error}");
        fill(first, 30..70).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        assert!(!waiting.is_finished(), "the second dump still has the lock");
        fill(second, 35..75).unwrap();
        waiting.join().unwrap();
    });
    assert_eq!(read(&store.join("images/old")).unwrap(), (0..20).collect());
    assert_eq!(read(&store.join("images/first")).unwrap(), (30..70).collect());
    assert_eq!(read(&store.join("images/second")).unwrap(), (35..75).collect());
    collect(&store);
    assert_eq!(read(&store.join("images/first")).unwrap(), (30..70).collect());
    assert_eq!(read(&store.join("images/second")).unwrap(), (35..75).collect());
    assert_clean(&store);
}

/// Dumps that follow each other without a gap do not keep a gc waiting.
#[test]
fn a_stream_of_dumps_lets_a_gc_through() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "first"), 0..5);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let dumps: Vec<_> = (0..4)
            .map(|dump| {
                let (store, done) = (&store, &done);
                scope.spawn(move || {
                    for round in 0.. {
                        if done.load(Ordering::Relaxed) {
                            return round;
                        }
                        let to = stored(store, &format!("{dump}-{round}"));
                        let writer = begin(&real(), &to).unwrap();
                        std::thread::sleep(Duration::from_millis(60));
                        fill(writer, [round]).unwrap();
                    }
                    unreachable!("there is always another round")
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        let collected = (0..3).map(|_| collect_on(&real(), &store)).collect::<Vec<_>>();
        done.store(true, Ordering::Relaxed);
        for collected in collected {
            collected.unwrap();
        }
        assert!(dumps.into_iter().all(|dump| dump.join().unwrap() > 1));
    });
    // One that waits can be told to give up.
    let reader = ImageReader::open(&store.join("images/first")).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| collect(&store));
        std::thread::sleep(Duration::from_millis(100));
        let more = stored(&store, "more");
        let since = Instant::now();
        let stop = || since.elapsed() > Duration::from_millis(100);
        let begun = ImageWriter::begin_unless(&more, Compression::None, &stop);
        let error = begun.err().expect("a gc is waiting");
        assert!(matches!(error, ImageError::Store(StoreError::Interrupted)), "{error}");
        // A reader goes on after a while, since the gc may wait for just this one.
        assert_eq!(read(&store.join("images/first")).unwrap(), (0..5).collect());
        assert!(!waiting.is_finished());
        drop(reader);
        waiting.join().unwrap();
    });
    write(&stored(&store, "more"), 0..5);
}

/// Many small dumps do not leave many small files.
#[test]
fn a_gc_merges_what_is_small() {
    let dir = tempfile::tempdir_in(super::crash_tests::fast_place()).unwrap();
    let store = dir.path().join("store");
    let image = |n: u64| store.join("images").join(n.to_string());
    let count = |what: &str| files(&store.join(what)).len();
    for n in 0..100 {
        write(&stored(&store, &n.to_string()), [4 * n, 4 * n + 3]);
    }
    assert_eq!((count("index"), count("packs")), (100, 100));
    let report = collect(&store);
    assert_eq!((report.removed_packs, report.images), (100, 100));
    assert_eq!((count("index"), count("packs")), (1, 1));
    for n in 0..100 {
        assert_eq!(read(&image(n)).unwrap(), BTreeSet::from([4 * n, 4 * n + 3]));
    }
    assert_clean(&store);
    // Few are left alone, and large ones are not moved again for each few small ones.
    for n in 100..107 {
        write(&stored(&store, &n.to_string()), [4 * n]);
    }
    assert_eq!((collect(&store).moved_bytes, count("packs")), (0, 8));
    write(&stored(&store, "107"), [4 * 107]);
    let report = collect(&store);
    assert_eq!((report.removed_packs, count("packs"), count("index")), (8, 2, 2));
    // A damaged pack is left alone.
    let pack = files(&store.join("packs")).remove(0);
    let mut bytes = fs::read(&pack).unwrap();
    bytes[40] ^= 1;
    fs::write(&pack, bytes).unwrap();
    for n in 108..130 {
        write(&stored(&store, &n.to_string()), [4 * n]);
    }
    collect(&store);
    assert!(pack.exists());
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
    // Killed: nothing is dropped. The keeper finds what there is by the name of the directory.
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
