//! Multicast objects of stopped programs, and the steps in which they are made again.
//!
//! An object is of several processes, and before a driver binds memory to it all devices have to be added. So every step
//! is done by all processes before any does the next: all undo what they still have, and one creates the object; all
//! join it and add their devices; all bind and map; and only then any of them may run, since its kernels reach the
//! memory of all.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use gpucr_wire::MulticastObject;
use gpucr_wire::peers::Identity;

use super::error::Error;
use crate::host::process::Agent;

/// What a process has of multicast objects.
#[derive(Debug, Clone, Default)]
pub(crate) struct Team {
    /// What the others call it.
    pub(crate) identity: Identity,
    /// Each object that it has.
    pub(crate) objects: Vec<MulticastObject>,
}

/// A process that takes part.
pub(crate) struct Member<'m> {
    pub(crate) pid: u32,
    pub(crate) agent: &'m mut Agent,
    pub(crate) team: &'m Team,
}

/// An object, whoever has it.
pub(crate) type Name = (Identity, u64);

pub(crate) fn name_of(object: &MulticastObject) -> Name {
    (object.owner, object.name)
}

impl Team {
    /// Whether nothing of its objects is undone.
    fn is_whole(&self) -> bool {
        self.objects.iter().all(|object| object.is_whole)
    }
}

/// Has all objects of these processes made again, unless nothing of any is undone. Then their gates may be opened.
///
/// # Errors
/// An agent fails, or a device of an object can be added by nobody any more. All gates stay closed, and it may be tried
/// again.
pub(crate) fn make_whole(members: &mut [Member<'_>]) -> Result<(), Error> {
    if !members.iter().all(|member| member.team.is_whole()) {
        check_devices(members)?;
        let made = make(members)?;
        join(members, &made)?;
        members.iter_mut().try_for_each(|member| member.agent.bind_objects())?;
    }
    Ok(members.iter_mut().try_for_each(|member| member.agent.objects_are_whole())?)
}

/// The objects, each made by its owner, or by another one who has it if the owner has ended.
fn make(members: &mut [Member<'_>]) -> Result<HashMap<Name, OwnedFd>, Error> {
    let mut makers: HashMap<Name, usize> = HashMap::new();
    for (place, member) in members.iter().enumerate() {
        for object in &member.team.objects {
            let is_owner = object.owner == member.team.identity;
            let maker = makers.entry(name_of(object)).or_insert(place);
            *maker = if is_owner { place } else { *maker };
        }
    }
    let mut made = HashMap::new();
    for (place, member) in members.iter_mut().enumerate() {
        let own = member.team.objects.iter().filter(|object| makers[&name_of(object)] == place);
        let own: Vec<&MulticastObject> = own.collect();
        let fds = member.agent.make_objects(own.iter().map(|object| object.id).collect())?;
        made.extend(own.into_iter().map(name_of).zip(fds));
    }
    Ok(made)
}

fn join(members: &mut [Member<'_>], made: &HashMap<Name, OwnedFd>) -> Result<(), Error> {
    let present: Vec<Identity> = members.iter().map(|member| member.team.identity).collect();
    for member in members {
        let objects = member.team.objects.iter();
        let fds: Vec<(u64, &OwnedFd)> =
            objects.filter_map(|object| Some((object.id, made.get(&name_of(object))?))).collect();
        member.agent.join_objects(&fds, &present)?;
    }
    Ok(())
}

/// Checks that whoever binds would not wait for ever.
fn check_devices(members: &[Member<'_>]) -> Result<(), Error> {
    let teams: Vec<(u32, &Team)> = members.iter().map(|member| (member.pid, member.team)).collect();
    match missing(&teams) {
        Some(pid) => {
            let what = "a multicast object to which a process that has ended has added a device \
                        (cuMulticastAddDevice)";
            Err(Error::Unsupported { pid, what: what.into() })
        }
        None => Ok(()),
    }
}

/// A process that uses an object whose devices these processes would not add all, if there is one.
pub(crate) fn missing(teams: &[(u32, &Team)]) -> Option<u32> {
    let mut added: HashMap<Name, u64> = HashMap::new();
    for object in teams.iter().flat_map(|(_, team)| &team.objects) {
        let is_absent = |adder: &Identity| teams.iter().all(|(_, team)| team.identity != *adder);
        // The owner adds them in their stead.
        let absent = object.adders.iter().filter(|adder| adder.is_visible);
        let absent = absent.filter(|adder| is_absent(&adder.identity)).count() as u64;
        *added.entry(name_of(object)).or_default() += u64::from(object.added) + absent;
    }
    let lacks = |object: &MulticastObject| {
        let is_used = object.address != 0 || !object.bound.is_empty();
        is_used && added[&name_of(object)] < u64::from(object.devices)
    };
    teams.iter().find(|(_, team)| team.objects.iter().any(lacks)).map(|(pid, _)| *pid)
}

#[cfg(test)]
mod tests {
    use gpucr_wire::Adder;

    use super::*;

    fn object(owner: u8, added: u32, adders: &[(u8, bool)]) -> MulticastObject {
        let adder = |(who, is_visible): &(u8, bool)| Adder {
            identity: [*who; 16],
            is_visible: *is_visible,
        };
        MulticastObject {
            id: 5,
            owner: [owner; 16],
            name: 7,
            devices: 3,
            size: 2 << 20,
            address: 1 << 40,
            added,
            adders: adders.iter().map(adder).collect(),
            bound: vec![1],
            is_whole: true,
        }
    }

    fn team(identity: u8, object: MulticastObject) -> Team {
        Team { identity: [identity; 16], objects: vec![object] }
    }

    #[test]
    fn all_devices_have_to_be_added_by_somebody() {
        let adders = [(2, true), (3, false)];
        let (owner, second, third) = (
            team(1, object(1, 1, &adders)),
            team(2, object(1, 1, &[])),
            team(3, object(1, 1, &[])),
        );
        assert_eq!(missing(&[(10, &owner), (20, &second), (30, &third)]), None);
        // The owner sees the device of the second, and not that of the third.
        assert_eq!(missing(&[(10, &owner), (30, &third)]), None);
        assert_eq!(missing(&[(10, &owner), (20, &second)]), Some(10));
        assert_eq!(missing(&[(20, &second), (30, &third)]), Some(20));
        // Who uses nothing waits for nobody.
        let mut idle = object(1, 1, &adders);
        (idle.address, idle.bound) = (0, Vec::new());
        assert_eq!(missing(&[(10, &team(1, idle))]), None);
        assert_eq!(missing(&[]), None);
    }
}
