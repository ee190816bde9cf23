//! What a restore makes the mounts of a container from.
//!
//! CRIU takes paths. What they lead to, or what is mounted on the way there, could be changed by whoever can write to the
//! container's files. So each of the trees is found first, and mounted where nobody else can see it. What the host mounts
//! or unmounts in them later does not come there.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};

use super::mount::{ContainerError, OuterMount, key};
use crate::base::file_tree::FileTree;
use crate::base::runtime_dir;
use crate::host::ns::{self, Id, Namespace};

/// The directory below gpucr's own on which the trees are mounted.
const DIR: &str = "roots";

/// The trees, in place.
#[derive(Debug)]
pub struct Staged {
    /// Where the root is.
    pub root: PathBuf,
    /// What CRIU is told of the other mounts when it makes them.
    pub external: Vec<String>,
    /// Which directory the root is.
    id: Id,
}

/// Finds what is to be mounted at each place: what the tree has there, or what is mounted there in the tree.
///
/// # Errors
/// Something is not there, or not of the same kind.
fn sources(tree: &FileTree, mounts: &[OuterMount]) -> Result<Vec<File>, ContainerError> {
    mounts.iter().map(|mount| source(tree, mount)).collect()
}

/// Everything that keeps the mounts from being made below this root. `made_anew`: where CRIU makes file systems anew, with
/// the places in them at which others are mounted; none if nobody knows.
pub fn lacking(
    tree: &FileTree,
    mounts: &[OuterMount],
    made_anew: Option<&[PathBuf]>,
) -> Vec<ContainerError> {
    let is_known = |place: &Path| mounts.iter().any(|mount| mount.place == place);
    let strange = tree.mounts().filter(|(place, _)| !is_known(place));
    let strange = strange.map(|(place, _)| ContainerError::NoSuchMount { place: place.to_owned() });
    let mut found: Vec<ContainerError> = strange.collect();
    for mount in mounts {
        let is_inside = |outer: &Path| mount.place != outer && mount.place.starts_with(outer);
        let is_made = |made: &[PathBuf]| made.iter().any(|outer| is_inside(outer));
        let is_on_another = || mounts.iter().any(|other| is_inside(&other.place));
        if let Err(error) = source(tree, mount) {
            found.push(error);
        } else if made_anew.is_some_and(|made| !is_made(made)) && !is_on_another() {
            found.extend(no_point(tree, &mount.place, mount.is_directory));
        }
    }
    for place in made_anew.into_iter().flatten() {
        let is_inside = |outer: &PathBuf| place != outer && place.starts_with(outer);
        let is_on_another = mounts.iter().any(|mount| is_inside(&mount.place))
            || made_anew.is_some_and(|made| made.iter().any(is_inside));
        if !is_on_another {
            // Nobody has said whether it is a directory: hardly ever is it none.
            let there = tree.find_in_root(place).and_then(|point| point.metadata());
            if there.is_err() {
                found.extend(no_point(tree, place, true));
            }
        }
    }
    found
}

/// Why nothing can be mounted at this place in the root directory; none if it can.
fn no_point(tree: &FileTree, place: &Path, is_directory: bool) -> Option<ContainerError> {
    let point = tree.find_in_root(place).and_then(|point| point.metadata());
    let (why, is_missing) = match point {
        Ok(meta) if meta.is_dir() == is_directory => return None,
        Ok(_) if is_directory => ("it is no directory".to_owned(), false),
        Ok(_) => ("it is a directory".to_owned(), false),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ("it does not exist".to_owned(), true)
        }
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) => {
            ("a symbolic link leads there".to_owned(), false)
        }
        Err(error) => (format!("it cannot be looked at: {error}"), false),
    };
    Some(ContainerError::NoPoint { place: place.to_owned(), is_directory, why, is_missing })
}

fn source(tree: &FileTree, mount: &OuterMount) -> Result<File, ContainerError> {
    let lacking = |why| ContainerError::Lacking { place: mount.place.clone(), why };
    let found = tree.find_without_links(&mount.place);
    let found = found.map_err(|error| lacking(error.to_string()))?;
    let meta = found.metadata().map_err(|error| lacking(error.to_string()))?;
    match (mount.is_directory, meta.is_dir()) {
        (true, false) => Err(lacking("it was a directory".to_owned())),
        (false, true) => Err(lacking("it was no directory".to_owned())),
        _ => Ok(found),
    }
}

impl Staged {
    /// Mounts them. This process must have mounts of its own, which nobody else sees; they stay as long as these.
    ///
    /// # Errors
    /// Something is not there, or cannot be mounted.
    pub fn new(root: &FileTree, mounts: &[OuterMount]) -> Result<Self, ContainerError> {
        let failed = |what: &str, source| ContainerError::Stage { what: what.to_owned(), source };
        let sources = sources(root, mounts)?;
        let made = runtime_dir::open(DIR);
        made.map_err(|source| failed("a place for the program's mounts", source))?;
        let dir = runtime_dir::path_of(DIR);
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("gpucr", &dir, "tmpfs", flags, Some(c"mode=0700"))
            .and_then(|()| rustix::mount::mount_change(&dir, MountPropagationFlags::PRIVATE))
            .map_err(|error| failed("a place for the program's mounts", error.into()))?;
        let root = root.root().unwrap_or(CWD);
        let put = |from: std::os::fd::BorrowedFd<'_>, name: &str, is_directory| {
            clone_to(from, &dir.join(name), is_directory)
        };
        put(root, "root", true).map_err(|source| failed("the program's root", source))?;
        for (n, (mount, source)) in mounts.iter().zip(&sources).enumerate() {
            put(source.as_fd(), &key(n), mount.is_directory)
                .map_err(|source| failed(&mount.place.display().to_string(), source))?;
        }
        let external = (0..mounts.len()).map(key);
        let external = external.map(|key| format!("mnt[{key}]:{}", dir.join(&key).display()));
        let stat = rustix::fs::fstat(root).map_err(|error| failed("its root", error.into()))?;
        let id = (stat.st_dev, stat.st_ino);
        Ok(Self { root: dir.join("root"), external: external.collect(), id })
    }

    /// Refuses a process that has other mounts than those that were made of these: what CRIU does is up to the files of an
    /// image.
    ///
    /// # Errors
    /// [`ContainerError::OtherRoot`], or it cannot be looked at.
    pub fn refuse_others(&self, pid: u32) -> Result<(), ContainerError> {
        let unreadable = |source| ContainerError::Unreadable { pid, source };
        let mounts = Namespace::of(pid, "mnt").map_err(unreadable)?;
        let own = Namespace::own("mnt").and_then(|own| own.id()).map_err(unreadable)?;
        let has_own = mounts.id().map_err(unreadable)? != own;
        let root = ns::root_of_mounts(&mounts).map_err(unreadable)?;
        if has_own && root == self.id { Ok(()) } else { Err(ContainerError::OtherRoot { pid }) }
    }
}

/// Mounts what a descriptor is of at a new place, without what is mounted below it.
fn clone_to(
    from: std::os::fd::BorrowedFd<'_>,
    to: &Path,
    is_directory: bool,
) -> std::io::Result<()> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_EMPTY_PATH;
    let tree = rustix::mount::open_tree(from, c"", flags)?;
    if is_directory {
        std::fs::create_dir(to)?;
    } else {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        rustix::fs::open(to, flags, Mode::RUSR)?;
    }
    rustix::mount::move_mount(tree, c"", CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    rustix::mount::mount_change(to, MountPropagationFlags::PRIVATE)?;
    // With nobody so far. A mount that was a slave of one outside becomes one of this, which CRIU requires.
    Ok(rustix::mount::mount_change(to, MountPropagationFlags::SHARED)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_is_lacking_is_told_at_once() {
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(dir.path().join("etc")).expect("made");
        std::fs::write(dir.path().join("etc/hostname"), b"").expect("written");
        let mount = |place: &str, is_directory| OuterMount { place: place.into(), is_directory };
        let mounts = [
            mount("/etc/hostname", false),
            mount("/etc/hosts", false),
            mount("/proc/keys", false),
            mount("/data", true),
            mount("/data/more", true),
        ];
        let open = |path: &Path| std::os::fd::OwnedFd::from(File::open(path).expect("opened"));
        let given = |places: &[&str]| {
            let file = |place: &&str| place.contains("/etc/") || place.contains("/proc/");
            let source = |place: &&str| match file(place) {
                true => open(Path::new("/dev/null")),
                false => open(Path::new("/usr")),
            };
            let mounts = places.iter().map(|place| (PathBuf::from(place), source(place)));
            FileTree::of(open(dir.path()), mounts.collect())
        };
        let told = |places: &[&str], made: Option<&[PathBuf]>| -> Vec<String> {
            let all = lacking(&given(places), &mounts, made);
            all.iter().map(|error| error.to_string()).collect()
        };
        let made = [PathBuf::from("/proc")];
        std::fs::create_dir(dir.path().join("proc")).expect("made");
        let has = |all: &[String], what: &[(&str, &str)]| {
            let said = |(error, (place, words)): (&String, &(&str, &str))| {
                error.contains(place) && error.contains(words)
            };
            assert!(all.len() == what.len() && all.iter().zip(what).all(said), "{all:#?} {what:?}");
        };
        let nothing = "nothing is there";
        let all = [("/etc/hosts", nothing), ("/proc/keys", nothing), ("/data", nothing)];
        has(
            &told(&["/nowhere"], Some(&made)),
            &[
                ("/nowhere", "nothing from outside"),
                all[0],
                all[1],
                all[2],
                ("/data/more", nothing),
            ],
        );
        let every = ["/etc/hosts", "/proc/keys", "/data", "/data/more"];
        let no_point = "does not exist";
        has(&told(&every, Some(&made)), &[("/etc/hosts", no_point), ("/data", no_point)]);
        has(&told(&every, None), &[]);
        std::fs::create_dir(dir.path().join("data")).expect("made");
        std::fs::write(dir.path().join("etc/hosts"), b"").expect("written");
        has(&told(&every, Some(&made)), &[]);
        // What CRIU mounts by itself needs a place too, and a link is none.
        let more = [made[0].clone(), PathBuf::from("/dev")];
        has(&told(&every, Some(&more)), &[("/dev", no_point)]);
        std::fs::remove_file(dir.path().join("etc/hosts")).expect("removed");
        std::os::unix::fs::symlink("/etc/nologin", dir.path().join("etc/hosts")).expect("made");
        has(&told(&every, Some(&made)), &[("/etc/hosts", "a symbolic link")]);
    }

    /// What CRIU makes is made by what the files of an image say.
    #[test]
    fn a_process_with_other_mounts_is_refused() {
        let staged = |id| Staged { root: "/".into(), external: Vec::new(), id };
        let own = ns::own_root().expect("it is there");
        let refused = |staged: &Staged, pid| {
            matches!(staged.refuse_others(pid), Err(ContainerError::OtherRoot { .. }))
        };
        assert!(refused(&staged(own), std::process::id()), "these are the mounts of the host");
        /// It ends with the test, whatever comes of that.
        struct Child(std::process::Child);
        impl Drop for Child {
            fn drop(&mut self) {
                self.0.kill().expect("it is killed");
                self.0.wait().expect("it ends");
            }
        }
        let mut command = std::process::Command::new("unshare");
        let child = Child(command.args(["--mount", "sleep", "600"]).spawn().expect("it starts"));
        let pid = child.0.id();
        let mounts = |pid: u32| Namespace::of(pid, "mnt").and_then(|mounts| mounts.id()).ok();
        while mounts(pid) == mounts(std::process::id()) {
            std::thread::yield_now();
        }
        assert!(refused(&staged((own.0, own.1 + 1)), pid), "it has another root");
        staged(own).refuse_others(pid).expect("it has this root, and mounts of its own");
    }
}
