//! Multicast objects of a tree, as a dump checks them and an image says them. [`teams`](super::teams) has how they are made
//! again.

use std::collections::{HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::cuda_process::CudaProcess;
use super::error::Error;
use super::teams::{self, Team};
use crate::image::{Manifest, Section};

/// Kind of the section of an image, which is a list of [`Part`] in postcard form.
pub(super) const SECTION: &str = "multicast";
/// Devices that no object has so many of.
const MOST_DEVICES: u32 = 1 << 10;

/// The part that a process has in a multicast object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// The process.
    pub pid: u32,
    /// Its name for the object.
    pub id: u64,
    /// The pid of the process that has created the object.
    pub owner: u32,
    /// The owner's name for it.
    pub object: u64,
    /// Devices that the object is of.
    pub devices: u32,
    /// Bytes that it has on each.
    pub size: u64,
    /// The first address at which the process sees it; 0 if it does not.
    pub address: u64,
    /// Blocks that the process has bound to it, by its names for them.
    pub bound: Vec<u64>,
}

/// Asks a process that stands still for its objects.
///
/// # Errors
/// Its agent does not answer, or what it says cannot be so.
pub(super) fn ask(program: &mut CudaProcess) -> Result<(), Error> {
    if let Some(agent) = &mut program.agent {
        let (identity, objects) = agent.objects()?;
        program.team = Team { identity, objects };
    }
    Ok(())
}

/// Checks that these processes can have their objects again: all who have them are among them, and all who have added
/// devices, or else the owners see these devices.
///
/// # Errors
/// [`Error::Unsupported`] names the process. [`Error::SharedOutside`]: an owner is not among them.
pub(super) fn check(cuda_processes: &[CudaProcess]) -> Result<(), Error> {
    let known: HashSet<_> = cuda_processes.iter().map(|program| program.team.identity).collect();
    let teams: Vec<(u32, &Team)> =
        cuda_processes.iter().map(|program| (program.process.pid, &program.team)).collect();
    let strange = |team: &Team| team.objects.iter().any(|object| !known.contains(&object.owner));
    if let Some((pid, _)) = teams.iter().find(|(_, team)| strange(team)) {
        let with = "a process outside of its tree, or one that has ended".into();
        return Err(Error::SharedOutside { pid: *pid, with });
    }
    match teams::missing(&teams) {
        Some(pid) => {
            let what = "a multicast object to which a process that has ended has added a device \
                        (cuMulticastAddDevice)";
            Err(Error::Unsupported { pid, what: what.into() })
        }
        None => Ok(()),
    }
}

/// The blocks of these processes that others reach by multicast objects: the place of the process, and its name for the
/// block.
pub(super) fn bound(cuda_processes: &[CudaProcess]) -> HashSet<(usize, u64)> {
    let programs = cuda_processes.iter().enumerate();
    let of = |(place, program): (usize, &CudaProcess)| {
        let bound = program.team.objects.iter().flat_map(|object| object.bound.clone());
        bound.map(move |block| (place, block)).collect::<Vec<_>>()
    };
    programs.flat_map(of).collect()
}

/// The section of an image for multicast objects; none if there are none. Without it a restore would not make them.
pub(super) fn section(cuda_processes: &[CudaProcess]) -> Option<Section> {
    let pids: HashMap<_, _> =
        cuda_processes.iter().map(|program| (program.team.identity, program.process.pid)).collect();
    let parts = cuda_processes.iter().flat_map(|program| {
        let pid = program.process.pid;
        let owner = |identity| pids.get(&identity).copied().unwrap_or(pid);
        let objects = program.team.objects.iter().cloned();
        let part = move |object: gpucr_wire::MulticastObject| Part {
            pid,
            id: object.id,
            owner: owner(object.owner),
            object: object.name,
            devices: object.devices,
            size: object.size,
            address: object.address,
            bound: object.bound,
        };
        objects.map(part).collect::<Vec<_>>()
    });
    let parts: Vec<Part> = parts.collect();
    let data = postcard::to_stdvec(&parts).ok().filter(|_| !parts.is_empty())?;
    Some(Section { kind: SECTION.to_owned(), version: 1, needed: true, data, chunks: Vec::new() })
}

/// What an image says of multicast objects.
///
/// # Errors
/// [`Error::Damaged`]: it makes no sense.
pub fn read(manifest: &Manifest) -> Result<Vec<Part>, Error> {
    let Some(section) = manifest.section(SECTION, 1) else { return Ok(Vec::new()) };
    let said = postcard::from_bytes::<Vec<Part>>(&section.data).ok();
    said.filter(|said| is_possible(said, manifest))
        .ok_or_else(|| Error::Damaged { what: "what it says of multicast objects".into() })
}

/// Whether these are parts of processes of the image, each of one that its owner has, and has said the same of.
fn is_possible(said: &[Part], manifest: &Manifest) -> bool {
    let pids: HashSet<u32> = manifest.processes.iter().map(|process| process.pid).collect();
    let own = said.iter().filter(|part| part.owner == part.pid);
    let own: HashMap<_, _> = own.map(|part| ((part.pid, part.object), part)).collect();
    let mut names = HashSet::new();
    said.iter().all(|part| {
        let of_owner = own.get(&(part.owner, part.object));
        let is_same = |owner: &&Part| (owner.devices, owner.size) == (part.devices, part.size);
        pids.contains(&part.pid)
            && (1..=MOST_DEVICES).contains(&part.devices)
            && names.insert((part.pid, part.id))
            && of_owner.is_some_and(is_same)
            && (part.owner != part.pid || part.id == part.object)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::manifest;

    fn with(parts: &[Part]) -> Manifest {
        let mut manifest = manifest();
        let mut second = manifest.processes[0].clone();
        second.pid += 1;
        manifest.processes.push(second);
        let data = postcard::to_stdvec(parts).expect("written");
        let kind = SECTION.to_owned();
        manifest.sections.push(Section {
            kind,
            version: 1,
            needed: true,
            data,
            chunks: Vec::new(),
        });
        manifest
    }

    #[test]
    fn what_a_manifest_says_of_multicast_objects_has_to_be_possible() {
        let pid = manifest().processes[0].pid;
        let (devices, size, bound) = (2, 2 << 20, vec![1]);
        let own = Part { pid, id: 3, owner: pid, object: 3, devices, size, address: 0, bound };
        let other = Part { pid: pid + 1, id: 9, address: 1 << 40, ..own.clone() };
        let good = [own.clone(), other.clone()];
        assert_eq!(read(&with(&good)).expect("possible"), good);
        assert_eq!(read(&manifest()).expect("none"), []);
        for wrong in [
            vec![other.clone()],
            vec![own.clone(), own.clone()],
            vec![own.clone(), Part { size: 4 << 20, ..other.clone() }],
            vec![own.clone(), Part { object: 4, ..other.clone() }],
            vec![own.clone(), Part { pid: pid + 7, ..other.clone() }],
            vec![Part { devices: 0, ..own.clone() }],
            vec![Part { id: 4, ..own.clone() }],
        ] {
            assert!(read(&with(&wrong)).is_err(), "{wrong:?}");
        }
        let mut nonsense = with(&good);
        nonsense.sections.last_mut().expect("it has one").data = vec![255; 7];
        assert!(read(&nonsense).is_err());
    }
}
