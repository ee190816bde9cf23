//! What a gc is to do: which copy of each chunk stays, and what becomes of packs and segments.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use super::super::index::{Index, PACK_TRAILER, PackId, PackInfo};
use super::super::shared::SharedStore;
use super::super::{ChunkId, Entry};

/// A pack with fewer bytes of data is small: it is merged with others.
const SMALL_PACK: u64 = 16 << 20;
/// So many bytes are moved at most to merge small packs, for which a gc needs room on the disk.
const MERGED_BYTES: u64 = 1 << 30;
/// A segment of fewer chunks and packs is small.
const SMALL_SEGMENT: u64 = 64 << 10;
/// Fewer are not merged.
const MERGED_AT_LEAST: usize = 8;

/// A segment that was read.
pub(super) struct Segment {
    pub(super) path: PathBuf,
    pub(super) index: Index,
}

impl Segment {
    /// The pack of a chunk; none for a constant one.
    pub(super) fn pack(&self, entry: &Entry) -> Option<PackInfo> {
        entry.encoding.has_data().then(|| self.index.packs[entry.pack as usize])
    }
}

/// What is to become of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    Keep,
    /// The chosen chunks move.
    Move,
    /// Nothing in it is needed.
    Drop,
}

pub(super) struct Pack {
    pub(super) info: PackInfo,
    /// Whether the file is there with its length.
    whole: bool,
    /// Bytes of all live chunks.
    live: u64,
    /// Bytes of those that were chosen here, and their number.
    chosen: u64,
    chosen_count: u64,
    /// Whether it is merged with others.
    merged: bool,
}

impl Pack {
    fn data(&self) -> u64 {
        self.info.len.saturating_sub(PACK_TRAILER as u64)
    }

    fn choose(&mut self, entry: &Entry) {
        self.chosen += u64::from(entry.stored_len);
        self.chosen_count += 1;
    }

    fn give_up(&mut self, entry: &Entry) {
        self.chosen -= u64::from(entry.stored_len);
        self.chosen_count -= 1;
    }

    fn fate(&self) -> Fate {
        match self.chosen_count {
            0 => Fate::Drop,
            _ if self.whole && (self.merged || self.chosen * 2 < self.data()) => Fate::Move,
            _ => Fate::Keep,
        }
    }
}

/// Which copy of each live chunk stays, and what follows for the packs.
pub(super) struct GcPlan {
    pub(super) packs: HashMap<PackId, Pack>,
    /// For each live chunk that is there: segment and place in its index.
    pub(super) chosen: HashMap<ChunkId, (usize, usize)>,
    /// Live chunks that are nowhere.
    pub(super) missing: u64,
    /// Segments, by number, that are merged though all of their packs may stay.
    merged: HashSet<usize>,
}

impl GcPlan {
    /// Says what is to be done so that just the chunks `live` stay.
    pub(super) fn make(store: &SharedStore, segments: &[Segment], live: &HashSet<ChunkId>) -> Self {
        let mut packs: HashMap<PackId, Pack> = HashMap::new();
        for segment in segments {
            for info in &segment.index.packs {
                packs.entry(info.id).or_insert_with(|| {
                    let meta = std::fs::symlink_metadata(store.packs().join(info.id.file_name()));
                    let whole = meta.is_ok_and(|m| m.is_file() && m.len() == info.len);
                    Pack { info: *info, whole, live: 0, chosen: 0, chosen_count: 0, merged: false }
                });
            }
            for entry in segment.index.entries.iter().filter(|e| live.contains(&e.id)) {
                if let Some(pack) = segment.pack(entry).and_then(|info| packs.get_mut(&info.id)) {
                    pack.live += u64::from(entry.stored_len);
                }
            }
        }
        // The copy that stays is the one in a whole pack, and then in the pack that is the most alive.
        let rank = |segment: &Segment, entry: &Entry| match segment.pack(entry) {
            None => (true, u64::MAX, [0; 16]),
            Some(info) => {
                let pack = &packs[&info.id];
                (pack.whole, pack.live * 1_000_000 / pack.data().max(1), info.id.0)
            }
        };
        let mut chosen: HashMap<ChunkId, (usize, usize)> = HashMap::new();
        for (number, segment) in segments.iter().enumerate() {
            for (place, entry) in segment.index.entries.iter().enumerate() {
                if !live.contains(&entry.id) {
                    continue;
                }
                let best = chosen.entry(entry.id).or_insert((number, place));
                let other = &segments[best.0];
                if rank(segment, entry) > rank(other, &other.index.entries[best.1]) {
                    *best = (number, place);
                }
            }
        }
        for &(number, place) in chosen.values() {
            let entry = &segments[number].index.entries[place];
            let info = segments[number].pack(entry);
            if let Some(pack) = info.and_then(|info| packs.get_mut(&info.id)) {
                pack.choose(entry);
            }
        }
        for id in small_packs(&packs) {
            packs.entry(id).and_modify(|pack| pack.merged = true);
        }
        // What is in a pack that stays anyway need not move out of another.
        let fates: HashMap<PackId, Fate> = packs.iter().map(|(id, p)| (*id, p.fate())).collect();
        for (number, segment) in segments.iter().enumerate() {
            for (place, entry) in segment.index.entries.iter().enumerate() {
                let Some(best) = chosen.get_mut(&entry.id) else { continue };
                let other = &segments[best.0];
                let moving = other.pack(&other.index.entries[best.1]);
                let moving = moving.filter(|info| fates[&info.id] == Fate::Move);
                if let Some(staying) = segment.pack(entry)
                    && let Some(moving) = moving
                    && fates[&staying.id] == Fate::Keep
                    && packs[&staying.id].whole
                {
                    *best = (number, place);
                    packs.entry(staying.id).and_modify(|pack| pack.choose(entry));
                    packs.entry(moving.id).and_modify(|pack| pack.give_up(entry));
                }
            }
        }
        let missing = (live.len() - chosen.len()) as u64;
        Self { packs, chosen, missing, merged: small_segments(segments) }
    }

    /// Bytes of the chunks that are to move.
    pub(super) fn moving_bytes(&self) -> u64 {
        self.packs.values().filter(|p| p.fate() == Fate::Move).map(|pack| pack.chosen).sum()
    }

    /// What is to become of a pack.
    pub(super) fn fate(&self, id: PackId) -> Fate {
        self.packs.get(&id).map_or(Fate::Keep, Pack::fate)
    }

    /// Whether the chosen copy of a chunk is to move.
    pub(super) fn is_moving(&self, segments: &[Segment], id: &ChunkId) -> bool {
        self.copy(segments, id).is_some_and(|(info, _)| self.fate(info.id) == Fate::Move)
    }

    /// The chosen copy of a live chunk that is in a pack.
    fn copy(&self, segments: &[Segment], id: &ChunkId) -> Option<(PackInfo, Entry)> {
        let (number, place) = *self.chosen.get(id)?;
        let entry = segments[number].index.entries[place];
        Some((segments[number].pack(&entry)?, entry))
    }

    /// The packs whose chosen chunks are to move, with these, of the segments that `of` admits.
    pub(super) fn moving(
        &self,
        segments: &[Segment],
        of: impl Fn(usize) -> bool,
    ) -> BTreeMap<PackId, Vec<Entry>> {
        let mut moving: BTreeMap<PackId, Vec<Entry>> = BTreeMap::new();
        for &(number, place) in self.chosen.values().filter(|(number, _)| of(*number)) {
            let entry = segments[number].index.entries[place];
            if let Some(info) = segments[number].pack(&entry)
                && self.fate(info.id) == Fate::Move
            {
                moving.entry(info.id).or_default().push(entry);
            }
        }
        moving
    }

    /// The chosen copies, by pack, of live chunks that have another copy in a pack that is to go.
    pub(super) fn relied_on(
        &self,
        segments: &[Segment],
    ) -> BTreeMap<PackId, (PackInfo, Vec<Spared>)> {
        let mut relied: BTreeMap<PackId, (PackInfo, Vec<Spared>)> = BTreeMap::new();
        for (number, segment) in segments.iter().enumerate() {
            for (place, entry) in segment.index.entries.iter().enumerate() {
                let Some(info) = segment.pack(entry) else { continue };
                let other = self.chosen.get(&entry.id).is_some_and(|c| *c != (number, place));
                if !other || self.fate(info.id) == Fate::Keep {
                    continue;
                }
                if let Some((chosen, copy)) = self.copy(segments, &entry.id)
                    && chosen.id != info.id
                {
                    let (_, copies) = relied.entry(chosen.id).or_insert((chosen, Vec::new()));
                    copies.push(Spared { copy, dropped: info.id });
                }
            }
        }
        relied
    }

    /// A pack stays as it is.
    pub(super) fn pin(&mut self, id: PackId) {
        if let Some(pack) = self.packs.get_mut(&id) {
            tracing::warn!(pack = %id, "kept as it is, since a chunk is damaged");
            pack.whole = false;
            pack.chosen_count += 1;
        }
    }

    /// Whether a segment is to be replaced: it has something that is to go, or is merged.
    pub(super) fn is_victim(&self, number: usize, segment: &Segment) -> bool {
        if self.merged.contains(&number) {
            return true;
        }
        let useless = |info: &PackInfo| self.fate(info.id) != Fate::Keep;
        if segment.index.packs.is_empty() {
            return !segment.index.entries.iter().any(|e| self.chosen.contains_key(&e.id));
        }
        segment.index.packs.iter().any(useless)
    }
}

/// A copy that is relied on, since another is in a pack that is to go.
pub(super) struct Spared {
    pub(super) copy: Entry,
    pub(super) dropped: PackId,
}
/// The small packs that are to become one.
fn small_packs(packs: &HashMap<PackId, Pack>) -> Vec<PackId> {
    let is_small = |pack: &&Pack| pack.whole && pack.chosen_count > 0 && pack.data() < SMALL_PACK;
    let mut small: Vec<(u64, PackId)> =
        packs.values().filter(is_small).map(|pack| (pack.chosen, pack.info.id)).collect();
    small.sort_unstable();
    let count = worth_merging(small.iter().map(|(size, _)| *size), MERGED_BYTES);
    small[..count].iter().map(|(_, id)| *id).collect()
}

/// The small segments that are to become one, by number.
fn small_segments(segments: &[Segment]) -> HashSet<usize> {
    let size = |segment: &Segment| (segment.index.entries.len() + segment.index.packs.len()) as u64;
    let mut small: Vec<(u64, usize)> =
        segments.iter().enumerate().map(|(number, segment)| (size(segment), number)).collect();
    small.retain(|(size, _)| *size < SMALL_SEGMENT);
    small.sort_unstable();
    let count = worth_merging(small.iter().map(|(size, _)| *size), u64::MAX);
    small[..count].iter().map(|(_, number)| *number).collect()
}

/// How many of the things with these sizes, which ascend, are to become one: as many as possible, so
/// that none makes up more than half of it, nor all more than `most`.
///
/// So what was merged is at least twice as large as it was, and nothing moves more often than its
/// size can double. Of what is left each is as large as all smaller ones together, but for the
/// smallest few: the number grows with the logarithm of the size.
fn worth_merging(sizes: impl Iterator<Item = u64>, most: u64) -> usize {
    let mut sum = 0u64;
    let mut count = 0;
    for (number, size) in sizes.enumerate() {
        sum = sum.saturating_add(size);
        if sum > most {
            break;
        }
        if number + 1 >= MERGED_AT_LEAST && size <= sum - size {
            count = number + 1;
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    fn merge(sizes: &[u64], most: u64) -> usize {
        worth_merging(sizes.iter().copied(), most)
    }

    #[test]
    fn things_are_merged_with_their_like() {
        assert_eq!(merge(&[5; 7], 1000), 0);
        assert_eq!(merge(&[5; 8], 1000), 8);
        assert_eq!(merge(&[5; 100], 1000), 100);
        assert_eq!(merge(&[5; 100], 77), 15);
        assert_eq!(merge(&[1, 1, 1, 1, 1, 1, 1, 7], 1000), 8);
        assert_eq!(merge(&[1, 1, 1, 1, 1, 1, 1, 8], 1000), 0);
        assert_eq!(merge(&[1, 1, 1, 1, 1, 1, 1, 1, 9, 18], 1000), 8);
        assert_eq!(merge(&[1, 1, 1, 1, 1, 1, 1, 1, 9, 10], 1000), 10);
    }

    /// A gc after each dump: few things are left, and each byte moves few times.
    #[test]
    fn merging_after_every_dump_costs_little() {
        let mut sizes: Vec<u64> = Vec::new();
        let (mut moved, mut largest) = (0, 0);
        for _ in 0..10_000 {
            sizes.push(1);
            sizes.sort_unstable();
            let count = merge(&sizes, u64::MAX);
            if count > 0 {
                let sum = sizes.drain(..count).sum();
                moved += sum;
                sizes.push(sum);
            }
            largest = largest.max(sizes.len());
        }
        assert_eq!(sizes.iter().sum::<u64>(), 10_000);
        assert!(largest < 7 + 14, "{largest}");
        assert!(moved < 14 * 10_000, "{moved}");
    }
}
