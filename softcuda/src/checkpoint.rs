//! The driver's own checkpoint: device memory into private host memory and back.
//!
//! The states and refusals are those of the real driver. In particular memory that is shared with
//! another process (exported, imported, through IPC handles) cannot be carried: the checkpoint succeeds, the restore
//! fails, and the process is lost. Whoever checkpoints must unmap and release it first.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fd::AsFd;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::address_space;
use crate::context;
use crate::device_memory::{self, charge, refund};
use crate::events;
use crate::exclusive;
use crate::gate;
use crate::ipc;
use crate::managed_memory;
use crate::placement;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::virtual_memory::{self, Mapping, Physical};

/// `CUprocessState`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum ProcessState {
    /// Calls go through.
    Running = 0,
    /// Calls wait at the gate.
    Locked = 1,
    /// Device memory is in host memory; calls wait at the gate.
    Checkpointed = 2,
    /// Lost: a restore was impossible.
    Failed = 3,
}

struct Checkpoint {
    state: ProcessState,
    saved: Option<Saved>,
    /// A restore found too little memory, and was to be the last.
    is_lost: bool,
}

/// All device memory of the process.
struct Saved {
    blocks: Vec<(u64, usize, Bytes)>,
    physical: Vec<(Arc<Physical>, Bytes)>,
    mappings: Vec<(u64, Mapping)>,
    /// Memory was shared with another process: it cannot be restored.
    shared: bool,
}

static CHECKPOINT: Mutex<Checkpoint> =
    Mutex::new(Checkpoint { state: ProcessState::Running, saved: None, is_lost: false });

/// The state of this process.
pub(crate) fn state() -> ProcessState {
    CHECKPOINT.lock().state
}

/// Closes the gate: RUNNING to LOCKED.
///
/// # Errors
/// `ILLEGAL_STATE` unless RUNNING; `NOT_READY` when calls under way do not end within `limit`
/// (`None`: wait for ever); the state is then still RUNNING.
pub(crate) fn lock(limit: Option<Duration>) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Running {
        return Err(Code::ILLEGAL_STATE);
    }
    gate::close(limit)?;
    checkpoint.state = ProcessState::Locked;
    Ok(())
}

/// Opens the gate: LOCKED to RUNNING. `announce` runs just before: once the gate is open the process
/// may end at any moment.
///
/// # Errors
/// `ILLEGAL_STATE` unless LOCKED.
pub(crate) fn unlock(announce: impl FnOnce()) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Locked {
        return Err(Code::ILLEGAL_STATE);
    }
    checkpoint.state = ProcessState::Running;
    announce();
    gate::open();
    Ok(())
}

/// Moves all device memory into private host memory and lets go of the device: LOCKED to
/// CHECKPOINTED. Waits for submitted work first.
///
/// # Errors
/// `ILLEGAL_STATE` unless LOCKED; `NOT_SUPPORTED` when the process has managed memory;
/// `OUT_OF_MEMORY` without room in host memory. The process is then as before.
pub(crate) fn checkpoint() -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Locked {
        return Err(Code::ILLEGAL_STATE);
    }
    if managed_memory::any() {
        return Err(Code::NOT_SUPPORTED);
    }
    context::wait_everything();
    let begin = Instant::now();

    // Copies first: up to here nothing is changed.
    let mut blocks = Vec::new();
    for (address, size, device) in device_memory::blocks() {
        blocks.push((address, device, Bytes::copy_of(address as *const u8, size)?));
    }
    let (mappings, all) = virtual_memory::everything();
    let mut physical = Vec::new();
    let mut shared = device_memory::any_shared();
    for memory in all {
        shared |= memory.imported || memory.exported.load(Ordering::Relaxed);
        let bytes = read_memory(&memory)?;
        physical.push((memory, bytes));
    }

    shared |= ipc::close_all() | events::close_shared();
    device_memory::close_shared();
    for (address, device, bytes) in &blocks {
        address_space::unback(*address, bytes.size);
        refund(*device, bytes.size);
    }
    for (address, mapping) in &mappings {
        address_space::unback(*address, mapping.size);
    }
    for (memory, _) in &physical {
        *memory.memory.lock() = None;
        if memory.counted.swap(false, Ordering::Relaxed) {
            refund(memory.device, memory.size);
        }
    }
    exclusive::suspend();

    let saved = Saved { blocks, physical, mappings, shared };
    take_time(begin, saved.size());
    checkpoint.saved = Some(saved);
    checkpoint.state = ProcessState::Checkpointed;
    Ok(())
}

/// Makes device memory again, at the same addresses, from what the checkpoint kept: CHECKPOINTED
/// to LOCKED. `devices` says which devices are now others, see [`placement`].
///
/// # Errors
/// `ILLEGAL_STATE` unless CHECKPOINTED. `INVALID_VALUE` if `devices` does not name all of them. `OUT_OF_MEMORY` and `DEVICE_UNAVAILABLE` when the device
/// has no room: the process is still CHECKPOINTED and restore may be tried again, unless `SOFTCUDA_RESTORE` says
/// that it is to be as with driver 580: `OPERATING_SYSTEM` from then on. `NOT_SUPPORTED`
/// when shared memory was still there at the checkpoint: the process is FAILED, for good.
pub(crate) fn restore(devices: u32) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Checkpointed {
        return Err(Code::ILLEGAL_STATE);
    }
    if checkpoint.is_lost {
        return Err(Code::OPERATING_SYSTEM);
    }
    let saved = checkpoint.saved.as_ref().ok_or(Code::ILLEGAL_STATE)?;
    if saved.shared {
        checkpoint.state = ProcessState::Failed;
        checkpoint.saved = None;
        gate::give_up();
        return Err(Code::NOT_SUPPORTED);
    }
    let begin = Instant::now();
    placement::move_to(devices, settings().devices)?;
    exclusive::resume()?;
    if let Err(code) = saved.put_back() {
        saved.take_away();
        exclusive::suspend();
        checkpoint.is_lost = settings().restores_once && code == Code::OUT_OF_MEMORY;
        return Err(code);
    }
    take_time(begin, saved.size());
    checkpoint.saved = None;
    checkpoint.state = ProcessState::Locked;
    Ok(())
}

impl Saved {
    fn size(&self) -> u64 {
        let blocks = self.blocks.iter().map(|(_, _, bytes)| bytes.size);
        blocks.chain(self.physical.iter().map(|(_, bytes)| bytes.size)).sum()
    }

    /// Leaves a half-done state on failure, which [`Saved::take_away`] clears.
    fn put_back(&self) -> Outcome {
        for (memory, bytes) in &self.physical {
            charge(memory.device, memory.size)?;
            memory.counted.store(true, Ordering::Relaxed);
            let file = device_memory::new_memory(memory.size)?;
            let whole = SharedView::of(&file, memory.size)?;
            bytes.copy_to(whole.address.cast());
            drop(whole);
            *memory.memory.lock() = Some(file);
        }
        for (address, mapping) in &self.mappings {
            let memory = mapping.physical.memory.lock();
            let memory = memory.as_ref().ok_or(Code::ILLEGAL_STATE)?;
            address_space::back(*address, mapping.size, memory.as_fd(), mapping.offset)?;
            address_space::protect(*address, mapping.size, mapping.access)?;
        }
        for (address, device, bytes) in &self.blocks {
            charge(*device, bytes.size)?;
            device_memory::back_with_new_memory(*address, bytes.size)
                .inspect_err(|_| refund(*device, bytes.size))?;
            bytes.copy_to(*address as *mut u8);
        }
        Ok(())
    }

    fn take_away(&self) {
        for (address, device, bytes) in &self.blocks {
            if address_space::is_accessible(*address, 1) {
                refund(*device, bytes.size);
                address_space::unback(*address, bytes.size);
            }
        }
        for (address, mapping) in &self.mappings {
            address_space::unback(*address, mapping.size);
        }
        for (memory, _) in &self.physical {
            *memory.memory.lock() = None;
            if memory.counted.swap(false, Ordering::Relaxed) {
                refund(memory.device, memory.size);
            }
        }
    }
}

fn take_time(begin: Instant, size: u64) {
    if let Some(rate) = settings().checkpoint_rate {
        let due = Duration::from_secs_f64(size as f64 / rate);
        std::thread::sleep(due.saturating_sub(begin.elapsed()));
    }
}

fn read_memory(physical: &Physical) -> Outcome<Bytes> {
    let memory = physical.memory.lock();
    let memory = memory.as_ref().ok_or(Code::ILLEGAL_STATE)?;
    let view = SharedView::of(memory, physical.size)?;
    Bytes::copy_of(view.address.cast(), physical.size)
}

/// Physical memory, mapped for a moment.
struct SharedView {
    address: *mut c_void,
    size: usize,
}

impl SharedView {
    fn of(memory: impl AsFd, size: u64) -> Outcome<SharedView> {
        let size = size as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address = unsafe {
            mm::mmap(std::ptr::null_mut(), size, protection, MapFlags::SHARED, memory, 0)
        };
        Ok(SharedView { address: address.map_err(|_| Code::OUT_OF_MEMORY)?, size })
    }
}

impl Drop for SharedView {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours and nobody else has its address.
        let result = unsafe { mm::munmap(self.address, self.size) };
        debug_assert!(result.is_ok());
    }
}

/// Private host memory in a mapping of its own, so that it goes back to the system at once and
/// zero pages cost nothing.
struct Bytes {
    address: *mut u8,
    size: u64,
}

// SAFETY: the mapping belongs to this value alone and is only read through shared references.
unsafe impl Send for Bytes {}

const PAGE: usize = 4096;
static ZEROS: [u8; PAGE] = [0; PAGE];

impl Bytes {
    /// Copies `size` bytes (whole pages) of accessible memory. Pages of zeros are left out.
    fn copy_of(from: *const u8, size: u64) -> Outcome<Bytes> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let address =
            unsafe { mm::mmap_anonymous(std::ptr::null_mut(), size as usize, protection, flags) };
        let address = address.map_err(|_| Code::OUT_OF_MEMORY)?.cast::<u8>();
        copy_pages(from, address, size as usize);
        Ok(Bytes { address, size })
    }

    /// Copies to accessible memory of the same size that is all zeros.
    fn copy_to(&self, to: *mut u8) {
        copy_pages(self.address, to, self.size as usize);
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours and nobody else has its address.
        let result = unsafe { mm::munmap(self.address.cast(), self.size as usize) };
        debug_assert!(result.is_ok());
    }
}

/// Copies whole pages into zeroed memory, leaving out those that are zero.
fn copy_pages(from: *const u8, to: *mut u8, size: usize) {
    for offset in (0..size).step_by(PAGE) {
        // SAFETY: callers give two separate ranges of `size` accessible bytes. No work runs that
        // could write to them.
        unsafe {
            let page = std::slice::from_raw_parts(from.add(offset), PAGE);
            if page != ZEROS {
                std::ptr::copy_nonoverlapping(page.as_ptr(), to.add(offset), PAGE);
            }
        }
    }
}
