//! The destination's ends of the streams: a port to which anybody may come, and into which only the source gets.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::Scope;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};

use super::keys::Host;
use super::secure::{Patience, Secure};
use super::way::{HANDSHAKE, MOST, TOKEN, WELCOME, Way};
use crate::engine::error::Error;
use crate::engine::migrate::link::{LOOK, Link, LinkError, read_frame, unexpected};
use crate::engine::migrate::message::Frame;
use crate::engine::migrate::record::random;
use crate::store::Entry;

/// So many may be at the door at a time, who have not shown yet that they may come in: others are sent away.
const PENDING: usize = 16;

/// The port.
pub(in crate::engine::migrate) struct Door {
    listener: TcpListener,
    token: [u8; TOKEN],
    host: Host,
    /// How many are let in.
    count: usize,
}

/// What goes on at the door, for all threads.
struct Inside<'d> {
    door: &'d Door,
    link: &'d Link,
    pending: AtomicUsize,
    inside: AtomicUsize,
    is_over: &'d AtomicBool,
    take: &'d Take<'d>,
    fail: &'d Fail<'d>,
}

/// Takes a chunk that has come.
pub(in crate::engine::migrate) type Take<'d> =
    dyn Fn(Entry, Vec<u8>) -> Result<(), Error> + Sync + 'd;
/// Is told that a stream was lost.
pub(in crate::engine::migrate) type Fail<'d> = dyn Fn(Error) + Sync + 'd;

impl Door {
    /// Opens it for so many streams, where they may come to; or adds why they may not to what is in the way.
    ///
    /// # Errors
    /// Nobody wants so many.
    pub(in crate::engine::migrate) fn for_offer(
        streams: u32,
        at: Option<SocketAddr>,
        reasons: &mut Vec<String>,
    ) -> Result<Option<Self>, LinkError> {
        if streams > MOST {
            return Err(LinkError::Protocol(format!("it wants {streams} streams")));
        }
        let opened = match (streams, at) {
            (0, _) => return Ok(None),
            (_, None) => {
                Err("the other side accepts no streams: start it with `gpucr receive --streams-at ADDRESS`"
                    .into())
            }
            (_, Some(at)) => Self::open(at, streams)
                .map_err(|error| format!("streams cannot be accepted at {at} there: {error}")),
        };
        let opened: Result<Self, String> = opened;
        Ok(opened.map_err(|reason| reasons.push(reason)).ok())
    }

    /// Opens it, for so many streams.
    ///
    /// # Errors
    /// Nobody can listen there.
    pub(in crate::engine::migrate) fn open(at: SocketAddr, count: u32) -> io::Result<Self> {
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let host = Host::new(random()?).map_err(io::Error::other)?;
        Ok(Self { listener, token: random()?, host, count: count as usize })
    }

    /// What the source has to know.
    ///
    /// # Errors
    /// The port is not known.
    pub(in crate::engine::migrate) fn way(&self) -> io::Result<Way> {
        let port = self.listener.local_addr()?.port();
        Ok(Way { port, token: self.token, key: self.host.public.clone() })
    }

    /// Lets the streams in, and takes the chunks that come until it is over. A stream that ends before is lost.
    pub(in crate::engine::migrate) fn let_in(
        &self,
        link: &Link,
        is_over: &AtomicBool,
        take: &Take<'_>,
        fail: &Fail<'_>,
    ) {
        let (pending, inside) = Default::default();
        let at_door = Inside { door: self, link, pending, inside, is_over, take, fail };
        std::thread::scope(|scope| at_door.wait(scope));
    }
}

impl Inside<'_> {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Waits for those who come, until all are there that are to be let in.
    fn wait<'s>(&'s self, scope: &'s Scope<'s, '_>) {
        while !self.is_over() && self.inside.load(Ordering::Acquire) < self.door.count {
            let listener = &self.door.listener;
            let time = Timespec::try_from(LOOK).expect("it is short");
            let mut poll = [PollFd::new(listener, PollFlags::IN)];
            if rustix::event::poll(&mut poll, Some(&time)).is_ok_and(|ready| ready == 0) {
                continue;
            }
            match listener.accept() {
                Ok((tcp, _)) if self.pending.load(Ordering::Acquire) < PENDING => {
                    self.pending.fetch_add(1, Ordering::AcqRel);
                    scope.spawn(move || self.meet(tcp));
                }
                Ok(_) => {}
                // Whoever came is gone, or there are too few descriptors.
                Err(_) => std::thread::sleep(LOOK),
            }
        }
    }

    /// Sees who it is.
    fn meet(&self, tcp: TcpStream) {
        let met = self.greet(tcp);
        self.pending.fetch_sub(1, Ordering::AcqRel);
        let mut stream = match met {
            Ok(stream) => stream,
            Err(error) => {
                return tracing::info!(%error, "a connection to the port for streams was refused");
            }
        };
        if let Err(error) = self.read(&mut stream)
            && !self.is_over()
        {
            (self.fail)(match error {
                Error::Link(error) => error.of_stream().into(),
                error => error,
            });
        }
    }

    /// Whoever it is has so much time in all.
    fn greet(&self, tcp: TcpStream) -> Result<Secure, LinkError> {
        let failed = |error: rustls::Error| LinkError::Protocol(format!("TLS: {error}"));
        let tls = self.door.host.connection().map_err(failed)?;
        let mut stream = Secure::new(tcp, tls.into()).map_err(LinkError::Io)?;
        let is_over = || self.is_over();
        let until = Some(Instant::now() + HANDSHAKE);
        let patience = Patience { link: self.link, until, is_over: &is_over };
        stream.handshake(&patience)?;
        let mut token = [0; TOKEN];
        stream.read(&mut token, &patience)?;
        // In the same time, wherever it is wrong.
        let differs = token.iter().zip(&self.door.token).fold(0, |all, (a, b)| all | (a ^ b));
        if differs != 0 {
            return Err(LinkError::Protocol("it does not have the token".into()));
        }
        let is_one = |inside| (inside < self.door.count).then_some(inside + 1);
        let counted = self.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, is_one);
        counted.map_err(|_| LinkError::Protocol("it is one too many".into()))?;
        Ok(stream)
    }

    /// Takes what comes on a stream.
    fn read(&self, stream: &mut Secure) -> Result<(), Error> {
        let is_over = || self.is_over();
        let link = self.link;
        stream.write(&[WELCOME], &Patience { link, until: None, is_over: &is_over })?;
        loop {
            let mut len = [0; 4];
            // It may have nothing to say for long. One frame has as much time as nothing has on the link.
            stream.read(&mut len[..1], &Patience { link, until: None, is_over: &is_over })?;
            let until = Some(Instant::now() + link.silence());
            let patience = Patience { link, until, is_over: &is_over };
            stream.read(&mut len[1..], &patience)?;
            let mut fill = |into: &mut [u8]| stream.read(into, &patience);
            match read_frame(len, link.buffers(), &mut fill)? {
                Frame::Chunk(entry, stored) => (self.take)(entry, stored)?,
                other => return Err(unexpected(other).into()),
            }
        }
    }
}
