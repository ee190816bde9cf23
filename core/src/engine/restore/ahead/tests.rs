//! Tests of memory that is loaded before there is an image.

use super::*;
use crate::cuda::tests::opened_soft_driver;
use crate::image::tests::make;
use crate::store::tests::noise;
use crate::store::{MAX_CHUNK, StoreError};

const LEN: usize = 2 * MAX_CHUNK;

/// Nothing yet, on the software driver.
fn ahead() -> Ahead {
    Ahead {
        blocks: Vec::new(),
        lanes: Vec::new(),
        driver: opened_soft_driver(),
        kind: DriverKind::Soft,
        placement: Placement::default(),
        places: HashMap::new(),
        constants: HashMap::new(),
        unfit: None,
        devices: Vec::new(),
        is_elsewhere: true,
        stop: Arc::default(),
        given: None,
    }
}

/// An image with one block of two chunks of noise on the software driver's device; the block, and the chunks.
fn image() -> (tempfile::TempDir, ExpectedBlock, Vec<(ChunkId, Vec<u8>)>) {
    image_of(&noise(1, LEN))
}

/// The same with these bytes.
fn image_of(bytes: &[u8]) -> (tempfile::TempDir, ExpectedBlock, Vec<(ChunkId, Vec<u8>)>) {
    let dir = tempfile::tempdir().unwrap();
    let (_, mut manifest) = make(&dir.path().join("image"), bytes, b"");
    let uuid = opened_soft_driver().devices().unwrap()[0].uuid;
    let process = manifest.processes[0].pid;
    let block = &mut manifest.processes[0].cuda.as_mut().unwrap().blocks[0];
    block.device = uuid;
    let what = ExpectedBlock { process, id: block.id, device: uuid, size: block.size };
    let chunks = bytes.chunks(MAX_CHUNK).map(|chunk| (ChunkId::of(chunk), chunk.to_vec()));
    let chunks: Vec<_> = chunks.collect();
    // Once more, with the device that there is.
    let writer = crate::image::ImageWriter::create(
        &dir.path().join("here"),
        crate::store::Compression::None,
    )
    .unwrap();
    for file in &manifest.criu.files {
        let reader = ImageReader::open(&dir.path().join("image")).unwrap();
        writer.add_bytes(&file.name, 0o600, &reader.read_file(file).unwrap()).unwrap();
    }
    for carried in &manifest.carried {
        let reader = ImageReader::open(&dir.path().join("image")).unwrap();
        let bytes = reader.read_file(&carried.file).unwrap();
        writer.add_bytes(&carried.file.name, 0o755, &bytes).unwrap();
    }
    for (_, plain) in &chunks {
        writer.chunks().put(plain).unwrap();
    }
    writer.commit(&manifest).unwrap();
    (dir, what, chunks)
}

/// The memory that a restore is given has the bytes of the image; so many of them were there ahead.
fn finishes(ahead: Ahead, dir: &tempfile::TempDir, before: u64) {
    finishes_with(ahead, dir, before, &noise(1, LEN));
}

fn finishes_with(mut ahead: Ahead, dir: &tempfile::TempDir, before: u64, expected: &[u8]) {
    let path = dir.path().join("here");
    let id = ImageReader::open(&path).unwrap().id();
    let (memory, loaded) = ahead.finish(&path).unwrap().unwrap();
    assert_eq!(loaded, before);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let sending = std::thread::spawn(move || memory.send(ours));
    let given = super::super::given::Given::through(theirs);
    let (fds, _) = given.take(&id, 1).unwrap();
    sending.join().unwrap().unwrap();
    // The memory is there though the contexts in which it was made are not.
    drop(ahead);
    let driver = opened_soft_driver();
    let device = &driver.devices().unwrap()[0];
    let mut lane = Lane::prepare(&driver, device, 1).unwrap();
    let fd = std::os::fd::AsFd::as_fd(&fds[0]);
    let block = SharedBlock::import(lane.context(), fd, LEN as u64).unwrap();
    let spans = [Span::of(&block, 0, 0), Span::of(&block, 0, 1)];
    let found = parking_lot::Mutex::new(vec![Vec::new(); 2]);
    let take = |span: Span, bytes: &[u8], _: Option<ChunkId>| -> Result<(), StoreError> {
        found.lock()[span.chunk] = bytes.to_vec();
        Ok(())
    };
    let copied = lane.copy_out(&spans, &Stop::new(Arc::default()), &take);
    copied.map_err(Error::from).unwrap();
    assert!(found.into_inner().concat() == expected);
}

#[test]
fn what_comes_where_it_is_expected_is_not_loaded_again() {
    let (dir, what, chunks) = image();
    let mut ahead = ahead();
    ahead.expect_blocks(&[what]);
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0, chunks[1].0]));
    ahead.load(&chunks).unwrap();
    finishes(ahead, &dir, LEN as u64);
}

#[test]
fn what_was_expected_wrongly_or_did_not_come_is_loaded_from_the_image() {
    let (dir, what, chunks) = image();
    let other = noise(2, MAX_CHUNK);
    let other = (ChunkId::of(&other), other);
    let mut ahead = ahead();
    let gone = ExpectedBlock { id: what.id + 1, ..what };
    ahead.expect_blocks(&[gone, what]);
    // They change places.
    assert!(ahead.expect_chunks(1, 0, &[other.0, chunks[0].0]));
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0]));
    ahead.load(&[other, chunks[0].clone()]).unwrap();
    // What is not to be there any more is let go of.
    ahead.expect_blocks(&[what]);
    assert!(ahead.expect_chunks(0, 1, &[chunks[1].0]));
    ahead.load(&chunks[1..]).unwrap();
    finishes(ahead, &dir, MAX_CHUNK as u64);
    // Nothing was known of it.
    finishes(self::ahead(), &dir, 0);
}

#[test]
fn what_is_not_there_or_does_not_fit_is_refused() {
    let (_dir, what, chunks) = image();
    let mut ahead = ahead();
    assert!(!ahead.expect_chunks(0, 0, &[chunks[0].0]), "there is no block");
    ahead.expect_blocks(&[what]);
    ahead.check_fit().unwrap();
    let ids = [chunks[0].0; 3];
    assert!(!ahead.expect_chunks(0, 0, &ids) && !ahead.expect_chunks(0, 2, &ids[..1]));
    assert!(
        !ahead.expect_chunks(0, usize::MAX, &ids[..1]) && !ahead.expect_chunks(1, 0, &ids[..1])
    );
    let large = too_large(what);
    ahead.expect_blocks(&[what, large]);
    assert!(ahead.expect_chunks(1, 0, &ids), "there is such a block, though it has no memory");
    assert!(!ahead.expect_chunks(2, 0, &ids) && !ahead.expect_chunks(0, 0, &ids));
    let error = ahead.check_fit().unwrap_err();
    assert!(matches!(error, Error::DeviceFull { .. } | Error::NoRoom { .. }), "{error}");
    let mut here = Ahead { is_elsewhere: false, ..self::ahead() };
    here.check_offered(u64::MAX).unwrap();
    let mut elsewhere = Ahead { devices: vec![what.device], ..self::ahead() };
    elsewhere.check_offered(what.size).unwrap();
    let error = elsewhere.check_offered(large.size).unwrap_err();
    assert!(matches!(error, Error::DeviceFull { needed, free, .. } if free < needed), "{error}");
    here.expect_blocks(&[what, large]);
    let fits = here.check_fit();
    assert!(matches!(fits, Ok(()) | Err(Error::NoRoom { .. })), "it has room when it is gone");
    assert!(is_size_of_block(GRANULE) && !is_size_of_block(0) && !is_size_of_block(GRANULE + 1));
}

/// A block that is larger than its device.
fn too_large(what: ExpectedBlock) -> ExpectedBlock {
    let device = opened_soft_driver().devices().unwrap()[0].memory;
    ExpectedBlock { size: device.next_multiple_of(GRANULE) + SPARE + GRANULE, ..what }
}

#[test]
fn only_the_last_blocks_count() {
    let (dir, what, chunks) = image();
    let mut ahead = ahead();
    ahead.expect_blocks(&[what]);
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0]));
    ahead.load(&chunks).unwrap();
    // It does not fit for a moment; what was loaded is given back.
    ahead.expect_blocks(&[what, too_large(what)]);
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0]));
    ahead.load(&chunks).unwrap();
    ahead.expect_blocks(&[what]);
    ahead.check_fit().unwrap();
    assert!(ahead.expect_chunks(0, 1, &[chunks[1].0]));
    ahead.load(&chunks[1..]).unwrap();
    finishes(ahead, &dir, MAX_CHUNK as u64);
    // A device that there is not is for the check of the image.
    let mut ahead = self::ahead();
    ahead.expect_blocks(&[ExpectedBlock { device: [9; 16], ..what }]);
    ahead.check_fit().unwrap();
    finishes(ahead, &dir, 0);
}

#[test]
fn what_is_one_byte_is_filled_a_part_at_a_time() {
    const CHUNKS: usize = 3 * filling::AT_ONCE / 2;
    let (dir, what, chunks) = image_of(&[7; LEN]);
    let long = ExpectedBlock { id: what.id + 1, size: (CHUNKS * MAX_CHUNK) as u64, ..what };
    let mut ahead = ahead();
    ahead.expect_blocks(&[long, what]);
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0; CHUNKS]));
    ahead.load(&chunks).unwrap();
    assert_eq!(ahead.blocks[0].loaded(), 0, "that is left to whoever has nothing else to do");
    for part in [filling::AT_ONCE, CHUNKS] {
        assert!(ahead.fill_some().unwrap());
        assert_eq!(ahead.blocks[0].loaded(), (part * MAX_CHUNK) as u64);
    }
    assert!(!ahead.fill_some().unwrap());
    // One that has come before need not come again.
    assert!(ahead.expect_chunks(1, 0, &[chunks[0].0; 2]));
    while ahead.fill_some().unwrap() {}
    finishes_with(ahead, &dir, LEN as u64, &[7; LEN]);
}

#[test]
fn memory_that_changes_and_changes_back_is_what_it_was() {
    let (dir, what, chunks) = image();
    let other = noise(2, MAX_CHUNK);
    let other = (ChunkId::of(&other), other);
    let mut ahead = ahead();
    ahead.expect_blocks(&[what]);
    let ids = [chunks[0].0, chunks[1].0];
    assert!(ahead.expect_chunks(0, 0, &ids));
    ahead.load(&chunks).unwrap();
    // It is another one only as far as was said: what was loaded is there still.
    assert!(ahead.expect_chunks(0, 0, &[other.0]) && ahead.expect_chunks(0, 0, &ids[..1]));
    ahead.load(std::slice::from_ref(&other)).unwrap();
    assert_eq!(ahead.blocks[0].loaded(), LEN as u64);
    assert!(ahead.places.is_empty(), "nothing is expected that is not there");
    // And now it is.
    assert!(ahead.expect_chunks(0, 1, &[other.0]));
    ahead.load(&[other]).unwrap();
    assert!(ahead.expect_chunks(0, 1, &ids[1..]));
    finishes(ahead, &dir, MAX_CHUNK as u64);
}

#[test]
fn what_was_loaded_is_counted_once_and_for_its_image_alone() {
    let (dir, what, chunks) = image();
    let manifest = ImageReader::open(&dir.path().join("here")).unwrap().manifest().clone();
    let mut ahead = ahead();
    assert_eq!(ahead.loaded_for(&manifest), 0);
    let other = ExpectedBlock { id: what.id + 1, ..what };
    ahead.expect_blocks(&[other, what]);
    assert_eq!(ahead.loaded_for(&manifest), 0, "the software driver takes it when it is written");
    assert!(
        ahead.expect_chunks(0, 0, &[chunks[0].0; 2]) && ahead.expect_chunks(1, 1, &[chunks[1].0])
    );
    ahead.load(&chunks).unwrap();
    assert_eq!(ahead.loaded_for(&manifest), MAX_CHUNK as u64);
}
