//! The connection between the two sides of a migration: two descriptors, which may be the same socket or two pipes.
//!
//! The other side may be gone, slow or hostile, and the link between may be cut without a word. So nobody waits for
//! longer than the other side may be silent, and each side gives [signs of life](Pulse) while it works.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::buffers::Buffers;
use super::message::{CHUNK_BEGIN, Frame, MAX_FRAME, MAX_PIECE, Message};
use crate::base::faults;

/// How often a thread that waits looks whether it is to stop, or whether another is still there.
pub(super) const LOOK: Duration = Duration::from_millis(50);
/// A frame is sent in parts of so many bytes: so a rate can be kept.
const STEP: usize = 1 << 16;
/// Small frames go out together, so many bytes of them at most; and so many are read ahead.
const TOGETHER: usize = 1 << 18;
/// So many bytes may be on their way through a Unix socket: two threads that wait for each other at every tenth of a chunk
/// move a third of what they could.
const UNDER_WAY: usize = 1 << 22;

/// Why nothing more can be said to the other side, or heard of it.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// It has closed the connection, or the connection was cut.
    #[error("the connection to the other side was lost")]
    Closed,
    /// Nothing came, or nothing was taken.
    #[error("the other side was silent for {} s", .0.as_secs_f32())]
    Silent(Duration),
    /// The program was not to stand still for longer.
    #[error("the program must not be stopped for more than {} s", .0.as_secs_f32())]
    TooLong(Duration),
    /// It has ended before it said anything.
    #[error("the other side ended before it said anything")]
    Mute,
    /// A stream to there does not come about.
    #[error("no stream to {0}: {1}")]
    NoStream(String, String),
    /// One of the streams was lost, for this reason.
    #[error("a stream was lost: {0}")]
    Stream(Box<LinkError>),
    /// What came first is not what a gpucr says.
    #[error("what answers there is not gpucr: it said `{}`", .0.escape_debug())]
    NotGpucr(String),
    /// It says that it cannot go on.
    #[error("the other side: {0}")]
    Refused(String),
    /// It says that it has given up the migration.
    #[error("the other side gave up: {0}")]
    GivenUp(String),
    /// What came makes no sense.
    #[error("the other side does not keep to the protocol: {0}")]
    Protocol(String),
    /// A system call failed.
    #[error("the connection to the other side failed: {0}")]
    Io(io::Error),
    /// gpucr was asked to end.
    #[error("interrupted")]
    Interrupted,
}

impl LinkError {
    /// The same, where it has happened to a stream.
    pub(super) fn of_stream(self) -> Self {
        match self {
            Self::Closed | Self::Silent(_) | Self::Io(_) => Self::Stream(Box::new(self)),
            other => other,
        }
    }
}

/// One end of the connection.
pub struct Link {
    reader: Mutex<Reader>,
    writer: Mutex<OwnedFd>,
    /// How long the other side may be silent.
    silence: Duration,
    /// By when whatever is begun has to be over, and how long that was from the begin.
    limit: Mutex<Option<(Instant, Duration)>>,
    stop: Arc<AtomicBool>,
    /// Nothing goes in or out any more.
    cut: AtomicBool,
    /// What is set to `stop` counts for nothing for the moment.
    regardless: AtomicBool,
    sent: AtomicU64,
    pace: Mutex<Option<Pace>>,
    helper: Option<u32>,
    buffers: Buffers,
}

/// What comes, and what of it was read and is not wanted yet.
struct Reader {
    fd: OwnedFd,
    ahead: Vec<u8>,
    /// So many bytes of that were taken.
    taken: usize,
    reads_ahead: bool,
}

impl Reader {
    fn new(fd: OwnedFd) -> Self {
        Self { fd, ahead: Vec::new(), taken: 0, reads_ahead: false }
    }

    /// Takes bytes that were read ahead, as many as there are and have a place.
    fn take_ahead(&mut self, into: &mut [u8]) -> usize {
        let there = &self.ahead[self.taken..];
        let len = there.len().min(into.len());
        into[..len].copy_from_slice(&there[..len]);
        self.taken += len;
        len
    }

    /// Reads what there is, and gives how many bytes `into` got; 0 at the end.
    fn read(&mut self, into: &mut [u8]) -> Result<usize, Errno> {
        let taken = self.take_ahead(into);
        if taken > 0 {
            return Ok(taken);
        }
        if !self.reads_ahead || into.len() >= TOGETHER {
            return rustix::io::read(&self.fd, into);
        }
        self.ahead.resize(TOGETHER, 0);
        self.taken = 0;
        let read = rustix::io::read(&self.fd, &mut self.ahead[..]);
        self.ahead.truncate(*read.as_ref().unwrap_or(&0));
        read?;
        Ok(self.take_ahead(into))
    }

    /// Whether there is something to read, be it the end.
    fn is_ready(&self) -> Result<bool, LinkError> {
        Ok(self.taken < self.ahead.len() || is_ready(self.fd.as_fd())?)
    }
}

/// What keeps a link below a rate.
#[derive(Debug)]
struct Pace {
    /// Bytes a second.
    rate: u64,
    /// When the link is free again.
    free: Instant,
}

impl Pace {
    /// Takes so many bytes, and says how long they have to wait.
    fn take(&mut self, bytes: usize) -> Duration {
        let now = Instant::now();
        // What was not used is not made up for.
        self.free = self.free.max(now);
        let wait = self.free - now;
        self.free += Duration::from_secs_f64(bytes as f64 / self.rate.max(1) as f64);
        wait
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Link")
    }
}

impl Link {
    /// Takes over both ends, which do not wait from now on. What is set to `stop` ends whatever is under way.
    ///
    /// # Errors
    /// They are no descriptors of the right kind.
    pub fn new(
        reader: OwnedFd,
        writer: OwnedFd,
        silence: Duration,
        stop: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&reader, true)?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        widen(writer.as_fd());
        Ok(Self {
            reader: Mutex::new(Reader::new(reader)),
            writer: Mutex::new(writer),
            silence,
            limit: Mutex::default(),
            stop,
            cut: AtomicBool::default(),
            regardless: AtomicBool::default(),
            sent: AtomicU64::default(),
            pace: Mutex::default(),
            helper: None,
            buffers: Buffers::default(),
        })
    }

    /// This process, which the caller has started, carries what goes over the link.
    pub fn set_helper(&mut self, pid: u32) {
        self.helper = Some(pid);
    }

    /// Memory for the chunks that come.
    pub(super) fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// The process that carries it.
    pub(super) fn helper(&self) -> Option<u32> {
        self.helper
    }

    /// Sends at most so many bytes a second from now on.
    pub fn set_bandwidth(&self, rate: u64) {
        *self.pace.lock() = Some(Pace { rate, free: Instant::now() });
    }

    /// From now on, all has to be over in so much time; `None` takes the limit back.
    pub(super) fn limit(&self, length: Option<Duration>) {
        *self.limit.lock() = length.map(|length| (Instant::now() + length, length));
    }

    /// How long the other side may be silent.
    pub(super) fn silence(&self) -> Duration {
        self.silence
    }

    /// Bytes that went out.
    pub(super) fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Both ends once more, for a process that is to talk in the place of this one.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn ends(&self) -> io::Result<[OwnedFd; 2]> {
        Ok([self.reader.lock().fd.try_clone()?, self.writer.lock().try_clone()?])
    }

    /// Whether more is read than was asked for: many small frames are expected. Whoever else gets the [ends](Self::ends) lacks
    /// what was read and not received yet, so nothing is read ahead of the last messages.
    pub(super) fn read_ahead(&self, reads_ahead: bool) {
        self.reader.lock().reads_ahead = reads_ahead;
    }

    /// Lets nothing in or out any more, as if the link had been cut.
    pub(super) fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
        // A pipe is closed with this process.
        let _ = rustix::net::shutdown(&*self.writer.lock(), rustix::net::Shutdown::Both);
    }

    pub(super) fn send(&self, message: &Message) -> Result<(), LinkError> {
        self.cut_if_asked("cut", message);
        let frame = Frame::of_message(message);
        let frame = frame.map_err(|what| LinkError::Protocol(what.to_owned()))?;
        self.write(&frame)?;
        self.cut_if_asked("cut-after", message);
        Ok(())
    }

    /// Sends a message even if gpucr was asked to end.
    pub(super) fn send_regardless(&self, message: &Message) -> Result<(), LinkError> {
        self.regardless.store(true, Ordering::Relaxed);
        let sent = self.send(message);
        self.regardless.store(false, Ordering::Relaxed);
        sent
    }

    /// Sends something long, for the message that follows.
    pub(super) fn send_long(&self, bytes: &[u8]) -> Result<(), LinkError> {
        bytes.chunks(MAX_PIECE).try_for_each(|piece| self.write(&Frame::of_piece(piece)))
    }

    /// Tests cut the link where they want to.
    fn cut_if_asked(&self, kind: &str, message: &Message) {
        if faults::is_asked(kind, message.name()) {
            self.cut();
        }
    }

    /// Sends a whole frame.
    pub(super) fn write(&self, frame: &[u8]) -> Result<(), LinkError> {
        let writer = self.writer.lock();
        self.paced(frame, &mut |piece| self.write_piece(writer.as_fd(), piece))
    }

    /// Sends whole frames, of which small ones go out together: most of what they cost is the call.
    pub(super) fn write_all(&self, frames: &[Vec<u8>]) -> Result<(), LinkError> {
        let mut together = Vec::new();
        for frame in frames {
            let is_large = frame.len() >= STEP;
            if !together.is_empty() && (is_large || together.len() + frame.len() > TOGETHER) {
                self.write(&together)?;
                together.clear();
            }
            match is_large {
                true => self.write(frame)?,
                false => together.extend_from_slice(frame),
            }
        }
        if together.is_empty() { Ok(()) } else { self.write(&together) }
    }

    /// Sends a whole frame by what sends a part of it, no faster than the link is to be.
    pub(super) fn paced(
        &self,
        frame: &[u8],
        send: &mut dyn FnMut(&[u8]) -> Result<(), LinkError>,
    ) -> Result<(), LinkError> {
        for piece in frame.chunks(STEP) {
            let wait =
                self.pace.lock().as_mut().map_or(Duration::ZERO, |pace| pace.take(piece.len()));
            let until = Instant::now() + wait;
            while let Some(left) = until.checked_duration_since(Instant::now()) {
                self.look()?;
                std::thread::sleep(left.min(LOOK));
            }
            send(piece)?;
        }
        self.sent.fetch_add(frame.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn write_piece(&self, writer: BorrowedFd<'_>, mut rest: &[u8]) -> Result<(), LinkError> {
        let mut since = Instant::now();
        while !rest.is_empty() {
            self.look()?;
            match rustix::io::write(writer, rest) {
                Ok(len) => {
                    rest = &rest[len..];
                    since = Instant::now();
                }
                Err(Errno::AGAIN) => self.wait(writer, PollFlags::OUT, since)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(LinkError::Closed),
                Err(error) => return Err(LinkError::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Receives the first message of the other side, for which that may take `patience`: it may still have to be
    /// started, and somebody may have to be asked for a password before.
    pub(super) fn receive_greeting(&self, patience: Duration) -> Result<Message, LinkError> {
        let begun = Instant::now();
        let mut len = [0; 4];
        loop {
            // Whoever waits for longer than that has nothing to lose yet.
            let waited = self.read(&mut self.reader.lock(), &mut len[..1], Instant::now());
            match waited {
                Ok(()) => break,
                Err(LinkError::Silent(_)) if begun.elapsed() < patience => {}
                Err(LinkError::Closed) => return Err(LinkError::Mute),
                Err(error) => return Err(error),
            }
        }
        let mut reader = self.reader.lock();
        self.read(&mut reader, &mut len[1..], Instant::now())?;
        if u32::from_le_bytes(len) as usize > MAX_FRAME {
            // Most likely words: of a login script, or of a shell.
            let mut words = [0; 200];
            let more = reader.read(&mut words).unwrap_or_default();
            let words = [&len, &words[..more]].concat();
            return Err(LinkError::NotGpucr(String::from_utf8_lossy(&words).trim().to_owned()));
        }
        match self.receive_rest(&mut reader, len)? {
            Frame::Message(message) => Ok(message),
            frame => Err(unexpected(frame)),
        }
    }

    /// Receives the next frame that is more than a sign of life.
    pub(super) fn receive(&self) -> Result<Frame, LinkError> {
        self.receive_unless(&|| false)?.ok_or(LinkError::Closed)
    }

    /// The same, unless something happens on this side before that frame begins. `None` if it does: it is looked for now
    /// and then.
    pub(super) fn receive_unless(
        &self,
        happens: &dyn Fn() -> bool,
    ) -> Result<Option<Frame>, LinkError> {
        let mut reader = self.reader.lock();
        let mut since = Instant::now();
        loop {
            if happens() {
                return Ok(None);
            }
            if !reader.is_ready()? {
                self.look()?;
                self.wait(reader.fd.as_fd(), PollFlags::IN, since)?;
                continue;
            }
            let mut len = [0; 4];
            self.read(&mut reader, &mut len, Instant::now())?;
            match self.receive_rest(&mut reader, len)? {
                Frame::Message(Message::Alive {}) => since = Instant::now(),
                frame => return Ok(Some(frame)),
            }
        }
    }

    /// Receives what follows the length of a frame.
    fn receive_rest(&self, reader: &mut Reader, len: [u8; 4]) -> Result<Frame, LinkError> {
        // One frame has as much time as nothing: nobody is held up by single bytes.
        let since = Instant::now();
        read_frame(len, &self.buffers, &mut |into| self.read(reader, into, since))
    }

    /// Receives something long, of at most so many bytes, and the message that it is for.
    pub(super) fn receive_long(&self, most: u64) -> Result<(Vec<u8>, Message), LinkError> {
        let mut bytes = Vec::new();
        loop {
            match self.receive()? {
                Frame::Piece(piece) if (bytes.len() + piece.len()) as u64 <= most => {
                    bytes.extend(piece)
                }
                Frame::Message(message) => return Ok((bytes, message)),
                frame => return Err(unexpected(frame)),
            }
        }
    }

    /// Receives a message.
    pub(super) fn receive_message(&self) -> Result<Message, LinkError> {
        match self.receive()? {
            Frame::Message(message) => Ok(message),
            frame => Err(unexpected(frame)),
        }
    }

    fn read(
        &self,
        reader: &mut Reader,
        mut into: &mut [u8],
        since: Instant,
    ) -> Result<(), LinkError> {
        while !into.is_empty() {
            self.look()?;
            match reader.read(into) {
                Ok(0) | Err(Errno::CONNRESET) => return Err(LinkError::Closed),
                Ok(len) => into = &mut into[len..],
                Err(Errno::AGAIN) => self.wait(reader.fd.as_fd(), PollFlags::IN, since)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(LinkError::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Waits for a moment until the descriptor is ready.
    fn wait(&self, fd: BorrowedFd<'_>, flags: PollFlags, since: Instant) -> Result<(), LinkError> {
        if since.elapsed() >= self.silence {
            return Err(LinkError::Silent(self.silence));
        }
        let time = Timespec::try_from(LOOK).expect("it is short");
        let mut poll = [PollFd::from_borrowed_fd(fd, flags)];
        let polled = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&time)));
        polled.map(drop).map_err(|error| LinkError::Io(error.into()))
    }

    /// Whether it is to go on.
    pub(super) fn look(&self) -> Result<(), LinkError> {
        if self.stop.load(Ordering::Relaxed) && !self.regardless.load(Ordering::Relaxed) {
            return Err(LinkError::Interrupted);
        }
        if self.cut.load(Ordering::Relaxed) {
            return Err(LinkError::Closed);
        }
        match *self.limit.lock() {
            Some((end, length)) if Instant::now() >= end => Err(LinkError::TooLong(length)),
            _ => Ok(()),
        }
    }
}

/// Reads what follows the length of a frame, by what fills memory with what comes next.
pub(super) fn read_frame(
    len: [u8; 4],
    buffers: &Buffers,
    fill: &mut dyn FnMut(&mut [u8]) -> Result<(), LinkError>,
) -> Result<Frame, LinkError> {
    let wrong = |what: &'static str| LinkError::Protocol(what.to_owned());
    let len = u32::from_le_bytes(len) as usize;
    if len > MAX_FRAME {
        return Err(wrong("a frame is too long"));
    }
    let mut begin = [0; CHUNK_BEGIN];
    let begin = &mut begin[..len.min(CHUNK_BEGIN)];
    fill(begin)?;
    if Frame::has_chunk(begin) {
        let mut stored = buffers.take(len - begin.len());
        fill(&mut stored)?;
        return Frame::with_chunk(begin, stored).map_err(wrong);
    }
    // So much is not taken before it comes: the kernel gives large memory when it is written.
    let mut body = vec![0; len];
    let (to_begin, rest) = body.split_at_mut(begin.len());
    to_begin.copy_from_slice(begin);
    fill(rest)?;
    Frame::decode(body).map_err(wrong)
}

/// Lets more be under way, if it is a Unix socket and gpucr may do that. The kernel finds for itself what TCP needs.
fn widen(writer: BorrowedFd<'_>) {
    use rustix::net::{AddressFamily, sockopt};
    if sockopt::socket_domain(writer) == Ok(AddressFamily::UNIX) {
        let forced = sockopt::set_socket_send_buffer_size_force(writer, UNDER_WAY);
        // As much as anybody may have, then.
        let _ = forced.or_else(|_| sockopt::set_socket_send_buffer_size(writer, UNDER_WAY));
    }
}

/// Whether there is something to read, be it the end.
fn is_ready(fd: BorrowedFd<'_>) -> Result<bool, LinkError> {
    let mut poll = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let now = Timespec::default();
    let polled = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&now)));
    Ok(polled.map_err(|error| LinkError::Io(error.into()))? > 0)
}

/// What came is not what was to come.
pub(super) fn unexpected(frame: Frame) -> LinkError {
    match frame {
        Frame::Message(message) => unexpected_message(message),
        other => LinkError::Protocol(format!("`{}` came where it makes no sense", other.name())),
    }
}

/// The same of a message. Each side may say at any time why it does not go on.
pub(super) fn unexpected_message(message: Message) -> LinkError {
    match message {
        Message::Failed { why } => LinkError::Refused(why),
        Message::Abort { why } => LinkError::GivenUp(why),
        other => LinkError::Protocol(format!("`{}` came where it makes no sense", other.name())),
    }
}

/// Gives signs of life as long as it lives.
pub(super) struct Pulse {
    end: Option<crossbeam_channel::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Pulse {
    pub(super) fn start(link: Arc<Link>) -> Self {
        let (end, ended) = crossbeam_channel::bounded::<()>(0);
        let pause = link.silence() / 4;
        let beat = move || {
            while ended.recv_timeout(pause).is_err_and(|error| error.is_timeout()) {
                // Whoever has something to say notices by himself that the link is lost.
                if link.send(&Message::Alive {}).is_err() {
                    return;
                }
            }
        };
        Self { end: Some(end), thread: Some(std::thread::spawn(beat)) }
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.end = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
