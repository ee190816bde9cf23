//! Kernels that a dump interrupted, as its report and its image say it. They go on when the
//! program does, by themselves: a restore needs to know nothing of it.

use std::collections::HashMap;

use gpucr_wire::message::{Interrupted as Told, Place};
use serde::{Deserialize, Serialize};

use crate::image::{Manifest, Section};

/// Kind of the section of an image, which is a list of [`Interrupted`] in postcard form.
pub(super) const SECTION: &str = "interrupted";
/// So many kernels of a process are named.
const MOST: usize = 256;
/// Longer names are cut, bytes.
const LONGEST_NAME: usize = 1024;

/// A launch that was interrupted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interrupted {
    /// The process.
    pub pid: u32,
    /// The kernel's name in its module, mangled.
    pub kernel: String,
    /// Where: `block`, between two blocks of its grid, `loop`, in loops of its threads, `barrier`, at barriers of its blocks,
    /// or `abort`, anywhere.
    pub level: Level,
    /// Blocks of the grid that are done.
    pub done: u64,
    /// Blocks of the grid.
    pub blocks: u64,
    /// Blocks that had begun and run again from their start: those that were aborted.
    pub aborted: u64,
}

/// The same in sections of version 1.
#[derive(Deserialize)]
struct First {
    pid: u32,
    kernel: String,
    level: Level,
    done: u64,
    blocks: u64,
}

impl From<First> for Interrupted {
    fn from(First { pid, kernel, level, done, blocks }: First) -> Self {
        Self { pid, kernel, level, done, blocks, aborted: 0 }
    }
}

/// Where kernels are interrupted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// Between two blocks of their grid.
    Block,
    /// In loops of their threads.
    Loop,
    /// At barriers of their blocks.
    Barrier,
    /// Anywhere: blocks that are not done run again from their start.
    Abort,
}

impl Level {
    /// In words, behind what is done there.
    pub fn place(self) -> &'static str {
        match self {
            Self::Block => "between blocks",
            Self::Loop => "in loops",
            Self::Barrier => "at barriers",
            Self::Abort => "by abort",
        }
    }
}

impl Interrupted {
    /// What an agent has told of a launch of its process.
    pub(crate) fn new(pid: u32, told: Told) -> Self {
        let Told { mut kernel, done, blocks, place, again } = told;
        let level = match place {
            Place::Between {} => Level::Block,
            Place::Loops {} => Level::Loop,
            Place::Barriers {} => Level::Barrier,
            Place::Aborted {} => Level::Abort,
        };
        let ends = (0..=LONGEST_NAME.min(kernel.len())).rev();
        kernel.truncate({ ends }.find(|end| kernel.is_char_boundary(*end)).unwrap_or(0));
        Self { pid, kernel, level, done, blocks, aborted: again }
    }

    /// How far it is, in words.
    pub fn standing(&self) -> String {
        let Self { done, blocks, aborted, .. } = self;
        match aborted {
            0 => format!("{done} of {blocks} blocks done"),
            _ => format!("{done} of {blocks} blocks done, {aborted} run again"),
        }
    }

    fn is_possible(&self) -> bool {
        let begun = self.done.checked_add(self.aborted);
        begun.is_some_and(|begun| begun <= self.blocks) && self.kernel.len() <= LONGEST_NAME
    }
}

/// The section of an image for launches that were interrupted; none if none was. It is for people alone.
pub(super) fn section(interrupted: &[Interrupted]) -> Option<Section> {
    let data = postcard::to_stdvec(interrupted).ok().filter(|_| !interrupted.is_empty())?;
    let kind = SECTION.to_owned();
    Some(Section { kind, version: 2, needed: false, data, chunks: Vec::new() })
}

/// What an image says, of its own processes. Nonsense is nothing.
pub fn read(manifest: &Manifest) -> Vec<Interrupted> {
    let mut left: HashMap<u32, usize> =
        manifest.processes.iter().map(|process| (process.pid, MOST)).collect();
    let second = manifest.section(SECTION, 2);
    let first = manifest.section(SECTION, 1);
    let mut said: Vec<Interrupted> = match (second, first) {
        (Some(section), _) => postcard::from_bytes(&section.data).unwrap_or_default(),
        (None, Some(section)) => {
            let said: Vec<First> = postcard::from_bytes(&section.data).unwrap_or_default();
            said.into_iter().map(Interrupted::from).collect()
        }
        (None, None) => Vec::new(),
    };
    said.retain(|one| {
        let left = left.get_mut(&one.pid).filter(|left| **left > 0 && one.is_possible());
        left.map(|left| *left -= 1).is_some()
    });
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::manifest;

    #[test]
    fn launches_are_read_as_they_were_written_and_nonsense_is_nothing() {
        let mut manifest = manifest();
        let pid = manifest.processes[0].pid;
        let of = |pid, name: &str, done| {
            let place = match done {
                3 => Place::Loops {},
                4 => Place::Barriers {},
                5 => Place::Aborted {},
                _ => Place::Between {},
            };
            let again = if done == 5 { 60 } else { 0 };
            Interrupted::new(pid, Told { kernel: name.into(), done, blocks: 1320, place, again })
        };
        assert!(read(&manifest).is_empty() && section(&[]).is_none());
        let good = of(pid, &"ä".repeat(LONGEST_NAME), 812);
        assert_eq!(good.kernel.len(), LONGEST_NAME);
        let others = [of(pid, "k", 3), of(pid, "k", 4), of(pid, "k", 5)];
        let levels = [good.level, others[0].level, others[1].level, others[2].level];
        assert_eq!(levels, [Level::Block, Level::Loop, Level::Barrier, Level::Abort]);
        assert_eq!(others[1].standing(), "4 of 1320 blocks done");
        assert_eq!(others[2].standing(), "5 of 1320 blocks done, 60 run again");
        let [other, third, fourth] = others;
        let said = [good.clone(), other, third, fourth, of(pid + 1, "k", 3), of(pid, "k", 1321)];
        manifest.sections.extend(section(&said));
        assert_eq!(read(&manifest), said[..4]);
        // As it was written before blocks were aborted.
        let old = postcard::to_stdvec(&[(pid, "k", Level::Loop, 3u64, 1320u64)][..]).unwrap();
        manifest.sections[0] = Section { version: 1, data: old, ..manifest.sections[0].clone() };
        assert_eq!(read(&manifest), [of(pid, "k", 3)]);
        manifest.sections[0].version = 2;
        manifest.sections[0] = section(&vec![good; MOST + 1]).unwrap();
        assert_eq!(read(&manifest).len(), MOST);
        manifest.sections[0].data = vec![255; 40];
        assert!(read(&manifest).is_empty());
    }
}
