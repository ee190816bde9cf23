//! What a dump says at its end, for people.

use gpucr_core::dump::{Misspeculation, Options, Report, Target};
use gpucr_core::image::{Destination, Protocol};

use super::about::fate;
use super::args::{DumpArgs, ProtocolArg};
use crate::commands::{note_folded, say_folded};
use crate::display;

/// Says what a dump did.
pub(super) fn tell(args: &DumpArgs, options: &Options, report: &Report) {
    let fate = fate(options.leave_running, report);
    let shared = match options.target {
        Target::Image(Destination::Alone(_)) => String::new(),
        _ => format!(" ({} new)", display::bytes(report.new_bytes)),
    };
    say_folded!(
        2,
        "{}: {} of device memory, {} stored{shared}; stopped for {}, {} in all; process {} {fate}",
        report.image.display(),
        display::bytes(report.bulk_bytes),
        display::bytes(report.stored_bytes),
        display::time(report.stopped_ms),
        display::time(report.total_ms),
        report.pid,
    );
    let through = report.let_through.iter().filter(|process| process.launches > 0);
    let through: Vec<_> =
        through.map(|process| format!("{} of process {}", process.launches, process.pid)).collect();
    if !through.is_empty() {
        say_folded!(
            2,
            "launches let through so that all processes came to a halt: {}",
            through.join(", ")
        );
    }
    for one in &report.interrupted {
        say_folded!(
            2,
            "interrupted {}: kernel {} of process {}, {}",
            one.level.place(),
            display::kernel(&one.kernel),
            one.pid,
            one.standing(),
        );
    }
    if let Some(found) = &report.validation {
        say_folded!(
            2,
            "device memory: {} of {} copied while it ran, {} of them changed afterwards; {} copied while \
            it was stopped",
            report.precopied_chunks,
            display::counted(found.chunks, "chunk", "chunks"),
            found.misspeculated,
            found.recopied,
        );
        if let Some(line) = changes(&found.misspeculations) {
            say_folded!(2, "{line}");
        }
    }
    if let Some(host) = &report.host {
        say_folded!(
            2,
            "host memory: {} copied while it ran, of which {} had not changed when it was stopped; {} were read \
            then",
            display::bytes(host.ahead_bytes),
            display::bytes(host.kept_bytes),
            display::bytes(host.left_bytes),
        );
    }
    if let Some(late) = &report.deferral {
        say_folded!(
            2,
            "saved after it continued: {}, for which {} waited {} in all",
            display::counted(late.chunks, "chunk", "chunks"),
            display::counted(late.blocked, "call", "calls"),
            display::time(late.blocked_ms),
        );
        if late.misspeculated > 0 {
            say_folded!(
                2,
                "{} of them were written before they were saved, so the program was stopped again, and the image \
                is of that moment",
                late.misspeculated,
            );
        }
        if let Some(line) = changes(&late.misspeculations) {
            say_folded!(2, "{line}");
        }
    }
    if report.unneeded_bytes > 0 {
        say_folded!(
            2,
            "not needed: {} of stored copies of memory that changed afterwards",
            display::bytes(report.unneeded_bytes),
        );
    }
    let asked_ahead = matches!(args.protocol, ProtocolArg::Recopy | ProtocolArg::Cow);
    if asked_ahead && report.protocol == Protocol::Stop {
        note_folded!(
            "The memory could not be copied while the program ran: gpucr had no context of its own \
             on the device, or there was no memory to copy."
        );
    }
    if report.protocol == Protocol::Driver {
        note_folded!(
            "The program was not started with `gpucr run`, so the driver copied its memory, \
             at a fraction of the speed."
        );
    }
    if report.private_bytes > 0 {
        note_folded!(
            "The driver cannot share {} of device memory with another process, so its own checkpoint saved it, \
            at a fraction of the speed.",
            display::bytes(report.private_bytes),
        );
    }
    if report.copied == "inside" {
        note_folded!(
            "The device has no room for a second context, so the program copied its memory \
             itself, which is slower."
        );
    }
}

/// Where memory changed after it had been copied, and what may have written it.
fn changes(all: &[Misspeculation]) -> Option<String> {
    let named = |one: &Misspeculation| {
        let who = match one.suspects.as_slice() {
            [] => "an unknown writer".to_owned(),
            [name] => display::kernel(name),
            [name, rest @ ..] => format!("{} or {} others", display::kernel(name), rest.len()),
        };
        format!("{} at {:#x} by {who}", display::bytes(one.size), one.address)
    };
    let shown: Vec<String> = all.iter().take(3).map(named).collect();
    let rest = all.len().saturating_sub(shown.len());
    let more = if rest > 0 { format!("; and {rest} more") } else { String::new() };
    (!shown.is_empty()).then(|| format!("changed since: {}{more}", shown.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_named_in_one_line() {
        let one = |size, suspects: &[&str]| Misspeculation {
            pid: 1,
            address: 0x1000,
            size,
            suspects: suspects.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert_eq!(changes(&[]), None);
        let all = [one(2 << 20, &["_Z4copyPiPKi", "x", "y"]), one(512, &[]), one(1, &["k"])];
        let line = "changed since: 2.00 MiB at 0x1000 by copy or 2 others; 512 B at 0x1000 by an unknown writer; \
        1 B at 0x1000 by k";
        assert_eq!(changes(&all).as_deref(), Some(line));
        let four = [one(1, &[]), one(1, &[]), one(1, &[]), one(1, &[])];
        assert!(changes(&four).is_some_and(|line| line.ends_with("; and 1 more")));
    }
}
