//! A sink and a source for tests, which fail where they are told to and keep what was asked of them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::{ChunkId, ChunkSink, ChunkSource, Entry, Filled, Stats, StoreError, decode_stored};

/// A step of a transfer, of each kind counted from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Put(usize),
    Finish,
    GetUnchecked(usize),
    Get(usize),
}

/// The error of a step that was to fail.
fn failure(step: Step) -> StoreError {
    let source = std::io::Error::other("as it is meant to be");
    StoreError::Io { action: "do", path: PathBuf::from(format!("{step:?}")), source }
}

/// Whether an error is that of this step.
pub(crate) fn is_failure_of(step: Step, error: &StoreError) -> bool {
    matches!(error, StoreError::Io { path, .. } if path == Path::new(&format!("{step:?}")))
}

fn check(fails: Option<Step>, step: Step) -> Result<(), StoreError> {
    if fails == Some(step) { Err(failure(step)) } else { Ok(()) }
}

/// Keeps what it is given. One put fails, or the finish, which it does after a put that has failed, too.
#[derive(Default)]
pub(crate) struct TestSink {
    pub(crate) fails: Option<Step>,
    puts: AtomicUsize,
    broken: AtomicBool,
    taken: Mutex<Vec<ChunkId>>,
}

impl TestSink {
    pub(crate) fn failing(step: Step) -> Self {
        Self { fails: Some(step), ..Self::default() }
    }

    /// What it has taken, in this order.
    pub(crate) fn taken(&self) -> Vec<ChunkId> {
        self.taken.lock().clone()
    }

    /// How many chunks it was given.
    pub(crate) fn puts(&self) -> usize {
        self.puts.load(Ordering::SeqCst)
    }
}

impl ChunkSink for TestSink {
    fn contains(&self, id: &ChunkId) -> bool {
        self.taken.lock().contains(id)
    }

    fn put_hashed(&self, id: ChunkId, plain: &[u8]) -> Result<ChunkId, StoreError> {
        assert_eq!(id, ChunkId::of(plain), "named by what it is");
        let step = Step::Put(self.puts.fetch_add(1, Ordering::SeqCst));
        check(self.fails, step).inspect_err(|_| self.broken.store(true, Ordering::SeqCst))?;
        self.taken.lock().push(id);
        Ok(id)
    }

    fn put_stored(&self, entry: &Entry, stored: &[u8]) -> Result<(), StoreError> {
        let mut plain = Vec::new();
        decode_stored(entry, stored, &mut plain).expect("it was checked");
        self.put_hashed(entry.id, &plain).map(drop)
    }

    fn finish(self: Box<Self>) -> Result<Stats, StoreError> {
        check(self.fails, Step::Finish)?;
        if self.broken.into_inner() {
            return Err(StoreError::Incomplete { first: "a put".into() });
        }
        Ok(Stats { chunks: self.taken.into_inner().len() as u64, ..Stats::default() })
    }
}

/// Gives what it was filled with. Of chunks that are `altered` the bytes are wrong where nobody checks them.
#[derive(Default)]
pub(crate) struct TestSource {
    pub(crate) fails: Option<Step>,
    pub(crate) chunks: HashMap<ChunkId, Vec<u8>>,
    pub(crate) altered: Vec<ChunkId>,
    unchecked: AtomicUsize,
    checked: AtomicUsize,
    announced: Mutex<Vec<ChunkId>>,
}

impl TestSource {
    pub(crate) fn of(chunks: impl IntoIterator<Item = Vec<u8>>) -> Self {
        let chunks = chunks.into_iter().map(|bytes| (ChunkId::of(&bytes), bytes)).collect();
        Self { chunks, ..Self::default() }
    }

    /// How often it was asked for chunks that nobody checks, and for others.
    pub(crate) fn gets(&self) -> (usize, usize) {
        (self.unchecked.load(Ordering::SeqCst), self.checked.load(Ordering::SeqCst))
    }

    /// What it was told that it would be asked for, in this order.
    pub(crate) fn announced(&self) -> Vec<ChunkId> {
        self.announced.lock().clone()
    }

    fn copy(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        let bytes = self.chunks.get(id).ok_or(StoreError::UnknownChunk { id: *id })?;
        out.copy_from_slice(bytes);
        Ok(Filled::Bytes)
    }
}

impl ChunkSource for TestSource {
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        check(self.fails, Step::Get(self.checked.fetch_add(1, Ordering::SeqCst)))?;
        self.copy(id, out)
    }

    fn get_unchecked(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        check(self.fails, Step::GetUnchecked(self.unchecked.fetch_add(1, Ordering::SeqCst)))?;
        let filled = self.copy(id, out)?;
        if self.altered.contains(id) {
            out[0] ^= 1;
        }
        Ok(filled)
    }

    fn prefetch(&self, ids: &mut dyn Iterator<Item = ChunkId>) {
        self.announced.lock().extend(ids);
    }
}
