//! The phases `store` and `commit`: CRIU's files and the manifest become part of the image, and it appears.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use gpucr_wire::{ProcessSharing, SHARING_VERSION, Sharing};

use super::attach::Unfinished;
use super::describe;
use super::setback::{Setback, or_keep};
use super::task::Task;
use crate::base::memory;
use crate::base::phase::Phase;
use crate::engine::access::Extent;
use crate::engine::copied_files::Candidates;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::kept_files;
use crate::engine::memory::Saved;
use crate::engine::multicast;
use crate::engine::opened;
use crate::engine::sections;
use crate::engine::{interrupted, launched};
use crate::host::criu::LeftMemory;
use crate::image::{
    Committed, Contents, FileEntry, HeldContents, ImageError, ImageWriter, Manifest, Section,
    unknown_bytes,
};

/// A complete image.
pub(super) struct Commit {
    pub(super) image: Committed,
    /// For how long the programs had been stopped then.
    pub(super) stopped: Duration,
}

/// What of the image is there apart from the memory.
pub(super) struct Staged {
    /// CRIU's files.
    files: Vec<FileEntry>,
    /// What instances may share.
    sharing: Option<Section>,
}

impl Staged {
    /// Takes CRIU's files into the image, and with them files of pages that are elsewhere. `unchanged` are the blocks of
    /// each program that have stayed so.
    pub(super) fn take(
        task: &Task<'_>,
        image: &ImageWriter,
        unchanged: Vec<Vec<Extent>>,
        elsewhere: &[&dyn Contents],
    ) -> Result<Self, Error> {
        let sharing = describe_sharing(task, unchanged);
        let is_elsewhere = |name: &str| elsewhere.iter().any(|file| file.name() == name);
        let reused = |name: &str| task.host.reused(name);
        let mut files =
            image.add_staged(|name| name.ends_with(".img") && !is_elsewhere(name), reused)?;
        for contents in elsewhere {
            let stored = image.add_contents(*contents, reused(contents.name()));
            files.push(stored.map_err(|error| of_reading(task, error))?);
        }
        files.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        Ok(Self { files, sharing })
    }
}

/// Copies private memory that is `left` in the processes aside, so that these can go on: to memory of gpucr's own as far
/// as it has room, otherwise to the files of pages next to CRIU's other files.
///
/// # Errors
/// The memory cannot be read, or a file cannot be written.
pub(super) fn copy_aside(
    task: &mut Task<'_>,
    image: &ImageWriter,
    left: Option<LeftMemory>,
) -> Result<Vec<HeldContents>, Error> {
    let mut room = task.options.host_memory_limit.unwrap_or_else(quarter);
    let mut held = Vec::new();
    for contents in left.iter().flat_map(LeftMemory::files) {
        let known = task.host.reused(contents.name());
        let bytes = unknown_bytes(contents.size(), known);
        let aside = match room.checked_sub(bytes) {
            Some(rest) => {
                room = rest;
                let read = HeldContents::read(contents, known);
                task.host.copied_aside(bytes);
                read.map(|contents| held.push(contents))
            }
            None => image.stage_contents(contents, known),
        };
        aside.map_err(|error| of_reading(task, error))?;
    }
    Ok(held)
}

/// A quarter of the memory that gpucr can have; nothing where nobody knows that.
fn quarter() -> u64 {
    let of_groups = memory::groups().into_iter();
    let rooms = memory::host().ok().map(|host| of_groups.chain([host]).map(|room| room.left).min());
    rooms.flatten().unwrap_or(0) / 4
}

/// Memory is not read any more when gpucr is asked to end.
fn of_reading(task: &Task<'_>, error: ImageError) -> Error {
    let is_stopped = task.options.stop.load(Ordering::Relaxed);
    if is_stopped { Error::Interrupted } else { error.into() }
}

/// What of the memory instances of this program may share. `None` if nothing.
fn describe_sharing(task: &Task<'_>, unchanged: Vec<Vec<Extent>>) -> Option<Section> {
    let of = |(program, unchanged)| {
        let (blocks, summaries) = task.speculation.sharing(program, unchanged);
        ProcessSharing { pid: task.made.cuda_processes[program].process.pid, blocks, summaries }
    };
    let unchanged = unchanged.into_iter().enumerate();
    let processes: Vec<_> = unchanged.map(of).filter(|p| !p.blocks.is_empty()).collect();
    let sharing = Sharing { version: SHARING_VERSION, processes };
    (!sharing.processes.is_empty()).then(|| sections::sharing(&sharing))
}

/// What the manifest says of the processes, which are frozen, and of their memory.
/// Takes copies of files that they write into the image.
///
/// # Errors
/// A copy cannot be written.
pub(super) fn describe(
    task: &Task<'_>,
    image: &Unfinished,
    blocks: Vec<Saved>,
) -> Result<Manifest, Error> {
    let (protocol, libraries) = (task.strategy.protocol(), image.libraries.clone());
    let mut manifest = describe::manifest(task.options, &task.plan, protocol, libraries, blocks);
    let pids = task.plan.processes.iter().map(|process| process.pid);
    let tree = task.plan.tree();
    let (kept, chunks) =
        kept_files::keep(pids, &task.plan.renamed, &tree, task.options.save_files, &image.writer)?;
    manifest.sections.extend(sections::kept_files(&kept, chunks));
    if let Some(peer) = task.options.target.peer().filter(|peer| peer.copies_files()) {
        let pids: Vec<u32> = task.plan.processes.iter().map(|process| process.pid).collect();
        let (renamed, stop) = (&task.plan.renamed, &task.options.stop);
        let candidates = Candidates { pids: &pids, renamed, tree: &tree, stop };
        let (copied, chunks) = candidates.copy(&image.writer, &|path| peer.is_there(path))?;
        manifest.sections.extend(sections::copied_files(&copied, chunks));
    }
    Ok(manifest)
}

/// Completes the manifest and commits. The copy has ended.
pub(super) fn commit(
    task: &mut Task<'_>,
    image: Unfinished,
    mut manifest: Manifest,
    staged: Staged,
) -> Result<Commit, Setback> {
    manifest.sections.extend(staged.sharing);
    manifest.sections.extend(sections::tags(&task.options.tags));
    let of = |program: &CudaProcess| (program.process.pid, program.freed.clone());
    manifest.sections.extend(sections::contexts(task.made.cuda_processes.iter().map(of).collect()));
    let opened = opened::by_process(&task.made.cuda_processes);
    manifest.sections.extend(sections::opened(&opened));
    manifest.sections.extend(multicast::section(&task.made.cuda_processes));
    let launched =
        task.made.cuda_processes.iter().enumerate().map(|(number, program)| {
            (program.process.pid, task.speculation.launched_kernels(number))
        });
    manifest.sections.extend(launched::section(&launched.collect()));
    manifest.sections.extend(interrupted::section(&task.account.interrupted));
    let peer = task.options.target.peer();
    let phase = if peer.is_some() { Phase::Prepare } else { Phase::Commit };
    let (image, ()) = or_keep(image, task.enter(phase, None))?;
    // A restore loads them in this order.
    let cuda = manifest.processes.iter_mut().filter_map(|process| process.cuda.as_mut());
    for (program, cuda) in cuda.enumerate() {
        task.speculation.sort_by_use(program, &mut cuda.blocks);
    }
    let stopped = task.made.standstill.length();
    describe::finish(&mut manifest, staged.files, task.clock.times(), stopped);
    let writer = Arc::try_unwrap(image.writer);
    let writer = writer.map_err(|shared| Setback::new(Error::CopyIncomplete, shared))?;
    let image = writer.commit(&manifest).map_err(|error| Setback::new(error, ()))?;
    if let Some(peer) = peer {
        let decided =
            task.enter(Phase::Decide, None).and_then(|()| peer.decide(|| task.processes()));
        decided.map_err(|error| Setback::new(error, ()))?;
    }
    Ok(Commit { image, stopped: task.made.standstill.length() })
}
