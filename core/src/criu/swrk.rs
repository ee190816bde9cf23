//! One CRIU process that serves one request.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use prost::Message;
use rustix::fs::MemfdFlags;
use rustix::io::FdFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use super::CriuError;
use super::rpc::{Request, Response};

/// Largest message that is accepted from CRIU.
const MAX_MESSAGE: usize = 1 << 20;

/// A running `criu swrk`.
///
/// It lives in a session of its own unless asked otherwise, so signals from a terminal or to
/// gpucr's process group do not reach it. Dropped in the middle of a request, its socket is
/// closed and its end is awaited: CRIU then takes back what it has done to the tasks. It is never
/// killed, as that would leave its code inside them.
pub(super) struct Swrk {
    socket: Option<OwnedFd>,
    child: Child,
    stderr: File,
    action: &'static str,
}

/// How a CRIU process is started.
pub(super) struct Start<'a> {
    /// The program.
    pub(super) path: &'a Path,
    /// What it is for, as a verb.
    pub(super) action: &'static str,
    /// Descriptors that it gets under the same numbers; all above 2.
    pub(super) inherit: &'a [BorrowedFd<'a>],
    /// In the caller's session and with the caller's standard input, as `--shell-job` needs it
    /// to hand the terminal over.
    pub(super) in_session: bool,
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

        let mut command = Command::new(start.path);
        command
            .arg("swrk")
            .arg(theirs.as_raw_fd().to_string())
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C")
            // CRIU loads every `.so` in this directory as a plugin, and fails if it is missing.
            // This one always exists and never has any.
            .env("CRIU_LIBS_DIR", "/proc/self/task")
            .stdin(if in_session { Stdio::inherit() } else { Stdio::null() })
            .stdout(Stdio::null())
            .stderr(stderr.try_clone().map_err(run)?);
        if let Some(path) = std::env::var_os("GPUCR_CRIU_LIBRARY_PATH") {
            command.env("LD_LIBRARY_PATH", path);
        }
        let prepare = move || {
            if !in_session {
                rustix::process::setsid()?;
            }
            for &fd in &kept {
                // SAFETY: the parent holds every one of these open across the spawn.
                let fd = unsafe { BorrowedFd::borrow_raw(fd) };
                rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: between fork and exec `prepare` only makes the system calls setsid and fcntl;
        // it neither allocates nor takes a lock.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn().map_err(run)?;
        Ok(Self { socket: Some(ours), child, stderr, action: start.action })
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

    /// Waits for the next message. There is no time limit here: CRIU has one of its own for the
    /// time in which tasks are frozen.
    pub(super) fn receive(&self) -> Result<Response, CriuError> {
        let socket = self.socket()?;
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
        self.close();
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

    fn close(&mut self) {
        self.socket = None;
        if let Err(error) = self.child.wait() {
            tracing::warn!(%error, "cannot wait for CRIU");
        }
    }
}

impl Drop for Swrk {
    fn drop(&mut self) {
        self.close();
    }
}

/// The same open file under a number above 2, and closed on exec.
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
