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
use crate::requests::{Request, ask};
use crate::status::{Code, Outcome};
use crate::streams::Position;

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
    device: u32,
    /// The pool of the process that the memory is of, 0 for none.
    pool: u32,
}

impl Handle {
    /// The process that has the memory, as far as that can be one.
    pub(crate) fn process(&self) -> u32 {
        self.process as u32
    }

    /// The number of the pool in that process that the memory is of, 0 for none.
    pub(crate) fn pool(&self) -> u32 {
        self.pool
    }
}

/// In the place of a context: the memory is of a pool, and belongs to none.
pub(crate) const OF_POOL: u64 = 0;

/// An opened piece of another process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Opened {
    /// First address.
    pub(crate) address: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// Handle of the context that opened it, or [`OF_POOL`].
    pub(crate) context: u64,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    references: u64,
    base: u64,
}

/// The memory that opened pieces lie in: all of it is mapped.
struct Mapping {
    /// A handle of the memory.
    handle: Handle,
    device: usize,
    /// Nothing is mapped, since the process was checkpointed.
    suspended: bool,
    /// What was submitted before memory in it was closed in the order of a stream, and is not done.
    after: Vec<Position>,
}

#[derive(Default)]
struct State {
    opened: BTreeMap<u64, Opened>,
    mappings: BTreeMap<u64, Mapping>,
}

static STATE: Mutex<State> =
    Mutex::new(State { opened: BTreeMap::new(), mappings: BTreeMap::new() });

/// The handle of memory that was made ready for sharing, of the pool of that number if it is not 0.
pub(crate) fn handle(shared: &Shared, pool: u32) -> Handle {
    Handle {
        magic: MAGIC,
        process: std::process::id().into(),
        descriptor: shared.descriptor as u64,
        inode: shared.inode,
        whole: shared.whole,
        offset: shared.offset,
        size: shared.size,
        device: shared.device as u32,
        pool,
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
    let known = state.mappings.iter().find(|(_, mapping)| {
        mapping.handle.inode == handle.inode && mapping.handle.process == handle.process
    });
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

/// Closes memory once, in the order of a stream. It stays mapped until the given work is done, and [`tidy`] sees that:
/// the tests of cuda.core close memory in one stream and use it in another one, as a driver lets them.
///
/// # Errors
/// As [`close`].
pub(crate) fn close_after(address: u64, after: Vec<Position>) -> Outcome {
    let mut state = STATE.lock();
    let opened = state.opened.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
    opened.references -= 1;
    let Opened { references, base, .. } = *opened;
    if references == 0 {
        state.opened.remove(&address);
        if let Some(mapping) = state.mappings.get_mut(&base) {
            mapping.after.retain(|position| !position.is_reached());
            mapping.after.extend(after);
        }
    }
    Ok(())
}

/// Takes away what is closed and no longer used.
pub(crate) fn tidy() {
    STATE.lock().tidy();
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

/// Takes all opened memory away, for a checkpoint that carries it; whether there was anything. The addresses stay
/// reserved until [`open_again`].
pub(crate) fn suspend() -> bool {
    let mut state = STATE.lock();
    state.tidy();
    for (base, mapping) in &mut state.mappings {
        if !mapping.suspended {
            mapping.suspended = true;
            address_space::unback(*base, mapping.handle.whole);
            device_memory::refund(mapping.device, mapping.handle.whole);
        }
    }
    !state.opened.is_empty()
}

/// Maps the memory again that [`suspend`] has taken away.
///
/// # Errors
/// `ILLEGAL_STATE` while the process that has the memory is not restored, or is no more; what is mapped by then
/// stays so.
pub(crate) fn open_again() -> Outcome {
    let mut state = STATE.lock();
    for (base, mapping) in &mut state.mappings {
        if mapping.suspended {
            let memory = memory_of(&mapping.handle).map_err(|_| Code::ILLEGAL_STATE)?;
            put_behind(*base, &mapping.handle, &memory)?;
            device_memory::charge_existing(mapping.device, mapping.handle.whole);
            mapping.suspended = false;
        }
    }
    Ok(())
}

/// Whether memory of another process's pool was opened at this address.
pub(crate) fn is_of_pool(address: u64) -> bool {
    STATE.lock().opened.get(&address).is_some_and(|opened| opened.context == OF_POOL)
}

/// Whether any memory of another process's pool is open.
pub(crate) fn any_of_pools() -> bool {
    STATE.lock().opened.values().any(|opened| opened.context == OF_POOL)
}

/// The opened memory that contains an address.
pub(crate) fn find(address: u64) -> Option<Opened> {
    let state = STATE.lock();
    let (_, opened) = state.opened.range(..=address).next_back()?;
    (address < opened.address + opened.size).then_some(*opened)
}

impl State {
    fn map(&mut self, handle: &Handle, device: usize) -> Outcome<u64> {
        let memory = memory_of(handle)?;
        let base = address_space::reserve(handle.whole, GRANULE, 0)?;
        put_behind(base, handle, &memory).inspect_err(|_| address_space::unreserve(base))?;
        device_memory::charge_existing(device, handle.whole);
        let mapping = Mapping { handle: *handle, device, suspended: false, after: Vec::new() };
        self.mappings.insert(base, mapping);
        Ok(base)
    }

    fn tidy(&mut self) {
        let done = |(_, mapping): &(&u64, &Mapping)| mapping.after.iter().all(Position::is_reached);
        let done: Vec<u64> = self.mappings.iter().filter(done).map(|(base, _)| *base).collect();
        for base in done {
            self.unmap_unused(base);
        }
    }

    fn unmap_unused(&mut self, base: u64) {
        if self.opened.values().any(|opened| opened.base == base) {
            return;
        }
        if let Some(Mapping { handle, device, suspended, .. }) = self.mappings.remove(&base) {
            address_space::unback(base, handle.whole);
            address_space::unreserve(base);
            if !suspended {
                device_memory::refund(device, handle.whole);
            }
        }
    }
}

/// The memory of a handle.
///
/// # Errors
/// `MAP_FAILED` when it is gone, is not what the handle says, or its process is gone or does not admit this user.
fn memory_of(handle: &Handle) -> Outcome<File> {
    let end = handle.offset.checked_add(handle.size);
    let fits = handle.whole.is_multiple_of(GRANULE) && end.is_some_and(|end| end <= handle.whole);
    if !fits {
        return Err(Code::MAP_FAILED);
    }
    let open = |descriptor: u64| {
        let path = format!("/proc/{}/fd/{descriptor}", handle.process);
        let memory = File::options().read(true).write(true).open(path).ok()?;
        let found = memory.metadata().ok()?;
        let is_it = found.size() == handle.whole && device_memory::is_device_memory(&memory);
        is_it.then_some((memory, found.ino()))
    };
    if let Some((memory, inode)) = open(handle.descriptor)
        && inode == handle.inode
    {
        return Ok(memory);
    }
    // A checkpoint of its process has put other memory in the place of this one.
    let process = i32::try_from(handle.process).map_err(|_| Code::MAP_FAILED)?;
    let descriptor = ask(process, Request::SharedMemory, handle.inode as u32);
    let descriptor = descriptor.map_err(|_| Code::MAP_FAILED)?;
    open(descriptor.into()).map(|(memory, _)| memory).ok_or(Code::MAP_FAILED)
}

/// Puts the memory of a handle behind reserved addresses.
///
/// # Errors
/// `OUT_OF_MEMORY`; nothing is behind them then.
fn put_behind(base: u64, handle: &Handle, memory: &File) -> Outcome {
    address_space::back(base, handle.whole, memory.as_fd(), 0)
        .and_then(|()| address_space::protect(base, handle.whole, Access::ReadWrite))
        .inspect_err(|_| address_space::unback(base, handle.whole))
}
