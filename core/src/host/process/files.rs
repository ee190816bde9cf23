//! The files that a process has open or mapped: a restore needs them where they were.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::process::{FDInfo, FDPermissions, FDTarget, MMPermissions, MMapPath, Process};

use crate::base::file_tree::FileTree;
use crate::image::{RequiredFile, Stdio};

/// The regular files that the processes have open or mapped, by path in their `tree`, and `renamed` ones, which they have opened by
/// other names; those that are deleted or that have no path here are left out: CRIU carries or refuses them. The sizes
/// mean something only while the processes are stopped.
pub fn required(
    pids: impl IntoIterator<Item = u32>,
    renamed: &BTreeSet<PathBuf>,
    tree: &FileTree,
) -> Vec<RequiredFile> {
    let mut found = BTreeMap::new();
    let mut add = |path: PathBuf, mapped: bool| {
        let Ok(meta) = tree.metadata(&path) else { return };
        if meta.is_file() && !path.starts_with("/proc") && !path.starts_with("/sys") {
            let size = meta.size();
            let new = RequiredFile { path: path.clone(), size, mapped: false, open: false };
            let file = found.entry(path).or_insert(new);
            file.mapped |= mapped;
            file.open |= !mapped;
        }
    };
    for path in renamed {
        add(path.clone(), false);
    }
    for pid in pids {
        if let Ok(process) = Process::new(pid as i32) {
            add_files_of(&process, &mut add);
        }
    }
    found.into_values().collect()
}

fn add_files_of(process: &Process, add: &mut dyn FnMut(PathBuf, bool)) {
    for map in process.maps().into_iter().flatten() {
        if let MMapPath::Path(path) = map.pathname {
            add(path, true);
        }
    }
    for fd in process.fd().into_iter().flatten().flatten() {
        if let FDTarget::Path(path) = fd.target {
            add(path, false);
        }
    }
}

/// A regular file that a process has open or mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldFile {
    /// Its path.
    pub path: PathBuf,
    /// Where it can be opened, whatever has its path by now.
    pub link: PathBuf,
}

/// The regular files that the processes have open for writing, or mapped so that what they write there is in the file,
/// each once: by the path in their `tree` by which they were opened, or by the one of the `renamed` that is another name of
/// it. Not those that are deleted, or that have no path here.
pub fn written(
    pids: impl IntoIterator<Item = u32>,
    renamed: &BTreeSet<PathBuf>,
    tree: &FileTree,
) -> Vec<HeldFile> {
    held(pids, renamed, tree, |fd| fd.mode().contains(FDPermissions::WRITE))
}

/// The same, and with them the files that the processes have open for reading. Not those that one of them has mapped to
/// be run, nor those that they have open by two names: whoever makes a copy of each makes two files of them.
pub fn open_and_written(
    pids: &[u32],
    renamed: &BTreeSet<PathBuf>,
    tree: &FileTree,
) -> Vec<HeldFile> {
    let run = run_files(pids);
    let mut found = held(pids.iter().copied(), renamed, tree, |_| true);
    let number =
        |file: &HeldFile| std::fs::metadata(&file.link).ok().map(|meta| (meta.dev(), meta.ino()));
    let numbers: Vec<_> = found.iter().map(number).collect();
    let mut names = BTreeMap::new();
    numbers.iter().flatten().for_each(|number| *names.entry(*number).or_insert(0) += 1);
    let mut numbers = numbers.into_iter();
    found.retain(|_| {
        let number = numbers.next().flatten();
        number.is_some_and(|number| !run.contains(&number) && names.get(&number) == Some(&1))
    });
    found
}

/// By device and inode: the files that the processes have mapped to be run.
fn run_files(pids: &[u32]) -> BTreeSet<(u64, u64)> {
    let mut found = BTreeSet::new();
    for pid in pids {
        let Ok(process) = Process::new(*pid as i32) else { continue };
        for map in process.maps().into_iter().flatten() {
            let is_run = map.perms.contains(MMPermissions::EXECUTE);
            if is_run && matches!(map.pathname, MMapPath::Path(_)) {
                let meta = std::fs::metadata(mapped_link(*pid, map.address));
                found.extend(meta.ok().map(|meta| (meta.dev(), meta.ino())));
            }
        }
    }
    found
}

fn mapped_link(pid: u32, (start, end): (u64, u64)) -> String {
    format!("/proc/{pid}/map_files/{start:x}-{end:x}")
}

/// The files of which a process has such a descriptor, or which it has mapped so that what it writes there is in the
/// file.
fn held(
    pids: impl IntoIterator<Item = u32>,
    renamed: &BTreeSet<PathBuf>,
    tree: &FileTree,
    is_such: impl Fn(&FDInfo) -> bool,
) -> Vec<HeldFile> {
    let mut found = BTreeMap::new();
    for pid in pids {
        let Ok(process) = Process::new(pid as i32) else { continue };
        let mut add = |path: PathBuf, link: String| {
            let link = PathBuf::from(link);
            let Ok(own) = std::fs::metadata(&link) else { return };
            let is_it = |path: &&PathBuf| {
                tree.metadata(path)
                    .is_ok_and(|named| (named.dev(), named.ino()) == (own.dev(), own.ino()))
            };
            let path = std::iter::once(&path).chain(renamed).find(is_it);
            let Some(path) = path.filter(|path| own.is_file() && !path.starts_with("/proc")) else {
                return;
            };
            found.entry(path.clone()).or_insert(link);
        };
        for fd in process.fd().into_iter().flatten().flatten() {
            if let (FDTarget::Path(path), true) = (&fd.target, is_such(&fd)) {
                add(path.clone(), format!("/proc/{pid}/fd/{}", fd.fd));
            }
        }
        for map in process.maps().into_iter().flatten() {
            let is_written = map.perms.contains(MMPermissions::SHARED | MMPermissions::WRITE);
            if let (MMapPath::Path(path), true) = (map.pathname, is_written) {
                add(path, mapped_link(pid, map.address));
            }
        }
    }
    found.into_iter().map(|(path, link)| HeldFile { path, link }).collect()
}

/// What the standard streams of process `pid` are connected to. Pipes in `inner` lead to other
/// processes of the same tree and are CRIU's matter alone.
pub fn stdio(pid: u32, inner: &BTreeSet<u64>) -> [Stdio; 3] {
    [0, 1, 2].map(|fd| {
        let link = format!("/proc/{pid}/fd/{fd}");
        let Ok(target) = std::fs::read_link(&link) else { return Stdio::Closed };
        let text = target.to_string_lossy().into_owned();
        if let Some(inode) = pipe_inode(&text).filter(|inode| !inner.contains(inode)) {
            return Stdio::Pipe { inode };
        }
        match std::fs::metadata(&link) {
            _ if text == "/dev/null" => Stdio::DevNull,
            Ok(meta) if meta.is_file() => Stdio::File { path: target },
            Ok(meta) if is_terminal(&target) => {
                Stdio::Terminal { path: target, rdev: meta.rdev(), dev: meta.dev() }
            }
            _ => Stdio::Other { target: text },
        }
    })
}

/// The pipes of which both ends are held inside of a tree of processes.
pub fn inner_pipes(pids: impl IntoIterator<Item = u32>) -> BTreeSet<u64> {
    let (mut read, mut written) = (BTreeSet::new(), BTreeSet::new());
    for pid in pids {
        let Ok(process) = Process::new(pid as i32) else { continue };
        for fd in process.fd().into_iter().flatten().flatten() {
            if let FDTarget::Pipe(inode) = fd.target {
                if fd.mode().contains(FDPermissions::READ) {
                    read.insert(inode);
                }
                if fd.mode().contains(FDPermissions::WRITE) {
                    written.insert(inode);
                }
            }
        }
    }
    read.intersection(&written).copied().collect()
}

fn pipe_inode(target: &str) -> Option<u64> {
    target.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

fn is_terminal(path: &Path) -> bool {
    path.starts_with("/dev/pts")
        || path.to_string_lossy().starts_with("/dev/tty")
        || path == Path::new("/dev/console")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_mapped_to_be_written_are_seen_by_the_names_that_they_have() {
        let dir = tempfile::tempdir().expect("a directory");
        let map = |name: &str, flags| {
            let path = dir.path().join(name);
            std::fs::write(&path, [1; 4096]).expect("written");
            let file = std::fs::File::options().read(true).write(true).open(&path).expect("opened");
            let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
            // SAFETY: a new mapping, anywhere, which is left to the end of this process.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, flags, &file, 0) }
                .expect("mapped");
            path
        };
        use rustix::mm::MapFlags;
        let (shared, private) =
            (map("shared", MapFlags::SHARED), map("private", MapFlags::PRIVATE));
        let (gone, name) = (map("gone", MapFlags::SHARED), dir.path().join("name"));
        std::fs::hard_link(&gone, &name).expect("linked");
        std::fs::remove_file(&gone).expect("removed");
        let renamed = BTreeSet::from([dir.path().join("nothing"), name.clone()]);
        let found = written([std::process::id()], &renamed, &FileTree::host());
        let has = |path: &Path| found.iter().any(|file| file.path == path);
        assert!(has(&shared) && has(&name), "{found:?}");
        assert!(!has(&private) && !has(&gone), "{found:?}");
        let read =
            found.iter().find(|file| file.path == name).map(|file| std::fs::read(&file.link));
        assert_eq!(read.expect("found").expect("read"), [1; 4096]);
    }

    #[test]
    fn what_is_run_or_has_two_names_is_not_copied() {
        let dir = tempfile::tempdir().expect("a directory");
        let open = |name: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, [1; 4096]).expect("written");
            let file = std::fs::File::open(&path).expect("opened");
            (path, file)
        };
        let map = |file: &std::fs::File, access| {
            let flags = rustix::mm::MapFlags::PRIVATE;
            // SAFETY: a new mapping, anywhere, which is left to the end of this process and not touched.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), 4096, access, flags, file, 0) }
                .expect("mapped");
        };
        let (read, run, gone) = (open("read"), open("run"), open("gone"));
        map(&run.1, rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::EXEC);
        map(&read.1, rustix::mm::ProtFlags::READ);
        std::fs::remove_file(&gone.0).expect("removed");
        let (one, _one) = open("one");
        let other = dir.path().join("other");
        std::fs::hard_link(&one, &other).expect("linked");
        let first = open_and_written(&[std::process::id()], &BTreeSet::new(), &FileTree::host());
        let _other = std::fs::File::open(&other).expect("opened");
        let then = open_and_written(&[std::process::id()], &BTreeSet::new(), &FileTree::host());
        let has = |found: &[HeldFile], path: &Path| found.iter().any(|file| file.path == path);
        assert!(has(&first, &read.0) && has(&first, &one), "{first:?}");
        assert!(!has(&first, &run.0) && !has(&first, &gone.0), "{first:?}");
        assert!(has(&then, &read.0) && !has(&then, &one) && !has(&then, &other), "{then:?}");
    }

    #[test]
    fn an_open_file_a_library_and_a_pipe_are_seen() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        std::fs::write(file.path(), b"12345").expect("written");
        let open = std::fs::File::open(file.path()).expect("opened");
        let mut child = std::process::Command::new("sleep")
            .arg("30")
            .stdin(open)
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("started");
        // Until the child has replaced itself its memory is that of this test.
        while std::fs::read_to_string(format!("/proc/{}/comm", child.id()))
            .is_ok_and(|comm| comm.trim() != "sleep")
        {
            std::thread::yield_now();
        }
        let required = required([child.id()], &BTreeSet::new(), &FileTree::host());
        let path = file.path().to_owned();
        let expected = RequiredFile { path: path.clone(), size: 5, mapped: false, open: true };
        assert!(required.contains(&expected), "{required:?}");
        assert!(required.iter().any(|f| f.mapped && f.path.ends_with("sleep")), "{required:?}");
        let [stdin, stdout, _] = stdio(child.id(), &BTreeSet::new());
        assert_eq!(stdin, Stdio::File { path });
        let Stdio::Pipe { inode } = stdout else { panic!("{stdout:?}") };
        // The reading end is in this process.
        assert!(!inner_pipes([child.id()]).contains(&inode));
        assert!(inner_pipes([child.id(), std::process::id()]).contains(&inode));
        child.kill().expect("killed");
        child.wait().expect("reaped");
    }
}
