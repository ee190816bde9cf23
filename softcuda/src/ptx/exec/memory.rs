//! Loads and stores in every space.

use super::block::Room;
use super::context::{Fault, Step};
use super::warp::{Warp, for_lanes};
use crate::ptx::ast::Space;
use crate::ptx::code::{
    LOCAL_WINDOW, Lanes, NONE, PARAM_WINDOW, Place, Reg, SHARED_WINDOW, Src, WIDTH, WINDOW_MASK,
};
use crate::ptx::launch::AddressSpace;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Nanoseconds since the epoch, or since the first call.
pub(super) fn nanoseconds(global: bool) -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    if global {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
    } else {
        START.elapsed().as_nanos() as u64
    }
}

const PAGE: u32 = 12;
/// Allocations smaller than a page are remembered by this many bits.
const GRAIN: u32 = 8;
const SLOTS: usize = 256;

/// What an access does. What may be read need not be writable.
#[derive(Clone, Copy)]
pub(super) enum Use {
    /// It reads.
    Read,
    /// It writes, and may read too.
    Write,
}

/// Pages, and parts of pages, by their numbers; `u64::MAX` is none.
struct CheckedPages {
    pages: [u64; SLOTS],
    grains: [u64; SLOTS],
}

/// Remembers which pages, and which parts of pages, may be accessed. Nothing is taken away during a
/// launch, so a positive answer stays true.
pub(super) struct Mapped<'a> {
    memory: &'a dyn AddressSpace,
    /// The eight bytes of a cooperative launch's barrier; 0 is none.
    workspace: u64,
    /// Each [`Use`] has its own.
    known: [CheckedPages; 2],
}

impl<'a> Mapped<'a> {
    pub(super) fn new(memory: &'a dyn AddressSpace, workspace: u64) -> Self {
        let nothing = || CheckedPages { pages: [u64::MAX; SLOTS], grains: [u64::MAX; SLOTS] };
        Mapped { memory, workspace, known: [nothing(), nothing()] }
    }

    /// May the aligned `size` bytes at `address` be accessed?
    #[inline(always)]
    pub(super) fn check(&mut self, used: Use, address: u64, size: usize) -> Step<()> {
        let page = address >> PAGE;
        if self.known[used as usize].pages[page as usize % SLOTS] == page {
            return Ok(());
        }
        self.look_up(used, address, size)
    }

    #[cold]
    #[inline(never)]
    fn look_up(&mut self, used: Use, address: u64, size: usize) -> Step<()> {
        let known = &mut self.known[used as usize];
        let allows = |address, size| match used {
            Use::Read => self.memory.is_mapped(address, size),
            Use::Write => self.memory.is_writable(address, size),
        };
        let grain = address >> GRAIN;
        if known.grains[grain as usize % SLOTS] == grain {
            return Ok(());
        }
        let page = address >> PAGE;
        let offset = address.wrapping_sub(self.workspace);
        if self.workspace != 0 && offset < 8 && size as u64 <= 8 - offset {
            return Ok(());
        }
        if address & WINDOW_MASK != 0 {
            return Err(Fault::Illegal(address));
        }
        if page != 0 && allows(page << PAGE, 1 << PAGE) {
            known.pages[page as usize % SLOTS] = page;
        } else if page != 0 && allows(grain << GRAIN, 1 << GRAIN) {
            known.grains[grain as usize % SLOTS] = grain;
        } else if page == 0 || !allows(address, size) {
            return Err(Fault::Illegal(address));
        }
        Ok(())
    }

    /// Checks aligned access for all lanes of the mask.
    #[inline(always)]
    pub(super) fn check_lanes(
        &mut self,
        used: Use,
        addresses: &Lanes,
        mask: u32,
        size: usize,
    ) -> Step<()> {
        let first = addresses[mask.trailing_zeros() as usize];
        let mut bad = 0;
        let mut elsewhere = 0;
        for_lanes(mask, |lane| {
            bad |= addresses[lane] & (size as u64 - 1);
            elsewhere |= (addresses[lane] ^ first) >> PAGE;
        });
        if bad != 0 {
            let mut fault = None;
            for_lanes(mask, |lane| {
                if addresses[lane] & (size as u64 - 1) != 0 && fault.is_none() {
                    fault = Some(addresses[lane]);
                }
            });
            return Err(Fault::Misaligned(fault.unwrap_or(first), size));
        }
        let page = first >> PAGE;
        if elsewhere == 0 && self.known[used as usize].pages[page as usize % SLOTS] == page {
            return Ok(());
        }
        let mut result = Ok(());
        for_lanes(mask, |lane| {
            if result.is_ok() {
                result = self.check(used, addresses[lane], size);
            }
        });
        result
    }
}

/// Reads an aligned value; other threads may write it at the same time.
///
/// # Safety
/// The address must be mapped and aligned for the size (1, 2, 4 or 8).
#[inline(always)]
pub(super) unsafe fn read(address: u64, size: u8) -> u64 {
    // SAFETY: mapped and aligned by the caller's promise; all accesses of kernels are atomic.
    // Relaxed loads of these sizes are allowed in read-only memory too.
    unsafe {
        match size {
            1 => u64::from(AtomicU8::from_ptr(address as *mut u8).load(Ordering::Relaxed)),
            2 => u64::from(AtomicU16::from_ptr(address as *mut u16).load(Ordering::Relaxed)),
            4 => u64::from(AtomicU32::from_ptr(address as *mut u32).load(Ordering::Relaxed)),
            _ => AtomicU64::from_ptr(address as *mut u64).load(Ordering::Relaxed),
        }
    }
}

/// Writes an aligned value.
///
/// # Safety
/// The address must be writable and aligned for the size (1, 2, 4 or 8).
#[inline(always)]
pub(super) unsafe fn write(address: u64, size: u8, value: u64) {
    // SAFETY: writable and aligned by the caller's promise; all accesses of kernels are atomic.
    unsafe {
        match size {
            1 => AtomicU8::from_ptr(address as *mut u8).store(value as u8, Ordering::Relaxed),
            2 => AtomicU16::from_ptr(address as *mut u16).store(value as u16, Ordering::Relaxed),
            4 => AtomicU32::from_ptr(address as *mut u32).store(value as u32, Ordering::Relaxed),
            _ => AtomicU64::from_ptr(address as *mut u64).store(value, Ordering::Relaxed),
        }
    }
}

/// Local memory of a warp: the same number of bytes for every lane.
#[derive(Default)]
pub(super) struct Local {
    bytes: Vec<u8>,
    /// Bytes of each lane.
    stride: usize,
}

impl Local {
    /// Makes offsets below `size` valid.
    pub(super) fn reserve(&mut self, size: u32) {
        let size = size as usize;
        if size <= self.stride {
            return;
        }
        let stride = size.next_power_of_two();
        let mut bytes = vec![0; stride * WIDTH];
        for lane in 0..WIDTH {
            let old = &self.bytes[lane * self.stride..(lane + 1) * self.stride];
            bytes[lane * stride..lane * stride + self.stride].copy_from_slice(old);
        }
        self.bytes = bytes;
        self.stride = stride;
    }

    pub(super) fn copy(&mut self, mask: u32, from: u32, to: u32, size: u32) {
        let (from, to, size) = (from as usize, to as usize, size as usize);
        for_lanes(mask, |lane| {
            let start = lane * self.stride;
            self.bytes.copy_within(start + from..start + from + size, start + to);
        });
    }

    pub(super) fn of_lane(&mut self, lane: usize) -> &mut [u8] {
        &mut self.bytes[lane * self.stride..(lane + 1) * self.stride]
    }
}

fn get(bytes: &[u8], offset: u64, size: u8) -> Option<u64> {
    let start = usize::try_from(offset).ok()?;
    let found = bytes.get(start..start.checked_add(usize::from(size))?)?;
    Some(match size {
        4 => u64::from(u32::from_le_bytes(found.try_into().ok()?)),
        8 => u64::from_le_bytes(found.try_into().ok()?),
        2 => u64::from(u16::from_le_bytes(found.try_into().ok()?)),
        _ => u64::from(*found.first()?),
    })
}

fn put(bytes: &mut [u8], offset: u64, size: u8, value: u64) -> Option<()> {
    let start = usize::try_from(offset).ok()?;
    let size = usize::from(size);
    let found = bytes.get_mut(start..start.checked_add(size)?)?;
    found.copy_from_slice(&value.to_le_bytes()[..size]);
    Some(())
}

/// Reads an integer for each lane; the first address outside, if there is one.
fn gather<T: Copy + Into<u64>>(
    bytes: &[u8],
    addresses: &Lanes,
    step: u64,
    mask: u32,
    to: &mut Lanes,
) -> Option<u64> {
    let start = |lane: usize| addresses[lane].wrapping_add(step) & !WINDOW_MASK;
    let Some(limit) = bytes.len().checked_sub(size_of::<T>()) else { return Some(addresses[0]) };
    let mut furthest = 0;
    for_lanes(mask, |lane| furthest = start(lane).max(furthest));
    if furthest > limit as u64 {
        let mut bad = None;
        for_lanes(mask, |lane| {
            if start(lane) > limit as u64 {
                bad = bad.or(Some(addresses[lane]));
            }
        });
        return bad;
    }
    for_lanes(mask, |lane| {
        // SAFETY: no lane's start lies beyond the last place that a `T` fits at, and every bit
        // pattern is an integer.
        let found =
            unsafe { bytes.as_ptr().add(start(lane) as usize).cast::<T>().read_unaligned() };
        to[lane] = found.into();
    });
    None
}

/// Values as loads extend them.
#[inline(always)]
pub(super) fn extend(value: u64, size: u8, signed: bool) -> u64 {
    if !signed {
        return value;
    }
    let shift = 64 - 8 * u32::from(size);
    ((value << shift) as i64 >> shift) as u64
}

impl Warp<'_> {
    /// The address each lane means.
    #[inline(always)]
    pub(super) fn addresses(&self, place: &Place) -> Lanes {
        let base = self.lanes(place.base);
        let mut offset = place.offset as u64;
        if place.frame {
            offset = offset.wrapping_add(u64::from(self.local_base));
        }
        if place.narrow {
            base.map(|base| u64::from((base as u32).wrapping_add(offset as u32)))
        } else {
            base.map(|base| base.wrapping_add(offset))
        }
    }

    /// Whether all lanes of the mask mean global memory.
    #[inline(always)]
    pub(super) fn all_global(&self, place: &Place, addresses: &Lanes, mask: u32) -> bool {
        match place.space {
            Space::Global | Space::Const => true,
            Space::Generic => {
                let mut top = 0;
                for_lanes(mask, |lane| top |= addresses[lane]);
                top & WINDOW_MASK == 0
            }
            _ => false,
        }
    }

    /// Reads one value of one lane.
    pub(super) fn peek(
        &mut self,
        room: &mut Room<'_>,
        space: Space,
        lane: usize,
        address: u64,
        size: u8,
    ) -> Step<u64> {
        if address & (u64::from(size) - 1) != 0 {
            return Err(Fault::Misaligned(address, usize::from(size)));
        }
        let (space, offset) = resolve(space, address);
        let found = match space {
            Space::Shared => get(&room.shared, offset, size)
                .or_else(|| room.of_a_rank(offset).and_then(|(shared, at)| get(shared, at, size))),
            Space::Local => get(self.local.of_lane(lane), offset, size),
            Space::Param => get(room.context.launch.params, offset, size),
            _ => {
                room.mapped.check(Use::Read, address, usize::from(size))?;
                // SAFETY: checked to be mapped, and aligned.
                Some(unsafe { read(address, size) })
            }
        };
        found.ok_or(Fault::Illegal(address))
    }

    /// Writes one value of one lane.
    pub(super) fn poke(
        &mut self,
        room: &mut Room<'_>,
        space: Space,
        lane: usize,
        (address, size): (u64, u8),
        value: u64,
    ) -> Step<()> {
        if address & (u64::from(size) - 1) != 0 {
            return Err(Fault::Misaligned(address, usize::from(size)));
        }
        let (space, offset) = resolve(space, address);
        let done = match space {
            Space::Shared => put(&mut room.shared, offset, size, value).or_else(|| {
                room.of_a_rank(offset).and_then(|(shared, at)| put(shared, at, size, value))
            }),
            Space::Local => put(self.local.of_lane(lane), offset, size, value),
            Space::Param => None,
            _ => {
                room.mapped.check(Use::Write, address, usize::from(size))?;
                // SAFETY: checked to be writable, and aligned.
                unsafe { write(address, size, value) };
                Some(())
            }
        };
        done.ok_or(Fault::Illegal(address))
    }

    pub(super) fn load(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        signed: bool,
        count: u8,
        to: &[Reg; 4],
    ) -> Step<()> {
        let addresses = self.addresses(place);
        let size = place.size;
        let whole = usize::from(size) * usize::from(count);
        if self.all_global(place, &addresses, mask) {
            room.mapped.check_lanes(Use::Read, &addresses, mask, whole)?;
            if count > 1 {
                let to = &to[..usize::from(count)];
                // SAFETY: every lane's vector was checked to be mapped and aligned.
                unsafe { self.load_vectors((&addresses, mask), (size, signed), to) };
                return Ok(());
            }
            let to = self.lanes_mut(to[0]);
            if size == 4 && !signed {
                for_lanes(mask, |lane| {
                    // SAFETY: every lane's address was checked to be mapped and aligned.
                    to[lane] = unsafe { read(addresses[lane], 4) };
                });
            } else {
                for_lanes(mask, |lane| {
                    // SAFETY: as above.
                    let value = unsafe { read(addresses[lane], size) };
                    to[lane] = extend(value, size, signed);
                });
            }
            return Ok(());
        }
        self.aligned(&addresses, mask, whole)?;
        if place.space == Space::Shared {
            let all = to;
            for (index, &to) in to.iter().take(usize::from(count)).enumerate() {
                let step = index as u64 * u64::from(size);
                let to = self.lanes_mut(to);
                let bad = match (size, signed) {
                    (4, false) => gather::<u32>(&room.shared, &addresses, step, mask, to),
                    (8, false) => gather::<u64>(&room.shared, &addresses, step, mask, to),
                    (2, false) => gather::<u16>(&room.shared, &addresses, step, mask, to),
                    (1, false) => gather::<u8>(&room.shared, &addresses, step, mask, to),
                    _ => {
                        let mut bad = None;
                        for_lanes(mask, |lane| {
                            let offset = addresses[lane].wrapping_add(step) & !WINDOW_MASK;
                            match get(&room.shared, offset, size) {
                                Some(value) => to[lane] = extend(value, size, signed),
                                None => bad = Some(addresses[lane]),
                            }
                        });
                        bad
                    }
                };
                if let Some(address) = bad {
                    if !room.peers.is_empty() {
                        return self.load_each(room, place, (&addresses, mask), signed, count, all);
                    }
                    return Err(Fault::Illegal(address));
                }
            }
            return Ok(());
        }
        self.load_each(room, place, (&addresses, mask), signed, count, to)
    }

    /// Loads for one lane after the other.
    fn load_each(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        (addresses, mask): (&Lanes, u32),
        signed: bool,
        count: u8,
        to: &[Reg; 4],
    ) -> Step<()> {
        let size = place.size;
        for (index, &to) in to.iter().take(usize::from(count)).enumerate() {
            debug_assert_ne!(to, NONE, "every element of a load has a register");
            let step = index as u64 * u64::from(size);
            let mut rest = mask;
            while rest != 0 {
                let lane = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                let address = addresses[lane].wrapping_add(step);
                let value = self.peek(room, place.space, lane, address, size)?;
                self.lanes_mut(to)[lane] = extend(value, size, signed);
            }
        }
        Ok(())
    }

    pub(super) fn aligned(&self, addresses: &Lanes, mask: u32, size: usize) -> Step<()> {
        let low = size as u64 - 1;
        let mut bad = 0;
        for_lanes(mask, |lane| bad |= addresses[lane] & low);
        if bad == 0 {
            return Ok(());
        }
        let mut fault = Ok(());
        for_lanes(mask, |lane| {
            if addresses[lane] & low != 0 && fault.is_ok() {
                fault = Err(Fault::Misaligned(addresses[lane], size));
            }
        });
        fault
    }

    pub(super) fn store(
        &mut self,
        room: &mut Room<'_>,
        place: &Place,
        mask: u32,
        count: u8,
        from: &[Src; 4],
    ) -> Step<()> {
        let addresses = self.addresses(place);
        let size = place.size;
        let whole = usize::from(size) * usize::from(count);
        if self.all_global(place, &addresses, mask) {
            room.mapped.check_lanes(Use::Write, &addresses, mask, whole)?;
            if count > 1 {
                let from = &from[..usize::from(count)];
                // SAFETY: all lanes' vectors were checked to be writable and aligned.
                unsafe { self.store_vectors((&addresses, mask), size, from) };
                return Ok(());
            }
            let from = self.lanes(from[0]);
            // SAFETY: all lanes' addresses were checked to be writable and aligned.
            for_lanes(mask, |lane| unsafe { write(addresses[lane], size, from[lane]) });
            return Ok(());
        }
        self.aligned(&addresses, mask, whole)?;
        for (index, &from) in from.iter().take(usize::from(count)).enumerate() {
            let step = index as u64 * u64::from(size);
            let from = *self.lanes(from);
            let mut rest = mask;
            while rest != 0 {
                let lane = rest.trailing_zeros() as usize;
                rest &= rest - 1;
                let address = addresses[lane].wrapping_add(step);
                self.poke(room, place.space, lane, (address, size), from[lane])?;
            }
        }
        Ok(())
    }
}

/// The space and the offset in it that an address of a space means.
pub(super) fn resolve(space: Space, address: u64) -> (Space, u64) {
    let offset = address & !WINDOW_MASK;
    match (space, address & WINDOW_MASK) {
        (Space::Generic, SHARED_WINDOW) => (Space::Shared, offset),
        (Space::Generic, LOCAL_WINDOW) => (Space::Local, offset),
        (Space::Generic, PARAM_WINDOW) => (Space::Param, offset),
        (Space::Generic, _) => (Space::Global, address),
        (Space::Global | Space::Const, _) => (Space::Global, address),
        _ => (space, offset),
    }
}
