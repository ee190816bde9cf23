//! The way into the pid namespace of a program.

use std::ffi::CString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use rustix::process::Signal;
use rustix::thread::LinkNameSpaceType;

use super::process::HeldProcess;
use super::refusal::EntryError;
use super::{pids, tracers};
use crate::base::time_limit::within;
use crate::host::ns::{self, Id, Namespace, own_mounts};

/// How long the root directory of a program may take to be looked at.
const PATIENCE: Duration = Duration::from_secs(20);
/// What is said of one that takes longer.
const SILENT: &str = "the file system of the program's root directory does not answer";

/// How gpucr gets to a process in a pid namespace of its own. All of it belongs to the process that was looked at, even if
/// that ends and another one gets its pid.
#[derive(Debug)]
pub struct Entry {
    process: HeldProcess,
    /// Its pid there.
    pub inner: u32,
    pids: Namespace,
    /// The mounts that gpucr takes too, and the root directory there, which is its own. In a container it keeps its own
    /// mounts, and sees only the processes.
    mounts: Option<(Namespace, Id)>,
}

impl Entry {
    /// Whether it leads into a container.
    pub fn is_of_container(&self) -> bool {
        self.mounts.is_none()
    }

    /// The first process of the namespace, with which the kernel ends all others there; none if this process does not see it.
    ///
    /// # Errors
    /// This process has no descriptors left.
    pub fn first_process(&self) -> io::Result<Option<HeldProcess>> {
        let id = self.pids.id()?;
        let Some(pid) = pids::find_in(id, 1) else { return Ok(None) };
        let process = match HeldProcess::open(pid) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        // It may have ended before that, and its pid be another's; what is seen now of one that lives is its own.
        let is_it = pids::is_in(pid, id, 1) && !process.has_ended()?;
        Ok(is_it.then_some(process))
    }

    /// The process that is wanted.
    pub fn process(&self) -> &HeldProcess {
        &self.process
    }
}

/// How gpucr can [go](spawn_in) to process `pid`, if that is in a pid namespace of its own and gpucr can go there: not where
/// another user may mount what gpucr would execute, nor to users of its own.
///
/// # Errors
/// It would not be safe there.
pub fn entry(pid: u32) -> Result<Option<Entry>, EntryError> {
    let Ok(Some(entry)) = possible_entry(pid) else { return Ok(None) };
    tracers::refuse(pid, &entry.pids)?;
    Ok(Some(entry))
}

fn possible_entry(pid: u32) -> io::Result<Option<Entry>> {
    let process = HeldProcess::open(pid)?;
    let (its, mounts) = (Namespace::of(pid, "pid")?, Namespace::of(pid, "mnt")?);
    if its.id()? == Namespace::own("pid")?.id()? {
        return Ok(None);
    }
    let users = Namespace::of(pid, "user")?;
    // The root directory may be of a file system that never answers.
    let look = move || {
        let own = ns::own_root()?;
        // Its root may be a place where this host's is mounted: gpucr would be at that of its mounts.
        let takes_mounts = ns::root_of(pid)? == own && ns::root_of_mounts(&mounts)? == own;
        Ok((takes_mounts, mounts, own))
    };
    let (takes_mounts, mounts, own) = within(PATIENCE, SILENT, look)?;
    let status = procfs::process::Process::new(pid as i32).and_then(|process| process.status());
    let inner = status.map_err(io::Error::other)?.nspid.and_then(|pids| pids.last().copied());
    // All of that was its own, if it has not ended by now.
    if process.has_ended()? {
        return Ok(None);
    }
    let Some(inner) = inner.and_then(|inner| u32::try_from(inner).ok()) else { return Ok(None) };
    // What is mounted there is executed by gpucr: only who could mount it here may have done so.
    if takes_mounts && !mounts.is_of_own_users()?
        || !its.is_of_own_users()?
        || users.id()? != Namespace::own("user")?.id()?
    {
        return Ok(None);
    }
    let mounts = takes_mounts.then_some((mounts, own));
    Ok(Some(Entry { process, inner, pids: its, mounts }))
}

/// Starts a process in a pid namespace, with the mounts there or, in a container, this process's own, but for a `/proc` that
/// shows the processes there; with this process's directory. If the calling thread ends, it is asked to end too.
///
/// # Errors
/// The process that is wanted has ended (`ESRCH`); this user may not go there; the root directory there is another one
/// than here, so that what is executed there may be anything (`EXDEV`); the directory is not there; the program cannot be
/// started.
pub fn spawn_in(entry: &Entry, command: &mut Command) -> io::Result<Child> {
    let own = Namespace::own("pid")?;
    let copied = |(mounts, root): &(Namespace, Id)| {
        Ok::<_, io::Error>((mounts.as_fd().try_clone_to_owned()?, *root))
    };
    let mounts = entry.mounts.as_ref().map(copied).transpose()?;
    let directory = CString::new(std::env::current_dir()?.into_os_string().into_vec())?;
    // SAFETY: between fork and exec only the system calls prctl, setns, stat and chdir are made, or unshare and mount
    // instead of setns and stat; paths are constants.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::TERM))?;
            match &mounts {
                Some((mounts, root)) if ns::root_after_entering(mounts.as_fd())? != *root => {
                    return Err(rustix::io::Errno::XDEV.into());
                }
                Some(_) => {}
                None => own_mounts()?,
            }
            Ok(rustix::process::chdir(directory.as_c_str())?)
        });
    }
    // Another process may have got its pid there.
    if entry.process.has_ended()? {
        tracing::debug!(pid = entry.process.pid(), "the program has ended");
        return Err(rustix::io::Errno::SRCH.into());
    }
    let kind = Some(LinkNameSpaceType::ProcessID);
    rustix::thread::move_into_link_name_space(entry.pids.as_fd(), kind)?;
    let child = command.spawn();
    rustix::thread::move_into_link_name_space(own.as_fd(), kind)?;
    child
}
