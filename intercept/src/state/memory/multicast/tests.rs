//! Objects of two processes on a driver that can be told to fail.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::super::fake::Fake;
use super::super::opened::{Offer, Origin};
use super::super::{Failure, Fds};
use super::*;
use crate::abi::types::{ACCESS_READ_WRITE, AllocationProp, HANDLE_POSIX_FD};

const MIB: u64 = 1 << 20;
const OWNER: Identity = [9; 16];
const OTHER: Identity = [8; 16];

fn prop(devices: u32) -> MulticastProp {
    let handle_types = HANDLE_POSIX_FD.into();
    MulticastProp { devices, size: 4 << 20, handle_types, flags: 0 }
}

/// A process with memory of 4 MiB on a device, and a part in an object.
struct Process {
    memory: Memory,
    object: u64,
    block: u64,
}

impl Process {
    fn new(fake: &Fake, mut memory: Memory, object: u64, device: i32) -> Self {
        let prop = AllocationProp::on_device(device, false);
        let block = memory.create(fake, 4 * MIB, prop).expect("room");
        let real = memory.real_object(object).expect("it is there");
        fake.add_device(real, device).expect("added");
        memory.device_added(object, device);
        Self { memory, object, block }
    }

    fn bind(&mut self, fake: &Fake) {
        let (object, source) = (self.object, Source::Memory(self.block, 2 * MIB));
        let asked = Asked { object, device: None, offset: 0, source, size: 2 * MIB, flags: 0 };
        assert!(self.memory.can_be_bound(&asked));
        let begun = self.memory.begin_to_bind(&asked).expect("followed").expect("possible");
        fake.bind(begun.real, &begun.binding, begun.memory).expect("bound");
        self.memory.bound(fake, &begun, true);
        let base = fake.reserve(4 * MIB).expect("reserved");
        self.memory.reserved(base, 4 * MIB);
        self.memory.map_object(fake, base, 4 * MIB, 0, object).expect("ours").expect("mapped");
        let access = [Access::of_device(0, ACCESS_READ_WRITE)];
        fake.set_access(base, 4 * MIB, &access).expect("set");
        self.memory.access_set(base, 4 * MIB, &access);
    }

    /// Takes all of it away, and gives the blocks back.
    fn away_and_back(&mut self, fake: &Fake) {
        let mut fds = self.memory.export(fake, &Fds::new(), |fd| fd).expect("exported");
        self.memory.undo_objects(fake).expect("undone");
        self.memory.detach(fake).expect("detached");
        self.memory.attach(fake, &mut fds).expect("attached");
    }
}

/// Both have bound and mapped.
fn both(fake: &Fake) -> [Process; 2] {
    let mut memory = Memory::default();
    let object = memory.create_object(fake, prop(2)).expect("created");
    assert!(memory.incomplete(object).is_some());
    let name = memory.offer_object(object).expect("its own").expect("it may be exported");
    let Some(Offer::Here(team, fd)) = memory.hand_out_object(fake, name) else {
        panic!("it is there")
    };
    let mut other = Memory::default();
    let origin = Origin { owner: OWNER, pid: 3, namespace: 4, block: name };
    let mut import = || other.import_object(fake, origin, &team, fd.as_fd()).expect("imported");
    let (imported, again) = (import(), import());
    assert_eq!(imported, again);
    assert_eq!(other.offer_object(imported), Some(Err(1)), "not what was imported");
    let mut owner = Process::new(fake, memory, object, 0);
    let mut other = Process::new(fake, other, imported, 1);
    assert!(owner.memory.device_added_by(name, OTHER, Some(1)));
    assert!(owner.memory.incomplete(object).is_none(), "all are there");
    owner.bind(fake);
    other.bind(fake);
    assert_eq!(other.memory.release_object(fake, imported), Some(0), "once of twice");
    [owner, other]
}

/// The steps in which both make it again.
fn make_again(fake: &Fake, [owner, other]: &mut [Process; 2]) -> Result<(), Failure> {
    let id = |process: &Process| process.memory.list_objects()[0].id;
    let present = [OWNER, OTHER];
    let made = owner.memory.make_objects(fake, &[id(owner)])?.remove(0);
    other.memory.make_objects(fake, &[])?;
    let made = Arc::new(made);
    for process in [&mut *owner, &mut *other] {
        let fds = Fds::from([(id(process), made.clone())]);
        process.memory.join_objects(fake, &fds, &present)?;
    }
    owner.memory.bind_objects(fake)?;
    other.memory.bind_objects(fake)
}

#[test]
fn an_object_goes_with_its_last_use_and_lets_go_of_what_is_bound() {
    let fake = Fake::new();
    let mut memory = Memory::default();
    let object = memory.create_object(&fake, prop(1)).expect("created");
    let mut process = Process::new(&fake, memory, object, 0);
    process.bind(&fake);
    let Process { mut memory, object, block } = process;
    assert_eq!(memory.release_object(&fake, object), Some(0));
    assert_eq!(memory.release_object(&fake, object), Some(1), "it is mapped still");
    assert_eq!(memory.release_handle(&fake, block), Some(0));
    assert_eq!(fake.handles(), 2, "bound memory lives on");
    let address = memory.list_objects()[0].address;
    assert_eq!(memory.retain_object(address + MIB), Some(object));
    assert_eq!(memory.release_object(&fake, object), Some(0));
    fake.unmap(address, 4 * MIB).expect("unmapped");
    memory.unmapped(&fake, address, 4 * MIB);
    assert_eq!((fake.handles(), memory.has_objects()), (0, false));
}

#[test]
fn what_is_bound_and_mapped_comes_back_in_both() {
    let fake = Fake::new();
    let mut both = both(&fake);
    let (places, objects) = (fake.places(), fake.objects());
    both.iter_mut().for_each(|process| process.away_and_back(&fake));
    assert_eq!((fake.objects(), fake.mapped()), (vec![], 0));
    assert!(both.iter().all(|process| !process.memory.are_objects_whole()));
    make_again(&fake, &mut both).expect("made");
    assert_eq!((fake.places(), fake.objects()), (places, objects));
    assert!(both.iter().all(|process| process.memory.list_objects()[0].is_whole));
    // What the other one has unbound is undone no more, and what it has given up is gone.
    let [mut owner, mut other] = both;
    let object = other.memory.real_object(other.object).expect("there");
    let binding = Binding {
        device: 1,
        is_named: false,
        offset: 0,
        block: 0,
        from: 0,
        size: 0,
        attached: true,
    };
    fake.unbind(object, &binding).expect("it was bound");
    assert!(other.memory.unbound(&fake, other.object, 1, 0, 2 * MIB));
    assert!(!owner.memory.unbound(&fake, owner.object, 1, 0, 2 * MIB), "not its own");
}

#[test]
fn an_owner_adds_the_devices_of_those_who_have_ended() {
    let fake = Fake::new();
    let [mut owner, _ended] = both(&fake);
    owner.away_and_back(&fake);
    let id = owner.memory.list_objects()[0].id;
    owner.memory.make_objects(&fake, &[id]).expect("made");
    owner.memory.join_objects(&fake, &Fds::new(), &[OWNER]).expect("joined");
    owner.memory.bind_objects(&fake).expect("all devices are there");
}

#[test]
fn after_a_failure_at_any_call_it_is_made_again_from_the_beginning() {
    for calls in 0.. {
        let fake = Fake::new();
        let mut both = both(&fake);
        let (places, objects) = (fake.places(), fake.objects());
        both.iter_mut().for_each(|process| process.away_and_back(&fake));
        fake.fail_after(calls);
        let result = make_again(&fake, &mut both);
        if !fake.fail_never() {
            result.expect("no call failed");
            assert!(calls > 8, "{calls}");
            break;
        }
        assert!(result.is_err(), "call {calls}");
        make_again(&fake, &mut both).expect("repeated");
        assert_eq!((fake.places(), fake.objects()), (places, objects), "call {calls}");
    }
}

#[test]
fn after_a_failure_at_any_call_it_is_undone_once_more() {
    for calls in 0.. {
        let fake = Fake::new();
        let mut both = both(&fake);
        fake.fail_after(calls);
        let result = both[0].memory.undo_objects(&fake);
        if !fake.fail_never() {
            result.expect("no call failed");
            assert_eq!(calls, 3);
            break;
        }
        assert!(result.is_err() && !both[0].memory.are_objects_whole() || calls == 0);
        both[0].memory.undo_objects(&fake).expect("repeated");
    }
}
