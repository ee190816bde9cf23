//! The pids that a process has in several namespaces.

use std::path::Path;

use crate::host::ns::{Id, Namespace};

/// The pid that a process has here, of which the pid in the namespace of process `first` is known.
pub fn outer_pid(first: u32, inner: u32) -> Option<u32> {
    find_in(Namespace::of(first, "pid").ok()?.id().ok()?, inner)
}

/// The pid that a process has here whose pid in a namespace is `inner`.
pub(super) fn find_in(namespace: Id, inner: u32) -> Option<u32> {
    let processes = procfs::process::all_processes_with_root(Path::new("/proc")).ok()?;
    let mut pids = processes.filter_map(|process| u32::try_from(process.ok()?.pid).ok());
    pids.find(|pid| is_in(*pid, namespace, inner))
}

/// Whether a process is in this namespace, and `inner` its pid there.
pub(super) fn is_in(pid: u32, namespace: Id, inner: u32) -> bool {
    let its = || {
        let status = procfs::process::Process::new(pid as i32).ok()?.status().ok()?;
        Some((Namespace::of(pid, "pid").ok()?.id().ok()?, *status.nspid?.last()?))
    };
    its() == Some((namespace, inner as i32))
}
