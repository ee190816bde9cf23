//! What the processes of a multicast object share: a file that says which devices were added, and which memory is bound.
//!
//! The file is what the object is exported as. Each process opens it twice. One opening has a shared lock (`flock`) and
//! is the one whose descriptors are given out, so the lock is there as long as anybody has the object, be it as a
//! descriptor that is under way. The other opening is never given out: by it a process locks the table while it reads
//! or changes it, and finds out whether anybody else is left.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fd::OwnedFd;
use rustix::fs::{
    FlockOperation, MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, flock,
    fstat, ftruncate, memfd_create, open,
};

use crate::address_space::GRANULE;
use crate::descriptors;
use crate::device_memory;
use crate::saved_bytes::SharedView;
use crate::settings::MAX_DEVICES;
use crate::status::{Code, Outcome};

/// What marks the file of a multicast object.
const MAGIC: u64 = u64::from_le_bytes(*b"softmult");
/// Bytes of the file. It has no whole granules, so that it is not taken for memory.
const SIZE: u64 = 64 << 10;
/// Its size can never change, so that no process that has it can make accesses of another one fail.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// The most bindings of an object, of all devices together.
const MOST_BINDINGS: usize = 1000;

/// What an object is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Properties {
    /// Devices that are to be added.
    pub(crate) devices: usize,
    /// Bytes that can be bound on each device, whole granules.
    pub(crate) size: u64,
    /// The handle types that it can be exported as.
    pub(crate) handle_types: u32,
}

/// Memory that is bound on a device. Other processes say so: [`Binding::memory`] believes nothing of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Binding {
    /// The host's number of the device.
    pub(crate) device: u64,
    /// Where in the object it begins.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) size: u64,
    /// The process that has bound it.
    pub(crate) process: u64,
    /// The descriptor of the memory in that process.
    pub(crate) descriptor: u64,
    /// The inode number of the memory.
    pub(crate) inode: u64,
    /// Size of the memory in bytes.
    pub(crate) whole: u64,
    /// Where in the memory the bound part begins.
    pub(crate) from: u64,
}

impl Binding {
    /// Whether it and a range of the object on a device have anything in common.
    pub(crate) fn overlaps(&self, device: u64, offset: u64, size: u64) -> bool {
        let end = |offset: u64, size: u64| offset.saturating_add(size);
        self.device == device
            && offset < end(self.offset, self.size)
            && self.offset < end(offset, size)
    }

    /// The memory, from the process that has it; `None` if it is not there any more, or not what the binding says.
    pub(crate) fn memory(&self) -> Option<File> {
        let whole = |n: u64| n.is_multiple_of(GRANULE);
        let fits = self.from.checked_add(self.size).is_some_and(|end| end <= self.whole);
        if !fits || ![self.offset, self.size, self.whole, self.from].into_iter().all(whole) {
            return None;
        }
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let memory = File::options().read(true).write(true).open(path).ok()?;
        let found = memory.metadata().ok()?;
        let is_it = found.ino() == self.inode
            && found.size() == self.whole
            && device_memory::is_device_memory(&memory);
        is_it.then_some(memory)
    }
}

/// The file, as it is mapped. All of it may be changed by others at any time.
#[repr(C)]
struct Contents {
    magic: AtomicU64,
    wanted: AtomicU64,
    size: AtomicU64,
    handle_types: AtomicU64,
    /// How often bindings were changed.
    changes: AtomicU64,
    /// How many devices were added.
    added: AtomicU64,
    /// Their numbers on the host, in the order in which they were added.
    devices: [AtomicU64; MAX_DEVICES],
    /// The fields of [`Binding`] in their order, the first one plus one: 0 is none.
    bindings: [[AtomicU64; 8]; MOST_BINDINGS],
}

const _: () = assert!(size_of::<Contents>() <= SIZE as usize);

/// The table of an object, in this process.
pub(crate) struct Table {
    properties: Properties,
    view: SharedView,
    /// Never given out.
    own: OwnedFd,
    /// Has the shared lock; its copies are given out. `None` for a process that has given the object up.
    shared: Option<OwnedFd>,
    inode: u64,
}

/// Keeps other processes from reading and changing the table.
struct Locked<'t>(&'t Table);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.set_lock(libc::F_UNLCK as i16);
    }
}

impl Table {
    /// The table of a new object.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`, `OPERATING_SYSTEM` when descriptors run out.
    pub(crate) fn create(properties: Properties) -> Outcome<Table> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = memfd_create("softcuda-multicast", flags).map_err(|_| Code::OUT_OF_MEMORY)?;
        ftruncate(&file, SIZE).map_err(|_| Code::OUT_OF_MEMORY)?;
        fcntl_add_seals(&file, SEALS).map_err(|_| Code::OUT_OF_MEMORY)?;
        let table = Self::with(&file, |_| Ok(properties))?;
        let contents = table.contents();
        contents.wanted.store(properties.devices as u64, Ordering::Relaxed);
        contents.size.store(properties.size, Ordering::Relaxed);
        contents.handle_types.store(properties.handle_types.into(), Ordering::Relaxed);
        contents.magic.store(MAGIC, Ordering::Release);
        Ok(table)
    }

    /// The table behind a descriptor, which stays the caller's; `None` for any other file.
    ///
    /// # Errors
    /// `INVALID_VALUE` for a table that is none, `OUT_OF_MEMORY`, `OPERATING_SYSTEM` when descriptors run out.
    pub(crate) fn import(file: impl AsFd) -> Outcome<Option<Table>> {
        let is_sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals == SEALS);
        if !is_sealed || fstat(&file).map_err(|_| Code::INVALID_VALUE)?.st_size as u64 != SIZE {
            return Ok(None);
        }
        Self::with(file, Contents::properties).map(Some)
    }

    fn with(
        file: impl AsFd,
        properties: impl FnOnce(&Contents) -> Outcome<Properties>,
    ) -> Outcome<Table> {
        let path = format!("/proc/self/fd/{}", file.as_fd().as_raw_fd());
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let opened = || descriptors::keep(|| Ok(open(&path, flags, Mode::empty())?));
        let own = opened().map_err(|_| Code::OPERATING_SYSTEM)?;
        let shared = opened().map_err(|_| Code::OPERATING_SYSTEM)?;
        rustix::io::retry_on_intr(|| flock(&shared, FlockOperation::LockShared))
            .map_err(|_| Code::OPERATING_SYSTEM)?;
        let inode = fstat(&own).map_err(|_| Code::OPERATING_SYSTEM)?.st_ino;
        let view = SharedView::of(&own, SIZE)?;
        let none = Properties { devices: 0, size: 0, handle_types: 0 };
        let mut table = Table { properties: none, view, own, shared: Some(shared), inode };
        table.properties = properties(table.contents())?;
        Ok(table)
    }

    fn contents(&self) -> &Contents {
        // SAFETY: the view is as large as the contents, aligned to a page, and mapped as long as this value lives; its
        // file cannot shrink. All of it is atomic, so that other processes may change it.
        unsafe { &*self.view.address.cast() }
    }

    /// What the object was made with.
    pub(crate) fn properties(&self) -> Properties {
        self.properties
    }

    /// What tells the object from others.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// A descriptor for another process.
    ///
    /// # Errors
    /// `OPERATING_SYSTEM` when descriptors run out.
    pub(crate) fn export(&self) -> Outcome<OwnedFd> {
        let shared = self.shared.as_ref().ok_or(Code::ILLEGAL_STATE)?;
        shared.try_clone().map_err(|_| Code::OPERATING_SYSTEM)
    }

    /// Gives the object up, which others may still have.
    pub(crate) fn give_up(&mut self) {
        self.shared = None;
    }

    /// Whether nobody has the object, once this process has given it up.
    pub(crate) fn is_abandoned(&self) -> bool {
        let alone = flock(&self.own, FlockOperation::NonBlockingLockExclusive).is_ok();
        if alone {
            let _ = flock(&self.own, FlockOperation::Unlock);
        }
        alone
    }

    /// Closes the files, once, in the child of a fork, which uses and drops the value no more.
    pub(crate) fn close_in_child(&mut self) {
        self.shared = None;
        // SAFETY: nothing else closes the descriptor, since the value is not dropped.
        unsafe { libc::close(self.own.as_raw_fd()) };
    }

    /// Sets or takes the lock of the table; waits for other processes. One thread of the process does so at a time.
    fn set_lock(&self, kind: i16) {
        // SAFETY: all zeros is a lock of the whole file.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind;
        // SAFETY: the descriptor is open, and the structure outlives the call. A signal may end the wait.
        while unsafe { libc::fcntl(self.own.as_raw_fd(), libc::F_OFD_SETLKW, &raw const lock) } != 0
            && std::io::Error::last_os_error().kind() == std::io::ErrorKind::Interrupted
        {}
    }

    fn lock(&self) -> Locked<'_> {
        self.set_lock(libc::F_WRLCK as i16);
        Locked(self)
    }

    /// The devices that were added, by their numbers on the host, in their order.
    pub(crate) fn devices(&self) -> Vec<u64> {
        let contents = self.contents();
        let added = contents.added.load(Ordering::Acquire).min(self.properties.devices as u64);
        let devices = contents.devices.iter().take(added as usize);
        devices.map(|device| device.load(Ordering::Relaxed)).collect()
    }

    /// Whether all devices were added.
    pub(crate) fn is_complete(&self) -> bool {
        self.contents().added.load(Ordering::Acquire) >= self.properties.devices as u64
    }

    /// Adds a device, for good.
    ///
    /// # Errors
    /// `INVALID_VALUE` when it was added already, or all are.
    pub(crate) fn add(&self, device: u64) -> Outcome {
        let _locked = self.lock();
        let devices = self.devices();
        if devices.contains(&device) || devices.len() == self.properties.devices {
            return Err(Code::INVALID_VALUE);
        }
        let contents = self.contents();
        contents.devices[devices.len()].store(device, Ordering::Relaxed);
        contents.added.store(devices.len() as u64 + 1, Ordering::Release);
        Ok(())
    }

    /// How often bindings were changed.
    pub(crate) fn changes(&self) -> u64 {
        self.contents().changes.load(Ordering::Acquire)
    }

    /// All bindings, and how often they were changed until then.
    pub(crate) fn bindings(&self) -> (Vec<Binding>, u64) {
        let _locked = self.lock();
        let bindings = self.contents().bindings.iter().filter_map(read).collect();
        (bindings, self.changes())
    }

    /// Adds a binding. One of a process that is gone makes room for it.
    ///
    /// # Errors
    /// `INVALID_VALUE` where something is bound on the device already, `OUT_OF_MEMORY` when there is no room.
    pub(crate) fn bind(&self, binding: &Binding) -> Outcome {
        let _locked = self.lock();
        let contents = self.contents();
        for place in &contents.bindings {
            let Some(other) = read(place) else { continue };
            if other.overlaps(binding.device, binding.offset, binding.size) {
                if other.memory().is_some() {
                    return Err(Code::INVALID_VALUE);
                }
                place[0].store(0, Ordering::Relaxed);
            }
        }
        let mut places = contents.bindings.iter();
        let place = places.find(|place| place[0].load(Ordering::Relaxed) == 0);
        let Binding { device, offset, size, process, descriptor, inode, whole, from } = *binding;
        let fields = [device + 1, offset, size, process, descriptor, inode, whole, from];
        for (field, value) in place.ok_or(Code::OUT_OF_MEMORY)?.iter().zip(fields) {
            field.store(value, Ordering::Relaxed);
        }
        contents.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Takes a binding away.
    ///
    /// # Errors
    /// `INVALID_VALUE` when nothing is bound on the device at exactly this place.
    pub(crate) fn unbind(&self, device: u64, offset: u64, size: u64) -> Outcome {
        let _locked = self.lock();
        let contents = self.contents();
        let is_it = |binding: &Binding| {
            (binding.device, binding.offset, binding.size) == (device, offset, size)
        };
        let mut places = contents.bindings.iter();
        let place = places.find(|place| read(place).is_some_and(|binding| is_it(&binding)));
        place.ok_or(Code::INVALID_VALUE)?[0].store(0, Ordering::Relaxed);
        contents.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

fn read(place: &[AtomicU64; 8]) -> Option<Binding> {
    let [device, offset, size, process, descriptor, inode, whole, from] =
        place.each_ref().map(|field| field.load(Ordering::Relaxed));
    let device = device.checked_sub(1)?;
    Some(Binding { device, offset, size, process, descriptor, inode, whole, from })
}

impl Contents {
    /// # Errors
    /// `INVALID_VALUE` for those that no object has.
    fn properties(&self) -> Outcome<Properties> {
        let read = |field: &AtomicU64| field.load(Ordering::Acquire);
        let (devices, size) = (read(&self.wanted) as usize, read(&self.size));
        let is_valid = read(&self.magic) == MAGIC
            && (1..=MAX_DEVICES).contains(&devices)
            && size != 0
            && size.is_multiple_of(GRANULE);
        let handle_types = read(&self.handle_types) as u32;
        if is_valid {
            Ok(Properties { devices, size, handle_types })
        } else {
            Err(Code::INVALID_VALUE)
        }
    }
}
