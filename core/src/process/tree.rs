//! The tree of processes below a pid, as `/proc` shows it.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use procfs::process::{MMapPath, Process};

/// Why a process or its tree cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TreeError {
    /// There is no such process.
    #[error("there is no process {0}")]
    NoProcess(u32),
    /// `/proc` cannot be read.
    #[error("process {pid} cannot be read: {cause}")]
    Unreadable {
        /// The process.
        pid: u32,
        /// Why.
        cause: procfs::ProcError,
    },
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
    pub driver_libraries: Vec<PathBuf>,
    /// Refers to this very process even if its pid is used again.
    pidfd: OwnedFd,
}

impl ProcessInfo {
    /// Reads process `pid`.
    pub fn read(pid: u32) -> Result<Self, TreeError> {
        let raw = rustix::process::Pid::from_raw(pid as i32).ok_or(TreeError::NoProcess(pid))?;
        let pidfd = rustix::process::pidfd_open(raw, rustix::process::PidfdFlags::empty())
            .map_err(|_| TreeError::NoProcess(pid))?;
        let unreadable = |cause| match cause {
            procfs::ProcError::NotFound(_) => TreeError::NoProcess(pid),
            cause => TreeError::Unreadable { pid, cause },
        };
        let process = Process::new(pid as i32).map_err(unreadable)?;
        let stat = process.stat().map_err(unreadable)?;
        let status = process.status().map_err(unreadable)?;
        let inner_pid = status.nspid.and_then(|pids| pids.last().copied()).unwrap_or(pid as i32);
        let mut driver_libraries = Vec::new();
        for map in process.maps().map_err(unreadable)? {
            if let MMapPath::Path(path) = map.pathname
                && is_driver_library(&path)
                && !driver_libraries.contains(&path)
            {
                driver_libraries.push(path);
            }
        }
        Ok(Self {
            pid,
            inner_pid: inner_pid as u32,
            pid_namespace: gpucr_wire::pid_namespace(pid).unwrap_or_default(),
            parent: stat.ppid as u32,
            session: stat.session as u32,
            command: process.cmdline().unwrap_or_default(),
            driver_libraries,
            pidfd,
        })
    }

    /// Whether the process has ended (a zombie has).
    pub fn has_ended(&self) -> bool {
        let mut poll = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut poll, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Whether a signal has suspended it.
    pub fn is_suspended(&self) -> bool {
        let stat = Process::new(self.pid as i32).and_then(|process| process.stat());
        stat.is_ok_and(|stat| matches!(stat.state, 'T' | 't'))
    }

    /// Kills it at once.
    pub fn kill(&self) {
        let _ =
            rustix::process::pidfd_send_signal(self.pidfd.as_fd(), rustix::process::Signal::KILL);
    }
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
