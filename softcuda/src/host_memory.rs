//! Pinned host memory: allocated here or registered by the program. The device uses it at the
//! address that the host uses.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use rustix::mm::{self, MapFlags, ProtFlags};

use crate::address_space;
use crate::status::{Code, Outcome};

/// A piece of pinned host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostMemory {
    /// First address.
    pub(crate) address: u64,
    /// Size in bytes.
    pub(crate) size: u64,
    /// Flags as given.
    pub(crate) flags: u32,
    /// Allocated by the driver, not registered.
    pub(crate) allocated: bool,
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
}

static MEMORY: Mutex<BTreeMap<u64, HostMemory>> = Mutex::new(BTreeMap::new());

fn add(memory: &mut BTreeMap<u64, HostMemory>, new: HostMemory) {
    address_space::register_host(new.address, new.size);
    memory.insert(new.address, new);
}

/// Allocates zeroed pinned memory.
///
/// # Errors
/// `INVALID_VALUE` for size 0, `OUT_OF_MEMORY`.
pub(crate) fn allocate(context: u64, size: u64, flags: u32) -> Outcome<u64> {
    if size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let address = unsafe {
        mm::mmap_anonymous(std::ptr::null_mut(), size as usize, protection, MapFlags::PRIVATE)
    };
    let address = address.map_err(|_| Code::OUT_OF_MEMORY)? as u64;
    let id = crate::device_memory::new_buffer_id();
    let new = HostMemory { address, size, flags, allocated: true, context, id };
    add(&mut MEMORY.lock(), new);
    Ok(address)
}

/// Frees what [`allocate`] gave. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_VALUE` for any other address.
pub(crate) fn free(address: u64) -> Outcome {
    let mut memory = MEMORY.lock();
    let found = memory.get(&address).copied().filter(|m| m.allocated);
    let found = found.ok_or(Code::INVALID_VALUE)?;
    memory.remove(&address);
    give_back(&found);
    Ok(())
}

fn give_back(memory: &HostMemory) {
    address_space::unregister_host(memory.address);
    if memory.allocated {
        // SAFETY: the mapping was made by `allocate` and has just been taken out of the table, so
        // it is unmapped once. Pointers that the program may keep are its own affair.
        let result = unsafe { mm::munmap(memory.address as *mut _, memory.size as usize) };
        debug_assert!(result.is_ok());
    }
}

/// Registers memory of the program.
///
/// # Errors
/// `INVALID_VALUE` for nothing, `HOST_MEMORY_ALREADY_REGISTERED` when a part of it is pinned.
pub(crate) fn register(context: u64, address: u64, size: u64, flags: u32) -> Outcome {
    let end = address.checked_add(size).filter(|_| address != 0 && size != 0);
    let end = end.ok_or(Code::INVALID_VALUE)?;
    let mut memory = MEMORY.lock();
    let before = memory.range(..end).next_back();
    if before.is_some_and(|(_, m)| m.address + m.size > address) {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let id = crate::device_memory::new_buffer_id();
    let new = HostMemory { address, size, flags, allocated: false, context, id };
    add(&mut memory, new);
    Ok(())
}

/// Undoes [`register`]. No work that uses the memory may be under way.
///
/// # Errors
/// `INVALID_VALUE` for an address inside registered memory, `HOST_MEMORY_NOT_REGISTERED` for any other.
pub(crate) fn unregister(address: u64) -> Outcome {
    let mut memory = MEMORY.lock();
    let before = memory.range(..=address).next_back().map(|(_, m)| *m);
    let found = before.filter(|m| !m.allocated && address - m.address < m.size);
    let found = found.ok_or(Code::HOST_MEMORY_NOT_REGISTERED)?;
    if found.address != address {
        return Err(Code::INVALID_VALUE);
    }
    memory.remove(&address);
    give_back(&found);
    Ok(())
}

/// Gives back all that belongs to a context.
pub(crate) fn free_context(context: u64) {
    MEMORY.lock().retain(|_, memory| {
        let keep = memory.context != context;
        if !keep {
            give_back(memory);
        }
        keep
    });
}

/// The pinned memory that contains an address.
pub(crate) fn find(address: u64) -> Option<HostMemory> {
    let memory = MEMORY.lock();
    let (_, found) = memory.range(..=address).next_back()?;
    (address < found.address + found.size).then_some(*found)
}
