//! Frames and file descriptors over a Unix stream socket.
//!
//! A frame is a 32-bit little-endian length and that many bytes. File descriptors travel as
//! `SCM_RIGHTS` beside one byte (value [`FD_MARK`]) for each batch of up to [`FD_BATCH`], after
//! the frame that announces how many there are. The receiver answers each batch with one byte,
//! so that few descriptors are ever in flight: the kernel limits those per user.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::message::Stream;

/// A frame longer than this is refused: no message comes near it.
const MAX_FRAME: u32 = 64 << 20;
/// File descriptors in one `sendmsg` (the kernel allows 253).
const FD_BATCH: usize = 128;
/// The byte beside each batch of file descriptors.
const FD_MARK: u8 = 0xfd;

/// Who is at the other end of a connection, as the kernel says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Process; 0 if it lives in a pid namespace that cannot be seen from here.
    pub pid: u32,
    /// Effective user.
    pub uid: u32,
}

/// One end of a control connection.
#[derive(Debug)]
pub struct Connection {
    socket: UnixStream,
}

impl Connection {
    /// Takes over a connected socket.
    pub fn new(socket: UnixStream) -> Self {
        Self { socket }
    }

    /// Connects to the abstract socket `name`.
    pub fn connect(name: &str) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(name)?;
        Ok(Self::new(UnixStream::connect_addr(&address)?))
    }

    /// Listens on the abstract socket `name`.
    pub fn listen(name: &str) -> io::Result<UnixListener> {
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
    }

    /// Who is at the other end. For the connecting side this is the process that called
    /// `listen`, which is how an impostor on the well-known name is told from the agent.
    pub fn peer(&self) -> io::Result<Peer> {
        let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
        let mut len = size_of::<libc::ucred>() as libc::socklen_t;
        // Not rustix's call, whose pid cannot be 0.
        // SAFETY: the option writes one `ucred`, for which there is room.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERCRED,
                (&raw mut cred).cast(),
                &mut len,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Peer { pid: cred.pid as u32, uid: cred.uid })
    }

    /// Limits how long the next reads may wait; `None` waits without limit.
    pub fn set_read_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        self.socket.set_read_timeout(limit)
    }

    /// Sends one message.
    pub fn send<M: Stream>(&mut self, message: &M) -> io::Result<()> {
        let body = message.to_bytes();
        let len = u32::try_from(body.len()).ok().filter(|len| *len <= MAX_FRAME);
        let len = len.ok_or_else(|| io::Error::other("message is too long to send"))?;
        let mut frame = Vec::with_capacity(4 + body.len());
        frame.extend_from_slice(&len.to_le_bytes());
        frame.extend_from_slice(&body);
        self.socket.write_all(&frame)
    }

    /// Receives one message. The end of the stream is `UnexpectedEof`.
    pub fn receive<M: Stream>(&mut self) -> io::Result<M> {
        let mut len = [0; 4];
        self.socket.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > MAX_FRAME {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "frame is too long"));
        }
        let mut body = Vec::new();
        (&mut self.socket).take(u64::from(len)).read_to_end(&mut body)?;
        if body.len() < len as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        M::from_bytes(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// Sends file descriptors; they stay open here.
    pub fn send_fds(&mut self, fds: &[impl AsFd]) -> io::Result<()> {
        for batch in fds.chunks(FD_BATCH) {
            let batch: Vec<BorrowedFd<'_>> = batch.iter().map(AsFd::as_fd).collect();
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_BATCH))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&batch)), "space for a batch");
            let mark = [FD_MARK];
            let iov = [io::IoSlice::new(&mark)];
            let sent = rustix::io::retry_on_intr(|| {
                rustix::net::sendmsg(&self.socket, &iov, &mut control, SendFlags::NOSIGNAL)
            })?;
            if sent != 1 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            let mut taken = [0];
            self.socket.read_exact(&mut taken)?;
        }
        Ok(())
    }

    /// Receives exactly `count` file descriptors, close-on-exec.
    pub fn receive_fds(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        let mut fds = Vec::with_capacity(count);
        while fds.len() < count {
            let expected = (count - fds.len()).min(FD_BATCH);
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_BATCH))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let mut mark = [0];
            let got = rustix::io::retry_on_intr(|| {
                rustix::net::recvmsg(
                    &self.socket,
                    &mut [io::IoSliceMut::new(&mut mark)],
                    &mut control,
                    RecvFlags::CMSG_CLOEXEC,
                )
            })?;
            if got.bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let before = fds.len();
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(batch) = message {
                    fds.extend(batch);
                }
            }
            if mark != [FD_MARK] || fds.len() - before != expected {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "file descriptors were expected and did not come",
                ));
            }
            self.socket.write_all(&[FD_MARK])?;
        }
        Ok(fds)
    }
}

impl From<Connection> for OwnedFd {
    fn from(connection: Connection) -> Self {
        connection.socket.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Request;
    use std::fs::File;
    use std::io::Seek;

    fn pair() -> (Connection, Connection) {
        let (a, b) = UnixStream::pair().expect("a socket pair");
        (Connection::new(a), Connection::new(b))
    }

    #[test]
    fn more_descriptors_than_one_batch_arrive_in_order() {
        let (mut a, mut b) = pair();
        let files: Vec<File> = (0..300)
            .map(|i| {
                let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC)
                    .expect("a memfd");
                let mut file = File::from(fd);
                write!(file, "{i}").expect("written");
                file
            })
            .collect();
        let sender = std::thread::spawn(move || a.send_fds(&files));
        let received = b.receive_fds(300).expect("received");
        sender.join().expect("joined").expect("sent");
        for (i, fd) in received.into_iter().enumerate() {
            let mut file = File::from(fd);
            file.rewind().expect("rewound");
            assert_eq!(io::read_to_string(file).expect("read"), i.to_string());
        }
    }

    #[test]
    fn a_closed_peer_is_the_end_of_the_stream() {
        let (a, mut b) = pair();
        drop(a);
        let error = b.receive::<Request>().expect_err("nothing can come");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(b.receive_fds(1).is_err());
    }

    #[test]
    fn a_huge_frame_is_refused_before_it_is_read() {
        let (mut a, mut b) = pair();
        a.socket.write_all(&u32::MAX.to_le_bytes()).expect("written");
        assert_eq!(
            b.receive::<Request>().expect_err("too long").kind(),
            io::ErrorKind::InvalidData
        );
    }
}
