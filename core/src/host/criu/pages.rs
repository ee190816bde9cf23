//! Pages of zeros in the memory that CRIU has saved: a restore need not read them.
//!
//! `pagemap-PID.img` lists runs of pages that a process had, in order of their addresses: after 8 bytes that
//! say what it is, each message behind its length (32 bits): first the number N of the file `pages-N.img` that
//! has the bytes of all runs one after the other, then the runs (CRIU's `pagemap.proto`). Memory that a process
//! has for itself and that comes from no file is made of zeros in a restore, so runs of zeros in it can be left
//! out. CRIU marks such memory for its own purposes, as what could be loaded late: other memory (of files, locked,
//! of large pages) is left as it is, and so is every file that is not exactly as it is said here.

pub(super) mod files;
mod left;
mod lookup;
mod private;
mod zeros;

#[cfg(test)]
mod tests;

pub(super) use files::{IMAGE_MAGIC, open_pages, processes};
pub(super) use left::{Left, Origin, Part, left};
pub(crate) use lookup::{
    MEMFD, Mapped, Mappings, Memfds, Pages, mappings_file, messages, pages_file, shared_pages_file,
};
pub(super) use private::{Extent, mark, private};
pub(crate) use zeros::leave_out_zeros;
pub(super) use zeros::left_out;

/// The files that the tests of this module and of `memory` make.
#[cfg(test)]
pub(super) mod made {
    use std::path::Path;

    use super::files::{Between, Head, LAZY, MM_MAGIC, Mappings, PAGE, PRESENT, Run, encode, put};

    /// Writes the files of process 42 with mappings (start and end) and runs of memory (address, whether it is
    /// marked as private, bytes).
    pub(in super::super) fn write(dir: &Path, maps: &[(u64, u64)], runs: &[(u64, bool, &[u8])]) {
        write_of(42, dir, maps, runs);
    }

    /// The same of any process.
    pub(in super::super) fn write_of(
        pid: i32,
        dir: &Path,
        maps: &[(u64, u64)],
        runs: &[(u64, bool, &[u8])],
    ) {
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u32;
        let map = |&(start, end)| Between { start, end, protection: 3, flags, status: 1 };
        let all = maps.iter().map(map).collect();
        let mut bytes = MM_MAGIC.to_vec();
        put(&mut bytes, &Mappings { all });
        std::fs::write(dir.join(format!("mm-{pid}.img")), bytes).unwrap();
        let run = |&(address, is_private, bytes): &(u64, bool, &[u8])| {
            let flags = Some(if is_private { LAZY | PRESENT } else { PRESENT });
            Run::narrow(address, (bytes.len() / PAGE) as u32, flags)
        };
        let runs_of = runs.iter().map(run).collect::<Vec<_>>();
        let map = encode(&Head { pages_id: 7 }, &runs_of);
        std::fs::write(dir.join(format!("pagemap-{pid}.img")), map).unwrap();
        let pages: Vec<u8> = runs.iter().flat_map(|(_, _, bytes)| *bytes).copied().collect();
        std::fs::write(dir.join("pages-7.img"), pages).unwrap();
    }
}
