//! Memory that is saved while the programs run, and the calls that wait for it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use gpucr_wire::Table;
use gpucr_wire::chunks::Chunks;
use gpucr_wire::table::{Range, Wait};

use super::chunks::ProgramBlock;
use crate::cuda::{Queue, Span};

/// The memory that is saved while the programs run, as far as their shims need to know.
#[derive(Default)]
pub(crate) struct Deferred {
    /// The chunk table of each program, if it has such memory.
    tables: Vec<Option<Table>>,
    running: AtomicBool,
}

impl Deferred {
    /// Memory with these tables; no program runs yet.
    pub(super) fn new(tables: Vec<Option<Table>>) -> Self {
        Self { tables, running: AtomicBool::new(false) }
    }

    /// The ranges of a program's table.
    pub(crate) fn ranges(&self, program: usize) -> &[Range] {
        self.tables.get(program).and_then(Option::as_ref).map_or(&[], Table::ranges)
    }

    /// From now on programs may run, and what they write can be written too early.
    pub(crate) fn set_running(&self) {
        self.running.store(true, Ordering::SeqCst);
    }

    /// Whether programs may run.
    pub(super) fn is_running(&self) -> bool {
        self.running.load(Ordering::SeqCst)
    }

    /// Calls of all programs that were blocked, and for how long, added up.
    pub(crate) fn blocked(&self) -> (u64, Duration) {
        let headers = self.tables.iter().flatten().map(Table::header);
        let of = |header: &gpucr_wire::table::Header| {
            (header.blocked.load(Ordering::Relaxed), header.blocked_ns.load(Ordering::Relaxed))
        };
        let (blocked, ns) = headers.map(of).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        (blocked, Duration::from_nanos(ns))
    }

    /// The first waits of each program.
    pub(crate) fn waits(&self) -> Vec<Wait> {
        self.tables.iter().flatten().flat_map(|table| table.header().waits()).collect()
    }

    /// No call waits any more.
    pub(crate) fn end(&self) {
        self.tables.iter().flatten().for_each(Table::end);
    }

    /// How many chunks are not saved.
    pub(crate) fn left(&self) -> u64 {
        self.tables.iter().flatten().map(Table::left).sum()
    }

    /// Whether a call of a program waits for a chunk that is not saved.
    pub(crate) fn is_wanted(&self) -> bool {
        self.tables.iter().flatten().any(Table::is_wanted)
    }

    pub(super) fn chunks(&self, piece: &ProgramBlock) -> Option<Chunks<'_>> {
        Some(self.tables.get(piece.program)?.as_ref()?.chunks(piece.range?))
    }
}

/// The chunks that are saved after the programs go on.
pub(crate) struct PutOff {
    pub(crate) shared: Arc<Deferred>,
    /// The file of each program's chunk table, if it has one.
    pub(crate) files: Vec<Option<OwnedFd>>,
    pub(crate) chunks: u64,
}

/// The chunks of a lane that are saved while the programs run; first the ones that launches wait for.
pub(super) struct WantedFirst<'a> {
    deferred: &'a Deferred,
    pieces: &'a [ProgramBlock],
    /// The pieces of the lane that have such chunks.
    here: Vec<usize>,
    work: &'a [Span],
    next: AtomicUsize,
}

impl<'a> WantedFirst<'a> {
    /// The deferred chunks of `work`, which is of this lane.
    pub(super) fn new(
        deferred: &'a Deferred,
        pieces: &'a [ProgramBlock],
        lane: usize,
        work: &'a [Span],
    ) -> Self {
        let here = |at: &usize| pieces[*at].lane == lane && pieces[*at].range.is_some();
        let here = (0..pieces.len()).filter(here).collect();
        Self { deferred, pieces, here, work, next: AtomicUsize::new(0) }
    }
}

impl Queue for WantedFirst<'_> {
    fn next(&self) -> Option<Span> {
        for &at in &self.here {
            let piece = &self.pieces[at];
            if let Some(memory) = &piece.memory
                && let Some(chunk) = self.deferred.chunks(piece)?.claim_wanted()
            {
                return Some(Span::of(memory, at, chunk));
            }
        }
        loop {
            let span = *self.work.get(self.next.fetch_add(1, Ordering::Relaxed))?;
            // The chunk may have been given out earlier because it was wanted.
            if self.deferred.chunks(&self.pieces[span.block])?.claim(span.chunk) {
                return Some(span);
            }
        }
    }

    fn arrived(&self, span: &Span) -> bool {
        let chunks = self.deferred.chunks(&self.pieces[span.block]);
        chunks.is_some_and(|chunks| chunks.finish(span.chunk))
    }

    fn is_urgent(&self) -> bool {
        true
    }
}
