//! What a restore has in common whether it is made here or as the first process of a pid namespace.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_core::container;
use gpucr_core::file_tree::FileTree;
use gpucr_core::image::{Manifest, Stdio};
use gpucr_core::network::NetworkNamespace;
use gpucr_core::restore::{
    ChangedFile, FileFate, GoesOn, Moved, Options, OutputFiles, Outputs, Report,
};
use gpucr_core::sharing::Holder;
use gpucr_core::trust::Trust;
use gpucr_core::{Error, Failure, Progress, restore};
use serde_json::json;

use super::args::RestoreArgs;
use super::end::End;
use super::{hold, outputs};
use crate::commands::{io_error, key, note_folded};
use crate::display;
use crate::events::Events;
use crate::failure::{self, CliError, FAILED};
use crate::inherited;
use crate::metrics::{Metrics, Value};
use crate::output;
use crate::say::is_quiet;
use crate::signals::SignalPlan;
use crate::terminal::Kept;
use crate::traces::{Done, Traces};

/// What is said of a program that had a network namespace of its own, if none is named for it.
pub(super) const LEFT_NETWORK: &str = "At the dump the program was in a network namespace of its own. A restore uses \
     gpucr's network unless --netns PATH names another.";

/// What holds if gpucr cannot wait for what it is at, and ends.
pub(super) fn settled_by_watchdog() -> String {
    "gpucr could not wait for what it was at. The watchdog ends what had been made of the program; the image is as \
     it was."
        .into()
}

/// The process that is to hold memory which is shared.
pub(super) fn holder(args: &RestoreArgs) -> Result<Option<Holder>, CliError> {
    let failed = io_error("cannot start a process that holds shared memory");
    args.share.then(Holder::start).transpose().map_err(failed)
}

/// The program had a terminal, and a restore with these options has none to give to it; not if that is unknown. In a pid
/// namespace or a root directory of its own only a program that leads its session can have this command's.
pub(super) fn lacks_terminal(args: &RestoreArgs, options: &Options) -> Option<CliError> {
    let manifest = Manifest::read(&args.image).ok()?;
    // Of its other processes one may have a terminal that the program itself has made, as script(1) does.
    let mut streams = manifest.processes.first()?.stdio.iter();
    let path = streams.find_map(|stream| match stream {
        Stdio::Terminal { path, .. } => Some(path.display()),
        _ => None,
    })?;
    let leads_its_session = restore::leads_its_session(options) == Some(true);
    let here = if args.new_pids && !leads_its_session {
        "with --new-pids it would have none"
    } else if args.root.is_some() && !leads_its_session {
        "with --root it would have none"
    } else if Kept::now().is_none() {
        "this command has none"
    } else {
        return None;
    };
    let what = format!("the program had a terminal ({path}), and {here}");
    Some(CliError::new(FAILED, what).help(failure::for_terminal()))
}

/// By whom the restore is held back, if it is.
///
/// # Errors
/// The descriptor is none, or is named for something else too.
pub(super) fn held_by(args: &RestoreArgs) -> Result<Option<hold::HeldBy>, CliError> {
    // Each is taken over as the only owner of that descriptor.
    if args.hold.is_some() && args.hold == args.loaded {
        let what =
            "--hold and --loaded are for gpucr's own use: each needs a descriptor of its own";
        return Err(CliError::new(FAILED, what.to_owned()).state("Nothing was changed."));
    }
    hold::HeldBy::of(args).map_err(io_error("--hold is for gpucr's own use"))
}

/// The network namespace that the command line names, if it does. What is given as a descriptor is taken over.
///
/// # Errors
/// It names none.
pub(super) fn network(args: &RestoreArgs) -> Result<Option<NetworkNamespace>, CliError> {
    if let Some(fd) = args.network {
        let network = inherited::take(fd).and_then(NetworkNamespace::of_descriptor);
        return network.map(Some).map_err(io_error("--network is for gpucr's own use"));
    }
    args.netns.as_deref().map(network_at).transpose()
}

/// The network namespace that a user names.
///
/// # Errors
/// It is none.
pub(crate) fn network_at(path: &Path) -> Result<NetworkNamespace, CliError> {
    let found = NetworkNamespace::at(path).map_err(Error::from);
    found.map_err(|error| CliError::from(error).state("Nothing was changed."))
}

/// The root directory that the command line names for a program from a container, if it does.
///
/// # Errors
/// It is no directory, or cannot be found again by a gpucr that sees other processes.
pub(super) fn root(args: &RestoreArgs) -> Result<Option<FileTree>, CliError> {
    let named = args.root.as_ref().map(|path| container::named(path, &args.mount));
    let failed = |error| CliError::from(Error::from(error)).state("Nothing was changed.");
    named.transpose().map_err(failed)
}

/// Where the program's output goes.
///
/// # Errors
/// A file cannot be written.
pub(super) fn outputs(args: &RestoreArgs) -> Result<Outputs, CliError> {
    match &args.streams {
        // A terminal that they stand in for keeps the program from being detached.
        Some(streams) => streams.take().map_err(io_error("--streams is for gpucr's own use")),
        None => {
            let open = if args.dry_run { output::appendable } else { output::append };
            let (stdout, stderr) = (args.stdout.clone(), args.stderr.clone());
            outputs::open(&OutputFiles { stdout, stderr }, open)
        }
    }
}

/// Which images the command line takes.
///
/// # Errors
/// A key cannot be read.
pub(super) fn trust(args: &RestoreArgs) -> Result<Trust, CliError> {
    Ok(key::trust_with_policy(&args.trust)?)
}

/// What the command line asks of a restore, which is held back by another gpucr if one is given; but for the
/// [`network`] and the [`root`].
///
/// # Errors
/// A descriptor that gpucr is to give itself is not there.
pub(super) fn options(
    args: &RestoreArgs,
    (outputs, trust): (Outputs, Trust),
    held_by: Option<&hold::HeldBy>,
    share: Option<Holder>,
    signals: &SignalPlan,
    goes_on: GoesOn,
) -> Result<Options, CliError> {
    Ok(Options {
        outputs,
        image: args.image.clone(),
        trust,
        at_hand: Arc::default(),
        warm: !args.no_warm,
        detach: args.detach,
        before_resume: args.exec_before_resume.clone(),
        may_run: held_by
            .map(hold::HeldBy::may_run)
            .transpose()
            .map_err(io_error("--hold is for gpucr's own use"))?,
        given: args
            .loaded
            .map(hold::take_memory)
            .transpose()
            .map_err(io_error("--loaded is for gpucr's own use"))?,
        network: None,
        root: None,
        device_map: args.device_map.clone(),
        files: args.files.into(),
        on_demand: args.on_demand,
        share,
        goes_on: Some(goes_on),
        stop: signals.stop.clone(),
    })
}

/// What shows how far it is, and tells the events.
pub(super) fn progress(args: &RestoreArgs, events: &Events) -> Arc<dyn Progress> {
    events.following(display::progress(args.json))
}

/// Tells what a restore has come to, in the files that were asked for.
pub(super) fn told<T>(
    args: &RestoreArgs,
    (events, traces): (&Events, &Traces),
    result: Result<T, Failure>,
    report: impl Fn(&T) -> &Report,
) -> Result<T, Failure> {
    events.say_failure(&result);
    let mut metrics = Metrics::new(args.metrics.as_deref(), "restore");
    match &result {
        Ok(done) => {
            let report = report(done);
            events.say("restored", json!(report));
            let (values, phases) = (&values(report), &report.phases[..]);
            metrics.done(values, phases);
            traces.tell(events.begin(), Ok(Done { pid: report.pid, values, phases }));
        }
        Err(failure) => {
            metrics.failed();
            traces.tell(events.begin(), Err(failure));
        }
    }
    result
}

/// What is measured of a restore.
fn values(report: &Report) -> [Value; 3] {
    [
        ("_running_seconds", "After how long the program went on.", report.running_ms / 1000.0),
        ("_duration_seconds", "How long the restore took.", report.total_ms / 1000.0),
        ("_device_bytes", "Device memory that gpucr loaded.", report.bulk_bytes as f64),
    ]
}

/// Whether somebody waits at a terminal for the program, and wants to be told of it.
fn is_watched(args: &RestoreArgs) -> bool {
    !args.json && !is_quiet() && std::io::IsTerminal::is_terminal(&std::io::stderr())
}

/// How the program has ended that somebody waited for.
pub(super) fn say_ended(args: &RestoreArgs, pid: u32, end: End, since: Instant) {
    if is_watched(args) {
        let how = match (end.exit_code, end.signal) {
            (_, Some(signal)) => format!("was ended by signal {signal}"),
            (code, None) => format!("has ended with exit code {}", code.unwrap_or(1)),
        };
        let time = humantime::format_duration(Duration::from_secs(since.elapsed().as_secs()));
        note_folded!("process {pid} {how}, {time} after it resumed");
    }
}

/// What a restore did, for who waits at a terminal for the program.
pub(super) fn say_restored(args: &RestoreArgs, report: &Report) {
    if is_watched(args) {
        note_folded!(
            "process {} resumed after {}, with {} of device memory; {} in all",
            report.pid,
            display::time(report.running_ms),
            display::bytes(report.bulk_bytes),
            display::time(report.total_ms)
        );
    }
}

/// Output that nobody reads, and how somebody could; who has given streams says that, or knows it.
pub(super) fn say_unread(args: &RestoreArgs, report: &Report) {
    if args.streams.is_none() {
        outputs::say_unread(&report.unread, "restore");
    }
}

/// That the program has another network than it had.
pub(super) fn say_network(report: &Report) {
    if report.left_network {
        note_folded!("{LEFT_NETWORK}");
    }
}

/// Files that were not as they had been, and what the program meets there.
pub(super) fn say_files(report: &Report) {
    for ChangedFile { path, expected, found, done } in &report.files {
        let (path, then) = (path.display(), display::bytes(*expected));
        let now =
            found.map_or("was gone".to_owned(), |now| format!("has {} now", display::bytes(now)));
        let done = match done {
            FileFate::Continued => "the program appends to it",
            FileFate::CutBack => "it was truncated",
            FileFate::PutBack => "it was put back from the image",
        };
        note_folded!("{path} had {then} at the dump and {now}: {done}.");
    }
}

/// The driver does not tell the program all that is other on another device, and the program may have asked before.
pub(super) fn say_moved(report: &Report) {
    for Moved { name, old, new } in &report.moved {
        note_folded!("The program has moved from the {name} {old} to {new}.");
    }
    if !report.moved.is_empty() {
        note_folded!(
            "What it has stored about a device (UUID, PCI bus id, NVML index) still describes the old one, and \
            the driver keeps reporting the old PCI bus id."
        );
    }
}
