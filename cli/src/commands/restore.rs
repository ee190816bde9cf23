//! `gpucr restore`.

mod args;
mod end;
mod hold;
pub(crate) mod namespace;
pub(crate) mod outputs;
mod ready;
mod setup;
mod streams;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use gpucr_core::restore::{self, AtHand, GoesOn, Happened, Options, Program};
use gpucr_core::{Error, sharing, verify};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions};
use serde_json::json;

pub(crate) use self::end::End;
use self::end::{ended, started};
use self::ready::Ready;
use self::setup::{
    LEFT_NETWORK, held_by, holder, network, options, progress, say_ended, say_files, say_moved,
    say_network, say_restored, say_unread, settled_by_watchdog, told,
};
pub(crate) use args::RestoreArgs;
pub(crate) use hold::{Held, go_on, hand_memory, hold_back, stand_by};
pub(crate) use setup::network_at;
pub(crate) use streams::{Streams, give};

use crate::commands::dry_run::{or_tell, tell};
use crate::commands::{Outcome, io_error, note_folded};
use crate::display;
use crate::events::Events;
use crate::failure::{CliError, FAILED};
use crate::signals::{self, SignalPlan};
use crate::terminal::Kept;
use crate::traces::Traces;

pub(crate) fn run(args: &RestoreArgs) -> Outcome {
    if let Some(inside) = &args.inside {
        return namespace::restore(args, inside);
    }
    if args.dry_run {
        return dry_run(args);
    }
    if args.new_pids || args.root.is_some() {
        return namespace::run(args);
    }
    let at_hand = match args.stand_by.map(hold::wait_for_image).transpose() {
        Ok(None) => AtHand::default(),
        Ok(Some(Some(at_hand))) => at_hand,
        Ok(Some(None)) => return Ok(ExitCode::SUCCESS),
        Err(error) => return Err(io_error("--stand-by is for gpucr's own use")(error)),
    };
    let network = network(args)?;
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(settled_by_watchdog);
    let ready = Mutex::new(Some(Ready::prepare(args)?));
    let events = Events::open(args.events.as_deref())?;
    let traces = Traces::open(args.traces.as_deref(), "restore")?;
    let (to_signal, to_tell) = (signals.clone(), events.clone());
    let terminal = Kept::now().map(Arc::new);
    let (resized, detach) = (terminal.clone(), args.detach);
    let goes_on = GoesOn(Arc::new(move |pid| {
        let Some(pid) = pid else {
            to_tell.say("again", json!({}));
            resized.iter().for_each(|terminal| terminal.again());
            return to_signal.keep();
        };
        if !detach {
            to_signal.pass_to(pid);
        }
        resized.iter().for_each(|terminal| terminal.restored());
        to_tell.say("running", json!({"pid": pid}));
        // Once: the pid is the same if it is restored again.
        if let Some(ready) = ready.lock().ok().and_then(|mut ready| ready.take()) {
            ready.say(pid);
        }
    }));
    let share = holder(args)?;
    let held_by = held_by(args)?;
    let given = (setup::outputs(args)?, setup::trust(args)?);
    let options = options(args, given, held_by.as_ref(), share, &signals, goes_on)?;
    let options = Options { network, at_hand: Arc::new(at_hand), ..options };
    let restored = restore::restore(options, progress(args, &events));
    let give_back = || terminal.iter().for_each(|terminal| terminal.give_back());
    if restored.is_err() {
        terminal.iter().for_each(|terminal| terminal.restored());
        give_back();
    }
    let mut program = match told(args, (&events, &traces), restored, Program::report) {
        Err(failure) if held_by.is_some_and(|by| by.hears(&failure)) => {
            return Ok(ExitCode::from(FAILED));
        }
        told => told?,
    };
    say_network(program.report());
    say_files(program.report());
    say_unread(args, program.report());
    say_moved(program.report());
    say_restored(args, program.report());
    let (pid, since) = (program.report().pid, Instant::now());
    if args.detach {
        give_back();
        return started(args, program.report(), pid);
    }
    loop {
        let stand_in = signals.clone();
        std::thread::spawn(move || stand_in.stand_in(pid));
        let happened = program.wait();
        events.say_failure(&happened);
        if happened.is_err() {
            give_back();
        }
        match happened? {
            Happened::Ended => break,
            Happened::RestoredAgain => events.say("restored", json!(program.report())),
        }
    }
    let end = wait(pid, &signals).map_err(io_error("cannot wait for the program"))?;
    give_back();
    events.say("ended", json!(end));
    say_ended(args, pid, end, since);
    ended(args, program.report(), end)
}

/// Tells what is in the way.
fn dry_run(args: &RestoreArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let mut blockers: Vec<CliError> = Vec::new();
    let network = or_tell(network(args), &mut blockers);
    let root = or_tell(setup::root(args), &mut blockers);
    let outputs = or_tell(setup::outputs(args), &mut blockers);
    let trust = or_tell(setup::trust(args), &mut blockers);
    let goes_on = GoesOn(Arc::new(|_| ()));
    let options = options(args, (outputs, trust), None, None, &signals, goes_on)?;
    let options = Options { network, root, ..options };
    let lacking = restore::blockers(&options, !args.new_pids && args.root.is_none());
    // A root that cannot be used is there already.
    let is_new = |error: &Error| args.root.is_none() || !matches!(error, Error::NoRoot);
    blockers.extend(lacking.into_iter().filter(is_new).map(CliError::from));
    blockers.extend(setup::lacks_terminal(args, &options));
    // What cannot be opened is among these already.
    let shown = display::progress(args.json);
    if let Ok(report) = verify::verify(&args.image, shown.as_ref())
        && !report.whole
    {
        let (image, count) = (args.image.display(), report.damage.len());
        let s = if count == 1 { "place" } else { "places" };
        let damaged = CliError::new(FAILED, format!("the image {image} is damaged in {count} {s}"));
        blockers.push(damaged.help(format!(
            "`gpucr verify {}` lists them: copy the image again from where it came from",
            args.image.display()
        )));
    }
    drop(shown);
    if args.netns.is_none() && restore::would_leave_network(&options) {
        note_folded!("{LEFT_NETWORK}");
    }
    let what = format!("a restore of {}", args.image.display());
    tell(&what, blockers, args.json)
}

/// The process that holds memory which is shared.
pub(crate) fn hold() -> Outcome {
    sharing::main().map_err(io_error("a holder is started by `gpucr restore --share` alone"))?;
    Ok(ExitCode::SUCCESS)
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
