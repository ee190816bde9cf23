//! What the handles say by which other processes open what is this one's.

use std::io;

use gpucr_wire::peers::Identity;

use crate::agent;
use crate::log::log;
use crate::state::peers;

/// What handles of the shim's begin with, by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum For {
    /// Legacy IPC memory.
    Memory,
    /// Legacy IPC events.
    Event,
    /// Exported blocks.
    Block,
    /// Exported pools.
    Pool,
    /// What was allocated from an exported pool.
    OfPool,
}

/// Bytes of a handle.
pub(super) const LENGTH: usize = 64;

impl For {
    fn magic(self) -> [u8; 8] {
        *match self {
            Self::Memory => b"gpucr-ip",
            Self::Event => b"gpucr-ev",
            Self::Block => b"gpucr-bl",
            Self::Pool => b"gpucr-po",
            Self::OfPool => b"gpucr-op",
        }
    }
}

/// Something that a process offers to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offered {
    pub(super) owner: Identity,
    /// The owner's pid namespace, and its pid in it.
    pub(super) namespace: u64,
    pub(super) pid: u32,
    /// The owner's name for it.
    pub(super) name: u64,
    /// Where it is in the owner, if it is memory of the heap.
    pub(super) address: u64,
}

impl Offered {
    /// Something of this process; from now on others are served.
    ///
    /// # Errors
    /// Nobody can be served.
    pub(super) fn own(name: u64, address: u64) -> io::Result<Self> {
        let made = || -> io::Result<Self> {
            agent::peers::start()?;
            let owner = peers::identity().ok_or(io::ErrorKind::Unsupported)?;
            let namespace = gpucr_wire::own_pid_namespace()?;
            Ok(Self { owner, namespace, pid: std::process::id(), name, address })
        };
        made().inspect_err(|error| log!("nothing can be offered: {error}"))
    }

    pub(super) fn to_bytes(self, what: For) -> [u8; LENGTH] {
        let parts: [&[u8]; 6] = [
            &what.magic(),
            &self.owner,
            &self.namespace.to_le_bytes(),
            &u64::from(self.pid).to_le_bytes(),
            &self.name.to_le_bytes(),
            &self.address.to_le_bytes(),
        ];
        let mut bytes = [0; LENGTH];
        let mut rest = &mut bytes[..];
        for part in parts {
            let (place, after) = rest.split_at_mut(part.len());
            place.copy_from_slice(part);
            rest = after;
        }
        bytes
    }

    /// `None`: it is no handle of ours, or not for this.
    pub(super) fn of(bytes: &[u8; LENGTH], what: For) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk()?;
        let (owner, rest) = rest.split_first_chunk()?;
        let mut words = rest
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
        let mut word = || words.next();
        let found = Self {
            owner: *owner,
            namespace: word()?,
            pid: u32::try_from(word()?).ok()?,
            name: word()?,
            address: word()?,
        };
        (*magic == what.magic()).then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_what_it_was_made_of() {
        let offered =
            Offered { owner: [7; 16], namespace: 1 << 40, pid: 12, name: 34, address: 1 << 46 };
        for what in [For::Memory, For::Event, For::Block, For::Pool, For::OfPool] {
            let bytes = offered.to_bytes(what);
            assert_eq!(Offered::of(&bytes, what), Some(offered));
            let mut other = bytes;
            other[0] ^= 1;
            assert_eq!(Offered::of(&other, what), None);
        }
        assert_eq!(Offered::of(&offered.to_bytes(For::Event), For::Memory), None);
    }
}
