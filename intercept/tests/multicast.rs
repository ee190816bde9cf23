//! Multicast objects: the driver's rules hold under the shim, whoever waits holds nobody up, and objects come back after they
//! were undone.

#[path = "support/caller.rs"]
mod caller;
mod support;

use caller::Caller;
use gpucr_wire::{Counts, GateState};
use support::{ENV_PROGRAM, is_soft};

const GRANULE: u64 = 2 << 20;
const INVALID_VALUE: u64 = 1;
const INVALID_DEVICE: u64 = 101;
const POSIX_FD: u64 = 1;
/// What the devices are, two of them.
const DEVICES: [(&str, &str); 2] =
    [("SOFTCUDA_DEVICE", "NVIDIA H100,9.0,4,1G"), ("SOFTCUDA_DEVICES", "2")];
/// Words at which a program has properties and access.
const PROPERTIES: usize = 0;
const ACCESS: usize = 8;
const OBJECT: usize = 16;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// Memory of a device.
fn memory(program: &mut Caller, device: u64, handle_types: u64, size: u64) -> u64 {
    let words = [1 | handle_types << 32, 1 | device << 32, 0, 0];
    words.into_iter().enumerate().for_each(|(at, word)| program.poke(PROPERTIES + at, word));
    let properties = program.at(PROPERTIES);
    program.made("cuMemCreate", &[size, properties, 0])
}

/// The properties of an object.
fn object_of(program: &mut Caller, devices: u64, size: u64, handle_types: u64) -> u64 {
    let words = [devices, size, handle_types, 0];
    words.into_iter().enumerate().for_each(|(at, word)| program.poke(OBJECT + at, word));
    program.at(OBJECT)
}

fn map(program: &mut Caller, handle: u64, device: u64) -> u64 {
    let address = program.made("cuMemAddressReserve", &[GRANULE, 0, 0, 0]);
    program.must("cuMemMap", &[address, GRANULE, 0, handle, 0]);
    program.poke(ACCESS, 1 | device << 32);
    program.poke(ACCESS + 1, 3);
    let access = program.at(ACCESS);
    program.must("cuMemSetAccess", &[address, GRANULE, access, 1]);
    address
}

/// What holds of an object of one process.
fn alone(program: &mut Caller) {
    for (devices, size, types) in [(0, GRANULE, 1), (2, 0, 1), (2, GRANULE + 1, 1)] {
        let wrong = object_of(program, devices, size, types);
        assert_eq!(program.code("cuMulticastCreate", &[wrong]), INVALID_VALUE, "{devices} {size}");
    }
    let properties = object_of(program, 2, GRANULE, POSIX_FD);
    let object = program.made("cuMulticastCreate", &[properties]);
    let (own, hidden) = (memory(program, 0, POSIX_FD, GRANULE), memory(program, 0, 0, GRANULE));
    let of_second = memory(program, 1, POSIX_FD, GRANULE);
    // What is wrong is told at once, though devices are missing.
    for wrong in [
        [object, 1, own, 0, GRANULE, 0],
        [object, 0, own, 0, 2 * GRANULE, 0],
        [object, 0, own, GRANULE, GRANULE, 0],
        [object, 0, own, 0, 0, 0],
        [object, 0, own, 0, GRANULE, 1],
        [object, 0, hidden, 0, GRANULE, 0],
        [object, 0, object, 0, GRANULE, 0],
        [own, 0, own, 0, GRANULE, 0],
    ] {
        assert_eq!(program.call("cuMulticastBindMem", &wrong), INVALID_VALUE, "{wrong:x?}");
    }
    program.must("cuMulticastAddDevice", &[object, 0]);
    assert_eq!(program.call("cuMulticastAddDevice", &[object, 0]), INVALID_VALUE);
    program.must("cuMulticastAddDevice", &[object, 1]);
    assert_eq!(program.call("cuMulticastAddDevice", &[object, 1]), INVALID_VALUE);
    let heap = program.made("cuMemAlloc_v2", &[GRANULE]);
    assert_eq!(program.call("cuMulticastBindAddr", &[object, 0, heap, GRANULE, 0]), INVALID_VALUE);
    program.must("cuMemFree_v2", &[heap]);
    let at = map(program, own, 0);
    program.must("cuMulticastBindAddr", &[object, 0, at, GRANULE, 0]);
    assert_eq!(
        program.call("cuMulticastBindMem", &[object, 0, own, 0, GRANULE, 0]),
        INVALID_VALUE,
        "bound already"
    );
    program.must("cuMulticastBindMem", &[object, 0, of_second, 0, GRANULE, 0]);
    let whole = map(program, object, 0);
    assert_eq!(program.made("cuMemRetainAllocationHandle", &[whole]), object);
    program.must("cuMemRelease", &[object]);
    // Bound memory lives on, and goes when it is unbound.
    program.must("cuMemUnmap", &[at, GRANULE]);
    for handle in [own, of_second, hidden] {
        program.must("cuMemRelease", &[handle]);
        assert_eq!(program.call("cuMemRelease", &[handle]), INVALID_VALUE);
    }
    assert_eq!(program.call("cuMulticastUnbind", &[object, 2, 0, GRANULE]), INVALID_DEVICE);
    assert_eq!(program.call("cuMulticastUnbind", &[object, 0, 0, 2 * GRANULE]), INVALID_VALUE);
    program.must("cuMulticastUnbind", &[object, 0, 0, GRANULE]);
    assert_eq!(program.call("cuMulticastUnbind", &[object, 0, 0, GRANULE]), INVALID_VALUE);
    assert_eq!(program.call("cuMemAddressFree", &[whole, GRANULE]), INVALID_VALUE);
    program.must("cuMemUnmap", &[whole, GRANULE]);
    program.must("cuMemAddressFree", &[whole, GRANULE]);
    program.must("cuMemRelease", &[object]);
    assert_eq!(program.call("cuMemRelease", &[object]), INVALID_VALUE);
    assert_eq!(program.call("cuMulticastAddDevice", &[object, 0]), INVALID_VALUE);
    let private = object_of(program, 1, GRANULE, 0);
    let private = program.made("cuMulticastCreate", &[private]);
    let export = [private, POSIX_FD, 0];
    assert_eq!(program.code("cuMemExportToShareableHandle", &export), INVALID_VALUE);
    program.must("cuMemRelease", &[private]);
}

/// An object of two processes: the first waits in a call until the second has added its device. What `check` looks at is
/// when both have bound and mapped.
fn together(owner: &mut Caller, other: &mut Caller, check: impl FnOnce(&mut Caller, &mut Caller)) {
    let properties = object_of(owner, 2, GRANULE, POSIX_FD);
    let object = owner.made("cuMulticastCreate", &[properties]);
    let fd = owner.made("cuMemExportToShareableHandle", &[object, POSIX_FD, 0]);
    owner.must("cuMulticastAddDevice", &[object, 0]);
    let own = memory(owner, 0, POSIX_FD, GRANULE);
    owner.begin(1, "cuMulticastBindMem", &[object, 0, own, 0, GRANULE, 0]);
    let taken = other.call("take", &[owner.program.pid().into(), fd]);
    let imported = other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]);
    let export = [imported, POSIX_FD, 0];
    assert_eq!(other.code("cuMemExportToShareableHandle", &export), INVALID_VALUE);
    assert_eq!(other.call("cuMulticastAddDevice", &[imported, 0]), INVALID_VALUE);
    let others = memory(other, 1, POSIX_FD, GRANULE);
    other.begin(1, "cuMulticastBindMem", &[imported, 0, others, 0, GRANULE, 0]);
    assert_eq!((owner.answer(1, 100), other.answer(1, 100)), (None, None), "a device is missing");
    other.must("cuMulticastAddDevice", &[imported, 1]);
    assert_eq!((owner.answer(1, 20_000), other.answer(1, 20_000)), (Some(0), Some(0)));
    let (here, there) = (map(owner, object, 0), map(other, imported, 1));
    check(owner, other);
    for (program, handle, at, device) in [(owner, object, here, 0), (other, imported, there, 1)] {
        program.must("cuMulticastUnbind", &[handle, device, 0, GRANULE]);
        program.must("cuMemUnmap", &[at, GRANULE]);
        program.must("cuMemRelease", &[handle]);
        assert_eq!(program.call("cuMemRelease", &[handle]), INVALID_VALUE);
    }
}

#[test]
fn the_drivers_own_objects_are_so() {
    if !is_soft() {
        return;
    }
    let start = || Caller::start_natively_with(&DEVICES);
    alone(&mut start());
    together(&mut start(), &mut start(), |_, _| ());
}

fn counts(program: &Caller) -> Counts {
    program.program.agent().0.counts()
}

#[test]
fn an_object_is_followed_and_nothing_is_in_the_way_of_a_dump() {
    if !is_soft() {
        return;
    }
    let mut program = Caller::start_with(&DEVICES);
    alone(&mut program);
    let left = counts(&program);
    assert_eq!((left.multicast, left.blocks), (0, 0));
    assert_eq!((left.shared, &left.unsupported[..]), (0, &[][..]));
}

#[test]
fn an_object_of_two_processes_is_followed_and_who_waits_holds_nobody_up() {
    if !is_soft() {
        return;
    }
    let (mut owner, mut other) = (Caller::start_with(&DEVICES), Caller::start_with(&DEVICES));
    together(&mut owner, &mut other, |owner, other| {
        let (of_owner, of_other) = (counts(owner), counts(other));
        assert_eq!((of_owner.multicast, of_other.multicast), (1, 1));
        assert_eq!(of_other.owners, [of_owner.identity]);
        assert_eq!(of_owner.openers[0].identity, of_other.identity);
        for counts in [&of_owner, &of_other] {
            assert_eq!((counts.shared, &counts.unsupported[..]), (0, &[][..]));
        }
    });
    let (of_owner, of_other) = (counts(&owner), counts(&other));
    assert_eq!((of_owner.multicast, of_other.multicast), (0, 0));
    assert!(of_owner.openers.is_empty() && of_other.owners.is_empty());
}

/// A call that waits for a device is outside of the gate.
#[test]
fn the_gate_closes_while_a_call_waits_for_a_device() {
    if !is_soft() {
        return;
    }
    let mut program = Caller::start_with(&DEVICES);
    let properties = object_of(&mut program, 2, GRANULE, POSIX_FD);
    let object = program.made("cuMulticastCreate", &[properties]);
    program.must("cuMulticastAddDevice", &[object, 0]);
    let own = memory(&mut program, 0, POSIX_FD, GRANULE);
    program.begin(1, "cuMulticastBindMem", &[object, 0, own, 0, GRANULE, 0]);
    assert_eq!(program.answer(1, 50), None);
    {
        let (mut agent, _) = program.program.agent();
        agent.must(&gpucr_wire::Request::CloseGate { timeout_ms: 10_000 });
        agent.must(&gpucr_wire::Request::Part {});
        let refused = agent.ask(&gpucr_wire::Request::OpenGate {});
        assert!(matches!(refused, gpucr_wire::Reply::Failed { .. }), "{refused:?}");
    }
    // The gate does not open with the end of the connection.
    let (mut agent, hello) = program.program.agent();
    assert_eq!(hello.gate, GateState::Parted {});
    agent.must(&gpucr_wire::Request::Whole {});
    agent.must(&gpucr_wire::Request::OpenGate {});
    program.must("cuMulticastAddDevice", &[object, 1]);
    assert_eq!(program.answer(1, 20_000), Some(0));
}
