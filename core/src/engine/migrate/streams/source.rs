//! The source's ends of the streams: threads that take frames, whichever is free.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender};
use parking_lot::Mutex;

use super::keys::Guest;
use super::secure::{Patience, Secure};
use super::way::{HANDSHAKE, WELCOME, Way};
use crate::engine::migrate::link::{LOOK, Link, LinkError};

/// The pause between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(100);
/// How long one address may take to answer.
const ANSWER: Duration = Duration::from_secs(5);

/// Streams that are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// How many.
    pub count: u32,
    /// Name or address of the host to which they go.
    pub host: String,
}

/// The streams.
pub(in crate::engine::migrate) struct Streams {
    queue: Option<Sender<Vec<u8>>>,
    /// How many frames have been given.
    given: AtomicU64,
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    /// Why one of them was lost.
    failure: Mutex<Option<LinkError>>,
    has_failed: AtomicBool,
    is_over: AtomicBool,
}

impl Streams {
    /// Connects all of them.
    ///
    /// # Errors
    /// [`LinkError::NoStream`]: one does not come about for as long as the other side may be silent.
    pub(in crate::engine::migrate) fn connect(
        link: &Arc<Link>,
        wanted: &Wanted,
        way: &Way,
    ) -> Result<Self, LinkError> {
        let no_stream =
            |why: String| LinkError::NoStream(format!("{} port {}", wanted.host, way.port), why);
        let guest = Guest::new(way.key.clone()).map_err(|error| no_stream(error.to_string()))?;
        let until = Instant::now() + link.silence();
        let mut open = Vec::new();
        for _ in 0..wanted.count {
            let connect = || one(link, &guest, wanted, way);
            open.push(again_until(link, until, connect).map_err(|error| match error {
                LinkError::Interrupted | LinkError::TooLong(_) => error,
                error => no_stream(error.to_string()),
            })?);
        }
        let (sender, queue) = crossbeam_channel::bounded(open.len());
        let state = Arc::<State>::default();
        let start = |stream| {
            let (link, queue, state) = (link.clone(), queue.clone(), state.clone());
            std::thread::spawn(move || send(&link, stream, &queue, &state))
        };
        let threads = open.into_iter().map(start).collect();
        Ok(Self { queue: Some(sender), given: AtomicU64::default(), state, threads })
    }

    /// Gives a frame to whichever stream is free.
    ///
    /// # Errors
    /// A stream was lost.
    pub(in crate::engine::migrate) fn give(&self, mut frame: Vec<u8>) -> Result<(), LinkError> {
        loop {
            self.check()?;
            let Some(queue) = &self.queue else { return Err(LinkError::Closed) };
            match queue.send_timeout(frame, LOOK) {
                Ok(()) => {
                    self.given.fetch_add(1, Ordering::Relaxed);
                    return Ok(());
                }
                Err(SendTimeoutError::Timeout(back)) => frame = back,
                // All were lost since it was checked.
                Err(SendTimeoutError::Disconnected(_)) => {
                    self.check()?;
                    return Err(LinkError::Closed);
                }
            }
        }
    }

    /// How many frames have been given to them.
    pub(in crate::engine::migrate) fn given(&self) -> u64 {
        self.given.load(Ordering::Relaxed)
    }

    /// Whether one was lost.
    pub(in crate::engine::migrate) fn has_failed(&self) -> bool {
        self.state.has_failed.load(Ordering::Acquire)
    }

    /// # Errors
    /// Why one was lost; the first who asks is told.
    pub(in crate::engine::migrate) fn check(&self) -> Result<(), LinkError> {
        match self.has_failed() {
            true => Err(self.state.failure.lock().take().unwrap_or(LinkError::Closed)),
            false => Ok(()),
        }
    }
}

impl Drop for Streams {
    fn drop(&mut self) {
        self.state.is_over.store(true, Ordering::Relaxed);
        self.queue = None;
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}

/// Tries until then.
fn again_until<T>(
    link: &Link,
    until: Instant,
    mut attempt: impl FnMut() -> Result<T, LinkError>,
) -> Result<T, LinkError> {
    loop {
        match attempt() {
            // Whoever answers there is another one, and will be.
            Err(error @ LinkError::Protocol(_)) => return Err(error),
            Err(error) if Instant::now() >= until => return Err(error),
            Err(error @ (LinkError::Interrupted | LinkError::TooLong(_))) => return Err(error),
            Err(error) => tracing::debug!(%error, "a stream is tried again"),
            Ok(done) => return Ok(done),
        }
        link.look()?;
        std::thread::sleep(PAUSE);
    }
}

/// Connects one.
fn one(link: &Link, guest: &Guest, wanted: &Wanted, way: &Way) -> Result<Secure, LinkError> {
    let tcp = tcp(&wanted.host, way.port)?;
    let failed = |error: rustls::Error| LinkError::Protocol(format!("TLS: {error}"));
    let mut stream =
        Secure::new(tcp, guest.connection().map_err(failed)?.into()).map_err(LinkError::Io)?;
    let until = Some(Instant::now() + HANDSHAKE);
    let patience = Patience { link, until, is_over: &|| false };
    stream.handshake(&patience)?;
    stream.write(&way.token, &patience)?;
    let mut answer = [0];
    stream.read(&mut answer, &patience)?;
    if answer != [WELCOME] {
        return Err(LinkError::Protocol("a stream was answered otherwise".into()));
    }
    Ok(stream)
}

fn tcp(host: &str, port: u16) -> Result<TcpStream, LinkError> {
    let mut last = None;
    let addresses = (host, port).to_socket_addrs().map_err(LinkError::Io)?;
    for address in addresses.collect::<Vec<SocketAddr>>() {
        match TcpStream::connect_timeout(&address, ANSWER) {
            Ok(tcp) => return Ok(tcp),
            Err(error) => last = Some(error),
        }
    }
    Err(last.map_or(LinkError::Closed, LinkError::Io))
}

/// Sends what is in the queue, until nothing more comes.
fn send(link: &Link, mut stream: Secure, queue: &Receiver<Vec<u8>>, state: &State) {
    let is_over = || state.is_over.load(Ordering::Relaxed);
    let patience = Patience { link, until: None, is_over: &is_over };
    loop {
        let frame = match queue.recv_timeout(LOOK) {
            Ok(frame) => frame,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        let sent = link.paced(&frame, &mut |piece| stream.write(piece, &patience));
        if let Err(error) = sent {
            state.failure.lock().get_or_insert(error.of_stream());
            state.has_failed.store(true, Ordering::Release);
            return;
        }
    }
}
