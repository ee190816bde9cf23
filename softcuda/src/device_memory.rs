//! Physical memory of the devices and plain allocations (`cuMemAlloc`, module globals).
//!
//! Physical memory is memfds, so that it can be shared and lives as long as anybody refers to it.
//! A large allocation has memory and addresses of its own; small ones share 2 MiB blocks.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, fallocate, fcntl_add_seals,
    fcntl_get_seals, fstat, ftruncate, memfd_create, open, stat, statvfs,
};

use crate::address_space::{self, Access, GRANULE};
use crate::descriptors;
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};

/// Alignment of every allocation, as on real devices.
const ALIGNMENT: u64 = 512;
/// Allocations of at least this size get blocks of their own.
const LARGE: u64 = 1 << 20;

static USED: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Counts `size` bytes of a device as used.
///
/// # Errors
/// `OUT_OF_MEMORY` when the device has less than that left; nothing is counted then.
pub(crate) fn charge(device: usize, size: u64) -> Outcome {
    USED[device]
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            used.checked_add(size).filter(|used| *used <= settings().model(device).memory)
        })
        .map(|_| ())
        .map_err(|_| Code::OUT_OF_MEMORY)
}

/// Takes back what [`charge`] counted.
pub(crate) fn refund(device: usize, size: u64) {
    USED[device].fetch_sub(size, Ordering::Relaxed);
}

/// Bytes of a device in use by this process.
pub(crate) fn used(device: usize) -> u64 {
    USED[device].load(Ordering::Relaxed)
}

/// Counts memory that another process made; it exists, so there is no refusing it.
pub(crate) fn charge_existing(device: usize, size: u64) {
    USED[device].fetch_add(size, Ordering::Relaxed);
}

/// Bytes of a device that are free.
pub(crate) fn free_bytes(device: usize) -> u64 {
    let memory = settings().model(device).memory;
    let own = memory - used(device).min(memory);
    let room = |dir| statvfs(dir).map_or(0, |found| found.f_bavail * found.f_frsize);
    settings().memory_dir.as_ref().map_or(own, |dir| own.min(room(dir)))
}

/// New physical memory, zeroed, not counted. Its size can never change, so that no process that
/// shares it can make accesses of another one fail. (In a file system of its own it can: that is for tests.)
///
/// # Errors
/// `OUT_OF_MEMORY` when the kernel refuses (memory or descriptors).
pub(crate) fn new_memory(size: u64) -> Outcome<OwnedFd> {
    if let Some(dir) = &settings().memory_dir {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::TMPFILE;
        let memory = open(dir, flags, Mode::RUSR | Mode::WUSR).map_err(|_| Code::OUT_OF_MEMORY)?;
        fallocate(&memory, FallocateFlags::empty(), 0, size).map_err(|_| Code::OUT_OF_MEMORY)?;
        return Ok(memory);
    }
    new_memfd("softcuda", size)
}

/// What the names of memfds begin with that are memory of a device, whose number on the host follows.
const ON: &str = "softcuda-on-";

/// As [`new_memory`], on a device of the host: who imports it finds [that device](device_of), where memory is not in files.
///
/// # Errors
/// `OUT_OF_MEMORY` when the kernel refuses (memory or descriptors).
pub(crate) fn new_memory_on(number: usize, size: u64) -> Outcome<OwnedFd> {
    if settings().memory_dir.is_some() {
        return new_memory(size);
    }
    new_memfd(&format!("{ON}{number}"), size)
}

/// The number on the host of the device of which a descriptor is memory, if that is known.
pub(crate) fn device_of(memory: &OwnedFd) -> Option<usize> {
    name_of(memory)?.strip_prefix(ON)?.parse().ok()
}

/// The name of a memfd.
fn name_of(memory: &OwnedFd) -> Option<String> {
    let to = std::fs::read_link(format!("/proc/self/fd/{}", memory.as_raw_fd())).ok()?;
    let (name, _) = to.to_str()?.strip_prefix("/memfd:")?.split_once(' ')?;
    Some(name.to_owned())
}

/// The name of memfds that are host memory.
const HOST: &str = "softcuda-host";

/// As [`new_memory`], for host memory.
///
/// # Errors
/// `OUT_OF_MEMORY` when the kernel refuses (memory or descriptors).
pub(crate) fn new_host_memory(size: u64) -> Outcome<OwnedFd> {
    new_memfd(HOST, size)
}

/// Whether a descriptor of this driver is host memory.
pub(crate) fn is_host_memory(memory: &OwnedFd) -> bool {
    name_of(memory).is_some_and(|name| name == HOST)
}

fn new_memfd(name: &str, size: u64) -> Outcome<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let make = || Ok(memfd_create(name, flags)?);
    let memory = descriptors::keep(make).map_err(|_| Code::OUT_OF_MEMORY)?;
    ftruncate(&memory, size).map_err(|_| Code::OUT_OF_MEMORY)?;
    fcntl_add_seals(&memory, SEALS).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(memory)
}

/// What makes a descriptor device memory.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Whether a descriptor is device memory of this driver, whichever process made it.
pub(crate) fn is_device_memory(memory: impl AsFd) -> bool {
    let in_dir = |dir: &PathBuf| {
        let (file, dir) = (fstat(&memory).ok()?, stat(dir).ok()?);
        Some(file.st_dev == dir.st_dev)
    };
    match &settings().memory_dir {
        Some(dir) => in_dir(dir).unwrap_or(false),
        None => fcntl_get_seals(memory).is_ok_and(|seals| seals == SEALS),
    }
}

/// A plain allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocation {
    /// First address.
    pub(crate) address: u64,
    /// Size as asked for.
    pub(crate) size: u64,
    /// Handle of the context that it belongs to.
    pub(crate) context: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// A number that no other allocation of this process ever has.
    pub(crate) id: u64,
    /// Another process may have it open.
    shared: bool,
    block: u64,
}

/// What another process needs to open an allocation.
pub(crate) struct Shared {
    /// The descriptor of the memory in this process.
    pub(crate) descriptor: i32,
    /// The inode number of the memory.
    pub(crate) inode: u64,
    /// Size of the memory in bytes.
    pub(crate) whole: u64,
    /// Where in the memory the allocation begins.
    pub(crate) offset: u64,
    /// Size of the allocation in bytes.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
}

/// Whole granules with memory behind them.
struct Block {
    size: u64,
    device: usize,
    /// Free ranges by address, in blocks that are shared by small allocations.
    free: Option<BTreeMap<u64, u64>>,
    /// The memory, once a part of it was shared with other processes.
    memory: Option<OwnedFd>,
    /// By which descriptor and inode number other processes know the memory, if it is shared. A checkpoint that
    /// carries shared memory does not change them, though the memory is another afterwards.
    known: Option<(i32, u64)>,
}

struct Heap {
    allocations: BTreeMap<u64, Allocation>,
    blocks: BTreeMap<u64, Block>,
}

static HEAP: Mutex<Heap> =
    Mutex::new(Heap { allocations: BTreeMap::new(), blocks: BTreeMap::new() });

/// A number for a new piece of memory, as `CU_POINTER_ATTRIBUTE_BUFFER_ID` reports it.
pub(crate) fn new_buffer_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Allocates `size` bytes on a device. New blocks are zeroed; reused memory holds what it held.
///
/// # Errors
/// `INVALID_VALUE` for size 0, `OUT_OF_MEMORY`.
pub(crate) fn allocate(device: usize, context: u64, size: u64) -> Outcome<u64> {
    if size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut heap = HEAP.lock();
    let rounded = size.checked_next_multiple_of(ALIGNMENT).ok_or(Code::OUT_OF_MEMORY)?;
    let (address, block) = if rounded >= LARGE {
        let whole = address_space::round_up(size).ok_or(Code::OUT_OF_MEMORY)?;
        let block = heap.add_block(device, whole, false)?;
        (block, block)
    } else {
        match heap.take_from_shared(device, rounded) {
            Some(found) => found,
            None => {
                heap.add_block(device, GRANULE, true)?;
                heap.take_from_shared(device, rounded).ok_or(Code::OUT_OF_MEMORY)?
            }
        }
    };
    let id = new_buffer_id();
    heap.allocations
        .insert(address, Allocation { address, size, context, device, id, shared: false, block });
    Ok(address)
}

/// Frees an allocation by its first address. No work that uses it may be under way.
///
/// # Errors
/// `INVALID_VALUE` when there is no such allocation.
pub(crate) fn free(address: u64) -> Outcome {
    give_back(&take(address)?);
    Ok(())
}

/// Takes an allocation off the table, so that it is the program's no more; its memory stays until
/// [`give_back`].
///
/// # Errors
/// `INVALID_VALUE` when there is no allocation that begins there.
pub(crate) fn take(address: u64) -> Outcome<Allocation> {
    HEAP.lock().allocations.remove(&address).ok_or(Code::INVALID_VALUE)
}

/// Gives the memory of an allocation back that was taken off the table. No work that uses it may
/// be under way.
pub(crate) fn give_back(allocation: &Allocation) {
    HEAP.lock().give_back(allocation);
}

/// A new block of whole granules for a pool to divide.
///
/// # Errors
/// `OUT_OF_MEMORY`.
pub(crate) fn add_pool_block(device: usize, size: u64) -> Outcome<u64> {
    HEAP.lock().add_block(device, size, false)
}

/// Takes a pool's block away; nothing may use it any more.
pub(crate) fn remove_pool_block(device: usize, address: u64) {
    HEAP.lock().remove_block(device, address);
}

/// Puts a block of whole granules behind addresses that the caller has reserved.
///
/// # Errors
/// `OUT_OF_MEMORY`.
pub(crate) fn add_block_at(device: usize, address: u64, size: u64) -> Outcome {
    HEAP.lock().add_block_at(device, address, size, None)
}

/// Takes away what [`add_block_at`] gave; the addresses stay reserved. Nothing may use it any more.
pub(crate) fn remove_block_at(device: usize, address: u64) {
    HEAP.lock().remove_block_at(device, address);
}

/// Whether an address is in a block of plain or pool memory.
pub(crate) fn is_block(address: u64) -> bool {
    let heap = HEAP.lock();
    let block = heap.blocks.range(..=address).next_back();
    block.is_some_and(|(start, block)| address < start + block.size)
}

/// Frees everything that belongs to a context.
pub(crate) fn free_context(context: u64) {
    let mut heap = HEAP.lock();
    let gone: Vec<_> =
        heap.allocations.values().filter(|a| a.context == context).copied().collect();
    for allocation in gone {
        heap.allocations.remove(&allocation.address);
        heap.give_back(&allocation);
    }
}

/// The allocation that contains an address.
pub(crate) fn find(address: u64) -> Option<Allocation> {
    let heap = HEAP.lock();
    let (_, allocation) = heap.allocations.range(..=address).next_back()?;
    (address < allocation.address + allocation.size).then_some(*allocation)
}

/// Address, size and device of all memory behind plain allocations.
pub(crate) fn blocks() -> Vec<(u64, u64, usize)> {
    HEAP.lock().blocks.iter().map(|(address, b)| (*address, b.size, b.device)).collect()
}

/// Keeps memory from being exchanged by [`share`], for writes that are no work of a stream.
pub(crate) fn hold_still() -> RwLockReadGuard<'static, ()> {
    EXCHANGE.read()
}

static EXCHANGE: RwLock<()> = RwLock::new(());

/// Makes an allocation ready for other processes. Blocks keep no descriptor of their memory; the
/// first time that a part of one is shared it gets new memory with the same contents, and keeps
/// that one's. No work may be under way.
///
/// # Errors
/// `INVALID_VALUE` for what is not the first address of an allocation; `OUT_OF_MEMORY`.
pub(crate) fn share(address: u64) -> Outcome<Shared> {
    let _still = EXCHANGE.write();
    let mut heap = HEAP.lock();
    let allocation = *heap.allocations.get(&address).ok_or(Code::INVALID_VALUE)?;
    let shared = heap.share(allocation.block, address, allocation.size)?;
    heap.allocations.entry(address).and_modify(|allocation| allocation.shared = true);
    Ok(shared)
}

/// Makes a part of a pool's block ready for other processes, as [`share`] does that of an allocation.
///
/// # Errors
/// `INVALID_VALUE` for what is in no block; `OUT_OF_MEMORY`.
pub(crate) fn share_part(address: u64, size: u64) -> Outcome<Shared> {
    let _still = EXCHANGE.write();
    let mut heap = HEAP.lock();
    let block = heap.blocks.range(..=address).next_back().map(|(block, _)| *block);
    heap.share(block.ok_or(Code::INVALID_VALUE)?, address, size)
}

/// Puts new memory with the same contents in the place of a block's.
fn exchange(address: u64, size: u64) -> Outcome<OwnedFd> {
    let memory = new_memory(size)?;
    let mut done = 0;
    while done < size {
        // SAFETY: the block is accessible for its whole size, and the callers of `share` see to it
        // that nobody writes to it meanwhile.
        let rest = unsafe {
            std::slice::from_raw_parts((address + done) as *const u8, (size - done) as usize)
        };
        match rustix::io::pwrite(&memory, rest, done) {
            Ok(written) if written > 0 => done += written as u64,
            _ => return Err(Code::OUT_OF_MEMORY),
        }
    }
    address_space::back(address, size, memory.as_fd(), 0)?;
    address_space::protect(address, size, Access::ReadWrite)?;
    Ok(memory)
}

/// Whether an allocation is shared with other processes.
pub(crate) fn any_shared() -> bool {
    HEAP.lock().allocations.values().any(|allocation| allocation.shared)
}

/// The descriptor of the memory that other processes know by the lower half of this inode number.
///
/// # Errors
/// `INVALID_VALUE` when there is none; not now, while the process is checkpointed.
pub(crate) fn shared_descriptor(inode: u32) -> Outcome<i32> {
    let heap = HEAP.lock();
    let mut blocks = heap.blocks.values();
    let block = blocks.find(|block| block.known.is_some_and(|(_, known)| known as u32 == inode));
    let memory = block.and_then(|block| block.memory.as_ref()).ok_or(Code::INVALID_VALUE)?;
    Ok(memory.as_raw_fd())
}

/// Backs a block with new zeroed memory, in a restore. What other processes know is kept open.
///
/// # Errors
/// As [`back_with_new_memory`].
pub(crate) fn back_again(address: u64, size: u64) -> Outcome {
    let mut heap = HEAP.lock();
    match heap.blocks.get_mut(&address) {
        Some(block) if block.known.is_some() => {
            block.memory = Some(back_with_kept_memory(address, size)?);
            Ok(())
        }
        _ => back_with_new_memory(address, size),
    }
}

/// Closes the descriptors of all blocks, for a checkpoint.
pub(crate) fn close_shared() {
    HEAP.lock().blocks.values_mut().for_each(|block| block.memory = None);
}

/// After a fork, in the child: closes the descriptors, if nobody was inside at the fork. As all
/// locks of the child, this one is not given back.
pub(crate) fn close_in_child() {
    if let Some(heap) = HEAP.try_lock() {
        let mut heap = ManuallyDrop::new(heap);
        heap.blocks.values_mut().for_each(|block| block.memory = None);
    }
}

/// Backs a range with new zeroed memory, accessible to the device.
///
/// # Errors
/// `OUT_OF_MEMORY`; the range is then only reserved.
pub(crate) fn back_with_new_memory(address: u64, size: u64) -> Outcome {
    back_with_kept_memory(address, size).map(drop)
}

/// As [`back_with_new_memory`]; gives the memory's descriptor.
fn back_with_kept_memory(address: u64, size: u64) -> Outcome<OwnedFd> {
    let memory = new_memory(size)?;
    let result = address_space::back(address, size, memory.as_fd(), 0)
        .and_then(|()| address_space::protect(address, size, Access::ReadWrite));
    if result.is_err() {
        address_space::unback(address, size);
    }
    result.map(|()| memory)
}

impl Heap {
    fn add_block(&mut self, device: usize, size: u64, shared: bool) -> Outcome<u64> {
        let address = address_space::reserve(size, GRANULE, 0)?;
        let free = shared.then(|| BTreeMap::from([(address, size)]));
        self.add_block_at(device, address, size, free)
            .inspect_err(|_| address_space::unreserve(address))?;
        Ok(address)
    }

    fn add_block_at(
        &mut self,
        device: usize,
        address: u64,
        size: u64,
        free: Option<BTreeMap<u64, u64>>,
    ) -> Outcome {
        charge(device, size)?;
        back_with_new_memory(address, size).inspect_err(|_| refund(device, size))?;
        self.blocks.insert(address, Block { size, device, free, memory: None, known: None });
        Ok(())
    }

    /// First fit over the shared blocks of a device: address and block.
    fn take_from_shared(&mut self, device: usize, size: u64) -> Option<(u64, u64)> {
        for (block, Block { free, device: owner, .. }) in &mut self.blocks {
            let Some(free) = free.as_mut().filter(|_| *owner == device) else { continue };
            let Some((&start, &length)) = free.iter().find(|(_, length)| **length >= size) else {
                continue;
            };
            free.remove(&start);
            if length > size {
                free.insert(start + size, length - size);
            }
            return Some((start, *block));
        }
        None
    }

    /// Keeps a descriptor of the memory behind a block, of which a part is shared.
    fn share(&mut self, start: u64, address: u64, size: u64) -> Outcome<Shared> {
        let block = self.blocks.get_mut(&start).ok_or(Code::INVALID_VALUE)?;
        let memory = match block.memory.take() {
            Some(memory) => memory,
            None => exchange(start, block.size)?,
        };
        let (descriptor, inode) = match block.known {
            Some(known) => known,
            None => {
                let inode = fstat(&memory).map_err(|_| Code::OPERATING_SYSTEM)?.st_ino;
                *block.known.insert((memory.as_raw_fd(), inode))
            }
        };
        block.memory = Some(memory);
        let (whole, device) = (block.size, block.device);
        Ok(Shared { descriptor, inode, whole, offset: address - start, size, device })
    }

    fn give_back(&mut self, allocation: &Allocation) {
        let Some(block) = self.blocks.get_mut(&allocation.block) else { return };
        if let Some(free) = &mut block.free {
            let mut start = allocation.address;
            let mut length = allocation.size.next_multiple_of(ALIGNMENT);
            if let Some((&before, &size)) = free.range(..start).next_back()
                && before + size == start
            {
                free.remove(&before);
                (start, length) = (before, length + size);
            }
            if let Some(size) = free.remove(&(start + length)) {
                length += size;
            }
            free.insert(start, length);
            if length < block.size {
                return;
            }
        }
        let device = block.device;
        self.remove_block(device, allocation.block);
    }

    fn remove_block(&mut self, device: usize, address: u64) {
        self.remove_block_at(device, address);
        address_space::unreserve(address);
    }

    fn remove_block_at(&mut self, device: usize, address: u64) {
        let Some(block) = self.blocks.remove(&address) else { return };
        address_space::unback(address, block.size);
        refund(device, block.size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_allocations_share_blocks_and_leave_nothing() {
        // A device of its own, as tests run at the same time.
        let device = 3;
        let addresses: Vec<u64> = (0..5000).map(|_| allocate(device, 7, 1000).unwrap()).collect();
        assert_eq!(used(device), 3 * GRANULE);
        assert!(addresses.iter().all(|a| a.is_multiple_of(512)));
        let inside = find(addresses[10] + 999).unwrap();
        assert_eq!((inside.address, inside.size), (addresses[10], 1000));
        assert!(find(addresses[10] + 1000).is_none_or(|a| a.address != addresses[10]));
        for address in addresses.iter().rev().step_by(2).chain(addresses.iter().step_by(2)) {
            free(*address).unwrap();
        }
        assert_eq!(used(device), 0);
        assert_eq!(free(addresses[0]), Err(Code::INVALID_VALUE));
    }

    #[test]
    fn memory_runs_out() {
        let device = 4;
        let total = settings().model(device).memory;
        let all = allocate(device, 8, total).unwrap();
        assert_eq!(allocate(device, 8, 1), Err(Code::OUT_OF_MEMORY));
        free_context(8);
        assert_eq!(used(device), 0);
        assert!(!address_space::is_accessible(all, 1));
    }
}
