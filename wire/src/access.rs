//! What launches may read and write, as the shim sees it from their arguments.
//!
//! `docs/access-sets.md` says what of this is exact and what is a guess.

use crate::reach::{Reach, Sizes};
use crate::twice::Class;
use crate::{wire_enum, wire_struct};

/// Stands in [`SlotUse::param`] for a kernel whose parameters are not known one by one: the slot's
/// offset is one in the whole parameter buffer.
pub const WHOLE_BUFFER: u32 = u32::MAX;

/// In the id of an [`Allocation`]: it is a reservation of addresses of the program's. What it maps there
/// may be mapped at other addresses too.
pub const RESERVATION: u64 = 1 << 61;

wire_struct! {
    /// What was launched between two questions.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct Accesses {
        /// The kernels, each once.
        pub kernels: Vec<KernelUse>,
        /// Copies, fills and the like: exact ranges.
        pub operations: Vec<OperationUse>,
        /// Every allocation that is named above and still lives.
        pub allocations: Vec<Allocation>,
        /// Launches of graphs that could not be looked into: they may have touched everything.
        pub unknown_graphs: u64,
        /// Launches for which there was no room to keep apart: they may have touched everything.
        pub unseen: u64,
        /// Host functions in streams: they may touch host memory that the device sees too, and no
        /// device memory.
        pub host_functions: u64,
    }
}

wire_struct! {
    /// One kernel, and what its parameters pointed to.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct KernelUse {
        /// Names the kernel; never that of another one.
        pub id: u64,
        /// Its name in the module, mangled; empty if the driver does not say.
        pub name: String,
        /// Names what its module was loaded from, for [`crate::Request::Image`]; 0 if that was not
        /// seen.
        pub image: u64,
        /// Whether the kernel's parameters are known. If not, and there are no slots, it may have
        /// touched everything.
        pub known: bool,
        /// Its parameters.
        pub params: Vec<Param>,
        /// How often it was launched, within graphs too.
        pub launches: u64,
        /// How often within graphs.
        pub in_graphs: u64,
        /// The largest launch.
        pub sizes: Sizes,
        /// The words of its parameters that have pointed into device memory.
        pub slots: Vec<SlotUse>,
        /// Its launches by how their arguments point to each other's allocations, as far as there was room.
        pub classes: Vec<Class>,
    }
}

wire_struct! {
    /// Place of a parameter in the parameter buffer.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Param {
        /// First byte.
        pub offset: u32,
        /// Bytes.
        pub size: u32,
    }
}

wire_struct! {
    /// An aligned 8-byte word of a parameter, and what it pointed to.
    #[derive(Debug, Clone, Default, PartialEq, Eq)]
    pub struct SlotUse {
        /// Which parameter, or [`WHOLE_BUFFER`].
        pub param: u32,
        /// First byte of the word within it.
        pub offset: u32,
        /// The word has pointed to more allocations than there was room to note.
        pub more: bool,
        /// The allocations.
        pub touched: Vec<Touched>,
    }
}

wire_struct! {
    /// An allocation to which a slot has pointed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Touched {
        /// Its id.
        pub allocation: u64,
        /// The lowest address that the slot held.
        pub low: u64,
        /// The highest one.
        pub high: u64,
        /// Launches in which it pointed there.
        pub launches: u64,
    }
}

wire_enum! {
    /// What is not a kernel and touches device memory.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Operation {
        /// A copy.
        0 => Copy {},
        /// A fill.
        1 => Fill {},
        /// Waiting for a value, or writing one, in the order of a stream.
        2 => Value {},
        /// Telling the driver that the contents are not needed any more.
        3 => Discard {},
        /// Decompression by the device.
        4 => Decompress {},
    }
}

wire_struct! {
    /// Operations of one kind on one allocation.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct OperationUse {
        /// What they do.
        pub operation: Operation,
        /// Whether they wrote the allocation, or read it.
        pub write: bool,
        /// The allocation.
        pub allocation: u64,
        /// How many.
        pub count: u64,
        /// Bytes of all of them together.
        pub bytes: u64,
        /// The lowest address of any.
        pub low: u64,
        /// The address behind the highest byte of any.
        pub end: u64,
    }
}

wire_struct! {
    /// Memory that the program knows as one piece.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Allocation {
        /// Names it as long as it lives: an allocation of `cuMemAlloc*` or, of memory that the
        /// program maps itself, a reservation of addresses ([`RESERVATION`]).
        pub id: u64,
        /// Where it begins.
        pub address: u64,
        /// Bytes; of a reservation, from the first to the last byte that is mapped.
        pub size: u64,
    }
}

wire_struct! {
    /// An aligned 8-byte word of a kernel's parameters.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub struct Slot {
        /// Which parameter.
        pub param: u32,
        /// First byte of the word within it.
        pub offset: u32,
    }
}

wire_struct! {
    /// What is known of a kernel beyond its arguments.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct KernelSummary {
        /// Its id, see [`KernelUse::id`].
        pub kernel: u64,
        /// The kernel may write where its arguments do not point.
        pub anywhere: bool,
        /// Words through which it does not write.
        pub reads: Vec<Slot>,
        /// How far it goes from the addresses in others, where that is known.
        pub reaches: Vec<Reached>,
    }
}

wire_struct! {
    /// How far a kernel goes from the address in a word of its parameters.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Reached {
        /// The word.
        pub slot: Slot,
        /// How far.
        pub reach: Reach,
    }
}
