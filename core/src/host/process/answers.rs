//! What an agent may say of its program: nobody is to count with numbers that no program has.

use std::collections::HashSet;

use gpucr_wire::access::SlotUse;
use gpucr_wire::message::Interrupted;
use gpucr_wire::{Accesses, Block, Counts, MulticastObject, Reply};

/// Bytes that no program has, of whatever memory.
const MOST_BYTES: u64 = 1 << 46;
/// Things that no program has so many of, or does so often: a million times a second for eight years.
const MOST: u64 = 1 << 48;
/// Devices that no host has.
const MOST_DEVICES: usize = 1 << 10;
/// Characters of a message that are shown.
const MESSAGE: usize = 1000;

/// A message, cut off where it is too long to be one.
pub(super) fn shortened(mut message: String) -> String {
    if let Some((end, _)) = message.char_indices().nth(MESSAGE) {
        message.truncate(end);
        message.push('…');
    }
    message
}

/// What an answer tells of launches, if nothing in it is absurd.
pub(crate) fn believed(reply: Reply) -> Option<Accesses> {
    match reply {
        Reply::Accesses { accesses: told } => accesses(&told).is_ok().then_some(told),
        Reply::Counts { counts: told } => counts(&told).err().and(None),
        Reply::Blocks { blocks: told } => blocks(&told).err().and(None),
        Reply::Objects { objects: told, .. } => objects(&told).err().and(None),
        Reply::Interrupted { launches } => interrupted(&launches).err().and(None),
        Reply::Failed { message, .. } => {
            shortened(message);
            None
        }
        _ => None,
    }
}

/// Whether a program can hold this.
pub(super) fn counts(counts: &Counts) -> Result<(), &'static str> {
    let Counts { bulk_bytes, pool_bytes, pinned_bytes, .. } = *counts;
    if [bulk_bytes, pool_bytes, pinned_bytes].into_iter().any(|bytes| bytes > MOST_BYTES) {
        return Err("it has more memory than there is");
    }
    let Counts { allocations, blocks, arrays, managed, shared, launches, multicast, .. } = *counts;
    let numbers = [allocations, blocks, arrays, managed, shared, launches, multicast];
    if numbers.into_iter().any(|n| n > MOST) {
        return Err("it has more of something than can be");
    }
    let devices: HashSet<_> = counts.devices.iter().collect();
    if devices.len() > MOST_DEVICES || devices.len() < counts.devices.len() {
        return Err("it uses more devices than a host has, or one twice");
    }
    Ok(())
}

/// Whether a program can have launches that are so far.
pub(super) fn interrupted(launches: &[Interrupted]) -> Result<(), &'static str> {
    let is_none = |one: &Interrupted| {
        let begun = one.done.checked_add(one.again);
        one.blocks == 0 || begun.is_none_or(|begun| begun > one.blocks) || one.blocks > MOST
    };
    if launches.iter().any(is_none) {
        return Err("a launch has done more than there is");
    }
    Ok(())
}

/// Whether these can be all multicast objects of a program.
pub(super) fn objects(objects: &[MulticastObject]) -> Result<(), &'static str> {
    let mut ids = HashSet::with_capacity(objects.len());
    for object in objects {
        let MulticastObject { id, devices, size, added, adders, .. } = object;
        if !ids.insert(*id) {
            return Err("two of its multicast objects are the same");
        }
        let is_possible = (1..=MOST_DEVICES).contains(&(*devices as usize))
            && (1..=MOST_BYTES).contains(size)
            && added <= devices
            && adders.len() <= *devices as usize;
        if !is_possible {
            return Err("it has a multicast object that cannot be");
        }
    }
    Ok(())
}

/// Whether this can be all blocks of a program.
pub(super) fn blocks(blocks: &[Block]) -> Result<(), &'static str> {
    let (mut ids, mut bytes) = (HashSet::with_capacity(blocks.len()), 0u64);
    for block in blocks {
        if !ids.insert(block.id) {
            return Err("two of its blocks are the same");
        }
        bytes = bytes.saturating_add(block.size);
        if block.size == 0 || bytes > MOST_BYTES {
            return Err("it has a block of nothing, or more memory than there is");
        }
        if block.address.checked_add(block.size).is_none() {
            return Err("it has a block beyond the last address");
        }
    }
    Ok(())
}

/// Whether a program can have launched this. An agent tells everything in order and once; so a caller that adds up does
/// not have to look for the same again and again.
pub(super) fn accesses(accesses: &Accesses) -> Result<(), &'static str> {
    let Accesses { kernels, operations, allocations, .. } = accesses;
    let mut launches = [accesses.unknown_graphs, accesses.unseen, accesses.host_functions]
        .into_iter()
        .chain(operations.iter().map(|used| used.count))
        .fold(0, u64::saturating_add);
    let mut in_order = kernels.is_sorted_by(|a, b| a.id < b.id);
    for kernel in kernels {
        if kernel.in_graphs > kernel.launches {
            return Err("a kernel was launched more often in graphs than at all");
        }
        launches = launches.saturating_add(kernel.launches);
        let place = |slot: &SlotUse| (slot.param, slot.offset);
        in_order &= kernel.slots.is_sorted_by(|a, b| place(a) < place(b));
        for slot in &kernel.slots {
            in_order &= slot.touched.is_sorted_by(|a, b| a.allocation < b.allocation);
            if slot.touched.iter().any(|touched| touched.launches > kernel.launches) {
                return Err("an argument was given more often than its kernel was launched");
            }
        }
    }
    if !in_order {
        return Err("it tells something twice, or out of order");
    }
    if launches > MOST {
        return Err("it has launched more often than can be");
    }
    if allocations.iter().any(|one| one.address.checked_add(one.size).is_none()) {
        return Err("it has an allocation beyond the last address");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpucr_wire::BlockKind;
    use gpucr_wire::access::{Allocation, KernelUse, Touched};
    use gpucr_wire::message::Place;

    #[test]
    fn what_no_program_holds_is_not_believed() {
        let with = |change: &dyn Fn(&mut Counts)| {
            let mut told = Counts { devices: vec![[1; 16], [2; 16]], ..Counts::default() };
            change(&mut told);
            counts(&told).is_ok()
        };
        assert!(with(&|told| told.bulk_bytes = 1 << 40));
        assert!(!with(&|told| told.bulk_bytes = 1 << 62));
        assert!(!with(&|told| told.pool_bytes = u64::MAX));
        assert!(!with(&|told| told.pinned_bytes = u64::MAX));
        assert!(!with(&|told| told.launches = u64::MAX));
        assert!(!with(&|told| told.devices = vec![[1; 16]; 2]));
        let many = |told: &mut Counts| {
            told.devices = (0..4000u32).map(|n| std::array::from_fn(|i| (n >> i) as u8)).collect();
        };
        assert!(!with(&many));
    }

    #[test]
    fn launches_are_not_more_than_done() {
        let is = |done, blocks| {
            let place = Place::Loops {};
            interrupted(&[Interrupted { kernel: "k".into(), done, blocks, place, again: 0 }])
                .is_ok()
        };
        assert!(is(0, 1) && is(812, 1320) && is(7, 7));
        assert!(!is(0, 0) && !is(8, 7) && !is(1, u64::MAX));
    }

    #[test]
    fn blocks_have_to_fit_into_what_there_is() {
        let block = |id, size, address| Block {
            id,
            device: [0; 16],
            size,
            kind: BlockKind::Heap {},
            address,
            allocations: 0,
        };
        let all = |of: &[(u64, u64, u64)]| {
            blocks(&of.iter().map(|&(id, size, at)| block(id, size, at)).collect::<Vec<_>>())
        };
        assert_eq!(all(&[(1, 2 << 20, 1 << 40), (2, 4 << 20, 0)]), Ok(()));
        assert!(all(&[(1, 2 << 20, 0), (1, 2 << 20, 0)]).is_err(), "the same id");
        assert!(all(&[(1, 0, 0)]).is_err(), "nothing");
        assert!(all(&[(1, 1 << 62, 0), (2, 1 << 62, 0), (3, 1 << 62, 0)]).is_err(), "too much");
        assert!(all(&[(1, 2 << 20, u64::MAX)]).is_err(), "beyond the end");
    }

    #[test]
    fn launches_that_cannot_have_been_are_not_believed() {
        let touched = |allocation| Touched { allocation, low: 0, high: 0, launches: 1 };
        let slot = |param, of: &[u64]| SlotUse {
            param,
            touched: of.iter().copied().map(touched).collect(),
            ..SlotUse::default()
        };
        let kernel = |id, slots| KernelUse { id, launches: 2, slots, ..KernelUse::default() };
        let told = |kernels| accesses(&Accesses { kernels, ..Accesses::default() });
        let honest = || kernel(1, vec![slot(0, &[3, 4]), slot(1, &[3])]);
        assert_eq!(told(vec![honest(), kernel(2, Vec::new())]), Ok(()));
        assert!(told(vec![honest(), honest()]).is_err(), "a kernel twice");
        assert!(told(vec![kernel(1, vec![slot(0, &[3]), slot(0, &[4])])]).is_err(), "a slot twice");
        assert!(told(vec![kernel(1, vec![slot(0, &[3, 3])])]).is_err(), "an allocation twice");
        let often = |launches| KernelUse { launches, ..honest() };
        assert!(told(vec![often(1 << 47), KernelUse { id: 2, ..often(1 << 47) }]).is_ok());
        assert!(told(vec![often(1 << 48), KernelUse { id: 2, ..often(1) }]).is_err());
        assert!(told(vec![often(0)]).is_err(), "an argument of no launch");
        assert!(told(vec![KernelUse { in_graphs: 3, ..honest() }]).is_err());
        let allocations = vec![Allocation { id: 1, address: u64::MAX, size: 2 }];
        assert!(accesses(&Accesses { allocations, ..Accesses::default() }).is_err());
    }

    #[test]
    fn a_long_message_is_cut_off() {
        assert_eq!(shortened("größer".into()), "größer");
        let long = shortened("ö".repeat(1 << 15));
        assert_eq!(long.chars().count(), MESSAGE + 1);
    }
}
