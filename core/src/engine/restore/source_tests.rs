//! A source that fails ends a load with its error.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use gpucr_wire::CHUNK_SIZE;

use super::bulk::Chunks;
use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::cuda::span::spans_on;
use crate::cuda::tests::opened_soft_driver;
use crate::cuda::{Hasher, Lane, SharedBlock, Span};
use crate::engine::error::Error;
use crate::image::Block;
use crate::image::tests::block;
use crate::store::ChunkId;
use crate::store::doubles::{Step, TestSource, is_failure_of};
use crate::store::tests::noise;

const CHUNKS: usize = 5;

/// A block of an image, and memory for it.
struct Memory {
    lane: Lane,
    block: Block,
    work: Vec<Span>,
    contents: Vec<Vec<u8>>,
    _memory: Vec<SharedBlock>,
}

fn memory() -> Memory {
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let lane = Lane::prepare(&driver, &device, 3).unwrap();
    let size = CHUNKS as u64 * CHUNK_SIZE;
    let memory = vec![SharedBlock::allocate(lane.context(), size).unwrap()];
    let work = spans_on(&memory, &device.uuid);
    let contents: Vec<_> = (0..CHUNKS as u64).map(|n| noise(n, CHUNK_SIZE as usize)).collect();
    let chunks = contents.iter().map(|bytes| ChunkId::of(bytes)).collect();
    let block = block(chunks, size).blocks.remove(0);
    Memory { lane, block, work, contents, _memory: memory }
}

fn load(memory: &mut Memory, source: &TestSource, stop: &Stop) -> Result<(), Error> {
    let chunks = Chunks { blocks: &[&memory.block], image: source };
    chunks.load(&mut memory.lane, memory.work.clone(), stop, &Quiet)
}

fn stop() -> Stop {
    Stop::new(Arc::new(AtomicBool::new(false)))
}

/// What is in the memory.
fn assert_loaded(memory: &mut Memory) {
    let mut hasher = Hasher::prepare(memory.lane.context()).unwrap();
    let places: Vec<_> = memory.work.iter().map(|span| (span.address, span.len)).collect();
    let found: Vec<ChunkId> = hasher.hash(&places).unwrap().iter().map(|h| h.id).collect();
    assert_eq!(found, memory.block.chunks);
}

#[test]
fn a_source_is_told_what_it_will_be_asked_for() {
    let mut memory = memory();
    let source = TestSource::of(memory.contents.clone());
    load(&mut memory, &source, &stop()).unwrap();
    assert_eq!(source.announced(), memory.block.chunks);
    assert_eq!(source.gets(), (CHUNKS, 0));
    assert_loaded(&mut memory);
}

#[test]
fn what_comes_wrong_is_asked_for_again() {
    let mut memory = memory();
    let mut source = TestSource::of(memory.contents.clone());
    source.altered = vec![memory.block.chunks[1], memory.block.chunks[4]];
    load(&mut memory, &source, &stop()).unwrap();
    assert_eq!(source.gets(), (CHUNKS, 2));
    assert_loaded(&mut memory);
}

#[test]
fn a_source_that_fails_ends_the_load_with_its_error() {
    let mut memory = memory();
    let all = memory.block.chunks.clone();
    let steps = (0..CHUNKS).flat_map(|n| [Step::GetUnchecked(n), Step::Get(n)]);
    for step in steps {
        let mut source = TestSource::of(memory.contents.clone());
        (source.fails, source.altered) = (Some(step), all.clone());
        let stop = stop();
        match load(&mut memory, &source, &stop) {
            Err(Error::Store(error)) if is_failure_of(step, &error) => {}
            other => panic!("{step:?}: {other:?}"),
        }
        assert!(stop.is_set(), "the loads of other devices end too");
        let (unchecked, checked) = source.gets();
        match step {
            Step::GetUnchecked(n) => assert!(unchecked > n && checked == 0),
            _ => assert!(unchecked == CHUNKS && checked <= CHUNKS),
        }
    }
}

#[test]
fn a_chunk_that_the_source_does_not_have_ends_the_load() {
    let mut memory = memory();
    let source = TestSource::of(memory.contents[1..].to_vec());
    let result = load(&mut memory, &source, &stop());
    assert!(matches!(result, Err(Error::Store(_))), "{result:?}");
}
