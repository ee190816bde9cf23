//! A dump or migration of a program that lives in a pid namespace of its own: CRIU has to see the pids that the program sees.
//! The command is run again there, in a container with the mounts that it has here.

mod child;
mod held;

use std::ffi::{OsStr, OsString};
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, ExitStatus};
use std::time::Duration;

use gpucr_core::namespace::{self, Entry, HeldProcess};
use gpucr_core::{image, shield};

use held::Asked;
pub(crate) use held::Outside;

use crate::commands::{Outcome, io_error};
use crate::failure::{CliError, FAILED};
use crate::inherited;
use crate::signals::SignalPlan;

/// This command line again, that of the subcommand `name`, with more behind that.
pub(crate) fn again(name: &str, more: &[&OsStr]) -> Command {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // Options of gpucr itself may be before it: none of them takes a value.
    let at = arguments.iter().position(|argument| argument == name).map_or(0, |at| at + 1);
    let mut command = Command::new("/proc/self/exe");
    command.args(&arguments[..at]).args(more).args(&arguments[at..]);
    command
}

/// Runs this command again in the namespace to which this leads.
pub(crate) fn run(name: &str, entry: &Entry, signals: &SignalPlan) -> Outcome {
    let command = again(name, &["--inside".as_ref(), entry.inner.to_string().as_ref()]);
    told(wait_for(command, entry, signals)?, entry)
}

/// The same for a dump, which may end what the first process of a container waits for: that would end with it, and all
/// processes there with that, before the dump is over. So it is held up for so long.
pub(crate) fn run_dump(entry: &Entry, signals: &SignalPlan) -> Outcome {
    let failed = || io_error("cannot hold the first process of the container up");
    let first = match entry.is_of_container() {
        true => entry.first_process().map_err(failed())?,
        false => None,
    };
    let Some(first) = first else { return run("dump", entry, signals) };
    let (ours, theirs) = UnixStream::pair().map_err(failed())?;
    // A number that is not one of the standard streams.
    let theirs = rustix::io::fcntl_dupfd_cloexec(&theirs, 3);
    let theirs = theirs.map_err(|error| failed()(error.into()))?;
    let (inner, number) = (entry.inner.to_string(), theirs.as_raw_fd().to_string());
    let more = ["--inside", &inner, "--first-process", &number].map(OsStr::new);
    let mut command = again("dump", &more);
    inherited::let_through(&mut command, &[&theirs]);
    let (status, asked) = std::thread::scope(|scope| {
        let attending = std::thread::Builder::new();
        let attending = attending.spawn_scoped(scope, || held::attend(&ours, &first))?;
        let status = wait_for(command, entry, signals);
        // Whoever it has started that lives longer has no copy. This is not to depend on that.
        ours.shutdown(Shutdown::Both)?;
        // Only now does the first process go on: this command must not end before that.
        let asked = attending.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok::<_, io::Error>((status, asked))
    })
    .map_err(failed())?;
    let status = status?;
    if status.code().is_none() {
        remove_unfinished(&first, asked);
    }
    told(status, entry)
}

/// How long a container may take to end after the gpucr there: the kernel ends its first process last.
const LAST: Duration = Duration::from_secs(5);

/// Removes what there is of an image if all of the container has ended, and the watchdog with it.
fn remove_unfinished(first: &HeldProcess, asked: Asked) {
    if let Some((target, pid)) = asked.writing
        && first.ends_within(LAST).unwrap_or(false)
    {
        image::remove_unfinished(&target, pid);
    }
}

fn wait_for(
    mut command: Command,
    entry: &Entry,
    signals: &SignalPlan,
) -> Result<ExitStatus, CliError> {
    let mut child = namespace::spawn_in(entry, &mut command)
        .map_err(io_error("cannot enter the pid namespace of the program"))?;
    child::wait(&mut child, signals)
        .map_err(io_error("cannot wait for the gpucr that was started there"))
}

/// Inside: to be called before anything else is done. Others there may have the same user.
///
/// # Errors
/// What the command outside has given is not a descriptor.
pub(crate) fn begin(
    inside: Option<u32>,
    outside: Option<i32>,
) -> Result<Option<Outside>, CliError> {
    if inside.is_some() {
        shield::shield().map_err(io_error("cannot keep others from what gpucr holds"))?;
    }
    let outside = outside.map(Outside::take).transpose();
    outside.map_err(io_error("--first-process is for gpucr's own use"))
}

/// What becomes of this command when that one has ended so.
fn told(status: ExitStatus, entry: &Entry) -> Outcome {
    if let Some(code) = status.code() {
        return Ok(ExitCode::from(code as u8));
    }
    let what = "the gpucr that was started in the program's pid namespace was killed";
    let state = match entry.process().has_ended() {
        Ok(false) => "The program keeps running, or its image is complete.",
        _ => "The program has ended. There is no image unless it was complete.",
    };
    Err(CliError::new(FAILED, what.to_owned()).state(state))
}
