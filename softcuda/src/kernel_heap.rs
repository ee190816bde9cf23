//! Memory that kernels allocate by themselves (`malloc` in device code): each context's, in one piece of
//! device memory as large as the context's limit said when the first module that needs it was loaded. The parameters of
//! kernels that kernels launch have a piece of their own.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::device_memory;
use crate::ptx;
use crate::status::Outcome;

/// Alignment of what is allocated.
const ALIGNMENT: u64 = 16;

/// The heap of a context, as soon as there is one.
#[derive(Default)]
pub(crate) struct KernelHeap(Mutex<Option<Ranges>>);

/// Ranges of addresses, with their sizes.
struct Ranges {
    free: BTreeMap<u64, u64>,
    allocated: BTreeMap<u64, u64>,
}

impl KernelHeap {
    /// Whether there is one; its size is fixed then.
    pub(crate) fn is_there(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Makes it, if it is not there. Its memory is freed with the context's.
    ///
    /// # Errors
    /// `OUT_OF_MEMORY`.
    pub(crate) fn make(&self, device: usize, context: u64, size: u64) -> Outcome {
        let mut ranges = self.0.lock();
        if ranges.is_none() {
            let mut free = BTreeMap::new();
            if size >= ALIGNMENT {
                let address = device_memory::allocate(device, context, size)?;
                free.insert(address, size - size % ALIGNMENT);
            }
            *ranges = Some(Ranges { free, allocated: BTreeMap::new() });
        }
        Ok(())
    }
}

impl ptx::Heap for KernelHeap {
    fn allocate(&self, size: u64) -> Option<u64> {
        let size = size.checked_next_multiple_of(ALIGNMENT).filter(|size| *size > 0)?;
        let mut ranges = self.0.lock();
        let Ranges { free, allocated } = ranges.as_mut()?;
        let (address, room) = free.iter().find(|(_, room)| **room >= size)?;
        let (address, room) = (*address, *room);
        free.remove(&address);
        if room > size {
            free.insert(address + size, room - size);
        }
        allocated.insert(address, size);
        Some(address)
    }

    fn free(&self, address: u64) -> bool {
        let mut ranges = self.0.lock();
        let Some(Ranges { free, allocated }) = ranges.as_mut() else { return false };
        let Some(mut size) = allocated.remove(&address) else { return false };
        let mut start = address;
        if let Some(behind) = free.remove(&(start + size)) {
            size += behind;
        }
        if let Some((before, room)) = free.range(..start).next_back()
            && before + room == start
        {
            (start, size) = (*before, room + size);
        }
        free.insert(start, size);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::Heap;

    #[test]
    fn ranges_are_joined_again() {
        let free = BTreeMap::from([(0x1000, 0x100)]);
        let heap = KernelHeap(Mutex::new(Some(Ranges { free, allocated: BTreeMap::new() })));
        let all: Vec<u64> = (0..16).map(|_| heap.allocate(9).unwrap()).collect();
        assert_eq!(all[..3], [0x1000, 0x1010, 0x1020]);
        assert_eq!(
            (heap.allocate(1), heap.allocate(0), heap.allocate(u64::MAX)),
            (None, None, None)
        );
        for index in (0..16).step_by(2).chain((1..16).step_by(2)) {
            assert!(heap.free(all[index]));
            assert!(!heap.free(all[index]), "twice");
        }
        assert_eq!(heap.allocate(0x100), Some(0x1000));
        assert!(!heap.free(0x1010));
    }
}
