//! `--share`: instances of one image share the device memory that none of them writes.
//!
//! Which that is, the image says: its dump has seen what held still and what read it. The first instance
//! loads it like all other memory and makes it known ([`crate::engine::sharing`]); others only map it. All of them map
//! it read-only, and whoever may write it gets memory of its own first, which the shim sees to
//! (`docs/access-sets.md`). A write that nobody foresaw is an error of the device, and never a wrong result:
//! [`Watch`] tells of it, and [`super::restore_unshared`] follows. That is remembered: the next instance shares
//! nothing (`unshared.rs`).

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::time::Duration;

use gpucr_wire::access::Habits;
use gpucr_wire::table::Range;
use gpucr_wire::{SHARING_VERSION, Sharing, Stream, Table};
use rustix::event::{PollFd, PollFlags};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::engine::error::Error;
use crate::engine::held::Held;
use crate::engine::sharing::{self, Found, Holder, Member};
use crate::host::process::tree::raw_pid;
use crate::image::{Block, BlockKind};

use super::bulk::{self, Loaded};
use super::devices::Placement;
use super::load::Loading;
use super::source::Source;

/// How often it is looked whether a program has written what it shares; and how long such a program waits at
/// most before it is ended.
const LOOK: Duration = Duration::from_millis(250);

/// What sharing did.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct Shared {
    /// Bytes of device memory that the program shares when it goes on.
    pub bytes: u64,
    /// Whether they were there already, so that they were not loaded.
    pub joined: bool,
    /// Why the program was ended and restored anew, with all memory its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fallen_back: Option<String>,
}

/// What may be shared of an image.
struct Plan {
    /// Of each process that used CUDA: ids of blocks, and what is known of kernels.
    processes: Vec<(Vec<u64>, Vec<Habits>)>,
    /// These blocks, by their places among all.
    blocks: Vec<usize>,
    bytes: u64,
    /// Under which it is found: unlike that of another image, or of other devices.
    name: String,
}

/// Memory that is shared.
pub(super) struct InUse {
    plan: Plan,
    member: Member,
    joined: bool,
}

impl Plan {
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
            plan.processes.push((ids, of_process.habits));
        }
        plan.name = name.finalize().to_hex().to_string();
        Ok((!plan.blocks.is_empty()).then_some(plan))
    }
}

/// Loads all blocks, but those that are shared and there already. Where nothing can be
/// shared it loads all of them.
pub(super) fn load(
    loading: &Loading<'_, '_>,
    holder: &Holder,
) -> Result<Option<(Loaded, Option<InUse>)>, Error> {
    let &Loading { image, stop, progress, .. } = loading;
    let manifest = image.manifest();
    let all: Vec<usize> = (0..manifest.blocks().len()).collect();
    let alone = || -> Result<_, Error> { Ok(loading.all()?.map(|loaded| (loaded, None))) };
    if let Some(file) = super::unshared::said(&image.id()) {
        let file = file.display();
        tracing::warn!(%file, "an instance has written what it shared; nothing is shared while there is this file");
        return alone();
    }
    let Some(plan) = Plan::of(image, &loading.placement()?)? else {
        tracing::warn!("the image does not say what can be shared; nothing is");
        return alone();
    };
    let found = match sharing::find(&plan.name, stop) {
        Ok(Found::Memory(_, held)) if held.len() != plan.blocks.len() => {
            tracing::warn!("other memory is held in the name of this image; nothing is shared");
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
            Ok(Some((bulk::by_process(manifest, fds), in_use)))
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
            Ok(Some((bulk::by_process(manifest, fds), Some(in_use))))
        }
    }
}

impl InUse {
    /// What the report says.
    pub(super) fn report(&self) -> Shared {
        Shared { bytes: self.plan.bytes, joined: self.joined, fallen_back: None }
    }

    /// Tells the agents, whose programs are detached, what of the memory that they are about to get is shared.
    pub(super) fn begin(self, held: &mut [Held]) -> Result<Watch, Error> {
        let mut tables = Vec::new();
        for (program, (ids, habits)) in held.iter_mut().zip(self.plan.processes) {
            let Some(agent) = program.agent.as_mut().filter(|_| !ids.is_empty()) else { continue };
            let io = |source| Error::Io { what: "cannot share a table".into(), source };
            let (table, file) = Table::create(vec![Range::WHOLE; ids.len()]).map_err(io)?;
            (0..ids.len()).for_each(|range| table.chunks(range).pend(0));
            let watched = Watched { pid: program.process.pid, blocks: ids.len(), table, file };
            let told = agent.share(ids, habits, &watched.file);
            if super::unless_ended(&program.process, told)?.is_none() {
                continue;
            }
            // From here on there is somebody to be told.
            watched.table.header().look();
            tables.push(watched);
        }
        Ok(Watch { member: self.member, tables })
    }
}

/// Sees whether instances have written memory that they share. While it lives further instances find that
/// memory.
#[derive(Debug)]
pub struct Watch {
    member: Member,
    tables: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    pid: u32,
    blocks: usize,
    table: Table,
    file: OwnedFd,
}

impl Watch {
    /// Why the program cannot go on, if it has written what it shares. To be asked a few times a second: if
    /// nobody asks the program gets the error itself.
    pub fn look(&self) -> Option<Error> {
        // All of them: that somebody looks is seen in each.
        let faults: Vec<_> = self.tables.iter().map(|w| (w.pid, w.table.header().look())).collect();
        let wrote =
            |(pid, code): (u32, Option<u32>)| Some(Error::WroteShared { pid, code: code? as i32 });
        faults.into_iter().find_map(wrote)
    }

    /// Looks until the program cannot go on; says why.
    pub fn until_fault(&self) -> Error {
        loop {
            if let Some(error) = self.look() {
                return error;
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Gives the memory up, after the program was ended.
    pub(super) fn leave(self) {
        self.member.leave();
    }

    /// Looks until process `pid` has ended, or the program cannot go on; says why. One that was killed has
    /// ended, whatever it had written.
    pub fn until_end(&self, pid: u32) -> Option<Error> {
        let pid = raw_pid(pid)?;
        // Without one: looking now and then is the way out.
        let process = pidfd_open(pid, PidfdFlags::empty()).ok();
        loop {
            if let Some(error) = self.look() {
                return Some(error);
            }
            let Some(process) = &process else {
                std::thread::sleep(LOOK);
                rustix::process::test_kill_process(pid).ok()?;
                continue;
            };
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: LOOK.subsec_nanos().into() };
            let mut poll = [PollFd::new(process, PollFlags::IN)];
            if matches!(rustix::event::poll(&mut poll, Some(&time)), Ok(ready) if ready > 0) {
                // It may have ended because of that.
                return self.look().filter(|_| !super::demand::was_killed(pid));
            }
        }
    }

    /// What this process, when it becomes another program, has to tell that one for
    /// [`from_arguments`](Self::from_arguments). The descriptors stay open then.
    ///
    /// # Errors
    /// None that the kernel documents.
    pub fn into_arguments(self) -> std::io::Result<Vec<String>> {
        let Self { member, tables } = self;
        let mut arguments = vec![sharing::keep(&member)?.to_string()];
        for Watched { pid, blocks, file, .. } in &tables {
            arguments.push(format!("{pid}:{blocks}:{}", sharing::keep(file)?));
        }
        std::mem::forget((member, tables));
        Ok(arguments)
    }

    /// Goes on with what [`into_arguments`](Self::into_arguments) has given.
    ///
    /// # Errors
    /// It is not that.
    ///
    /// # Safety
    /// The descriptors that it names belong to nobody else.
    pub unsafe fn from_arguments(arguments: &[String]) -> std::io::Result<Self> {
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let number = |text: &str| text.parse::<u32>().map_err(|_| invalid());
        let fd = |text: &str| -> std::io::Result<OwnedFd> {
            let fd = number(text)? as i32;
            // SAFETY: the caller's duty.
            let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
            Ok(fd)
        };
        let (member, tables) = arguments.split_first().ok_or_else(invalid)?;
        let table = |text: &String| {
            let parts: Vec<&str> = text.split(':').collect();
            let &[pid, blocks, file] = &parts[..] else { return Err(invalid()) };
            let (pid, blocks, file) = (number(pid)?, number(blocks)? as usize, fd(file)?);
            let table = Table::open(&file, vec![Range::WHOLE; blocks])?;
            Ok(Watched { pid, blocks, table, file })
        };
        let tables = tables.iter().map(table).collect::<Result<_, _>>()?;
        Ok(Self { member: fd(member)?.into(), tables })
    }
}
