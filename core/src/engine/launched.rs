//! Which kernels a program launched while it was dumped, as an image says it for `gpucr inspect --kernels`.
//!
//! A dump that copies while the program runs records launches; one that does not says nothing.

use std::collections::{BTreeMap, HashSet};

use gpucr_wire::access::KernelUse;
use serde::{Deserialize, Serialize};

use super::access::{Kernels, Tally};
use crate::image::{Manifest, Section};

/// Kind of the section of an image, which is a [`ByProcess`] in postcard form.
pub(super) const SECTION: &str = "launched";
/// So many kernels of a process are named: those that were launched most often.
const MOST: usize = 4096;
/// Longer names are cut, bytes.
const LONGEST_NAME: usize = 1024;

/// A kernel that a process launched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launched {
    /// Its name in the module, mangled; empty if the driver did not say.
    pub name: String,
    /// How often it was launched, within graphs too.
    pub launches: u64,
    /// How often within graphs.
    pub in_graphs: u64,
    /// The largest number of blocks in each direction.
    pub grid: [u64; 3],
    /// The largest number of threads of a block in each direction.
    pub block: [u64; 3],
    /// Words of its parameters that pointed to device memory.
    pub pointers: u32,
    /// How many of these it only reads through, as far as its code or name says or what it did shows.
    pub read_only: u32,
    /// Whether it follows pointers that lie in memory; `None` if its code was not read.
    pub indirect: Option<bool>,
}

/// The kernels of each process that launched any, by its pid.
pub type ByProcess = Vec<(u32, Vec<Launched>)>;

/// Those of one process, from what was launched between questions; the most launched first.
pub(crate) fn of<'a>(
    kernels: &Kernels,
    tallies: impl IntoIterator<Item = &'a Tally>,
) -> Vec<Launched> {
    let mut all: BTreeMap<u64, Launched> = BTreeMap::new();
    let uses = tallies.into_iter().flat_map(|tally| tally.kernels.values());
    for used in uses.filter(|used| used.launches > 0) {
        let new = launched(kernels, used);
        all.entry(used.id)
            .and_modify(|old| {
                old.launches = old.launches.saturating_add(new.launches);
                old.in_graphs = old.in_graphs.saturating_add(new.in_graphs);
                let larger = |a: [u64; 3], b: [u64; 3]| std::array::from_fn(|of| a[of].max(b[of]));
                (old.grid, old.block) = (larger(old.grid, new.grid), larger(old.block, new.block));
                // The longest list of words has those that did not point anywhere in other launches.
                if new.pointers > old.pointers {
                    (old.pointers, old.read_only) = (new.pointers, new.read_only);
                }
            })
            .or_insert(new);
    }
    let mut all: Vec<Launched> = all.into_values().collect();
    all.sort_by(|a, b| (b.launches, &a.name).cmp(&(a.launches, &b.name)));
    all.truncate(MOST);
    all
}

fn launched(kernels: &Kernels, used: &KernelUse) -> Launched {
    let mut name = used.name.clone();
    let fits = (0..=LONGEST_NAME.min(name.len())).rev().find(|end| name.is_char_boundary(*end));
    name.truncate(fits.unwrap_or(0));
    let only_read = used.slots.iter().filter(|slot| !kernels.direction(used.id, slot).0.writes());
    Launched {
        name,
        launches: used.launches,
        in_graphs: used.in_graphs,
        grid: used.sizes.grid,
        block: used.sizes.block,
        pointers: used.slots.len() as u32,
        read_only: only_read.count() as u32,
        indirect: kernels.is_indirect(used.id),
    }
}

/// The section of an image for kernels that were launched. It is for people alone.
pub(super) fn section(launched: &ByProcess) -> Option<Section> {
    let any = launched.iter().any(|(_, kernels)| !kernels.is_empty());
    let data = postcard::to_stdvec(launched).ok().filter(|_| any)?;
    let kind = SECTION.to_owned();
    Some(Section { kind, version: 1, needed: false, data, chunks: Vec::new() })
}

/// What an image says: of its processes, each once, and no more than a dump writes. Nonsense is nothing.
pub fn read(manifest: &Manifest) -> ByProcess {
    let mut known: HashSet<u32> = manifest.processes.iter().map(|process| process.pid).collect();
    let section = manifest.section(SECTION, 1);
    let said = section.and_then(|section| postcard::from_bytes(&section.data).ok());
    let mut said: ByProcess = said.unwrap_or_default();
    said.retain(|(pid, _)| known.remove(pid));
    for (_, kernels) in &mut said {
        kernels.truncate(MOST);
        kernels.retain(|kernel| kernel.name.len() <= LONGEST_NAME);
    }
    said
}

#[cfg(test)]
mod tests {
    use gpucr_wire::Accesses;
    use gpucr_wire::access::SlotUse;
    use gpucr_wire::reach::Sizes;

    use super::*;
    use crate::image::tests::manifest;

    fn tally(uses: &[(u64, &str, u64, u32)]) -> Tally {
        let used = |&(id, name, launches, blocks): &(u64, &str, u64, u32)| KernelUse {
            id,
            name: name.into(),
            launches,
            known: true,
            sizes: Sizes::of([blocks, 1, 1], [32, 1, 1]),
            slots: vec![SlotUse::default()],
            ..KernelUse::default()
        };
        let mut tally = Tally::default();
        tally.add(Accesses { kernels: uses.iter().map(used).collect(), ..Accesses::default() });
        tally
    }

    #[test]
    fn launches_are_added_up_and_read_as_they_were_written() {
        let tallies = [
            tally(&[(1, "a", 2, 7), (2, "b", 9, 1)]),
            tally(&[(1, "a", 3, 4), (3, "never", 0, 1)]),
        ];
        let all = of(&Kernels::default(), &tallies);
        let short: Vec<_> = all.iter().map(|k| (k.name.as_str(), k.launches, k.grid[0])).collect();
        assert_eq!(short, [("b", 9, 1), ("a", 5, 7)]);
        assert_eq!((all[0].pointers, all[0].read_only, all[0].indirect), (1, 0, None));
        let long = "ä".repeat(LONGEST_NAME);
        assert_eq!(
            of(&Kernels::default(), [&tally(&[(1, &long, 1, 1)])])[0].name.len(),
            LONGEST_NAME
        );

        let mut manifest = manifest();
        let pid = manifest.processes[0].pid;
        assert!(read(&manifest).is_empty());
        let said = vec![(pid, all.clone()), (pid, all.clone()), (pid + 1, all.clone())];
        manifest.sections.extend(section(&said));
        assert_eq!(read(&manifest), [(pid, all)]);
        manifest.sections[0].data = vec![255; 40];
        assert!(read(&manifest).is_empty());
        assert_eq!(section(&vec![(pid, vec![])]), None);
    }
}
