//! The source's side of a relay.

use std::sync::Arc;

use super::end::ProgramEnd;
use super::ends::Ends;
use super::flow::{Giver, Taker, senseless};
use crate::engine::migrate::link::{LOOK, Link, LinkError, Pulse, unexpected};
use crate::engine::migrate::message::{Frame, Message};
use crate::engine::migrate::relayed::Relayed;

/// A program that runs on the other side, and whose standard streams are to be relayed.
pub struct Relaying {
    link: Arc<Link>,
    ends: Ends,
    _pulse: Pulse,
}

impl std::fmt::Debug for Relaying {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Relaying")
    }
}

impl Relaying {
    pub(in crate::engine::migrate) fn new(link: Arc<Link>, ends: Ends, pulse: Pulse) -> Self {
        Self { link, ends, _pulse: pulse }
    }

    /// Relays until the program has ended, and all that it had written was written here.
    ///
    /// # Errors
    /// The link was lost, or gpucr was asked to end: the program goes on, and the destination keeps what it writes.
    pub fn run(self) -> Result<ProgramEnd, LinkError> {
        let Self { link, ends, _pulse } = self;
        let relayed = Relayed::of(ends.found());
        let (input, outputs) = (Giver::new(0), [Taker::new(1), Taker::new(2), Taker::new(3)]);
        let [stdin, outs @ ..] = ends.ends;
        std::thread::scope(|scope| {
            match stdin {
                Some(from) => drop(scope.spawn(|| input.run(from, Some(&link), None))),
                None => input.lose(),
            }
            for ((taker, to), number) in outputs.iter().zip(outs).zip(1..) {
                let link = &link;
                match to {
                    Some(to) => drop(scope.spawn(move || taker.run(to, Some(link)))),
                    None if relayed.0[number] => taker.give_up(Some(link)),
                    None => {}
                }
            }
            let side = Hearing { link: &link, relayed, input: &input, outputs: &outputs };
            let ended = side.hear();
            input.lose();
            outputs.iter().for_each(Taker::end);
            // Nobody is to wait for what the other side does not take.
            if ended.is_err() {
                link.cut();
            }
            ended
        })
    }
}

/// What hears the other side.
struct Hearing<'r> {
    link: &'r Link,
    relayed: Relayed,
    input: &'r Giver,
    outputs: &'r [Taker; 3],
}

impl Hearing<'_> {
    fn hear(&self) -> Result<ProgramEnd, LinkError> {
        loop {
            match self.link.receive()? {
                Frame::Message(Message::Bytes { stream, bytes }) => {
                    self.output(stream)?.take(&bytes)?;
                }
                Frame::Message(Message::Taken { stream: 0, bytes }) if self.relayed.0[0] => {
                    self.input.confirm(bytes)?;
                }
                Frame::Message(Message::Closed { stream: 0 }) if self.relayed.0[0] => {
                    self.input.refuse()?;
                }
                Frame::Message(Message::Closed { stream }) => self.output(stream)?.close()?,
                Frame::Message(Message::Ended { is_known, signal, code }) => {
                    let end = ProgramEnd::of_message(is_known, signal, code);
                    let end = end.ok_or_else(|| senseless("nothing ends so"))?;
                    return self.settle().map(|()| end);
                }
                other => return Err(unexpected(other)),
            }
        }
    }

    /// Waits until all that came was written, and says so.
    fn settle(&self) -> Result<(), LinkError> {
        let relayed = self.outputs.iter().zip(&self.relayed.0[1..]);
        let relayed: Vec<&Taker> = relayed.filter(|(_, is)| **is).map(|(taker, _)| taker).collect();
        if !relayed.iter().all(|taker| taker.is_closed()) {
            return Err(senseless("the program has ended before its streams"));
        }
        while !relayed.iter().all(|taker| taker.is_done()) {
            self.link.look()?;
            std::thread::sleep(LOOK);
        }
        // If nobody hears it, what was written is kept there too.
        let _ = self.link.send(&Message::Heard {});
        Ok(())
    }

    fn output(&self, stream: u32) -> Result<&Taker, LinkError> {
        match stream {
            1..=3 if self.relayed.0[stream as usize] => Ok(&self.outputs[stream as usize - 1]),
            _ => Err(senseless("it sends a stream that is not relayed")),
        }
    }
}
