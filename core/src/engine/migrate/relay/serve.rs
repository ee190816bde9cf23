//! The destination's side of a relay: a process that has the other ends of the program's pipes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use super::end::{NAMES, ProgramEnd};
use super::flow::{Giver, Taker, senseless};
use super::kept::{self, Kept};
use crate::engine::migrate::link::{Link, LinkError, Pulse, unexpected};
use crate::engine::migrate::message::{Frame, Message};
use crate::engine::migrate::record::MigrationId;

/// What is said when the program runs, and the link is the server's from then on.
const GO: u8 = 1;
/// What the server says when the link is lost.
const LOST: u8 = 2;
/// More of a line of events is not read.
const LONGEST: u64 = 1 << 20;

/// A process that relays.
pub struct Server {
    /// The migration.
    pub id: MigrationId,
    /// The link; none if it is lost.
    pub link: Option<Link>,
    /// Ends of the pipes that the program has as standard streams, one to write to and two to read from, and of its
    /// terminal, to read from.
    pub streams: [Option<OwnedFd>; 4],
    /// Whether what nobody reads any more is kept.
    pub keeps: bool,
    /// What the restore says of the program, one JSON object on a line.
    pub events: File,
    /// To who has started it.
    pub control: UnixStream,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({})", self.id)
    }
}

impl Server {
    /// Lets the server at the other end have the link, of which nothing is used here any more.
    ///
    /// # Errors
    /// It has ended.
    pub fn go(mut control: &UnixStream) -> io::Result<()> {
        control.write_all(&[GO])
    }

    /// Waits until the server at the other end has ended, or the link is lost: then this is the folder in which it
    /// keeps what the program writes.
    pub fn wait(mut control: &UnixStream, id: MigrationId) -> Option<PathBuf> {
        let mut said = [0];
        let is_said = control.read_exact(&mut said).is_ok();
        (is_said && said == [LOST]).then(|| kept::folder(id))
    }

    /// Relays until the program has ended. Whether the link is lost or not, what the program writes is read.
    ///
    /// # Errors
    /// The streams cannot be used. Nothing is relayed if the program does not come to running.
    pub fn serve(self) -> io::Result<()> {
        let Self { id, link, mut streams, keeps, events, mut control } = self;
        for stream in streams.iter().flatten() {
            rustix::io::ioctl_fionbio(stream, true)?;
        }
        if control.read_exact(&mut [0]).is_err() {
            // The program does not come.
            return Ok(());
        }
        if !keeps {
            // It finds an end there, as in /dev/null.
            streams[0] = None;
        }
        let folder = keeps.then(|| kept::folder(id));
        relay(link, streams, events, folder.as_deref(), &control);
        Ok(())
    }
}

/// Relays, and keeps in the folder what cannot be relayed; without one nobody gets it.
pub(super) fn relay(
    link: Option<Link>,
    [stdin, outs @ ..]: [Option<OwnedFd>; 4],
    events: File,
    folder: Option<&Path>,
    mut control: &UnixStream,
) {
    let link = link.map(Arc::new);
    let pulse = link.clone().map(Pulse::start);
    let link = link.as_deref();
    let [stdout, stderr, terminal] = [&outs[0], &outs[1], &outs[2]].map(Option::is_some);
    let relayed = [stdin.is_some(), stdout, stderr, terminal];
    let (input, outputs) = (Taker::new(0), [Giver::new(1), Giver::new(2), Giver::new(3)]);
    let end = OnceLock::new();
    std::thread::scope(|scope| {
        if let Some(to) = stdin {
            let input = &input;
            scope.spawn(move || input.run(to, link));
        }
        let mut giving = Vec::new();
        for ((giver, from), name) in outputs.iter().zip(outs).zip(&NAMES[1..]) {
            let Some(from) = from else { continue };
            let kept = Kept::new(folder, name);
            giving.push(scope.spawn(move || giver.run(from, link, Some(kept))));
        }
        let watching = scope.spawn(|| {
            let _ = end.set(end_of(events));
        });
        let relayed = Relay { relayed, input: &input, outputs: &outputs, end: &end };
        let heard = link.map_or(Err(LinkError::Closed), |link| relayed.hear(link));
        if let Err(error) = &heard {
            tracing::warn!(%error, "the standard streams of a program are not relayed any more");
            link.into_iter().for_each(Link::cut);
            if folder.is_some() {
                let _ = control.write_all(&[LOST]);
            }
            outputs.iter().for_each(Giver::lose);
        }
        // These end with the program, or have.
        giving.into_iter().for_each(|thread| drop(thread.join()));
        let _ = watching.join();
        input.end();
        if let (Err(_), Some(folder)) = (heard, folder) {
            kept::note_end(folder, end.get().copied().unwrap_or(ProgramEnd::Unknown));
        }
    });
    drop(pulse);
}

/// What hears the other side.
struct Relay<'r> {
    relayed: [bool; 4],
    input: &'r Taker,
    outputs: &'r [Giver; 3],
    end: &'r OnceLock<ProgramEnd>,
}

impl Relay<'_> {
    /// Until the program has ended and the other side has heard that.
    fn hear(&self, link: &Link) -> Result<(), LinkError> {
        let mut is_told = false;
        loop {
            let frame = link.receive_unless(&|| !is_told && self.is_over())?;
            match frame {
                None => {
                    let end = self.end.get().copied().unwrap_or(ProgramEnd::Unknown);
                    link.send(&end.to_message())?;
                    is_told = true;
                }
                Some(Frame::Message(message)) => match message {
                    Message::Bytes { stream: 0, bytes } if self.relayed[0] => {
                        self.input.take(&bytes)?;
                    }
                    Message::Closed { stream: 0 } if self.relayed[0] => self.input.close()?,
                    Message::Taken { stream, bytes } => self.output(stream)?.confirm(bytes)?,
                    Message::Closed { stream } => self.output(stream)?.refuse()?,
                    Message::Heard {} if is_told => return Ok(()),
                    other => return Err(unexpected(Frame::Message(other))),
                },
                Some(other) => return Err(unexpected(other)),
            }
        }
    }

    /// Whether the program has ended, and so have its streams.
    fn is_over(&self) -> bool {
        let outputs = self.outputs.iter().zip(&self.relayed[1..]);
        self.end.get().is_some() && outputs.filter(|(_, is)| **is).all(|(o, _)| o.has_ended())
    }

    fn output(&self, stream: u32) -> Result<&Giver, LinkError> {
        match stream {
            1..=3 if self.relayed[stream as usize] => Ok(&self.outputs[stream as usize - 1]),
            _ => Err(senseless("it speaks of a stream that is not relayed")),
        }
    }
}

/// How the program ends, which is waited for.
fn end_of(events: File) -> ProgramEnd {
    let mut lines = BufReader::new(events);
    loop {
        let mut line = Vec::new();
        match (&mut lines).take(LONGEST).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            _ => return ProgramEnd::Unknown,
        }
        let event: Option<serde_json::Value> = serde_json::from_slice(&line).ok();
        let Some(event) = event.filter(|event| event["event"] == "ended") else { continue };
        let number = |name: &str| event[name].as_u64().and_then(|value| u8::try_from(value).ok());
        let code = number("exit_code").map(ProgramEnd::Code);
        return code.or(number("signal").map(ProgramEnd::Signal)).unwrap_or(ProgramEnd::Unknown);
    }
}
