//! Components that open the driver's library by its path find this library's functions in it.
//!
//! A process has one copy of the driver's library, no matter who opens it and by which name. Who looks a function
//! up in it is told what its table of symbols says. So that table is changed, in the memory of this process:
//! where it has the address of a function that this library replaces, it gets the address of ours. The driver's
//! references to its own functions are not touched by that, since they were bound when it was loaded.

use std::ffi::{c_int, c_void};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MprotectFlags, mprotect};

use super::table::Wrapper;

/// `RTLD_DL_SYMENT`
const SYMBOL_ENTRY: c_int = 1;

unsafe extern "C" {
    /// As `dladdr`; also gives the entry of the symbol in the library's table.
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        entry: *mut *mut c_void,
        flags: c_int,
    ) -> c_int;
}

/// A place in the table of symbols, and what is to be written there.
struct Change {
    place: *mut u64,
    value: u64,
}

/// Lets the driver's library name our functions in place of those of its own that are `replaced`, which `real`
/// gives by their index.
///
/// # Errors
/// Nothing was changed; says why.
pub(super) fn divert(
    replaced: &[Wrapper],
    real: impl Fn(usize) -> Option<*const ()>,
) -> Result<(), String> {
    let mut base = None;
    let mut changes = Vec::new();
    for Wrapper(index, ours) in replaced {
        let Some((of, change)) = real(*index).and_then(|function| change(function, *ours)) else {
            continue;
        };
        // A driver in several libraries: one table is changed.
        if *base.get_or_insert(of) == of {
            changes.push(change);
        }
    }
    let Some(base) = base else { return Ok(()) };
    let places = || changes.iter().map(|change| change.place as usize);
    let (Some(low), Some(high)) = (places().min(), places().max()) else { return Ok(()) };
    let (begin, end) = (page(low), page(high) + PAGE);
    let before =
        protection(base, begin, end).ok_or("its table of symbols is not where it should be")?;
    let protect = |flags| {
        // SAFETY: whole pages of one segment of the library; other threads can read and run them all the time.
        let changed = unsafe { mprotect(begin as *mut c_void, end - begin, flags) };
        changed.map_err(|error| format!("its table of symbols cannot be changed: {error}"))
    };
    protect(before | MprotectFlags::WRITE)?;
    for change in &changes {
        // SAFETY: an aligned word of the table, which is writable now; the loader reads it as a whole.
        unsafe { AtomicU64::from_ptr(change.place) }.store(change.value, Ordering::Relaxed);
    }
    // What stays writable does no harm.
    let _ = protect(before);
    Ok(())
}

/// What makes the symbol of the function at `address` name `ours`, and where the library begins.
fn change(address: *const (), ours: *const ()) -> Option<(usize, Change)> {
    // SAFETY: pointers and null are values of the structure.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    let mut entry = std::ptr::null_mut();
    // SAFETY: both places are writable.
    let found = unsafe { dladdr1(address.cast(), &mut info, &mut entry, SYMBOL_ENTRY) };
    let entry = entry.cast::<libc::Elf64_Sym>();
    if found == 0 || entry.is_null() || info.dli_saddr.cast_const() != address.cast() {
        return None;
    }
    // SAFETY: the loader gives an entry of the library's table.
    let place = unsafe { &raw mut (*entry).st_value };
    // SAFETY: the loader gives an entry of the library's table.
    let load_bias = (address as u64).wrapping_sub(unsafe { place.read() });
    let value = (ours as u64).wrapping_sub(load_bias);
    Some((info.dli_fbase as usize, Change { place, value }))
}

const PAGE: usize = 4096;

fn page(address: usize) -> usize {
    address & !(PAGE - 1)
}

/// How the segment that holds these pages is mapped, in the library that begins at `base`.
fn protection(base: usize, begin: usize, end: usize) -> Option<MprotectFlags> {
    // SAFETY: a library begins with its header, which is mapped with it.
    let header = unsafe { &*(base as *const libc::Elf64_Ehdr) };
    let segments = (base + header.e_phoff as usize) as *const libc::Elf64_Phdr;
    // SAFETY: the header says where the segments are described, and how many.
    let segments = unsafe { std::slice::from_raw_parts(segments, header.e_phnum.into()) };
    let loaded = || segments.iter().filter(|segment| segment.p_type == libc::PT_LOAD);
    let first = page(loaded().map(|segment| segment.p_vaddr as usize).min()?);
    let holds = |segment: &&libc::Elf64_Phdr| {
        let from = base - first + segment.p_vaddr as usize;
        page(from) <= begin && end <= page(from + segment.p_memsz as usize + PAGE - 1)
    };
    let segment = loaded().find(holds)?;
    let mut flags = MprotectFlags::empty();
    flags.set(MprotectFlags::READ, segment.p_flags & libc::PF_R != 0);
    flags.set(MprotectFlags::WRITE, segment.p_flags & libc::PF_W != 0);
    flags.set(MprotectFlags::EXEC, segment.p_flags & libc::PF_X != 0);
    Some(flags)
}
