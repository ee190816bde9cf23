//! Network namespaces: which one a process is in, and work that is done in one.
//!
//! gpucr stays in its own. Only what has to be done where the program is goes there: threads that
//! [visit](NetworkNamespace::visit) it, and CRIU.

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The magic number of the file system of namespaces, linux/magic.h.
const FILE_SYSTEM: rustix::fs::FsWord = 0x6e73_6673;
/// `NS_GET_NSTYPE` of ioctl_ns(2).
const KIND: libc::Ioctl = 0xb703;
/// A port; any will do.
const DISCARD: u16 = 9;
/// The one of the calling thread.
const OWN: &str = "/proc/thread-self/ns/net";

/// A network namespace. It lives as long as this does, also without processes in it.
#[derive(Debug, Clone)]
pub struct NetworkNamespace {
    file: Arc<File>,
    /// Device and inode, which no other has.
    id: (u64, u64),
}

/// Why a file cannot be used as a network namespace.
#[derive(Debug, thiserror::Error)]
pub enum NetworkError {
    /// There is none.
    #[error("the network namespace {path} cannot be opened: {source}")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the kernel says.
        source: io::Error,
    },
    /// It is something else.
    #[error("{path} is not a network namespace but {what}")]
    OtherKind {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: &'static str,
    },
}

impl NetworkNamespace {
    /// The one that a user names, such as `/run/netns/NAME` or `/proc/PID/ns/net`. A file that is none is not opened for
    /// reading, which may do something to a device or wait for somebody.
    ///
    /// # Errors
    /// It is not there, may not be opened, or is none.
    pub fn at(path: &Path) -> Result<Self, NetworkError> {
        let failed = |source| NetworkError::Open { path: path.to_owned(), source };
        let named = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
        let named = named.map_err(|error| failed(error.into()))?;
        let other = |what| NetworkError::OtherKind { path: path.to_owned(), what };
        let system = rustix::fs::fstatfs(&named).map_err(|error| failed(error.into()))?;
        if system.f_type != FILE_SYSTEM {
            return Err(other("another file"));
        }
        let opened = File::open(format!("/proc/self/fd/{}", named.as_raw_fd())).map_err(failed)?;
        match kind(&opened) {
            Some(libc::CLONE_NEWNET) => Self::of_file(opened).map_err(failed),
            Some(_) => Err(other("a namespace of another kind")),
            None => Err(other("another file")),
        }
    }

    /// The one that a descriptor is of.
    ///
    /// # Errors
    /// It is of none.
    pub fn of_descriptor(descriptor: OwnedFd) -> io::Result<Self> {
        let file = File::from(descriptor);
        match kind(&file) {
            Some(libc::CLONE_NEWNET) => Self::of_file(file),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// The one to which a link of `/proc` leads that the kernel has made for a process.
    pub(super) fn of_process(link: &Path) -> io::Result<Self> {
        Self::of_file(File::open(link)?)
    }

    fn of_file(file: File) -> io::Result<Self> {
        let id = id(&file.metadata()?);
        Ok(Self { file: Arc::new(file), id })
    }

    /// Whether it is that of the calling thread.
    pub fn is_own(&self) -> bool {
        std::fs::metadata(OWN).is_ok_and(|own| id(&own) == self.id)
    }

    /// The name by which the kernel tells it from others, as in `/proc/PID/ns/net`.
    pub fn name(&self) -> String {
        format!("net:[{}]", self.id.1)
    }

    /// Whether process `pid`, whose link this is, is in it. Not if that cannot be told.
    pub(super) fn is_of(&self, link: &Path) -> bool {
        std::fs::metadata(link).is_ok_and(|its| id(&its) == self.id)
    }

    /// Whether its loopback device is up.
    ///
    /// # Errors
    /// This user may not go there, or has no descriptors left.
    pub fn has_loopback(&self) -> io::Result<bool> {
        let socket = self.visit(|| UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)))?;
        // This sends nothing, but looks for a way there.
        match socket.connect((Ipv4Addr::LOCALHOST, DISCARD)) {
            Err(error) if error.kind() == io::ErrorKind::NetworkUnreachable => Ok(false),
            found => found.map(|()| true),
        }
    }

    /// Does something in it. Sockets that are made there stay usable.
    ///
    /// # Errors
    /// This user may not go there; or the error of the work.
    pub fn visit<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        if self.is_own() {
            return work();
        }
        // A thread of its own goes there: it is a thread that has a network namespace.
        let visit = move || {
            enter(self.as_fd())?;
            work()
        };
        std::thread::scope(|scope| {
            let visitor = std::thread::Builder::new().spawn_scoped(scope, visit)?;
            visitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl AsFd for NetworkNamespace {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Moves the calling thread there; of a process that has just been forked, that is all of it. Makes one system call.
pub(super) fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    Ok(move_into_link_name_space(namespace, Some(LinkNameSpaceType::Network))?)
}

fn id(meta: &std::fs::Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// What kind of namespace a file is, as a flag of clone(2). `None` if it is none.
fn kind(file: &File) -> Option<libc::c_int> {
    // SAFETY: it takes no argument, and changes nothing.
    let kind = unsafe { libc::ioctl(file.as_raw_fd(), KIND) };
    (kind >= 0).then_some(kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn what_is_no_network_namespace_is_refused() {
        let own = NetworkNamespace::at(Path::new("/proc/self/ns/net")).expect("it is one");
        let link = std::fs::read_link("/proc/self/ns/net").expect("it is there");
        assert!(own.is_own() && Path::new(&own.name()) == link);
        assert!(own.is_of(Path::new("/proc/self/ns/net")));
        let refused = |path: &str| NetworkNamespace::at(Path::new(path)).expect_err(path);
        for path in ["/proc/self/ns/mnt", "/proc/self/ns/pid", "/dev/null", "/proc/self/exe", "/"] {
            assert!(matches!(refused(path), NetworkError::OtherKind { .. }), "{path}");
        }
        for path in ["/no/such/file", ""] {
            assert!(matches!(refused(path), NetworkError::Open { .. }), "{path}");
        }
        let mounts = File::open("/proc/self/ns/mnt").expect("it is there");
        NetworkNamespace::of_descriptor(mounts.into()).expect_err("it is another kind");
        let null = File::open("/dev/null").expect("it is there");
        NetworkNamespace::of_descriptor(null.into()).expect_err("it is none");
    }

    /// It would wait for somebody who writes if it were opened.
    #[test]
    fn a_pipe_with_a_name_is_refused_at_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("pipe");
        let kind = rustix::fs::FileType::Fifo;
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, kind, mode, 0).expect("it is made");
        assert!(matches!(NetworkNamespace::at(&path), Err(NetworkError::OtherKind { .. })));
    }

    #[test]
    fn work_is_done_in_another_namespace_and_this_thread_stays() {
        if !rustix::process::geteuid().is_root() {
            return crate::skip::skip("namespaces are made by root");
        }
        // That of a thread which is over: it lives by its descriptor.
        let other = std::thread::spawn(|| {
            // SAFETY: it affects this thread alone.
            unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNET) }
                .expect("root may");
            NetworkNamespace::at(Path::new(OWN)).expect("it is one")
        });
        let other = other.join().expect("no panic");
        assert!(!other.is_own());
        // A new one has its loopback device down.
        assert!(!other.has_loopback().expect("it is asked"));
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).expect("a port");
        let port = listener.local_addr().expect("it has one").port();
        // The same port is free there.
        let there = other.visit(|| {
            assert!(other.is_own());
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
        });
        there.expect("it is free there");
        assert!(!other.is_own());
    }
}
