//! `gpucr dump`.

mod args;
mod inside;
mod repeat;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use gpucr_core::Error;
use gpucr_core::dump::{self, CriuOptions, Lessons, Misspeculation, Options, Report};
use gpucr_core::image::{Destination, Protocol};
use gpucr_core::namespace;
use gpucr_core::timeline::Timeline;
use gpucr_core::trust::PrivateKey;
use serde_json::json;

pub(crate) use args::{DumpArgs, ProtocolArg};

use crate::commands::{Outcome, io_error, note, print_json, say};
use crate::events::Events;
use crate::failure::{CliError, FAILED, USAGE};
use crate::output::Output;
use crate::{display, escape, signals};

pub(crate) fn run(args: &DumpArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(|| {
        "gpucr could not wait for what it was at. The keeper settles the rest: the program runs on, and there \
         is no image, unless that was complete already."
            .into()
    });
    if args.inside.is_none()
        && let Some(inner) = namespace::inner_pid(args.pid)
    {
        return inside::run(args.pid, inner, &signals);
    }
    let options = options(args, signals.stop)?;
    let events = Events::open(args.events.as_deref())?;
    if let Some(interval) = args.every {
        return repeat::run(args, options, &events, interval);
    }
    // Better before the dump than after it.
    let timeline = args.timeline.as_deref().map(prepare_timeline).transpose()?;
    let outcome = dump(args, &options, &events);
    // Of a dump that failed too.
    let written = timeline.map_or(Ok(()), |output| {
        let trace = options.timeline.trace().map(|trace| trace.write()).unwrap_or_default();
        output.write(escape::escaped_json(&trace).as_bytes())
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
fn dump(
    args: &DumpArgs,
    options: &Options,
    events: &Events,
) -> Result<Report, gpucr_core::Failure> {
    let progress = events.following(display::progress(args.json));
    let mut outcome = dump::dump(options, &progress);
    events.say_failure(&outcome);
    if let Ok(report) = &mut outcome {
        // As the user knows it.
        report.pid = args.pid;
    }
    if let Ok(report) = &outcome {
        events.say("dumped", json!(report));
    }
    outcome
}

fn prepare_timeline(path: &Path) -> Result<Output, CliError> {
    Output::prepare(path).map_err(|source| {
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
    let sign = args.sign.as_deref().map(PrivateKey::read).transpose();
    let sign =
        sign.map_err(|error| CliError::from(Error::from(error)).state("Nothing was changed."))?;
    Ok(Options {
        pid: args.own_pid(),
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
        sign: sign.map(Arc::new),
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
        note!(
            "The memory could not be copied while the program ran: gpucr had no context of its own \
             on the device, or there was no memory to copy."
        );
    }
    if report.protocol == Protocol::Driver {
        note!(
            "The program was not started with `gpucr run`, so the driver copied its memory, \
             at a fraction of the speed."
        );
    }
    if report.private_bytes > 0 {
        eprintln!(
            "The driver cannot hand {} of device memory to another process, so its own checkpoint \
             saved it, at a fraction of the speed.",
            display::bytes(report.private_bytes),
        );
    }
    if report.copied == "inside" {
        note!(
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
        let default = || default_name(args.own_pid(), args.pid, SystemTime::now());
        let name = args.name.clone().unwrap_or_else(default);
        return Destination::Stored { store: store.clone(), name };
    }
    let path = args.image.clone().unwrap_or_else(|| PathBuf::from(format!("gpucr-{}", args.pid)));
    match &args.parent {
        Some(parent) => Destination::Incremental { path, parent: parent.clone() },
        None => Destination::Alone(path),
    }
}

/// A name that tells what was saved and when, to the millisecond, since a process may be dumped more than
/// once in a second: `train-20261121T083053.120Z-4242`. Here the process may have its `own` pid.
fn default_name(own: u32, pid: u32, now: SystemTime) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{own}/comm")).unwrap_or_default();
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
        let name = default_name(0, 0, now);
        assert_eq!(name, "process-20260921T141320.120Z-0");
        let own = default_name(std::process::id(), std::process::id(), now);
        assert!(own.ends_with(&format!("-20260921T141320.120Z-{}", std::process::id())), "{own}");
        assert!(!own.contains('/') && !own.starts_with('.'), "{own}");
    }
}
