//! How a program ends whose standard streams are relayed, and what these are called.

use crate::engine::migrate::message::Message;

/// What each stream is called.
pub(super) const NAMES: [&str; 4] = ["stdin", "stdout", "stderr", "terminal"];

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
    pub(super) fn to_message(self) -> Message {
        let (is_known, signal, code) = match self {
            Self::Code(code) => (true, 0, code),
            Self::Signal(signal) => (true, signal, 0),
            Self::Unknown => (false, 0, 0),
        };
        Message::Ended { is_known, signal: signal.into(), code: code.into() }
    }

    /// What a message says; `None` if that makes no sense.
    pub(super) fn of_message(is_known: bool, signal: u32, code: u32) -> Option<Self> {
        match (is_known, signal, code) {
            (false, 0, 0) => Some(Self::Unknown),
            (true, 0, code) => Some(Self::Code(u8::try_from(code).ok()?)),
            (true, signal @ 1..=127, 0) => Some(Self::Signal(signal as u8)),
            _ => None,
        }
    }
}
