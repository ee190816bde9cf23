//! Host memory of `cuMemCreate`: the driver's rules hold, and nothing is in the way of a dump.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use support::{ENV_PROGRAM, is_soft};

const MIB: u64 = 1 << 20;
const INVALID: u64 = 1;
const POSIX_FD: u64 = 1;
const READ_WRITE: u64 = 3;
/// `CU_MEM_LOCATION_TYPE_*`
const DEVICE: u64 = 1;
const HOST: u64 = 2;
const HOST_NUMA: u64 = 3;
const HOST_NUMA_CURRENT: u64 = 4;
/// `CU_POINTER_ATTRIBUTE_*`
const CONTEXT: u64 = 1;
const MEMORY_TYPE: u64 = 2;
const DEVICE_POINTER: u64 = 3;
const RANGE_START: u64 = 11;
const RANGE_SIZE: u64 = 12;
const ALLOWED_HANDLE_TYPES: u64 = 14;
/// Words at which a program has properties, access and what it reads.
const PROPERTIES: usize = 0;
const ACCESS: usize = 8;
const OUT: usize = 30;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

fn properties(program: &mut Caller, handle_types: u64, kind: u64, id: u64) -> u64 {
    let words = [1 | handle_types << 32, kind | id << 32, 0, 0];
    words.into_iter().enumerate().for_each(|(at, word)| program.poke(PROPERTIES + at, word));
    program.at(PROPERTIES)
}

fn set_access(program: &mut Caller, address: u64, size: u64, given: &[(u64, u64)]) -> u64 {
    // Twelve bytes each: kind, number and flags.
    let words: Vec<u32> =
        given.iter().flat_map(|(kind, flags)| [*kind as u32, 0, *flags as u32]).collect();
    for (at, pair) in words.chunks(2).enumerate() {
        let high = pair.get(1).copied().unwrap_or(0);
        program.poke(ACCESS + at, u64::from(pair[0]) | u64::from(high) << 32);
    }
    let access = program.at(ACCESS);
    program.call("cuMemSetAccess", &[address, size, access, given.len() as u64])
}

fn access(program: &mut Caller, kind: u64, address: u64) -> u64 {
    program.poke(ACCESS, kind);
    let location = program.at(ACCESS);
    program.made("cuMemGetAccess", &[location, address])
}

fn attribute(program: &mut Caller, which: u64, address: u64) -> u64 {
    program.made("cuPointerGetAttribute", &[which, address])
}

fn read(program: &mut Caller, address: u64) -> u64 {
    let out = program.at(OUT);
    program.must("cuMemcpyDtoH_v2", &[out, address, 8]);
    program.peek(OUT)
}

/// What a handle was made with: the words of kind and handle types, and of the location.
fn made_with(program: &mut Caller, handle: u64) -> [u64; 2] {
    let out = program.at(PROPERTIES);
    program.must("cuMemGetAllocationPropertiesFromHandle", &[out, handle]);
    [program.peek(PROPERTIES), program.peek(PROPERTIES + 1)]
}

/// What the driver refuses, and a handle of 4 MiB.
fn create(program: &mut Caller) -> u64 {
    for (types, kind, id, size) in [
        (POSIX_FD, HOST, 0, 4 * MIB),
        (POSIX_FD, HOST_NUMA, 1, 4 * MIB),
        (0, HOST_NUMA_CURRENT, 0, 4 * MIB),
        (0, HOST_NUMA, 0, 4096),
    ] {
        let properties = properties(program, types, kind, id);
        let refused = program.code("cuMemCreate", &[size, properties, 0]);
        assert_eq!(refused, INVALID, "{types} {kind} {id} {size}");
    }
    let plain = properties(program, 0, HOST, 0);
    let plain = program.made("cuMemCreate", &[2 * MIB, plain, 0]);
    assert_eq!(made_with(program, plain), [1, HOST_NUMA]);
    assert_eq!(program.code("cuMemExportToShareableHandle", &[plain, POSIX_FD, 0]), INVALID);
    program.must("cuMemRelease", &[plain]);
    assert_eq!(program.call("cuMemRelease", &[plain]), INVALID);
    let properties = properties(program, POSIX_FD, HOST_NUMA, 0);
    let granularity = program.made("cuMemGetAllocationGranularity", &[properties, 0]);
    assert_eq!(granularity, 2 * MIB);
    let handle = program.made("cuMemCreate", &[4 * MIB, properties, 0]);
    assert_eq!(made_with(program, handle), [1 | POSIX_FD << 32, HOST_NUMA]);
    handle
}

/// Maps a handle of 4 MiB into a reservation of 8, which it gives, at 2 MiB.
fn map(program: &mut Caller, handle: u64) -> u64 {
    let reserved = program.made("cuMemAddressReserve", &[8 * MIB, 0, 0, 0]);
    let address = reserved + 2 * MIB;
    program.must("cuMemMap", &[address, 4 * MIB, 0, handle, 0]);
    for (at, size, offset) in
        [(reserved, 4 * MIB, 0), (reserved + 6 * MIB, 4 * MIB, 0), (reserved, 2 * MIB, 4 * MIB)]
    {
        let refused = program.call("cuMemMap", &[at, size, offset, handle, 0]);
        assert_eq!(refused, INVALID, "{at:x} {size:x} {offset:x}");
    }
    assert_eq!(program.call("cuMemAddressFree", &[reserved, 8 * MIB]), INVALID);
    assert_eq!(attribute(program, MEMORY_TYPE, address), 1);
    assert_eq!(program.code("cuPointerGetAttribute", &[DEVICE_POINTER, address]), INVALID);
    assert_eq!((access(program, DEVICE, address), access(program, HOST_NUMA, address)), (0, 0));
    let all = [(DEVICE, READ_WRITE), (HOST_NUMA, READ_WRITE)];
    assert_eq!(set_access(program, address, 3 * MIB, &all), INVALID);
    assert_eq!(set_access(program, address, 4 * MIB, &all), 0);
    assert_eq!((access(program, DEVICE, address), access(program, HOST_NUMA, address)), (3, 3));
    for (which, value) in [
        (CONTEXT, 0),
        (MEMORY_TYPE, 1),
        (DEVICE_POINTER, address + 8),
        (RANGE_START, address),
        (RANGE_SIZE, 4 * MIB),
        (ALLOWED_HANDLE_TYPES, POSIX_FD),
    ] {
        assert_eq!(attribute(program, which, address + 8), value, "attribute {which}");
    }
    reserved
}

/// The host and the device see the same.
fn use_it(program: &mut Caller, address: u64, value: u64) {
    program.call("poke", &[address, value]);
    assert_eq!(read(program, address), value);
    program.must("cuMemsetD32_v2", &[address + 8, value + 1, 2]);
    program.must("cuCtxSynchronize", &[]);
    assert_eq!(program.call("peek", &[address + 8]), (value + 1) * ((1 << 32) + 1));
}

fn unmap(program: &mut Caller, reserved: u64) {
    let address = reserved + 2 * MIB;
    assert_eq!(program.call("cuMemUnmap", &[address, 2 * MIB]), INVALID);
    assert_eq!(program.call("cuMemUnmap", &[reserved, 8 * MIB]), INVALID);
    program.must("cuMemUnmap", &[address, 4 * MIB]);
    assert_ne!(program.code("cuPointerGetAttribute", &[MEMORY_TYPE, address]), 0);
    program.must("cuMemAddressFree", &[reserved, 8 * MIB]);
}

/// What holds with the driver and with the shim. `check` is called while both have the memory mapped, and only one a handle.
fn share(owner: &mut Caller, other: &mut Caller, check: impl FnOnce(&Caller, &Caller)) {
    let handle = create(owner);
    let of_owner = map(owner, handle);
    use_it(owner, of_owner + 2 * MIB, 5);
    let retained = owner.made("cuMemRetainAllocationHandle", &[of_owner + 3 * MIB]);
    owner.must("cuMemRelease", &[retained]);
    let fd = owner.made("cuMemExportToShareableHandle", &[handle, POSIX_FD, 0]);
    let taken = other.call("take", &[owner.program.pid().into(), fd]);
    let imported = other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]);
    assert_eq!(other.code("cuMemExportToShareableHandle", &[imported, POSIX_FD, 0]), INVALID);
    let of_other = map(other, imported);
    assert_eq!(read(other, of_other + 2 * MIB), 5);
    use_it(other, of_other + 2 * MIB, 9);
    assert_eq!(owner.call("peek", &[of_owner + 2 * MIB]), 9);
    owner.must("cuMemRelease", &[handle]);
    check(owner, other);
    other.must("cuMemRelease", &[imported]);
    use_it(other, of_other + 2 * MIB, 11);
    use_it(owner, of_owner + 2 * MIB, 12);
    unmap(other, of_other);
    unmap(owner, of_owner);
}

/// NVIDIA's driver does not come back from handles that were released, maps over what is mapped, and takes descriptors
/// only from who has them from it, not from who has opened them anew.
#[test]
fn the_drivers_own_is_so() {
    if !is_soft() {
        return;
    }
    share(&mut Caller::start_natively(), &mut Caller::start_natively(), |_, _| ());
}

#[test]
fn it_is_shared_and_nothing_is_in_the_way_of_a_dump() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let counts = |program: &Caller| program.program.agent().0.counts();
    share(&mut owner, &mut other, |owner, other| {
        let (of_owner, of_other) = (counts(owner), counts(other));
        assert_eq!(of_other.owners, [of_owner.identity]);
        assert_eq!(of_owner.openers[0].identity, of_other.identity);
        for counts in [&of_owner, &of_other] {
            assert_eq!((counts.shared, &counts.unsupported[..]), (0, &[][..]));
            assert_eq!(counts.pinned_bytes, 4 * MIB, "what a device writes is known");
        }
    });
    let (of_owner, of_other) = (counts(&owner), counts(&other));
    assert!(of_owner.openers.is_empty() && of_other.owners.is_empty());
    assert_eq!((of_owner.pinned_bytes, of_other.pinned_bytes), (0, 0));
}

/// What programs close that is not theirs may have another meaning by then.
#[test]
fn a_descriptor_that_the_program_has_closed_is_left_alone() {
    let mut program = Caller::start();
    let properties = properties(&mut program, POSIX_FD, HOST_NUMA, 0);
    let handle = program.made("cuMemCreate", &[4 * MIB, properties, 0]);
    let reserved = map(&mut program, handle);
    let pid = program.program.pid();
    let of_memory = |entry: std::io::Result<std::fs::DirEntry>| {
        let entry = entry.expect("an entry");
        let to = std::fs::read_link(entry.path()).ok()?;
        let fd = entry.file_name().to_str()?.parse::<u64>().ok()?;
        to.to_string_lossy().contains("gpucr-host").then_some(fd)
    };
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("its descriptors");
    let fds: Vec<u64> = fds.filter_map(of_memory).collect();
    assert_eq!(fds.len(), 1);
    // The program's own file takes the number.
    let placed = program.call("replace", &[fds[0]]);
    assert_eq!(placed, fds[0]);
    use_it(&mut program, reserved + 2 * MIB, 3);
    assert_eq!(
        program.call("cuMemMap", &[reserved, 2 * MIB, 0, handle, 0]),
        INVALID,
        "not this file"
    );
    program.must("cuMemUnmap", &[reserved + 2 * MIB, 4 * MIB]);
    program.must("cuMemRelease", &[handle]);
    let link = std::fs::read_link(format!("/proc/{pid}/fd/{}", fds[0])).expect("open still");
    assert_eq!(link.to_str(), Some("/dev/null"));
}
