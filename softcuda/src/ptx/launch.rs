//! What a launch consists of, and what it asks its caller.

use super::image::{Images, NoImages};
use super::module::Entry;
use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

#[cfg(doc)]
use super::{Module, Trap};

/// Answers which addresses a kernel may access.
///
/// Nothing may be taken away while a launch that could touch them runs: positive answers are
/// remembered for the length of a launch.
pub trait AddressSpace: Sync {
    /// Is every byte of `[addr, addr + len)` mapped, device-accessible memory of this process?
    ///
    /// A `true` is a promise that the bytes may be read through a plain pointer until the launch
    /// ends. Questions are also asked about whole pages of 4096 bytes and
    /// parts of 256 around an access, so a `false` is no fault by itself.
    fn is_mapped(&self, addr: u64, len: usize) -> bool;

    /// May every byte of `[addr, addr + len)` also be written to? Promise and questions are as for
    /// [`AddressSpace::is_mapped`].
    fn is_writable(&self, addr: u64, len: usize) -> bool;

    /// What a multimem address stands for: all of the piece around it that is the same memory of each device, to be
    /// read, and written to if `written` says so. `None` for any other address, and where a device has no memory bound.
    fn replicas(&self, addr: u64, written: bool) -> Option<Replicas> {
        let _ = (addr, written);
        None
    }
}

/// A piece of a multicast object: memory of several devices at one address.
pub struct Replicas {
    /// Its first multimem address.
    pub start: u64,
    /// Its size in bytes.
    pub size: u64,
    /// Where its bytes are on each device, in the order in which the devices were added to the object.
    pub places: Vec<u64>,
    /// What keeps the bytes mapped.
    pub keep: Vec<Arc<dyn Any + Send + Sync>>,
}

/// Memory that kernels allocate by themselves.
pub trait Heap: Sync {
    /// The address of `size` new bytes, aligned to 16; none when there is not so much left.
    fn allocate(&self, size: u64) -> Option<u64>;

    /// Takes memory back; false for an address that was not given out.
    fn free(&self, address: u64) -> bool;
}

/// No memory for kernels.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoHeap;

impl Heap for NoHeap {
    fn allocate(&self, _size: u64) -> Option<u64> {
        None
    }

    fn free(&self, _address: u64) -> bool {
        false
    }
}

/// A kernel that a kernel asks to launch.
#[derive(Debug, Clone, Copy)]
pub struct Child<'e> {
    /// The kernel, of the same module.
    pub entry: &'e Entry,
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub dynamic_shared: u32,
}

/// What kernels launch and enqueue by themselves (CUDA's dynamic parallelism). It begins once the kernel has ended, in
/// the order of the calls, or after everything else where the stream says so. A number that a call fails with is a
/// `cudaError_t`, which the kernel gets.
pub trait Launcher: Sync {
    /// A place for `size` bytes of parameters, for a launch that may be known already.
    ///
    /// # Errors
    /// That there is no room, or that the launch cannot be.
    fn room(&self, size: u64, child: Option<&Child<'_>>) -> Result<u64, u32>;

    /// Launches a kernel with the parameters at a place that was given out, which is none any more after that; the
    /// kernel is the one that the place was asked for, unless one is named.
    ///
    /// # Errors
    /// As for [`Launcher::room`], and that the place is none.
    fn launch(&self, room: u64, child: Option<&Child<'_>>, stream: u64) -> Result<(), u32>;

    /// Enqueues a copy of `size` bytes.
    ///
    /// # Errors
    /// That too much waits already.
    fn copy(&self, to: u64, from: u64, size: u64, stream: u64) -> Result<(), u32>;

    /// Enqueues a fill of `size` bytes.
    ///
    /// # Errors
    /// That too much waits already.
    fn fill(&self, to: u64, value: u8, size: u64, stream: u64) -> Result<(), u32>;

    /// The handle of a new stream or event.
    fn handle(&self) -> u64;

    /// The ordinal of the device that runs the kernel, and how many devices there are.
    fn device(&self) -> (u32, u32);
}

/// For kernels that launch nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLauncher;

/// `cudaErrorNotSupported`.
const NOT_SUPPORTED: u32 = 801;

impl Launcher for NoLauncher {
    fn room(&self, _size: u64, _child: Option<&Child<'_>>) -> Result<u64, u32> {
        Err(NOT_SUPPORTED)
    }

    fn launch(&self, _room: u64, _child: Option<&Child<'_>>, _stream: u64) -> Result<(), u32> {
        Err(NOT_SUPPORTED)
    }

    fn copy(&self, _to: u64, _from: u64, _size: u64, _stream: u64) -> Result<(), u32> {
        Err(NOT_SUPPORTED)
    }

    fn fill(&self, _to: u64, _value: u8, _size: u64, _stream: u64) -> Result<(), u32> {
        Err(NOT_SUPPORTED)
    }

    fn handle(&self) -> u64 {
        0
    }

    fn device(&self) -> (u32, u32) {
        (0, 1)
    }
}

/// One kernel launch.
pub struct Launch<'a> {
    /// Blocks in x, y and z.
    pub grid: [u32; 3],
    /// Threads per block in x, y and z.
    pub block: [u32; 3],
    /// Dynamic shared memory per block, in bytes.
    pub dynamic_shared: u32,
    /// The parameter buffer, laid out as [`Entry::params`] says; at least
    /// [`Entry::param_bytes`] long.
    pub params: &'a [u8],
    /// The address of each of [`Module::globals`], in the same order.
    pub global_addresses: &'a [u64],
    /// Blocks of a cluster in x, y and z, at most 16: each divides that of the grid. A cooperative launch can have one.
    pub cluster: [u32; 3],
    /// Whether all blocks must make progress at the same time (grid-wide barriers).
    pub cooperative: bool,
    /// Set to true by the caller to stop the launch soon; it then ends in [`Trap::Cancelled`].
    pub cancel: &'a AtomicBool,
    /// The textures and surfaces.
    pub images: &'a dyn Images,
    /// Where `malloc` in kernels has memory from.
    pub heap: &'a dyn Heap,
    /// Takes what kernels launch.
    pub launcher: &'a dyn Launcher,
    /// Sets the condition of a conditional graph node, by its handle; false if there is none.
    pub set_condition: &'a (dyn Fn(u64, u32) -> bool + Sync),
    /// Receives the formatted output of one `printf` call, and how many bytes its arguments have.
    pub print: &'a (dyn Fn(&[u8], usize) + Sync),
    /// Grows by one for each instruction that a warp has executed, also one of which no lane took part. Of a launch that ends in a
    /// trap not all are counted.
    pub executed: Option<&'a AtomicU64>,
}

impl<'a> Launch<'a> {
    /// A launch of a kernel that needs nothing but blocks and parameters, and that nobody stops. What it prints is lost.
    pub fn plain(grid: [u32; 3], block: [u32; 3], params: &'a [u8]) -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Launch {
            grid,
            block,
            dynamic_shared: 0,
            params,
            global_addresses: &[],
            cluster: [1; 3],
            cooperative: false,
            cancel: &NEVER,
            images: &NoImages,
            heap: &NoHeap,
            launcher: &NoLauncher,
            set_condition: &|_, _| false,
            print: &|_, _| (),
            executed: None,
        }
    }
}
