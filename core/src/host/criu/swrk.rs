//! One CRIU process that serves one request.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use prost::Message;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal};

use super::error::CriuError;
use super::rpc::{Request, Response};
use crate::host::network::{self, NetworkNamespace};
use crate::host::process::tree;

/// Largest message that is accepted from CRIU.
const MAX_MESSAGE: usize = 1 << 20;
/// How often is looked whether gpucr was asked to end.
const POLL: Duration = Duration::from_millis(20);
/// How long CRIU may then take to take back what it has done.
const GRACE: Duration = Duration::from_millis(800);
/// How long a CRIU may take to end of which nothing is wanted.
const ENDING: Duration = Duration::from_secs(5);

/// A running `criu swrk`.
///
/// It lives in a session of its own unless asked otherwise, so signals from a terminal or to
/// gpucr's process group do not reach it. Dropped in the middle of a request, its socket is
/// closed and its end is awaited: CRIU then takes back what it has done to the tasks. It is killed only
/// where it has none of them in its hands, as that would leave its code inside them.
pub(super) struct Swrk {
    socket: Option<OwnedFd>,
    child: Child,
    /// The descriptor by which its end is seen.
    pidfd: Option<OwnedFd>,
    stderr: File,
    action: &'static str,
    stop: Option<Arc<AtomicBool>>,
    work: Work,
}

/// What CRIU is at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Work {
    /// Nothing that anybody would miss.
    Nothing,
    /// Saving processes.
    Dump,
    /// Making processes with these pids.
    Restore(Vec<u32>),
}

/// How a CRIU came to its end.
enum Ended {
    Itself,
    /// CRIU was asked to end, did not, and had no process in its hands.
    Killed,
    /// CRIU was asked to end, does not, and has processes in its hands: it goes on.
    Not,
}

/// How a CRIU process is started.
pub(super) struct Start<'a> {
    /// The program.
    pub(super) path: &'a Path,
    /// What it is for, as a verb.
    pub(super) action: &'static str,
    /// Options of CRIU's that no request can carry.
    pub(super) options: &'a [String],
    /// A variable of its environment, which holds none of the caller's.
    pub(super) variable: Option<(&'a str, String)>,
    /// Descriptors that it gets under the same numbers; all above 2.
    pub(super) inherit: &'a [BorrowedFd<'a>],
    /// Whether it runs in the caller's session and with the caller's terminal as its standard input, as `--shell-job`
    /// needs it to hand the terminal over.
    pub(super) in_session: bool,
    /// The network namespace of the processes, where that is not the caller's.
    pub(super) network: Option<&'a NetworkNamespace>,
    /// Set from elsewhere to end whatever is under way.
    pub(super) stop: Option<Arc<AtomicBool>>,
}

impl Swrk {
    pub(super) fn start(start: &Start<'_>) -> Result<Self, CriuError> {
        let run = |source: io::Error| CriuError::Run { path: start.path.to_owned(), source };
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(|e| run(e.into()))?;
        // Numbers 0 to 2 are replaced in the child, so the socket must not have one of them.
        let theirs = above_stdio(theirs).map_err(run)?;
        // What CRIU prints before it opens its log, or what the loader prints in its place.
        let stderr: File = rustix::fs::memfd_create("criu-stderr", MemfdFlags::CLOEXEC)
            .map_err(|e| run(e.into()))?
            .into();
        let mut kept: Vec<RawFd> = start.inherit.iter().map(|fd| fd.as_raw_fd()).collect();
        kept.push(theirs.as_raw_fd());
        let in_session = start.in_session;
        let network = start.network.map(|network| network.as_fd().as_raw_fd());

        let mut command = Command::new(start.path);
        command
            .args(start.options)
            .arg("swrk")
            .arg(theirs.as_raw_fd().to_string())
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            // CRIU loads every `.so` in this directory as a plugin, and fails if it is missing.
            // This one always exists and never has any.
            .env("CRIU_LIBS_DIR", "/proc/self/task")
            .stdin(if in_session { terminal() } else { Stdio::null() })
            .stdout(Stdio::null())
            .stderr(stderr.try_clone().map_err(run)?);
        if let Some((name, value)) = &start.variable {
            command.env(name, value);
        }
        if let Some(path) = std::env::var_os("GPUCR_CRIU_LIBRARY_PATH") {
            command.env("LD_LIBRARY_PATH", path);
        }
        let prepare = move || {
            if !in_session {
                rustix::process::setsid()?;
            }
            if let Some(network) = network {
                // SAFETY: the parent holds it open across the spawn.
                network::enter(unsafe { BorrowedFd::borrow_raw(network) })?;
            }
            // With this a limit on what it writes is an error for it, not its death.
            // SAFETY: sets a disposition to a constant.
            unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
            for &fd in &kept {
                // SAFETY: the parent holds every one of these open across the spawn.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec `prepare` only makes the system calls setsid, setns, sigaction and fcntl;
        // it neither allocates nor takes a lock.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().map_err(run)?;
        let pidfd = tree::raw_pid(child.id())
            .and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        let (stop, work) = (start.stop.clone(), Work::Nothing);
        Ok(Self { socket: Some(ours), child, pidfd, stderr, action: start.action, stop, work })
    }

    /// From here on it is at this work.
    pub(super) fn begin(&mut self, work: Work) {
        self.work = work;
    }

    /// What is set to end whatever is under way.
    pub(super) fn stop(&self) -> Option<&AtomicBool> {
        self.stop.as_deref()
    }

    fn is_asked_to_end(&self) -> bool {
        self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed))
    }

    pub(super) fn send(&self, request: &Request) -> Result<(), CriuError> {
        let message = request.encode_to_vec();
        let socket = self.socket()?;
        match rustix::io::retry_on_intr(|| rustix::net::send(socket, &message, SendFlags::NOSIGNAL))
        {
            Ok(sent) if sent == message.len() => Ok(()),
            Ok(_) => Err(self.protocol("a request was cut short")),
            Err(e) => Err(self.protocol(&format!("sending failed: {e}"))),
        }
    }

    /// Waits for the next message; without a limit where that depends on how much there is to do. When gpucr is
    /// asked to end this is [`CriuError::Interrupted`].
    pub(super) fn receive(&self, limit: Option<Duration>) -> Result<Response, CriuError> {
        let socket = self.socket()?;
        let since = Instant::now();
        while !is_readable(socket, POLL) {
            if self.is_asked_to_end() {
                return Err(CriuError::Interrupted);
            }
            if let Some(limit) = limit.filter(|limit| since.elapsed() > *limit) {
                return Err(self.protocol(&format!("there was no answer within {limit:?}")));
            }
        }
        let failed = |e: rustix::io::Errno| self.protocol(&format!("receiving failed: {e}"));
        // With TRUNC a packet's whole length is returned, though nothing of it is taken.
        let peek = RecvFlags::TRUNC | RecvFlags::PEEK;
        let mut nothing = [0u8; 1];
        let (_, len) = rustix::io::retry_on_intr(|| rustix::net::recv(socket, &mut nothing, peek))
            .map_err(failed)?;
        if len == 0 {
            return Err(self.protocol("it closed the connection"));
        }
        if len > MAX_MESSAGE {
            return Err(self.protocol("it sent a message that is too long"));
        }
        let mut message = vec![0u8; len];
        let (read, _) = rustix::io::retry_on_intr(|| {
            rustix::net::recv(socket, &mut message[..], RecvFlags::empty())
        })
        .map_err(failed)?;
        message.truncate(read);
        Response::decode(&message[..]).map_err(|e| self.protocol(&format!("bad message: {e}")))
    }

    /// Closes the connection and waits for CRIU to end. Returns what it printed.
    pub(super) fn finish(mut self) -> String {
        let _ = self.close();
        printed(&self.stderr)
    }

    pub(super) fn protocol(&self, reason: &str) -> CriuError {
        let printed = printed(&self.stderr);
        let reason = match printed.trim() {
            "" => reason.to_owned(),
            text => format!("{reason}; it printed: {text}"),
        };
        CriuError::Protocol { action: self.action, reason }
    }

    #[cfg(test)]
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn socket(&self) -> Result<BorrowedFd<'_>, CriuError> {
        match &self.socket {
            Some(socket) => Ok(socket.as_fd()),
            None => Err(self.protocol("the connection is closed")),
        }
    }

    /// After the end of the connection was [`CriuError::Interrupted`]: has CRIU take back what it has done. Says
    /// what came of that.
    pub(super) fn take_back(mut self) -> CriuError {
        match self.close() {
            Ended::Itself | Ended::Killed => CriuError::Interrupted,
            Ended::Not => CriuError::Stuck { pid: self.child.id() },
        }
    }

    /// Closes the connection, and waits for CRIU to end; if gpucr is asked to end, not for long.
    fn close(&mut self) -> Ended {
        self.socket = None;
        let since = Instant::now();
        let mut hurried = None;
        loop {
            match &self.pidfd {
                Some(pidfd) => _ = is_readable(pidfd.as_fd(), POLL),
                None => std::thread::sleep(POLL),
            }
            match self.child.try_wait() {
                Ok(None) => {}
                Ok(Some(_)) => return Ended::Itself,
                Err(error) => {
                    tracing::warn!(%error, "cannot wait for CRIU");
                    return Ended::Itself;
                }
            }
            if self.work == Work::Nothing && since.elapsed() > ENDING {
                return self.kill();
            }
            if self.is_asked_to_end() {
                self.hurry();
                if hurried.get_or_insert_with(Instant::now).elapsed() > GRACE {
                    return self.give_up();
                }
            }
        }
    }

    /// Has CRIU fail where it is, so that it takes back what it has done.
    fn hurry(&self) {
        let pid = tree::raw_pid(self.child.id());
        match &self.work {
            Work::Nothing => {}
            Work::Dump => {
                // CRIU is about to write, as a rule.
                let none = Rlimit { current: Some(0), maximum: Some(0) };
                let _ = rustix::process::prlimit(pid, Resource::Fsize, none);
            }
            Work::Restore(pids) => tree::kill_made(pids, self.child.id()),
        }
    }

    /// Kills CRIU if it has no process in its hands.
    fn give_up(&mut self) -> Ended {
        let Some(pid) = tree::raw_pid(self.child.id()) else { return Ended::Itself };
        match &self.work {
            Work::Nothing => self.kill(),
            Work::Restore(pids) => {
                tree::kill_made(pids, self.child.id());
                self.kill()
            }
            Work::Dump => {
                // Stopped, it takes hold of no other.
                let _ = rustix::process::kill_process(pid, Signal::STOP);
                if is_stopped(pid) && !tree::traces_any(self.child.id()) {
                    return self.kill();
                }
                let _ = rustix::process::kill_process(pid, Signal::CONT);
                tracing::warn!(pid = self.child.id(), "CRIU does not release the program");
                Ended::Not
            }
        }
    }

    fn kill(&mut self) -> Ended {
        let _ = self.child.kill();
        let _ = self.child.wait();
        Ended::Killed
    }
}

impl Drop for Swrk {
    fn drop(&mut self) {
        let _ = self.close();
    }
}

/// Whether it becomes readable within a time.
fn is_readable(fd: BorrowedFd<'_>, time: Duration) -> bool {
    let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    rustix::event::poll(&mut poll, Some(&time)).is_ok_and(|ready| ready > 0)
}

/// Whether a process that was told to stop has done so, which it does at once unless it is deep in the kernel.
fn is_stopped(pid: Pid) -> bool {
    let since = Instant::now();
    while since.elapsed() < POLL * 5 {
        let stat = procfs::process::Process::new(pid.as_raw_nonzero().get())
            .and_then(|process| process.stat());
        if stat.is_ok_and(|stat| stat.state == 'T') {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// The first of this process's standard streams that is a terminal: a shell that starts something behind its back, or a
/// pipeline, leaves it only one of the outputs. Its standard input if none is.
fn terminal() -> Stdio {
    fn of(stream: &(impl AsFd + IsTerminal)) -> Option<Stdio> {
        let fd = stream.is_terminal().then(|| stream.as_fd().try_clone_to_owned())?;
        fd.ok().map(Stdio::from)
    }
    let (input, error, output) = (io::stdin(), io::stderr(), io::stdout());
    of(&input).or_else(|| of(&error)).or_else(|| of(&output)).unwrap_or_else(Stdio::inherit)
}

/// The open file under a number above 2, and closed on exec.
pub(super) fn above_stdio(fd: OwnedFd) -> io::Result<OwnedFd> {
    if fd.as_raw_fd() > 2 {
        return Ok(fd);
    }
    Ok(rustix::io::fcntl_dupfd_cloexec(&fd, 3)?)
}

/// The first 4 KiB that CRIU printed.
fn printed(stderr: &File) -> String {
    let mut text = Vec::new();
    // The position is shared with CRIU's own descriptor, but it has ended or is of no more use.
    let read = stderr.try_clone().and_then(|mut file| {
        file.rewind()?;
        file.take(4096).read_to_end(&mut text)
    });
    match read {
        Ok(_) => String::from_utf8_lossy(&text).into_owned(),
        Err(_) => String::new(),
    }
}
