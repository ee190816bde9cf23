//! What a restore has to do with the gpucr that has started it, and what `--hold FD` and `--loaded FD` are about.
//!
//! `gpucr restore --hold FD`: a restore that waits, before the program runs, for the gpucr that has started it. They
//! talk through a pair of sockets: a byte says that the processes are there, and one that they may run. The end of the
//! connection means that they may not.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::inherited;
#[cfg(doc)]
use gpucr_core::restore::LoadedMemory;
use gpucr_core::restore::{Given, MayRun};

/// How often whoever waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);
const BYTE: [u8; 1] = [1];

/// The end of whoever has started the restore.
pub(crate) struct Held(UnixStream);

/// Has a restore, which is to be started now, wait before the program runs. The second socket is the restore's, and has
/// to be open until that has started.
///
/// # Errors
/// There are no descriptors left.
pub(crate) fn hold_back(command: &mut Command) -> io::Result<(Held, UnixStream)> {
    let (ours, theirs) = connect(command, "--hold")?;
    Ok((Held(ours), theirs))
}

/// Has a restore take its device memory from a socket, into which that is to be [sent](LoadedMemory::send). The second
/// socket is the restore's, and has to be open until that has started.
///
/// # Errors
/// There are no descriptors left.
pub(crate) fn hand_memory(command: &mut Command) -> io::Result<(UnixStream, UnixStream)> {
    connect(command, "--loaded")
}

/// Gives a command one end of a pair of sockets, the second, and names it with this option.
fn connect(command: &mut Command, option: &str) -> io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    let fd = theirs.as_raw_fd();
    command.args([option, &fd.to_string()]);
    // SAFETY: fcntl is async-signal-safe; it lets the descriptor through to the restore.
    unsafe {
        command.pre_exec(move || match libc::fcntl(fd, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        });
    }
    Ok((ours, theirs))
}

impl Held {
    /// Waits until the processes are there.
    ///
    /// # Errors
    /// The restore has failed.
    pub(crate) fn wait(&mut self) -> io::Result<()> {
        self.0.read_exact(&mut [0])
    }

    /// Whether they are there by now. The end of the restore is no error here.
    pub(crate) fn are_there(&mut self) -> bool {
        let looked = self.0.set_nonblocking(true).and_then(|()| self.0.read_exact(&mut [0]));
        looked.is_ok()
    }

    /// Lets them run.
    ///
    /// # Errors
    /// The restore has failed.
    pub(crate) fn let_run(mut self) -> io::Result<()> {
        self.0.write_all(&BYTE)
    }
}

/// Takes the memory that comes through this descriptor.
///
/// # Errors
/// It is no descriptor.
pub(super) fn take_memory(fd: i32) -> io::Result<Given> {
    Ok(Given::through(UnixStream::from(inherited::take(fd)?)))
}

/// What a restore that was given this descriptor asks before the program runs.
///
/// # Errors
/// It is no descriptor.
pub(super) fn ask(fd: i32) -> io::Result<MayRun> {
    let socket = UnixStream::from(inherited::take(fd)?);
    socket.set_read_timeout(Some(LOOK))?;
    Ok(MayRun(Arc::new(move |stop| wait(&socket, stop))))
}

fn wait(mut socket: &UnixStream, stop: &AtomicBool) -> Result<(), String> {
    const GONE: &str = "whoever asked for it has given up";
    socket.write_all(&BYTE).map_err(|_| GONE)?;
    loop {
        match socket.read(&mut [0]) {
            Ok(1) => return Ok(()),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            _ => return Err(GONE.to_owned()),
        }
        if stop.load(Ordering::Relaxed) {
            return Err("interrupted".to_owned());
        }
    }
}
