//! A stream: bytes over TCP with TLS, for which nobody waits for longer than he wants.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustls::Connection;

use crate::engine::migrate::link::{LOOK, Link, LinkError};

/// For how long something is waited for.
pub(super) struct Patience<'p> {
    pub(super) link: &'p Link,
    /// Until then.
    pub(super) until: Option<Instant>,
    /// Nothing is waited for any more.
    pub(super) is_over: &'p dyn Fn() -> bool,
}

impl Patience<'_> {
    fn look(&self) -> Result<(), LinkError> {
        self.link.look()?;
        if (self.is_over)() {
            return Err(LinkError::Closed);
        }
        match self.until {
            Some(until) if Instant::now() >= until => Err(LinkError::Silent(self.link.silence())),
            _ => Ok(()),
        }
    }

    /// Waits for a moment until the socket is ready.
    fn wait(&self, socket: &TcpStream, flags: PollFlags) -> Result<(), LinkError> {
        self.look()?;
        let time = Timespec::try_from(LOOK).expect("it is short");
        let mut poll = [PollFd::from_borrowed_fd(socket.as_fd(), flags)];
        let polled = rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&time)));
        polled.map(drop).map_err(|error| LinkError::Io(error.into()))
    }
}

/// A stream.
pub(super) struct Secure {
    tcp: TcpStream,
    tls: Connection,
}

impl Secure {
    /// Takes over a connection, which does not wait from now on.
    pub(super) fn new(tcp: TcpStream, tls: Connection) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        tcp.set_nodelay(true)?;
        Ok(Self { tcp, tls })
    }

    /// Both sides find out who the other is.
    pub(super) fn handshake(&mut self, patience: &Patience<'_>) -> Result<(), LinkError> {
        while self.tls.is_handshaking() {
            self.flush(patience)?;
            if self.tls.is_handshaking() {
                self.fill(patience)?;
            }
        }
        self.flush(patience)
    }

    /// Writes all of it. Each part of it may take as long as nothing is waited for: `until` is not looked at.
    pub(super) fn write(
        &mut self,
        mut rest: &[u8],
        patience: &Patience<'_>,
    ) -> Result<(), LinkError> {
        while !rest.is_empty() {
            let len = self.tls.writer().write(rest).map_err(LinkError::Io)?;
            rest = &rest[len..];
            self.flush(patience)?;
        }
        Ok(())
    }

    /// Writes what is to go out.
    fn flush(&mut self, patience: &Patience<'_>) -> Result<(), LinkError> {
        let new = || Instant::now() + patience.link.silence();
        let mut until = new();
        while self.tls.wants_write() {
            match self.tls.write_tls(&mut self.tcp) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(_) => until = new(),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let until = Some(patience.until.map_or(until, |other| other.min(until)));
                    Patience { until, ..*patience }.wait(&self.tcp, PollFlags::OUT)?;
                }
                Err(error) => failed(error)?,
            }
        }
        Ok(())
    }

    /// Fills a slice with what comes.
    pub(super) fn read(
        &mut self,
        mut into: &mut [u8],
        patience: &Patience<'_>,
    ) -> Result<(), LinkError> {
        while !into.is_empty() {
            match self.tls.reader().read(into) {
                Ok(0) => return Err(LinkError::Closed),
                Ok(len) => into = &mut into[len..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.fill(patience)?,
                Err(error) => failed(error)?,
            }
        }
        Ok(())
    }

    /// Takes some of what has come, or waits for a moment.
    fn fill(&mut self, patience: &Patience<'_>) -> Result<(), LinkError> {
        match self.tls.read_tls(&mut self.tcp) {
            Ok(0) => Err(LinkError::Closed),
            Ok(_) => {
                // What nobody may say who has the right keys.
                let taken = self.tls.process_new_packets();
                taken.map_err(|error| LinkError::Protocol(format!("TLS: {error}")))?;
                // Single bytes hold nobody up.
                patience.look()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                patience.wait(&self.tcp, PollFlags::IN)
            }
            Err(error) => failed(error),
        }
    }
}

/// What an error of a socket means.
fn failed(error: io::Error) -> Result<(), LinkError> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, Interrupted, UnexpectedEof};
    match error.kind() {
        Interrupted => Ok(()),
        BrokenPipe | ConnectionReset | UnexpectedEof => Err(LinkError::Closed),
        _ => Err(LinkError::Io(error)),
    }
}
