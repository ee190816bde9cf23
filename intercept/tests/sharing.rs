//! Programs that give each other memory by exported handles.

#[path = "support/caller.rs"]
mod caller;
mod support;

use std::os::fd::AsRawFd;

use caller::Caller;
use gpucr_wire::{BlockKind, Reply, Request};
use support::ENV_PROGRAM;

const MIB: u64 = 1 << 20;
const INVALID: u64 = 1;
const POSIX_FD: u64 = 1;
const READ_WRITE: u64 = 3;

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        caller::run();
    }
}

/// A handle of new memory that may be exported.
fn create(program: &mut Caller) -> u64 {
    for (at, value) in [1 | POSIX_FD << 32, 1, 0, 0].into_iter().enumerate() {
        program.poke(at, value);
    }
    let properties = program.at(0);
    program.made("cuMemCreate", &[2 * MIB, properties, 0])
}

/// Maps all of a handle, for device 0 to read and write.
fn map(program: &mut Caller, handle: u64) -> u64 {
    let address = program.made("cuMemAddressReserve", &[2 * MIB, 0, 0, 0]);
    program.must("cuMemMap", &[address, 2 * MIB, 0, handle, 0]);
    for (at, value) in [1, READ_WRITE].into_iter().enumerate() {
        program.poke(at, value);
    }
    let access = program.at(0);
    program.must("cuMemSetAccess", &[address, 2 * MIB, access, 1]);
    address
}

fn write(program: &mut Caller, address: u64, value: u64) {
    program.must("cuMemsetD32_v2", &[address, value, 1]);
}

fn read(program: &mut Caller, address: u64) -> u64 {
    program.poke(8, 0);
    let out = program.at(8);
    program.must("cuMemcpyDtoH_v2", &[out, address, 4]);
    program.peek(8)
}

fn take(from: &Caller, fd: u64, to: &mut Caller) -> u64 {
    to.call("take", &[from.program.pid().into(), fd])
}

#[test]
fn an_exported_block_is_the_same_memory_for_who_imports_its_ticket() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let own = create(&mut owner);
    let seen = map(&mut owner, own);
    write(&mut owner, seen, 71);
    let fd = owner.made("cuMemExportToShareableHandle", &[own, POSIX_FD, 0]);
    let taken = take(&owner, fd, &mut other);
    let imported = other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]);
    assert_eq!(other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]), imported);
    let there = map(&mut other, imported);
    assert_eq!(read(&mut other, there), 71);
    write(&mut other, there, 72);
    assert_eq!(read(&mut owner, seen), 72);
    // As with the driver, what was imported is not exported.
    let out = other.at(9);
    let again = other.call("cuMemExportToShareableHandle", &[out, imported, POSIX_FD, 0]);
    assert_eq!(again, INVALID);
    // Both tell of each other, and nothing is in the way of a dump.
    let (of_owner, of_other) = (owner.program.agent().0.counts(), other.program.agent().0.counts());
    assert_eq!(of_other.owners, [of_owner.identity]);
    assert_eq!(of_owner.openers[0].identity, of_other.identity);
    assert_eq!((of_owner.shared, of_other.shared), (0, 0));
    for _ in 0..2 {
        other.must("cuMemRelease", &[imported]);
    }
    assert_eq!(other.call("cuMemRelease", &[imported]), INVALID);
    assert_eq!(read(&mut other, there), 72, "it is mapped still");
    other.must("cuMemUnmap", &[there, 2 * MIB]);
    let (of_owner, of_other) = (owner.program.agent().0.counts(), other.program.agent().0.counts());
    assert!(of_owner.openers.is_empty() && of_other.owners.is_empty());
    // Of a block that is gone there is nothing to import.
    owner.must("cuMemUnmap", &[seen, 2 * MIB]);
    owner.must("cuMemRelease", &[own]);
    assert_eq!(other.call("cuMemImportFromShareableHandle", &[out, taken, POSIX_FD]), INVALID);
}

#[test]
fn a_program_may_import_its_own() {
    let mut program = Caller::start();
    let own = create(&mut program);
    let fd = program.made("cuMemExportToShareableHandle", &[own, POSIX_FD, 0]);
    let imported = program.made("cuMemImportFromShareableHandle", &[fd, POSIX_FD]);
    let (one, other) = (map(&mut program, own), map(&mut program, imported));
    program.must("cuMemRelease", &[own]);
    program.must("cuMemRelease", &[imported]);
    write(&mut program, one, 5);
    assert_eq!(read(&mut program, other), 5);
    program.program.agent().0.cycle(&program.program);
    assert_eq!(read(&mut program, other), 5);
}

#[test]
fn both_get_the_memory_back_by_the_owners_descriptor() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let own = create(&mut owner);
    let seen = map(&mut owner, own);
    let fd = owner.made("cuMemExportToShareableHandle", &[own, POSIX_FD, 0]);
    let taken = take(&owner, fd, &mut other);
    let imported = other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]);
    let there = map(&mut other, imported);
    write(&mut owner, seen, 5);
    for round in 0..2 {
        let (mut of_owner, mut of_other) = (owner.program.agent().0, other.program.agent().0);
        let close = Request::CloseGate { timeout_ms: 60_000 };
        of_owner.must(&close);
        of_other.must(&close);
        let (blocks, fds) = of_owner.export();
        let listed = of_other.ask(&Request::Export { known: Vec::new() });
        let Reply::Blocks { blocks: listed } = listed else { panic!("{listed:?}") };
        let BlockKind::Opened { block, .. } = listed[0].kind else { panic!("{listed:?}") };
        assert_eq!((listed.len(), block, listed[0].address), (1, blocks[0].id, there));
        of_owner.must(&Request::Detach {});
        of_other.must(&Request::Detach {});
        let (mut of_owner, mut of_other) = (owner.program.agent().0, other.program.agent().0);
        assert_eq!(of_other.reattach(&listed, &fds), Reply::Done {});
        assert_eq!(of_owner.reattach(&blocks, &fds), Reply::Done {});
        of_owner.must(&Request::OpenGate {});
        of_other.must(&Request::OpenGate {});
        drop((of_owner, of_other));
        assert_eq!(read(&mut other, there), 5 + round);
        write(&mut other, there, 6 + round);
        assert_eq!(read(&mut owner, seen), 6 + round);
    }
}

/// What comes from a program without the shim is the driver's alone, and counts as long as there is a handle or a
/// mapping: programs release the handle as soon as it is mapped.
#[test]
fn imported_memory_of_others_counts_as_long_as_it_is_mapped() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    create(&mut owner);
    let (_, fds) = owner.program.agent().0.export();
    let own_pid = std::process::id().into();
    let taken = other.call("take", &[own_pid, fds[0].as_raw_fd() as u64]);
    let shared = |program: &Caller| program.program.agent().0.counts().shared;
    let imported = other.made("cuMemImportFromShareableHandle", &[taken, POSIX_FD]);
    assert_eq!(shared(&other), 1);
    let address = map(&mut other, imported);
    other.must("cuMemRelease", &[imported]);
    assert_eq!(shared(&other), 1, "it is still there");
    other.must("cuMemUnmap", &[address, 2 * MIB]);
    assert_eq!(shared(&other), 0);
}

/// Anybody can write what looks like a ticket.
#[test]
fn a_ticket_for_what_is_not_offered_gives_nothing() {
    let (mut owner, mut other) = (Caller::start(), Caller::start());
    let offered = create(&mut owner);
    let fd = owner.made("cuMemExportToShareableHandle", &[offered, POSIX_FD, 0]);
    create(&mut owner);
    let ticket = std::fs::read(format!("/proc/{}/fd/{fd}", owner.program.pid())).expect("read");
    let blocks = owner.program.agent().0.export().0;
    assert_eq!(blocks.len(), 2);
    let own_pid = std::process::id().into();
    let mut import = |ticket: &[u8]| {
        let fd = support::sealed(ticket);
        let taken = other.call("take", &[own_pid, fd.as_raw_fd() as u64]);
        let out = other.at(9);
        other.call("cuMemImportFromShareableHandle", &[out, taken, POSIX_FD])
    };
    // The same block: good. Then the other block, an unknown one, another process, another identity.
    assert_eq!(import(&ticket), 0);
    let wrong = |at: usize, value: u64| {
        let mut ticket = ticket.clone();
        ticket[at..at + 8].copy_from_slice(&value.to_le_bytes());
        ticket
    };
    let own = u64::from_le_bytes(ticket[40..48].try_into().expect("8 bytes"));
    let not_offered = blocks.iter().map(|block| block.id).find(|id| *id != own).expect("two");
    for ticket in [wrong(40, not_offered), wrong(40, 1 << 40), wrong(32, 1), wrong(8, 7)] {
        assert_eq!(import(&ticket), INVALID, "{ticket:?}");
    }
}
