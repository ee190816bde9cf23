//! Physical memory that is not followed: of processes without the shim, and what the driver gives otherwise than asked. Its
//! handles are the driver's own. The driver cannot checkpoint it, so it is counted for as long as it lives:
//! as long as the program has a handle of it, or has it mapped.

use std::collections::{BTreeMap, BTreeSet};

use gpucr_wire::Counts;

use super::Memory;
use crate::usage;

/// All such memory.
#[derive(Default)]
pub(super) struct Foreign {
    last_id: u64,
    objects: BTreeMap<u64, Object>,
    /// What the driver's handles stand for. After its last release a handle may come back as another one's.
    handles: BTreeMap<u64, u64>,
    /// Size and object of each mapping, by address.
    mappings: BTreeMap<u64, (u64, u64)>,
}

#[derive(Default)]
struct Object {
    /// Times that the program may still release it.
    references: u32,
    mappings: u32,
    /// Functions that made it, or made something of it.
    uses: BTreeSet<&'static str>,
}

/// By which memory of another process is told.
pub(crate) const IMPORT: &str = "cuMemImportFromShareableHandle";

impl Foreign {
    fn object(&mut self, handle: u64) -> Option<&mut Object> {
        self.objects.get_mut(self.handles.get(&handle)?)
    }

    fn drop_unused(&mut self, id: u64) {
        if self
            .objects
            .get(&id)
            .is_some_and(|object| object.references == 0 && object.mappings == 0)
        {
            self.objects.remove(&id);
        }
    }

    pub(super) fn fill(&self, counts: &mut Counts) {
        let mut names: BTreeSet<&str> = BTreeSet::new();
        for object in self.objects.values() {
            counts.shared += u64::from(object.uses.contains(IMPORT));
            names.extend(object.uses.iter().filter(|name| **name != IMPORT));
        }
        counts.unsupported.extend(names.into_iter().map(|name| (*name).to_owned()));
    }
}

impl Memory {
    /// `function` has given the program a handle of such memory.
    pub(crate) fn foreign_made(&mut self, handle: u64, function: &'static str) {
        let foreign = &mut self.foreign;
        let id = *foreign.handles.entry(handle).or_insert_with(|| {
            foreign.last_id += 1;
            foreign.last_id
        });
        let object = foreign.objects.entry(id).or_default();
        object.references += 1;
        object.uses.insert(function);
    }

    /// `function` has made something of such memory.
    pub(crate) fn foreign_used(&mut self, handle: u64, function: &'static str) {
        match self.foreign.object(handle) {
            Some(object) => _ = object.uses.insert(function),
            // The program has it from elsewhere, so its end will not be seen.
            None => usage::record(function),
        }
    }

    /// After a `cuMemRelease` that succeeded.
    pub(crate) fn foreign_released(&mut self, handle: u64) {
        let Some(object) = self.foreign.object(handle) else { return };
        object.references = object.references.saturating_sub(1);
        if object.references == 0
            && let Some(id) = self.foreign.handles.remove(&handle)
        {
            self.foreign.drop_unused(id);
        }
    }

    /// After a `cuMemMap` that succeeded.
    pub(crate) fn foreign_mapped(&mut self, address: u64, size: u64, handle: u64) {
        if let Some(id) = self.foreign.handles.get(&handle).copied()
            && let Some(object) = self.foreign.objects.get_mut(&id)
        {
            object.mappings += 1;
            self.foreign.mappings.insert(address, (size, id));
        }
    }

    /// After a `cuMemUnmap` that succeeded.
    pub(super) fn foreign_unmapped(&mut self, address: u64, size: u64) {
        let range = address..address.saturating_add(size);
        let starts: Vec<u64> =
            self.foreign.mappings.range(range).map(|(start, _)| *start).collect();
        for start in starts {
            let Some((_, id)) = self.foreign.mappings.remove(&start) else { continue };
            if let Some(object) = self.foreign.objects.get_mut(&id) {
                object.mappings -= 1;
            }
            self.foreign.drop_unused(id);
        }
    }

    /// After a `cuMemRetainAllocationHandle` that gave the driver's handle for what is mapped at `address`.
    pub(crate) fn foreign_retained(&mut self, address: u64, handle: u64) {
        let before = self.foreign.mappings.range(..=address).next_back();
        let Some((_, &(_, id))) = before.filter(|(start, (size, _))| address - **start < *size)
        else {
            return;
        };
        if let Some(object) = self.foreign.objects.get_mut(&id) {
            object.references += 1;
            self.foreign.handles.insert(handle, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn counts(memory: &Memory) -> (u64, Vec<String>) {
        let mut counts = Counts::default();
        memory.fill(&mut counts);
        (counts.shared, counts.unsupported)
    }

    #[test]
    fn memory_of_others_is_counted_as_long_as_there_is_a_handle_or_a_mapping() {
        let mut memory = Memory::default();
        memory.foreign_made(3, IMPORT);
        memory.foreign_made(3, IMPORT);
        memory.foreign_mapped(8 * MIB, 2 * MIB, 3);
        memory.foreign_mapped(16 * MIB, 2 * MIB, 3);
        memory.foreign_mapped(32 * MIB, 2 * MIB, 99);
        memory.foreign_released(3);
        memory.unmapped(&crate::state::memory::fake::Fake::new(), 8 * MIB, 2 * MIB);
        memory.foreign_released(3);
        memory.foreign_released(3);
        assert_eq!(counts(&memory), (1, vec![]), "it is mapped");
        // The driver gives the same handle to something else.
        memory.foreign_made(3, "cuMulticastCreate");
        memory.foreign_used(3, "cuMulticastBindMem");
        let names = vec!["cuMulticastBindMem".to_owned(), "cuMulticastCreate".to_owned()];
        assert_eq!(counts(&memory), (1, names));
        memory.foreign_released(3);
        assert_eq!(counts(&memory), (1, vec![]));
        memory.foreign_retained(17 * MIB, 5);
        memory.foreign_retained(18 * MIB, 6);
        memory.unmapped(&crate::state::memory::fake::Fake::new(), 16 * MIB, 2 * MIB);
        assert_eq!(counts(&memory), (1, vec![]), "it has a handle again");
        memory.foreign_released(5);
        assert_eq!(counts(&memory), (0, vec![]));
        assert!(memory.foreign.handles.is_empty() && memory.foreign.mappings.is_empty());
    }
}
