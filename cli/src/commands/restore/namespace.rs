//! `gpucr restore --new-pids`: three parts, in two processes.
//!
//! [`run`] is the command that the user gave. It starts this program again as the first process of a new
//! pid namespace, where [`restore`] restores the program as without the option, and then becomes
//! [`init`]. That passes signals on to the program and waits for whatever is left without parents. The
//! two sides talk through a pipe, a line of JSON for each thing that happens.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_core::image::Manifest;
use gpucr_core::network::NetworkNamespace;
use gpucr_core::restore::{self, GoesOn, Instance, Options, Program, Shared, Watch};
use gpucr_core::sharing::{self, Holder};
use gpucr_core::{Error, namespace};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions};
use serde_json::{Value, json};

use super::args::RestoreArgs;
use super::end::{End, ended, started};
use super::ready::Ready;
use super::setup;
use crate::commands::inside::again;
use crate::commands::{Outcome, io_error, key, note};
use crate::events::Events;
use crate::failure::{CliError, FAILED};
use crate::signals::{self, SignalPlan};
use crate::traces::Traces;

/// Stand in for init in the pid namespace of a restored program
#[derive(clap::Args)]
pub(crate) struct InitArgs {
    /// The program
    pub(crate) pid: u32,
    /// The descriptor on which to say how it ends
    pub(crate) report: i32,
    /// What it shares, if it does
    pub(crate) watch: Vec<String>,
}

const KILLED: &str =
    "the restore was killed, and with it whatever it had restored; the image is as it was";

/// How often init looks whether anybody is left who is no child of its.
const POLL: Duration = Duration::from_millis(50);

/// Outside.
pub(super) fn run(args: &RestoreArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot.into());
    }
    // What is given as a descriptor is the inner one's.
    let network = args.netns.as_deref().map(setup::network_at).transpose()?;
    let tree = setup::root(args)?.unwrap_or_default();
    let mut ready = Some(Ready::prepare(args)?);
    let events = Events::open(args.events.as_deref())?;
    // No more than that: the image may be a warm one, of which nothing else need be left.
    let manifest = key::trust_with_policy(&args.trust)?.manifest(&args.image)?;
    let mut share = setup::holder(args)?;
    let ran = restore::restore_elsewhere(
        &args.image,
        &manifest,
        (args.files.into(), tree),
        |fallen_back| {
            if fallen_back.is_some() {
                signals.keep();
                events.say("again", json!({}));
                // Outside it has another pid now.
                ready = Ready::again(args);
            }
            // Once: nothing is shared when it is restored again.
            let places = Places { manifest: &manifest, network: network.as_ref() };
            run_once(args, places, &signals, &mut ready, &events, share.take(), fallen_back)
        },
    )?;
    match ran {
        Instance::Done(code) => Ok(code),
        Instance::WroteShared(why) => Err(CliError::new(FAILED, why)),
    }
}

/// What the namespace is made for, and where the program gets its network, if that is named.
#[derive(Clone, Copy)]
struct Places<'a> {
    manifest: &'a Manifest,
    network: Option<&'a NetworkNamespace>,
}

/// Restores it in a namespace, and waits for its end; `fallen_back` is what the report says if it is done once more.
fn run_once(
    args: &RestoreArgs,
    places: Places<'_>,
    signals: &SignalPlan,
    ready: &mut Option<Ready>,
    events: &Events,
    share: Option<Holder>,
    fallen_back: Option<Shared>,
) -> Result<Instance<ExitCode>, CliError> {
    let (mut child, reports) = begin(args, places, share)
        .map_err(io_error("cannot make a pid namespace for the program"))?;
    // They are the inner one's: who is at their other ends is to see when the program closes them.
    let closed = args.streams.as_ref().map_or(Ok(()), |streams| streams.take().map(drop));
    closed.map_err(io_error("--streams is for gpucr's own use"))?;
    signals.pass_to_init(child.id());
    let child_pid = child.id();
    let mut reports = BufReader::new(File::from(reports)).lines();
    let mut next = || -> Option<Value> { serde_json::from_str(&reports.next()?.ok()?).ok() };

    let (mut outer, mut inner) = (0, 0);
    // The start of the program is told before the report; twice if it was restored again.
    let report = loop {
        let told = next();
        let Some(told) = told.as_ref().filter(|told| told["running"] == true) else { break told };
        inner = told["pid"].as_u64().unwrap_or_default() as u32;
        outer = namespace::outer_pid(child_pid, inner).unwrap_or_default();
        events.say("running", json!({"pid": outer, "inner_pid": inner}));
        if let Some(ready) = ready.take() {
            ready.say(outer);
        }
    };
    let Some(mut report) = report else {
        // It has said why.
        let status = child.wait().map_err(io_error("cannot wait for the restore"))?;
        return match status.code() {
            Some(code) => Ok(Instance::Done(ExitCode::from(code as u8))),
            None => Err(CliError::new(FAILED, KILLED.to_owned())),
        };
    };
    report["pid"] = outer.into();
    report["inner_pid"] = inner.into();
    if let Some(shared) = fallen_back {
        report["shared"] = json!(shared);
    }
    if args.detach {
        return Ok(Instance::Done(started(args, report, outer)?));
    }
    let since = Instant::now();
    let end = next();
    signals.keep();
    if let Some(why) = end.as_ref().and_then(|end| end["wrote_shared"].as_str()) {
        child.wait().map_err(io_error("cannot wait for the restore"))?;
        return Ok(Instance::WroteShared(why.to_owned()));
    }
    let end = end.and_then(|end| serde_json::from_value(end).ok());
    // Without a word only if it was killed.
    let end = end.unwrap_or(End { exit_code: None, signal: Some(libc::SIGKILL) });
    events.say("ended", json!(end));
    setup::say_ended(args, outer, end, since);
    Ok(Instance::Done(ended(args, report, end)?))
}

/// Starts the first process of the namespace, with the same arguments.
fn begin(
    args: &RestoreArgs,
    places: Places<'_>,
    share: Option<Holder>,
) -> io::Result<(std::process::Child, OwnedFd)> {
    let last = namespace::last_pid_for(places.manifest)?;
    let (reading, writing) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    // A number that exec keeps, and that is not one of the standard streams.
    let writing = rustix::io::fcntl_dupfd_cloexec(&writing, 3)?;
    let fd = writing.as_raw_fd();
    let mut inside = format!("{fd},{last}");
    if let Some(holder) = &share {
        inside += &format!(",{}", sharing::keep(holder)?);
    }
    // By a name, such as that of the newest one, another might be meant in a moment.
    let resolved = [OsStr::new("--resolved"), args.image.as_ref()];
    // `/proc` has other processes there, so it is no path.
    let network = places.network.map(|network| rustix::io::fcntl_dupfd_cloexec(network, 3));
    let network = network.transpose()?;
    let number = network.as_ref().map(sharing::keep).transpose()?.map(|fd| fd.to_string());
    let network_fd: Vec<&OsStr> = match &number {
        Some(number) => vec!["--network".as_ref(), number.as_ref()],
        None => Vec::new(),
    };
    let more = [&[OsStr::new("--inside"), inside.as_ref()], &resolved[..], &network_fd].concat();
    let mut command = again("restore", &more);
    sharing::keep(&writing)?;
    let child = namespace::spawn(&mut command)?;
    Ok((child, reading))
}

/// Inside: restores, says so, and becomes [`init`].
pub(super) fn restore(args: &RestoreArgs, inside: &[u32]) -> Outcome {
    let &[fd, last, ref holder @ ..] = inside else {
        unreachable!("clap sees to it that there are two")
    };
    // SAFETY: the descriptor was made for this process, and nothing else here knows it.
    let reports = File::from(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    rustix::io::fcntl_setfd(&reports, rustix::io::FdFlags::CLOEXEC)
        .map_err(|error| io_error("this is for gpucr's own use")(error.into()))?;
    let holder = holder.first().map(|fd| {
        // SAFETY: the descriptor was made for this process, and nothing else here knows it.
        let fd = unsafe { OwnedFd::from_raw_fd(*fd as i32) };
        sharing::unkeep(&fd).map(|()| Holder::from(fd))
    });
    let holder = holder.transpose().map_err(io_error("this is for gpucr's own use"))?;
    let network = setup::network(args)?;
    namespace::settle(Some(last)).map_err(io_error("cannot settle in the new pid namespace"))?;
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(setup::settled_by_watchdog);
    let to_signal = signals.clone();
    let to_outer = reports.try_clone().map_err(io_error("this is for gpucr's own use"))?;
    let events = Events::open(args.events.as_deref())?;
    let traces = Traces::open(args.traces.as_deref(), "restore")?;
    let to_tell = events.clone();
    let goes_on = GoesOn(Arc::new(move |pid| {
        let Some(pid) = pid else {
            to_tell.say("again", json!({}));
            return to_signal.keep();
        };
        // Also one that came while the restore ended: the outer command has passed it on and forgotten it.
        to_signal.pass_to(pid);
        // On the thread that was told to end with the command outside. It stays, and so does the program.
        if let Err(error) = namespace::outlive() {
            note!("gpucr: the program will be ended if this command ends: {error}");
        }
        if let Err(error) = say(&to_outer, &json!({"running": true, "pid": pid})) {
            note!(
                "gpucr: the command outside the namespace could not be told that the program runs: {error}"
            );
        }
    }));
    let held_by = setup::held_by(args)?;
    let given = (setup::outputs(args)?, setup::trust(args)?);
    let options = setup::options(args, given, held_by.as_ref(), holder, &signals, goes_on)?;
    let options = Options { network, root: setup::root(args)?, ..options };
    let restored = restore::restore(options, setup::progress(args, &events));
    let (report, watch) = match setup::told(args, (&events, &traces), restored, Program::report) {
        Err(failure) if held_by.is_some_and(|by| by.hears(&failure)) => {
            return Ok(ExitCode::from(FAILED));
        }
        told => told?.into_parts(),
    };
    setup::say_network(&report);
    setup::say_files(&report);
    setup::say_unread(args, &report);
    setup::say_moved(&report);
    let stay =
        say(&reports, &report).and_then(|()| become_init(report.pid, &reports, args.detach, watch));
    match stay {
        Ok(never) => match never {},
        Err(error) => Err(io_error("cannot stay with the restored program")(error)),
    }
}

fn say(mut reports: &File, what: &impl serde::Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    // Who asked may be gone.
    match reports.write_all(&line) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(()),
    }
}

/// Replaces this program, which has a driver loaded and much memory, by [`init`].
fn become_init(
    pid: u32,
    reports: &File,
    detach: bool,
    watch: Option<Watch>,
) -> io::Result<std::convert::Infallible> {
    if detach {
        let null = File::options().read(true).write(true).open("/dev/null")?;
        rustix::stdio::dup2_stdin(&null)?;
        rustix::stdio::dup2_stdout(&null)?;
        rustix::stdio::dup2_stderr(&null)?;
    }
    let mut arguments = vec!["gpucr".to_owned(), "init".to_owned(), pid.to_string()];
    arguments.push(sharing::keep(reports)?.to_string());
    arguments.extend(watch.map(Watch::into_arguments).transpose()?.into_iter().flatten());
    let arguments = arguments.into_iter().map(CString::new);
    let arguments: Vec<CString> = arguments.collect::<Result<_, _>>()?;
    let mut pointers: Vec<*const libc::c_char> = arguments.iter().map(|a| a.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // Signals wait until init has its handlers: the first process of a namespace loses others.
    // SAFETY: all pointers are good for the call; the list of arguments ends with a null pointer.
    unsafe {
        let mut all = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, std::ptr::null_mut());
        libc::execv(c"/proc/self/exe".as_ptr(), pointers.as_ptr());
    }
    Err(io::Error::last_os_error())
}

/// Inside, from then on: until nobody is left.
pub(crate) fn init(args: &InitArgs) -> Outcome {
    // SAFETY: the descriptor was left open for this process, and nothing else here knows it.
    let reports = File::from(unsafe { OwnedFd::from_raw_fd(args.report) });
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.pass_to(args.pid);
    // SAFETY: an empty set is made and used.
    unsafe {
        let mut none = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::pthread_sigmask(libc::SIG_SETMASK, &none, std::ptr::null_mut());
    }
    let mut watch = None;
    if !args.watch.is_empty() {
        // SAFETY: these too.
        let watching = unsafe { Watch::from_arguments(&args.watch) };
        let watching = Arc::new(watching.map_err(io_error("this is for gpucr's own use"))?);
        let to_outer = reports.try_clone().map_err(io_error("this is for gpucr's own use"))?;
        watch = Some(watching.clone());
        std::thread::spawn(move || {
            // If nobody is outside any more nobody looks from then on, and the program gets its error.
            if tell_outside(&to_outer, &watching.until_fault()) {
                // And with it whatever is in the namespace.
                std::process::exit(1);
            }
        });
    }
    let root = Pid::from_raw(args.pid as i32);
    loop {
        match reap(root, &signals).map_err(io_error("cannot wait"))? {
            Some((pid, end)) if Some(pid) == root => {
                // It may have ended because of that, unless somebody has killed it.
                let wrote = watch.take().filter(|_| end.signal.is_none());
                if wrote.and_then(|w| w.look()).is_some_and(|why| tell_outside(&reports, &why)) {
                    return Ok(ExitCode::FAILURE);
                }
                say(&reports, &end).map_err(io_error("cannot report"))?;
            }
            Some(_) => {}
            None if is_alone() => return Ok(ExitCode::SUCCESS),
            // A gpucr, say, that was sent in here to dump the program: it would be killed.
            None => std::thread::sleep(POLL),
        }
    }
}

/// Tells the command outside that the program has to be restored again; not if there is none any more.
fn tell_outside(mut reports: &File, why: &Error) -> bool {
    let mut line = json!({"wrote_shared": why.to_string()}).to_string();
    line.push('\n');
    reports.write_all(line.as_bytes()).is_ok()
}

/// Whether no other process is in this namespace.
fn is_alone() -> bool {
    let pid = |entry: io::Result<std::fs::DirEntry>| -> Option<u32> {
        entry.ok()?.file_name().to_str()?.parse().ok()
    };
    std::fs::read_dir("/proc").is_ok_and(|all| all.filter_map(pid).all(|pid| pid == 1))
}

/// Waits for the end of any child; `None` if there is none left. When it is that of `root`, signals are this process's own.
///
/// # Errors
/// It cannot be waited for.
pub(crate) fn reap(root: Option<Pid>, signals: &SignalPlan) -> io::Result<Option<(Pid, End)>> {
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    match rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::All, ended)) {
        Err(rustix::io::Errno::CHILD) => return Ok(None),
        other => other?,
    };
    // Its pid is its own until it is waited for below.
    if root.is_some_and(has_ended) {
        signals.keep();
    }
    match rustix::process::wait(WaitOptions::empty()) {
        Err(rustix::io::Errno::CHILD) => Ok(None),
        other => Ok(other?.map(|(pid, status)| (pid, End::of(status)))),
    }
}

fn has_ended(pid: Pid) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
    rustix::process::waitid(WaitId::Pid(pid), options).is_ok_and(|status| status.is_some())
}
