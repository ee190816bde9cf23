//! Memory that processes of a tree have opened of each other, by legacy IPC handles or exported ones.
//!
//! A block belongs to its owner, who is asked for a descriptor of it, and whose copy is in the image. A process that
//! has it open lists it under a name of its own; it gets the owner's descriptor whenever memory is put back, so that
//! both see the same memory again. Who shares memory with a process outside of the tree cannot be dumped: the two
//! would have different memory afterwards.

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;

use gpucr_wire::peers::Identity;
use gpucr_wire::{Block, BlockKind};

use super::cuda_process::CudaProcess;
use super::error::Error;
use super::sharers::{Opened, Sharers};
use crate::image::Manifest;

/// With whom memory is shared of which no more is known.
const OUTSIDE: &str = "a process outside of its tree, or one that has ended";

/// Checks that all who share memory are among these processes.
///
/// # Errors
/// [`Error::SharedOutside`] names the process and, where it is known, the other.
pub(crate) fn check(cuda_processes: &[CudaProcess]) -> Result<(), Error> {
    let known: HashSet<Identity> = identities(cuda_processes).keys().copied().collect();
    for program in cuda_processes {
        let refused = |with: String| Error::SharedOutside { pid: program.process.pid, with };
        let Sharers { owners, openers, .. } = &program.sharers;
        if owners.iter().any(|owner| !known.contains(owner)) {
            return Err(refused(OUTSIDE.into()));
        }
        if let Some(outside) = openers.iter().find(|opener| !known.contains(&opener.identity)) {
            return Err(refused(match outside.pid {
                0 => OUTSIDE.into(),
                // A process of the tree is among these if it used CUDA when the dump began.
                pid => format!(
                    "process {pid}, which is outside of its tree or began to use CUDA during the dump"
                ),
            }));
        }
    }
    Ok(())
}

/// The place of each process among these, by what others call it.
fn identities(cuda_processes: &[CudaProcess]) -> HashMap<Identity, usize> {
    let named = cuda_processes.iter().enumerate();
    let named = named.filter(|(_, program)| program.sharers.identity != Identity::default());
    named.map(|(place, program)| (program.sharers.identity, place)).collect()
}

/// Gives each process descriptors of the blocks that it has open, from those that their owners have sent.
///
/// `blocks` are the own ones of each process.
///
/// # Errors
/// [`Error::Unsupported`]: the owner has given such a block back, is not among the processes, or has another one of that
/// name; or there is no descriptor left.
pub(crate) fn resolve(
    cuda_processes: &mut [CudaProcess],
    blocks: &[Vec<Block>],
) -> Result<(), Error> {
    let places = identities(cuda_processes);
    for at in 0..cuda_processes.len() {
        let pid = cuda_processes[at].process.pid;
        let mut found: Vec<(Opened, OwnedFd)> = Vec::new();
        for block in &cuda_processes[at].listed {
            let BlockKind::Opened { owner, block: of_owner } = block.kind else { continue };
            let owner = places.get(&owner).map(|place| (&cuda_processes[*place], &blocks[*place]));
            let memory = owner.and_then(|(owner, blocks)| {
                // What a process says of another's memory need not be true.
                let is_same = |own: &Block| own.id == of_owner && own.size == block.size;
                blocks.iter().find(|own| is_same(own))?;
                let fd = owner.blocks.iter().find(|(id, _)| *id == of_owner)?;
                Some((owner.process.pid, &fd.1))
            });
            let (owner, fd) = memory.ok_or_else(|| Error::Unsupported {
                pid,
                what:
                    "memory of another process that its owner has given back (cuIpcOpenMemHandle, \
                       cuMemImportFromShareableHandle)"
                        .into(),
            })?;
            let fd = fd.try_clone().map_err(|source| Error::Io {
                what: format!("no descriptor for block {} of process {pid}", block.id),
                source,
            })?;
            let Block { id, size, address, .. } = *block;
            found.push((Opened { id, size, address, owner, block: of_owner }, fd));
        }
        let program = &mut cuda_processes[at];
        program.listed.clear();
        for (opened, fd) in found {
            program.blocks.push((opened.id, fd));
            program.opened.push(opened);
        }
    }
    Ok(())
}

/// What a manifest says: the opened blocks of each process that has any.
pub(crate) type ByProcess = Vec<(u32, Vec<Opened>)>;

/// What the manifest is to say.
pub(crate) fn by_process(cuda_processes: &[CudaProcess]) -> ByProcess {
    let having = cuda_processes.iter().filter(|program| !program.opened.is_empty());
    having.map(|program| (program.process.pid, program.opened.clone())).collect()
}

/// Checks what a manifest says: each process once, its own names each once, and blocks that the owners have.
pub(crate) fn is_possible(said: &ByProcess, manifest: &Manifest) -> bool {
    let blocks: HashMap<u32, HashMap<u64, u64>> = manifest
        .processes
        .iter()
        .filter_map(|process| {
            let cuda = process.cuda.as_ref()?;
            Some((process.pid, cuda.blocks.iter().map(|block| (block.id, block.size)).collect()))
        })
        .collect();
    let mut processes = HashSet::new();
    said.iter().all(|(pid, opened)| {
        let Some(own) = blocks.get(pid) else { return false };
        let mut names = HashSet::new();
        processes.insert(*pid)
            && opened.iter().all(|one| {
                let of_owner = blocks.get(&one.owner).and_then(|blocks| blocks.get(&one.block));
                one.owner != *pid
                    && of_owner == Some(&one.size)
                    && names.insert(one.id)
                    && !own.contains_key(&one.id)
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::{block, manifest};

    #[test]
    fn what_a_manifest_says_of_opened_blocks_has_to_be_possible() {
        let mut manifest = manifest();
        manifest.processes[0].cuda = Some(block(Vec::new(), 2 << 20));
        let owner = manifest.processes[0].clone();
        let block = owner.cuda.as_ref().expect("set above").blocks[0].clone();
        let mut second = owner.clone();
        second.pid = owner.pid + 1;
        second.cuda.as_mut().expect("a copy").blocks.clear();
        manifest.processes.push(second);
        let pid = owner.pid + 1;
        let (id, size) = (block.id + 1000, block.size);
        let good = Opened { id, size, address: 1 << 40, owner: owner.pid, block: block.id };
        let said = |opened: &[Opened]| vec![(pid, opened.to_vec())];
        assert!(is_possible(&said(std::slice::from_ref(&good)), &manifest));
        for wrong in [
            Opened { size: size + 1, ..good.clone() },
            Opened { block: 77, ..good.clone() },
            Opened { owner: pid, ..good.clone() },
            Opened { owner: pid + 1, ..good.clone() },
        ] {
            assert!(!is_possible(&said(std::slice::from_ref(&wrong)), &manifest), "{wrong:?}");
        }
        assert!(!is_possible(&said(&[good.clone(), good.clone()]), &manifest), "one name twice");
        let own = Opened { id: block.id, owner: pid, ..good.clone() };
        assert!(!is_possible(&vec![(owner.pid, vec![own])], &manifest), "a name of its own block");
        let twice = [said(std::slice::from_ref(&good)), said(&[])].concat();
        assert!(!is_possible(&twice, &manifest), "one process twice");
        assert!(!is_possible(&vec![(pid + 1, Vec::new())], &manifest), "no such process");
    }
}
