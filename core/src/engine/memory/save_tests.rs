//! What is copied has to be what was seen when the memory had come to a halt.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpucr_wire::CHUNK_SIZE;

use super::bulk::Bulk;
use super::chunks::{Chunk, ProgramBlock, spans};
use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::base::timeline::Timeline;
use crate::cuda::tests::opened_soft_driver;
use crate::cuda::{Filled, SharedBlock, Span};
use crate::engine::error::Error;
use crate::image::ImageWriter;
use crate::store::{ChunkId, Compression, StoreError};

pub(super) const CHUNKS: usize = 4;

/// A block of four chunks on the software driver, filled with this byte.
pub(super) fn bulk(byte: u8) -> Bulk {
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let len = CHUNKS as u64 * CHUNK_SIZE;
    let bulk = Bulk::prepare(&driver, &[device], len, Timeline::default()).unwrap();
    let mut bulk = bulk.expect("there is room");
    assert!(bulk.prepare_hashing());
    let memory = SharedBlock::allocate(bulk.lanes[0].context(), len).unwrap();
    bulk.pieces.push(ProgramBlock {
        program: 0,
        id: 1,
        address: 10 * CHUNK_SIZE,
        lane: 0,
        memory: Some(memory),
        chunks: vec![Chunk::default(); CHUNKS],
        is_open_to_others: false,
        range: None,
    });
    bulk.by_address.insert((0, 10 * CHUNK_SIZE), 0);
    for chunk in 0..CHUNKS {
        // This chunk is unlike the others, of which one is saved.
        fill(&mut bulk, chunk, byte + chunk as u8);
    }
    bulk
}

/// Fills a chunk with a byte.
pub(super) fn fill(bulk: &mut Bulk, chunk: usize, byte: u8) {
    let mut work = spans(&bulk.pieces, |_, _| true);
    work.retain(|span| span.chunk == chunk);
    let give = |_: Span, to: &mut [u8]| -> Result<Filled, StoreError> {
        to.fill(byte);
        Ok(Filled::Bytes)
    };
    bulk.lanes[0].copy_in(&work, &stop(), &give).unwrap();
}

pub(super) fn stop() -> Stop {
    Stop::new(Arc::new(AtomicBool::new(false)))
}

/// Saves the memory into an image.
fn saved(bulk: &mut Bulk) -> Result<Vec<Vec<ChunkId>>, Error> {
    let dir = tempfile::tempdir().unwrap();
    let image = ImageWriter::create(&dir.path().join("image"), Compression::None).unwrap();
    bulk.save(image.chunks(), &stop(), &Quiet, || (), |_| ())
}

#[test]
fn what_was_seen_is_what_is_saved() {
    let mut bulk = bulk(1);
    bulk.hash_pass().unwrap();
    let expected: Vec<ChunkId> =
        (1..).take(CHUNKS).map(|byte| ChunkId::of(&vec![byte; CHUNK_SIZE as usize])).collect();
    assert_eq!(saved(&mut bulk).unwrap(), [expected]);
}

/// Another process could write it without being held up.
#[test]
fn what_others_have_open_is_not_put_off() {
    let mut bulk = bulk(1);
    bulk.hash_pass().unwrap();
    bulk.pieces[0].is_open_to_others = true;
    assert_eq!(bulk.defer(1).unwrap().chunks, 0);
    bulk.pieces[0].is_open_to_others = false;
    assert_eq!(bulk.defer(1).unwrap().chunks, CHUNKS as u64);
}

/// Nothing may write memory of stopped programs. If something does there is no image.
#[test]
fn a_copy_that_is_not_what_was_seen_fails_the_dump() {
    for deferred in [false, true] {
        let mut bulk = bulk(1);
        bulk.hash_pass().unwrap();
        if deferred {
            assert_eq!(bulk.defer(1).unwrap().chunks, CHUNKS as u64);
        }
        fill(&mut bulk, 2, 77);
        match saved(&mut bulk) {
            Err(Error::WrongCopy { what }) => assert_eq!(what, "chunk 2 of block 1"),
            other => panic!("deferred {deferred}: {other:?}"),
        }
    }
}
