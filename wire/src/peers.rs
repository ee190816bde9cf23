//! What programs under the shim ask each other: memory, pools and events that one of them has offered to others, by a
//! legacy IPC handle or by an exported one.
//!
//! A program that has offered something listens on a second abstract socket ([`peers_socket`]). Who opens a handle
//! connects, sends one request, gets one reply, and with those that give something one descriptor of it; then the
//! connection ends. The checkpointer does not take part.

use crate::codec::Stream;
use crate::{wire_enum, wire_struct};

/// What the names of these sockets begin with.
pub const PEERS: &str = "gpucr-peers";

/// Name (without the leading NUL) of the abstract socket on which process `pid` serves those who open its memory. The
/// pid is the one that the process sees itself, in the pid namespace of that number.
pub fn peers_socket(namespace: u64, pid: u32) -> String {
    format!("{PEERS}-{namespace}-{pid}")
}

/// What a process is called by those with which it shares memory: random, and its own also after a restore.
pub type Identity = [u8; 16];

wire_enum! {
    /// From a process that opens memory, or has closed it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum PeerRequest {
        /// Give me the block in which this allocation lies.
        0 => Open {
            /// Whom the handle names.
            owner: Identity,
            /// The allocation.
            allocation: u64,
            /// Where it begins in the owner.
            address: u64,
            /// Who asks.
            opener: Identity,
        },
        /// I have closed all that I had opened of this block, or this event.
        1 => Close {
            /// Whose block it is.
            owner: Identity,
            /// The block.
            block: u64,
            /// Who has closed it.
            opener: Identity,
        },
        /// Give me this block, or this multicast object, which was exported.
        2 => Import {
            /// Whom the ticket names.
            owner: Identity,
            /// The block.
            block: u64,
            /// Who asks.
            opener: Identity,
        },
        /// Give me the memory in which this event is.
        3 => Event {
            /// Whom the handle names.
            owner: Identity,
            /// The event.
            event: u64,
            /// Who asks.
            opener: Identity,
        },
        /// Of which device is this pool, which was exported?
        4 => Pool {
            /// Whom the ticket names.
            owner: Identity,
            /// The pool.
            pool: u64,
        },
        /// Give me the block in which this allocation of a pool lies.
        5 => OpenOfPool {
            /// Whose pool it is.
            owner: Identity,
            /// The pool that the opener has.
            pool: u64,
            /// The allocation.
            allocation: u64,
            /// Where it begins in the owner.
            address: u64,
            /// Who asks.
            opener: Identity,
        },
        /// I have added a device to this multicast object.
        6 => Added {
            /// Whose object it is.
            owner: Identity,
            /// The object.
            object: u64,
            /// UUID of the device.
            device: [u8; 16],
            /// Who has added it.
            adder: Identity,
        },
        /// Were all devices added to this multicast object?
        7 => Team {
            /// Whose object it is.
            owner: Identity,
            /// The object.
            object: u64,
        },
    }
}

wire_enum! {
    /// The answer to a [`PeerRequest`].
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum PeerReply {
        /// To `Open` and `OpenOfPool`: a descriptor of the block follows.
        0 => Opened {
            /// Which block, and where the allocation lies in it.
            piece: Piece,
        },
        /// There is such memory, but it is not in its place now. Ask again.
        1 => Busy {},
        /// There is no such thing, or not for others.
        2 => Gone {},
        /// To `Close` and `Added`.
        3 => Done {},
        /// To `Import`: a descriptor of the block follows.
        4 => Imported {
            /// What the block is.
            block: Whole,
        },
        /// To `Event`: a descriptor of the memory in which the event is follows.
        5 => Event {
            /// The owner's name for that memory.
            arena: u64,
            /// The number of the event's cell in it.
            cell: u32,
            /// The number of the last record that is not this event's.
            base: u32,
        },
        /// To `Pool`.
        6 => Pool {
            /// UUID of its device.
            device: [u8; 16],
        },
        /// To `Import`, where that names a multicast object: a descriptor of it follows.
        7 => Object {
            /// What the object is.
            team: Team,
        },
        /// To `Team`.
        8 => Team {
            /// Whether all devices were added.
            is_complete: bool,
        },
    }
}

wire_struct! {
    /// A multicast object that was exported.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Team {
        /// Devices that are to be added to it.
        pub devices: u32,
        /// Bytes that can be bound on each.
        pub size: u64,
        /// The types of handles for which its owner has made it.
        pub handle_types: u32,
    }
}

wire_struct! {
    /// An allocation within a block.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Piece {
        /// The block, by its owner's name for it.
        pub block: u64,
        /// Bytes of the block.
        pub block_size: u64,
        /// UUID of its device.
        pub device: [u8; 16],
        /// Where the allocation begins in the block.
        pub offset: u64,
        /// Bytes of the allocation.
        pub size: u64,
    }
}

wire_struct! {
    /// A block that was exported.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Whole {
        /// Bytes.
        pub size: u64,
        /// UUID of its device.
        pub device: [u8; 16],
        /// The types of handles for which its owner has made it.
        pub handle_types: u32,
        /// 0 for memory of that device; for host memory one more than the number of its NUMA node.
        pub node: u32,
    }
}

impl Piece {
    /// Whether the allocation lies within the block.
    pub fn is_possible(&self) -> bool {
        self.size > 0
            && self.offset.checked_add(self.size).is_some_and(|end| end <= self.block_size)
    }
}

impl Stream for PeerRequest {}
impl Stream for PeerReply {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_allocation_lies_within_its_block() {
        let piece =
            |offset, size| Piece { block: 1, block_size: 64, device: [0; 16], offset, size };
        assert!(piece(0, 64).is_possible() && piece(63, 1).is_possible());
        assert!(!piece(0, 0).is_possible() && !piece(1, 64).is_possible());
        assert!(!piece(u64::MAX, 2).is_possible());
    }

    #[test]
    fn messages_are_read_as_they_were_written() {
        let request =
            PeerRequest::Open { owner: [1; 16], allocation: 2, address: 3, opener: [4; 16] };
        assert_eq!(PeerRequest::from_bytes(&request.to_bytes()), Ok(request));
        let request = PeerRequest::Import { owner: [1; 16], block: 2, opener: [4; 16] };
        assert_eq!(PeerRequest::from_bytes(&request.to_bytes()), Ok(request));
        let block = Whole { size: 1 << 21, device: [3; 16], handle_types: 1, node: 0 };
        let reply = PeerReply::Imported { block };
        assert_eq!(PeerReply::from_bytes(&reply.to_bytes()), Ok(reply));
        let request =
            PeerRequest::Added { owner: [1; 16], object: 2, device: [3; 16], adder: [4; 16] };
        assert_eq!(PeerRequest::from_bytes(&request.to_bytes()), Ok(request));
        let team = Team { devices: 2, size: 1 << 21, handle_types: 1 };
        for reply in [PeerReply::Object { team }, PeerReply::Team { is_complete: true }] {
            assert_eq!(PeerReply::from_bytes(&reply.to_bytes()), Ok(reply));
        }
        let piece = Piece { block: 1, block_size: 2, device: [3; 16], offset: 0, size: 1 };
        let reply = PeerReply::Opened { piece };
        assert_eq!(PeerReply::from_bytes(&reply.to_bytes()), Ok(reply));
    }
}
