//! One dump.

use gpucr_core::dump::{self, Options, Report};
use serde_json::json;

use super::args::DumpArgs;
use crate::commands::inside::Outside;
use crate::display;
use crate::events::Events;
use crate::metrics::{Metrics, Value};
use crate::traces::{Done, Traces};
use std::time::Instant;

/// Dumps, and shows and tells what happens.
pub(super) fn dump(
    args: &DumpArgs,
    options: &Options,
    (events, outside): (&Events, Option<&Outside>),
    (metrics, traces): (&mut Metrics, &Traces),
) -> Result<Report, gpucr_core::Failure> {
    let begin = Instant::now();
    let progress = events.following(display::progress(args.json));
    let progress = match outside {
        Some(outside) => outside.following(options, progress),
        None => progress,
    };
    let mut outcome = dump::dump(options, &progress);
    events.say_failure(&outcome);
    if let Ok(report) = &mut outcome {
        // The pid as the user knows it.
        report.pid = args.pid;
    }
    match &outcome {
        Ok(report) => {
            events.say("dumped", json!(report));
            let (values, phases) = (&values(report), &report.phases[..]);
            metrics.done(values, phases);
            traces.tell(begin, Ok(Done { pid: report.pid, values, phases }));
        }
        Err(failure) => {
            metrics.failed();
            traces.tell(begin, Err(failure));
        }
    }
    outcome
}

/// What is measured of a dump.
fn values(report: &Report) -> [Value; 5] {
    [
        ("_stopped_seconds", "How long the program was stopped.", report.stopped_ms / 1000.0),
        ("_duration_seconds", "How long the dump took.", report.total_ms / 1000.0),
        ("_device_bytes", "Device memory that gpucr saved.", report.bulk_bytes as f64),
        ("_stored_bytes", "Bytes of the image, shared ones included.", report.stored_bytes as f64),
        ("_new_bytes", "Bytes that were written for it.", report.new_bytes as f64),
    ]
}
