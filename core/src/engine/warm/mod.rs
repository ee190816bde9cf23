//! `gpucr warm`: an image that is kept ready in host memory.
//!
//! [`warm`] is the list of phases. It reads, checks and decompresses an image once; the result is a
//! [`WarmCopy`] in memory without a name, which lives as long as a process has its descriptor: first
//! `gpucr warm`, then a [`Holder`], and every restore that was handed it. So nothing is left, whichever of
//! them dies. A restore finds the copy by the image's identity ([`WarmImage::find`]).

mod copy;
mod holder;
mod loader;
#[cfg(test)]
mod tests;

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

pub use holder::{Holder, SUBCOMMAND, main};

pub(crate) use copy::WarmCopy;

use crate::base::clock::Clock;
use crate::base::format::milliseconds;
use crate::base::memory::{self, Room};
use crate::base::phase::{Phase, PhaseTime};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::sections;
use crate::image::trust::Trust;
use crate::image::verify;
use crate::image::{ImageError, ImageReader, Manifest};
use crate::store::{ChunkId, ChunkSource, Filled, StoreError};
use copy::{Making, WarmPlan};
use holder::{Client, Described, take_name};

/// The most memory that is left for other things if no limit is given; a sixteenth of all, if that is less.
const RESERVE: u64 = 4 << 30;

/// What to make warm, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The image.
    pub image: PathBuf,
    /// Which images are kept.
    pub trust: Trust,
    /// Most bytes of memory that it may take; what is available, less a reserve, if there is none.
    pub memory_limit: Option<u64>,
    /// Open the image's devices and pin the memory, so that the holder loads device memory for restores. That
    /// takes 260 to 530 MiB of each device's memory. Where it cannot be done the image is kept without.
    pub pin: bool,
    /// The copy is kept by the calling process.
    pub foreground: bool,
    /// Set by a signal handler to end it.
    pub stop: Arc<AtomicBool>,
}

/// An image that is kept warm.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Kept {
    /// Its absolute path when it was made warm.
    pub image: String,
    /// Its identity, in hexadecimal digits.
    pub id: String,
    /// Bytes of memory that it takes.
    pub bytes: u64,
    /// Since when, seconds since 1970 UTC.
    pub since: u64,
    /// The process that holds it.
    pub pid: u32,
    /// Restores that it was handed to.
    pub restores: u64,
    /// Whether it is pinned, and its holder loads device memory for restores.
    pub pinned: bool,
    /// Why it is not pinned, if it was to be.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub unpinned: String,
    /// The image is kept by a gpucr of another version: restores by this one do without it, and all that is known is
    /// its identity and the process.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub other_version: bool,
}

impl Kept {
    fn new(described: Described, pid: u32) -> Self {
        let Described { image, id, bytes, since, restores, pinned, unpinned } = described;
        Self { image, id, bytes, since, pid, restores, pinned, unpinned, other_version: false }
    }

    fn of_other_version(id: String, pid: u32) -> Self {
        Self {
            image: String::new(),
            id,
            bytes: 0,
            since: 0,
            pid,
            restores: 0,
            pinned: false,
            unpinned: String::new(),
            other_version: true,
        }
    }
}

/// What [`warm`] did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// What is kept now.
    #[serde(flatten)]
    pub kept: Kept,
    /// Whether it was kept already, so that nothing was to be done.
    pub already: bool,
    /// The whole time.
    pub total_ms: f64,
    /// The phases.
    pub phases: Vec<PhaseTime>,
}

/// Makes an image warm. It is kept until it is dropped, its holder ends, or the host does.
///
/// Returns when restores find it. In the foreground the holder is returned, for the caller to
/// [serve](Holder::serve) with.
///
/// # Errors
///
/// Nothing is kept then, and nothing was changed.
pub fn warm(
    options: &Options,
    progress: &dyn Progress,
) -> Result<(Report, Option<Holder>), Failure> {
    let mut clock = Clock::start(progress);
    run(options, progress, &mut clock).map_err(|error| Failure {
        phase: clock.phase(),
        error: Box::new(error),
        left: Left::Untouched,
    })
}

fn run(
    options: &Options,
    progress: &dyn Progress,
    clock: &mut Clock<'_>,
) -> Result<(Report, Option<Holder>), Error> {
    let stop = Stop::new(options.stop.clone());
    let enter = |clock: &mut Clock<'_>, phase, bytes| {
        if options.stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted);
        }
        Ok(clock.enter(phase, bytes)?)
    };

    enter(clock, Phase::Preflight, None)?;
    require_root()?;
    let path = options.image.canonicalize().unwrap_or_else(|_| options.image.clone());
    let identity = Manifest::identity(&path)?;
    options.trust.check_image(&path, &identity)?;
    let id = crate::base::format::hex(&identity);
    let Some(name) = take_name(&id).map_err(no_name)? else {
        return Ok((already(&path, &id, clock)?, None));
    };
    // Holds the lock of a store, but not for longer than this function.
    let image = ImageReader::open(&path)?;
    sections::check(image.manifest())?;
    if crate::base::format::hex(&image.id()) != id {
        return Err(Error::Damaged { what: "its manifest has just changed".into() });
    }
    let plan = WarmPlan::of(&image);
    check_memory(plan.memory, options.memory_limit)?;

    enter(clock, Phase::Load, Some(plan.chunk_bytes))?;
    let making = Making::begin(&image, plan)?;
    making.load_chunks(&stop, progress).map_err(|error| with_owners(error, &image))?;

    enter(clock, Phase::Extract, None)?;
    making.extract_files().map_err(|error| with_owners(error, &image))?;
    let (root, bytes) = making.finish()?;
    let pin = options.pin && !image.manifest().blocks().is_empty();

    enter(clock, Phase::Hold, None)?;
    let since = SystemTime::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_secs());
    let image = path.to_string_lossy().into_owned();
    let described =
        Described { image, id, bytes, since, restores: 0, pinned: false, unpinned: String::new() };
    let mut holder = Holder::new(name, root, described);
    let failed = |source| Error::Io { what: "cannot hold the warm image".into(), source };
    let (described, pid, holder) = if options.foreground {
        if pin {
            holder.open_devices();
        }
        holder.listen().map_err(failed)?;
        (holder.described().clone(), std::process::id(), Some(holder))
    } else {
        let (described, pid) = holder.in_background(pin).map_err(failed)?;
        (described, pid, None)
    };
    Ok((report(Kept::new(described, pid), false, clock), holder))
}

fn report(kept: Kept, already: bool, clock: &mut Clock<'_>) -> Report {
    clock.end();
    let total_ms = milliseconds(clock.total());
    Report { kept, already, total_ms, phases: clock.times().to_vec() }
}

/// Another process has the name of the image's holder.
fn already(path: &Path, id: &str, clock: &mut Clock<'_>) -> Result<Report, Error> {
    let Some(mut client) = Client::connect(id).map_err(no_name)? else {
        return Err(Error::BeingWarmed { image: path.to_owned() });
    };
    let pid = client.pid;
    if !client.is_trusted() {
        return Err(Error::StrangeHolder { pid, uid: client.uid, id: id.to_owned() });
    }
    let described = client.describe().map_err(|source| match source.kind() {
        ErrorKind::InvalidData => Error::OtherHolder { pid, id: id.to_owned() },
        _ => Error::Holder { pid, source },
    })?;
    Ok(report(Kept::new(described, pid), true, clock))
}

fn no_name(source: std::io::Error) -> Error {
    Error::Io { what: "cannot use the name of a warm image's holder".into(), source }
}

/// File systems without a name are root's alone, and so are restores.
fn require_root() -> Result<(), Error> {
    if rustix::process::geteuid().is_root() { Ok(()) } else { Err(Error::NotRoot) }
}

/// Refuses what would take more memory than it may. A limit that was asked for is one of the host's memory; what a
/// control group does not give cannot be had in any case.
fn check_memory(needed: u64, limit: Option<u64>) -> Result<(), Error> {
    let of_groups = memory::groups().iter().map(|room| room.left).min().unwrap_or(u64::MAX);
    let (allowed, asked) = match limit {
        Some(limit) if limit <= of_groups => (limit, true),
        Some(_) => (of_groups, false),
        None => (available_memory()?, false),
    };
    if needed <= allowed { Ok(()) } else { Err(Error::NoMemory { needed, allowed, asked }) }
}

/// Bytes that the host can do without, and the control groups of this process allow.
fn available_memory() -> Result<u64, Error> {
    let spare = |room: Room| room.left.saturating_sub(RESERVE.min(room.total / 16));
    let of_groups = memory::groups().into_iter().map(spare).min().unwrap_or(u64::MAX);
    Ok(spare(memory::host()?).min(of_groups))
}

/// Says of a damaged chunk what it belongs to, as `gpucr verify` does.
fn with_owners(error: Error, image: &ImageReader) -> Error {
    let (Error::Store(ref source @ StoreError::DamagedChunk { id, .. })
    | Error::Image(ImageError::Store(ref source @ StoreError::DamagedChunk { id, .. }))) = error
    else {
        return error;
    };
    let owners = verify::owners_of(image.manifest(), id);
    let owners: Vec<String> = owners.iter().map(ToString::to_string).collect();
    Error::DamagedPart { what: source.to_string(), owners: owners.join("; ") }
}

/// What is kept on this host, as far as this network namespace can see it, and the holders that did not
/// answer.
#[derive(Debug, serde::Serialize)]
pub struct Listing {
    /// The kept images, in order of the time since when.
    pub kept: Vec<Kept>,
    /// Pids and errors of holders that did not answer.
    pub silent: Vec<(u32, String)>,
}

/// Asks all holders.
///
/// # Errors
/// [`Error::NotRoot`], or the names of holders cannot be read from `/proc`. A holder that does not answer is no error:
/// the listing says so.
pub fn list() -> Result<Listing, Error> {
    require_root()?;
    let mut listing = Listing { kept: Vec::new(), silent: Vec::new() };
    for id in holder::names().map_err(no_name)? {
        // A name without a holder is of an image that is being read just now.
        let Ok(Some(mut client)) = Client::connect(&id) else { continue };
        if !client.is_trusted() {
            tracing::warn!(id, uid = client.uid, pid = client.pid, "claims to hold a warm image");
            continue;
        }
        match client.describe() {
            Ok(described) => listing.kept.push(Kept::new(described, client.pid)),
            // What it says of itself is not in this form.
            Err(error) if error.kind() == ErrorKind::InvalidData => {
                listing.kept.push(Kept::of_other_version(id, client.pid));
            }
            Err(error) => listing.silent.push((client.pid, error.to_string())),
        }
    }
    listing.kept.sort_by(|a, b| (a.since, &a.id).cmp(&(b.since, &b.id)));
    Ok(listing)
}

/// Drops the image that is named by its path, now or when it was made warm, or by the first digits of its
/// identity. On return its memory is free, but for restores that are at work with it.
///
/// # Errors
///
/// [`Error::NotWarm`] if no such image is kept; the holder does not answer.
pub fn drop_image(image: &Path) -> Result<Kept, Error> {
    let kept = list()?.kept;
    let path = image.canonicalize().or_else(|_| std::path::absolute(image));
    let path = path.unwrap_or_else(|_| image.to_owned());
    let identity = Manifest::identity(&path).map(|id| crate::base::format::hex(&id)).ok();
    let digits = image.to_str().filter(|text| text.len() >= 8);
    let is_meant = |kept: &&Kept| match &identity {
        Some(identity) => kept.id == *identity,
        None => {
            Path::new(&kept.image) == path
                || digits.is_some_and(|digits| kept.id.starts_with(digits))
        }
    };
    let meant: Vec<&Kept> = kept.iter().filter(is_meant).collect();
    match meant[..] {
        [kept] => drop_kept(kept),
        _ => Err(Error::NotWarm { image: image.to_owned() }),
    }
}

/// Drops all images that are kept. Goes on after an error, and returns the first.
///
/// # Errors
/// The errors of [`list`], after which nothing was dropped; or [`Error::Holder`], if a holder cannot be asked or does
/// not answer. The images of the others were dropped all the same, but the result does not name them.
pub fn drop_all() -> Result<Vec<Kept>, Error> {
    let (mut dropped, mut first) = (Vec::new(), None);
    for kept in list()?.kept {
        match drop_kept(&kept) {
            Ok(kept) => dropped.push(kept),
            Err(error) => first = first.or(Some(error)),
        }
    }
    first.map_or(Ok(dropped), Err)
}

fn drop_kept(kept: &Kept) -> Result<Kept, Error> {
    let failed = |source| Error::Holder { pid: kept.pid, source };
    match Client::connect(&kept.id).map_err(failed)? {
        Some(mut client) if client.is_trusted() => client.drop_copy().map_err(failed)?,
        // The holder has ended by itself.
        _ => {}
    }
    Ok(kept.clone())
}

/// An image that a restore takes from memory. Only its manifest is read from disk, so the two cannot
/// differ.
pub(crate) struct WarmImage {
    /// What the image says about itself.
    pub(crate) manifest: Manifest,
    /// Its identity.
    pub(crate) id: [u8; 32],
    /// Where it is on disk.
    pub(crate) path: PathBuf,
    /// The rest.
    pub(crate) copy: WarmCopy,
}

impl WarmImage {
    /// Finds the warm copy of the image at `path`. `None` if there is none that can be used; then what is
    /// on disk is to be read, which also tells what is wrong with it.
    pub(crate) fn find(path: &Path) -> Option<Self> {
        let id = Manifest::identity(path).ok()?;
        match Self::take(path, &id) {
            Ok(found) => found,
            Err(error) => {
                tracing::warn!(%error, "the warm copy of the image is not used");
                None
            }
        }
    }

    /// Has the holder load blocks, given by their places among [`Manifest::blocks`], into new memory of the
    /// devices that they were on. Gives descriptors of it. Calls `room` once if there is room for the blocks, and for a
    /// program's contexts besides. `None` if that is not to be had, or has failed: then the bytes are in the copy.
    pub(crate) fn load(
        &self,
        blocks: &[usize],
        stop: &Stop,
        progress: &dyn Progress,
        room: &dyn Fn(),
    ) -> Option<Vec<OwnedFd>> {
        let load = || -> std::io::Result<Option<Vec<OwnedFd>>> {
            let client = Client::connect(&crate::base::format::hex(&self.id))?;
            let Some(mut client) = client.filter(Client::is_trusted) else { return Ok(None) };
            let fds = client.load(blocks, stop, progress, room)?;
            Ok((fds.len() == blocks.len()).then_some(fds))
        };
        load().unwrap_or_else(|error| {
            tracing::info!(%error, "the holder of the warm image loads no device memory");
            None
        })
    }

    fn take(path: &Path, id: &[u8; 32]) -> Result<Option<Self>, Error> {
        let Some(mut client) = Client::connect(&crate::base::format::hex(id)).map_err(no_name)?
        else {
            return Ok(None);
        };
        if !client.is_trusted() {
            let (pid, uid) = (client.pid, client.uid);
            return Err(Error::StrangeHolder { pid, uid, id: crate::base::format::hex(id) });
        }
        let pid = client.pid;
        let root = client.take().map_err(|source| Error::Holder { pid, source })?;
        let (manifest, read) = Manifest::read_with_id(path)?;
        if read != *id {
            return Err(Error::Damaged { what: "its manifest has just changed".into() });
        }
        let copy = WarmCopy::open(root, id, &manifest)?;
        Ok(Some(Self { manifest, id: *id, path: path.to_owned(), copy }))
    }
}

/// The chunks of its copy.
impl ChunkSource for WarmImage {
    fn get(&self, id: &ChunkId, out: &mut [u8]) -> Result<Filled, StoreError> {
        self.copy.get(id, out)
    }
}
