//! Tests of what is known of chunks by their place in the program.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpucr_wire::CHUNK_SIZE;

use super::bulk::Bulk;
use super::chunks::{Chunk, ProgramBlock};
use crate::base::timeline::Timeline;
use crate::store::ChunkId;

const C: u64 = CHUNK_SIZE;

/// Two blocks of a program, of three chunks and of one, the second behind a gap.
fn bulk() -> Bulk {
    let piece = |id, address, chunks| ProgramBlock {
        program: 0,
        id,
        address,
        lane: 0,
        memory: None,
        chunks: vec![Chunk { clean: true, hashed_twice: true, ..Chunk::default() }; chunks],
        is_open_to_others: false,
        range: None,
    };
    let pieces = vec![piece(1, 10 * C, 3), piece(2, 14 * C, 1)];
    let by_address = BTreeMap::from([((0, 10 * C), 0), ((0, 14 * C), 1)]);
    Bulk {
        pieces,
        by_address,
        hashers: None,
        interval: 0,
        shadows: Vec::new(),
        deferred: Arc::default(),
        missed: Vec::new(),
        lanes: Vec::new(),
        cores: None,
        timeline: Timeline::default(),
    }
}

#[test]
fn a_range_has_changed_if_one_of_its_chunks_has() {
    let mut bulk = bulk();
    assert_eq!(bulk.has_changed(0, 10 * C + 5, 2 * C), Some(false));
    bulk.pieces[0].chunks[2].clean = false;
    assert_eq!(bulk.has_changed(0, 10 * C, 2 * C), Some(false));
    assert_eq!(bulk.has_changed(0, 10 * C, 2 * C + 1), Some(true));
    assert_eq!(bulk.has_changed(0, 12 * C, 2 * C), None, "not all of it is there");
    assert_eq!(bulk.has_changed(1, 10 * C, C), None, "another program's");
    bulk.pieces[1].chunks[0].hashed_twice = false;
    assert_eq!(bulk.has_changed(0, 14 * C, 1), None, "hashed once only");
}

#[test]
fn what_may_be_written_waits() {
    let mut bulk = bulk();
    let id = ChunkId([1; 32]);
    let chunks = |bulk: &Bulk| -> Vec<bool> {
        let chunks = bulk.pieces.iter().flat_map(|piece| &piece.chunks);
        chunks.map(Chunk::is_worth_copying).collect()
    };
    bulk.pieces.iter_mut().flat_map(|p| &mut p.chunks).for_each(|c| c.hash = Some(id));
    assert!(bulk.hold_back(0, 11 * C, 12 * C + 1));
    assert!(!bulk.hold_back(0, 13 * C, 14 * C), "between the blocks");
    assert!(!bulk.hold_back(1, 10 * C, 20 * C), "another program's");
    assert_eq!(chunks(&bulk), [true, false, false, true]);
    bulk.hold_nothing_back();
    assert_eq!(chunks(&bulk), [true; 4]);
}
