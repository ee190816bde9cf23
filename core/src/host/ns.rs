//! Namespaces as the kernel shows them: files, which do not change once they are open, whatever becomes of a process.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// `NS_GET_USERNS` of ioctl_ns(2).
const OWNER: libc::Ioctl = 0xb701;
/// `NS_GET_PARENT` of the same.
const PARENT: libc::Ioctl = 0xb702;

/// Device and number, which no other file has.
pub(super) type Id = (u64, u64);

/// A namespace of any kind. It lives as long as this does.
#[derive(Debug)]
pub(super) struct Namespace(File);

impl Namespace {
    /// The one of process `pid`; `kind` is its name in `/proc/PID/ns`.
    pub(super) fn of(pid: u32, kind: &str) -> io::Result<Self> {
        File::open(format!("/proc/{pid}/ns/{kind}")).map(Self)
    }

    /// The one of this process.
    pub(super) fn own(kind: &str) -> io::Result<Self> {
        Self::of(std::process::id(), kind)
    }

    pub(super) fn id(&self) -> io::Result<Id> {
        Ok(id(&self.0.metadata()?))
    }

    /// Whether it belongs to the user namespace of this process, so that nobody has power over it who has none here. Any
    /// user can make namespaces that belong to a user namespace of their own.
    pub(super) fn is_of_own_users(&self) -> io::Result<bool> {
        Ok(self.ask(OWNER)?.id()? == Self::own("user")?.id()?)
    }

    /// The pid namespace around this one; none if this process does not see it.
    pub(super) fn parent(&self) -> io::Result<Option<Self>> {
        match self.ask(PARENT) {
            Err(error) if error.raw_os_error() == Some(Errno::PERM.raw_os_error()) => Ok(None),
            asked => asked.map(Some),
        }
    }

    fn ask(&self, request: libc::Ioctl) -> io::Result<Self> {
        // SAFETY: these requests take no argument, and give a new descriptor.
        let found = unsafe { libc::ioctl(self.0.as_raw_fd(), request) };
        if found < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just made, and nobody else knows it.
        Ok(Self(unsafe { File::from_raw_fd(found) }))
    }
}

impl AsFd for Namespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn id(meta: &Metadata) -> Id {
    (meta.dev(), meta.ino())
}

/// The root directory of process `pid`.
pub(super) fn root_of(pid: u32) -> io::Result<Id> {
    Ok(id(&std::fs::metadata(format!("/proc/{pid}/root/"))?))
}

/// The root directory of this process.
pub(super) fn own_root() -> io::Result<Id> {
    Ok(id(&std::fs::metadata("/")?))
}

/// The root directory of whoever goes into a mount namespace, whatever root others there have. A thread of its own goes there.
pub(super) fn root_of_mounts(mounts: &Namespace) -> io::Result<Id> {
    let visit = || {
        // SAFETY: this thread opens nothing, and ends here: nobody sees its directories but itself.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::FS) }?;
        root_after_entering(mounts.as_fd())
    };
    std::thread::scope(|scope| {
        let visitor = std::thread::Builder::new().spawn_scoped(scope, visit)?;
        visitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Moves the calling thread, which shares its directories with no other, into a mount namespace, and says what its root is
/// then. Makes system calls alone.
pub(super) fn root_after_entering(mounts: BorrowedFd<'_>) -> io::Result<Id> {
    rustix::thread::move_into_link_name_space(mounts, Some(LinkNameSpaceType::Mount))?;
    let root = rustix::fs::stat(c"/")?;
    Ok((root.st_dev, root.st_ino))
}

/// Gives this process mounts of its own, with a `/proc` of its pid namespace. Makes system calls alone.
pub(super) fn own_mounts() -> io::Result<()> {
    // SAFETY: no other thread of this process shares anything of its mounts.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // What is mounted outside later is seen here too, and not the other way round.
    let propagation = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    rustix::mount::mount_change(c"/", propagation)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    Ok(rustix::mount::mount(c"proc", c"/proc", c"proc", flags, None)?)
}
