//! The executable form: instructions over numbered registers.

use super::ast::Space;
pub(crate) use super::lanes::WIDTH;

use super::fragment::{Element, Fragment, MOST_REGISTERS, Sum};

/// One register of a warp. A value narrower than 64 bits is in the low bits; the bits above it
/// are unspecified, every reader takes only its own width.
pub(crate) type Lanes = [u64; WIDTH];

/// Kernels compute one result per lane of the mask. The pointers must be valid; the result may
/// be the same register as a source.
pub(crate) type Map1 = unsafe fn(u32, *mut Lanes, *const Lanes);
pub(crate) type Map2 = unsafe fn(u32, *mut Lanes, *const Lanes, *const Lanes);
pub(crate) type Map3 = unsafe fn(u32, *mut Lanes, *const Lanes, *const Lanes, *const Lanes);
pub(crate) type Map4 =
    unsafe fn(u32, *mut Lanes, *const Lanes, *const Lanes, *const Lanes, *const Lanes);

/// A register to write.
pub(crate) type Reg = u32;

/// A source: a register, or with [`CONSTANT`] set an index into [`Code::constants`].
pub(crate) type Src = u32;

pub(crate) const CONSTANT: u32 = 1 << 31;
/// A register number that means "none".
pub(crate) const NONE: u32 = u32::MAX;

/// Generic addresses of the windows that are not global memory; no mapped address has these
/// top bytes.
pub(crate) const SHARED_WINDOW: u64 = 0x0100_0000_0000_0000;
pub(crate) const LOCAL_WINDOW: u64 = 0x0200_0000_0000_0000;
pub(crate) const PARAM_WINDOW: u64 = 0x0300_0000_0000_0000;
/// Addresses of functions: this plus the function's number.
pub(crate) const FUNCTION_WINDOW: u64 = 0x0400_0000_0000_0000;
pub(crate) const WINDOW_MASK: u64 = 0xff00_0000_0000_0000;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Inst {
    /// Guard register times two, plus one if negated; or [`NONE`].
    pub(crate) guard: u32,
    pub(crate) op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    WarpCount,
    SmId,
    SmCount,
    GridId,
    Clock,
    GlobalTimer,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    DynamicShared,
    TotalShared,
    /// The part of shared memory that libraries reserve, plus an offset.
    ReservedShared(u32),
    /// The high or the low half of the address of a grid's barrier.
    GridWorkspace(bool),
    /// The cluster's place in the grid, by axis.
    ClusterId(u8),
    ClusterCount(u8),
    /// The block's place in its cluster.
    BlockInCluster(u8),
    ClusterShape(u8),
    ClusterRank,
    ClusterSize,
    /// Whether clusters have several blocks.
    IsCluster,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicOp {
    Add,
    Min,
    Max,
    Inc,
    Dec,
    And,
    Or,
    Xor,
    Exchange,
    CompareExchange,
}

/// The type an atomic works on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AtomicType {
    Unsigned,
    Signed,
    Float,
    Half,
    Half2,
    Bfloat,
    Bfloat2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShuffleMode {
    Up,
    Down,
    Butterfly,
    Index,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VoteMode {
    All,
    Any,
    Uniform,
    Ballot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BarrierMode {
    Sync,
    Arrive,
    Count,
    And,
    Or,
}

/// Where a load or store goes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) space: Space,
    pub(crate) base: Src,
    pub(crate) offset: i64,
    /// The base is a 32-bit register.
    pub(crate) narrow: bool,
    /// The offset counts from the current function's frame in local memory.
    pub(crate) frame: bool,
    /// Bytes of one element: 1, 2, 4 or 8.
    pub(crate) size: u8,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Op {
    Map1(Map1, Reg, Src),
    Map2(Map2, Reg, Src, Src),
    Map3(Map3, Reg, Src, Src, Src),
    Map4(Map4, Reg, [Src; 4]),
    /// Copies the mask's lanes.
    Copy(Reg, Src),
    Special(Reg, Special),
    /// The address of a module variable, plus an addend.
    GlobalAddress(Reg, u32, i64),
    /// The offset in local memory of an offset in the frame, plus a window's base.
    FrameAddress(Reg, u32, u64),
    /// The offset of dynamic shared memory, aligned up to the second number, plus an addend.
    DynamicShared(Reg, u32, i64),
    Load {
        place: Place,
        signed: bool,
        count: u8,
        to: [Reg; 4],
    },
    Store {
        place: Place,
        count: u8,
        from: [Src; 4],
    },
    Atomic {
        place: Place,
        op: AtomicOp,
        ty: AtomicType,
        /// Or [`NONE`].
        to: Reg,
        b: Src,
        c: Src,
    },
    Shuffle {
        mode: ShuffleMode,
        to: Reg,
        /// The in-range predicate, or [`NONE`].
        valid: Reg,
        value: Src,
        lane: Src,
        clamp: Src,
    },
    Vote {
        mode: VoteMode,
        to: Reg,
        predicate: Src,
        negated: bool,
        members: Src,
    },
    ActiveMask(Reg),
    Match {
        all: bool,
        wide: bool,
        to: Reg,
        valid: Reg,
        value: Src,
        members: Src,
    },
    Reduce {
        op: AtomicOp,
        signed: bool,
        to: Reg,
        value: Src,
        members: Src,
    },
    Elect {
        to: Reg,
        valid: Reg,
        members: Src,
    },
    Barrier {
        mode: BarrierMode,
        /// The barrier's number, or [`NONE`] for that of the cluster.
        id: Src,
        /// Threads, or [`NONE`] for all.
        threads: Src,
        to: Reg,
        predicate: Src,
        negated: bool,
    },
    Fence,
    /// An address of shared memory in the block of a rank: the result, the address, the rank.
    ClusterAddress(Reg, Src, Src),
    /// The rank of the block that an address of shared memory is in.
    RankOfAddress(Reg, Src),
    /// An index into [`Code::images`].
    Image(u32),
    /// An index into [`Code::copies`].
    CopyAsync(u32),
    /// An index into [`Code::bulk_copies`].
    CopyBulk(u32),
    /// An index into [`Code::mbarriers`].
    Mbarrier(u32),
    /// An index into [`Code::multimems`].
    Multimem(u32),
    /// Matrices of 8 by 8 elements of 16 bits, from rows in shared memory to registers.
    LoadMatrix {
        place: Place,
        count: u8,
        transposed: bool,
        to: [Reg; 4],
    },
    /// The way back.
    StoreMatrix {
        place: Place,
        count: u8,
        transposed: bool,
        from: [Src; 4],
    },
    /// A matrix of 8 by 8 elements of 16 bits in registers.
    TransposeMatrix(Reg, Src),
    /// An index into [`Code::products`].
    MultiplyMatrices(u32),
    /// An index into [`Code::fragments`].
    LoadFragment(u32),
    StoreFragment(u32),
    /// Target, and the reconvergence point.
    Branch(u32, u32),
    /// Selector, table, reconvergence point.
    BranchIndexed(Src, u32, u32),
    /// Function number, and an index into [`Code::calls`].
    Call(u32, u32),
    CallIndirect(Src, u32),
    Print(u32),
    AssertFail(u32),
    /// Device-side `malloc` and `free`: an index into [`Code::calls`].
    HeapAllocate(u32),
    HeapFree(u32),
    /// Sets the condition of a conditional graph node: an index into [`Code::calls`].
    SetCondition(u32),
    /// A function of CUDA's device runtime, and an index into [`Code::calls`].
    DeviceRuntime(DeviceCall, u32),
    /// `alloca`: the result, the size and the alignment.
    StackAllocate(Reg, Src, u32),
    StackSave(Reg),
    StackRestore(Src),
    Return,
    Exit,
    Trap,
}

/// What a function of CUDA's device runtime does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceCall {
    /// A place for parameters of a size.
    Room,
    /// A place for the parameters of a launch.
    RoomOfLaunch,
    /// Launches what the arguments say.
    Launch,
    /// Launches what the place is for.
    LaunchOfRoom,
    /// The last error, which there is none after that if it is taken.
    LastError {
        /// It is taken.
        taken: bool,
    },
    Device,
    DeviceCount,
    /// The handle of a new stream or event.
    Handle,
    /// What needs nothing to be done, as all work runs in the order of the calls: ends of streams and events, records
    /// of events, and waits for them.
    Nothing,
    Allocate,
    Free,
    Copy,
    Fill,
}

/// What is done with a texture or a surface.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImageAccess {
    /// The texture's or surface's handle.
    pub(crate) handle: Src,
    pub(crate) action: ImageAction,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum ImageAction {
    /// `tex` and `tld4`.
    Fetch(Fetch),
    /// `txq` and `suq`.
    Query {
        to: Reg,
        what: ImageQuery,
        /// Or [`NONE`].
        level: Src,
        surface: bool,
    },
    /// `suld`, `sust` and `sured`.
    Surface(SurfaceAccess),
    /// `istypep`: whether the handle is one of this kind.
    Is { to: Reg, surface: bool },
}

/// Where in an image: the coordinates of its dimensions, and a layer, or [`NONE`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImagePlace {
    pub(crate) dimensions: u8,
    pub(crate) cube: bool,
    pub(crate) layer: Src,
    pub(crate) at: [Src; 3],
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Fetch {
    pub(crate) place: ImagePlace,
    /// The coordinates are integers.
    pub(crate) integers: bool,
    pub(crate) detail: Detail,
    /// Elements to add to the place.
    pub(crate) offset: [Src; 3],
    /// Four elements are read, of each the number of this place.
    pub(crate) gather: Option<u8>,
    /// Or [`NONE`].
    pub(crate) to: [Reg; 4],
    pub(crate) result: FetchResult,
    /// Whether there is memory, or [`NONE`].
    pub(crate) resident: Reg,
}

/// Which levels are read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Detail {
    Base,
    Level(Src),
    /// How the coordinates change from pixel to pixel, in two directions.
    Gradient([Src; 3], [Src; 3]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FetchResult {
    Word,
    Half,
    HalfPair,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ImageQuery {
    Size(u8),
    Layers,
    Levels,
    Samples,
    DataType,
    Order,
    Normalized,
    Layout,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct SurfaceAccess {
    pub(crate) place: ImagePlace,
    pub(crate) action: SurfaceAction,
    pub(crate) beyond: SurfaceEdge,
    /// Bytes of one value.
    pub(crate) size: u8,
    pub(crate) count: u8,
    /// The values, or where they go.
    pub(crate) values: [Src; 4],
    /// The first coordinate counts elements, not bytes, and values are converted to the format.
    pub(crate) formatted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SurfaceAction {
    Load,
    Store,
    Reduce(AtomicOp, AtomicType),
}

/// What happens beside a surface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SurfaceEdge {
    Trap,
    /// The element at the edge is meant.
    Clamp,
    /// Zeros are read, and nothing is written.
    Zero,
}

/// A copy from global to shared memory (`cp.async`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct AsyncCopy {
    pub(crate) to: Place,
    pub(crate) from: Place,
    /// Bytes written: 4, 8 or 16.
    pub(crate) size: u8,
    /// Which of them are read; zeros are written for the others.
    pub(crate) reads: CopyReads,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum CopyReads {
    All,
    /// As many bytes as this source says.
    Count(Src),
    /// None where this predicate holds; the flag negates it.
    Unless(Src, bool),
}

/// A copy of a piece of memory between global and shared memory (`cp.async.bulk`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct BulkCopy {
    pub(crate) to: Place,
    pub(crate) from: Place,
    /// Bytes, a multiple of 16.
    pub(crate) size: Src,
    /// The barrier that is told how many bytes have come.
    pub(crate) barrier: Option<Place>,
}

/// Something that happens to a barrier in shared memory (`mbarrier`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mbarrier {
    pub(crate) action: MbarrierAction,
    pub(crate) place: Place,
    /// A number of arrivals or bytes, or the phase to wait for.
    pub(crate) value: Src,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MbarrierAction {
    Initialise,
    Invalidate,
    Arrive {
        /// Where the state before the arrival goes, or [`NONE`].
        to: Reg,
        /// The arrivals are not expected in the next phases.
        drops: bool,
        /// The value is a number of bytes to expect; the arrival is one.
        expects: bool,
    },
    Expect,
    Complete,
    /// Asks whether a phase is over: that of a state, or one of a parity.
    Wait {
        to: Reg,
        parity: bool,
    },
}

/// Where the pending arrivals are in a barrier object, and in the state that an arrival gives.
pub(crate) const PENDING_ARRIVALS: u32 = 20;
/// The bits of a number of arrivals.
pub(crate) const MOST_ARRIVALS: u64 = (1 << 20) - 1;

/// An access to the memory of all devices of a multicast object (`multimem`).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Multimem {
    pub(crate) action: MultimemAction,
    /// The size is that of one element.
    pub(crate) place: Place,
    pub(crate) count: u8,
    /// The elements' sources, or the registers that they go to.
    pub(crate) registers: [u32; MOST_ELEMENTS],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MultimemAction {
    /// Reads from each device and reduces.
    LoadReduce {
        op: AtomicOp,
        ty: AtomicType,
        /// 16-bit numbers are summed as numbers of 32 bits.
        wide: bool,
    },
    /// Writes to each device.
    Store,
    /// Reads, computes and writes on each device.
    Reduce(AtomicOp, AtomicType),
}

/// The most elements of a vector of `multimem`.
pub(crate) const MOST_ELEMENTS: usize = 8;

/// What is summed in a matrix product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Multiply {
    Product,
    /// Of single bits.
    And,
    Xor,
}

/// `mma.sync` and `wmma.mma`: D = A * B + C.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixProduct {
    pub(crate) a_fragment: Fragment,
    pub(crate) b_fragment: Fragment,
    pub(crate) c_fragment: Fragment,
    pub(crate) d_fragment: Fragment,
    pub(crate) a_element: Element,
    pub(crate) b_element: Element,
    pub(crate) c_sum: Sum,
    pub(crate) d_sum: Sum,
    pub(crate) multiply: Multiply,
    /// Integers are clamped, not wrapped.
    pub(crate) saturate: bool,
    pub(crate) a: [Src; MOST_REGISTERS],
    pub(crate) b: [Src; MOST_REGISTERS],
    pub(crate) c: [Src; MOST_REGISTERS],
    pub(crate) d: [Reg; MOST_REGISTERS],
}

/// `wmma.load` and `wmma.store`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FragmentMove {
    /// The first element.
    pub(crate) place: Place,
    pub(crate) fragment: Fragment,
    /// The elements of a row lie side by side, not those of a column.
    pub(crate) by_rows: bool,
    /// Elements from row to row, or from column to column.
    pub(crate) stride: Src,
    pub(crate) registers: [Reg; MOST_REGISTERS],
}

/// A value passed by or to a function: its place in the frame, and its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) offset: u32,
    pub(crate) size: u32,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct CallSite {
    pub(crate) args: Vec<Slot>,
    pub(crate) returns: Vec<Slot>,
}

/// An executable function. The code always ends in an instruction that leaves it.
#[derive(Debug, Default)]
pub(crate) struct Code {
    pub(crate) insts: Vec<Inst>,
    pub(crate) constants: Vec<Lanes>,
    pub(crate) tables: Vec<Vec<u32>>,
    pub(crate) calls: Vec<CallSite>,
    pub(crate) images: Vec<ImageAccess>,
    pub(crate) copies: Vec<AsyncCopy>,
    pub(crate) bulk_copies: Vec<BulkCopy>,
    pub(crate) mbarriers: Vec<Mbarrier>,
    pub(crate) multimems: Vec<Multimem>,
    pub(crate) products: Vec<MatrixProduct>,
    pub(crate) fragments: Vec<FragmentMove>,
    pub(crate) registers: u32,
    pub(crate) frame_bytes: u32,
    pub(crate) params: Vec<Slot>,
    pub(crate) returns: Vec<Slot>,
    /// Whether it calls `malloc` or `free` of the device.
    pub(crate) uses_heap: bool,
    /// Whether it launches kernels.
    pub(crate) launches: bool,
    /// Whether it names the reserved part of shared memory.
    pub(crate) reserved_shared: bool,
}

/// Bytes of shared memory that the libraries of CUDA may use for themselves.
pub(crate) const RESERVED_SHARED: u32 = 1024;
