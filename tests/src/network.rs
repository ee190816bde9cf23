//! Networks of their own for programs.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Result;
use gpucr_core::network::NetworkNamespace;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::command::until;
use crate::started::Started;

/// A network namespace whose loopback device is up. It is there for as long as this is, or somebody is in it.
pub struct Network {
    /// Is in it, and has other namespaces of this test.
    keeper: Started,
    namespace: NetworkNamespace,
}

impl Network {
    /// Makes it.
    ///
    /// # Errors
    /// This is not for this user.
    pub fn new() -> Result<Self> {
        let mut command = Command::new("sleep");
        command.arg("100000").stdin(Stdio::null());
        // SAFETY: it makes system calls alone.
        unsafe { command.pre_exec(own_network) };
        let keeper = Started::spawn(&mut command)?;
        let namespace = NetworkNamespace::at(&path_of(keeper.id()))?;
        until("its loopback device is up", || matches!(namespace.has_loopback(), Ok(true)))?;
        Ok(Self { keeper, namespace })
    }

    /// Where `gpucr restore --netns` finds it.
    pub fn path(&self) -> String {
        path_of(self.keeper.id()).to_string_lossy().into_owned()
    }

    /// Does something in it.
    ///
    /// # Errors
    /// The error of the work.
    pub fn visit<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> Result<T> {
        Ok(self.namespace.visit(work)?)
    }

    /// Whether process `pid` is in it.
    ///
    /// # Errors
    /// There is no such process.
    pub fn has(&self, pid: u32) -> Result<bool> {
        Ok(NetworkNamespace::at(&path_of(pid))?.name() == self.namespace.name())
    }

    /// Has a command start in it.
    pub fn take(&self, command: &mut Command) {
        let namespace = self.namespace.clone();
        // SAFETY: it makes one system call; the descriptor lives as long as the closure that has it.
        unsafe {
            command.pre_exec(move || {
                Ok(move_into_link_name_space(
                    std::os::fd::AsFd::as_fd(&namespace),
                    Some(LinkNameSpaceType::Network),
                )?)
            });
        }
    }
}

fn path_of(pid: u32) -> PathBuf {
    format!("/proc/{pid}/ns/net").into()
}

/// Gives the calling process a network of its own, whose loopback device is up: CRIU looks what it can do with that. It
/// makes system calls that are async-signal-safe, and nothing else.
pub(crate) fn own_network() -> io::Result<()> {
    // SAFETY: system calls; the request names a device, and is whole.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[..2].copy_from_slice(&[b'l' as libc::c_char, b'o' as libc::c_char]);
        request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        libc::unshare(libc::CLONE_NEWNET) == 0 && {
            let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            socket >= 0 && libc::ioctl(socket, libc::SIOCSIFFLAGS, &request) == 0
        }
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}
