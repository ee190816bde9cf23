//! Multicast objects: memory of several devices at one address, for the `multimem` instructions of kernels.
//!
//! What NVIDIA documents is in the comments of `cuda.h`. Where that says nothing, what its open kernel module does
//! (`mem_multicast_fabric.c`) decides: an object lives as long as any process has a handle, a mapping or a descriptor of
//! it, and keeps the memory that is bound to it, whoever has released that. In one thing this differs: memory of a
//! process that ends is gone for others, unless their kernels have used it before.

use std::collections::BTreeMap;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fd::{AsFd, OwnedFd};
use rustix::fs::fstat;
use rustix::mm::{self, Advice};

use crate::address_space::GRANULE;
use crate::multicast_table::{Binding, Properties, Table};
use crate::physical::Physical;
use crate::placement;
use crate::ptx::Replicas;
use crate::saved_bytes::SharedView;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// How often a wait for devices to be added looks.
const PAUSE: Duration = Duration::from_micros(200);

/// A multicast object, as this process has it: as long as it has a handle or a mapping.
pub(crate) struct Object {
    properties: Properties,
    /// It came from another process (or from this one, through a descriptor).
    imported: bool,
    exported: AtomicBool,
    /// `None` once a checkpoint has taken it away.
    state: Mutex<Option<State>>,
}

struct State {
    table: Table,
    /// What this process has bound, by device and offset.
    bound: BTreeMap<(u64, u64), Arc<Physical>>,
    /// What is bound, as of so many changes of the table.
    seen: Option<(u64, Vec<Seen>)>,
}

/// Bound memory that is mapped here.
struct Seen {
    binding: Binding,
    view: Arc<View>,
}

/// All of a piece of physical memory, of any process, mapped here.
struct View(SharedView);

// SAFETY: the mapping is only used through its address, by kernels, whose accesses are atomic.
unsafe impl Sync for View {}

/// The objects of this process, by what tells them from others.
static OBJECTS: Mutex<BTreeMap<u64, Weak<Object>>> = Mutex::new(BTreeMap::new());
/// What this process has bound to objects that it has no handle and no mapping of, but others have.
static LEFT: Mutex<Vec<State>> = Mutex::new(Vec::new());

/// Whether a range is whole granules and lies within a size.
fn is_within(offset: u64, size: u64, whole: u64) -> bool {
    size != 0
        && offset.is_multiple_of(GRANULE)
        && size.is_multiple_of(GRANULE)
        && offset.checked_add(size).is_some_and(|end| end <= whole)
}

/// The host's number of a device.
fn number(device: usize) -> u64 {
    placement::of(device) as u64
}

/// Creates an object.
///
/// # Errors
/// `INVALID_VALUE` for a size that is not a positive number of granules, `OUT_OF_MEMORY`, `OPERATING_SYSTEM`.
pub(crate) fn create(properties: Properties) -> Outcome<Arc<Object>> {
    if !is_within(0, properties.size, properties.size) {
        return Err(Code::INVALID_VALUE);
    }
    tidy();
    Ok(Object::new(Table::create(properties)?, false))
}

/// The object behind a descriptor, which stays the caller's; `None` for any other descriptor.
///
/// # Errors
/// Those of [`Table::import`].
pub(crate) fn import(descriptor: impl AsFd) -> Outcome<Option<Arc<Object>>> {
    tidy();
    Ok(Table::import(descriptor)?.map(|table| Object::new(table, true)))
}

/// Lets go of what is bound to objects that nobody has any more, and of what others have unbound.
pub(crate) fn tidy() {
    LEFT.lock().retain_mut(|state| {
        state.forget_unbound(&state.table.bindings().0);
        !state.bound.is_empty() && !state.table.is_abandoned()
    });
}

/// Memory that is bound to objects which this process has given up.
pub(crate) fn left_bound() -> Vec<Arc<Physical>> {
    tidy();
    LEFT.lock().iter().flat_map(|state| state.bound.values().cloned()).collect()
}

/// Forgets the objects that were given up, for a checkpoint that does not carry them; whether there were any.
pub(crate) fn close_left() -> bool {
    tidy();
    !std::mem::take(&mut *LEFT.lock()).is_empty()
}

/// After a fork, in the child: closes the files of the objects that were given up, if nobody was inside at the fork. As
/// all locks of the child, this one is not given back.
pub(crate) fn close_left_in_child() {
    if let Some(left) = LEFT.try_lock() {
        ManuallyDrop::new(left).iter_mut().for_each(State::close_in_child);
    }
}

impl Object {
    /// The object of a table: the one that the process has, or one with what the process has bound to it before.
    fn new(table: Table, imported: bool) -> Arc<Object> {
        let (properties, inode) = (table.properties(), table.inode());
        let mut objects = OBJECTS.lock();
        objects.retain(|_, object| object.strong_count() > 0);
        if let Some(object) = objects.get(&inode).and_then(Weak::upgrade) {
            return object;
        }
        let mut left = LEFT.lock();
        let known = left.iter().position(|state| state.table.inode() == inode);
        let bound = known.map(|at| left.swap_remove(at).bound).unwrap_or_default();
        let state = Mutex::new(Some(State { table, bound, seen: None }));
        let object = Object { properties, imported, exported: AtomicBool::new(false), state };
        let object = Arc::new(object);
        objects.insert(inode, Arc::downgrade(&object));
        object
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
        act(self.state.lock().as_mut().ok_or(Code::ILLEGAL_STATE)?)
    }

    /// Bytes that can be bound on each device.
    pub(crate) fn size(&self) -> u64 {
        self.properties.size
    }

    /// Whether other processes can have it.
    pub(crate) fn is_shareable(&self) -> bool {
        self.imported || self.properties.handle_types != 0
    }

    /// A descriptor for other processes.
    ///
    /// # Errors
    /// `INVALID_VALUE` for one that was created without the POSIX handle type or was imported, as for memory;
    /// `OPERATING_SYSTEM` when descriptors run out.
    pub(crate) fn export(&self) -> Outcome<OwnedFd> {
        if self.imported || self.properties.handle_types == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let descriptor = self.with(|state| state.table.export())?;
        self.exported.store(true, Ordering::Relaxed);
        Ok(descriptor)
    }

    /// Adds a device, for good.
    ///
    /// # Errors
    /// `NOT_SUPPORTED` for a device without multicast. `INVALID_VALUE` when it was added already, or as many as were
    /// asked for: the kernel module refuses both, and which code becomes of that is not documented.
    pub(crate) fn add(&self, device: usize) -> Outcome {
        if !settings().has_multicast(device) {
            return Err(Code::NOT_SUPPORTED);
        }
        self.with(|state| state.table.add(number(device)))
    }

    /// Waits until all devices are added, as NVIDIA documents of binding and mapping: for ever, if they never are.
    ///
    /// # Errors
    /// `ILLEGAL_STATE` when a checkpoint has taken the object away.
    pub(crate) fn wait_for_devices(&self) -> Outcome {
        while !self.with(|state| Ok(state.table.is_complete()))? {
            std::thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Whether a device was added.
    ///
    /// # Errors
    /// `ILLEGAL_STATE` when a checkpoint has taken the object away.
    pub(crate) fn has(&self, device: usize) -> Outcome<bool> {
        self.with(|state| Ok(state.table.devices().contains(&number(device))))
    }

    /// The first of the devices that is one of this process, or 0.
    pub(crate) fn device(&self) -> usize {
        let devices = self.with(|state| Ok(state.table.devices())).unwrap_or_default();
        let here = |number: u64| placement::ordinal_on(number as usize, settings().devices);
        devices.into_iter().find_map(here).unwrap_or_default()
    }

    /// Binds a part of memory on its device, or on `device`, which has to be that. Waits until all devices are added.
    ///
    /// # Errors
    /// `INVALID_VALUE` when anything is not whole granules or outside the object or the memory, when the memory is on
    /// another device than named, cannot be shared though the object can, or something is bound there already;
    /// `INVALID_DEVICE` when the device was not added; `OUT_OF_MEMORY` when the object has too many bindings.
    pub(crate) fn bind(
        &self,
        device: Option<usize>,
        offset: u64,
        memory: &Arc<Physical>,
        from: u64,
        size: u64,
    ) -> Outcome {
        let fits = is_within(offset, size, self.size()) && is_within(from, size, memory.size);
        let is_shared = memory.imported || memory.handle_types != 0;
        if !fits || self.is_shareable() && !is_shared {
            return Err(Code::INVALID_VALUE);
        }
        self.wait_for_devices()?;
        if !self.has(device.unwrap_or(memory.device))? {
            return Err(Code::INVALID_DEVICE);
        }
        if device.is_some_and(|device| device != memory.device) {
            return Err(Code::INVALID_VALUE);
        }
        let (descriptor, inode) = {
            let file = memory.memory.lock();
            let file = file.as_ref().ok_or(Code::ILLEGAL_STATE)?;
            let found = fstat(file).map_err(|_| Code::OPERATING_SYSTEM)?;
            (file.as_raw_fd() as u64, found.st_ino)
        };
        let process = std::process::id().into();
        let (device, whole) = (number(memory.device), memory.size);
        let binding = Binding { device, offset, size, process, descriptor, inode, whole, from };
        self.with(|state| {
            state.table.bind(&binding)?;
            state.bound.insert((device, offset), memory.clone());
            Ok(())
        })
    }

    /// Takes away what is bound on a device.
    ///
    /// # Errors
    /// `INVALID_VALUE` when anything is not whole granules or outside the object, or not exactly this was bound there,
    /// of which NVIDIA documents that it is undefined; `INVALID_DEVICE` when the device was not added.
    pub(crate) fn unbind(&self, device: usize, offset: u64, size: u64) -> Outcome {
        if !is_within(offset, size, self.size()) {
            return Err(Code::INVALID_VALUE);
        }
        if !self.has(device)? {
            return Err(Code::INVALID_DEVICE);
        }
        self.with(|state| {
            state.table.unbind(number(device), offset, size)?;
            state.bound.remove(&(number(device), offset));
            state.look();
            Ok(())
        })
    }

    /// The piece around an offset that is one piece of memory on each device; its addresses begin at its offset.
    /// `None` where a device has no memory bound that is still there: a GPU's kernels fail then too.
    pub(crate) fn replicas(&self, offset: u64) -> Option<Replicas> {
        let replicas = |state: &mut State| Ok(state.replicas(offset));
        self.with(replicas).ok().flatten().filter(|piece| offset - piece.start < piece.size)
    }

    /// Memory that this process has bound.
    pub(crate) fn bound(&self) -> Vec<Arc<Physical>> {
        let bound = |state: &mut State| Ok(state.bound.values().cloned().collect());
        self.with(bound).unwrap_or_default()
    }

    /// Lets go of everything, for a checkpoint that does not carry it.
    pub(crate) fn close(&self) {
        *self.state.lock() = None;
    }

    /// In the child of a fork: closes the files, unless a thread that the child does not have was inside.
    pub(crate) fn close_in_child(&self) {
        if let Some(state) = self.state.try_lock() {
            ManuallyDrop::new(state).as_mut().into_iter().for_each(State::close_in_child);
        }
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let Some(mut state) = self.state.get_mut().take() else { return };
        state.seen = None;
        state.table.give_up();
        let can_be_elsewhere = self.imported || self.exported.load(Ordering::Relaxed);
        if can_be_elsewhere && !state.bound.is_empty() && !state.table.is_abandoned() {
            LEFT.lock().push(state);
        }
    }
}

impl State {
    /// Lets go of memory that is not bound any more: others may have unbound it.
    fn forget_unbound(&mut self, bindings: &[Binding]) {
        let own = u64::from(std::process::id());
        self.bound.retain(|place, _| {
            let is_it = |b: &Binding| b.process == own && (b.device, b.offset) == *place;
            bindings.iter().any(is_it)
        });
    }

    /// Looks at what is bound, if that has changed.
    fn look(&mut self) -> &[Seen] {
        let known = self.seen.take().filter(|(changes, _)| *changes == self.table.changes());
        let (changes, seen) = known.unwrap_or_else(|| {
            let (bindings, changes) = self.table.bindings();
            self.forget_unbound(&bindings);
            let mut views: BTreeMap<(u64, u64), Arc<View>> = BTreeMap::new();
            let mut seen = Vec::new();
            for binding in bindings {
                let memory = (binding.process, binding.inode);
                let view = views.get(&memory).cloned().or_else(|| View::of(&binding));
                if let Some(view) = view {
                    views.insert(memory, view.clone());
                    seen.push(Seen { binding, view });
                }
            }
            (changes, seen)
        });
        &self.seen.insert((changes, seen)).1
    }

    fn replicas(&mut self, offset: u64) -> Option<Replicas> {
        let devices = self.table.devices();
        let seen = self.look();
        let mut found = Vec::new();
        for device in devices {
            found.push(seen.iter().find(|seen| seen.binding.overlaps(device, offset, 1))?);
        }
        let start = found.iter().map(|seen| seen.binding.offset).max()?;
        let end = |seen: &&Seen| seen.binding.offset.saturating_add(seen.binding.size);
        let end = found.iter().map(end).min()?;
        let place = |seen: &&Seen| {
            let Binding { offset, from, .. } = seen.binding;
            seen.view.0.address as u64 + from + (start - offset)
        };
        let places = found.iter().map(place).collect();
        let keep = found.iter().map(|seen| seen.view.clone() as _).collect();
        Some(Replicas { start, size: end - start, places, keep })
    }

    fn close_in_child(&mut self) {
        self.table.close_in_child();
    }
}

impl View {
    fn of(binding: &Binding) -> Option<Arc<View>> {
        let view = SharedView::of(binding.memory()?, binding.whole).ok()?;
        // SAFETY: the mapping of just now. Device memory is not inherited over fork; failing to say so only wastes memory.
        let _ = unsafe { mm::madvise(view.address, binding.whole as usize, Advice::LinuxDontFork) };
        Some(Arc::new(View(view)))
    }
}
