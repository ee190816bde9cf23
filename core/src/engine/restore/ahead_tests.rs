//! Tests of memory that is loaded before there is an image.

use super::*;
use crate::cuda::tests::opened_soft_driver;
use crate::image::tests::make;
use crate::store::MAX_CHUNK;
use crate::store::tests::noise;

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
        devices: Vec::new(),
        is_elsewhere: true,
        stop: Arc::default(),
    }
}

/// An image with one block of two chunks of noise on the software driver's device; the block, and the chunks.
fn image() -> (tempfile::TempDir, ExpectedBlock, Vec<(ChunkId, Vec<u8>)>) {
    let dir = tempfile::tempdir().unwrap();
    let bytes = noise(1, LEN);
    let (_, mut manifest) = make(&dir.path().join("image"), &bytes, b"");
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
    let path = dir.path().join("here");
    let id = ImageReader::open(&path).unwrap().id();
    let (memory, loaded) = ahead.finish(&path).unwrap().unwrap();
    assert_eq!(loaded, before);
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let sending = std::thread::spawn(move || memory.send(ours));
    let given = super::super::given::Given::receive(theirs).unwrap();
    sending.join().unwrap().unwrap();
    let (fds, _) = given.take(&id, 1).unwrap();
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
    assert!(found.into_inner().concat() == noise(1, LEN));
}

#[test]
fn what_comes_where_it_is_expected_is_not_loaded_again() {
    let (dir, what, chunks) = image();
    let mut ahead = ahead();
    assert!(ahead.expect_blocks(&[what]).unwrap());
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
    assert!(ahead.expect_blocks(&[gone, what]).unwrap());
    // They change places.
    assert!(ahead.expect_chunks(1, 0, &[other.0, chunks[0].0]));
    assert!(ahead.expect_chunks(0, 0, &[chunks[0].0]));
    ahead.load(&[other, chunks[0].clone()]).unwrap();
    // What is not to be there any more is let go of.
    assert!(ahead.expect_blocks(&[what]).unwrap());
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
    assert!(ahead.expect_blocks(&[what]).unwrap());
    let ids = [chunks[0].0; 3];
    assert!(!ahead.expect_chunks(0, 0, &ids) && !ahead.expect_chunks(0, 2, &ids[..1]));
    assert!(!ahead.expect_chunks(0, usize::MAX, &[]) && !ahead.expect_chunks(1, 0, &[]));
    let device = opened_soft_driver().devices().unwrap()[0].memory;
    let large = ExpectedBlock { size: device.next_multiple_of(GRANULE) + GRANULE, ..what };
    let error = ahead.expect_blocks(&[what, large]).unwrap_err();
    assert!(matches!(error, Error::DeviceFull { .. } | Error::NoRoom { .. }), "{error}");
    let mut here = Ahead { is_elsewhere: false, ..self::ahead() };
    let fits = here.expect_blocks(&[what, large]);
    assert!(matches!(fits, Ok(false) | Err(Error::NoRoom { .. })), "it has room when it is gone");
    let elsewhere = ExpectedBlock { device: [9; 16], ..what };
    assert!(
        !self::ahead().expect_blocks(&[elsewhere]).unwrap(),
        "it is for the check of the image"
    );
    assert!(is_size_of_block(GRANULE) && !is_size_of_block(0) && !is_size_of_block(GRANULE + 1));
}
