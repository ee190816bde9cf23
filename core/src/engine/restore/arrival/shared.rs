//! `--share`: instances of one image share the device memory that none of them writes.
//!
//! The image says which memory that is: its dump has seen what stayed unchanged and what read it. The first instance
//! loads it like all other memory and makes it known ([`crate::engine::sharing`]); others only map it. All instances
//! map it read-only, and an instance that may write it gets memory of its own first, which the shim sees to
//! (`docs/access-sets.md`). An unforeseen write is an error of the device, and never a wrong result: [`Watch`] tells
//! of it, and the program is restored anew (`restore/supervisor.rs`). That is remembered: the next instance shares
//! nothing (`restore/unshared.rs`).

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use gpucr_wire::access::KernelSummary;
use gpucr_wire::{SHARING_VERSION, Sharing, Stream};

use crate::engine::error::Error;
use crate::engine::sharing::{self, Found, Holder, Member};
use crate::image::{Block, BlockKind};

use super::super::bulk::{self, Loaded};
use super::super::devices::Placement;
use super::super::loading::Loading;
use super::super::report::{Report, Shared};
use super::super::source::Source;
use super::super::unshared;
use super::super::watch::Watch;
use super::{Arrival, Prepared, Programs};

/// Shares memory with other instances of the image.
pub(super) struct SharedArrival {
    /// The process that is to hold the memory if this is the first instance.
    holder: Holder,
    loaded: Option<Loaded>,
    /// What is shared of it, until the agents are told.
    in_use: Option<InUse>,
    watch: Option<Watch>,
    shared: Shared,
}

impl SharedArrival {
    pub(super) fn new(holder: Holder) -> Self {
        Self { holder, loaded: None, in_use: None, watch: None, shared: Shared::default() }
    }
}

impl Arrival for SharedArrival {
    fn brings_blocks_alone(&self) -> bool {
        true
    }

    fn prepare(&mut self, loading: &Loading<'_, '_>) -> Result<Prepared, Error> {
        let Some((loaded, in_use)) = load(loading, &self.holder)? else {
            return Ok(Prepared::NoRoom);
        };
        self.loaded = Some(loaded);
        self.shared = in_use.as_ref().map(InUse::report).unwrap_or_default();
        self.in_use = in_use;
        Ok(Prepared::Ready)
    }

    fn take_loaded(&mut self) -> Option<Loaded> {
        self.loaded.take()
    }

    fn attach(&mut self, programs: &mut Programs<'_>) -> Result<(), Error> {
        if let Some(in_use) = self.in_use.take() {
            let mut watch = Watch::new(in_use.member);
            for (program, (ids, summaries)) in
                programs.cuda_processes.iter_mut().zip(in_use.plan.processes)
            {
                watch.add(program, ids, summaries)?;
            }
            self.watch = Some(watch);
        }
        programs.give(|agent, memory, _| Ok(agent.reattach(memory)?))
    }

    fn report(&self, report: &mut Report) {
        report.shared = Some(self.shared.clone());
    }

    fn take_watch(&mut self) -> Option<Watch> {
        self.watch.take()
    }
}

impl InUse {
    fn report(&self) -> Shared {
        Shared { bytes: self.plan.bytes, joined: self.joined, fallen_back: None }
    }
}

/// What may be shared of an image.
struct SharePlan {
    /// For each process that used CUDA: ids of blocks, and what is known of kernels.
    processes: Vec<(Vec<u64>, Vec<KernelSummary>)>,
    /// The blocks that may be shared, by their places among all.
    blocks: Vec<usize>,
    bytes: u64,
    /// The name under which the memory is found: unlike the name for another image, or for other devices.
    name: String,
}

/// Memory that is shared.
struct InUse {
    plan: SharePlan,
    member: Member,
    joined: bool,
}

impl SharePlan {
    /// `None` if the image says nothing of that.
    fn of(image: &Source, placement: &Placement) -> Result<Option<Self>, Error> {
        let Some(bytes) = image.sharing()? else { return Ok(None) };
        // Another version of it is no reason not to restore the program.
        let said = Sharing::from_bytes(&bytes).ok().filter(|said| said.version == SHARING_VERSION);
        let mut said = said.map_or_else(Vec::new, |said| said.processes);
        let mut plan =
            Self { processes: Vec::new(), blocks: Vec::new(), bytes: 0, name: String::new() };
        let mut name = blake3::Hasher::new();
        name.update(&image.id());
        let mut place = 0;
        for (process, blocks) in bulk::cuda_processes(&image.manifest().processes) {
            let of_process = said.iter().position(|said| said.pid == process.pid);
            let of_process = of_process.map(|at| said.swap_remove(at)).unwrap_or_default();
            let known: HashSet<u64> = of_process.blocks.into_iter().collect();
            let may_be = |block: &Block| block.kind == BlockKind::Heap && known.contains(&block.id);
            let mut ids = Vec::new();
            for block in blocks {
                if may_be(block) {
                    ids.push(block.id);
                    plan.blocks.push(place);
                    plan.bytes += block.size;
                    name.update(&placement.of(&block.device));
                }
                place += 1;
            }
            plan.processes.push((ids, of_process.summaries));
        }
        plan.name = name.finalize().to_hex().to_string();
        Ok((!plan.blocks.is_empty()).then_some(plan))
    }
}

/// Loads all blocks, except shared ones that are there already. Where nothing can be
/// shared it loads all of them.
fn load(
    loading: &Loading<'_, '_>,
    holder: &Holder,
) -> Result<Option<(Loaded, Option<InUse>)>, Error> {
    let &Loading { image, stop, progress, .. } = loading;
    let manifest = image.manifest();
    let all: Vec<usize> = (0..manifest.blocks().len()).collect();
    let alone = || -> Result<_, Error> { Ok(loading.all()?.map(|loaded| (loaded, None))) };
    if let Some(file) = unshared::said(&image.id()) {
        let file = file.display();
        tracing::warn!(%file, "an instance wrote shared memory; nothing is shared while this file exists");
        return alone();
    }
    let Some(plan) = SharePlan::of(image, &loading.placement()?)? else {
        tracing::warn!("the image does not say what can be shared; nothing is");
        return alone();
    };
    let found = match sharing::find(&plan.name, stop) {
        Ok(Found::Memory(_, held)) if held.len() != plan.blocks.len() => {
            tracing::warn!("the memory kept for this image is not the image's; nothing is shared");
            return alone();
        }
        Ok(found) => found,
        Err(_) if stop.is_set() => return Err(Error::Interrupted),
        Err(error) => {
            tracing::warn!(%error, "nothing is shared");
            return alone();
        }
    };
    match found {
        Found::Nothing(name) => {
            let Some(fds) = loading.load(&all)? else { return Ok(None) };
            let shared = plan.blocks.iter().map(|block| fds[*block].try_clone());
            let held = shared
                .collect::<std::io::Result<Vec<_>>>()
                .and_then(|shared| sharing::hold(holder, name, &shared));
            let in_use = match held {
                Ok((member, held)) => {
                    if let Err(error) = held {
                        tracing::warn!(%error, "other instances may not find the memory");
                    }
                    Some(InUse { plan, member, joined: false })
                }
                Err(error) => {
                    tracing::warn!(%error, "nothing is shared");
                    None
                }
            };
            Ok(Some((bulk::by_process(manifest, fds)?, in_use)))
        }
        Found::Memory(member, held) => {
            let mut fds: Vec<Option<OwnedFd>> = all.iter().map(|_| None).collect();
            plan.blocks.iter().zip(held).for_each(|(block, fd)| fds[*block] = Some(fd));
            progress.advance(plan.bytes);
            let own: Vec<usize> = all.into_iter().filter(|block| fds[*block].is_none()).collect();
            let Some(loaded) = loading.load(&own)? else { return Ok(None) };
            let mut loaded = loaded.into_iter();
            let fds = fds.into_iter().map(|fd| fd.or_else(|| loaded.next()));
            let fds = fds.collect::<Option<Vec<_>>>().ok_or(Error::CopyIncomplete)?;
            let in_use = InUse { plan, member, joined: true };
            Ok(Some((bulk::by_process(manifest, fds)?, Some(in_use))))
        }
    }
}
