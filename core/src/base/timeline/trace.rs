//! The trace: what a file says.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Memory that changed after it had been copied.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Misspeculation {
    /// The process.
    pub pid: u32,
    /// Where the allocation begins in the process, or the chunk, if no allocation is known there; 0 if
    /// the process does not see it.
    pub address: u64,
    /// Bytes of the allocation or chunk.
    pub size: u64,
    /// Kernels (mangled names) and operations launched since the copy that may write there. None if
    /// the change came by a way that launches do not show.
    pub suspects: Vec<String>,
}

/// Something about the whole, such as the host, in words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// What it is.
    pub name: String,
    /// What it comes to.
    pub value: String,
}

impl Fact {
    /// A fact in these words.
    pub fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self { name: name.into(), value: value.into() }
    }
}

/// Everything of a timeline.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    /// What is said of the whole.
    pub about: Vec<Fact>,
    /// The tracks by number, in which order they are shown.
    pub tracks: BTreeMap<u32, String>,
    /// What went on.
    pub slices: Vec<Slice>,
    /// What was found changed, and when.
    pub marks: Vec<Mark>,
    /// For each counter its name and its values with their times, which grow.
    pub counters: Vec<(String, Vec<(Duration, u64)>)>,
    /// How long all of it took.
    pub total: Duration,
}

/// Something that went on for a while.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// The name of its track.
    pub track: String,
    /// What it was.
    pub name: String,
    /// Since the start.
    pub begin: Duration,
    /// How long it took.
    pub length: Duration,
    /// Bytes that a copy copied, or that a hash pass found changed.
    pub bytes: Option<u64>,
}

/// Memory that was found to have changed after it was copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// The name of its track.
    pub track: String,
    /// Since the start.
    pub at: Duration,
    /// What the report of the dump says of it.
    pub misspeculation: Misspeculation,
}

impl Slice {
    /// Since the start.
    pub fn end(&self) -> Duration {
        self.begin + self.length
    }
}

/// Why a file is no timeline.
#[derive(Debug, thiserror::Error)]
pub enum BadTrace {
    /// No JSON, or none of a trace.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// A trace of something else, or one that cannot be.
    #[error("{0}")]
    Content(String),
}

/// The program that wrote the trace, as the file says.
const TOOL: &str = "gpucr dump";
/// Longer than any dump: a year.
const LONGEST: f64 = 366.0 * 86400.0 * 1e6;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    display_time_unit: String,
    other_data: About,
    trace_events: Vec<Event>,
}

#[derive(Serialize, Deserialize)]
struct About {
    tool: String,
    /// Microseconds.
    total: f64,
    /// Older files have none.
    #[serde(default)]
    about: Vec<Fact>,
}

#[derive(Serialize, Deserialize)]
struct Event {
    ph: char,
    name: String,
    pid: u32,
    tid: u32,
    /// Microseconds since the start.
    ts: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    /// How far a moment reaches; `t` is its track.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    s: Option<char>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    args: Option<Arguments>,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Arguments {
    Misspeculation(Misspeculation),
    Name { name: String },
    Value { value: u64 },
    Bytes { bytes: u64 },
}

fn microseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e9).round() / 1e3
}

fn duration(microseconds: f64) -> Result<Duration, BadTrace> {
    if (0.0..LONGEST).contains(&microseconds) {
        return Ok(Duration::from_nanos((microseconds * 1e3).round() as u64));
    }
    Err(BadTrace::Content(format!("a time of {microseconds} microseconds is impossible")))
}

impl Trace {
    /// The text of the file.
    pub fn write(&self) -> String {
        let event = |ph, name: &str, tid| Event {
            ph,
            name: name.to_owned(),
            pid: 1,
            tid,
            ts: 0.0,
            dur: None,
            s: None,
            args: None,
        };
        let named = |event, name: &str| Event {
            args: Some(Arguments::Name { name: name.to_owned() }),
            ..event
        };
        let number = |track: &str| {
            let found = self.tracks.iter().find(|(_, name)| *name == track);
            found.map_or(0, |(number, _)| *number)
        };
        let mut events = vec![named(event('M', "process_name", 0), TOOL)];
        for (&number, name) in &self.tracks {
            events.push(named(event('M', "thread_name", number), name));
        }
        for slice in &self.slices {
            events.push(Event {
                ts: microseconds(slice.begin),
                dur: Some(microseconds(slice.length)),
                args: slice.bytes.map(|bytes| Arguments::Bytes { bytes }),
                ..event('X', &slice.name, number(&slice.track))
            });
        }
        for mark in &self.marks {
            events.push(Event {
                ts: microseconds(mark.at),
                s: Some('t'),
                args: Some(Arguments::Misspeculation(mark.misspeculation.clone())),
                ..event('i', "misspeculation", number(&mark.track))
            });
        }
        for (name, points) in &self.counters {
            events.extend(points.iter().map(|&(at, value)| Event {
                ts: microseconds(at),
                args: Some(Arguments::Value { value }),
                ..event('C', name, 0)
            }));
        }
        let file = File {
            display_time_unit: "ms".into(),
            other_data: About {
                tool: TOOL.into(),
                total: microseconds(self.total),
                about: self.about.clone(),
            },
            trace_events: events,
        };
        serde_json::to_string(&file).expect("numbers and texts")
    }

    /// Reads what [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// If it is anything else: no JSON, a trace of another program, times that lie outside of the
    /// whole or counters that shrink.
    pub fn read(text: &str) -> Result<Self, BadTrace> {
        let file: File = serde_json::from_str(text)?;
        let bad = |what: String| Err(BadTrace::Content(what));
        if file.other_data.tool != TOOL {
            return bad(format!("it is the trace of `{}`, not of {TOOL}", file.other_data.tool));
        }
        let total = duration(file.other_data.total)?;
        let mut trace = Self {
            about: file.other_data.about,
            tracks: BTreeMap::new(),
            slices: Vec::new(),
            marks: Vec::new(),
            counters: Vec::new(),
            total,
        };
        for event in file.trace_events {
            let at = duration(event.ts)?;
            match (event.ph, event.dur, event.args) {
                ('M', _, Some(Arguments::Name { name })) => {
                    if event.name == "thread_name" {
                        trace.tracks.insert(event.tid, name);
                    }
                }
                ('X', Some(length), arguments) => {
                    let track = trace.track(&event.name, event.tid)?;
                    let bytes = match arguments {
                        Some(Arguments::Bytes { bytes }) => Some(bytes),
                        _ => None,
                    };
                    let length = duration(length)?;
                    // Times are rounded to a nanosecond.
                    if at + length > total + Duration::from_micros(1) {
                        return bad(format!("`{}` continues after the end", event.name));
                    }
                    trace.slices.push(Slice { track, name: event.name, begin: at, length, bytes });
                }
                ('i', _, Some(Arguments::Misspeculation(misspeculation))) => {
                    let track = trace.track(&event.name, event.tid)?;
                    if at > total {
                        return bad(format!("`{}` comes after the end", event.name));
                    }
                    trace.marks.push(Mark { track, at, misspeculation });
                }
                ('C', _, Some(Arguments::Value { value })) => {
                    let index = trace.counters.iter().position(|(name, _)| *name == event.name);
                    let index = index.unwrap_or_else(|| {
                        trace.counters.push((event.name.clone(), Vec::new()));
                        trace.counters.len() - 1
                    });
                    let points = &mut trace.counters[index].1;
                    let shrinks = |&(before, less): &(Duration, u64)| at < before || value < less;
                    if at > total || points.last().is_some_and(shrinks) {
                        return bad(format!("the counter `{}` goes back", event.name));
                    }
                    points.push((at, value));
                }
                (kind, ..) => return bad(format!("an event `{}` of kind {kind}", event.name)),
            }
        }
        Ok(trace)
    }

    /// The name of the track of an event.
    fn track(&self, event: &str, number: u32) -> Result<String, BadTrace> {
        let nameless = || BadTrace::Content(format!("`{event}` is on a track without a name"));
        self.tracks.get(&number).cloned().ok_or_else(nameless)
    }
}
