//! The tree of processes below a pid, as `/proc` shows it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use procfs::process::{MMapPath, Process, Stat};

use crate::base::foreign::Foreign;

/// How long a process takes to end, from the end of its connections on.
pub(crate) const LAST_MOMENTS: Duration = Duration::from_secs(5);

/// Bytes of a command line that are read; a program may make its own as long as it likes.
const LONGEST_COMMAND: u64 = 1 << 20;

/// Bytes of an environment that are read.
const LONGEST_ENVIRONMENT: u64 = 4 << 20;

/// More generations than are in any tree.
const DEEPEST: usize = 1 << 16;

/// Why a process or its tree cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// There is no such process.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// This user may not look at it.
    #[error("process {0} belongs to another user, or has more privileges than you")]
    NotYours(u32),
    /// `/proc` cannot be read.
    #[error("process {pid} cannot be read: {cause}")]
    Unreadable {
        /// The process.
        pid: u32,
        /// Why.
        cause: procfs::ProcError,
    },
}

impl TreeError {
    fn reading(pid: u32, cause: procfs::ProcError) -> Self {
        match cause {
            procfs::ProcError::NotFound(_) => Self::NoProcess(pid),
            procfs::ProcError::PermissionDenied(_) => Self::NotYours(pid),
            cause => Self::Unreadable { pid, cause },
        }
    }
}

/// A library that a process has mapped.
#[derive(Debug, Clone)]
pub struct MappedLibrary {
    /// Its path, as the process would name it.
    pub path: PathBuf,
    pid: u32,
    /// Addresses of the mapping.
    from: u64,
    to: u64,
}

impl MappedLibrary {
    /// Opens the very file that is mapped, whatever its path leads to now. Without the right to that, as an
    /// ordinary user has it, what the path leads to in the process's file system.
    ///
    /// # Errors
    /// It is there no more, is no regular file, or its file system does not answer.
    pub(crate) fn open(&self) -> std::io::Result<Foreign> {
        let Self { pid, from, to, .. } = self;
        let mapped =
            Foreign::open(&PathBuf::from(format!("/proc/{pid}/map_files/{from:x}-{to:x}")));
        mapped.or_else(|_| {
            let root = PathBuf::from(format!("/proc/{pid}/root"));
            Foreign::open(&root.join(self.path.strip_prefix("/").unwrap_or(&self.path)))
        })
    }
}

/// One process.
#[derive(Debug)]
pub struct ProcessInfo {
    /// Its pid as gpucr sees it.
    pub pid: u32,
    /// Its pid as it sees itself, in the innermost pid namespace.
    pub inner_pid: u32,
    /// The number of that namespace; 0 if it cannot be told.
    pub pid_namespace: u64,
    /// Its parent.
    pub parent: u32,
    /// Its session; 0 where the leader is outside of this pid namespace.
    pub session: u32,
    /// Command line.
    pub command: Vec<String>,
    /// Driver libraries that it has mapped, the shim among them.
    pub driver_libraries: Vec<MappedLibrary>,
    /// Whether its main thread has ended, and others go on.
    pub is_headless: bool,
    /// Refers to this very process even if its pid is used again.
    pidfd: OwnedFd,
}

/// The pid as the kernel's calls take it. None is negative: there it would mean a group of processes.
pub fn raw_pid(pid: u32) -> Option<rustix::process::Pid> {
    i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw)
}

/// Whether process `pid` is `root` or descends from it. One that has ended does not.
pub fn descends_from(pid: u32, root: u32) -> bool {
    ancestors(pid).any(|pid| pid == root)
}

/// Process `pid`, its parent, the parent of that, and so on.
pub(super) fn ancestors(pid: u32) -> impl Iterator<Item = u32> {
    let parent = |pid: &u32| {
        let stat = Process::new(i32::try_from(*pid).ok()?).ok()?.stat().ok()?;
        u32::try_from(stat.ppid).ok().filter(|parent| *parent > 0)
    };
    std::iter::successors(Some(pid), parent).take(DEEPEST)
}

/// What names a process in all pid namespaces: its own one, and its pid there. Nothing if it has ended.
pub fn identity(pid: u32) -> Option<(u64, u32)> {
    let status = Process::new(i32::try_from(pid).ok()?).ok()?.status().ok()?;
    let inner = status.nspid.and_then(|pids| pids.last().copied())?;
    Some((gpucr_wire::pid_namespace(pid).ok()?, u32::try_from(inner).ok()?))
}

/// Whether the process of this [`identity`] descends from process `root`, or is it.
pub fn has_in_tree(root: u32, wanted: (u64, u32)) -> bool {
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    let mut pids = all.filter_map(|process| u32::try_from(process.pid).ok());
    pids.any(|pid| descends_from(pid, root) && identity(pid) == Some(wanted))
}

/// What a variable was in the environment with which a process was started, if that can be read.
pub fn environment(pid: u32, name: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let file = File::open(directory(pid).join("environ")).ok()?;
    file.take(LONGEST_ENVIRONMENT).read_to_end(&mut bytes).ok()?;
    let mut entries = bytes.split(|byte| *byte == 0);
    let value = entries.find_map(|one| one.strip_prefix(name.as_bytes())?.strip_prefix(b"="))?;
    String::from_utf8(value.to_vec()).ok()
}

/// Ends the processes of these that have not ended, and their descendants. Gives the pids of all that it has
/// ended, parents before their children.
pub(crate) fn kill_trees<'a>(processes: impl Iterator<Item = &'a ProcessInfo>) -> Vec<u32> {
    let mut killed = Vec::new();
    // The descendants of each are read: where a process has ended, the ones that it leaves are in the tree of no other.
    for process in processes {
        let tree = Tree::read(process.pid);
        // If it has ended its pid may be that of a stranger.
        if process.has_ended() {
            continue;
        }
        if let Ok(tree) = tree {
            tree.kill();
            killed.extend(tree.pids());
        }
        process.kill();
    }
    killed
}

/// Kills all processes that descend from this one, but for those that execute the same file, which are gpucr's own. How many
/// there were.
pub fn kill_descendants() -> usize {
    let own = std::process::id();
    let file = |pid: u32| {
        let meta = std::fs::metadata(directory(pid).join("exe")).ok()?;
        Some((meta.dev(), meta.ino()))
    };
    let program = file(own);
    let Ok(all) = procfs::process::all_processes() else { return 0 };
    let others = all.flatten().filter_map(|process| u32::try_from(process.pid).ok());
    // What is killed is the very process that was looked at.
    let found = others
        .filter(|pid| *pid != own && descends_from(*pid, own))
        .filter_map(|pid| ProcessInfo::read_without_libraries(pid).ok())
        .filter(|process| descends_from(process.pid, own))
        .filter(|process| program.is_none() || file(process.pid) != program);
    found.map(|process| process.kill()).count()
}

/// Whether some process is traced by process `tracer`. If that cannot be told it may be.
pub(crate) fn traces_any(tracer: u32) -> bool {
    let Ok(all) = procfs::process::all_processes() else { return true };
    all.flatten()
        .any(|process| process.status().is_ok_and(|status| status.tracerpid as u32 == tracer))
}

/// Kills those of these processes that process `maker` has made, as its own children or as those of this
/// process, and all that descend from them.
pub(crate) fn kill_made(pids: &[u32], maker: u32) {
    let stat = |pid: u32| Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok();
    let Some(since) = stat(maker).map(|stat| stat.starttime) else { return };
    for pid in pids {
        // The tree is read first: then both are of the same process.
        let (Ok(tree), Some(stat)) = (Tree::read(*pid), stat(*pid)) else { continue };
        let parent = stat.ppid as u32;
        if stat.starttime >= since && (parent == maker || parent == std::process::id()) {
            tree.kill();
        }
    }
}

impl ProcessInfo {
    /// Reads process `pid`.
    ///
    /// # Errors
    /// There is no such process, it ends meanwhile, or this user may not look at it.
    pub fn read(pid: u32) -> Result<Self, TreeError> {
        let mut read = Self::read_without_libraries(pid)?;
        let unreadable = |cause| TreeError::reading(pid, cause);
        let process = Process::new_with_root(directory(pid)).map_err(unreadable)?;
        for map in process.maps().map_err(unreadable)? {
            if let MMapPath::Path(path) = map.pathname
                && is_driver_library(&path)
                && !read.driver_libraries.iter().any(|known| known.path == path)
            {
                let (from, to) = map.address;
                read.driver_libraries.push(MappedLibrary { path, pid, from, to });
            }
        }
        Ok(read)
    }

    /// Whether it is in the same namespace of a kind (`user`, `net`) as process `other`. So it is if that cannot be told.
    pub fn shares_namespace(&self, kind: &str, other: u32) -> bool {
        let of = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
        let (others, its) = (of(other), of(self.pid));
        others.is_none() || its.is_none() || others == its
    }

    /// Reads process `pid` except for its driver libraries: there may be very many mappings to go through.
    pub(super) fn read_without_libraries(pid: u32) -> Result<Self, TreeError> {
        let raw = raw_pid(pid).ok_or(TreeError::NoProcess(pid))?;
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty())
            .map_err(|_| TreeError::NoProcess(pid))?;
        let unreadable = |cause| TreeError::reading(pid, cause);
        let main = Process::new(pid as i32).map_err(unreadable)?;
        let stat = main.stat().map_err(unreadable)?;
        let status = main.status().map_err(unreadable)?;
        let inner_pid = status.nspid.and_then(|pids| pids.last().copied()).unwrap_or(pid as i32);
        Ok(Self {
            pid,
            inner_pid: inner_pid as u32,
            pid_namespace: gpucr_wire::pid_namespace(pid).unwrap_or_default(),
            parent: stat.ppid as u32,
            session: stat.session as u32,
            command: command(pid),
            driver_libraries: Vec::new(),
            is_headless: is_headless(&stat),
            pidfd,
        })
    }

    /// Whether the process has ended (a zombie has).
    pub fn has_ended(&self) -> bool {
        let mut poll = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// A copy of a descriptor of the process.
    ///
    /// # Errors
    /// It is not open, the process has ended, or this user may not have it.
    pub(super) fn descriptor(&self, number: i32) -> io::Result<OwnedFd> {
        let flags = rustix::process::PidfdGetfdFlags::empty();
        Ok(rustix::process::pidfd_getfd(&self.pidfd, number, flags)?)
    }

    /// Whether it comes to its end in so long. Its connections end before it does.
    pub fn ends_within(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.has_ended()
    }

    /// Whether it has ended, or is about to: what is read of such a process by its pid is not there any more.
    pub(crate) fn is_ending(&self) -> bool {
        // The first thing that the kernel takes from it is its files.
        let has_files = std::fs::read_link(directory(self.pid).join("root")).is_ok();
        self.has_ended() || !has_files && self.ends_within(LAST_MOMENTS)
    }

    /// Whether a signal has suspended it.
    pub fn is_suspended(&self) -> bool {
        let stat = Process::new(self.pid as i32).and_then(|process| process.stat());
        stat.is_ok_and(|stat| matches!(stat.state, 'T' | 't'))
    }

    /// Kills it at once.
    pub fn kill(&self) {
        self.signal(rustix::process::Signal::KILL);
    }

    /// Has it stop before it runs any further. One that is traced does so when it is let go of.
    pub(crate) fn suspend(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    /// Lets it run after it was [suspended](Self::suspend).
    pub(crate) fn go_on(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        // One that has ended needs none.
        let _ = rustix::process::pidfd_send_signal(self.pidfd.as_fd(), signal);
    }
}

/// Whether these are the figures of a process whose main thread has ended, and others go on.
fn is_headless(stat: &Stat) -> bool {
    stat.state == 'Z' && stat.num_threads > 1
}

/// Where `/proc` shows what belongs to all threads of a process: memory, namespaces, network. That is the
/// process's own directory, or if its main thread has ended that of another thread.
pub(super) fn directory(pid: u32) -> PathBuf {
    let own = PathBuf::from(format!("/proc/{pid}"));
    let stat = Process::new(pid as i32).and_then(|process| process.stat());
    if !stat.is_ok_and(|stat| is_headless(&stat)) {
        return own;
    }
    let threads = std::fs::read_dir(own.join("task")).into_iter().flatten().flatten();
    let lives = |thread: &PathBuf| {
        let thread = Process::new_with_root(thread.clone()).and_then(|thread| thread.stat());
        thread.is_ok_and(|stat| !matches!(stat.state, 'Z' | 'X'))
    };
    threads.map(|thread| thread.path()).find(lives).unwrap_or(own)
}

/// The arguments of a process, as many as fit into the bytes that are read.
fn command(pid: u32) -> Vec<String> {
    let mut bytes = Vec::new();
    let read = File::open(directory(pid).join("cmdline"))
        .and_then(|file| file.take(LONGEST_COMMAND).read_to_end(&mut bytes));
    if read.is_err() || bytes.is_empty() {
        return Vec::new();
    }
    let arguments = bytes.strip_suffix(&[0]).unwrap_or(&bytes).split(|byte| *byte == 0);
    arguments.map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

fn is_driver_library(path: &std::path::Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.starts_with("libcuda.so") || name.starts_with("libsoftcuda.so"))
}

/// A process and all its descendants.
#[derive(Debug)]
pub struct Tree {
    /// The root first, parents before their children.
    pub processes: Vec<ProcessInfo>,
}

impl Tree {
    /// Reads the tree below `root`.
    ///
    /// # Errors
    /// There is no such process, or one of the tree cannot be looked at. One that ends meanwhile is no error, but for
    /// the root.
    pub fn read(root: u32) -> Result<Self, TreeError> {
        let mut processes = vec![ProcessInfo::read(root)?];
        let all: Vec<(u32, u32)> = procfs::process::all_processes()
            .map_err(|cause| TreeError::Unreadable { pid: root, cause })?
            .filter_map(|process| process.ok()?.stat().ok())
            .map(|stat| (stat.pid as u32, stat.ppid as u32))
            .collect();
        let mut next = 0;
        while next < processes.len() {
            let parent = processes[next].pid;
            for (pid, _) in all.iter().filter(|(_, ppid)| *ppid == parent) {
                // A child that has ended in between belongs to the tree no more.
                match ProcessInfo::read(*pid) {
                    Ok(child) => processes.push(child),
                    Err(TreeError::NoProcess(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            next += 1;
        }
        Ok(Self { processes })
    }

    /// The root of the tree.
    pub fn root(&self) -> &ProcessInfo {
        &self.processes[0]
    }

    /// The pids, in the order of the tree.
    pub fn pids(&self) -> Vec<u32> {
        self.processes.iter().map(|p| p.pid).collect()
    }

    /// Kills every process of it, the root last, so that no parent starts a child anew.
    pub fn kill(&self) {
        for process in self.processes.iter().rev() {
            process.kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_pid_is_no_process() {
        for pid in [0, 1 << 31, u32::MAX - 1, u32::MAX] {
            assert!(matches!(Tree::read(pid), Err(TreeError::NoProcess(_))), "{pid}");
        }
    }

    #[test]
    fn descendants_are_told_from_others() {
        let own = std::process::id();
        let mut child = std::process::Command::new("sleep").arg("30").spawn().expect("a child");
        assert!(descends_from(own, own) && descends_from(child.id(), own));
        assert!(!descends_from(own, child.id()) && !descends_from(u32::MAX, own));
        child.kill().expect("killed");
        child.wait().expect("reaped");
        assert!(!descends_from(child.id(), own));
    }

    #[test]
    fn processes_are_known_by_their_environment_and_their_names_in_namespaces() {
        let (name, value) = ("GPUCR_TEST_MARK", "marked");
        let mut marked = std::process::Command::new("sleep");
        let mut marked = marked.arg("30").env(name, value).spawn().expect("a child");
        // The kernel lets this process go on a moment before the new program's environment is there.
        while environment(marked.id(), name).is_none() {
            assert!(marked.try_wait().expect("it is a child").is_none(), "it has no such entry");
            std::thread::yield_now();
        }
        assert_eq!(environment(marked.id(), name).as_deref(), Some(value));
        assert_eq!(environment(marked.id(), &name[1..]), None);
        let own = std::process::id();
        let (it, this) = (identity(marked.id()).expect("it runs"), identity(own).expect("it runs"));
        assert!(it != this && has_in_tree(own, it) && has_in_tree(own, this));
        assert!(has_in_tree(marked.id(), it) && !has_in_tree(marked.id(), this));
        marked.kill().expect("killed");
        marked.wait().expect("reaped");
        assert!(!has_in_tree(own, it));
    }

    #[test]
    fn a_tree_holds_children_and_grandchildren() {
        let mut shell = std::process::Command::new("sh")
            .args(["-c", "sleep 30 & sh -c 'sleep 30; :' & wait"])
            .spawn()
            .expect("a shell");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let tree = loop {
            let tree = Tree::read(shell.id()).expect("read");
            if tree.processes.len() == 4 || std::time::Instant::now() > deadline {
                break tree;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        };
        assert_eq!(tree.processes.len(), 4, "{tree:?}");
        assert_eq!(tree.root().pid, shell.id());
        assert!(!tree.root().has_ended());
        tree.kill();
        shell.wait().expect("reaped");
        assert!(tree.root().has_ended());
        assert!(matches!(Tree::read(shell.id()), Err(TreeError::NoProcess(_))));
    }
}
