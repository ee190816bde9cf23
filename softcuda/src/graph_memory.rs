//! Memory that graphs allocate. Its addresses belong to an allocation node for good; memory is put
//! behind them by the first launch, and stays until it is trimmed.
//!
//! Whether memory is allocated is kept in the order of submissions, as everything that allocates and
//! frees it is work of streams; who frees it for good waits for that work.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::address_space::{self, GRANULE};
use crate::device_memory;
use crate::pools::{self, Usage};
use crate::settings::MAX_DEVICES;
use crate::status::{Code, Outcome};

/// The memory of an allocation node.
pub(crate) struct GraphMemory {
    /// First address.
    pub(crate) address: u64,
    /// Size as asked for.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// As in `CU_POINTER_ATTRIBUTE_BUFFER_ID`.
    pub(crate) id: u64,
    /// It is managed memory, though it is taken from the device.
    pub(crate) is_managed: bool,
    /// What the program described it by, to be given back: pool properties and access descriptions.
    pub(crate) description: Description,
    /// Whole granules.
    whole: u64,
    state: Mutex<State>,
}

/// An allocation as the program described it.
#[derive(Default)]
pub(crate) struct Description {
    /// The bytes of `CUmemPoolProps`.
    pub(crate) properties: Vec<u8>,
    /// The bytes of an array of `CUmemAccessDesc`.
    pub(crate) access: Vec<u8>,
    /// How many there are.
    pub(crate) access_count: usize,
}

#[derive(Default)]
struct State {
    allocated: bool,
    backed: bool,
}

/// What is known of an address.
struct Entry {
    memory: Weak<GraphMemory>,
    /// Allocated memory outlives its graph.
    held: Option<Arc<GraphMemory>>,
}

/// Bytes of a device in use by graphs, and with memory behind them.
#[derive(Clone, Copy, Default)]
pub(crate) struct Amounts {
    /// Allocated by launches and not freed yet.
    pub(crate) used: Usage,
    /// Taken from the device.
    pub(crate) reserved: Usage,
}

static ENTRIES: Mutex<BTreeMap<u64, Entry>> = Mutex::new(BTreeMap::new());
static AMOUNTS: Mutex<[Option<Amounts>; MAX_DEVICES]> = Mutex::new([None; MAX_DEVICES]);

/// The amounts of a device.
pub(crate) fn amounts(device: usize) -> Amounts {
    AMOUNTS.lock()[device].unwrap_or_default()
}

/// Changes the amounts of a device.
pub(crate) fn change_amounts(device: usize, change: impl FnOnce(&mut Amounts)) {
    change(AMOUNTS.lock()[device].get_or_insert_default());
}

/// Addresses for an allocation node; there is no memory yet.
///
/// # Errors
/// `INVALID_VALUE` for size 0, `OUT_OF_MEMORY` without addresses.
pub(crate) fn create(
    device: usize,
    size: u64,
    is_managed: bool,
    description: Description,
) -> Outcome<Arc<GraphMemory>> {
    if size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let whole = address_space::round_up(size).ok_or(Code::OUT_OF_MEMORY)?;
    let address = address_space::reserve(whole, GRANULE, 0)?;
    let id = device_memory::new_buffer_id();
    let state = Mutex::default();
    let memory = GraphMemory { address, size, device, id, is_managed, description, whole, state };
    let memory = Arc::new(memory);
    ENTRIES.lock().insert(address, Entry { memory: Arc::downgrade(&memory), held: None });
    Ok(memory)
}

/// The memory that contains an address.
pub(crate) fn find(address: u64) -> Option<Arc<GraphMemory>> {
    let entries = ENTRIES.lock();
    let (_, entry) = entries.range(..=address).next_back()?;
    let memory = entry.memory.upgrade()?;
    drop(entries);
    (address < memory.address + memory.size).then_some(memory)
}

/// The memory that begins at an address.
pub(crate) fn at(address: u64) -> Option<Arc<GraphMemory>> {
    find(address).filter(|memory| memory.address == address)
}

/// Whether there is managed memory, allocated or kept for the next launch.
pub(crate) fn any_managed() -> bool {
    let all: Vec<_> = ENTRIES.lock().values().filter_map(|entry| entry.memory.upgrade()).collect();
    all.iter().any(|memory| memory.is_managed && memory.state.lock().backed)
}

/// Whether the device may access all of a range, now or once a graph has allocated it.
pub(crate) fn is_accessible(address: u64, size: u64) -> bool {
    let inside = |memory: Arc<GraphMemory>| {
        address.checked_add(size).is_some_and(|end| end <= memory.address + memory.whole)
    };
    address_space::is_accessible(address, size) || find(address).is_some_and(inside)
}

/// Gives memory back that has none allocated in it. No work may be under way.
pub(crate) fn trim(device: usize) {
    let all: Vec<_> = ENTRIES.lock().values().filter_map(|entry| entry.memory.upgrade()).collect();
    for memory in all.iter().filter(|memory| memory.device == device) {
        let mut state = memory.state.lock();
        if state.backed && !state.allocated {
            memory.take_memory_away(&mut state);
        }
    }
}

impl GraphMemory {
    /// Whether a launch has allocated it and nothing freed it since.
    pub(crate) fn is_allocated(&self) -> bool {
        self.state.lock().allocated
    }

    /// Puts memory behind the addresses.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn prepare(&self) -> Outcome {
        let mut state = self.state.lock();
        if !state.backed {
            let add = || device_memory::add_block_at(self.device, self.address, self.whole);
            add().or_else(|_| {
                // Pools may hold memory that nobody uses.
                pools::tidy(Some(self.device));
                add()
            })?;
            state.backed = true;
            change_amounts(self.device, |amounts| amounts.reserved.add(self.whole));
        }
        Ok(())
    }

    /// Makes the memory the program's; it was prepared.
    pub(crate) fn allocate(self: &Arc<Self>) {
        let was = std::mem::replace(&mut self.state.lock().allocated, true);
        if !was {
            change_amounts(self.device, |amounts| amounts.used.add(self.size));
        }
        if let Some(entry) = ENTRIES.lock().get_mut(&self.address) {
            entry.held = Some(self.clone());
        }
    }

    /// Takes the memory back from the program. What is returned keeps the addresses; it is to be
    /// dropped when the work is done that was submitted before.
    ///
    /// # Errors
    /// `INVALID_VALUE` when the memory is not allocated.
    pub(crate) fn free(&self) -> Outcome<Option<Arc<GraphMemory>>> {
        if !std::mem::replace(&mut self.state.lock().allocated, false) {
            return Err(Code::INVALID_VALUE);
        }
        change_amounts(self.device, |amounts| amounts.used.current -= self.size);
        Ok(ENTRIES.lock().get_mut(&self.address).and_then(|entry| entry.held.take()))
    }

    fn take_memory_away(&self, state: &mut State) {
        device_memory::remove_block_at(self.device, self.address);
        state.backed = false;
        change_amounts(self.device, |amounts| amounts.reserved.current -= self.whole);
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        ENTRIES.lock().remove(&self.address);
        let mut state = std::mem::take(self.state.get_mut());
        if state.backed {
            self.take_memory_away(&mut state);
        }
        address_space::unreserve(self.address);
    }
}
