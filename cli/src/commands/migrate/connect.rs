//! How the two sides of a migration find each other.

use std::convert::Infallible;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, IsTerminal, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use gpucr_core::migrate::Link;
use gpucr_wire::Connection;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::args::{MigrateArgs, To};
use crate::commands::{io_error, note};
use crate::escape::shell_word;
use crate::failure::{CliError, FAILED, USAGE};
use crate::inherited;
use crate::signals::SignalPlan;

/// ssh may have to ask for a password first.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long its last words may take once it has ended.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Bytes of a line that it says; what is longer is shown as several.
const LONGEST: u64 = 4096;

/// How long the other side may take for its first word, besides the time for which it may be silent.
pub(super) fn patience(args: &MigrateArgs) -> Duration {
    if matches!(args.to, Some(To::Ssh { .. })) { PATIENCE } else { Duration::ZERO }
}

/// Connects with the other side. What is given besides the link has to live as long as it.
pub(super) fn connect(
    args: &MigrateArgs,
    signals: &SignalPlan,
) -> Result<(Link, Option<Other>), CliError> {
    let is_ssh = matches!(args.to, Some(To::Ssh { .. }));
    let names = !args.device_map.is_empty() || !args.files_below.is_empty();
    let places = args.new_pids || args.netns.is_some();
    let outputs = args.stdout.is_some() || args.stderr.is_some();
    let is_for_it = places || names || outputs || args.exec_before_resume.is_some();
    if !is_ssh && is_for_it {
        let what = "--new-pids, --netns, --device-map, --files-below, --exec-before-resume, --stdout and --stderr are for \
                    the other side";
        return Err(
            CliError::new(USAGE, what).help("give them to `gpucr receive`, which you have started")
        );
    }
    let (socket, other) = match (&args.to, args.fd) {
        (Some(To::Unix(path)), _) => {
            let socket = UnixStream::connect(path);
            let what = format!("cannot connect to {}", path.display());
            (of_friend(socket.map_err(io_error(&what))?)?.into(), None)
        }
        (Some(To::Ssh { host, port, store }), _) => {
            let (socket, other) = ssh(args, host, *port, store.as_deref())
                .map_err(io_error(&format!("cannot start {}", args.ssh.display())))?;
            (socket.into(), Some(other))
        }
        (None, fd) => (given(fd)?, None),
    };
    let mut link = link(socket, args.silence, signals)?;
    if let Some(other) = &other {
        link.set_helper(other.child.id());
    }
    Ok((link, other))
}

/// What connects the two sides: it is waited for, and ended if it does not end by itself.
pub(super) struct Other {
    child: Child,
    /// Hangs up when the child has nothing more to say.
    said: Option<Receiver<Infallible>>,
}

impl Other {
    /// Ends it from any thread.
    pub(super) fn ender(&self) -> Option<impl Fn() + Send + use<>> {
        let process = rustix::process::Pid::from_child(&self.child);
        let process = pidfd_open(process, PidfdFlags::empty()).ok()?;
        Some(move || {
            let _ = pidfd_send_signal(&process, Signal::TERM);
        })
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Its connection is closed by now.
        let has_ended = (0..500).any(|_| {
            let has_ended = !matches!(self.child.try_wait(), Ok(None));
            if !has_ended {
                std::thread::sleep(Duration::from_millis(10));
            }
            has_ended
        });
        if !has_ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        // Before an error of this command, which may speak of it. A process that ssh has left behind for later
        // connections still has its standard error.
        if let Some(said) = &self.said {
            let _ = said.recv_timeout(LAST_WORDS);
        }
    }
}

/// Passes on what a child says, line by line, so that it does not mix with a progress bar on the same terminal.
fn pass_on(from: impl Read + Send + 'static) -> Receiver<Infallible> {
    let (saying, said) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let _saying = saying;
        let mut from = BufReader::new(from);
        loop {
            let mut line = Vec::new();
            match from.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => note!("{}", String::from_utf8_lossy(&line).trim_end_matches(['\r', '\n'])),
            }
        }
    });
    said
}

/// Starts `gpucr receive` on another host.
fn ssh(
    args: &MigrateArgs,
    host: &str,
    port: Option<u16>,
    store: Option<&str>,
) -> std::io::Result<(UnixStream, Other)> {
    let silence = args.silence.as_secs_f64().to_string();
    let mut there = vec!["receive".to_owned(), "--stdio".into()];
    there.extend(["--silence".into(), silence]);
    there.extend(args.new_pids.then(|| "--new-pids".into()));
    there.extend(args.netns.as_ref().map(|path| format!("--netns={path}")));
    if !args.device_map.is_empty() {
        there.extend(["--device-map".into(), args.device_map.join(",")]);
    }
    if args.streams.is_some() {
        there.extend(["--streams-at".into(), args.streams_at.to_string()]);
    }
    for below in &args.files_below {
        there.extend(["--files-below".into(), below.to_string_lossy().into_owned()]);
    }
    let (stdout, stderr) = (("--stdout", &args.stdout), ("--stderr", &args.stderr));
    for (option, value) in [stdout, stderr, ("--exec-before-resume", &args.exec_before_resume)] {
        there.extend(value.as_ref().map(|value| format!("{option}={value}")));
    }
    there.extend(store.into_iter().flat_map(|store| ["--store".into(), store.to_owned()]));
    let there: Vec<String> = there.iter().map(|word| shell_word(Path::new(word))).collect();
    // As git and rsync do, so that it can have options.
    let mut connect = OsString::from("exec ");
    connect.push(&args.ssh);
    connect.push(" \"$@\"");
    let mut command = Command::new("sh");
    command.arg("-c").arg(connect).arg("ssh");
    command.args(port.into_iter().flat_map(|port| ["-p".to_owned(), port.to_string()]));
    command.args(["--", host, &format!("{} {}", args.remote_gpucr, there.join(" "))]);
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = OwnedFd::from(theirs);
    command.stdin(theirs.try_clone()?).stdout(theirs);
    // It asks for passwords on /dev/tty. What it says elsewhere than on a terminal goes there as it is.
    if std::io::stderr().is_terminal() {
        command.stderr(Stdio::piped());
    }
    // Ctrl-C is for gpucr, which still has something to say to the other side then. OpenSSH leaves a signal that is
    // ignored ignored, and it ends with its standard input.
    // SAFETY: signal(2) is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTSTP] {
                libc::signal(signal, libc::SIG_IGN);
            }
            Ok(())
        });
    }
    let mut child = command.spawn()?;
    let said = child.stderr.take().map(pass_on);
    Ok((ours, Other { child, said }))
}

/// Waits at a socket of this name for the other side of a migration; nobody else can connect then.
pub(crate) fn accept(path: &Path, signals: &SignalPlan) -> Result<OwnedFd, CliError> {
    let what = format!("cannot listen at {}", path.display());
    let failed = io_error(&what);
    if path.symlink_metadata().is_ok() {
        return Err(failed(std::io::ErrorKind::AlreadyExists.into()));
    }
    // Under its name only when somebody listens there, and nobody but this user can connect.
    let mut hidden = path.as_os_str().to_owned();
    hidden.push(format!(".{}", std::process::id()));
    let listener = UnixListener::bind(&hidden).map_err(&failed)?;
    let shown = std::fs::set_permissions(&hidden, PermissionsExt::from_mode(0o600))
        .and_then(|()| std::fs::rename(&hidden, path));
    if let Err(error) = shown {
        let _ = std::fs::remove_file(&hidden);
        return Err(failed(error));
    }
    let accepted = wait_for(&listener, signals);
    let _ = std::fs::remove_file(path);
    Ok(of_friend(accepted?)?.into())
}

fn wait_for(listener: &UnixListener, signals: &SignalPlan) -> Result<UnixStream, CliError> {
    let failed = io_error("cannot accept a connection");
    let look = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
    loop {
        if signals.stop.load(Ordering::Relaxed) {
            return Err(CliError::new(FAILED, "interrupted").state("Nothing was changed."));
        }
        let mut poll = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
        if rustix::event::poll(&mut poll, Some(&look)).is_ok_and(|ready| ready > 0) {
            return Ok(listener.accept().map_err(failed)?.0);
        }
    }
}

/// The socket, if its other end is of root or of this user.
fn of_friend(socket: UnixStream) -> Result<UnixStream, CliError> {
    let connection = Connection::new(socket);
    let peer =
        connection.peer().map_err(io_error("cannot tell which user is on the other side"))?;
    if peer.uid != 0 && peer.uid != rustix::process::geteuid().as_raw() {
        let message = format!("a different user, {}, is at the other end", peer.uid);
        return Err(CliError::new(FAILED, message).state("Nothing was changed."));
    }
    Ok(UnixStream::from(OwnedFd::from(connection)))
}

/// A link over one socket.
pub(crate) fn link(
    socket: OwnedFd,
    silence: Duration,
    signals: &SignalPlan,
) -> Result<Link, CliError> {
    let failed = || io_error("the connection with the other side cannot be used");
    let writer = socket.try_clone().map_err(failed())?;
    Link::new(socket, writer, silence, signals.stop.clone()).map_err(failed())
}

/// The socket of `--fd`.
pub(crate) fn given(fd: Option<i32>) -> Result<OwnedFd, CliError> {
    let fd = fd.unwrap_or_default();
    inherited::take(fd).map_err(io_error(&format!("descriptor {fd} cannot be used")))
}
