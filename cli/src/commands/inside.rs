//! A dump or migration of a program that lives in a pid namespace of its own: CRIU has to see the pids that the program sees.
//! The command is run again there, in a container with the mounts that it has here.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use gpucr_core::Progress;
use gpucr_core::namespace::{self, Entry};
use gpucr_core::phase::Phase;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::commands::{Outcome, io_error, note};
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
pub(crate) fn run(name: &str, entry: Entry, signals: &SignalPlan) -> Outcome {
    run_with(again(name, &["--inside".as_ref(), entry.inner.to_string().as_ref()]), entry, signals)
}

/// The same for a dump, which may end what the first process of a container waits for: that would end with it, and all
/// processes there with that, before the dump is over. So it is held up for so long.
pub(crate) fn run_dump(entry: Entry, signals: &SignalPlan) -> Outcome {
    let failed = io_error("cannot hold the first process of the container up");
    let first = entry.first_process().filter(|_| entry.is_of_container());
    let Some(first) = first.and_then(|pid| Pid::from_raw(pid as i32)) else {
        return run("dump", entry, signals);
    };
    let prepared = pidfd_open(first, PidfdFlags::empty());
    let prepared = prepared.map_err(io::Error::from).and_then(|it| Ok((it, UnixStream::pair()?)));
    let (first, (ours, theirs)) = prepared.map_err(failed)?;
    // A number that is not one of the standard streams.
    let theirs = rustix::io::fcntl_dupfd_cloexec(&theirs, 3).map_err(io::Error::from);
    let theirs = theirs.map_err(io_error("cannot hold the first process of the container up"))?;
    let (inner, number) = (entry.inner.to_string(), theirs.as_raw_fd().to_string());
    let more = ["--inside", &inner, "--first-process", &number].map(OsStr::new);
    let mut command = again("dump", &more);
    inherited::let_through(&mut command, &[&theirs]);
    std::thread::spawn(move || hold_up(&ours, &first));
    let done = run_with(command, entry, signals);
    drop(theirs);
    done
}

/// Stops a process when this is asked for, and lets it go on when nobody is left who could have asked.
fn hold_up(mut asked: &UnixStream, process: &OwnedFd) {
    let mut byte = [0];
    while asked.read(&mut byte).is_ok_and(|read| read > 0) {
        // One that has ended needs none.
        let _ = pidfd_send_signal(process, Signal::STOP);
        if asked.write_all(&byte).is_err() {
            break;
        }
    }
    let _ = pidfd_send_signal(process, Signal::CONT);
}

fn run_with(mut command: Command, entry: Entry, signals: &SignalPlan) -> Outcome {
    let mut child = namespace::spawn_in(entry, &mut command)
        .map_err(io_error("cannot enter the pid namespace of the program"))?;
    signals.pass_to(child.id());
    let status = child.wait();
    signals.keep();
    match status.map_err(io_error("cannot wait for the gpucr that was started there"))?.code() {
        Some(code) => Ok(ExitCode::from(code as u8)),
        None => Err(CliError::new(
            FAILED,
            "the gpucr that was started in the program's pid namespace was \
        killed"
                .to_owned(),
        )
        .state("The program keeps running, or its image is complete.")),
    }
}

/// How long the command outside may take to stop a process.
const PATIENCE: Duration = Duration::from_secs(5);

/// Inside: shows progress as before, and has the first process of the namespace held up when the program is about to be
/// ended.
pub(crate) fn holding_first(number: i32, progress: Arc<dyn Progress>) -> Arc<dyn Progress> {
    let socket = inherited::take(number).map(UnixStream::from);
    match socket.and_then(|it| it.set_read_timeout(Some(PATIENCE)).map(|()| it)) {
        Ok(socket) => Arc::new(HoldingFirst { socket, progress }),
        Err(error) => {
            note!("gpucr: --first-process is for gpucr's own use: {error}");
            progress
        }
    }
}

struct HoldingFirst {
    socket: UnixStream,
    progress: Arc<dyn Progress>,
}

impl HoldingFirst {
    fn hold(&self) -> io::Result<()> {
        let mut socket = &self.socket;
        socket.write_all(b"s")?;
        socket.read_exact(&mut [0])?;
        // If the command outside dies nobody else lets it go on.
        let ended = self.socket.try_clone()?;
        ended.set_read_timeout(None)?;
        std::thread::spawn(move || {
            let _ = (&ended).read(&mut [0]);
            kill_process(Pid::INIT, Signal::CONT)
        });
        Ok(())
    }
}

impl Progress for HoldingFirst {
    fn phase(&self, name: &'static str, bytes: Option<u64>) {
        if name == Phase::Commit.name()
            && let Err(error) = self.hold()
        {
            note!(
                "gpucr: this command may end with the container, though the image is complete: {error}"
            );
        }
        self.progress.phase(name, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }
}
