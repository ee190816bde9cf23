//! The control messages between the checkpointer (requests) and the agent (replies).

use crate::access::{Accesses, KernelSummary};
use crate::codec::Stream;
use crate::peers::Identity;
use crate::table::Range;
use crate::transport::MAX_FRAME;
use crate::{wire_enum, wire_struct};

/// Bytes of the longest answer that says little: two paths, a message, what a program holds.
const SHORT: u32 = 64 << 10;

wire_struct! {
    /// The agent's answer to [`Request::Hello`]: who it is and which driver it stands before.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Hello {
        /// [`crate::PROTOCOL_VERSION`] of the shim.
        pub protocol: u32,
        /// The process, as it sees itself.
        pub pid: u32,
        /// Absolute path of the shim's own file.
        pub shim: String,
        /// Absolute path of the driver library behind the shim.
        pub driver: String,
        /// What `cuDriverGetVersion` says, for example 13000.
        pub driver_version: i32,
        /// Where the program stands.
        pub gate: GateState,
    }
}

wire_enum! {
    /// Where a program stands.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum GateState {
        /// The program runs.
        0 => Open {},
        /// No driver call that touches device memory enters; memory is in place.
        1 => Closed {},
        /// Gate closed, and the bulk memory is unmapped and released: its bytes live on only in
        /// the file descriptors that the checkpointer or the watchdog holds.
        2 => Detached {},
        /// The gate is shut, or captures are under way that have to end before, and what came before may still be
        /// at work.
        3 => Closing {},
        /// Gate closed, and it does not open before the checkpointer says so, whatever becomes of the connection: the
        /// program's multicast objects may be undone, here or in other processes that have them.
        4 => Parted {},
    }
}

wire_struct! {
    /// How far a program is that is being stopped.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Rest {
        /// It stands still: the state is [`GateState::Closed`].
        pub is_at_rest: bool,
        /// The gate is shut and a device of it is idle, or it has none yet: it could launch something there.
        pub may_pass: bool,
        /// The gate is shut. If nothing is idle, it could launch something that waits for what is at work.
        pub is_shut: bool,
        /// For how long its gate or a device has been waited for that is not done, milliseconds.
        pub busy_ms: u64,
        /// The longest time for which a device of it was waited for that was done then, milliseconds; of those that
        /// have become idle since this was told last.
        pub longest_ms: u64,
    }
}

wire_enum! {
    /// Where a launch was interrupted.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum Place {
        /// Between blocks: those that have begun are done.
        0 => Between {},
        /// In loops of its threads: blocks that have begun may be among those that are not done.
        1 => Loops {},
        /// At barriers of its blocks, likewise.
        2 => Barriers {},
        /// Anywhere: blocks that have begun and are not done are begun again from their start.
        3 => Aborted {},
    }
}

impl Default for Place {
    fn default() -> Self {
        Self::Between {}
    }
}

wire_struct! {
    /// A launch that was interrupted.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Interrupted {
        /// The name of the kernel, as its module has it.
        pub kernel: String,
        /// Blocks of the grid that are done. The others run once the gate is opened.
        pub done: u64,
        /// Blocks of the grid.
        pub blocks: u64,
        /// Where.
        pub place: Place,
        /// Blocks that had begun and are begun again.
        pub again: u64,
    }
}

wire_struct! {
    /// What the program holds, for `gpucr ps` and for the preflight of a dump.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Counts {
        /// Live allocations made by `cuMemAlloc*` and served from our blocks.
        pub allocations: u64,
        /// Bytes of physical memory in our blocks, the program's own VMM memory included.
        pub bulk_bytes: u64,
        /// Physical blocks.
        pub blocks: u64,
        /// Bytes in stream-ordered pools (allocated, not reserved): left to the driver. Where memory is
        /// private, those of `cuMemAlloc*` too.
        pub pool_bytes: u64,
        /// Whether there is a device whose memory cannot be handed to another process: then there are no
        /// blocks of it, and all of it is left to the driver.
        pub private: bool,
        /// Arrays and mipmapped arrays: left to the driver.
        pub arrays: u64,
        /// Bytes of pinned host memory.
        pub pinned_bytes: u64,
        /// Live managed allocations, which the driver cannot checkpoint.
        pub managed: u64,
        /// Live imports or exports of memory to other processes, which cannot be checkpointed.
        pub shared: u64,
        /// Other things in use that the driver cannot checkpoint, by the name of the function.
        pub unsupported: Vec<String>,
        /// Why a closed gate does not hold all of the program's work, each in words.
        pub ungated: Vec<String>,
        /// Kernel and graph launches so far.
        pub launches: u64,
        /// UUIDs of the devices on which the program has contexts.
        pub devices: Vec<[u8; 16]>,
        /// What processes that share memory with it call it; zeros if there was no need yet.
        pub identity: Identity,
        /// Whose memory it has open.
        pub owners: Vec<Identity>,
        /// Who has memory of it open, as far as they live.
        pub openers: Vec<Opener>,
        /// Multicast objects that it has.
        pub multicast: u64,
    }
}

wire_struct! {
    /// A multicast object, as one process has it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct MulticastObject {
        /// Names it in this process for as long as it lives, across detach and restore.
        pub id: u64,
        /// Who has created it, and that process's name for it.
        pub owner: Identity,
        /// The owner's name for it.
        pub name: u64,
        /// Devices that have to be added before it can be used.
        pub devices: u32,
        /// Bytes that can be bound on each.
        pub size: u64,
        /// The first address at which this process sees it; 0 if it is not mapped.
        pub address: u64,
        /// Devices that this process has added.
        pub added: u32,
        /// As its owner tells: the other processes that have added devices, one for each device.
        pub adders: Vec<Adder>,
        /// Blocks that this process has bound to it, once for each binding.
        pub bound: Vec<u64>,
        /// Whether it is as the program knows it: nothing of it is undone.
        pub is_whole: bool,
    }
}

wire_struct! {
    /// A process that has added a device to a multicast object of another.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Adder {
        /// What it calls itself.
        pub identity: Identity,
        /// Whether the owner sees the device too, and could add it.
        pub is_visible: bool,
    }
}

wire_struct! {
    /// A process that has opened memory of another.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Opener {
        /// What it calls itself.
        pub identity: Identity,
        /// Its pid as the other sees it; 0 if it does not see it.
        pub pid: u32,
    }
}

wire_enum! {
    /// Who asked for a block of physical memory.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum BlockKind {
        /// The shim, to serve `cuMemAlloc*`.
        0 => Heap {},
        /// The program itself, with `cuMemCreate`.
        1 => Program {},
        /// Another process: this one has opened its memory. No descriptor of such a block is sent: the owner sends one.
        2 => Opened {
            /// Whose memory it is.
            owner: Identity,
            /// The owner's name for the block.
            block: u64,
        },
    }
}

wire_struct! {
    /// One block of physical device memory, and where the program sees it.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Block {
        /// Names the block for as long as it lives, across detach and restore.
        pub id: u64,
        /// UUID of the device that holds it.
        pub device: [u8; 16],
        /// Bytes; a multiple of the device's allocation granularity.
        pub size: u64,
        /// Who asked for it.
        pub kind: BlockKind,
        /// The address at which the program sees its start; 0 if it is not mapped.
        pub address: u64,
        /// Live allocations inside it.
        pub allocations: u32,
    }
}

wire_enum! {
    /// A request from the checkpointer to the agent.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Request {
        /// First message of every connection. An agent of another version answers with its
        /// [`Reply::Hello`] too and then closes the connection.
        0 => Hello {
            /// The checkpointer's [`crate::PROTOCOL_VERSION`].
            protocol: u32,
        },
        /// What does the program hold? Allowed in every state.
        1 => Counts {},
        /// Close the gate and drain all streams. Fails, with the gate open again, when that takes
        /// longer than the limit, which counts from the first [`Request::Halt`] if there was one.
        2 => CloseGate {
            /// Limit, milliseconds.
            timeout_ms: u64,
        },
        /// List every block. The reply is followed by one file descriptor for each block that is
        /// not among the known ones, in the same order. With the gate open the list may be out of
        /// date when it arrives. What the checkpointer holds of blocks that the program has given
        /// back keeps their memory from the device, so it asks again from time to time.
        3 => Export {
            /// Ids of the blocks of which the checkpointer still holds a file descriptor.
            known: Vec<u64>,
        },
        /// Copy from a block into the shared staging memory (see [`Request::Stage`]), through the
        /// program's own context: the way out where no second context fits on the device.
        4 => CopyOut {
            /// The block.
            block: u64,
            /// First byte within the block.
            offset: u64,
            /// Bytes; at most the staging memory's size.
            len: u64,
        },
        /// Shrink stacks, unmap and release every block. Only after [`Request::Export`]. Once the
        /// reply is sent the agent closes the connection and keeps no file descriptor.
        5 => Detach {},
        /// Take the blocks back. Followed by one file descriptor for each id, in the same order.
        /// Maps every block at its old address and undoes everything that Detach did. A failure
        /// leaves the program detached, and the call may be repeated.
        6 => Reattach {
            /// Ids of the blocks.
            blocks: Vec<u64>,
        },
        /// Open the gate. When detached only if every block has memory, filled by
        /// [`Request::CopyIn`]; an open gate stays open.
        7 => OpenGate {},
        /// Followed by one file descriptor: shared memory of the given size, for
        /// [`Request::CopyOut`] and [`Request::CopyIn`].
        8 => Stage {
            /// Bytes.
            len: u64,
        },
        /// Make a new block's memory from inside: create, map, and copy from the staging memory.
        /// Only when detached; creates the block's memory on its first use.
        9 => CopyIn {
            /// The block.
            block: u64,
            /// First byte within the block.
            offset: u64,
            /// Bytes.
            len: u64,
        },
        /// Begin to record what launches may read and write, or end it. Beginning twice goes on;
        /// the end of the connection ends it too. Allowed in every state.
        10 => Record {
            /// Whether to record.
            on: bool,
        },
        /// What has been launched since recording began or this was last asked. Fails while nothing
        /// is recorded.
        11 => Accesses {},
        /// Send what a module or library was loaded from. The reply is followed by one file
        /// descriptor.
        12 => Image {
            /// The id that [`crate::access::KernelUse::image`] names.
            id: u64,
            /// More bytes are refused.
            limit: u64,
        },
        /// Let calls pass the closed gate up to the next launch, that one too, or up to the end of a
        /// capture that begins; close it again and drain all streams. It may be that none came. A failure opens the
        /// gate.
        13 => Step {
            /// How long to wait for a launch, milliseconds.
            wait_ms: u64,
            /// Limit for closing and draining, milliseconds.
            timeout_ms: u64,
            /// Keep what the launch consists of, for [`Request::Again`].
            keep: bool,
        },
        /// Followed by one file descriptor: a [`crate::Table`]. From the opening of the gate on, what
        /// may write a chunk waits until it is saved. This ends with the connection. Only while the
        /// gate is closed and memory is in place.
        14 => Guard {
            /// The device memory of the table.
            ranges: Vec<Range>,
            /// What is known of kernels. Of others it is assumed that they write through all of their
            /// arguments.
            summaries: Vec<KernelSummary>,
            /// Names of kernels that may write anywhere.
            distrusted: Vec<String>,
        },
        /// Followed by one file descriptor: a [`crate::Table`] with a [`Range::WHOLE`] for each block. From the
        /// opening of the gate on, which is allowed although they are detached, whatever may touch one of
        /// these blocks waits until it is attached and its chunk free. Only when detached, with all
        /// detached blocks. If the connection ends before all are attached the program stays where it
        /// is, detached.
        15 => Await {
            /// Ids of the blocks.
            blocks: Vec<u64>,
        },
        /// Give awaited blocks their memory, with the gate open. Followed by one file descriptor for each id,
        /// in the same order.
        16 => Attach {
            /// Ids of the blocks.
            blocks: Vec<u64>,
        },
        /// Followed by one file descriptor: a [`crate::Table`] with a [`Range::WHOLE`] for each block, all
        /// pending. The memory that these blocks get next is shared with other processes: it is mapped so
        /// that the device only reads it, and a call that may write a block waits until the agent has given
        /// it memory of its own. It outlives the connection; who asks for the blocks, or closes the gate,
        /// ends it, and then all of them have their own. Only when detached.
        17 => Share {
            /// Ids of the blocks.
            blocks: Vec<u64>,
            /// What is known of kernels, as in [`Request::Guard`].
            summaries: Vec<KernelSummary>,
        },
        /// Make a userfaultfd of this process. The reply is followed by its descriptor, of which the agent keeps none.
        /// From now on, and up to the end of the connection, the agent remembers what devices may write of the host's
        /// memory ([`Request::Pinned`]). Allowed in every state.
        18 => Track {},
        /// Which host memory may devices have written since [`Request::Track`]? Fails before that. Allowed in every
        /// state.
        19 => Pinned {},
        /// Shut the gate, or go on waiting until the program stands still behind it. What does not come to rest in
        /// time is no failure: the gate stays shut. Open and Closing only. A failure opens the gate.
        20 => Halt {
            /// How long to wait now, milliseconds.
            wait_ms: u64,
            /// Limit for what has to be done before the gate is shut, milliseconds.
            timeout_ms: u64,
            /// Once the gate is shut, launches that can be interrupted are. What does not come to rest then within
            /// so many milliseconds goes on to its end. 0: none is.
            interrupt_ms: u64,
        },
        /// Let calls pass the shut gate up to one launch on a device that is idle, or on any if `busy_too` is set, that
        /// one too, or up to the end of a capture that begins; then shut it again. It may be that no launch came. Only after an answer to
        /// [`Request::Halt`] that says that this may be; each allows one. A failure opens the gate.
        21 => Pass {
            /// How long to wait for a launch, milliseconds.
            wait_ms: u64,
            /// The launch may be on a device that is busy: the gate has to be shut only.
            busy_too: bool,
        },
        /// Make the launch that the last [`Request::Step`] has kept once more, and drain all streams. Only while the
        /// gate is closed. A failure leaves the gate closed.
        22 => Again {
            /// Limit for draining, milliseconds.
            timeout_ms: u64,
        },
        /// Which launches are interrupted, and go on when the gate is opened? Only while the gate is closed.
        23 => Interrupted {},
        /// Wait until a thread of the program comes back from a call by which it waits for the device, and begin to
        /// close the gate before it goes on. Only when open. The state is [`GateState::Closing`] then, and
        /// [`Request::Halt`] does the rest. Where no thread has come back in time it stays open, and that is no failure.
        24 => Meet {
            /// How long to wait, milliseconds.
            wait_ms: u64,
        },
        /// The program was restored from an image, and is about to go on. Allowed in every state.
        25 => Restored {},
        /// Would a kernel die if another process came to one of the devices now? In a process that the driver has once
        /// restored it would if it runs for some seconds more: see docs/interruption.md. Allowed in every state.
        26 => Fragile {
            /// What the devices were given may take so long to come to its end, milliseconds.
            wait_ms: u64,
        },
        /// The multicast objects of the program are about to be undone, or those of others that they share: from now on
        /// the gate stays closed, even if the connection ends. Only when closed; the state is [`GateState::Parted`] then.
        /// [`Request::Detach`], which undoes the objects too, needs this where there are any.
        27 => Part {},
        /// List the multicast objects. Allowed in every state.
        28 => Objects {},
        /// Undo whatever there still is of the multicast objects, and create these again. The reply is followed by a
        /// descriptor of each, in the same order. Parted or detached only, as are the next ones; after a failure of any all
        /// may be repeated, from this one on.
        29 => Make {
            /// Ids of the objects that this process is to create.
            objects: Vec<u64>,
        },
        /// Followed by one file descriptor for each id, in the same order: take these objects, which other processes have
        /// made, and add the devices that this one had added. Only when all processes have done [`Request::Make`].
        30 => Join {
            /// Ids of the objects.
            objects: Vec<u64>,
            /// The processes that take part. The devices of others who have ended the owner adds.
            present: Vec<Identity>,
        },
        /// Bind and map what was bound and mapped. Only when all processes have joined, and all devices of the objects that
        /// are used were added: the driver waits for them. Blocks have to have their memory.
        31 => Bind {},
        /// All processes have bound and mapped what they had: Parted becomes Closed. Fails while anything is undone here.
        32 => Whole {},
    }
}

impl Request {
    /// Bytes of the longest answer that an agent may give to this: who sends more is no agent.
    pub fn longest_reply(&self) -> u32 {
        match self {
            Self::Export { .. } | Self::Accesses {} | Self::Pinned {} | Self::Objects {} => {
                MAX_FRAME
            }
            _ => SHORT,
        }
    }
}

wire_enum! {
    /// A reply from the agent to the checkpointer.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum Reply {
        /// Answer to Hello.
        0 => Hello {
            /// Who answers.
            hello: Hello,
        },
        /// Answer to Counts.
        1 => Counts {
            /// What the program holds.
            counts: Counts,
        },
        /// Answer to Export; the file descriptors follow.
        2 => Blocks {
            /// Every block.
            blocks: Vec<Block>,
        },
        /// The request was carried out.
        3 => Done {},
        /// The request failed; what holds then is said with each request.
        4 => Failed {
            /// The driver's error code, or 0 where the driver was not the cause.
            code: i32,
            /// What failed and why.
            message: String,
        },
        /// Answer to Accesses.
        5 => Accesses {
            /// What was launched.
            accesses: Accesses,
        },
        /// Answer to Image; a file descriptor follows.
        6 => Image {
            /// Bytes of the file from its beginning that are the image.
            bytes: u64,
        },
        /// Answer to Pinned.
        7 => Ranges {
            /// Host memory that is or was pinned or registered, in the order of the addresses.
            ranges: Vec<Range>,
        },
        /// Answer to Halt.
        8 => Rest {
            /// How far it is.
            rest: Rest,
        },
        /// Answer to Pass.
        9 => Passed {
            /// Whether a launch has passed.
            launched: bool,
        },
        /// Answer to Again.
        10 => Again {
            /// Whether a launch was kept, and has been made.
            launched: bool,
        },
        /// Answer to Interrupted.
        11 => Interrupted {
            /// The launches.
            launches: Vec<Interrupted>,
        },
        /// Answer to Meet.
        12 => Met {
            /// Whether a thread has come back.
            met: bool,
        },
        /// Answer to Fragile.
        13 => Fragile {
            /// Whether nobody should come to the devices before the gate is closed.
            fragile: bool,
        },
        /// Answer to Objects.
        14 => Objects {
            /// What processes call this one with which it shares memory.
            identity: Identity,
            /// Every multicast object.
            objects: Vec<MulticastObject>,
        },
        /// Answer to Make; the file descriptors follow.
        15 => Made {},
    }
}

impl Stream for Request {}
impl Stream for Reply {}
impl Stream for Hello {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Malformed;

    fn block() -> Block {
        Block {
            id: 7,
            device: *b"0123456789abcdef",
            size: 2 << 20,
            kind: BlockKind::Program {},
            address: 0x7000_0000_0000,
            allocations: 3,
        }
    }

    fn guard() -> Request {
        let reads = vec![crate::access::Slot { param: 1, offset: 8 }];
        let terms = vec![crate::reach::Term { index: 4, bytes: -4 }];
        let reach = crate::reach::Reach { low: -4, end: 8, terms };
        let slot = crate::access::Slot { param: 0, offset: 0 };
        let reaches = vec![crate::access::Reached { slot, reach }];
        Request::Guard {
            ranges: vec![Range { address: 4096, size: 1 << 21 }],
            summaries: vec![KernelSummary { kernel: 3, anywhere: true, reads, reaches }],
            distrusted: vec!["k".into()],
        }
    }

    fn accesses() -> Accesses {
        use crate::access::{Allocation, KernelUse, Operation, OperationUse, SlotUse, Touched};
        use crate::twice::{Class, Place};
        let touched = vec![Touched { allocation: 3, low: 4096, high: 8192, launches: 2 }];
        Accesses {
            kernels: vec![KernelUse {
                name: "k".into(),
                known: true,
                slots: vec![SlotUse { param: 1, offset: 8, more: true, touched }],
                classes: vec![Class { places: vec![Place { at: 1, before: 0 }], launches: 2 }],
                ..KernelUse::default()
            }],
            operations: vec![OperationUse {
                operation: Operation::Fill {},
                write: true,
                allocation: 3,
                count: 1,
                bytes: 64,
                low: 4096,
                end: 4160,
            }],
            allocations: vec![Allocation { id: 3, address: 4096, size: 1 << 20 }],
            unseen: 5,
            ..Accesses::default()
        }
    }

    #[test]
    fn messages_survive_the_round_trip() {
        for request in [
            Request::Hello { protocol: 1 },
            Request::CloseGate { timeout_ms: 10_000 },
            Request::Step { wait_ms: 100, timeout_ms: 10_000, keep: true },
            Request::Again { timeout_ms: 10_000 },
            Request::CopyOut { block: 1, offset: 2, len: 3 },
            Request::Reattach { blocks: vec![1, 2, u64::MAX] },
            Request::Record { on: true },
            Request::Accesses {},
            Request::Image { id: 7, limit: 1 << 40 },
            Request::Await { blocks: vec![4, 5] },
            Request::Attach { blocks: vec![5] },
            Request::Share { blocks: vec![5, 6], summaries: Vec::new() },
            guard(),
            Request::Track {},
            Request::Pinned {},
            Request::Halt { wait_ms: 5, timeout_ms: 10_000, interrupt_ms: 2000 },
            Request::Interrupted {},
            Request::Pass { wait_ms: 100, busy_too: true },
            Request::Meet { wait_ms: 100 },
            Request::Fragile { wait_ms: 1000 },
            Request::Part {},
            Request::Make { objects: vec![3, 4] },
            Request::Join { objects: vec![5], present: vec![[9; 16]] },
            Request::Restored {},
        ] {
            assert_eq!(Request::from_bytes(&request.to_bytes()), Ok(request));
        }
        for reply in [
            Reply::Blocks { blocks: vec![block(), block()] },
            Reply::Ranges { ranges: vec![Range { address: 4096, size: 8192 }] },
            Reply::Counts {
                counts: Counts {
                    unsupported: vec!["cuMemAllocManaged".into()],
                    ungated: vec!["it has called cuNothing".into()],
                    ..Counts::default()
                },
            },
            Reply::Failed { code: 801, message: "größer".into() },
            Reply::Accesses { accesses: accesses() },
            Reply::Image { bytes: 1 << 33 },
            Reply::Rest { rest: Rest { may_pass: true, busy_ms: 7, ..Rest::default() } },
            Reply::Passed { launched: true },
            Reply::Again { launched: true },
            Reply::Interrupted {
                launches: vec![Interrupted {
                    kernel: "k".into(),
                    done: 8,
                    blocks: 1320,
                    place: Place::Aborted {},
                    again: 7,
                }],
            },
            Reply::Met { met: true },
        ] {
            assert_eq!(Reply::from_bytes(&reply.to_bytes()), Ok(reply));
        }
    }

    #[test]
    fn every_cut_and_every_extension_is_refused() {
        let bytes = Reply::Blocks { blocks: vec![block()] }.to_bytes();
        for len in 0..bytes.len() {
            assert!(Reply::from_bytes(&bytes[..len]).is_err(), "cut to {len} bytes");
        }
        let mut longer = bytes;
        longer.push(0);
        assert_eq!(Reply::from_bytes(&longer), Err(Malformed("it is too long")));
    }

    #[test]
    fn a_lying_length_allocates_nothing() {
        let bytes = [6, 0xff, 0xff, 0xff, 0xff];
        assert!(Request::from_bytes(&bytes).is_err());
    }
}
