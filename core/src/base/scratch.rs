//! Places for files that have no name: file systems in memory that are mounted nowhere, and gone with the
//! last descriptor of them, whatever happens to this process.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::mount::{FsMountFlags, FsOpenFlags, FsPickFlags, MountAttrFlags};

use crate::base::io_error::IoError;

/// Makes an empty file system for files that are soon gone.
///
/// # Errors
///
/// [`IoError`] where the kernel refuses it, which root in the first user namespace does not see.
pub(crate) fn file_system() -> Result<OwnedFd, IoError> {
    make(|_| ())
}

/// Makes an empty file system for files that are kept and read again and again: with large pages where
/// a file fills them, and not swapped out, as far as the kernel can do that.
///
/// # Errors
///
/// The errors of [`file_system`].
pub(crate) fn lasting_file_system() -> Result<OwnedFd, IoError> {
    make(|context| {
        // Unlike those of a memfd, large pages that are asked for at the mount do not depend on
        // /sys/kernel/mm/transparent_hugepage/shmem_enabled, which is `never` on most hosts.
        let _ = rustix::mount::fsconfig_set_string(context, "huge", "within_size");
        // Linux 6.4.
        let _ = rustix::mount::fsconfig_set_flag(context, "noswap");
    })
}

fn make(extras: impl Fn(BorrowedFd<'_>)) -> Result<OwnedFd, IoError> {
    let make = || -> rustix::io::Result<OwnedFd> {
        let context = rustix::mount::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(context.as_fd(), "mode", "0700")?;
        // No limit: the default is half of the host's memory, and the files may need more.
        rustix::mount::fsconfig_set_string(context.as_fd(), "size", "0")?;
        extras(context.as_fd());
        rustix::mount::fsconfig_create(context.as_fd())?;
        let (flags, attributes) = (FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty());
        rustix::mount::fsmount(context.as_fd(), flags, attributes)
    };
    make().map_err(IoError::when("cannot make a file system in memory"))
}

/// Makes the file system whose root is `root` read-only, for all processes that have it open or will.
///
/// # Errors
///
/// [`IoError`] if a file of it is open for writing, or mapped so.
pub(crate) fn make_read_only(root: BorrowedFd<'_>) -> Result<(), IoError> {
    let make = || {
        let flags = FsPickFlags::FSPICK_EMPTY_PATH | FsPickFlags::FSPICK_CLOEXEC;
        let context = rustix::mount::fspick(root, "", flags)?;
        rustix::mount::fsconfig_set_flag(context.as_fd(), "ro")?;
        rustix::mount::fsconfig_reconfigure(context.as_fd())
    };
    make().map_err(IoError::when::<rustix::io::Errno>(
        "cannot make a file system in memory read-only",
    ))
}
