//! Freeing what no image of a shared store needs, and merging what is small: mark, repack, sweep.
//!
//! `docs/image-format.md` ("How a gc works") has the steps and the argument why a crash between
//! any two harms no image. Marking and repacking run while dumps and restores do; the sweep waits
//! until it has the store alone, and is short.

mod plan;

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::disk::Disk;
use super::index::{Index, PackId, WriterId};
use super::lock::LockFile;
use super::reader::ChunkReader;
use super::shared::{GC_LOCK, SharedStore, all_names};
use super::stored_chunks::StoredChunks;
use super::writer::ChunkWriter;
use super::{ChunkId, Compression, Entry, StoreError, io_error};
use crate::base::progress::Progress;

use plan::{Fate, GcPlan, Segment, Spared};

/// Segments are replaced together by a new one that has about so many chunks at most.
const GROUP: usize = 4 << 20;

/// How a gc is done.
pub(crate) struct GcOptions<'a> {
    /// How long to wait for dumps and restores to end before the sweep.
    pub(crate) patience: Duration,
    /// Asked now and then whether to give up.
    pub(crate) stop: &'a dyn Fn() -> bool,
}

/// What a gc found and did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
pub struct GcReport {
    /// Images of the store.
    pub images: u64,
    /// Different chunks that they need.
    pub chunks: u64,
    /// Chunks that they need and the store does not have: those images are damaged.
    pub missing_chunks: u64,
    /// Bytes of the packs that are left.
    pub kept_bytes: u64,
    /// Bytes of all that was removed, less those that were written to move chunks.
    pub freed_bytes: u64,
    /// Bytes that were written to move chunks out of packs that were small or mostly dead.
    pub moved_bytes: u64,
    /// Packs that were removed.
    pub removed_packs: u64,
}

/// Frees what is in no image of the store in `dir`. `marks` gives the chunks that the image in a
/// directory needs.
///
/// After a failure no image has lost anything, and the next gc does what is left.
pub(crate) fn collect<E: From<StoreError>>(
    disk: &Arc<dyn Disk>,
    dir: &Path,
    marks: &dyn Fn(&Path) -> Result<Vec<ChunkId>, E>,
    options: &GcOptions<'_>,
    progress: &dyn Progress,
) -> Result<GcReport, E> {
    let store = SharedStore::open_at_once(dir)?;
    let gc_lock = LockFile::open(&store.dir().join(GC_LOCK))?;
    gc_lock.exclude(Duration::ZERO, &|| false)?;
    let gc = Gc { disk, store: &store, options };

    progress.phase("mark", None);
    let segments = gc.read_segments()?;
    let mut live = Live::default();
    live.mark(&store, marks)?;
    let plan = GcPlan::make(&store, &segments, &live.chunks);

    progress.phase("repack", Some(plan.moving_bytes()));
    let mut report = GcReport { missing_chunks: plan.missing, ..GcReport::default() };
    let (victims, written) = gc.replace(&segments, plan, progress)?;
    report.moved_bytes = written;

    progress.phase("wait", None);
    let _queue = store.have_alone(options.patience, options.stop)?;
    progress.phase("sweep", None);
    let newly = live.mark(&store, marks)?;
    let victims = gc.spare(&segments, victims, &newly)?;
    let removed = gc.sweep(&segments, &victims, &mut report)?;
    report.freed_bytes = removed.saturating_sub(written);
    report.images = live.seen.len() as u64;
    report.chunks = live.chunks.len() as u64;
    Ok(report)
}

/// The chunks that images need.
#[derive(Default)]
struct Live {
    chunks: HashSet<ChunkId>,
    /// The images that were read, by path and by what tells one manifest from another.
    seen: HashMap<PathBuf, (u64, i64, i64, u64)>,
}

impl Live {
    /// Reads the images that were not read yet. Returns the chunks that were not live before.
    fn mark<E: From<StoreError>>(
        &mut self,
        store: &SharedStore,
        marks: &dyn Fn(&Path) -> Result<Vec<ChunkId>, E>,
    ) -> Result<HashSet<ChunkId>, E> {
        let mut newly = HashSet::new();
        let dirs = store.image_dirs()?;
        let there: HashSet<&PathBuf> = dirs.iter().collect();
        self.seen.retain(|dir, _| there.contains(dir));
        for dir in &dirs {
            let meta = std::fs::metadata(dir.join("manifest")).ok();
            let key = meta.map(|m| (m.ino(), m.mtime(), m.mtime_nsec(), m.len()));
            if key.is_some() && self.seen.get(dir) == key.as_ref() {
                continue;
            }
            let chunks = match marks(dir) {
                Ok(chunks) => chunks,
                // Removed since it was listed.
                Err(_) if !dir.exists() => continue,
                Err(error) => return Err(error),
            };
            newly.extend(chunks.into_iter().filter(|id| self.chunks.insert(*id)));
            self.seen.insert(dir.clone(), key.unwrap_or_default());
        }
        Ok(newly)
    }
}

struct Gc<'a> {
    disk: &'a Arc<dyn Disk>,
    store: &'a SharedStore,
    options: &'a GcOptions<'a>,
}

impl Gc<'_> {
    /// All segments. They are durable: what is chosen in them can be relied on.
    fn read_segments(&self) -> Result<Vec<Segment>, StoreError> {
        let paths = self.store.segments()?;
        self.sync(&self.store.index())?;
        let read = |path: PathBuf| Ok(Segment { index: Index::read(&path)?, path });
        paths.into_iter().map(read).collect()
    }

    /// Moves the chosen chunks of packs that are to go, and writes new segments for what is
    /// to stay of the victims. Returns these, by number, and the bytes that were written.
    fn replace(
        &self,
        segments: &[Segment],
        mut plan: GcPlan,
        progress: &dyn Progress,
    ) -> Result<(Vec<usize>, u64), StoreError> {
        self.keep_damaged(segments, &mut plan)?;
        let is_victim = |number: &usize| plan.is_victim(*number, &segments[*number]);
        let victims: Vec<usize> = (0..segments.len()).filter(is_victim).collect();
        // A pack that another segment names, which stays, needs no new record.
        let mut named: HashSet<PackId> = HashSet::new();
        for (number, segment) in segments.iter().enumerate() {
            if victims.binary_search(&number).is_err() {
                named.extend(segment.index.packs.iter().map(|info| info.id));
            }
        }
        let mut written = 0;
        let mut rest = victims.as_slice();
        while !rest.is_empty() {
            let mut size = 0;
            let fits = |number: &&usize| {
                size += segments[**number].index.entries.len();
                size <= GROUP
            };
            let count = rest.iter().take_while(fits).count().max(1);
            let (group, later) = rest.split_at(count);
            written += self.replace_group(segments, group, &plan, &mut named, progress)?;
            rest = later;
        }
        Ok((victims, written))
    }

    /// Reads what is relied on before anything is dropped. A pack stays as it is if a chunk that is
    /// to move out of it is damaged, or if the only other copy of one of its chunks is.
    fn keep_damaged(&self, segments: &[Segment], plan: &mut GcPlan) -> Result<(), StoreError> {
        let packs = self.store.packs();
        for (id, entries) in plan.moving(segments, |_| true) {
            self.check_stop()?;
            let opened = ChunkReader::open_pack(&packs, plan.packs[&id].info, entries);
            if !opened.is_ok_and(|reader| reader.verify().is_empty()) {
                plan.pin(id);
            }
        }
        for (_, (info, spared)) in plan.relied_on(segments) {
            self.check_stop()?;
            let copies = spared.iter().map(|s| s.copy).collect();
            let damaged: Option<HashSet<ChunkId>> = ChunkReader::open_pack(&packs, info, copies)
                .ok()
                .map(|reader| reader.verify().into_iter().map(|damage| damage.id).collect());
            for Spared { copy, dropped } in spared {
                if damaged.as_ref().is_none_or(|damaged| damaged.contains(&copy.id)) {
                    plan.pin(dropped);
                }
            }
        }
        Ok(())
    }

    fn replace_group(
        &self,
        segments: &[Segment],
        group: &[usize],
        plan: &GcPlan,
        named: &mut HashSet<PackId>,
        progress: &dyn Progress,
    ) -> Result<u64, StoreError> {
        let place = self.store.place_knowing(
            self.disk.clone(),
            WriterId::random(),
            StoredChunks::default(),
        );
        let writer = ChunkWriter::start_lanes(place, Compression::None, 1);
        let mut older = Index::default();
        let mut taken: HashMap<ChunkId, usize> = HashMap::new();
        for &number in group {
            let segment = &segments[number];
            let mut places: HashMap<PackId, u32> = HashMap::new();
            for info in &segment.index.packs {
                if plan.fate(info.id) == Fate::Keep && named.insert(info.id) {
                    places.insert(info.id, older.packs.len() as u32);
                    older.packs.push(*info);
                }
            }
            for (place, entry) in segment.index.entries.iter().enumerate() {
                let chosen = plan.chosen.get(&entry.id) == Some(&(number, place));
                if !chosen && plan.is_moving(segments, &entry.id) {
                    continue;
                }
                let pack = match segment.pack(entry) {
                    None if !chosen => continue,
                    None => 0,
                    Some(info) => match places.get(&info.id) {
                        Some(pack) => *pack,
                        None => continue,
                    },
                };
                let entry = Entry { pack, ..*entry };
                match taken.get(&entry.id) {
                    None => {
                        taken.insert(entry.id, older.entries.len());
                        older.entries.push(entry);
                    }
                    // Each chunk once, and where it was chosen.
                    Some(&at) if chosen => older.entries[at] = entry,
                    Some(_) => {}
                }
            }
        }
        for (id, entries) in plan.moving(segments, |number| group.contains(&number)) {
            let reader =
                ChunkReader::open_pack(&self.store.packs(), plan.packs[&id].info, entries)?;
            for entry in reader.entries() {
                self.check_stop()?;
                writer.put_stored(entry, &reader.stored(entry)?)?;
                progress.advance(u64::from(entry.stored_len));
            }
        }
        Ok(writer.finish_with(older)?.stored_bytes)
    }

    /// The victims that can go, now that images turned up which need the chunks `newly` too: a
    /// victim that has one of these which no remaining segment has stays. The store is ours alone.
    fn spare(
        &self,
        segments: &[Segment],
        mut victims: Vec<usize>,
        newly: &HashSet<ChunkId>,
    ) -> Result<Vec<usize>, StoreError> {
        if newly.is_empty() || victims.is_empty() {
            return Ok(victims);
        }
        let doomed: HashSet<&Path> = victims.iter().map(|&n| segments[n].path.as_path()).collect();
        let mut found: HashSet<ChunkId> = HashSet::new();
        for path in self.store.segments()? {
            if !doomed.contains(path.as_path()) {
                let take = |e: &Entry| {
                    if newly.contains(&e.id) {
                        found.insert(e.id);
                    }
                };
                Index::scan(&path, take)?;
            }
        }
        victims.retain(|number| {
            let ids = segments[*number].index.entries.iter().map(|entry| entry.id);
            let lacking: Vec<ChunkId> =
                ids.filter(|id| newly.contains(id) && !found.contains(id)).collect();
            let goes = lacking.is_empty();
            found.extend(lacking);
            goes
        });
        Ok(victims)
    }

    /// Removes the victims, then all packs that no segment names, then what is hidden. The store is
    /// ours alone. Returns the bytes of all that.
    fn sweep(
        &self,
        segments: &[Segment],
        victims: &[usize],
        report: &mut GcReport,
    ) -> Result<u64, StoreError> {
        let (images, index, packs) = (self.store.images(), self.store.index(), self.store.packs());
        // An image that was seen to be gone must not come back.
        self.sync(&images)?;
        let mut removed = 0;
        for number in victims {
            removed += self.remove_file(&segments[*number].path)?;
        }
        self.sync(&index)?;
        let mut named = HashSet::new();
        for path in self.store.segments()? {
            let (infos, _) = Index::scan(&path, |_| ())?;
            named.extend(infos.into_iter().map(|info| info.id));
        }
        for name in all_names(&packs)? {
            let Some(id) = PackId::of_file_name(&name) else { continue };
            let path = packs.join(name);
            if named.contains(&id) {
                report.kept_bytes += std::fs::symlink_metadata(&path).map_or(0, |m| m.len());
            } else {
                removed += self.remove_file(&path)?;
                report.removed_packs += 1;
            }
        }
        for name in all_names(&index)? {
            if name.starts_with('.') && name.ends_with(".index.partial") {
                removed += self.remove_file(&index.join(name))?;
            }
        }
        for name in all_names(&images)? {
            if name.starts_with('.') && (name.contains(".partial-") || name.contains(".removed-")) {
                let path = images.join(name);
                match self.disk.remove_tree(&path) {
                    Err(e) if e.kind() != io::ErrorKind::NotFound => {
                        return Err(io_error("remove", &path, e));
                    }
                    _ => {}
                }
            }
        }
        for dir in [&packs, &index, &images] {
            self.sync(dir)?;
        }
        Ok(removed)
    }

    fn remove_file(&self, path: &Path) -> Result<u64, StoreError> {
        let len = std::fs::symlink_metadata(path).map_or(0, |meta| meta.len());
        match self.disk.remove_file(path) {
            // The watchdog of a dump that died may be faster.
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(io_error("remove", path, e)),
            _ => Ok(len),
        }
    }

    fn sync(&self, dir: &Path) -> Result<(), StoreError> {
        self.disk.sync_dir(dir).map_err(|e| io_error("sync", dir, e))
    }

    fn check_stop(&self) -> Result<(), StoreError> {
        if (self.options.stop)() { Err(StoreError::Interrupted) } else { Ok(()) }
    }
}
