//! A place for files that must not outlive this process.

use std::os::fd::{AsFd, OwnedFd};

use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

use crate::error::Error;

/// Makes an empty file system in memory that is mounted nowhere: it has no name, and it is gone
/// with the last descriptor of it, whatever happens to this process.
///
/// # Errors
///
/// [`Error::Io`] where the kernel refuses it, which root in the first user namespace does not see.
pub(crate) fn file_system() -> Result<OwnedFd, Error> {
    let make = || -> rustix::io::Result<OwnedFd> {
        let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(context.as_fd(), "mode", "0700")?;
        // No limit: the default is half of the host's memory, and the files may need more.
        rustix::mount::fsconfig_set_string(context.as_fd(), "size", "0")?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        let (flags, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
        rustix::mount::fsmount(context.as_fd(), flags, attributes)
    };
    make().map_err(|source| Error::Io {
        what: "cannot make a file system in memory".into(),
        source: source.into(),
    })
}
