//! Copying out and in on the software driver.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::span::spans_on;
use super::transfer::{Slot, Work};
use super::turns::consumers;
use super::*;
use crate::base::cores::Cores;
use crate::base::stop::Stop;
use crate::image::DriverKind;
use crate::store::{ChunkId, MAX_CHUNK, StoreError};

/// The software driver, as the workspace's build has left it near the test.
pub(crate) fn soft_driver() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors()
        .map(|dir| dir.join(crate::image::library::SOFT_DRIVER))
        .find(|path| path.is_file())
        .expect("libsoftcuda.so is not built: run `cargo xtask test`")
}

const CHUNKS: usize = 24;

/// The software driver, opened.
pub(crate) fn opened_soft_driver() -> Arc<Driver> {
    let library = HostDriver::vouched(&soft_driver(), DriverKind::Soft).unwrap();
    Arc::new(Driver::open(&Arc::new(library)).unwrap())
}

/// A lane, and memory on its device in which each chunk holds other bytes.
fn filled(workers: usize) -> (Lane, Vec<SharedBlock>, Vec<Span>) {
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let mut lane = Lane::prepare(&driver, &device, workers).unwrap();
    let len = (CHUNKS * MAX_CHUNK / 2) as u64;
    let blocks: Vec<_> =
        (0..2).map(|_| SharedBlock::allocate(lane.context(), len).unwrap()).collect();
    let work = spans_on(&blocks, &device.uuid);
    assert_eq!(work.len(), CHUNKS);
    let give = |span: Span, to: &mut [u8]| -> Result<Filled, StoreError> {
        to.copy_from_slice(&content(span));
        Ok(Filled::Bytes)
    };
    lane.copy_in(&work, &stop(), &give).unwrap();
    (lane, blocks, work)
}

fn content(span: Span) -> Vec<u8> {
    let mut bytes = vec![0; span.len];
    let seed = [(span.block * CHUNKS + span.chunk) as u8; 32];
    blake3::Hasher::new_keyed(&seed).finalize_xof().fill(&mut bytes);
    bytes
}

fn stop() -> Stop {
    Stop::new(Arc::new(AtomicBool::new(false)))
}

fn place(span: Span) -> (usize, usize) {
    (span.block, span.chunk)
}

#[test]
fn what_is_copied_out_is_named_by_its_hash() {
    let (mut lane, _blocks, work) = filled(3);
    // With room for all at once, and for one chunk.
    for bulk in [u64::MAX, 2 * MAX_CHUNK as u64] {
        lane.prepare_bounce(bulk).unwrap();
        let taken = Mutex::new(BTreeMap::new());
        let take = |span: Span, bytes: &[u8], id: Option<ChunkId>| -> Result<(), StoreError> {
            assert!(bytes == content(span), "{span:?}");
            assert_eq!(id, Some(ChunkId::of(bytes)));
            assert!(taken.lock().insert(place(span), ()).is_none(), "{span:?} came twice");
            Ok(())
        };
        lane.copy_out(&work, &stop(), &take).unwrap();
        assert!(taken.into_inner().into_keys().eq(work.iter().map(|span| place(*span))));
    }
}

#[test]
fn a_failure_ends_a_copy_and_leaves_nobody_waiting() {
    let (mut lane, _blocks, work) = filled(2);
    for bulk in [u64::MAX, 2 * MAX_CHUNK as u64] {
        lane.prepare_bounce(bulk).unwrap();
        let seen = AtomicUsize::new(0);
        let take = |_: Span, _: &[u8], _: Option<ChunkId>| {
            if seen.fetch_add(1, Ordering::Relaxed) == 5 { Err("full") } else { Ok(()) }
        };
        let stop = stop();
        let result = lane.copy_out(&work, &stop, &take);
        assert!(matches!(result, Err(TransferError::Chunk("full"))), "{result:?}");
        assert!(stop.is_set());
        assert!(seen.into_inner() < CHUNKS);
    }
}

/// What a hasher of the lane finds in each span, by its place, and with which key.
fn looked_at(lane: &Lane, work: &[Span]) -> (Arc<Key>, BTreeMap<(usize, usize), Hashed>) {
    let mut hasher = Hasher::prepare(lane.context()).unwrap();
    let places: Vec<_> = work.iter().map(|span| (span.address, span.len)).collect();
    let found = work.iter().map(|span| place(*span)).zip(hasher.hash(&places).unwrap()).collect();
    (hasher.key().clone(), found)
}

/// Chunks that follow each other are copied at once: all of a block, some, and none.
#[test]
fn what_is_copied_ahead_is_named_by_what_it_is() {
    for workers in [1, 2, 3, 5] {
        let (mut lane, _blocks, work) = filled(workers);
        lane.prepare_bounce(u64::MAX).unwrap();
        let has_changed = |span: &Span| span.chunk.is_multiple_of(3);
        let with_gaps = work.iter().copied().filter(|span| !span.chunk.is_multiple_of(5)).collect();
        let backwards = work.iter().copied().rev().collect();
        let mut short = work.clone();
        let unchanged = short.iter_mut().filter(|span| !has_changed(span));
        unchanged.step_by(3).for_each(|span| span.len -= 1000);
        let mut across_blocks = work.clone();
        across_blocks.sort_by_key(|span| (span.chunk, span.block ^ (span.chunk & 1)));
        across_blocks.retain(|span| span.block == span.chunk & 1);
        for work in [work, with_gaps, backwards, short, across_blocks] {
            ahead(&mut lane, &work, has_changed);
        }
    }
}

/// Copies these ahead, of which some change at their end after they were looked at, and back again later.
fn ahead(lane: &mut Lane, work: &[Span], has_changed: impl Fn(&Span) -> bool + Sync) {
    let (key, hashed) = looked_at(lane, work);
    let stream = Stream::create(lane.context()).unwrap();
    let change = |by: u8| {
        for span in work.iter().filter(|span| has_changed(span)) {
            let byte = content(*span)[span.len - 1] ^ by;
            stream.fill(span.address + span.len as u64 - 1, byte, 1).unwrap();
        }
        stream.synchronize().unwrap();
    };
    change(0xff);
    let known = |span: &Span| hashed[&place(*span)];
    let not_yet = AtomicBool::new(false);
    let seen = Mutex::new(BTreeMap::new());
    let take = |span: Span, bytes: &[u8], id: ChunkId| -> Result<(), StoreError> {
        assert_eq!(id, ChunkId::of(bytes), "{span:?}");
        assert_eq!(bytes != content(span), has_changed(&span), "{span:?}");
        assert!(seen.lock().insert(place(span), ()).is_none(), "{span:?} came twice");
        Ok(())
    };
    lane.copy_ahead(work, &key, &known, &not_yet, &stop(), &take).unwrap();
    assert_eq!(seen.into_inner().len(), work.len());
    change(0);
}

/// Chunks of a block that follow each other, with the buffers of so many workers.
fn straight(workers: usize) -> (Stream, Vec<[Slot; 2]>, SharedBlock, Vec<Span>) {
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let context = Context::create(&driver, &device).unwrap();
    let block = SharedBlock::allocate(&context, (CHUNKS * MAX_CHUNK) as u64).unwrap();
    let work = (0..CHUNKS).map(|chunk| Span::of(&block, 0, chunk)).collect();
    let mut row = Staging::allocate_row(&context, MAX_CHUNK, 2 * workers).unwrap().into_iter();
    let mut slot = || {
        let event = Event::create(&context).unwrap();
        Slot { staging: row.next().unwrap(), event }
    };
    let workers = (0..workers).map(|_| [slot(), slot()]).collect();
    (Stream::create(&context).unwrap(), workers, block, work)
}

#[test]
fn the_submitter_has_a_cpu_where_many_take() {
    let of = |threads: [usize; 9]| threads.map(consumers);
    assert_eq!(of([1, 2, 3, 5, 6, 7, 14, 16, 64]), [1, 2, 3, 5, 5, 6, 13, 15, 63]);
}

#[test]
fn staging_memory_is_zeros_where_huge_pages_begin() {
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let context = Context::create(&driver, &device).unwrap();
    let gone = Staging::allocate(&context, 3 * MAX_CHUNK).unwrap();
    let mut row = Staging::allocate_row(&context, MAX_CHUNK, 3).unwrap();
    let mut small = Staging::allocate(&context, 1001).unwrap();
    drop(gone);
    for buffer in &mut row {
        assert!(buffer.bytes().as_ptr().addr().is_multiple_of(MAX_CHUNK));
        assert_eq!(buffer.bytes(), vec![0; MAX_CHUNK]);
        buffer.bytes_mut().fill(1);
    }
    assert_eq!(small.bytes(), [0; 1001]);
    small.bytes_mut().fill(2);
    let last = row.pop().unwrap();
    drop(row);
    assert_eq!(last.bytes(), vec![1; MAX_CHUNK], "as long as one of them is left");
}

/// None of the others waits for it without end.
#[test]
fn a_straight_copy_ends_where_a_thread_cannot_begin() {
    let error = DriverError { function: "cuCtxSetCurrent", code: 999, name: "none".to_owned() };
    for (workers, consumers) in [(1, 1), (2, 2), (5, 3), (5, 5)] {
        let (stream, mut workers, _block, work) = straight(workers);
        // The submitter and the consumers: each of them, and all.
        for which in (0..=consumers).map(Some).chain([None]) {
            let (begun, stop) = (AtomicUsize::new(0), stop());
            let queue = Raced { work: &work, next: AtomicUsize::new(0) };
            let begin = || {
                let number = begun.fetch_add(1, Ordering::Relaxed);
                if which.is_none_or(|which| which == number) {
                    return Err(error.clone());
                }
                stream.context().enter()
            };
            let take = |_: Span, _: &[u8], _| -> Result<(), StoreError> { Ok(()) };
            let work = Work { queue: &queue, stop: &stop, stream: &stream, free_cpus: None };
            let enough = AtomicBool::new(false);
            let result = turns::copy_out(&mut workers, consumers, begin, &work, &enough, &take);
            assert!(matches!(&result, Err(TransferError::Driver(found)) if *found == error));
            assert!(stop.is_set());
            stream.synchronize().unwrap();
        }
    }
}

#[test]
fn a_panic_in_a_straight_copy_gets_out() {
    for (workers, consumers) in [(1, 1), (2, 2), (5, 3), (5, 5)] {
        let (stream, mut workers, _block, work) = straight(workers);
        let stop = stop();
        let queue = Raced { work: &work, next: AtomicUsize::new(0) };
        let take = |span: Span, _: &[u8], _| -> Result<(), StoreError> {
            assert!(span.chunk < 4, "as it is meant to be");
            Ok(())
        };
        let work = Work { queue: &queue, stop: &stop, stream: &stream, free_cpus: None };
        let enough = AtomicBool::new(false);
        let begin = || stream.context().enter();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            turns::copy_out(&mut workers, consumers, begin, &work, &enough, &take)
        }));
        assert!(panicked.is_err() && stop.is_set());
        stream.synchronize().unwrap();
    }
}

#[test]
fn only_what_follows_in_memory_and_in_the_block_is_copied_at_once() {
    let span = |block, chunk, address, len| Span { block, chunk, address, len };
    let first = span(0, 0, 1000, 10);
    assert!(first.is_before(&span(0, 1, 1010, 5)));
    assert!(!first.is_before(&span(1, 1, 1010, 10)), "of another block");
    assert!(!first.is_before(&span(0, 2, 1010, 10)), "another chunk");
    assert!(!first.is_before(&span(0, 1, 1020, 10)), "elsewhere");
}

/// The host looks at some, and at all that seem to have changed.
#[test]
fn a_device_that_hashes_wrongly_is_found_out() {
    let (mut lane, _blocks, work) = filled(2);
    let (key, hashed) = looked_at(&lane, &work);
    let known = |span: &Span| hashed[&place(*span)];
    let not_yet = AtomicBool::new(false);
    let take = |_: Span, _: &[u8], _: ChunkId| -> Result<(), StoreError> { Ok(()) };
    let wrong_hash = |span: &Span| Hashed { id: ChunkId::of(b"another"), ..known(span) };
    let result = lane.copy_ahead(&work, &key, &wrong_hash, &not_yet, &stop(), &take);
    assert!(matches!(result, Err(TransferError::Altered)), "{result:?}");
    let wrong_sum = |span: &Span| Hashed { sum: known(span).sum + 1, ..known(span) };
    let result = lane.copy_ahead(&work, &key, &wrong_sum, &not_yet, &stop(), &take);
    assert!(matches!(result, Err(TransferError::Altered)), "{result:?}");
}

#[test]
fn a_copy_ahead_ends_with_a_failure_or_when_it_is_enough() {
    for workers in [1, 2, 4] {
        let (mut lane, _blocks, work) = filled(workers);
        let (key, hashed) = looked_at(&lane, &work);
        let known = |span: &Span| hashed[&place(*span)];
        let taken = AtomicUsize::new(0);
        let fails = |_: Span, _: &[u8], _: ChunkId| {
            if taken.fetch_add(1, Ordering::Relaxed) == 5 { Err("full") } else { Ok(()) }
        };
        let failed = stop();
        let not_yet = AtomicBool::new(false);
        let result = lane.copy_ahead(&work, &key, &known, &not_yet, &failed, &fails);
        assert!(matches!(result, Err(TransferError::Chunk("full"))), "{result:?}");
        assert!(failed.is_set() && taken.into_inner() < CHUNKS);

        let taken = AtomicUsize::new(0);
        let take = |_: Span, _: &[u8], _: ChunkId| -> Result<(), StoreError> {
            taken.fetch_add(1, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let enough = AtomicBool::new(true);
        lane.copy_ahead(&work, &key, &known, &enough, &stop(), &take).unwrap();
        assert!((1..CHUNKS).contains(&taken.into_inner()), "some, but not all");
    }
}

/// Spans of which some were written to while they were copied.
struct Raced<'a> {
    work: &'a [Span],
    next: AtomicUsize,
}

impl Queue for Raced<'_> {
    fn next(&self) -> Option<Span> {
        self.work.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    fn arrived(&self, span: &Span) -> bool {
        !span.chunk.is_multiple_of(3)
    }

    fn is_urgent(&self) -> bool {
        true
    }
}

#[test]
fn what_was_written_meanwhile_is_not_taken() {
    let (mut lane, _blocks, work) = filled(2);
    for bounce in [false, true] {
        if bounce {
            lane.prepare_bounce(6 * MAX_CHUNK as u64).unwrap();
        }
        let taken = AtomicUsize::new(0);
        let take = |span: Span, bytes: &[u8], _: Option<ChunkId>| -> Result<(), StoreError> {
            assert!(!span.chunk.is_multiple_of(3) && bytes == content(span));
            taken.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let queue = Raced { work: &work, next: AtomicUsize::new(0) };
        lane.copy_queue(&queue, &stop(), &take).unwrap();
        let expected = work.iter().filter(|span| !span.chunk.is_multiple_of(3)).count();
        assert_eq!(taken.into_inner(), expected);
    }
}

/// The calling thread runs on this CPU, and may run nowhere else.
fn assert_on(cpu: usize) {
    let own = rustix::thread::sched_getaffinity(None).unwrap();
    assert!(own.is_set(cpu) && own.count() == 1, "{own:?}, not {cpu}");
    assert_eq!(rustix::thread::sched_getcpu(), cpu);
}

/// Spans that are asked for on one CPU only.
struct On<'a> {
    cpu: usize,
    work: &'a [Span],
    next: AtomicUsize,
}

impl Queue for On<'_> {
    fn next(&self) -> Option<Span> {
        assert_on(self.cpu);
        self.work.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    fn arrived(&self, _: &Span) -> bool {
        true
    }
}

#[test]
fn who_copies_while_a_program_runs_uses_free_cpus_only() {
    let (mut lane, _blocks, work) = filled(4);
    let cores = Arc::new(Cores::leaving([]));
    let own = cores.own();
    lane.yield_cpus_to(Some(cores.clone()));
    for bounce in [false, true] {
        if bounce {
            lane.prepare_bounce(6 * MAX_CHUNK as u64).unwrap();
        }
        for cpu in [own[0], own[own.len() - 1]] {
            cores.leave([cpu]);
            let (threads, taken) = (Mutex::new(HashSet::new()), AtomicUsize::new(0));
            let take = |_: Span, _: &[u8], _: Option<ChunkId>| -> Result<(), StoreError> {
                assert_on(cpu);
                threads.lock().insert(std::thread::current().id());
                taken.fetch_add(1, Ordering::Relaxed);
                Ok(())
            };
            let queue = On { cpu, work: &work, next: AtomicUsize::new(0) };
            lane.copy_queue(&queue, &stop(), &take).unwrap();
            assert_eq!(taken.into_inner(), CHUNKS);
            assert!(threads.into_inner().len() <= cores.share(4));
        }
    }
    assert_eq!(Cores::leaving([]).own(), own, "of others nothing has changed");
}

#[test]
fn who_copies_while_a_program_runs_moves_when_it_does() {
    let (mut lane, _blocks, work) = filled(1);
    let cores = Arc::new(Cores::leaving([]));
    let own = cores.own();
    let (first, then) = (own[0], own[own.len() - 1]);
    cores.leave([first]);
    lane.yield_cpus_to(Some(cores.clone()));
    let taken = AtomicUsize::new(0);
    let take = |_: Span, _: &[u8], _: Option<ChunkId>| -> Result<(), StoreError> {
        let before = taken.fetch_add(1, Ordering::Relaxed);
        assert_on(if before <= CHUNKS / 2 { first } else { then });
        if before == CHUNKS / 2 {
            cores.leave([then]);
        }
        Ok(())
    };
    lane.copy_out(&work, &stop(), &take).unwrap();
    assert_eq!(taken.into_inner(), CHUNKS);
}

/// Spans, and on which CPUs they were asked for.
struct Seen<'a> {
    work: &'a [Span],
    next: AtomicUsize,
    cpus: Mutex<Vec<usize>>,
}

impl Queue for Seen<'_> {
    fn next(&self) -> Option<Span> {
        let cpu = rustix::thread::sched_getcpu();
        assert_on(cpu);
        self.cpus.lock().push(cpu);
        self.work.get(self.next.fetch_add(1, Ordering::Relaxed)).copied()
    }

    fn arrived(&self, _: &Span) -> bool {
        true
    }
}

/// The thread that asks for spans finds out itself where it may run; those that take them do it in `take`.
#[test]
fn the_submitter_of_a_straight_copy_moves_when_the_program_does() {
    let (stream, mut workers, _block, work) = straight(1);
    let cores = Cores::leaving([]);
    let own = cores.own();
    let (first, then) = (own[0], own[own.len() - 1]);
    cores.leave([first]);
    let (stop, taken) = (stop(), AtomicUsize::new(0));
    let take = |_: Span, _: &[u8], _| -> Result<(), StoreError> {
        if taken.fetch_add(1, Ordering::Relaxed) == CHUNKS / 2 {
            cores.leave([then]);
        }
        Ok(())
    };
    let begin = || {
        cores.stay_off();
        stream.context().enter()
    };
    let queue = Seen { work: &work, next: AtomicUsize::new(0), cpus: Mutex::default() };
    let work = Work { queue: &queue, stop: &stop, stream: &stream, free_cpus: Some(&cores) };
    turns::copy_out(&mut workers, 1, begin, &work, &AtomicBool::new(false), &take).unwrap();
    assert_eq!(taken.into_inner(), CHUNKS);
    let cpus = queue.cpus.into_inner();
    assert_eq!((cpus[0], cpus[cpus.len() - 1]), (first, then));
}

#[test]
fn memory_that_is_exported_is_closed_by_exec() {
    let (_lane, blocks, _) = filled(1);
    let fd = blocks[0].export().unwrap();
    assert!(rustix::io::fcntl_getfd(&fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
}
