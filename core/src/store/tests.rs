use std::collections::HashSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use rayon::prelude::*;

use super::index::Index;
use super::index::WriterId;
use super::power::Recorder;
use super::*;

/// Bytes that do not compress, different for each seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Bytes that compress well.
pub(crate) fn text(seed: u64, len: usize) -> Vec<u8> {
    let line = format!("line {seed} of a text that repeats itself; ");
    line.bytes().cycle().take(len).collect()
}

fn write(dir: &Path, compression: Compression, chunks: &[Vec<u8>]) -> (Vec<ChunkId>, Stats) {
    let writer = ChunkWriter::create(dir, compression).unwrap();
    let ids = chunks.par_iter().map(|chunk| writer.put(chunk).unwrap()).collect();
    (ids, writer.finish().unwrap())
}

fn sample() -> Vec<Vec<u8>> {
    vec![
        noise(1, MAX_CHUNK),
        text(2, MAX_CHUNK),
        vec![0; MAX_CHUNK],
        vec![0; 5],
        vec![7; MAX_CHUNK - 1],
        noise(3, 1),
        noise(4, 4097),
        text(5, 100_000),
        Vec::new(),
    ]
}

#[test]
fn what_was_synced_before_the_end_is_not_pending_any_more() {
    let (dir, disk) = (tempfile::tempdir().unwrap(), Recorder::default());
    let (writer, known) = (WriterId::random(), StoredChunks::default());
    let place = Place::in_image(Arc::new(disk.clone()), dir.path(), writer, known).unwrap();
    let chunks = ChunkWriter::start_lanes(place, Compression::None, 2);
    let pending = || {
        let journal = disk.journal();
        journal.pending(dir.path(), journal.len())
    };
    let names = pending();
    for seed in 0..8 {
        chunks.put(&noise(seed, 4096)).unwrap();
        chunks.put(&noise(seed, MAX_CHUNK)).unwrap();
    }
    let written = pending();
    assert!(written >= names + 16, "{written} of {names}");
    chunks.sync_written().unwrap();
    // The names of at most four packs are.
    assert!(pending() <= names + 4, "{} of {written}", pending());
    chunks.put(&noise(9, 4096)).unwrap();
    chunks.finish().unwrap();
    assert_eq!(ChunkReader::open(dir.path()).unwrap().entries().len(), 17);
}

#[test]
fn round_trip_in_every_encoding() {
    for compression in [Compression::None, Compression::Level(1), Compression::Level(9)] {
        let dir = tempfile::tempdir().unwrap();
        let chunks = sample();
        let (ids, stats) = write(dir.path(), compression, &chunks);
        assert_eq!(stats.chunks, chunks.len() as u64);
        assert_eq!(stats.zero_chunks, 2);
        assert_eq!(stats.plain_bytes, chunks.iter().map(|c| c.len() as u64).sum::<u64>());

        let reader = ChunkReader::open(dir.path()).unwrap();
        assert_eq!(stats.stored_bytes, reader.stored_bytes());
        for (id, chunk) in ids.iter().zip(&chunks) {
            assert_eq!(*id, ChunkId::of(chunk));
            let mut out = vec![0xaa; chunk.len()];
            reader.get(id, &mut out).unwrap();
            assert!(out == *chunk);
        }
        let encoding = |i: usize| reader.entry(&ids[i]).unwrap().encoding;
        assert_eq!(encoding(0), Encoding::Raw);
        let zstd = compression != Compression::None;
        assert_eq!(encoding(1), if zstd { Encoding::Zstd } else { Encoding::Raw });
        assert_eq!(encoding(2), Encoding::Constant(0));
        assert_eq!(encoding(4), Encoding::Constant(7));
        assert!(reader.verify().is_empty());
    }
}

#[test]
fn equal_chunks_are_stored_once_and_zeros_cost_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mut chunks = vec![noise(1, 100_000); 40];
    chunks.extend(vec![vec![0; MAX_CHUNK]; 40]);
    let (_, stats) = write(dir.path(), Compression::Level(1), &chunks);
    assert_eq!((stats.chunks, stats.duplicate_chunks, stats.zero_chunks), (80, 78, 40));
    assert!(stats.stored_bytes < 101_000, "{stats:?}");
}

#[test]
fn packs_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let limit = 300_000;
    let disk = std::sync::Arc::new(disk::RealDisk);
    let writer = index::WriterId::random();
    let mut place = Place::in_image(disk, dir.path(), writer, StoredChunks::default()).unwrap();
    place.pack_limit = limit;
    let writer = ChunkWriter::start(place, Compression::None);
    let ids: Vec<_> =
        (0..64u64).into_par_iter().map(|i| writer.put(&noise(i, 50_000)).unwrap()).collect();
    let big = writer.put(&noise(99, 400_000)).unwrap();
    writer.finish().unwrap();
    let mut big_packs = 0;
    for entry in fs::read_dir(dir.path().join("packs")).unwrap() {
        let len = entry.unwrap().metadata().unwrap().len();
        big_packs += u32::from(len > limit);
        assert!(len <= limit || len == 400_032, "{len}");
    }
    assert_eq!(big_packs, 1);
    let reader = ChunkReader::open(dir.path()).unwrap();
    assert_eq!(reader.entries().len(), ids.len() + 1);
    assert!(reader.entry(&big).is_some());
    assert!(reader.verify().is_empty());
}

#[test]
fn wrong_requests_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ChunkWriter::create(dir.path(), Compression::default()).unwrap();
    let error = writer.put(&vec![0; MAX_CHUNK + 1]).unwrap_err();
    assert!(matches!(error, StoreError::ChunkTooLarge { .. }));
    let id = writer.put(b"chunk").unwrap();
    assert!(writer.contains(&id));
    writer.finish().unwrap();
    let reader = ChunkReader::open(dir.path()).unwrap();
    let error = reader.get(&id, &mut [0; 4]).unwrap_err();
    assert!(matches!(error, StoreError::WrongLength { stored: 5, asked: 4, .. }));
    let error = reader.get(&ChunkId::of(b"other"), &mut [0; 5]).unwrap_err();
    assert!(matches!(error, StoreError::UnknownChunk { .. }));
    // A store is not written over.
    assert!(ChunkWriter::create(dir.path(), Compression::None).is_err());
}

#[test]
fn damage_is_named_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let (ids, _) = write(dir.path(), Compression::Level(1), &[text(1, 50_000), noise(2, 50_000)]);
    let reader = ChunkReader::open(dir.path()).unwrap();
    for id in &ids {
        let entry = *reader.entry(id).unwrap();
        let path = reader.pack_path(&entry);
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let mut byte = [0u8; 1];
        file.read_exact_at(&mut byte, entry.offset + 9).unwrap();
        file.write_all_at(&[byte[0] ^ 0x10], entry.offset + 9).unwrap();
        let error = reader.get(id, &mut vec![0; 50_000]).unwrap_err();
        let StoreError::DamagedChunk { id: named, pack, offset, .. } = error else {
            panic!("{error}");
        };
        assert_eq!((named, pack, offset), (*id, path, entry.offset));
    }
    let damaged: HashSet<_> = reader.verify().into_iter().map(|d| d.id).collect();
    assert_eq!(damaged, ids.into_iter().collect());
}

#[test]
fn a_failed_write_fails_the_whole_store() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ChunkWriter::create(dir.path(), Compression::None).unwrap();
    // No pack can be made any more.
    fs::remove_dir(dir.path().join("packs")).unwrap();
    assert!(matches!(writer.put(b"first").unwrap_err(), StoreError::Io { .. }));
    assert!(matches!(writer.put(b"second").unwrap_err(), StoreError::Incomplete { .. }));
    assert!(matches!(writer.finish().unwrap_err(), StoreError::Incomplete { .. }));
    assert!(!dir.path().join("index").exists());
}

proptest! {
    #[test]
    fn index_decoder_survives_anything(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = Index::decode(&bytes);
    }

    #[test]
    fn index_decoder_survives_changed_records(at in 0usize..184, value: u8) {
        let mut body = vec![0u8; 184];
        body[0] = 2; // packs
        body[4] = 2; // chunks
        body[8 + 16] = 0xff;
        body[8 + 24] = 1;
        body[8 + 24 + 16] = 0xff;
        body[56 + 32] = 2;
        body[120] = 1;
        body[120 + 32] = 2;
        prop_assert!(Index::decode(&body).is_ok());
        body[at] = value;
        let _ = Index::decode(&body);
    }
}

proptest! {
    // Each case syncs files.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_chunks_survive(lens in prop::collection::vec((0usize..3, 0usize..9000), 1..20)) {
        let chunks: Vec<Vec<u8>> = lens
            .iter()
            .enumerate()
            .map(|(i, &(kind, len))| match kind {
                0 => noise(i as u64, len),
                1 => text(i as u64 % 3, len),
                _ => vec![i as u8; len],
            })
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let (ids, _) = write(dir.path(), Compression::Level(1), &chunks);
        let reader = ChunkReader::open(dir.path()).unwrap();
        for (id, chunk) in ids.iter().zip(&chunks) {
            let mut out = vec![1; chunk.len()];
            reader.get(id, &mut out).unwrap();
            prop_assert_eq!(&out, chunk);
        }
    }
}

#[test]
fn ids_are_ordered_as_their_bytes() {
    let mut ids: Vec<ChunkId> = (0..100).map(|seed| ChunkId::of(&noise(seed, 9))).collect();
    for seed in 0..100u8 {
        // Equal heads, and none.
        let mut id = ids[usize::from(seed)];
        id.0[8 + usize::from(seed) % 24] ^= seed;
        ids.extend([id, ChunkId([seed; 32])]);
    }
    let mut bytes: Vec<[u8; 32]> = ids.iter().map(|id| id.0).collect();
    ids.sort();
    bytes.sort();
    assert!(ids.iter().map(|id| id.0).eq(bytes));
}
