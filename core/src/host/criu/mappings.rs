//! The mappings of processes, given to a CRIU that asks for them.
//!
//! A CRIU with change 4 (`xtask/src/criu.rs`) has a socket, named in its environment. It sends a pid of four bytes, and
//! gets one byte and a file that has what it needs of the process's `smaps`: see [`smaps`]. It asks when it has frozen
//! the process. Where it gets no file it reads `smaps` itself.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
    SocketType, socketpair,
};

use super::swrk::above_stdio;
use crate::host::process::smaps;

/// Names the descriptor of the socket.
pub(super) const VARIABLE: &str = "GPUCR_MAPPINGS";

/// The end of the socket for a CRIU. The other end serves it until this one is closed.
///
/// # Errors
/// No socket or no thread can be made.
pub(super) fn give() -> io::Result<OwnedFd> {
    smaps::prepare();
    let flags = SocketFlags::CLOEXEC;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    let serve = move || {
        // CRIU can do without.
        if let Err(error) = serve(&ours) {
            tracing::warn!(%error, "CRIU reads the mappings of the program itself");
        }
    };
    std::thread::Builder::new().name("gpucr-mappings".to_owned()).spawn(serve)?;
    above_stdio(theirs)
}

fn serve(socket: &OwnedFd) -> io::Result<()> {
    while let Some(pid) = asked(socket)? {
        let file = smaps::open(pid)?;
        let fds = [file.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let message = [IoSlice::new(&[0])];
        rustix::net::sendmsg(socket, &message, &mut control, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// The process that is asked about; `None` when nobody asks any more.
fn asked(socket: &OwnedFd) -> io::Result<Option<i32>> {
    let mut pid = [0; 4];
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recv(socket, &mut pid, RecvFlags::empty()).map(|(len, _)| len)
    });
    match received {
        Ok(0) | Err(Errno::CONNRESET) => Ok(None),
        Ok(4) => Ok(Some(i32::from_ne_bytes(pid))),
        Ok(_) => Err(io::ErrorKind::InvalidData.into()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage};

    use super::*;

    #[test]
    fn who_asks_gets_a_file_of_the_process() {
        let socket = give().unwrap();
        for _ in 0..2 {
            let pid = std::process::id().to_ne_bytes();
            rustix::net::send(&socket, &pid, SendFlags::empty()).unwrap();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut byte = [0; 2];
            let mut place = [io::IoSliceMut::new(&mut byte)];
            let flags = RecvFlags::empty();
            let received = rustix::net::recvmsg(&socket, &mut place, &mut control, flags).unwrap();
            assert_eq!(received.bytes, 1);
            let Some(RecvAncillaryMessage::ScmRights(mut fds)) = control.drain().next() else {
                panic!("no file came")
            };
            let mut text = Vec::new();
            File::from(fds.next().unwrap()).read_to_end(&mut text).unwrap();
            let text = String::from_utf8_lossy(&text);
            assert!(text.contains("VmFlags: ") && text.contains("[stack]"), "{text}");
        }
    }

    #[test]
    fn nobody_is_left_waiting() {
        let socket = give().unwrap();
        rustix::net::send(&socket, b"?", SendFlags::empty()).unwrap();
        let mut byte = [0; 1];
        let (len, _) = rustix::net::recv(&socket, &mut byte, RecvFlags::empty()).unwrap_or((0, 0));
        assert_eq!(len, 0);
    }
}
