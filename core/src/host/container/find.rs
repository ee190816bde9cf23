//! The container that a process is in.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use procfs::process::{MountInfo, Process};
use rustix::fs::{AtFlags, StatxFlags};

use super::mount::{ContainerError, MOST, OuterMount, are_possible, key};
use crate::base::file_tree::FileTree;
use crate::base::time_limit::within;
use crate::host::ns::{self, Namespace};
use crate::host::process::ProcessInfo;

/// How long it may take to look at the mounts of a container.
const PATIENCE: Duration = Duration::from_secs(20);
/// What is said of one whose time is over.
const SILENT: &str = "a file system that is mounted there does not answer";

/// File systems that CRIU makes anew, with what is in them.
const MADE_ANEW: [&str; 5] = ["proc", "sysfs", "tmpfs", "devpts", "mqueue"];
/// File systems that a restored container does without: its control groups are not saved.
const LEFT_OUT: [&str; 2] = ["cgroup", "cgroup2"];
/// Where the files of POSIX shared memory are.
const SHARED_MEMORY: &str = "/dev/shm";
/// Those of them of which there are several: one that the host has too is the host's.
const SEVERAL: [&str; 3] = ["tmpfs", "devpts", "mqueue"];

/// A container, as it was found.
#[derive(Debug, Clone)]
pub struct Container {
    /// Its files.
    pub tree: FileTree,
    /// What is mounted in it from elsewhere.
    pub mounts: Vec<OuterMount>,
    /// Where file systems are mounted that CRIU makes anew, with what is in them.
    pub made_anew: Vec<PathBuf>,
    /// Which file systems these are, by device.
    own_systems: BTreeSet<u64>,
    /// Where file systems are mounted that are not saved.
    left_out: Vec<String>,
    /// What the kernel has told of all mounts.
    seen: Vec<u8>,
}

impl Container {
    /// The container that a process is in; none if it has the mounts of this process.
    ///
    /// # Errors
    /// It cannot be looked at, or not be saved.
    pub fn of(process: &ProcessInfo) -> Result<Option<Self>, ContainerError> {
        let pid = process.pid;
        if process.shares_namespace("mnt", std::process::id()) {
            return Ok(None);
        }
        let unreadable = |source| ContainerError::Unreadable { pid, source };
        // A file system there may be the program's own, or one that never answers.
        let look = move || Ok(Self::look_at(pid));
        within(PATIENCE, SILENT, look).map_err(unreadable)?.map(Some)
    }

    fn look_at(pid: u32) -> Result<Self, ContainerError> {
        let unreadable = |source| ContainerError::Unreadable { pid, source };
        let place = Namespace::of(pid, "mnt").and_then(|mounts| ns::root_of_mounts(&mounts));
        let place = place.map_err(unreadable)?;
        // The kernel tells the paths of open files from the root of all mounts.
        if ns::root_of(pid).map_err(unreadable)? != place {
            return Err(ContainerError::Chrooted { pid });
        }
        if place == ns::own_root().map_err(unreadable)? {
            return Err(ContainerError::OwnMounts { pid });
        }
        let tree = FileTree::below(Path::new(&format!("/proc/{pid}/root"))).map_err(unreadable)?;
        let seen = seen(pid).map_err(unreadable)?;
        let all = mounts(pid).map_err(unreadable)?;
        let own = mounts(std::process::id()).map_err(unreadable)?;
        if !all.iter().any(|mount| mount.mount_point == Path::new("/")) || !knows_own(pid, &tree) {
            return Err(ContainerError::Chrooted { pid });
        }
        let outer = outer(&all, &own).filter(|mount| mount.mount_point != Path::new("/"));
        let found: Vec<OuterMount> =
            outer.map(|mount| outer_mount(pid, &tree, mount)).collect::<Result<_, _>>()?;
        if found.len() > MOST {
            return Err(ContainerError::Mounts { pid });
        }
        // Of two at one place only one is seen, and it was told above that the other is hidden.
        if !are_possible(&found) {
            let what = "what is mounted there cannot be told apart";
            return Err(unreadable(io::Error::other(what)));
        }
        let anew = || made_anew(&all, &own).filter(|it| it.mount_point != Path::new("/"));
        let own_systems = anew().filter_map(|mount| device(&mount.majmin)).collect();
        let places = anew().map(|mount| named(&mount.mount_point).map(PathBuf::from));
        let made_anew = places.collect::<Result<_, _>>().map_err(unreadable)?;
        let left_out = all.iter().filter(|mount| is_left_out(mount, &own));
        let left_out = left_out.map(|mount| named(&mount.mount_point)).collect::<Result<_, _>>();
        let left_out = left_out.map_err(unreadable)?;
        Ok(Self { tree, mounts: found, made_anew, own_systems, left_out, seen })
    }

    /// Whether CRIU makes a file anew: whether it lies in one of the container's own file systems.
    pub fn makes_anew(&self, path: &Path) -> bool {
        let found = self.tree.metadata(path);
        found.is_ok_and(|file| self.own_systems.contains(&file.dev()))
    }

    /// The places of mounts that CRIU is to leave out.
    pub fn left_out(&self) -> Vec<String> {
        self.left_out.clone()
    }

    /// What CRIU is told of the mounts when it saves them.
    pub fn to_save(&self) -> Vec<String> {
        let mounts = self.mounts.iter().enumerate();
        mounts.map(|(n, mount)| format!("mnt[{}]:{}", mount.place.display(), key(n))).collect()
    }

    /// Whether a process sees the mounts that this container had.
    ///
    /// # Errors
    /// They cannot be looked at.
    pub fn is_as_it_was(&self, pid: u32) -> io::Result<bool> {
        Ok(seen(pid)? == self.seen)
    }
}

/// What the kernel tells of the mounts that a process sees.
fn seen(pid: u32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/mountinfo"))
}

/// What is mounted there from outside, if a restore can have something else there.
fn outer_mount(pid: u32, tree: &FileTree, mount: &MountInfo) -> Result<OuterMount, ContainerError> {
    let unreadable = |source| ContainerError::Unreadable { pid, source };
    let place = PathBuf::from(named(&mount.mount_point).map_err(unreadable)?);
    // Of one that was removed or replaced outside, such as a file that was edited. CRIU would make it anew.
    if mount.root.ends_with("//deleted") {
        return Err(ContainerError::Deleted { pid, place });
    }
    let file = match tree.find(&place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => Some(found.map_err(unreadable)?),
    };
    // Another mount may be above it, at its place or on the way there.
    let is_seen = |file: &File| {
        let (flags, wanted) = (AtFlags::EMPTY_PATH, StatxFlags::MNT_ID);
        let told = rustix::fs::statx(file, c"", flags, wanted)?;
        Ok(told.stx_mnt_id == mount.mnt_id as u64)
    };
    match file {
        Some(file) if is_seen(&file).map_err(unreadable)? => {
            let is_directory = file.metadata().map_err(unreadable)?.is_dir();
            Ok(OuterMount { place, is_directory })
        }
        _ => Err(ContainerError::Overmounted { pid, place }),
    }
}

/// A mount point as CRIU can be told of it.
fn named(mount_point: &Path) -> io::Result<String> {
    let place = unescaped(mount_point);
    place.into_os_string().into_string().map_err(|place| {
        io::Error::other(format!("the mount point {} is not UTF-8", place.display()))
    })
}

fn mounts(pid: u32) -> io::Result<Vec<MountInfo>> {
    let pid = i32::try_from(pid).map_err(io::Error::other)?;
    let mounts = Process::new(pid).and_then(|process| process.mountinfo());
    Ok(mounts.map_err(io::Error::other)?.0)
}

/// Whether the file that a process executes has the path in its tree that the kernel tells, as far as it has any.
fn knows_own(pid: u32, tree: &FileTree) -> bool {
    let link = format!("/proc/{pid}/exe");
    let Ok(path) = std::fs::read_link(&link) else { return true };
    if path.as_os_str().as_encoded_bytes().ends_with(b" (deleted)") {
        return true;
    }
    let id = |meta: std::fs::Metadata| (meta.dev(), meta.ino());
    let executed = std::fs::metadata(link).map(id).ok();
    executed.is_none() || tree.metadata(&path).map(id).ok() == executed
}

/// Those that CRIU makes anew.
fn made_anew<'m>(
    all: &'m [MountInfo],
    own: &'m [MountInfo],
) -> impl Iterator<Item = &'m MountInfo> {
    let outer: Vec<i32> = outer(all, own).map(|mount| mount.mnt_id).collect();
    all.iter().filter(move |mount| {
        let is_made = MADE_ANEW.contains(&mount.fs_type.as_str()) && !is_left_out(mount, own);
        is_made && !outer.contains(&mount.mnt_id)
    })
}

/// Whether a restored container does without a mount. Besides control groups that is the terminal that a runtime gives
/// to a container (`podman run -t`), where it is mounted as `/dev/console`: its other end is held outside, and CRIU
/// refuses a mount of one whose other end it does not find.
fn is_left_out(mount: &MountInfo, own: &[MountInfo]) -> bool {
    let is_hosts = || own.iter().any(|it| it.majmin == mount.majmin);
    let is_terminal = mount.fs_type == "devpts" && !["/", "/ptmx"].contains(&mount.root.as_str());
    LEFT_OUT.contains(&mount.fs_type.as_str()) || is_terminal && !is_hosts()
}

/// The number of a device that the kernel calls `MAJOR:MINOR`.
fn device(majmin: &str) -> Option<u64> {
    let (major, minor) = majmin.split_once(':')?;
    Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?))
}

/// Those that CRIU cannot make anew: of another file system than it knows, of a part of one, or of one that is the host's.
fn outer<'m>(all: &'m [MountInfo], own: &'m [MountInfo]) -> impl Iterator<Item = &'m MountInfo> {
    let whole = |mount: &MountInfo| all.iter().any(|m| m.majmin == mount.majmin && m.root == "/");
    let is_hosts = |mount: &MountInfo| own.iter().any(|m| m.majmin == mount.majmin);
    all.iter().filter(move |mount| {
        let kind = mount.fs_type.as_str();
        if is_left_out(mount, own) {
            return false;
        }
        let is_hosts = is_hosts(mount) && !is_made_for_it(mount, own);
        !MADE_ANEW.contains(&kind) || !whole(mount) || SEVERAL.contains(&kind) && is_hosts
    })
}

/// Whether it is the `/dev/shm` that a runtime has made outside for a container, as podman does, and not that of the
/// host itself (`--ipc host`): what is there goes with the container.
fn is_made_for_it(mount: &MountInfo, own: &[MountInfo]) -> bool {
    let place = Path::new(SHARED_MEMORY);
    let is_it = |it: &MountInfo| it.majmin == mount.majmin && it.mount_point == place;
    mount.mount_point == place
        && mount.mount_source.as_deref() == Some("shm")
        && !own.iter().any(is_it)
}

/// A path without the escapes that the kernel has put into it.
fn unescaped(path: &Path) -> PathBuf {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let bytes = path.as_os_str().as_bytes();
    let (mut plain, mut at) = (Vec::with_capacity(bytes.len()), 0);
    while at < bytes.len() {
        let digits = bytes.get(at + 1..at + 4).filter(|_| bytes[at] == b'\\');
        let value = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        match value.and_then(|value| u8::from_str_radix(value, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                at += 4;
            }
            None => {
                plain.push(bytes[at]);
                at += 1;
            }
        }
    }
    std::ffi::OsString::from_vec(plain).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(majmin: &str, root: &str, place: &str, fs_type: &str) -> MountInfo {
        MountInfo {
            mnt_id: 0,
            pid: 1,
            majmin: majmin.into(),
            root: root.into(),
            mount_point: place.into(),
            mount_options: Default::default(),
            opt_fields: Vec::new(),
            fs_type: fs_type.into(),
            mount_source: None,
            super_options: Default::default(),
        }
    }

    #[test]
    fn what_a_container_made_itself_is_told_from_what_is_the_hosts() {
        let own = [mount("0:5", "/", "/run", "tmpfs"), mount("0:6", "/", "/proc", "proc")];
        let mut all = [
            mount("8:1", "/", "/volume", "ext4"),
            mount("0:6", "/", "/proc", "proc"),
            mount("0:6", "/sys", "/proc/sys", "proc"),
            mount("0:7", "/", "/tmp", "tmpfs"),
            mount("0:7", "/a", "/bound", "tmpfs"),
            mount("0:5", "/secrets", "/run/secrets", "tmpfs"),
            mount("0:5", "/", "/host", "tmpfs"),
            mount("0:9", "/part", "/part", "tmpfs"),
            mount("0:10", "/", "/overlay", "overlay"),
            mount("0:11", "/part", "/sys/fs/cgroup", "cgroup2"),
            mount("0:12", "/", "/dev/pts", "devpts"),
            mount("0:12", "/0", "/dev/console", "devpts"),
        ];
        let found: Vec<_> = outer(&all, &own).map(|m| m.mount_point.to_str().unwrap()).collect();
        assert_eq!(found, ["/volume", "/run/secrets", "/host", "/part", "/overlay"]);
        (1..).zip(&mut all).for_each(|(id, mount)| mount.mnt_id = id);
        let anew: Vec<_> = made_anew(&all, &own).map(|m| m.mount_point.to_str().unwrap()).collect();
        assert_eq!(anew, ["/proc", "/proc/sys", "/tmp", "/bound", "/dev/pts"]);
        let left: Vec<_> = all.iter().filter(|m| is_left_out(m, &own)).collect();
        let left: Vec<_> = left.iter().map(|m| m.mount_point.to_str().unwrap()).collect();
        assert_eq!(left, ["/sys/fs/cgroup", "/dev/console"]);
        assert_eq!(device("8:17"), Some(rustix::fs::makedev(8, 17)));
    }

    #[test]
    fn shared_memory_that_was_made_for_a_container_is_its_own() {
        let shm = |majmin: &str, place: &str, source: &str| MountInfo {
            mount_source: Some(source.into()),
            ..mount(majmin, "/", place, "tmpfs")
        };
        let own = [shm("0:5", "/dev/shm", "tmpfs"), shm("0:6", "/run/podman/shm", "shm")];
        let all = [shm("0:6", "/dev/shm", "shm")];
        assert_eq!(outer(&all, &own).count(), 0);
        assert_eq!(made_anew(&all, &own).count(), 1);
        for hosts in [shm("0:5", "/dev/shm", "tmpfs"), shm("0:6", "/other", "shm")] {
            assert_eq!(outer(&[hosts], &own).count(), 1);
        }
    }

    #[test]
    fn paths_are_those_of_the_mounts() {
        assert_eq!(unescaped(Path::new("/a\\040b\\134c\\011")), Path::new("/a b\\c\t"));
        assert_eq!(unescaped(Path::new("/a\\04")), Path::new("/a\\04"));
        assert_eq!(unescaped(Path::new("/a\\999")), Path::new("/a\\999"));
    }

    #[test]
    fn this_process_is_in_no_container_of_its_own() {
        let own = ProcessInfo::read(std::process::id()).expect("it runs");
        assert!(Container::of(&own).expect("looked at").is_none());
    }
}
