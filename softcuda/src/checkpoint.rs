//! The driver's own checkpoint: device memory into private host memory and back.
//!
//! The states and refusals are those of the real driver. In particular memory that is shared with
//! another process (exported, imported, through IPC handles) cannot be carried, and neither can multicast objects: the
//! checkpoint succeeds, the restore fails, and the process is lost. The caller must unmap and release it first. Later drivers carry what was
//! shared through IPC handles, see [`crate::drivers`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fd::AsFd;

use crate::address_space;
use crate::context;
use crate::device_memory::{self, charge, refund};
use crate::events;
use crate::exclusive;
use crate::gate;
use crate::graph_memory;
use crate::ipc;
use crate::managed_memory;
use crate::physical::Physical;
use crate::placement;
use crate::pools;
use crate::saved_bytes::{Bytes, SharedView, Storage};
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};
use crate::switching;
use crate::virtual_memory::{self, MappedMemory};

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
    /// Device memory is in storage, which the caller of the checkpoint copies.
    Checkpointing = 4,
    /// The caller of the restore fills storage with what device memory is to be.
    Restoring = 5,
}

/// Where the contents of device memory go and come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Medium {
    /// Host memory of the process.
    Host,
    /// Storage that the caller maps, and copies.
    Storage,
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
    mappings: Vec<MappedMemory>,
    /// Memory was shared with another process: it cannot be restored.
    shared: bool,
    /// What the caller of a checkpoint or restore has mapped, until that is complete.
    storage: Vec<Storage>,
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
/// `ILLEGAL_STATE` unless LOCKED, and while memory of another process was open that is not restored yet.
pub(crate) fn unlock(announce: impl FnOnce()) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Locked {
        return Err(Code::ILLEGAL_STATE);
    }
    ipc::open_again()?;
    checkpoint.state = ProcessState::Running;
    announce();
    gate::open();
    Ok(())
}

/// Moves all device memory into private host memory and lets go of the device: LOCKED to
/// CHECKPOINTED. Waits for submitted work first. With storage it is CHECKPOINTING until [`complete`].
///
/// # Errors
/// `ILLEGAL_STATE` unless LOCKED; `NOT_SUPPORTED` when the process has managed memory;
/// `OUT_OF_MEMORY` without room in host memory. The process is then as before.
pub(crate) fn checkpoint(medium: Medium) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Locked {
        return Err(Code::ILLEGAL_STATE);
    }
    if managed_memory::any() || graph_memory::any_managed() {
        return Err(Code::NOT_SUPPORTED);
    }
    context::wait_everything();
    let begin = Instant::now();

    // Copies first: nothing is changed by them.
    let mut saved = Saved::copy(medium)?;
    let carries_ipc = settings().carries_ipc_memory();
    // Nothing is known of drivers that would carry memory of shared pools.
    saved.shared |= pools::any_shared() || ipc::any_of_pools();
    let opened = if carries_ipc { ipc::suspend() } else { ipc::close_all() };
    saved.shared |= !carries_ipc && (opened || device_memory::any_shared());
    saved.shared |= virtual_memory::close_multicast();
    saved.shared |= events::close_shared();
    device_memory::close_shared();
    saved.let_go();
    exclusive::suspend();

    if medium == Medium::Host {
        take_time(begin, saved.size());
    }
    checkpoint.saved = Some(saved);
    checkpoint.state = match medium {
        Medium::Host => ProcessState::Checkpointed,
        Medium::Storage => ProcessState::Checkpointing,
    };
    Ok(())
}

/// The devices of the host, one bit each, on which a process that is locked or checkpointed has memory.
pub(crate) fn devices() -> u32 {
    let checkpoint = CHECKPOINT.lock();
    let devices = match &checkpoint.saved {
        Some(saved) => saved.sizes().map(|(device, _)| device).collect::<Vec<_>>(),
        None => {
            let physical = virtual_memory::everything().1;
            let blocks = device_memory::blocks().into_iter().map(|(_, _, device)| device);
            blocks.chain(physical.iter().map(|memory| memory.device)).collect()
        }
    };
    devices.into_iter().fold(0, |mask, device| mask | 1 << placement::of(device))
}

/// Makes device memory again, at the same addresses, from what the checkpoint kept: CHECKPOINTED
/// to LOCKED. With storage it is RESTORING until [`complete`]. `devices` says which devices are now others, see [`placement`].
///
/// # Errors
/// `ILLEGAL_STATE` unless CHECKPOINTED. `INVALID_VALUE` if `devices` does not name all of them, and if the
/// contents are not in this medium. `OUT_OF_MEMORY` and `DEVICE_UNAVAILABLE` when the device
/// has no room: the process is still CHECKPOINTED and restore may be tried again, unless `SOFTCUDA_RESTORE` says
/// that it is to be as with driver 580: `OPERATING_SYSTEM` from then on. `NOT_SUPPORTED`
/// when shared memory was still there at the checkpoint: the process is FAILED, for good.
pub(crate) fn restore(devices: u32, medium: Medium) -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    if checkpoint.state != ProcessState::Checkpointed {
        return Err(Code::ILLEGAL_STATE);
    }
    if checkpoint.is_lost {
        return Err(Code::OPERATING_SYSTEM);
    }
    let checkpoint = &mut *checkpoint;
    let saved = checkpoint.saved.as_mut().ok_or(Code::ILLEGAL_STATE)?;
    if saved.are_elsewhere() != (medium == Medium::Storage) {
        return Err(Code::INVALID_VALUE);
    }
    if saved.shared {
        checkpoint.state = ProcessState::Failed;
        checkpoint.saved = None;
        gate::give_up();
        return Err(Code::NOT_SUPPORTED);
    }
    let begin = Instant::now();
    switching::restored();
    placement::move_to(devices, settings().devices)?;
    exclusive::resume()?;
    let made = saved.put_back().and_then(|()| match medium {
        Medium::Host => Ok(()),
        Medium::Storage => saved.expect_in_storage(),
    });
    if let Err(code) = made {
        saved.leave_storage();
        saved.take_away();
        exclusive::suspend();
        checkpoint.is_lost = settings().restores_once && code == Code::OUT_OF_MEMORY;
        return Err(code);
    }
    if medium == Medium::Storage {
        checkpoint.state = ProcessState::Restoring;
        return Ok(());
    }
    take_time(begin, saved.size());
    checkpoint.saved = None;
    checkpoint.state = ProcessState::Locked;
    Ok(())
}

/// Ends a checkpoint or a restore by way of storage, once the caller has copied: CHECKPOINTING to CHECKPOINTED,
/// RESTORING to LOCKED.
///
/// # Errors
/// `ILLEGAL_STATE` in any other state; `OUT_OF_MEMORY` when contents cannot be copied from the storage, which may
/// be tried again.
pub(crate) fn complete() -> Outcome {
    let mut checkpoint = CHECKPOINT.lock();
    let checkpoint = &mut *checkpoint;
    let saved = checkpoint.saved.as_mut().ok_or(Code::ILLEGAL_STATE)?;
    match checkpoint.state {
        ProcessState::Checkpointing => {
            saved.leave_storage();
            checkpoint.state = ProcessState::Checkpointed;
        }
        ProcessState::Restoring => {
            saved.fill()?;
            checkpoint.saved = None;
            checkpoint.state = ProcessState::Locked;
        }
        _ => return Err(Code::ILLEGAL_STATE),
    }
    Ok(())
}

impl Saved {
    /// Copies all contents.
    fn copy(medium: Medium) -> Outcome<Saved> {
        let own = device_memory::blocks();
        let (mappings, all) = virtual_memory::everything();
        let sizes = own.iter().map(|(_, size, device)| (*device, *size));
        let sizes = sizes.chain(all.iter().map(|memory| (memory.device, memory.size)));
        let mut storage = match medium {
            Medium::Host => Vec::new(),
            Medium::Storage => new_storage(sizes)?,
        };
        let mut keep = |from, size, device| match on_device(&mut storage, device) {
            Some(storage) => Bytes::store(from, size, storage),
            None => Bytes::copy_of(from, size),
        };
        let mut blocks = Vec::new();
        for (address, size, device) in own {
            blocks.push((address, device, keep(address as *const u8, size, device)?));
        }
        let mut physical = Vec::new();
        let mut shared = false;
        for memory in all {
            // Seen with driver 580: host memory of `cuMemCreate` loses the process as shared memory does.
            shared |= memory.imported || memory.exported.load(Ordering::Relaxed) || memory.is_host;
            let view = view_of(&memory)?;
            let bytes = keep(view.address.cast(), memory.size, memory.device)?;
            physical.push((memory, bytes));
        }
        Ok(Saved { blocks, physical, mappings, shared, storage })
    }

    /// Takes the memory away that was copied.
    fn let_go(&self) {
        for (address, device, bytes) in &self.blocks {
            address_space::unback(*address, bytes.size);
            refund(*device, bytes.size);
        }
        for (address, mapping, _) in &self.mappings {
            address_space::unback(*address, mapping.size);
        }
        for (memory, _) in &self.physical {
            *memory.memory.lock() = None;
            if memory.counted.swap(false, Ordering::Relaxed) {
                refund(memory.device, memory.size);
            }
        }
    }

    /// Devices and sizes of all pieces, in their order.
    fn sizes(&self) -> impl Iterator<Item = (usize, u64)> {
        let blocks = self.blocks.iter().map(|(_, device, bytes)| (*device, bytes.size));
        blocks.chain(self.physical.iter().map(|(memory, bytes)| (memory.device, bytes.size)))
    }

    /// Contents of all pieces with their devices, in the order of [`Saved::sizes`].
    fn contents(&mut self) -> impl Iterator<Item = (usize, &mut Bytes)> {
        let blocks = self.blocks.iter_mut().map(|(_, device, bytes)| (*device, bytes));
        blocks.chain(self.physical.iter_mut().map(|(memory, bytes)| (memory.device, bytes)))
    }

    fn size(&self) -> u64 {
        self.sizes().map(|(_, size)| size).sum()
    }

    /// Whether the caller that asked for the checkpoint has the contents.
    fn are_elsewhere(&self) -> bool {
        let mut all = self.blocks.iter().map(|(_, _, bytes)| bytes);
        all.any(Bytes::are_elsewhere)
            || self.physical.iter().any(|(_, bytes)| bytes.are_elsewhere())
    }

    /// Makes storage for the contents to come.
    fn expect_in_storage(&mut self) -> Outcome {
        let mut storage = new_storage(self.sizes())?;
        for (device, bytes) in self.contents() {
            bytes.expect_in(on_device(&mut storage, device).ok_or(Code::OUT_OF_MEMORY)?)?;
        }
        self.storage = storage;
        Ok(())
    }

    /// Ends the storage.
    fn leave_storage(&mut self) {
        self.contents().for_each(|(_, bytes)| bytes.leave_storage());
        self.storage.clear();
    }

    /// Copies contents into memory that was put back without them.
    fn fill(&self) -> Outcome {
        for (memory, bytes) in &self.physical {
            bytes.copy_to(view_of(memory)?.address.cast());
        }
        for (address, _, bytes) in &self.blocks {
            bytes.copy_to(*address as *mut u8);
        }
        Ok(())
    }

    /// Leaves a half-done state on failure, which [`Saved::take_away`] clears.
    fn put_back(&self) -> Outcome {
        for (memory, bytes) in &self.physical {
            charge(memory.device, memory.size)?;
            memory.counted.store(true, Ordering::Relaxed);
            let file = device_memory::new_memory_on(placement::of(memory.device), memory.size)?;
            let whole = SharedView::of(&file, memory.size)?;
            bytes.copy_to(whole.address.cast());
            drop(whole);
            *memory.memory.lock() = Some(file);
        }
        for (address, mapping, physical) in &self.mappings {
            let memory = physical.memory.lock();
            let memory = memory.as_ref().ok_or(Code::ILLEGAL_STATE)?;
            address_space::back(*address, mapping.size, memory.as_fd(), mapping.offset)?;
            address_space::protect(*address, mapping.size, mapping.access)?;
        }
        for (address, device, bytes) in &self.blocks {
            charge(*device, bytes.size)?;
            device_memory::back_again(*address, bytes.size)
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
        for (address, mapping, _) in &self.mappings {
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

fn view_of(physical: &Physical) -> Outcome<SharedView> {
    let memory = physical.memory.lock();
    SharedView::of(memory.as_ref().ok_or(Code::ILLEGAL_STATE)?, physical.size)
}

/// Storage for pieces of memory with their devices: one for each device that has any.
fn new_storage(pieces: impl Iterator<Item = (usize, u64)>) -> Outcome<Vec<Storage>> {
    let mut sizes = [0; MAX_DEVICES];
    pieces.for_each(|(device, size)| sizes[placement::of(device)] += size);
    let sizes = sizes.into_iter().enumerate().filter(|(_, size)| *size > 0);
    sizes.map(|(device, size)| Storage::new(device, size)).collect()
}

fn on_device(storage: &mut [Storage], device: usize) -> Option<&mut Storage> {
    storage.iter_mut().find(|storage| storage.device == placement::of(device))
}
