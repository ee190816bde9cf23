//! A sink that fails ends a transfer with its error: no call waits for ever, and nothing counts as saved.

use std::sync::atomic::AtomicBool;

use gpucr_wire::Table;

use super::bulk::Bulk;
use super::deferred::PutOff;
use super::save_tests::{CHUNKS, bulk, stop};
use crate::base::progress::Quiet;
use crate::engine::error::Error;
use crate::store::doubles::{Step, TestSink, is_failure_of};
use crate::store::{ChunkId, ChunkSink};

/// Memory whose chunks were all hashed, and the hash of each.
fn hashed(passes: usize) -> (Bulk, Vec<ChunkId>) {
    let mut bulk = bulk(1);
    (0..passes).for_each(|_| {
        bulk.hash_pass().unwrap();
    });
    let hashes = bulk.hashes().unwrap().concat();
    (bulk, hashes)
}

fn assert_failed<T: std::fmt::Debug>(result: Result<T, Error>, step: Step) {
    match result {
        Err(Error::Store(error)) if is_failure_of(step, &error) => {}
        other => panic!("{step:?}: {other:?}"),
    }
}

/// What a save has told the threads that wait for it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Told {
    released: bool,
    settled: Option<bool>,
}

fn save(bulk: &mut Bulk, sink: &TestSink) -> (Result<Vec<Vec<ChunkId>>, Error>, Told) {
    let mut told = Told::default();
    let Told { released, settled } = &mut told;
    let saved =
        bulk.save(sink, &stop(), &Quiet, || *released = true, |saved| *settled = Some(saved));
    (saved, told)
}

/// Checks that the sink has chunks of the memory, and not the one that failed.
fn assert_taken(sink: &TestSink, hashes: &[ChunkId]) {
    let taken = sink.taken();
    assert!(taken.len() < hashes.len() && taken.iter().all(|id| hashes.contains(id)));
    assert_eq!(taken.len(), sink.puts() - 1);
}

#[test]
fn a_sink_that_takes_all_has_each_chunk_once() {
    let (mut bulk, mut hashes) = hashed(1);
    let sink = TestSink::default();
    let (saved, told) = save(&mut bulk, &sink);
    assert_eq!(saved.unwrap().concat(), hashes);
    assert_eq!(told, Told { released: true, settled: Some(true) });
    let mut taken = sink.taken();
    taken.sort_unstable();
    hashes.sort_unstable();
    assert_eq!(taken, hashes);
    assert_eq!(Box::new(sink).finish().unwrap().chunks, CHUNKS as u64);
}

#[test]
fn a_put_that_fails_while_the_memory_stands_still_keeps_the_programs_from_going_on() {
    for bounce in [false, true] {
        for number in 0..CHUNKS {
            let (mut bulk, hashes) = hashed(1);
            if bounce {
                bulk.prepare_bounce(u64::MAX);
            }
            let step = Step::Put(number);
            let sink = TestSink::failing(step);
            let (saved, told) = save(&mut bulk, &sink);
            assert_failed(saved, step);
            assert_eq!(told, Told::default());
            assert_taken(&sink, &hashes);
        }
    }
}

#[test]
fn a_put_that_fails_while_the_programs_run_leaves_none_of_their_calls_waiting() {
    for number in 0..CHUNKS {
        let (mut bulk, hashes) = hashed(1);
        let PutOff { shared, mut files, chunks } = bulk.defer(1).unwrap();
        assert_eq!(chunks, CHUNKS as u64);
        let file = files.remove(0).expect("the program has a table");
        let table = Table::open(&file, shared.ranges(0).to_vec()).unwrap();
        let step = Step::Put(number);
        let sink = TestSink::failing(step);
        let (saved, told) = std::thread::scope(|scope| {
            for chunk in 0..CHUNKS {
                let table = &table;
                // The thread waits as a call of the program does. The scope ends when each of them goes on.
                scope.spawn(move || {
                    table.chunks(0).want(chunk);
                    table.chunks(0).wait(chunk);
                });
            }
            save(&mut bulk, &sink)
        });
        assert_failed(saved, step);
        assert_eq!(told, Told { released: true, settled: Some(false) });
        assert!(bulk.missed.is_empty(), "nothing was written too early");
        assert_taken(&sink, &hashes);
    }
}

#[test]
fn a_put_of_a_shadow_that_fails_fails_the_dump() {
    for number in 0..CHUNKS {
        let (mut bulk, hashes) = hashed(1);
        assert!(bulk.shadow(None).unwrap() > 0);
        let step = Step::Put(number);
        let sink = TestSink::failing(step);
        let (saved, told) = save(&mut bulk, &sink);
        assert_failed(saved, step);
        assert_eq!(told, Told { released: true, settled: Some(true) });
        assert_taken(&sink, &hashes);
    }
}

#[test]
fn what_was_copied_ahead_counts_for_nothing_if_a_put_fails() {
    let not_yet = AtomicBool::new(false);
    for number in 0..CHUNKS {
        let (mut bulk, hashes) = hashed(2);
        let left = bulk.left();
        let step = Step::Put(number);
        let sink = TestSink::failing(step);
        assert_eq!(bulk.worth_copying(&sink), left, "it has nothing yet");
        let copied = bulk.copy_some(&not_yet, &sink, &stop(), &Quiet);
        assert_failed(copied, step);
        assert_taken(&sink, &hashes);
        assert_eq!(bulk.left(), left, "all of it is still to be saved");
        // Only what another sink says that it has need not be copied.
        let other = TestSink::default();
        assert_eq!(bulk.copy_some(&not_yet, &other, &stop(), &Quiet).unwrap(), CHUNKS);
        assert_eq!(bulk.left(), 0);
    }
}

#[test]
fn a_sink_that_has_failed_does_not_finish() {
    for step in [Step::Put(1), Step::Finish] {
        let (mut bulk, _) = hashed(1);
        let sink = TestSink::failing(step);
        let (saved, _) = save(&mut bulk, &sink);
        assert_eq!(saved.is_ok(), step == Step::Finish);
        assert!(Box::new(sink).finish().is_err());
    }
}
