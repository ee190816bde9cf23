//! One dump.

use gpucr_core::dump::{self, Options, Report};
use serde_json::json;

use super::args::DumpArgs;
use crate::display;
use crate::events::Events;

/// Dumps, and shows and tells what happens.
pub(super) fn dump(
    args: &DumpArgs,
    options: &Options,
    events: &Events,
) -> Result<Report, gpucr_core::Failure> {
    let progress = events.following(display::progress(args.json));
    let mut outcome = dump::dump(options, &progress);
    events.say_failure(&outcome);
    if let Ok(report) = &mut outcome {
        // The pid as the user knows it.
        report.pid = args.pid;
    }
    if let Ok(report) = &outcome {
        events.say("dumped", json!(report));
    }
    outcome
}
