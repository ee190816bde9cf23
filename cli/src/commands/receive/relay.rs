//! The process that relays the standard streams of a program that has come, and what starts it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpucr_core::migrate::{Brought, Link, MigrationId, RelayedEnds, Server};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::pipe::{PipeFlags, pipe_with};

use super::restorer::{brought, in_own_session};
use crate::commands::migrate::descriptor;
use crate::commands::restore::{Streams, let_through};
use crate::commands::{Outcome, io_error, note};
use crate::signals::SignalPlan;
use crate::values::interval;

/// How often whoever waits looks what has become of the other.
const LOOK: Duration = Duration::from_millis(50);
/// No line of events is longer.
const LONGEST: usize = 1 << 20;

/// Relay the standard streams of a program that has come
#[derive(clap::Args)]
pub(crate) struct RelayArgs {
    /// The migration
    id: MigrationId,
    /// Descriptors of the program's pipes
    streams: Streams,
    /// What the restore says, and who has started this
    #[arg(num_args = 2)]
    ours: Vec<i32>,
    /// The link: to read from, and to write to
    #[arg(long, num_args = 2)]
    link: Vec<i32>,
    /// How long the other side may be silent
    #[arg(long, value_parser = interval, default_value = "30s")]
    silence: Duration,
}

/// `gpucr relay`, hidden.
pub(crate) fn run(args: &RelayArgs) -> Outcome {
    let failed = || io_error("a relay is started by `gpucr receive` alone");
    // It ends with the program, whatever ends those who have started it.
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
        // SAFETY: sets a disposition to a constant.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let link = match args.link[..] {
        [from, to] => {
            let (from, to) =
                (descriptor(from).map_err(failed())?, descriptor(to).map_err(failed())?);
            Some(Link::new(from, to, args.silence, Default::default()).map_err(failed())?)
        }
        _ => None,
    };
    let streams = args.streams.0.map(|fd| fd.map(descriptor).transpose());
    let [stdin, stdout, stderr] = streams;
    let streams = [stdin.map_err(failed())?, stdout.map_err(failed())?, stderr.map_err(failed())?];
    let [events, control] = args.ours[..] else {
        unreachable!("clap sees to it that there are two")
    };
    let events = File::from(descriptor(events).map_err(failed())?);
    let control = UnixStream::from(descriptor(control).map_err(failed())?);
    Server { id: args.id, link, streams, events, control }.serve().map_err(failed())?;
    Ok(ExitCode::SUCCESS)
}

/// A relay that was started. If this is dropped before it may go, it ends.
pub(super) struct Relay {
    id: MigrationId,
    child: Child,
    control: UnixStream,
    /// What the restore says of the program.
    events: OwnedFd,
    /// What the restore gets: the program's ends of its pipes, and where to say that.
    near: Option<([Option<OwnedFd>; 3], OwnedFd)>,
}

impl Relay {
    /// Starts it.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(ends: RelayedEnds) -> Result<Self, String> {
        Self::try_start(ends).map_err(|error| format!("a relay cannot be started: {error}"))
    }

    fn try_start(ends: RelayedEnds) -> io::Result<Self> {
        let RelayedEnds { id, streams, link, silence } = ends;
        let (mut near, mut far) = ([None, None, None], [None, None, None]);
        for number in (0..3).filter(|number| streams.0[*number]) {
            let (reading, writing) = above_stdio(pipe_with(PipeFlags::CLOEXEC)?)?;
            let (own, program) = if number == 0 { (writing, reading) } else { (reading, writing) };
            (near[number], far[number]) = (Some(program), Some(own));
        }
        let (events, said) = above_stdio(pipe_with(PipeFlags::CLOEXEC)?)?;
        let (control, theirs) = UnixStream::pair()?;
        let number = |fd: &OwnedFd| fd.as_raw_fd();
        let far_numbers = Streams([0, 1, 2].map(|stream| far[stream].as_ref().map(number)));
        let mut command = Command::new("/proc/self/exe");
        command.args(["relay", &id.to_string(), &far_numbers.to_string()]);
        command.args([events.as_raw_fd().to_string(), theirs.as_raw_fd().to_string()]);
        command.args(["--silence", &format!("{}s", silence.as_secs_f64())]);
        if let Some([from, to]) = &link {
            command.args(["--link", &number(from).to_string(), &number(to).to_string()]);
        }
        let theirs = OwnedFd::from(theirs);
        let passed = far.iter().flatten().chain(link.iter().flatten()).chain([&events, &theirs]);
        let_through(&mut command, &passed.collect::<Vec<&OwnedFd>>());
        in_own_session(&mut command);
        // It may stay for longer than whoever reads what this process says.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn()?;
        Ok(Self { id, child, control, events, near: Some((near, said)) })
    }

    /// Has a restore, which is to be started now, give the program its streams, and say what becomes of it.
    pub(super) fn prepare(&mut self, command: &mut Command) {
        let Some((near, said)) = &self.near else { return };
        let number = |fd: &OwnedFd| fd.as_raw_fd();
        let numbers = Streams([0, 1, 2].map(|stream| near[stream].as_ref().map(number)));
        command.args(["--streams", &numbers.to_string()]);
        command.args(["--events", &format!("/dev/fd/{}", said.as_raw_fd())]);
        let passed = near.iter().flatten().chain([said]);
        let_through(command, &passed.collect::<Vec<&OwnedFd>>());
        in_own_session(command);
    }

    /// The restore was started. What it says of failures is said by this process.
    pub(super) fn is_prepared(&mut self, child: &mut Child) {
        self.near = None;
        if let Some(mut said) = child.stderr.take() {
            std::thread::spawn(move || io::copy(&mut said, &mut io::stderr()));
        }
    }

    /// Waits until the restore says that the program runs; `None` if it has failed.
    pub(super) fn brought(&self, child: &mut Child) -> Option<Brought> {
        let (mut pid, mut report) = (None, None);
        while let Some(line) = self.next_line(child) {
            let event: serde_json::Value = serde_json::from_slice(&line).ok()?;
            match event["event"].as_str() {
                Some("running") => pid = u32::try_from(event["pid"].as_u64()?).ok(),
                Some("restored") => report = Some(event),
                Some("failed") => return None,
                _ => {}
            }
            if let (Some(pid), Some(report)) = (pid, &report) {
                return Some(brought(pid, report));
            }
        }
        None
    }

    /// The next line of what the restore says. No byte behind it is taken: that is for the relay.
    fn next_line(&self, child: &mut Child) -> Option<Vec<u8>> {
        let mut line = Vec::new();
        while line.len() < LONGEST {
            if !is_ready(&self.events) {
                // Others may have what it said it to, and keep that open.
                if matches!(child.try_wait(), Ok(None)) || is_ready(&self.events) {
                    continue;
                }
                return None;
            }
            let mut byte = [0];
            match rustix::io::retry_on_intr(|| rustix::io::read(&self.events, &mut byte)) {
                Ok(1) if byte == *b"\n" => return Some(line),
                Ok(1) => line.push(byte[0]),
                _ => return None,
            }
        }
        None
    }

    /// The program runs, and this process does not use the link any more.
    pub(super) fn go(&self) {
        if let Err(error) = Server::go(&self.control) {
            note!("gpucr: nobody reads what the program writes: the relay has ended: {error}");
        }
    }

    /// Waits until the program has ended, or the link is lost, or this command is to end. The program and the relay go
    /// on.
    pub(super) fn wait(self, signals: &SignalPlan) {
        let Self { id, control, .. } = self;
        while !is_ready(&control) {
            if signals.stop.load(Ordering::Relaxed) {
                return;
            }
        }
        if let Some(folder) = Server::wait(&control, id) {
            note!(
                "gpucr: the connection with the source was lost. The program goes on; what it writes to its standard \
                 streams is kept in {}.",
                folder.display()
            );
        }
    }
}

/// Whether something can be read, or the other end is closed, which is waited for for a moment.
fn is_ready(fd: &impl AsFd) -> bool {
    let time = Timespec::try_from(LOOK).expect("it is short");
    let mut poll = [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)];
    rustix::event::poll(&mut poll, Some(&time)).is_ok_and(|ready| ready > 0)
}

/// The same pipe under numbers that are not those of standard streams.
fn above_stdio((reading, writing): (OwnedFd, OwnedFd)) -> io::Result<(OwnedFd, OwnedFd)> {
    let above = |fd: OwnedFd| match fd.as_raw_fd() {
        0..=2 => Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?),
        _ => io::Result::Ok(fd),
    };
    Ok((above(reading)?, above(writing)?))
}
