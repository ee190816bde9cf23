//! Standard streams of a program that has gone, over the link.
//!
//! The source holds the ends of the pipes that the program had ([`ends`]), so that whoever is at the other ends sees
//! nothing of the migration. When the program runs at the destination, both sides pass on what goes through them
//! ([`flow`]): the source by [`Relaying`], the destination by a process of its own, a [`Server`], which stays with the
//! program if the link is lost, and keeps then what nobody reads ([`kept`]).

mod ends;
mod flow;
mod kept;
mod serve;
mod source;
#[cfg(test)]
mod tests;

use super::message::Message;
pub(super) use ends::Ends;
pub use serve::Server;
pub use source::Relaying;

/// What each stream is called.
const NAMES: [&str; 4] = ["stdin", "stdout", "stderr", "terminal"];

/// How a program has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramEnd {
    /// With this exit code.
    Code(u8),
    /// By this signal.
    Signal(u8),
    /// Nobody knows.
    Unknown,
}

impl ProgramEnd {
    fn to_message(self) -> Message {
        let (is_known, signal, code) = match self {
            Self::Code(code) => (true, 0, code),
            Self::Signal(signal) => (true, signal, 0),
            Self::Unknown => (false, 0, 0),
        };
        Message::Ended { is_known, signal: signal.into(), code: code.into() }
    }

    /// What a message says; `None` if that makes no sense.
    fn of_message(is_known: bool, signal: u32, code: u32) -> Option<Self> {
        match (is_known, signal, code) {
            (false, 0, 0) => Some(Self::Unknown),
            (true, 0, code) => Some(Self::Code(u8::try_from(code).ok()?)),
            (true, signal @ 1..=127, 0) => Some(Self::Signal(signal as u8)),
            _ => None,
        }
    }
}
