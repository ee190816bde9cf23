//! Frames and file descriptors over a Unix stream socket.
//!
//! A frame is a 32-bit little-endian length and that many bytes. File descriptors travel as
//! `SCM_RIGHTS` along with one byte (value [`FD_MARK`]) for each batch of up to [`FD_BATCH`], after
//! the frame that announces how many there are. The receiver answers each batch with one byte,
//! so that few descriptors are ever in flight: the kernel limits those per user.
//!
//! The process at the other end may be slow, silent or hostile. So no call of a [`Connection`] waits beyond
//! the deadline that it was given, however the other end spreads its bytes, or after its stop was set.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use crate::codec::Stream;

/// A frame longer than this is refused: no message comes near it.
pub const MAX_FRAME: u32 = 64 << 20;
/// Memory for a frame is taken in pieces of so many bytes, as they arrive: a lying length must not allocate.
const PIECE: usize = 1 << 20;
/// File descriptors in one `sendmsg` (the kernel allows 253).
const FD_BATCH: usize = 128;
/// The byte that goes with each batch of file descriptors.
const FD_MARK: u8 = 0xfd;
/// How often a thread that waits checks whether it is to stop.
const POLL: Duration = Duration::from_millis(50);

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
    /// The time by which whatever is begun has to be done.
    deadline: Option<Instant>,
    /// Set from elsewhere to end whatever is under way.
    stop: Option<Arc<AtomicBool>>,
}

impl Connection {
    /// Takes over a connected socket. There is no deadline at first.
    pub fn new(socket: UnixStream) -> Self {
        Self { socket, deadline: None, stop: None }
    }

    /// Connects to the abstract socket `name`. Deadline and stop hold for this too, since another process may have
    /// the name and accept no connection, and then for all that follows.
    ///
    /// # Errors
    /// `ConnectionRefused` if nobody listens; `TimedOut` and `Interrupted` if the listener was at its limit of
    /// waiting clients up to the deadline, or until `stop` was set.
    pub fn connect(
        name: &str,
        deadline: Option<Instant>,
        stop: Option<Arc<AtomicBool>>,
    ) -> io::Result<Self> {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let socket = UnixStream::from(socket);
        let connection = Self { socket, deadline, stop };
        loop {
            let slice = connection.slice()?;
            // Among those who wait for a place the kernel takes the first, so nobody is passed over who
            // waits there instead of trying again and again.
            set_socket_timeout(&connection.socket, Timeout::Send, slice)?;
            match rustix::net::connect(&connection.socket, &address) {
                Ok(()) => return Ok(connection),
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Listens on the abstract socket `name`.
    ///
    /// # Errors
    /// The name is taken, or too long.
    pub fn listen(name: &str) -> io::Result<UnixListener> {
        UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)
    }

    /// Who is at the other end. For the connecting side this is the process that called
    /// `listen`, which is how an impostor on the well-known name is told from the agent.
    ///
    /// # Errors
    /// The kernel does not tell.
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

    /// Sets the time by which all that is begun from now on has to be done; `None` waits without limit.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.deadline = deadline;
    }

    /// When this is set, what is under way ends early; `None` lets nothing do that.
    pub fn set_stop(&mut self, stop: Option<Arc<AtomicBool>>) {
        self.stop = stop;
    }

    /// How long to wait before the next check; `None` is without limit.
    ///
    /// # Errors
    /// `TimedOut` after the deadline, `Interrupted` after the stop.
    fn slice(&self) -> io::Result<Option<Duration>> {
        if self.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "interrupted"));
        }
        let left = self.deadline.map(|end| end.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it took too long"));
        }
        Ok(match (left, &self.stop) {
            (left, None) => left,
            (left, Some(_)) => Some(left.map_or(POLL, |left| left.min(POLL))),
        })
    }

    /// Does something with the socket that does not wait by itself, as soon as it can be done.
    fn patiently<T>(
        &self,
        wanted: PollFlags,
        mut work: impl FnMut() -> rustix::io::Result<T>,
    ) -> io::Result<T> {
        loop {
            // The limit is checked before the work as well: a peer that always has one more byte must not go on for
            // ever.
            let slice = self.slice()?;
            match work() {
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // More than the kernel can count is without limit too.
                    let slice = slice.and_then(|slice| Timespec::try_from(slice).ok());
                    let mut poll = [PollFd::new(&self.socket, wanted)];
                    rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, slice.as_ref()))?;
                }
                done => return Ok(done?),
            }
        }
    }

    fn read_exact(&self, mut into: &mut [u8]) -> io::Result<()> {
        while !into.is_empty() {
            let read = || rustix::net::recv(&self.socket, &mut *into, RecvFlags::DONTWAIT);
            let (len, _) = self.patiently(PollFlags::IN, read)?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            into = &mut into[len..];
        }
        Ok(())
    }

    fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        while !bytes.is_empty() {
            let write = || rustix::net::send(&self.socket, bytes, flags);
            let len = self.patiently(PollFlags::OUT, write)?;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The message is longer than a frame may be, and nothing of it was sent; or the other side is gone, the deadline
    /// has passed (`TimedOut`) or the stop is set (`Interrupted`), and a part of it may have been sent.
    pub fn send<M: Stream>(&mut self, message: &M) -> io::Result<()> {
        let body = message.to_bytes();
        let len = u32::try_from(body.len()).ok().filter(|len| *len <= MAX_FRAME);
        let len = len.ok_or_else(|| io::Error::other("message is too long to send"))?;
        let mut frame = Vec::with_capacity(4 + body.len());
        frame.extend_from_slice(&len.to_le_bytes());
        frame.extend_from_slice(&body);
        self.write_all(&frame)
    }

    /// Receives one message. The end of the stream is `UnexpectedEof`.
    ///
    /// # Errors
    /// The errors of [`receive_at_most`](Self::receive_at_most), with the length that a frame may have.
    pub fn receive<M: Stream>(&mut self) -> io::Result<M> {
        self.receive_at_most(MAX_FRAME)
    }

    /// Receives one message of at most so many bytes; a longer one is `InvalidData`, and nothing of it is read.
    ///
    /// # Errors
    /// `InvalidData` for a longer one and for bytes that are no such message, `UnexpectedEof` for an end in the middle,
    /// `TimedOut` after the deadline and `Interrupted` after the stop. Bytes that are no message have been read to
    /// their end; after the others a part of a message may have been read.
    pub fn receive_at_most<M: Stream>(&mut self, most: u32) -> io::Result<M> {
        let mut len = [0; 4];
        self.read_exact(&mut len)?;
        let len = u32::from_le_bytes(len);
        if len > most.min(MAX_FRAME) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "frame is too long"));
        }
        let (len, mut body) = (len as usize, Vec::new());
        while body.len() < len {
            let done = body.len();
            body.resize(len.min(done + PIECE), 0);
            self.read_exact(&mut body[done..])?;
        }
        M::from_bytes(&body).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e))
    }

    /// Sends file descriptors; they stay open here.
    ///
    /// # Errors
    /// The other side is gone or does not say that it has taken them, the deadline has passed (`TimedOut`), or the stop
    /// is set (`Interrupted`). It may have got some of them.
    pub fn send_fds(&mut self, fds: &[impl AsFd]) -> io::Result<()> {
        for batch in fds.chunks(FD_BATCH) {
            let batch: Vec<BorrowedFd<'_>> = batch.iter().map(AsFd::as_fd).collect();
            let mark = [FD_MARK];
            let iov = [io::IoSlice::new(&mark)];
            let send = || {
                let mut space =
                    vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_BATCH))];
                let mut control = SendAncillaryBuffer::new(&mut space);
                assert!(control.push(SendAncillaryMessage::ScmRights(&batch)), "space for a batch");
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                rustix::net::sendmsg(&self.socket, &iov, &mut control, flags)
            };
            if self.patiently(PollFlags::OUT, send)? != 1 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            let mut taken = [0];
            self.read_exact(&mut taken)?;
        }
        Ok(())
    }

    /// Receives exactly `count` file descriptors, close-on-exec.
    ///
    /// # Errors
    /// The errors of [`receive_fds_to`](Self::receive_fds_to).
    pub fn receive_fds(&mut self, count: usize) -> io::Result<Vec<OwnedFd>> {
        self.receive_fds_to(count, |fd| fd)
    }

    /// Receives exactly `count` file descriptors; each goes to where `park` puts it before more than some 100 others
    /// come.
    ///
    /// # Errors
    /// `InvalidData` if something else came, or fewer than this process has room for; `UnexpectedEof` at the end of the
    /// stream; `TimedOut` after the deadline and `Interrupted` after the stop. Those that have come are closed.
    pub fn receive_fds_to(
        &mut self,
        count: usize,
        park: impl Fn(OwnedFd) -> OwnedFd,
    ) -> io::Result<Vec<OwnedFd>> {
        let mut fds = Vec::new();
        while fds.len() < count {
            let expected = (count - fds.len()).min(FD_BATCH);
            let mut mark = [0];
            let receive = || {
                let mut space =
                    vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FD_BATCH))];
                let mut control = RecvAncillaryBuffer::new(&mut space);
                let mut iov = [io::IoSliceMut::new(&mut mark)];
                let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
                let got = rustix::net::recvmsg(&self.socket, &mut iov, &mut control, flags)?;
                let mut batch = Vec::new();
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(fds) = message {
                        batch.extend(fds);
                    }
                }
                Ok((got.bytes, batch))
            };
            let (bytes, batch) = self.patiently(PollFlags::IN, receive)?;
            if bytes == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if mark != [FD_MARK] || batch.len() != expected {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    "file descriptors were expected and did not come",
                ));
            }
            fds.extend(batch.into_iter().map(&park));
            self.write_all(&[FD_MARK])?;
        }
        Ok(fds)
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
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
    use crate::message::{Reply, Request};
    use std::fs::File;
    use std::io::{Seek, Write};

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

    /// By when something that hangs has hung for long enough.
    fn soon() -> Option<Instant> {
        Some(Instant::now() + Duration::from_millis(300))
    }

    fn kind<T>(result: io::Result<T>) -> io::ErrorKind {
        result.map(|_| ()).expect_err("it cannot have gone well").kind()
    }

    #[test]
    fn who_drips_does_not_stretch_the_deadline() {
        let (mut a, mut b) = pair();
        let over = Arc::new(AtomicBool::default());
        let until = over.clone();
        let dripping = std::thread::spawn(move || {
            a.socket.write_all(&(1u32 << 20).to_le_bytes()).expect("written");
            while !until.load(Ordering::Relaxed) && a.socket.write_all(&[0]).is_ok() {
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        b.set_deadline(soon());
        assert_eq!(kind(b.receive::<Reply>()), io::ErrorKind::TimedOut);
        over.store(true, Ordering::Relaxed);
        dripping.join().expect("no panic");
    }

    #[test]
    fn who_reads_nothing_and_acknowledges_nothing_is_given_up() {
        let (mut a, _b) = pair();
        a.set_deadline(soon());
        // More than the kernel keeps for a reader.
        let request = Request::Reattach { blocks: vec![0; 1 << 20] };
        assert_eq!(kind(a.send(&request)), io::ErrorKind::TimedOut);
        let (mut a, _b) = pair();
        a.set_deadline(soon());
        assert_eq!(kind(a.send_fds(&[io::stdin()])), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_listener_that_accepts_nobody_is_given_up() {
        let name = format!("gpucr-test-backlog-{}", std::process::id());
        let listener = Connection::listen(&name).expect("the name is free");
        rustix::net::listen(&listener, 0).expect("it listens");
        let mut waiting = Vec::new();
        let last = loop {
            match Connection::connect(&name, soon(), None) {
                Ok(connection) => waiting.push(connection),
                Err(error) => break error,
            }
            assert!(waiting.len() < 10, "the queue has no end");
        };
        assert_eq!(last.kind(), io::ErrorKind::TimedOut);
        let asked = Arc::new(AtomicBool::default());
        let stop = asked.clone();
        let connecting = std::thread::spawn(move || Connection::connect(&name, None, Some(stop)));
        std::thread::sleep(Duration::from_millis(20));
        asked.store(true, Ordering::Relaxed);
        assert_eq!(kind(connecting.join().expect("no panic")), io::ErrorKind::Interrupted);
    }

    #[test]
    fn a_stop_ends_what_is_under_way() {
        let (_a, mut b) = pair();
        let asked = Arc::new(AtomicBool::default());
        b.set_stop(Some(asked.clone()));
        let receiving = std::thread::spawn(move || b.receive::<Reply>());
        std::thread::sleep(Duration::from_millis(20));
        asked.store(true, Ordering::Relaxed);
        assert_eq!(kind(receiving.join().expect("no panic")), io::ErrorKind::Interrupted);
    }

    #[test]
    fn each_request_bounds_its_answer() {
        let (mut a, mut b) = pair();
        let devices = vec![[0; 16]; 1 << 13];
        let counts = crate::Counts { devices, ..crate::Counts::default() };
        a.send(&Reply::Counts { counts }).expect("it fits into the buffer");
        let most = Request::Counts {}.longest_reply();
        assert_eq!(kind(b.receive_at_most::<Reply>(most)), io::ErrorKind::InvalidData);
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
