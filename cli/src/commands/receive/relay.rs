//! The process that relays the standard streams of a program that has come, and what starts it.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpucr_core::migrate::{Brought, Link, MigrationId, RelayedEnds, Server};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::commands::restore::{Streams, give};
use crate::commands::{Outcome, io_error, note};
use crate::inherited::{self, let_through};
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
    /// That of its terminal
    #[arg(long)]
    terminal: Option<i32>,
    /// Keep what nobody reads any more
    #[arg(long)]
    keep: bool,
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
                (inherited::take(from).map_err(failed())?, inherited::take(to).map_err(failed())?);
            Some(Link::new(from, to, args.silence, Default::default()).map_err(failed())?)
        }
        _ => None,
    };
    let take = |fd: Option<i32>| fd.map(inherited::take).transpose().map_err(failed());
    let [stdin, stdout, stderr] = args.streams.0;
    let streams = [take(stdin)?, take(stdout)?, take(stderr)?, take(args.terminal)?];
    let [events, control] = args.ours[..] else {
        unreachable!("clap sees to it that there are two")
    };
    let events = File::from(inherited::take(events).map_err(failed())?);
    let control = UnixStream::from(inherited::take(control).map_err(failed())?);
    let (id, keeps) = (args.id, args.keep);
    Server { id, link, streams, keeps, events, control }.serve().map_err(failed())?;
    Ok(ExitCode::SUCCESS)
}

/// A relay that was started. If this is dropped before it may go, it ends.
pub(super) struct Relay {
    id: MigrationId,
    child: Child,
    control: UnixStream,
    /// What the restore says of the program.
    events: OwnedFd,
    /// Whether somebody is told what becomes of the program's streams.
    keeps: bool,
    /// Until the restore was started.
    near: Option<Near>,
}

/// Files for standard streams of a program, by their numbers.
pub(super) type Files = [Option<OwnedFd>; 3];

/// What a restore gets.
struct Near {
    /// Ends of the pipes that the program has as standard streams.
    streams: [Option<OwnedFd>; 3],
    /// Its terminal.
    terminal: Option<OwnedFd>,
    /// Where to say what becomes of it.
    said: OwnedFd,
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
        let RelayedEnds { id, streams, link, silence, keeps } = ends;
        let (mut near, mut far) = ([None, None, None], [None, None, None]);
        for number in (0..3).filter(|number| streams.0[*number]) {
            let (reading, writing) = above_stdio(pipe_with(PipeFlags::CLOEXEC)?)?;
            let (own, program) = if number == 0 { (writing, reading) } else { (reading, writing) };
            (near[number], far[number]) = (Some(program), Some(own));
        }
        let (terminal, its_terminal) = streams.0[3].then(open_terminal).transpose()?.unzip();
        let (events, said) = above_stdio(pipe_with(PipeFlags::CLOEXEC)?)?;
        let (control, theirs) = UnixStream::pair()?;
        let number = |fd: &OwnedFd| fd.as_raw_fd();
        let far_numbers = Streams([0, 1, 2].map(|stream| far[stream].as_ref().map(number)));
        let mut command = Command::new("/proc/self/exe");
        command.args(["relay", &id.to_string(), &far_numbers.to_string()]);
        command.args([events.as_raw_fd().to_string(), theirs.as_raw_fd().to_string()]);
        command.args(keeps.then_some("--keep"));
        if let Some(terminal) = &terminal {
            command.args(["--terminal", &number(terminal).to_string()]);
        }
        if let Some([from, to]) = &link {
            command.args(["--silence", &format!("{}s", silence.as_secs_f64())]);
            command.args(["--link", &number(from).to_string(), &number(to).to_string()]);
        }
        let theirs = OwnedFd::from(theirs);
        let passed = far.iter().flatten().chain(&terminal).chain(link.iter().flatten());
        let passed = passed.chain([&events, &theirs]);
        let_through(&mut command, &passed.collect::<Vec<&OwnedFd>>());
        in_own_session(&mut command);
        // It may stay for longer than whoever reads what this process says.
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn()?;
        Ok(Self {
            id,
            child,
            control,
            events,
            keeps,
            near: Some(Near { streams: near, terminal: its_terminal, said }),
        })
    }

    /// Has a restore, which is to be started now, give the program its streams, or `files` in their places, and say what
    /// becomes of it.
    pub(super) fn prepare(&mut self, command: &mut Command, files: &Files) {
        let Some(Near { streams: near, terminal, said }) = &self.near else { return };
        give(command, [0, 1, 2].map(|number| near[number].as_ref().or(files[number].as_ref())));
        command.args(["--events", &format!("/dev/fd/{}", said.as_raw_fd())]);
        let_through(command, &[said]);
        in_own_session(command);
        if let Some(terminal) = terminal.as_ref().and_then(|terminal| terminal.try_clone().ok()) {
            command.stdin(terminal);
            controls(command);
        }
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
            note!("gpucr: the relay has ended, so nobody reads what the program writes: {error}");
        }
    }

    /// Waits until the program has ended, or the link is lost, or this command is to end. The program and the relay go
    /// on.
    pub(super) fn wait(self, signals: &SignalPlan) {
        let Self { id, mut child, control, keeps, .. } = self;
        if !keeps {
            return;
        }
        while !is_ready(&control) {
            if signals.stop.load(Ordering::Relaxed) {
                return;
            }
        }
        let folder = Server::wait(&control, id);
        if folder.is_none() {
            let _ = child.wait();
        }
        if let Some(folder) = folder {
            note!(
                "gpucr: the connection to the source is lost. The program continues; what it writes to its \
                standard streams is kept in {}.",
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

/// A terminal of its own: where what is written to it can be read, and itself.
fn open_terminal() -> io::Result<(OwnedFd, OwnedFd)> {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
    grantpt(&control)?;
    unlockpt(&control)?;
    let name = ptsname(&control, Vec::new())?;
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let terminal = rustix::fs::open(&name, flags, Mode::empty())?;
    above_stdio((control, terminal))
}

/// Has a command, which leads a session, have its standard input as the terminal of that.
fn controls(command: &mut Command) {
    // SAFETY: ioctl is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::ioctl(0, libc::TIOCSCTTY, 0) {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
}

/// The same two under numbers that are not those of standard streams.
fn above_stdio((reading, writing): (OwnedFd, OwnedFd)) -> io::Result<(OwnedFd, OwnedFd)> {
    let above = |fd: OwnedFd| match fd.as_raw_fd() {
        0..=2 => Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?),
        _ => io::Result::Ok(fd),
    };
    Ok((above(reading)?, above(writing)?))
}

/// Has a command live in a session of its own: what ends that of this process is not for the program.
pub(super) fn in_own_session(command: &mut Command) {
    // SAFETY: setsid is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::setsid() {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
}

/// What the report of a restore says.
pub(super) fn brought(pid: u32, report: &serde_json::Value) -> Brought {
    let phase = |phase: &serde_json::Value| {
        Some((phase["name"].as_str()?.to_owned(), phase["ms"].as_f64()?))
    };
    let unread = report["unread"].as_array().into_iter().flatten();
    let unread = unread.filter_map(|output| Some(output.as_str()?.to_owned())).collect();
    let phases = report["phases"].as_array().into_iter().flatten().filter_map(phase).collect();
    Brought { pid, was_given: report["was_given"] == true, unread, phases }
}
