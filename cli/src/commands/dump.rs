//! `gpucr dump`.

mod repeat;

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use gpucr_core::dump::{self, CriuOptions, Lessons, Misspeculation, Options, Report};
use gpucr_core::image::{Destination, Protocol};
use gpucr_core::timeline::Timeline;
use serde_json::json;

use crate::args::{DumpArgs, ProtocolArg};
use crate::commands::{io_error, print_json, say};
use crate::events::Events;
use crate::failure::{CliError, FAILED, USAGE};
use crate::{Outcome, display, signals};

pub(crate) fn run(args: &DumpArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let options = options(args, signals.stop)?;
    let events = Events::open(args.events.as_deref())?;
    if let Some(interval) = args.every {
        return repeat::run(args, options, &events, interval);
    }
    // Better before the dump than after it.
    let timeline = args.timeline.as_deref().map(create_timeline).transpose()?;
    let outcome = dump(&options, &events, args.json);
    // Of a dump that failed too.
    let written = timeline.map_or(Ok(()), |mut file| {
        let trace = options.timeline.trace().map(|trace| trace.write()).unwrap_or_default();
        file.write_all(trace.as_bytes())
    });
    let report = outcome?;
    if args.json {
        print_json(&report)?;
    } else {
        tell(args, &options, &report);
    }
    written.map_err(|source| {
        CliError::new(FAILED, format!("cannot write the timeline: {source}"))
            .state("The image is complete.")
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Dumps, and shows and tells what happens.
fn dump(options: &Options, events: &Events, json: bool) -> Result<Report, gpucr_core::Failure> {
    let progress = events.following(display::progress(json));
    let outcome = dump::dump(options, &progress);
    events.say_failure(&outcome);
    if let Ok(report) = &outcome {
        events.say("dumped", json!(report));
    }
    outcome
}

fn create_timeline(path: &Path) -> Result<File, CliError> {
    File::create(path).map_err(|source| {
        CliError::new(FAILED, format!("cannot write {}: {source}", path.display()))
            .state("Nothing was changed.")
    })
}

fn options(args: &DumpArgs, stop: Arc<AtomicBool>) -> Result<Options, CliError> {
    let leave_running = args.leave_running || args.every.is_some();
    let protocol = match args.protocol {
        ProtocolArg::Auto => None,
        ProtocolArg::Stop => Some(Protocol::Stop),
        ProtocolArg::Recopy => Some(Protocol::Recopy),
        ProtocolArg::Cow if !leave_running => {
            return Err(CliError::new(USAGE, "protocol cow is for a program that runs on")
                .help("add --leave-running, or use --protocol recopy"));
        }
        ProtocolArg::Cow => Some(Protocol::Cow),
    };
    Ok(Options {
        pid: args.pid,
        destination: destination(args),
        leave_running,
        protocol,
        shadow_memory: args.shadow_memory,
        timeout: args.timeout,
        compression: args.compress,
        shell_job: args.criu.shell_job,
        criu: CriuOptions {
            tcp_established: args.criu.tcp_established,
            tcp_close: args.criu.tcp_close,
            file_locks: args.criu.file_locks,
            ext_unix_sk: args.criu.ext_unix_sk,
            link_remap: args.criu.link_remap,
        },
        timeline: match args.timeline {
            Some(_) => Timeline::recording(),
            None => Timeline::default(),
        },
        lessons: Lessons::default(),
        stop,
    })
}

/// Says what a dump did.
fn tell(args: &DumpArgs, options: &Options, report: &Report) {
    let fate = if report.left_running { "runs on" } else { "was ended" };
    let shared = match options.destination {
        Destination::Alone(_) => String::new(),
        _ => format!(" ({} new)", display::bytes(report.new_bytes)),
    };
    say!(
        "{}: {} of device memory, {} stored{shared}; stopped for {}, {} in all; process {} {fate}",
        report.image.display(),
        display::bytes(report.bulk_bytes),
        display::bytes(report.stored_bytes),
        display::time(report.stopped_ms),
        display::time(report.total_ms),
        report.pid,
    );
    if let Some(found) = &report.validation {
        say!(
            "copied while it ran: {} of {} chunks; {} had changed since, and {} were copied again",
            report.precopied_chunks,
            found.chunks,
            found.misspeculated,
            found.recopied,
        );
        if let Some(line) = changes(&found.misspeculations) {
            say!("{line}");
        }
    }
    if let Some(late) = &report.deferral {
        say!(
            "saved while it ran on: {} chunks, for which {} calls waited {} in all",
            late.chunks,
            late.held,
            display::time(late.held_ms),
        );
        if late.misspeculated > 0 {
            say!(
                "{} of them were written before they were saved, so it was stopped a second time, and \
                 the image is of then",
                late.misspeculated,
            );
        }
        if let Some(line) = changes(&late.misspeculations) {
            say!("{line}");
        }
    }
    if report.unneeded_bytes > 0 {
        say!(
            "{} of what was stored is copies of memory that changed afterwards, and is not needed",
            display::bytes(report.unneeded_bytes),
        );
    }
    let asked_ahead = matches!(args.protocol, ProtocolArg::Recopy | ProtocolArg::Cow);
    if asked_ahead && report.protocol == Protocol::Stop {
        eprintln!(
            "The memory could not be copied while the program ran: gpucr had no context of its own \
             on the device, or there was no memory to copy."
        );
    }
    if report.protocol == Protocol::Driver {
        eprintln!(
            "The program was not started with `gpucr run`, so the driver copied its memory, \
             at a fraction of the speed."
        );
    }
    if report.copied == "inside" {
        eprintln!(
            "The device has no room for a second context, so the program copied its memory \
             itself, which is slower."
        );
    }
}

/// Where memory changed after it had been copied, and what may have written it.
fn changes(all: &[Misspeculation]) -> Option<String> {
    let named = |one: &Misspeculation| {
        let who = match one.suspects.as_slice() {
            [] => "nobody seen".to_owned(),
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

fn destination(args: &DumpArgs) -> Destination {
    if let Some(store) = &args.store {
        let name = args.name.clone().unwrap_or_else(|| default_name(args.pid, SystemTime::now()));
        return Destination::Stored { store: store.clone(), name };
    }
    let path = args.image.clone().unwrap_or_else(|| PathBuf::from(format!("gpucr-{}", args.pid)));
    match &args.parent {
        Some(parent) => Destination::Incremental { path, parent: parent.clone() },
        None => Destination::Alone(path),
    }
}

/// A name that tells what was saved and when, to the millisecond, since a process may be dumped more than
/// once in a second: `train-20261121T083053.120Z-4242`.
fn default_name(pid: u32, now: SystemTime) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let command: String = comm.trim().chars().map(|c| if fits(c) { c } else { '_' }).collect();
    let command = match command.trim_start_matches('.') {
        "" => "process",
        command => command,
    };
    let time = humantime::format_rfc3339_millis(now).to_string().replace(['-', ':'], "");
    format!("{command}-{time}-{pid}")
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
        let line = "changed since: 2.00 MiB at 0x1000 by copy or 2 others; 512 B at 0x1000 by nobody \
                    seen; 1 B at 0x1000 by k";
        assert_eq!(changes(&all).as_deref(), Some(line));
        let four = [one(1, &[]), one(1, &[]), one(1, &[]), one(1, &[])];
        assert!(changes(&four).is_some_and(|line| line.ends_with("; and 1 more")));
    }

    #[test]
    fn default_names_are_readable() {
        let now = std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_790_000_000_120);
        let name = default_name(0, now);
        assert_eq!(name, "process-20260921T141320.120Z-0");
        let own = default_name(std::process::id(), now);
        assert!(own.ends_with(&format!("-20260921T141320.120Z-{}", std::process::id())), "{own}");
        assert!(!own.contains('/') && !own.starts_with('.'), "{own}");
    }
}
