//! Memory of other processes, opened through IPC handles.
//!
//! A handle names the process, the descriptor of the memory in it, and the memory itself (its inode
//! number), so that a descriptor that was closed and used again is found out. Opening goes through
//! `/proc`, which admits the same user and root.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use parking_lot::Mutex;

use crate::address_space::{self, Access, GRANULE};
use crate::device_memory::{self, Shared};
use crate::status::{Code, Outcome};

/// What marks a handle as one of this driver.
const MAGIC: u64 = u64::from_le_bytes(*b"softipc1");

/// `CUipcMemHandle`: 64 bytes that only the driver understands.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    magic: u64,
    process: u64,
    descriptor: u64,
    inode: u64,
    whole: u64,
    offset: u64,
    size: u64,
    device: u64,
}

/// An opened piece of another process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    /// First address.
    pub(crate) address: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// Handle of the context that opened it.
    pub(crate) context: u64,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    references: u64,
    base: u64,
}

/// The memory that opened pieces lie in: all of it is mapped.
struct Mapping {
    inode: u64,
    process: u64,
    size: u64,
    device: usize,
}

#[derive(Default)]
struct State {
    opened: BTreeMap<u64, Opened>,
    mappings: BTreeMap<u64, Mapping>,
}

static STATE: Mutex<State> =
    Mutex::new(State { opened: BTreeMap::new(), mappings: BTreeMap::new() });

/// The handle of memory that was made ready for sharing.
pub(crate) fn handle(shared: &Shared) -> Handle {
    Handle {
        magic: MAGIC,
        process: std::process::id().into(),
        descriptor: shared.descriptor as u64,
        inode: shared.inode,
        whole: shared.whole,
        offset: shared.offset,
        size: shared.size,
        device: shared.device as u64,
    }
}

/// Opens memory; opening it once more only counts.
///
/// # Errors
/// `INVALID_VALUE` for what is no handle, `INVALID_CONTEXT` for one of this very process,
/// `MAP_FAILED` when the memory or its process is gone or does not admit this user,
/// `INVALID_DEVICE`, `OUT_OF_MEMORY`.
pub(crate) fn open(handle: &Handle, context: u64) -> Outcome<u64> {
    if handle.magic != MAGIC {
        return Err(Code::INVALID_VALUE);
    }
    if handle.process == u64::from(std::process::id()) {
        return Err(Code::INVALID_CONTEXT);
    }
    let device = i32::try_from(handle.device).map_err(|_| Code::INVALID_VALUE)?;
    let device = crate::settings::device(device)?;
    let mut state = STATE.lock();
    let known = state
        .mappings
        .iter()
        .find(|(_, mapping)| mapping.inode == handle.inode && mapping.process == handle.process);
    let base = match known.map(|(base, _)| *base) {
        Some(base) => base,
        None => state.map(handle, device)?,
    };
    let address = base + handle.offset;
    let opened = state.opened.entry(address).or_insert_with(|| Opened {
        address,
        size: handle.size,
        device,
        context,
        id: device_memory::new_buffer_id(),
        references: 0,
        base,
    });
    opened.references += 1;
    Ok(address)
}

/// Closes memory once. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_VALUE` for an address that [`open`] did not give.
pub(crate) fn close(address: u64) -> Outcome {
    let mut state = STATE.lock();
    let opened = state.opened.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
    opened.references -= 1;
    if opened.references == 0 {
        let base = opened.base;
        state.opened.remove(&address);
        state.unmap_unused(base);
    }
    Ok(())
}

/// Closes everything that belongs to a context.
pub(crate) fn close_context(context: u64) {
    let mut state = STATE.lock();
    let gone: Vec<_> = state.opened.values().filter(|o| o.context == context).copied().collect();
    for Opened { address, base, .. } in gone {
        state.opened.remove(&address);
        state.unmap_unused(base);
    }
}

/// Closes everything, for a checkpoint that does not carry it; whether there was anything.
pub(crate) fn close_all() -> bool {
    let mut state = STATE.lock();
    let any = !state.opened.is_empty();
    state.opened.clear();
    for base in state.mappings.keys().copied().collect::<Vec<_>>() {
        state.unmap_unused(base);
    }
    any
}

/// The opened memory that contains an address.
pub(crate) fn find(address: u64) -> Option<Opened> {
    let state = STATE.lock();
    let (_, opened) = state.opened.range(..=address).next_back()?;
    (address < opened.address + opened.size).then_some(*opened)
}

impl State {
    fn map(&mut self, handle: &Handle, device: usize) -> Outcome<u64> {
        let path = format!("/proc/{}/fd/{}", handle.process, handle.descriptor);
        let memory = File::options().read(true).write(true).open(path);
        let memory = memory.map_err(|_| Code::MAP_FAILED)?;
        let found = memory.metadata().map_err(|_| Code::MAP_FAILED)?;
        let end = handle.offset.checked_add(handle.size);
        let fits = found.size() == handle.whole
            && handle.whole.is_multiple_of(GRANULE)
            && end.is_some_and(|end| end <= handle.whole);
        if found.ino() != handle.inode || !fits || !device_memory::is_device_memory(&memory) {
            return Err(Code::MAP_FAILED);
        }
        let base = address_space::reserve(handle.whole, GRANULE, 0)?;
        let mapped = address_space::back(base, handle.whole, memory.as_fd(), 0)
            .and_then(|()| address_space::protect(base, handle.whole, Access::ReadWrite));
        if let Err(code) = mapped {
            address_space::unback(base, handle.whole);
            address_space::unreserve(base);
            return Err(code);
        }
        device_memory::charge_existing(device, handle.whole);
        let Handle { inode, process, whole, .. } = *handle;
        self.mappings.insert(base, Mapping { inode, process, size: whole, device });
        Ok(base)
    }

    fn unmap_unused(&mut self, base: u64) {
        if self.opened.values().any(|opened| opened.base == base) {
            return;
        }
        if let Some(Mapping { size, device, .. }) = self.mappings.remove(&base) {
            address_space::unback(base, size);
            address_space::unreserve(base);
            device_memory::refund(device, size);
        }
    }
}
