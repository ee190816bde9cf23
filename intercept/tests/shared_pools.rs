//! Programs that give each other stream-ordered pools: the driver's rules hold, and nothing is in the way of a dump.

#[path = "support/caller.rs"]
mod caller;
mod support;

use std::os::fd::AsRawFd;

use caller::Caller;
use support::{ENV_PROGRAM, is_soft};

const MIB: u64 = 1 << 20;
const INVALID: u64 = 1;
const POSIX_FD: u64 = 1;
/// Words at which a program has properties, an exported pointer and what it reads.
const PROPERTIES: usize = 0;
const POINTER: usize = 16;
const READ: usize = 31;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

fn create(program: &mut Caller, handle_types: u64) -> u64 {
    for (at, value) in [1 | handle_types << 32, 1, 0, 0].into_iter().enumerate() {
        program.poke(PROPERTIES + at, value);
    }
    let properties = program.at(PROPERTIES);
    program.made("cuMemPoolCreate", &[properties])
}

fn export(program: &mut Caller, pool: u64) -> u64 {
    program.made("cuMemPoolExportToShareableHandle", &[pool, POSIX_FD, 0])
}

fn take(from: &Caller, fd: u64, to: &mut Caller) -> u64 {
    to.call("take", &[from.program.pid().into(), fd])
}

fn import(program: &mut Caller, fd: u64) -> u64 {
    program.made("cuMemPoolImportFromShareableHandle", &[fd, POSIX_FD, 0])
}

fn export_pointer(from: &mut Caller, address: u64, to: &mut Caller) {
    let out = from.at(POINTER);
    from.must("cuMemPoolExportPointer", &[out, address]);
    for word in POINTER..POINTER + 8 {
        let value = from.peek(word);
        to.poke(word, value);
    }
}

fn write(program: &mut Caller, address: u64, value: u64) {
    program.must("cuMemsetD32_v2", &[address, value, 1]);
}

fn read(program: &mut Caller, address: u64) -> u64 {
    program.poke(READ, 0);
    let out = program.at(READ);
    program.must("cuMemcpyDtoH_v2", &[out, address, 4]);
    program.peek(READ)
}

/// What holds with the driver and with the shim. Gives what both have: the pools, and a piece.
fn lend(owner: &mut Caller, other: &mut Caller) -> ([u64; 2], [u64; 2]) {
    let (pool, plain) = (create(owner, POSIX_FD), create(owner, 0));
    for (pool, kind, flags) in [(plain, POSIX_FD, 0), (pool, 8, 0), (pool, POSIX_FD, 1)] {
        let exported = owner.code("cuMemPoolExportToShareableHandle", &[pool, kind, flags]);
        assert_eq!(exported, INVALID, "{pool} {kind} {flags}");
    }
    let fd = export(owner, pool);
    let piece = owner.made("cuMemAllocFromPoolAsync", &[3 * MIB, pool, 0]);
    let small = owner.made("cuMemAllocFromPoolAsync", &[1000, pool, 0]);
    let alone = owner.made("cuMemAllocFromPoolAsync", &[1000, plain, 0]);
    for address in [alone, piece + 8] {
        let exported = owner.code("cuMemPoolExportPointer", &[address]);
        assert_eq!(exported, INVALID, "{address:x}");
    }
    assert_ne!(owner.code("cuIpcGetMemHandle", &[small]), 0, "only as the pool's");
    let taken = take(owner, fd, other);
    let imported = import(other, taken);
    for (function, arguments) in [
        ("cuMemAllocFromPoolAsync", &[MIB, imported, 0][..]),
        ("cuMemPoolExportToShareableHandle", &[imported, POSIX_FD, 0]),
    ] {
        assert_eq!(other.code(function, arguments), INVALID, "{function}");
    }
    assert_eq!(other.call("cuDeviceSetMemPool", &[0, imported]), INVALID);
    let of_other = create(other, POSIX_FD);
    let handle = other.at(POINTER);
    for (address, value) in [(small, 5), (piece, 6)] {
        write(owner, address, value);
        export_pointer(owner, address, other);
        let wrong = other.code("cuMemPoolImportPointer", &[of_other, handle]);
        assert_eq!(wrong, INVALID, "another pool");
        let there = other.made("cuMemPoolImportPointer", &[imported, handle]);
        assert_eq!(read(other, there), value);
        write(other, there, value + 10);
        assert_eq!(read(owner, address), value + 10);
        // Opened twice it is closed twice, in whichever way memory of a pool is freed.
        assert_eq!(other.made("cuMemPoolImportPointer", &[imported, handle]), there);
        other.must("cuMemFreeAsync", &[there, 0]);
        assert_eq!(read(other, there), value + 10);
        other.must("cuMemFreeAsync", &[there, 0]);
        assert_ne!(other.call("cuMemFreeAsync", &[there, 0]), 0);
    }
    let there = other.made("cuMemPoolImportPointer", &[imported, handle]);
    [alone, small].into_iter().for_each(|address| owner.must("cuMemFreeAsync", &[address, 0]));
    ([pool, imported], [piece, there])
}

/// NVIDIA's driver takes descriptors only from who has them from it, not from who has opened them anew.
#[test]
fn the_drivers_own_pools_are_lent_so() {
    if !is_soft() {
        return;
    }
    lend(&mut Caller::start_natively(), &mut Caller::start_natively());
}

#[test]
fn a_pool_is_lent_and_nothing_is_in_the_way_of_a_dump() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let ([pool, imported], [piece, there]) = lend(&mut owner, &mut other);
    let counts = |program: &Caller| program.program.agent().0.counts();
    let (of_owner, of_other) = (counts(&owner), counts(&other));
    assert_eq!(of_other.owners, [of_owner.identity]);
    assert_eq!(of_owner.openers[0].identity, of_other.identity);
    for counts in [&of_owner, &of_other] {
        assert_eq!((counts.shared, counts.pool_bytes, &counts.unsupported[..]), (0, 0, &[][..]));
    }
    // The pool goes, and what it has given stays.
    other.must("cuMemPoolDestroy", &[imported]);
    owner.must("cuMemPoolDestroy", &[pool]);
    write(&mut owner, piece, 77);
    assert_eq!(read(&mut other, there), 77);
    other.must("cuMemFree_v2", &[there]);
    owner.must("cuMemFreeAsync", &[piece, 0]);
    assert!(counts(&owner).openers.is_empty() && counts(&other).owners.is_empty());
}

/// Anybody can write what looks like a ticket or an exported pointer.
#[test]
fn what_is_not_offered_is_not_given() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let (pool, plain) = (create(&mut owner, POSIX_FD), create(&mut owner, 0));
    let fd = export(&mut owner, pool);
    let ticket = std::fs::read(format!("/proc/{}/fd/{fd}", owner.program.pid())).expect("read");
    let own_pid = std::process::id().into();
    let mut import = |ticket: &[u8]| {
        let fd = support::sealed(ticket);
        let taken = other.call("take", &[own_pid, fd.as_raw_fd() as u64]);
        other.code("cuMemPoolImportFromShareableHandle", &[taken, POSIX_FD, 0])
    };
    assert_eq!(import(&ticket), 0);
    let with = |bytes: &[u8], at: usize, value: u64| {
        let mut bytes = bytes.to_vec();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        bytes
    };
    // Each other name that the owner may have given; an unknown one, another process, another identity.
    let pools = u64::from_le_bytes(ticket[40..48].try_into().expect("8 bytes"));
    let others = (0..pools + 9).filter(|name| *name != pools).map(|name| with(&ticket, 40, name));
    let wrong = [with(&ticket, 40, 1 << 40), with(&ticket, 32, 1), with(&ticket, 8, 7)];
    for ticket in others.chain(wrong) {
        assert_eq!(import(&ticket), INVALID, "{ticket:?}");
    }
    // A pointer of another pool, which cannot be shared, under the name of one that can.
    let imported = other.written();
    let lent = owner.made("cuMemAllocFromPoolAsync", &[MIB, pool, 0]);
    let alone = owner.made("cuMemAllocFromPoolAsync", &[MIB, plain, 0]);
    export_pointer(&mut owner, lent, &mut other);
    let handle: Vec<u8> =
        (POINTER..POINTER + 8).flat_map(|word| other.peek(word).to_le_bytes()).collect();
    let name = u64::from_le_bytes(handle[40..48].try_into().expect("8 bytes"));
    let mut open = |handle: &[u8]| {
        for (at, word) in handle.chunks_exact(8).enumerate() {
            other.poke(POINTER + at, u64::from_le_bytes(word.try_into().expect("8 bytes")));
        }
        let handle = other.at(POINTER);
        other.code("cuMemPoolImportPointer", &[imported, handle])
    };
    assert_eq!(open(&handle), 0);
    for name in (0..name + 9).filter(|other| *other != name) {
        let named = with(&handle, 40, name);
        assert_ne!(open(&named), 0, "{name} at the same place");
        assert_ne!(open(&with(&named, 48, alone)), 0, "{name} at the other one's place");
    }
}
