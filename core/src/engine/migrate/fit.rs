//! Whether a program fits on this host: its source says with the offer how much of everything it has, and that is
//! compared with what is free here before anything is changed.
//!
//! What the source says is a figure to compare with, and nothing else: no memory is taken for it.

use std::path::{Path, PathBuf};

use crate::engine::error::Error;
use crate::engine::restore::check_room;
use crate::image::DriverKind;

/// How much a program has at the moment of the offer, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Needs {
    /// Private memory of its processes.
    pub(super) host: u64,
    /// Device memory.
    pub(super) device: u64,
    /// Files that go along and are not here.
    pub(super) files: u64,
}

impl Needs {
    /// What is in the way here of a program with this driver, whose image is to be at `path`. Disk space does not count
    /// with `tight_disk`: memory that is zero takes none there, nor does what the store has already.
    pub(super) fn unfit(self, path: &Path, driver: DriverKind, tight_disk: bool) -> Vec<Error> {
        // The software driver has device memory in that of the host.
        let device = if driver == DriverKind::Soft { self.device } else { 0 };
        let memory = check_room(self.host.saturating_add(device));
        let disk = if tight_disk { Ok(()) } else { self.check_disk(path) };
        [memory, disk].into_iter().filter_map(Result::err).collect()
    }

    fn check_disk(self, path: &Path) -> Result<(), Error> {
        let needed = self.host.saturating_add(self.device).saturating_add(self.files);
        match free_at(path) {
            Some((place, free)) if needed > free => Err(Error::DiskFull { place, needed, free }),
            _ => Ok(()),
        }
    }
}

/// The directory that is there and in which something of this path would be made, and how much root can write there.
/// `None` where its file system does not say.
fn free_at(path: &Path) -> Option<(PathBuf, u64)> {
    let path = std::path::absolute(path).ok()?;
    let place = path.ancestors().find(|dir| dir.is_dir())?;
    let found = rustix::fs::statvfs(place).ok()?;
    // Some have no figures at all.
    (found.f_blocks > 0).then(|| (place.to_owned(), found.f_bfree.saturating_mul(found.f_frsize)))
}

/// Bytes of private memory that these processes have, in the host's memory or swapped out. What several of them share
/// since a fork counts once. What cannot be found out does not count.
pub(super) fn private_memory(pids: impl Iterator<Item = u32>) -> u64 {
    let of = |pid: u32| std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok();
    pids.filter_map(of).map(|rollup| private_in(&rollup)).sum()
}

/// The same of a file `smaps_rollup`.
fn private_in(rollup: &str) -> u64 {
    let kib = |line: &str| {
        let (name, value) = line.split_once(':')?;
        let value = value.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()?;
        matches!(name, "Pss_Anon" | "SwapPss").then_some(value)
    };
    rollup.lines().filter_map(kib).sum::<u64>().saturating_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(found: &[Error]) -> Vec<String> {
        found.iter().map(Error::to_string).collect()
    }

    #[test]
    fn what_does_not_fit_is_told_with_both_values() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("store/images/one");
        let unfit = |needs: Needs, tight| texts(&needs.unfit(&image, DriverKind::Nvidia, tight));
        assert_eq!(unfit(Needs { host: 1, device: 2, files: 3 }, false), [""; 0]);
        let (place, free) = free_at(&image).unwrap();
        assert_eq!(place, dir.path());
        // Device memory is no memory of the host's, and everything is in the image.
        let much = Needs { device: u64::MAX, ..Needs::default() };
        let found = unfit(much, false);
        assert_eq!(found.len(), 1, "{found:?}");
        let told = format!("up to {} MiB", u64::MAX.div_ceil(1 << 20));
        assert!(found[0].contains(&told) && found[0].contains("--tight-disk"), "{found:?}");
        assert!(found[0].contains(&format!("in {}", place.display())), "{found:?}, {free}");
        assert_eq!(unfit(much, true), [""; 0]);
        // Nothing that a source says is too much to be added up.
        let all = Needs { host: u64::MAX, device: u64::MAX, files: u64::MAX };
        let found = texts(&all.unfit(&image, DriverKind::Soft, false));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("of the host's memory"), "{found:?}");
        // What the software driver has is memory of the host's.
        assert_eq!(much.unfit(&image, DriverKind::Soft, true).len(), 1);
    }

    #[test]
    fn private_memory_is_what_a_process_alone_has() {
        let rollup = "00400000-7ffd000 ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nPss: 800 kB\n\
                      Pss_Anon: 12 kB\nPss_File: 700 kB\nPss_Shmem: 80 kB\nSwap: 9 kB\nSwapPss: 3 kB\n";
        assert_eq!(private_in(rollup), 15 << 10);
        assert_eq!(private_in("Pss_Anon: 1\nSwapPss: x kB\n\n:"), 0, "nonsense");
        let own = private_memory([std::process::id(), u32::MAX].into_iter());
        assert!(own > 1 << 16, "{own}");
    }
}
