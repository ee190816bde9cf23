//! Virtual memory management without a device: it keeps the books, checks what it is told, and
//! can be told to fail.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use super::multicast::{Binding, Multicast};
use super::vmm::{DeviceInfo, Vmm};
use crate::abi::types::{
    ACCESS_NONE, Access, AllocationProp, Code, ERROR_DEINITIALIZED, ERROR_INVALID_VALUE,
    ERROR_OUT_OF_MEMORY, MulticastProp,
};

const MIB: u64 = 1 << 20;

/// A mapping: physical memory, offset, size, access by device.
type Seen = (u64, u64, u64, BTreeMap<i32, u32>);

/// A multicast object: how many devices are to be added, which were, and which memory is bound on which device, where.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Seat {
    wanted: usize,
    added: Vec<i32>,
    bound: BTreeMap<(i32, u64), u64>,
}

/// The books.
#[derive(Default)]
pub(crate) struct Fake {
    next: Cell<u64>,
    calls: Cell<usize>,
    /// Calls that still succeed before one fails.
    left: Cell<Option<usize>>,
    failed: Cell<bool>,
    is_shut_down: Cell<bool>,
    limit: Cell<Option<u64>>,
    reserved: RefCell<BTreeMap<u64, u64>>,
    /// Handle to physical memory, its size, and whether it was imported.
    handles: RefCell<BTreeMap<u64, (u64, u64, bool)>>,
    mapped: RefCell<BTreeMap<u64, Seen>>,
    /// Multicast objects by their physical number: devices that are wanted, those that were added, and what is bound.
    objects: RefCell<BTreeMap<u64, Seat>>,
    /// Events behind work that is over.
    over: RefCell<Vec<u64>>,
}

impl Fake {
    pub(crate) fn new() -> Self {
        let fake = Self::default();
        fake.next.set(1);
        fake
    }

    /// Lets `calls` calls succeed, and then one fail.
    pub(crate) fn fail_after(&self, calls: usize) {
        self.left.set(Some(calls));
        self.failed.set(false);
    }

    /// Lets all calls succeed again; says whether one has failed.
    pub(crate) fn fail_never(&self) -> bool {
        self.left.set(None);
        self.failed.get()
    }

    /// From now on every call says that the driver is shutting down.
    pub(crate) fn shut_down(&self) {
        self.is_shut_down.set(true);
    }

    pub(crate) fn limit_bytes(&self, bytes: u64) {
        self.limit.set(Some(bytes));
    }

    /// What the event was recorded behind is over.
    pub(crate) fn end(&self, event: u64) {
        self.over.borrow_mut().push(event);
    }

    pub(crate) fn calls(&self) -> usize {
        self.calls.get()
    }

    pub(crate) fn mapped(&self) -> usize {
        self.mapped.borrow().len()
    }

    pub(crate) fn handles(&self) -> usize {
        self.handles.borrow().len()
    }

    /// What is seen where.
    pub(crate) fn snapshot(&self) -> BTreeMap<u64, Seen> {
        self.mapped.borrow().clone()
    }

    /// The same, whatever the memory behind it.
    pub(crate) fn places(&self) -> BTreeMap<u64, (u64, BTreeMap<i32, u32>)> {
        let mapped = self.mapped.borrow();
        mapped.iter().map(|(a, (_, _, size, access))| (*a, (*size, access.clone()))).collect()
    }

    /// The devices that reach an address.
    pub(crate) fn devices(&self, address: u64) -> Vec<i32> {
        let mapped = self.mapped.borrow();
        mapped.get(&address).map(|seen| seen.3.keys().copied().collect()).unwrap_or_default()
    }

    /// What the devices may do at each address.
    pub(crate) fn flags(&self) -> Vec<Vec<u32>> {
        self.mapped.borrow().values().map(|seen| seen.3.values().copied().collect()).collect()
    }

    /// The multicast objects that somebody has, with what is bound.
    pub(crate) fn objects(&self) -> Vec<Seat> {
        let handles = self.handles.borrow();
        let objects = self.objects.borrow();
        let is_there = |id: &u64| handles.values().any(|(physical, ..)| physical == id);
        objects.iter().filter(|(id, _)| is_there(id)).map(|(_, seat)| seat.clone()).collect()
    }

    fn object(&self, handle: u64) -> Result<u64, Code> {
        let physical = self.handles.borrow().get(&handle).ok_or(ERROR_INVALID_VALUE)?.0;
        valid(self.objects.borrow().contains_key(&physical)).map(|()| physical)
    }

    fn call(&self) -> Result<(), Code> {
        self.calls.set(self.calls.get() + 1);
        if self.is_shut_down.get() {
            return Err(ERROR_DEINITIALIZED);
        }
        match self.left.get() {
            Some(0) => {
                // One failure only: what undoes it must be able to work.
                self.left.set(None);
                self.failed.set(true);
                Err(ERROR_INVALID_VALUE + 700)
            }
            Some(left) => {
                self.left.set(Some(left - 1));
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn number(&self) -> u64 {
        self.next.replace(self.next.get() + 1)
    }

    fn in_use(&self) -> u64 {
        let mut sizes = BTreeMap::new();
        for (physical, size, _) in self.handles.borrow().values() {
            sizes.insert(*physical, *size);
        }
        sizes.values().sum()
    }
}

fn valid(condition: bool) -> Result<(), Code> {
    if condition { Ok(()) } else { Err(ERROR_INVALID_VALUE) }
}

impl Vmm for Fake {
    fn is_exportable(&self, _: i32) -> bool {
        true
    }

    fn device(&self, _: i32) -> Result<DeviceInfo, Code> {
        self.call()?;
        Ok(DeviceInfo { total: 1 << 30, granularity: 2 * MIB, rdma: false })
    }

    fn reserve(&self, size: u64) -> Result<u64, Code> {
        self.call()?;
        let address = 0x7000_0000_0000 + (self.number() << 40);
        self.reserved.borrow_mut().insert(address, size);
        Ok(address)
    }

    fn unreserve(&self, address: u64, size: u64) -> Result<(), Code> {
        self.call()?;
        valid(self.reserved.borrow_mut().remove(&address) == Some(size))
    }

    fn create(&self, size: u64, _: &AllocationProp) -> Result<u64, Code> {
        self.call()?;
        if self.limit.get().is_some_and(|limit| self.in_use() + size > limit) {
            return Err(ERROR_OUT_OF_MEMORY);
        }
        let (handle, physical) = (self.number(), self.number());
        self.handles.borrow_mut().insert(handle, (physical, size, false));
        Ok(handle)
    }

    fn release(&self, handle: u64) -> Result<(), Code> {
        self.call()?;
        valid(self.handles.borrow_mut().remove(&handle).is_some())
    }

    fn map(&self, address: u64, size: u64, offset: u64, handle: u64) -> Result<(), Code> {
        self.call()?;
        let physical = *self.handles.borrow().get(&handle).ok_or(ERROR_INVALID_VALUE)?;
        valid(offset + size <= physical.1)?;
        let reserved = self.reserved.borrow();
        let (start, room) = reserved.range(..=address).next_back().ok_or(ERROR_INVALID_VALUE)?;
        valid(address + size <= start + room)?;
        let mut mapped = self.mapped.borrow_mut();
        let before = mapped.range(..address + size).next_back();
        valid(before.is_none_or(|(at, seen)| at + seen.2 <= address))?;
        mapped.insert(address, (physical.0, offset, size, BTreeMap::new()));
        Ok(())
    }

    fn unmap(&self, address: u64, size: u64) -> Result<(), Code> {
        self.call()?;
        let mut mapped = self.mapped.borrow_mut();
        let inside: Vec<u64> = mapped.range(address..address + size).map(|(a, _)| *a).collect();
        valid(inside.iter().map(|a| mapped[a].2).sum::<u64>() == size)?;
        for address in inside {
            mapped.remove(&address);
        }
        Ok(())
    }

    fn set_access(&self, address: u64, size: u64, access: &[Access]) -> Result<(), Code> {
        self.call()?;
        let mut mapped = self.mapped.borrow_mut();
        let covered: u64 = mapped.range(address..address + size).map(|(_, seen)| seen.2).sum();
        valid(covered == size && !access.is_empty())?;
        for (_, seen) in mapped.range_mut(address..address + size) {
            for one in access {
                if one.flags == ACCESS_NONE {
                    seen.3.remove(&one.location.id);
                } else {
                    seen.3.insert(one.location.id, one.flags);
                }
            }
        }
        Ok(())
    }

    fn export(&self, handle: u64) -> Result<OwnedFd, Code> {
        self.call()?;
        let (physical, size, imported) =
            *self.handles.borrow().get(&handle).ok_or(ERROR_INVALID_VALUE)?;
        valid(!imported)?;
        let fd =
            rustix::fs::memfd_create("physical", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
        let file = File::from(fd);
        file.write_all_at(&physical.to_le_bytes(), 0).expect("written");
        file.write_all_at(&size.to_le_bytes(), 8).expect("written");
        Ok(file.into())
    }

    fn import(&self, fd: BorrowedFd<'_>) -> Result<u64, Code> {
        self.call()?;
        let file = File::from(fd.try_clone_to_owned().expect("cloned"));
        let mut bytes = [0; 16];
        file.read_exact_at(&mut bytes, 0).expect("read");
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight"));
        let handle = self.number();
        self.handles.borrow_mut().insert(handle, (number(0), number(8), true));
        Ok(handle)
    }

    fn is_over(&self, event: u64) -> bool {
        self.over.borrow().contains(&event)
    }
}

impl Multicast for Fake {
    fn create_object(&self, prop: &MulticastProp) -> Result<u64, Code> {
        self.call()?;
        let (handle, physical) = (self.number(), self.number());
        self.handles.borrow_mut().insert(handle, (physical, prop.size as u64, false));
        let seat = Seat { wanted: prop.devices as usize, ..Seat::default() };
        self.objects.borrow_mut().insert(physical, seat);
        Ok(handle)
    }

    fn object_granularity(&self, _: &MulticastProp) -> u64 {
        2 * MIB
    }

    fn add_device(&self, object: u64, device: i32) -> Result<(), Code> {
        self.call()?;
        let object = self.object(object)?;
        let mut objects = self.objects.borrow_mut();
        let seat = objects.get_mut(&object).ok_or(ERROR_INVALID_VALUE)?;
        valid(seat.added.len() < seat.wanted && !seat.added.contains(&device))?;
        seat.added.push(device);
        Ok(())
    }

    fn bind(&self, object: u64, binding: &Binding, memory: u64) -> Result<(), Code> {
        self.call()?;
        let object = self.object(object)?;
        let memory = self.handles.borrow().get(&memory).ok_or(ERROR_INVALID_VALUE)?.0;
        let mut objects = self.objects.borrow_mut();
        let seat = objects.get_mut(&object).ok_or(ERROR_INVALID_VALUE)?;
        assert_eq!(seat.added.len(), seat.wanted, "the driver would wait for ever");
        valid(seat.bound.insert((binding.device, binding.offset), memory).is_none())
    }

    fn unbind(&self, object: u64, binding: &Binding) -> Result<(), Code> {
        self.call()?;
        let object = self.object(object)?;
        let mut objects = self.objects.borrow_mut();
        let seat = objects.get_mut(&object).ok_or(ERROR_INVALID_VALUE)?;
        valid(seat.bound.remove(&(binding.device, binding.offset)).is_some())
    }
}
