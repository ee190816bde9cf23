//! What happened when in a dump: recorded as it goes on, written as a trace, drawn as a page.
//!
//! The file is in the Trace Event Format, JSON object form
//! (<https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>): `X` events with a
//! begin and a length, `i` events for what has only a moment, `C` events with the value of a counter, `M`
//! events with the names of the tracks. Perfetto and chrome://tracing open it; [`Trace::read`] reads it
//! back for [`page`].

mod page;
#[cfg(test)]
mod tests;
mod trace;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use page::page;
pub use trace::{BadTrace, Fact, Mark, Misspeculation, Slice, Trace};

/// A counter is written once in this time at most.
const GRAIN: Duration = Duration::from_millis(1);

/// A row of the timeline; what the rows show goes on concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The phases of the dump, one after the other.
    Phases,
    /// When the program was stopped.
    Program,
    /// The passes of the pre-copy.
    Passes,
    /// When device memory was hashed where it is.
    HashPasses,
    /// What had changed after it was copied.
    Misspeculations,
    /// Calls of the program that waited for memory that was being saved.
    Blocked,
    /// The passes over host memory.
    HostPasses,
    /// The phases of the destination of a migration.
    There,
    /// The phases of the restore there.
    RestoreThere,
    /// Copies from the device of this number, in the order in which gpucr uses them.
    Copies(usize),
}

impl Track {
    fn name(self) -> String {
        match self {
            Self::Phases => "phases".into(),
            Self::Program => "program".into(),
            Self::Passes => "pre-copy".into(),
            Self::HashPasses => "hash passes".into(),
            Self::Misspeculations => "misspeculations".into(),
            Self::Blocked => "calls blocked".into(),
            Self::HostPasses => "host memory".into(),
            Self::There => "destination".into(),
            Self::RestoreThere => "restore there".into(),
            Self::Copies(lane) => format!("copies {lane}"),
        }
    }

    /// Its thread in the trace; tracks are shown in this order.
    fn number(self) -> u32 {
        match self {
            Self::Phases => 1,
            Self::Program => 2,
            Self::Passes => 3,
            Self::HashPasses => 4,
            Self::Misspeculations => 5,
            Self::Blocked => 6,
            Self::HostPasses => 7,
            Self::There => 8,
            Self::RestoreThere => 9,
            Self::Copies(lane) => 10 + lane as u32,
        }
    }
}

/// A number that only grows during a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// Bytes that were copied from devices, those copied again too.
    Copied,
    /// Bytes of the chunks whose hash differs from that of the hash pass before.
    Changed,
}

impl Counter {
    const ALL: [Self; 2] = [Self::Copied, Self::Changed];

    fn name(self) -> &'static str {
        match self {
            Self::Copied => "bytes copied",
            Self::Changed => "bytes found changed",
        }
    }
}

/// A recorder, or none: then everything here costs one check of an option. Clones record into one.
#[derive(Debug, Clone, Default)]
pub struct Timeline(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    start: Instant,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    slices: Vec<Recording>,
    marks: Vec<(Duration, Misspeculation)>,
    values: Vec<(Counter, Duration, u64)>,
    counters: [Counted; 2],
}

#[derive(Debug)]
struct Recording {
    track: Track,
    name: Cow<'static, str>,
    begin: Duration,
    length: Duration,
    bytes: Option<u64>,
}

#[derive(Debug, Default)]
struct Counted {
    value: u64,
    /// When it last grew.
    at: Duration,
    /// When it was last written.
    written: Option<Duration>,
}

/// Something that goes on; it ends when this is dropped.
#[must_use]
#[derive(Debug)]
pub struct OpenSlice {
    timeline: Timeline,
    track: Track,
    name: Cow<'static, str>,
    since: Option<Instant>,
    bytes: Option<u64>,
}

impl Timeline {
    /// Records from now on.
    pub fn recording() -> Self {
        let recorded = Mutex::new(Recorded::default());
        Self(Some(Arc::new(Inner { start: Instant::now(), recorded })))
    }

    /// Begins something. `name` is asked for only where it is recorded.
    pub fn begin<N: Into<Cow<'static, str>>>(
        &self,
        track: Track,
        name: impl FnOnce() -> N,
    ) -> OpenSlice {
        let since = self.0.as_ref().map(|_| Instant::now());
        let name = since.map_or(Cow::Borrowed(""), |_| name().into());
        OpenSlice { timeline: self.clone(), track, name, since, bytes: None }
    }

    /// Something that went on from `since` for `length`.
    pub fn lasted(
        &self,
        track: Track,
        name: impl Into<Cow<'static, str>>,
        since: Instant,
        length: Duration,
    ) {
        self.record(track, name.into(), since, length, None);
    }

    fn record(
        &self,
        track: Track,
        name: Cow<'static, str>,
        since: Instant,
        length: Duration,
        bytes: Option<u64>,
    ) {
        let Some(inner) = &self.0 else { return };
        let begin = since.saturating_duration_since(inner.start);
        let slice = Recording { track, name, begin, length, bytes };
        inner.recorded.lock().slices.push(slice);
    }

    /// What was found at that moment to have changed after it was copied.
    pub fn mark(&self, at: Instant, found: &[Misspeculation]) {
        let Some(inner) = &self.0 else { return };
        let at = at.saturating_duration_since(inner.start);
        inner.recorded.lock().marks.extend(found.iter().map(|one| (at, one.clone())));
    }

    /// Adds to a counter.
    pub fn add(&self, counter: Counter, more: u64) {
        let Some(inner) = &self.0 else { return };
        let mut recorded = inner.recorded.lock();
        // Under the lock, so that values and times grow together.
        let now = inner.start.elapsed();
        let counted = &mut recorded.counters[counter as usize];
        counted.value += more;
        counted.at = now;
        if counted.written.is_none_or(|written| now - written >= GRAIN) {
            counted.written = Some(now);
            let value = counted.value;
            recorded.values.push((counter, now, value));
        }
    }

    /// Everything that was recorded, up to now. None if nothing is.
    pub fn trace(&self) -> Option<Trace> {
        let inner = self.0.as_ref()?;
        let recorded = inner.recorded.lock();
        let end = inner.start.elapsed();
        let mut tracks: Vec<Track> = recorded.slices.iter().map(|slice| slice.track).collect();
        tracks.extend(recorded.marks.first().map(|_| Track::Misspeculations));
        tracks.sort_unstable();
        tracks.dedup();
        let slices = recorded.slices.iter().map(|slice| Slice {
            track: slice.track.name(),
            name: slice.name.to_string(),
            begin: slice.begin,
            length: slice.length,
            bytes: slice.bytes,
        });
        let marks = recorded.marks.iter().map(|(at, misspeculation)| Mark {
            track: Track::Misspeculations.name(),
            at: *at,
            misspeculation: misspeculation.clone(),
        });
        let counters = Counter::ALL.map(|counter| {
            let of = recorded.values.iter().filter(|(other, ..)| *other == counter);
            let mut points: Vec<_> = of.map(|&(_, at, value)| (at, value)).collect();
            let counted = &recorded.counters[counter as usize];
            points.push((counted.at, counted.value));
            points.push((end, counted.value));
            (counter.name().to_owned(), points)
        });
        Some(Trace {
            about: Vec::new(),
            tracks: tracks.iter().map(|track| (track.number(), track.name())).collect(),
            slices: slices.collect(),
            marks: marks.collect(),
            counters: counters.into(),
            total: end,
        })
    }
}

impl OpenSlice {
    /// Says how many bytes the slice is about: copied by a copy, found changed by a hash pass.
    pub fn set_bytes(&mut self, bytes: u64) {
        self.bytes = Some(bytes);
    }
}

impl Drop for OpenSlice {
    fn drop(&mut self) {
        if let Some(since) = self.since {
            let name = std::mem::take(&mut self.name);
            self.timeline.record(self.track, name, since, since.elapsed(), self.bytes);
        }
    }
}
