//! What a timeline says of its dump, besides when what went on: where it was, and what came of it.

use std::time::SystemTime;

use gpucr_core::Failure;
use gpucr_core::dump::Report;
use gpucr_core::timeline::Fact;

use crate::display;

/// The host, the program, and what came of the dump.
pub(super) fn facts(pid: u32, leave_running: bool, outcome: &Result<Report, Failure>) -> Vec<Fact> {
    let mut facts = place(pid);
    match outcome {
        Ok(report) => facts.extend(totals(leave_running, report)),
        Err(error) => facts.push(Fact::new("failed", error.to_string())),
    }
    facts
}

/// Where the program is.
pub(crate) fn place(pid: u32) -> Vec<Fact> {
    let system = rustix::system::uname();
    let host = system.nodename().to_string_lossy();
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    vec![
        Fact::new("host", host),
        Fact::new("process", pid.to_string()),
        Fact::new("written", display::date(now.as_secs())),
    ]
}

/// What has become of the program.
pub(super) fn fate(leave_running: bool, report: &Report) -> &'static str {
    match (report.left_running, leave_running) {
        (true, _) => "was left running",
        (false, true) => "has ended",
        (false, false) => "was killed",
    }
}

/// What a dump came to.
fn totals(leave_running: bool, report: &Report) -> Vec<Fact> {
    let fate = fate(leave_running, report);
    let mut facts = vec![
        Fact::new("image", report.image.display().to_string()),
        Fact::new("image id", report.id.clone()),
        Fact::new("the program", fate),
        Fact::new("stopped for", display::time(report.stopped_ms)),
        Fact::new("whole dump", display::time(report.total_ms)),
        Fact::new("device memory", display::bytes(report.bulk_bytes)),
        Fact::new("size of the image", display::bytes(report.stored_bytes)),
        Fact::new("written of it", display::bytes(report.new_bytes)),
    ];
    if let Some(host) = &report.host {
        let bytes = host.ahead_bytes + host.left_bytes;
        facts.push(Fact::new("host memory read", display::bytes(bytes)));
    }
    facts
}
