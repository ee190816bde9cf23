//! `gpucr restore`.

mod args;
pub(crate) mod namespace;
mod ready;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use gpucr_core::restore::{self, GoesOn, Moved, Options, Report};
use gpucr_core::sharing::{self, Holder};
use gpucr_core::{Failure, Progress};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions, WaitStatus};
use serde_json::json;

use self::ready::Ready;
pub(crate) use args::RestoreArgs;

use crate::commands::{Outcome, io_error, key, note, print_json, say};
use crate::display;
use crate::events::Events;
use crate::failure::CliError;
use crate::signals::{self, SignalPlan};

/// How the program ended.
#[derive(Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
struct End {
    /// Its exit code; absent while it runs, or if a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
}

impl End {
    fn of(status: WaitStatus) -> Self {
        Self { exit_code: status.exit_status(), signal: status.terminating_signal() }
    }

    /// gpucr's own exit code: as a shell does for a signal.
    fn exit_code(self) -> ExitCode {
        let code = self.exit_code.or(self.signal.map(|signal| 128 + signal)).unwrap_or(1);
        ExitCode::from(code as u8)
    }
}

/// What is printed with `--json`.
#[derive(serde::Serialize)]
struct Printed<R> {
    #[serde(flatten)]
    report: R,
    #[serde(flatten)]
    end: End,
}

pub(crate) fn run(args: &RestoreArgs) -> Outcome {
    if let Some(inside) = &args.inside {
        return namespace::restore(args, inside);
    }
    if args.new_pids {
        return namespace::run(args);
    }
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(settled_by_keeper);
    let ready = Mutex::new(Some(Ready::prepare(args)?));
    let events = Events::open(args.events.as_deref())?;
    let (to_signal, to_tell) = (signals.clone(), events.clone());
    let detach = args.detach;
    let goes_on = GoesOn(Arc::new(move |pid| {
        let Some(pid) = pid else {
            to_tell.say("again", json!({}));
            return to_signal.keep();
        };
        if !detach {
            to_signal.pass_to(pid);
        }
        to_tell.say("running", json!({"pid": pid}));
        // Once: the pid is the same if it is restored again.
        if let Some(ready) = ready.lock().ok().and_then(|mut ready| ready.take()) {
            ready.say(pid);
        }
    }));
    let share = holder(args)?;
    let options = options(args, share, &signals, goes_on)?;
    let progress = progress(args, &events);
    let (mut report, watch) = told(&events, restore::restore(&options, &progress), |(r, _)| r)?;
    say_moved(&report);
    let pid = report.pid;
    if args.detach {
        return started(args, report, pid);
    }
    if let Some(watch) = watch
        && let Some(why) = watch.until_end(pid)
    {
        let again = restore::restore_unshared(options, watch, pid, &why, &progress);
        report = told(&events, again, |report| report)?;
    }
    drop(progress);
    let end = wait(pid, &signals).map_err(io_error("cannot wait for the program"))?;
    events.say("ended", json!(end));
    ended(args, report, end)
}

/// What holds if gpucr cannot wait for what it is at, and ends.
fn settled_by_keeper() -> String {
    "gpucr could not wait for what it was at. The keeper ends what had been made of the program; the image is as \
     it was."
        .into()
}

/// The process that is to hold memory which is shared.
fn holder(args: &RestoreArgs) -> Result<Option<Holder>, CliError> {
    let failed = io_error("cannot start a process that holds shared memory");
    args.share.then(Holder::start).transpose().map_err(failed)
}

/// That process.
pub(crate) fn hold() -> Outcome {
    sharing::main().map_err(io_error("a holder is started by `gpucr restore --share` alone"))?;
    Ok(ExitCode::SUCCESS)
}

fn options(
    args: &RestoreArgs,
    share: Option<Holder>,
    signals: &SignalPlan,
    goes_on: GoesOn,
) -> Result<Options, CliError> {
    Ok(Options {
        image: args.image.clone(),
        trust: key::trust_with_policy(&args.trust)?,
        warm: !args.no_warm,
        detach: args.detach,
        before_resume: args.exec_before_resume.clone(),
        device_map: args.device_map.clone(),
        on_demand: args.on_demand,
        share,
        goes_on: Some(goes_on),
        stop: signals.stop.clone(),
    })
}

fn progress(args: &RestoreArgs, events: &Events) -> Arc<dyn Progress> {
    events.following(display::progress(args.json))
}

/// Tells the events what a restore has come to.
fn told<T>(
    events: &Events,
    result: Result<T, Failure>,
    report: impl Fn(&T) -> &Report,
) -> Result<T, Failure> {
    events.say_failure(&result);
    if let Ok(done) = &result {
        events.say("restored", json!(report(done)));
    }
    result
}

/// The driver does not tell the program all that is other on another device, and the program may have asked before.
fn say_moved(report: &Report) {
    for Moved { name, old, new } in &report.moved {
        note!("The program has moved from the {name} {old} to {new}.");
    }
    if !report.moved.is_empty() {
        note!(
            "What it has noted of a device (UUID, PCI bus id, index of NVML) is the old one's, and the driver goes on \
             to tell it the old PCI bus id."
        );
    }
}

/// The program runs in the background.
fn started(args: &RestoreArgs, report: impl serde::Serialize, pid: u32) -> Outcome {
    if args.json {
        print_json(&Printed { report, end: End::default() })?;
    } else {
        say!("{pid}");
    }
    Ok(ExitCode::SUCCESS)
}

/// The program that ran in the foreground has ended.
fn ended(args: &RestoreArgs, report: impl serde::Serialize, end: End) -> Outcome {
    if args.json {
        print_json(&Printed { report, end })?;
    }
    Ok(end.exit_code())
}

/// Waits for the end of the program, which is a child of this process.
fn wait(pid: u32, signals: &SignalPlan) -> std::io::Result<End> {
    let pid = Pid::from_raw(pid as i32).ok_or(std::io::ErrorKind::NotFound)?;
    // First only its end, while its pid is still its own: until then signals are passed on.
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(pid), ended))?;
    signals.keep();
    let status = rustix::process::waitpid(Some(pid), WaitOptions::empty())?;
    status.map(|(_, status)| End::of(status)).ok_or(std::io::ErrorKind::NotFound.into())
}
