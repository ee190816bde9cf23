//! Host memory of `cuMemCreate`. The driver cannot carry it: a process that has some is lost when the driver restores it. So
//! it is memory of the kernel's here, a memfd that is mapped where the program wants it and registered with the driver as
//! soon as a device may use it. Registered memory the driver carries, and CRIU what is in it.
//!
//! The program's threads use such memory without any call, so it could not be taken away from a running process either.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use gpucr_wire::peers::{Identity, Whole};
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect};

use super::opened::{Offer, Origin};
use super::program::handle_of;
use super::{Memory, program};
use crate::abi::types::{
    ACCESS_NONE, ACCESS_READ, ACCESS_READ_WRITE, Access, AllocationProp, Code, ERROR_INVALID_VALUE,
    ERROR_OUT_OF_MEMORY, LOCATION_DEVICE, LOCATION_HOST_NUMA, Location,
};
use crate::log::log;

/// Its size cannot change, so that nobody who shares it can make accesses of another one fail.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// What the driver maps is a multiple of this, bytes.
const GRANULARITY: u64 = 2 << 20;

/// Calls of the driver by which devices get to use memory of the program's.
pub(crate) trait Pin {
    /// # Errors
    /// The driver's code.
    fn register(&self, address: u64, size: u64) -> Result<(), Code>;
    /// # Errors
    /// The driver's code.
    fn unregister(&self, address: u64) -> Result<(), Code>;
}

struct Block {
    size: u64,
    /// What the program created it with.
    prop: AllocationProp,
    fd: ManuallyDrop<OwnedFd>,
    /// What tells the memory from any other that a descriptor of this number may be of. It has that after a restore too,
    /// which its inode has not.
    name: PathBuf,
    /// Times that the program may still release it.
    references: u32,
    mappings: u32,
    /// The program has exported it.
    is_offered: bool,
    /// Whose it is, if it is another process's.
    origin: Option<Origin>,
}

impl Block {
    fn new(
        size: u64,
        prop: AllocationProp,
        fd: OwnedFd,
        origin: Option<Origin>,
    ) -> io::Result<Self> {
        let name = name(&fd)?;
        let fd = ManuallyDrop::new(fd);
        let (references, mappings, is_offered) = (1, 0, false);
        Ok(Self { size, prop, fd, name, references, mappings, is_offered, origin })
    }

    /// The memory, if the program has not closed the descriptor, which is none of its own.
    fn memory(&self) -> Result<BorrowedFd<'_>, Code> {
        if name(&self.fd).is_ok_and(|name| name == self.name) {
            return Ok(self.fd.as_fd());
        }
        log!("host memory cannot be mapped or exported: its descriptor was closed");
        Err(ERROR_INVALID_VALUE)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // What the program has closed is left alone, here and in the children of a fork: the number may be that of a
        // file of its own.
        if self.memory().is_ok() {
            // SAFETY: it is not used after this.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

fn name(fd: &OwnedFd) -> io::Result<PathBuf> {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

struct Mapping {
    size: u64,
    block: u64,
    /// What the host may do.
    host: u32,
    /// What each device may do.
    devices: BTreeMap<i32, u32>,
    is_registered: bool,
}

/// All such memory. Its blocks have names from the same numbers as all blocks.
#[derive(Default)]
pub(super) struct HostMemory {
    blocks: BTreeMap<u64, Block>,
    mappings: BTreeMap<u64, Mapping>,
}

/// New memory, zeroed.
fn new_memory(size: u64) -> io::Result<OwnedFd> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let name = format!("gpucr-host-{:016x}", u64::from_le_bytes(random));
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&fd, size)?;
    fcntl_add_seals(&fd, SEALS)?;
    // Out of the way of programs that count on the lowest numbers.
    Ok(fcntl_dupfd_cloexec(&fd, 512).unwrap_or(fd))
}

fn protection(flags: u32) -> MprotectFlags {
    match flags {
        ACCESS_READ => MprotectFlags::READ,
        ACCESS_READ_WRITE => MprotectFlags::READ | MprotectFlags::WRITE,
        _ => MprotectFlags::empty(),
    }
}

/// # Safety
/// The range is a whole mapping of this file's.
unsafe fn protect(address: u64, size: u64, flags: u32) -> Result<(), Code> {
    // SAFETY: the caller's duty; what the program may do with its own memory is what it has asked for.
    unsafe { mprotect(address as *mut c_void, size as usize, protection(flags)) }
        .map_err(|_| ERROR_OUT_OF_MEMORY)
}

impl HostMemory {
    /// The mappings that make up the range exactly, by their addresses. `None`: nothing of this kind is in it.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: something of it is, and something else.
    fn covered(&self, address: u64, size: u64) -> Option<Result<Vec<u64>, Code>> {
        let end = address.saturating_add(size);
        let inside = self.mappings.range(..end).rev();
        let mut inside: Vec<(u64, u64)> = inside
            .map(|(start, mapping)| (*start, start + mapping.size))
            .take_while(|(_, end)| *end > address)
            .collect();
        inside.reverse();
        let (first, last) = (inside.first()?.0, inside.last()?.1);
        let is_whole = inside.windows(2).all(|pair| pair[0].1 == pair[1].0);
        Some(if is_whole && (first, last) == (address, end) {
            Ok(inside.into_iter().map(|(start, _)| start).collect())
        } else {
            Err(ERROR_INVALID_VALUE)
        })
    }

    fn mapping_at(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (start, mapping) = self.mappings.range(..=address).next_back()?;
        (address - start < mapping.size).then_some((*start, mapping))
    }

    /// Whose memory is imported here.
    pub(super) fn owners(&self) -> impl Iterator<Item = Identity> {
        self.blocks.values().filter_map(|block| block.origin.map(|origin| origin.owner))
    }
}

/// What the program may ask about an address in such memory.
pub(crate) struct Seen {
    /// Where the mapping begins.
    pub(crate) address: u64,
    /// Its bytes.
    pub(crate) size: u64,
    /// The handle types for which it was made.
    pub(crate) handle_types: u32,
}

impl Memory {
    /// Serves `cuMemCreate` for host memory, of which the driver has said that it would give it, with these properties.
    ///
    /// # Errors
    /// `ERROR_OUT_OF_MEMORY`: the kernel gives none.
    pub(crate) fn create_host(&mut self, size: u64, prop: AllocationProp) -> Result<u64, Code> {
        let block = new_memory(size).and_then(|fd| Block::new(size, prop, fd, None));
        let block = block.map_err(|error| {
            log!("no host memory: {error}");
            ERROR_OUT_OF_MEMORY
        })?;
        let id = self.new_id();
        self.host.blocks.insert(id, block);
        Ok(handle_of(id))
    }

    fn host_block(&self, handle: u64) -> Option<u64> {
        program::named(handle).filter(|id| self.host.blocks.contains_key(id))
    }

    /// Serves `cuMemRelease`. `None`: the handle is not of such memory.
    pub(crate) fn release_host(&mut self, handle: u64) -> Option<Code> {
        let id = self.host_block(handle)?;
        let block = self.host.blocks.get_mut(&id)?;
        if block.references == 0 {
            return Some(ERROR_INVALID_VALUE);
        }
        block.references -= 1;
        self.drop_unused_host(id);
        Some(0)
    }

    fn drop_unused_host(&mut self, id: u64) {
        let is_unused = |block: &Block| block.references == 0 && block.mappings == 0;
        if self.host.blocks.get(&id).is_some_and(is_unused)
            && let Some(block) = self.host.blocks.remove(&id)
        {
            self.closed.extend(block.origin);
        }
    }

    /// Serves `cuMemMap`. `None`: the handle is not of such memory.
    pub(crate) fn map_host(
        &mut self,
        address: u64,
        size: u64,
        offset: u64,
        handle: u64,
    ) -> Option<Result<(), Code>> {
        let id = self.host_block(handle)?;
        Some(self.map_host_block(address, size, offset, id))
    }

    fn map_host_block(
        &mut self,
        address: u64,
        size: u64,
        offset: u64,
        id: u64,
    ) -> Result<(), Code> {
        let end = address.checked_add(size).ok_or(ERROR_INVALID_VALUE)?;
        let reservation = self.reservations.range(..=address).next_back();
        let is_reserved = reservation.is_some_and(|(start, bytes)| end <= start + bytes);
        let device = self.mappings.range(..end).next_back();
        let is_free = device.is_none_or(|(start, mapping)| start + mapping.size <= address)
            && self.host.covered(address, size).is_none();
        let block = self.host.blocks.get_mut(&id).ok_or(ERROR_INVALID_VALUE)?;
        let is_inside = offset.checked_add(size).is_some_and(|last| last <= block.size);
        let is_whole = [address, size, offset].into_iter().all(|n| n.is_multiple_of(GRANULARITY));
        if size == 0 || block.references == 0 || !(is_reserved && is_free && is_inside && is_whole)
        {
            return Err(ERROR_INVALID_VALUE);
        }
        let (place, flags) = (address as *mut c_void, MapFlags::SHARED | MapFlags::FIXED);
        let fd = block.memory()?;
        // SAFETY: the program has reserved the addresses, and nothing is mapped there that is not the reservation's.
        unsafe { mmap(place, size as usize, ProtFlags::empty(), flags, fd, offset) }
            .map_err(|_| ERROR_OUT_OF_MEMORY)?;
        block.mappings += 1;
        let (host, devices) = (ACCESS_NONE, BTreeMap::new());
        let mapping = Mapping { size, block: id, host, devices, is_registered: false };
        self.host.mappings.insert(address, mapping);
        Ok(())
    }

    /// Serves `cuMemUnmap`; the addresses stay reserved. `None`: the range has no such memory.
    ///
    /// # Errors
    /// The driver's code; then the mappings up to there are gone.
    pub(crate) fn unmap_host(
        &mut self,
        pin: &dyn Pin,
        address: u64,
        size: u64,
    ) -> Option<Result<(), Code>> {
        let covered = self.host.covered(address, size)?;
        Some(covered.and_then(|starts| {
            starts.into_iter().try_for_each(|start| self.unmap_host_at(pin, start))
        }))
    }

    fn unmap_host_at(&mut self, pin: &dyn Pin, address: u64) -> Result<(), Code> {
        let Some(mapping) = self.host.mappings.get_mut(&address) else { return Ok(()) };
        if std::mem::take(&mut mapping.is_registered) {
            pin.unregister(address).inspect_err(|_| mapping.is_registered = true)?;
        }
        let (place, size) = (address as *mut c_void, mapping.size as usize);
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: it replaces a mapping that was made here, as the program wants it.
        unsafe { mmap_anonymous(place, size, ProtFlags::empty(), flags) }
            .map_err(|_| ERROR_OUT_OF_MEMORY)?;
        let id = mapping.block;
        self.host.mappings.remove(&address);
        if let Some(block) = self.host.blocks.get_mut(&id) {
            block.mappings -= 1;
        }
        self.drop_unused_host(id);
        Ok(())
    }

    /// Serves `cuMemSetAccess`. `None`: the range has no such memory.
    ///
    /// # Errors
    /// The driver's code; then some of it may be done.
    pub(crate) fn set_host_access(
        &mut self,
        pin: &dyn Pin,
        address: u64,
        size: u64,
        access: &[Access],
    ) -> Option<Result<(), Code>> {
        let covered = self.host.covered(address, size)?;
        let are_flags = |one: &Access| {
            matches!(one.flags, ACCESS_NONE | ACCESS_READ | ACCESS_READ_WRITE)
                && (one.location.kind == LOCATION_DEVICE || one.location.is_host())
        };
        let is_known = access.iter().all(are_flags) && !access.is_empty();
        Some(covered.and_then(|starts| {
            if !is_known {
                return Err(ERROR_INVALID_VALUE);
            }
            let mappings = self.host.mappings.iter_mut();
            let mut mappings = mappings.filter(|(start, _)| starts.contains(start));
            mappings.try_for_each(|(start, mapping)| mapping.set_access(pin, *start, access))
        }))
    }

    /// Whether such memory is mapped in a range.
    pub(crate) fn has_host(&self, address: u64, size: u64) -> bool {
        self.host.covered(address, size).is_some()
    }

    /// What a location may do with such memory at an address. `None`: there is none.
    pub(crate) fn host_access(&self, address: u64, location: Location) -> Option<u32> {
        let (_, mapping) = self.host.mapping_at(address)?;
        Some(match location.kind {
            LOCATION_DEVICE => mapping.devices.get(&location.id).copied().unwrap_or(ACCESS_NONE),
            _ => mapping.host,
        })
    }

    /// What is at an address, if it is such memory.
    pub(crate) fn seen_host(&self, address: u64) -> Option<Seen> {
        let (address, mapping) = self.host.mapping_at(address)?;
        let handle_types = self.host.blocks.get(&mapping.block)?.prop.handle_types;
        Some(Seen { address, size: mapping.size, handle_types })
    }

    /// Serves `cuMemRetainAllocationHandle`. `None`: no such memory is mapped there.
    pub(crate) fn retain_host(&mut self, address: u64) -> Option<u64> {
        let id = self.host.mapping_at(address)?.1.block;
        self.host.blocks.get_mut(&id)?.references += 1;
        Some(handle_of(id))
    }

    /// What such memory was made with. `None`: the handle is of none.
    pub(crate) fn host_properties(&self, handle: u64) -> Option<AllocationProp> {
        self.host.blocks.get(&self.host_block(handle)?).map(|block| block.prop)
    }

    /// Lets others import the memory of this handle, for which they get descriptors of this kind; its name. `None`: it is
    /// no such memory.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: it was not made for that, is released, or is another process's.
    pub(crate) fn offer_host(&mut self, handle: u64, kind: u32) -> Option<Result<u64, Code>> {
        let id = self.host_block(handle)?;
        let block = self.host.blocks.get_mut(&id)?;
        let may_be =
            block.prop.handle_types & kind != 0 && block.references > 0 && block.origin.is_none();
        block.is_offered |= may_be;
        Some(if may_be { Ok(id) } else { Err(ERROR_INVALID_VALUE) })
    }

    /// The memory of this name, for another process. `None`: it is no such memory.
    pub(super) fn hand_out_host(&self, id: u64) -> Option<Offer<Whole>> {
        let block = self.host.blocks.get(&id)?;
        let node = u32::try_from(block.prop.location.id).unwrap_or(0);
        let handle_types = block.prop.handle_types;
        let node = node.saturating_add(1);
        let whole = Whole { size: block.size, device: [0; 16], handle_types, node };
        let fd = block.memory().ok().filter(|_| block.is_offered && block.origin.is_none());
        let fd = fd.and_then(|fd| fd.try_clone_to_owned().ok());
        Some(fd.map_or(Offer::Gone, |fd| Offer::Here(whole, fd)))
    }

    /// Memory of this process is imported here: its handle once more. `None`: it is gone, or was not exported.
    pub(super) fn import_own_host(&mut self, id: u64) -> Option<u64> {
        let block = self.host.blocks.get_mut(&id).filter(|block| block.is_offered)?;
        block.references += 1;
        Some(handle_of(id))
    }

    /// Imports memory of another process, or counts that it was imported once more. Gives its handle.
    ///
    /// # Errors
    /// `ERROR_INVALID_VALUE`: it is not what its owner says. Nothing has changed.
    pub(super) fn import_host(
        &mut self,
        origin: Origin,
        whole: &Whole,
        fd: BorrowedFd<'_>,
    ) -> Result<u64, Code> {
        let of = |block: &Block| {
            block.origin.is_some_and(|o| (o.owner, o.block) == (origin.owner, origin.block))
        };
        if let Some((id, block)) = self.host.blocks.iter_mut().find(|(_, block)| of(block)) {
            block.references += 1;
            return Ok(handle_of(*id));
        }
        let is_fixed = fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SEALS));
        let size = fstat(fd).map_or(0, |found| found.st_size as u64);
        if !is_fixed || size != whole.size || size == 0 || !size.is_multiple_of(GRANULARITY) {
            return Err(ERROR_INVALID_VALUE);
        }
        let id = whole.node.checked_sub(1).and_then(|id| i32::try_from(id).ok());
        let location = Location { kind: LOCATION_HOST_NUMA, id: id.ok_or(ERROR_INVALID_VALUE)? };
        let prop = AllocationProp { location, ..AllocationProp::on_device(0, false) };
        let prop = AllocationProp { handle_types: whole.handle_types, ..prop };
        let block = fcntl_dupfd_cloexec(fd, 512)
            .map_err(io::Error::from)
            .and_then(|fd| Block::new(size, prop, fd, Some(origin)));
        let block = block.map_err(|_| ERROR_OUT_OF_MEMORY)?;
        let id = self.new_id();
        self.host.blocks.insert(id, block);
        Ok(handle_of(id))
    }
}

impl Mapping {
    fn set_access(&mut self, pin: &dyn Pin, address: u64, access: &[Access]) -> Result<(), Code> {
        let (mut host, mut devices) = (self.host, self.devices.clone());
        for one in access {
            if one.location.kind == LOCATION_DEVICE {
                devices.insert(one.location.id, one.flags);
            } else {
                host = one.flags;
            }
        }
        let is_used = devices.values().any(|flags| *flags != ACCESS_NONE);
        if is_used && !self.is_registered {
            // The driver takes what the host can reach.
            // SAFETY: this is a whole mapping.
            unsafe { protect(address, self.size, ACCESS_READ_WRITE) }?;
            let registered = pin.register(address, self.size);
            if registered.is_err() {
                // SAFETY: as above.
                unsafe { protect(address, self.size, self.host) }?;
                return registered;
            }
            self.is_registered = true;
        } else if !is_used && self.is_registered {
            pin.unregister(address)?;
            self.is_registered = false;
        }
        // SAFETY: as above.
        unsafe { protect(address, self.size, host) }?;
        (self.host, self.devices) = (host, devices);
        Ok(())
    }
}
