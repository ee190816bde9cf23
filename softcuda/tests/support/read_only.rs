//! What the tests of read-only memory share.

use super::*;

unsafe extern "C" {
    safe fn cuMemGetAccess(flags: &mut u64, location: &[u32; 2], address: u64) -> u32;
    fn cuPointerGetAttribute(out: *mut u64, attribute: u32, address: u64) -> u32;
}

pub(crate) const READ: Access = Access { flags: 1, ..READ_WRITE };
pub(crate) const NO_ACCESS: Access = Access { flags: 0, ..READ_WRITE };
/// What the memory is filled with.
pub(crate) const FILLING: u32 = 42;
pub(crate) const WORDS: usize = GRANULE / 4;

/// A granule that may be read, between two that may be written to, and the same one again, at an
/// address where it may be written to.
pub(crate) struct Memory {
    pub(crate) before: u64,
    pub(crate) read_only: u64,
    pub(crate) beside: u64,
    pub(crate) alias: u64,
}

/// Sets the access to a granule.
#[track_caller]
pub(crate) fn set_access(address: u64, access: &Access) {
    ok(cuMemSetAccess(address, GRANULE, access, 1));
}

#[track_caller]
pub(crate) fn memory() -> Memory {
    let (handle, alias) = map_new(GRANULE);
    let (mut other, mut before) = (0, 0);
    ok(cuMemCreate(&mut other, 2 * GRANULE, &SHAREABLE, 0));
    ok(cuMemAddressReserve(&mut before, 3 * GRANULE, 0, 0, 0));
    let read_only = before + GRANULE as u64;
    let beside = read_only + GRANULE as u64;
    ok(cuMemMap(before, GRANULE, 0, other, 0));
    ok(cuMemMap(read_only, GRANULE, 0, handle, 0));
    ok(cuMemMap(beside, GRANULE, GRANULE, other, 0));
    set_access(before, &READ_WRITE);
    set_access(read_only, &READ);
    set_access(beside, &READ_WRITE);
    ok(cuMemsetD32_v2(alias, FILLING, WORDS));
    Memory { before, read_only, beside, alias }
}

/// The access that a mapping has, as both functions tell it.
#[track_caller]
pub(crate) fn access_of(address: u64) -> u64 {
    let (mut flags, mut attribute) = (99, 0);
    ok(cuMemGetAccess(&mut flags, &[1, 0], address));
    // SAFETY: CU_POINTER_ATTRIBUTE_ACCESS_FLAGS has 4 bytes, which become the lower half.
    ok(unsafe { cuPointerGetAttribute(&mut attribute, 16, address) });
    assert_eq!(attribute, flags);
    flags
}
