//! A gc: what it frees, what it leaves alone, and how it gets along with others.

use std::collections::BTreeSet;
use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::catalogue::gc_on;
use super::crash_tests::fast_place;
use super::kinds_tests::{
    assert_clean, begin, collect, collect_on, files, fill, read, real, stored, write,
};
use super::*;
use crate::base::progress::Quiet;
use crate::store::{Compression, StoreError};

#[test]
fn a_gc_frees_what_no_image_needs() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "a"), 0..160);
    write(&stored(&store, "b"), 150..190);
    write(&stored(&store, "c"), 190..210);
    // Everything is needed; but where many cores wrote as many small packs, these are merged.
    let first = collect(&store);
    assert!(first.freed_bytes == 0 || first.moved_bytes > 0, "{first:?}");
    assert_eq!(first.missing_chunks, 0);
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
    assert_eq!(read(&store.join("images/b")).unwrap(), (150..190).collect());
    assert_eq!(read(&store.join("images/c")).unwrap(), (190..210).collect());
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
    // A gc frees nothing either while a segment is damaged.
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
            bytes.iter_mut().rev().skip(32).step_by(100).for_each(|byte| *byte ^= 4);
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
fn two_writers_and_a_gc_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    write(&stored(&store, "old"), 0..20);
    write(&stored(&store, "gone"), 20..60);
    remove(&store.join("images/gone"), false).unwrap();
    // Two dumps begin; both rely on chunks of the image that is gone.
    let first = begin(&real(), &stored(&store, "first")).unwrap();
    let second = begin(&real(), &stored(&store, "second")).unwrap();
    // A gc during the two dumps prepares, and gives up waiting for them.
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

/// It may have to be made in a hurry, and the other dump may take an hour.
#[test]
fn a_dump_passes_a_gc_that_waits_for_another_dump() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    let long = begin(&real(), &stored(&store, "long")).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let gc = || gc_on(&real(), &store, Duration::from_secs(600), &stop, &Quiet);
        let waiting = scope.spawn(gc);
        // The gc should wait by then; if it does not yet, nothing is tested, and nothing fails.
        std::thread::sleep(Duration::from_millis(500));
        write(&stored(&store, "short"), 0..5);
        assert!(!waiting.is_finished(), "it waits for the first");
        stop.store(true, Ordering::Relaxed);
        let error = waiting.join().unwrap().unwrap_err();
        assert!(matches!(error, ImageError::Store(StoreError::Interrupted)), "{error}");
    });
    fill(long, 3..8).unwrap();
    collect(&store);
    for (name, chunks) in [("long", 3..8), ("short", 0..5)] {
        assert_eq!(read(&store.join("images").join(name)).unwrap(), chunks.collect());
    }
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
    // A gc that waits can be told to give up.
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
    let dir = tempfile::tempdir_in(fast_place()).unwrap();
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
