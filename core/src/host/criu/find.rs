//! Finding CRIU and asking what it can do.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::error::CriuError;
use super::log;
use super::rpc::{FeatureSet, Kind, Opts, Request, Response};
use super::swrk::{Start, Swrk};
use super::version::{MIN_VERSION, NO_PASSCRED, Version};
use crate::host::network::NetworkNamespace;
use crate::image::library;

/// The fourth number of the version of a CRIU that copies no more of its list of pages than is listed, and of one that
/// only lists the pages that it leaves in a process. CRIU itself has no such number (`xtask/src/criu.rs`).
const SHORT_LISTS: i32 = 1;
const ONLY_LISTS: i32 = 2;
/// The same of one that asks for the mappings of processes before it reads their `smaps`.
const ASKS_FOR_MAPPINGS: i32 = 4;
/// Bytes of a page.
const PAGE: u64 = 4096;
/// Bytes in the list for each page: a `struct iovec`.
const LISTED: u64 = 16;

/// Where CRIU keeps what it has found out about the kernel. It does not where that is no tmpfs.
const FOUND_OUT: &str = "/run/criu.kdat";

/// Names the CRIU to use, and no other is looked for then.
const ENV_CRIU: &str = "GPUCR_CRIU";
/// How long CRIU may take to answer what it need do little for; it tries what the kernel can, at most. These
/// tries make devices of the network, and all processes that do so wait for one lock of the kernel: where 64 of them
/// began at once, one was seen to take 65 s.
const ANSWER: Duration = Duration::from_secs(180);

/// What CRIU can do with this kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Features {
    /// Soft-dirty tracking: host memory can be copied ahead of the stop.
    pub mem_track: bool,
    /// Host memory can be brought in on demand.
    pub lazy_pages: bool,
    /// Processes can be told from later ones with the same pid.
    pub pidfd_store: bool,
}

/// A CRIU that was found and is new enough.
#[derive(Debug, Clone)]
pub struct Criu {
    path: PathBuf,
    version: Version,
    /// The fourth number of its version; 0 without one.
    changes: i32,
    /// Set from elsewhere to end whatever it is at.
    pub(super) stop: Option<Arc<AtomicBool>>,
}

impl Criu {
    /// The same, which ends whatever it is at when `stop` is set.
    pub fn stopped_by(self, stop: &Arc<AtomicBool>) -> Self {
        Self { stop: Some(stop.clone()), ..self }
    }

    /// Whether it can work in a network namespace: it tries TCP over the loopback device, unless it knows how the kernel
    /// does that.
    ///
    /// # Errors
    /// Nobody can look there.
    pub fn can_work_in(network: &NetworkNamespace) -> io::Result<bool> {
        Ok(Path::new(FOUND_OUT).exists() || network.has_loopback()?)
    }

    /// Finds CRIU: where the environment variable `GPUCR_CRIU` says, or else the first that is
    /// new enough of gpucr's own (that it was packed with, or that was built on this machine), the system's, and those on PATH. When `stop` is set, this and whatever this
    /// CRIU is asked for later end early, with [`CriuError::Interrupted`].
    ///
    /// # Errors
    /// None is there ([`CriuError::NotFound`]), none works and is new enough, in which case the error is that of the
    /// first, or gpucr was asked to end.
    pub fn find(stop: Option<&Arc<AtomicBool>>) -> Result<Self, CriuError> {
        let candidates = match std::env::var_os(ENV_CRIU) {
            Some(path) if !path.is_empty() => vec![PathBuf::from(path)],
            _ => {
                let fixed = ["/usr/local/lib/gpucr", "/usr/local/sbin", "/usr/sbin"];
                let path = std::env::var_os("PATH").unwrap_or_default();
                // What gpucr was packed with is next to its libraries.
                let mut all: Vec<PathBuf> = library::own("criu").into_iter().collect();
                for dir in fixed.iter().map(PathBuf::from).chain(std::env::split_paths(&path)) {
                    let candidate = dir.join("criu");
                    if candidate.is_absolute() && !all.contains(&candidate) {
                        all.push(candidate);
                    }
                }
                all
            }
        };
        let mut failure = None;
        for path in candidates.iter().filter(|path| is_program(path)) {
            match Self::at(path, stop) {
                Ok(criu) => return Ok(criu),
                Err(CriuError::Interrupted) => return Err(CriuError::Interrupted),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        Err(failure.unwrap_or(CriuError::NotFound { looked: candidates }))
    }

    /// The CRIU at `path`, if it runs and is new enough.
    ///
    /// # Errors
    /// CRIU cannot be started, does not answer as CRIU does, is older than [`MIN_VERSION`], or gpucr was asked to end.
    pub fn at(path: &Path, stop: Option<&Arc<AtomicBool>>) -> Result<Self, CriuError> {
        const ACTION: &str = "tell its version";
        let response = ask(path, ACTION, Kind::Version, Request::default(), stop)?;
        let version = response.version.map(|v| {
            let (major, minor, sublevel) = (v.major, v.minor, v.sublevel.unwrap_or(0));
            (Version { major, minor, sublevel }, v.extra.unwrap_or(0))
        });
        let Some((found, changes)) = version else {
            let reason = "its answer has no version".to_owned();
            return Err(CriuError::Protocol { action: ACTION, reason });
        };
        if found < MIN_VERSION {
            return Err(CriuError::TooOld { path: path.to_owned(), found });
        }
        Ok(Self { path: path.to_owned(), version: found, changes, stop: stop.cloned() })
    }

    /// The program's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Bytes that it copies to leave memory in a process, before anything else, that has so many bytes of private
    /// mappings, be there pages or not. Its list of pages has room for 16 bytes for each page of these, and it copies
    /// all of that room (`__parasite_dump_pages_seized` of `criu/mem.c`); CUDA's driver reserves hundreds of
    /// gigabytes of addresses. The CRIU that `cargo xtask setup` builds copies what is listed.
    pub fn list_bytes(&self, mapped: u64) -> u64 {
        if self.changes >= SHORT_LISTS { 0 } else { mapped / PAGE * LISTED }
    }

    /// Whether it takes hold, with pipes, of the pages that it leaves in a process. The CRIU that `cargo xtask setup`
    /// builds does not.
    pub fn takes_hold_of_pages(&self) -> bool {
        self.changes < ONLY_LISTS
    }

    /// Whether it asks for the mappings of processes (`mappings.rs`). The CRIU that `cargo xtask setup` builds does.
    pub(super) fn asks_for_mappings(&self) -> bool {
        self.changes >= ASKS_FOR_MAPPINGS
    }

    /// Whether it can dump programs with TCP sockets on this kernel. Since Linux 6.16 such a socket has no option
    /// `SO_PASSCRED`, at which CRIU before 4.2 gives up (<https://github.com/checkpoint-restore/criu/issues/2705>). A
    /// kernel that grants no socket to test with counts as one that has the option.
    pub fn dumps_tcp_sockets(&self) -> bool {
        if self.version >= NO_PASSCRED {
            return true;
        }
        let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None);
        !socket.is_ok_and(|socket| sockopt::socket_passcred(socket) == Err(Errno::OPNOTSUPP))
    }

    /// Asks CRIU to test the kernel for what it needs in any case. Needs the privileges of a
    /// dump.
    ///
    /// # Errors
    /// The kernel lacks something, or this user may not test it: the error has what CRIU says. Or CRIU cannot be
    /// started, does not answer, or gpucr was asked to end.
    pub fn check(&self) -> Result<(), CriuError> {
        const ACTION: &str = "use this kernel";
        let run = |source| CriuError::Run { path: self.path.clone(), source };
        let dir = tempfile::tempdir().map_err(run)?;
        let fd = std::fs::File::open(dir.path()).map_err(run)?;
        let opts = Opts {
            images_dir_fd: fd.as_raw_fd(),
            work_dir_fd: Some(fd.as_raw_fd()),
            log_file: Some("check.log".into()),
            log_level: Some(4),
            ..Opts::default()
        };
        let request = Request { opts: Some(opts), ..Request::default() };
        let response = ask(&self.path, ACTION, Kind::Check, request, self.stop.as_ref())?;
        if response.success {
            return Ok(());
        }
        Err(log::failure(ACTION, fd.as_fd(), "check.log", response.message))
    }

    /// Asks what this kernel lets CRIU do beyond the necessary.
    ///
    /// # Errors
    /// CRIU cannot test the kernel, cannot be started, does not answer, or gpucr was asked to end.
    pub fn features(&self) -> Result<Features, CriuError> {
        const ACTION: &str = "tell its features";
        let all = Some(true);
        let asked = FeatureSet { mem_track: all, lazy_pages: all, pidfd_store: all };
        let request = Request { features: Some(asked), ..Request::default() };
        let stop = self.stop.as_ref();
        let response = ask(&self.path, ACTION, Kind::FeatureCheck, request, stop)?;
        let Some(found) = response.features.filter(|_| response.success) else {
            let reason = "it could not test the kernel".to_owned();
            return Err(CriuError::Protocol { action: ACTION, reason });
        };
        Ok(Features {
            mem_track: found.mem_track.unwrap_or(false),
            lazy_pages: found.lazy_pages.unwrap_or(false),
            pidfd_store: found.pidfd_store.unwrap_or(false),
        })
    }
}

/// One request that is answered by one response.
fn ask(
    path: &Path,
    action: &'static str,
    kind: Kind,
    request: Request,
    stop: Option<&Arc<AtomicBool>>,
) -> Result<Response, CriuError> {
    let stop = stop.cloned();
    let swrk = Swrk::start(&Start {
        path,
        action,
        options: &[],
        variable: None,
        inherit: &[],
        in_session: false,
        network: None,
        stop,
    })?;
    swrk.send(&Request { kind: kind as i32, ..request })?;
    let response = swrk.receive(Some(ANSWER))?;
    if response.kind != kind as i32 {
        return Err(swrk.protocol("it answered another question"));
    }
    Ok(response)
}

fn is_program(path: &Path) -> bool {
    path.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}
