//! The device's side of a warm image: what a holder keeps open so that a restore finds its memory loaded as
//! fast as PCIe brings it.
//!
//! A restore by itself has to open the device, make a context there, and bring every byte into pinned memory
//! first. A [`Loader`] has all that: the copy is pinned where it lies. It copies from there into new device
//! memory, checks that on the device, and gives descriptors of it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::copy::{Place, WarmCopy};
use crate::base::faults::fault;
use crate::base::stop::Stop;
use crate::cuda::span::spans_on;
use crate::cuda::{Context, Driver, DriverError, Event, Hasher, Pinned, SharedBlock, Span, Stream};
use crate::engine::error::Error;
use crate::image::{Block, Manifest};
use crate::store::ChunkId;

/// Most bytes that are copied at once: PCIe carried 50 GB/s in pieces of 2 MiB, and 54 GB/s in pieces of 16 MiB
/// and more.
const PIECE: u64 = 64 << 20;
/// After so many bytes it is told how far the load is, and seen whether a client still wants it.
const STEP: u64 = 512 << 20;
/// So much of a device's memory, but not more than a sixteenth of all, has to be free besides what was loaded:
/// what the driver needs for a program's own context. Else the loader's context makes room for it.
const LEFT: u64 = 2 << 30;

/// What is told of a load.
pub(super) enum Told {
    /// The devices have room for the blocks, and for a program's contexts besides.
    Room,
    /// So many bytes more are loaded.
    Loaded(u64),
}

/// Told of a load while it goes on. An error ends the load.
pub(super) type Tell<'a> = dyn Fn(Told) -> io::Result<()> + Sync + 'a;

/// Contexts on the devices of an image, and its copy in pinned memory.
pub(super) struct Loader {
    /// None if no chunk has data. Let go of before the copy and the contexts.
    pinned: Option<Pinned>,
    copy: WarmCopy,
    manifest: Manifest,
    devices: Vec<Device>,
}

/// One of the image's devices.
struct Device {
    context: Arc<Context>,
    hasher: Mutex<Hasher>,
}

impl Loader {
    /// Opens the devices of the image at `path` and pins the copy of it whose root is `root`. It takes 260 to
    /// 530 MiB of each device's memory.
    ///
    /// # Errors
    /// The driver or a device is not there, or is for one process alone; the driver pins no memory that cannot
    /// be written. Nothing is kept then.
    pub(super) fn open(path: &Path, id: &str, root: OwnedFd) -> Result<Self, Error> {
        let (manifest, read) = Manifest::read_with_id(path)?;
        if crate::base::format::hex(&read) != id {
            return Err(Error::Damaged { what: "its manifest has just changed".into() });
        }
        let copy = WarmCopy::open(root, &read, &manifest)?;
        let driver = crate::engine::restore::driver::open_same(&manifest.driver)?;
        Self::with(&driver, manifest, copy)
    }

    /// Opens the devices and pins the copy, where copy and driver are open.
    pub(super) fn with(
        driver: &Arc<Driver>,
        manifest: Manifest,
        copy: WarmCopy,
    ) -> Result<Self, Error> {
        let present = driver.devices()?;
        let mut used: Vec<[u8; 16]> = manifest.blocks().iter().map(|block| block.device).collect();
        used.sort_unstable();
        used.dedup();
        let mut devices = Vec::with_capacity(used.len());
        for uuid in &used {
            let pid = manifest.processes[0].pid;
            let device = present.iter().find(|device| device.uuid == *uuid);
            let device = device
                .ok_or_else(|| Error::NoDevice { pid, device: crate::base::format::hex(uuid) })?;
            if !driver.is_shared(device)? {
                return Err(Error::NotShared { device: device.name.clone() });
            }
            let context = Context::create(driver, device)?;
            let hasher = Mutex::new(Hasher::prepare(&context)?);
            devices.push(Device { context, hasher });
        }
        let chunks = copy.chunks();
        let pinned = match devices.first().filter(|_| chunks.len() > 0) {
            Some(device) => {
                // SAFETY: the mapping belongs to `copy`, which is dropped after `pinned`.
                let pinned =
                    unsafe { Pinned::new(&device.context, chunks.address(), chunks.len()) };
                Some(pinned?)
            }
            None => None,
        };
        Ok(Self { pinned, copy, manifest, devices })
    }

    /// Loads blocks, given by their places among [`Manifest::blocks`], into new memory of the devices that they
    /// were on. Gives descriptors of it; and whether the devices have become short of memory, so that this
    /// loader had better go.
    ///
    /// # Errors
    /// There is no room; what has arrived is not what it should be; `tell` failed. Nothing is kept then.
    pub(super) fn load(
        &self,
        wanted: &[usize],
        tell: &Tell<'_>,
    ) -> Result<(Vec<OwnedFd>, bool), Error> {
        let all = self.manifest.blocks();
        let blocks = wanted.iter().map(|place| all.get(*place).copied());
        let blocks = blocks.collect::<Option<Vec<_>>>().ok_or(Error::CopyIncomplete)?;
        let mut memory = Vec::with_capacity(blocks.len());
        for block in &blocks {
            let is_its = |device: &&Device| device.context.device().uuid == block.device;
            let device = self.devices.iter().find(is_its).ok_or(Error::CopyIncomplete)?;
            memory.push(SharedBlock::allocate(&device.context, block.size)?);
        }
        if !self.is_short()? {
            tell(Told::Room).map_err(gone)?;
        }
        fault("holder")?;
        let stop = Stop::new(Arc::default());
        std::thread::scope(|scope| {
            let of = |device| {
                let work =
                    Work { loader: self, blocks: &blocks, memory: &memory, tell, stop: &stop };
                scope.spawn(move || {
                    let loaded = work.load(device);
                    if loaded.is_err() {
                        work.stop.fail();
                    }
                    loaded
                })
            };
            let threads: Vec<_> = self.devices.iter().map(of).collect();
            let joined = threads.into_iter().map(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            });
            // All devices are waited for before the memory goes. What has failed comes before what was ended
            // because of it.
            let mut ended: Vec<Result<(), Error>> = joined.collect();
            ended.sort_by_key(
                |ended| !matches!(ended, Err(error) if !matches!(error, Error::Interrupted)),
            );
            ended.into_iter().collect::<Result<(), Error>>()
        })?;
        let fds = memory.iter().map(SharedBlock::export).collect::<Result<_, _>>()?;
        Ok((fds, self.is_short()?))
    }

    fn is_short(&self) -> Result<bool, DriverError> {
        for Device { context, .. } in &self.devices {
            if context.free_memory()? < LEFT.min(context.device().memory / 16) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// A load, as each of the devices sees it.
#[derive(Clone, Copy)]
struct Work<'a> {
    loader: &'a Loader,
    blocks: &'a [&'a Block],
    /// The new memory of these.
    memory: &'a [SharedBlock],
    tell: &'a Tell<'a>,
    stop: &'a Stop,
}

/// A range of device memory that is copied or filled at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LoadPiece {
    from: Place,
    to: u64,
    len: u64,
}

impl Work<'_> {
    fn load(&self, device: &Device) -> Result<(), Error> {
        device.context.enter()?;
        let spans = spans_on(self.memory, &device.context.device().uuid);
        let stream = Stream::create(&device.context)?;
        let copied = self.copy(&stream, &spans);
        // Nothing may be under way when the memory goes, whatever has failed.
        stream.synchronize()?;
        copied?;
        if self.stop.is_set() {
            return Err(Error::Interrupted);
        }
        self.check(device, &spans)
    }

    fn id(&self, span: &Span) -> &ChunkId {
        &self.blocks[span.block].chunks[span.chunk]
    }

    fn copy(&self, stream: &Stream, spans: &[Span]) -> Result<(), Error> {
        let mut pieces = Vec::new();
        for span in spans {
            let from = self.loader.copy.place(self.id(span)).ok_or(Error::CopyIncomplete)?;
            join(&mut pieces, LoadPiece { from, to: span.address, len: span.len as u64 });
        }
        // While one step is under way the next is there already.
        let events = [Event::create(stream.context())?, Event::create(stream.context())?];
        let (mut step, mut before, mut turn) = (0, None, 0);
        for piece in pieces {
            if self.stop.is_set() {
                return Ok(());
            }
            let (to, len) = (piece.to, piece.len as usize);
            match (piece.from, &self.loader.pinned) {
                (Place::Constant(byte), _) => stream.fill(to, byte, len)?,
                (Place::At(at), Some(pinned)) => stream.copy_from(pinned, at as usize, to, len)?,
                (Place::At(_), None) => return Err(Error::CopyIncomplete),
            }
            step += piece.len;
            if step >= STEP {
                stream.record(&events[turn % 2])?;
                if let Some(before) = before.replace(step) {
                    events[(turn + 1) % 2].wait()?;
                    self.tell(before)?;
                }
                (step, turn) = (0, turn + 1);
            }
        }
        stream.synchronize()?;
        self.tell(before.unwrap_or(0) + step)
    }

    fn tell(&self, bytes: u64) -> Result<(), Error> {
        (self.tell)(Told::Loaded(bytes)).map_err(gone)
    }

    fn check(&self, device: &Device, spans: &[Span]) -> Result<(), Error> {
        let places: Vec<_> = spans.iter().map(|span| (span.address, span.len)).collect();
        let hashes = device.hasher.lock().hash(&places)?;
        let mut checked = spans.iter().zip(hashes);
        match checked.find(|(span, hashed)| hashed.id != *self.id(span)) {
            None => Ok(()),
            Some((span, _)) => {
                let block = self.blocks[span.block].id;
                Err(Error::WrongCopy { what: format!("chunk {} of block {block}", span.chunk) })
            }
        }
    }
}

fn gone(source: io::Error) -> Error {
    Error::Io { what: "cannot tell of the load".into(), source }
}

/// Adds a piece; what follows the last one on both sides becomes part of it.
fn join(pieces: &mut Vec<LoadPiece>, next: LoadPiece) {
    if let Some(last) = pieces.last_mut()
        && last.to + last.len == next.to
        && last.len + next.len <= PIECE
    {
        let follows = match (last.from, next.from) {
            (Place::At(at), Place::At(from)) => at + last.len == from,
            (Place::Constant(byte), Place::Constant(same)) => byte == same,
            _ => false,
        };
        if follows {
            last.len += next.len;
            return;
        }
    }
    pieces.push(next);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(from: Place, to: u64, len: u64) -> LoadPiece {
        LoadPiece { from, to, len }
    }

    #[test]
    fn what_follows_on_both_sides_is_copied_at_once() {
        let chunk = 2 << 20;
        let joined = |next: &[LoadPiece]| {
            let mut pieces = Vec::new();
            next.iter().for_each(|next| join(&mut pieces, *next));
            pieces
        };
        let at = |from, to| piece(Place::At(from * chunk), to * chunk, chunk);
        let same = |byte, to| piece(Place::Constant(byte), to * chunk, chunk);
        let whole = |from, to, chunks| LoadPiece { len: chunks * chunk, ..at(from, to) };
        assert_eq!(joined(&[at(3, 10), at(4, 11), at(5, 12)]), [whole(3, 10, 3)]);
        // A gap here or there, or the other way round.
        for apart in [[at(3, 10), at(5, 11)], [at(3, 10), at(4, 12)], [at(4, 11), at(3, 10)]] {
            assert_eq!(joined(&apart), apart);
        }
        assert_eq!(joined(&[same(0, 1), same(0, 2)]), [LoadPiece { len: 2 * chunk, ..same(0, 1) }]);
        for apart in [[same(0, 1), same(1, 2)], [same(0, 1), at(0, 2)], [at(0, 1), same(0, 2)]] {
            assert_eq!(joined(&apart), apart);
        }
        let most = PIECE / chunk;
        let many: Vec<_> = (0..most + 2).map(|n| at(n, n)).collect();
        assert_eq!(joined(&many), [whole(0, 0, most), whole(most, most, 2)]);
    }
}
