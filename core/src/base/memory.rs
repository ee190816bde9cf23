//! How much more memory this process may take: of the host's, and of what its control groups allow (cgroups, version 1
//! and 2). An image says how much a restore needs, and it may say anything; so that is looked at before anything is
//! made.

use std::path::{Path, PathBuf};

use procfs::process::{MountInfo, MountInfos};
use procfs::{Current, FromRead, ProcessCGroups};

use crate::base::io_error::IoError;

/// Memory of the host, or of a control group that has a limit. All in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// All memory of the host or group.
    pub(crate) total: u64,
    /// What can be had of it, caches of files included.
    pub(crate) left: u64,
    /// What besides can be swapped out.
    pub(crate) swap: u64,
}

impl Room {
    /// What can be had in one way or the other.
    pub(crate) fn with_swap(self) -> u64 {
        self.left.saturating_add(self.swap)
    }
}

/// The host's room.
///
/// # Errors
/// `/proc/meminfo` cannot be read.
pub(crate) fn host() -> Result<Room, IoError> {
    let memory = procfs::Meminfo::current().map_err(|error| {
        IoError::when("cannot read /proc/meminfo")(std::io::Error::other(error))
    })?;
    let left = memory.mem_available.unwrap_or(memory.mem_free);
    Ok(Room { total: memory.mem_total, left, swap: memory.swap_free })
}

/// The room of each control group that this process is in and that has a limit. One that cannot be read has none.
pub(crate) fn groups() -> Vec<Room> {
    let read = |name: &str| std::fs::read(format!("/proc/self/{name}")).unwrap_or_default();
    let swap = host().map_or(0, |host| host.swap);
    directories(&read("cgroup"), &read("mountinfo"))
        .iter()
        .flat_map(|group| group.rooms())
        .map(|room| Room { swap: room.swap.min(swap), ..room })
        .collect()
}

/// A control group that counts memory.
#[derive(Debug, PartialEq, Eq)]
struct Group {
    dir: PathBuf,
    /// Where the hierarchy is mounted: the groups from here to there have their limits too.
    top: PathBuf,
    files: &'static Files,
}

/// Names of the files of a group.
#[derive(Debug, PartialEq, Eq)]
struct Files {
    limit: &'static str,
    used: &'static str,
    /// In `memory.stat`: cached bytes of files that were not used lately.
    cache: &'static str,
    swap_limit: &'static str,
    swap_used: &'static str,
    /// Whether limit and use of swap count memory as well.
    is_swap_with_memory: bool,
}

const VERSION_1: Files = Files {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    cache: "total_inactive_file",
    swap_limit: "memory.memsw.limit_in_bytes",
    swap_used: "memory.memsw.usage_in_bytes",
    is_swap_with_memory: true,
};
const VERSION_2: Files = Files {
    limit: "memory.max",
    used: "memory.current",
    cache: "inactive_file",
    swap_limit: "memory.swap.max",
    swap_used: "memory.swap.current",
    is_swap_with_memory: false,
};

/// The groups of a process that has these files in `/proc`.
fn directories(groups: &[u8], mounts: &[u8]) -> Vec<Group> {
    let mounts = MountInfos::from_read(mounts).map_or(Vec::new(), |mounts| mounts.0);
    let groups = ProcessCGroups::from_read(groups).map_or(Vec::new(), |groups| groups.0);
    let counts = |controllers: &[String]| controllers.iter().any(|name| name == "memory");
    let group = |(path, files): (String, &'static Files)| {
        let is_mount = |mount: &&MountInfo| match files.is_swap_with_memory {
            true => mount.fs_type == "cgroup" && mount.super_options.contains_key("memory"),
            false => mount.fs_type == "cgroup2",
        };
        let mount = mounts.iter().find(is_mount)?;
        // A container may see its own group as the root, and its path as it is outside, or the other way round.
        let below = Path::new(&path).strip_prefix(&mount.root).unwrap_or(Path::new(""));
        let is_inside = !below.components().any(|part| part == std::path::Component::ParentDir);
        let top = mount.mount_point.clone();
        Some(Group { dir: if is_inside { top.join(below) } else { top.clone() }, top, files })
    };
    let groups = groups.into_iter().filter_map(|group| match group.hierarchy {
        0 => Some((group.pathname, &VERSION_2)),
        _ => counts(&group.controllers).then_some((group.pathname, &VERSION_1)),
    });
    groups.filter_map(group).collect()
}

impl Group {
    /// The room in each group that has a limit, of this group and those that it is in.
    fn rooms(&self) -> Vec<Room> {
        let dirs = self.dir.ancestors().take_while(|dir| dir.starts_with(&self.top));
        dirs.filter_map(|dir| self.room(dir)).collect()
    }

    fn room(&self, dir: &Path) -> Option<Room> {
        let text = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        // No number is no limit: `max`. Version 1 has a number that nothing comes near to.
        let number = |name: &str| text(name)?.trim().parse::<u64>().ok();
        let Files { limit, used, cache, swap_limit, swap_used, is_swap_with_memory } = self.files;
        let total = number(limit)?;
        let used = number(used)?;
        let stat = text("memory.stat").unwrap_or_default();
        let cached = stat.lines().find_map(|line| line.strip_prefix(cache)?.trim().parse().ok());
        let left = total.saturating_sub(used.saturating_sub(cached.unwrap_or(0)));
        let of_memory = if *is_swap_with_memory { total.saturating_sub(used) } else { 0 };
        let swap = match (number(swap_limit), number(swap_used)) {
            (Some(limit), Some(used)) => limit.saturating_sub(used).saturating_sub(of_memory),
            _ => u64::MAX,
        };
        Some(Room { total, left, swap })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(top: &Path, kind: &str, root: &str, options: &str) -> String {
        let top = top.display();
        format!("30 23 0:26 {root} {top} rw,relatime shared:9 - {kind} {kind} {options}\n")
    }

    fn write(dir: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            std::fs::write(dir.join(name), text).unwrap();
        }
    }

    fn room(total: u64, left: u64, swap: u64) -> Room {
        Room { total, left, swap }
    }

    #[test]
    fn limits_of_version_2_are_found_up_to_the_root() {
        let top = tempfile::tempdir().unwrap();
        let stat = "anon 1\ninactive_file 100\nactive_file 7\n";
        let outer: [(&str, &str); 3] =
            [("memory.max", "5000\n"), ("memory.current", "1600\n"), ("memory.stat", stat)];
        write(&top.path().join("a"), &outer);
        write(&top.path().join("a/b"), &[("memory.max", "max\n"), ("memory.current", "700\n")]);
        let inner: [(&str, &str); 4] = [
            ("memory.max", "1000\n"),
            ("memory.current", "700\n"),
            ("memory.swap.max", "50\n"),
            ("memory.swap.current", "20\n"),
        ];
        write(&top.path().join("a/b/c"), &inner);
        let mounts = mounts(top.path(), "cgroup2", "/", "rw,nsdelegate");
        let groups = directories(b"0::/a/b/c\n", mounts.as_bytes());
        let rooms: Vec<Room> = groups.iter().flat_map(Group::rooms).collect();
        assert_eq!(rooms, [room(1000, 300, 30), room(5000, 3500, u64::MAX)]);
    }

    #[test]
    fn limits_of_version_1_are_found_in_a_container_too() {
        let top = tempfile::tempdir().unwrap();
        let files: [(&str, &str); 5] = [
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "900\n"),
            ("memory.stat", "inactive_file 1\ntotal_inactive_file 200\n"),
            ("memory.memsw.limit_in_bytes", "1500\n"),
            ("memory.memsw.usage_in_bytes", "950\n"),
        ];
        write(top.path(), &files);
        let cpu = mounts(Path::new("/cpu"), "cgroup", "/docker/x", "rw,cpu");
        let memory = mounts(top.path(), "cgroup", "/docker/x", "rw,memory");
        let mounts = [cpu, memory].concat();
        // Seen from outside; from inside; and where the mount begins elsewhere.
        for path in ["/docker/x", "/", "/../y"] {
            let groups = format!("4:cpu:/docker/x\n3:memory:{path}\n0::{path}\n");
            let groups = directories(groups.as_bytes(), mounts.as_bytes());
            let rooms: Vec<Room> = groups.iter().flat_map(Group::rooms).collect();
            assert_eq!(rooms, [room(1000, 300, 450)], "{path}");
        }
    }

    #[test]
    fn without_groups_there_is_the_host() {
        assert_eq!(directories(b"", b""), []);
        assert_eq!(directories(b"0::/\n", b"what is this"), []);
        let host = host().unwrap();
        assert!(host.total > 0 && host.left <= host.total);
        assert!(groups().iter().all(|room| room.left <= room.total));
    }
}
