//! What CRIU is asked for: to make the processes of an image.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::engine::error::Error;
use crate::host::container::Staged;
use crate::host::criu::{
    Criu, Hint, InheritFd, Keep, OnDemand, OnDemandMemory, RestoreError, RestoreOptions,
    RestoreWorker,
};
use crate::host::network::NetworkNamespace;
use crate::host::process::{ProcessInfo, TreeError, closed, sockets};
use crate::image::Manifest;

use super::preflight;
use super::processes::{REAPING, wait_for};
use super::root;
use super::source::CriuFiles;
use super::stdio::{self, Outputs};

/// After how long CRIU is asked once more, when a pid was in use.
const AGAIN: Duration = Duration::from_millis(100);
/// For how long it is asked again while a port is in use: longer than the kernel keeps those of closed connections.
const PORTS: Duration = Duration::from_secs(70);
const PORTS_AGAIN: Duration = Duration::from_secs(1);

/// What each CRIU is started with.
pub(super) struct Start {
    pub(super) criu: Criu,
    /// Where the processes get their network; `None` for this process's own namespace.
    pub(super) network: Option<NetworkNamespace>,
    /// Tells the watchdog that CRIU is at work, which holds a copy while it lives.
    pub(super) at_work: OwnedFd,
    /// The mounts that the processes get, if they get any of their own.
    pub(super) root: Option<Staged>,
    pub(super) streams: Streams,
}

/// A CRIU that waits for its request.
pub(super) struct Maker {
    start: Start,
    worker: RestoreWorker,
}

/// Whose standard streams the program gets in place of pipes.
pub(super) struct Streams {
    /// Not those of this process.
    pub(super) is_detached: bool,
    /// What goes to files.
    pub(super) outputs: Outputs,
}

/// Host memory that comes when it is touched.
pub(super) struct Late<'a> {
    /// What has its descriptors besides.
    pub(super) keep: Keep,
    /// What brings it, if any of it comes so late.
    pub(super) memory: &'a mut Option<OnDemandMemory>,
}

/// What CRIU has come to.
pub(super) struct Making {
    /// The pid of the root, if all went well.
    pub(super) root: Result<u32, RestoreError<Error>>,
    /// The processes that it has made, whatever became of it.
    pub(super) found: Vec<Result<ProcessInfo, TreeError>>,
}

impl Maker {
    /// Starts CRIU.
    ///
    /// # Errors
    /// CRIU cannot be started, or a socket of an agent is in use.
    pub(super) fn start(start: Start, manifest: &Manifest) -> Result<Self, Error> {
        let worker = start.worker(manifest)?;
        Ok(Self { start, worker })
    }

    /// Makes the processes, as children of this process if `is_child` says so. When they are there and
    /// none of them runs yet, `before_they_run` is called. Their memory is there then, or what brings it in `late`.
    ///
    /// # Errors
    /// A pid is in use, or another CRIU cannot be started after that. Nothing has been made then.
    pub(super) fn make(
        self,
        manifest: &Manifest,
        is_child: bool,
        files: &CriuFiles,
        mut late: Option<Late<'_>>,
        before_they_run: &mut dyn FnMut() -> Result<(), Error>,
    ) -> Result<Making, Error> {
        let Self { start, mut worker } = self;
        let pids: Vec<u32> = manifest.processes.iter().map(|process| process.pid).collect();
        // The processes are noted as soon as they are there, so that they are known whatever becomes of CRIU.
        let found = RefCell::new(Vec::new());
        let mut they_are_there =
            || found.borrow_mut().extend(pids.iter().map(|pid| ProcessInfo::read(*pid)));
        let staged = start.root.as_ref();
        let mut before_they_run = || {
            root::refuse_others(pids[0], staged)?;
            before_they_run()
        };
        let begin = Instant::now();
        let mut deadline = begin + REAPING;
        let root = loop {
            let mut options = options(manifest, is_child, files, staged);
            options.on_demand = late
                .as_mut()
                .map(|late| OnDemand { keep: late.keep.clone(), memory: &mut *late.memory });
            match worker.restore(options, &mut they_are_there, &mut before_they_run) {
                // The pid was taken since the check, or by what only CRIU meets, such as the group of a process
                // that has ended: that may pass. No process is there yet.
                Err(RestoreError::Criu(error))
                    if error.has(Hint::PidInUse)
                        && found.borrow().is_empty()
                        && Instant::now() < deadline =>
                {
                    tracing::warn!(%error, "a pid is in use; trying again");
                    // What CRIU had made it has killed; it is in the way until its parent has waited for it.
                    if is_child {
                        wait_for(&pids);
                    }
                    std::thread::sleep(AGAIN);
                    preflight::check_pids(manifest)?;
                    worker = start.worker_again(manifest)?;
                }
                // The program had closed connections shortly before it was dumped, such as those by which the processes
                // of a job find each other. What listened keeps its port, and a listener can be made there again when
                // the kernel has forgotten them.
                Err(RestoreError::Criu(error))
                    if error.has(Hint::PortInUse)
                        && found.borrow().is_empty()
                        && begin.elapsed() < PORTS
                        && start.keeps_ports() =>
                {
                    let forgotten = start.there(closed::forget).unwrap_or_else(|error| {
                        tracing::debug!(%error, "closed connections cannot be forgotten");
                        0
                    });
                    if is_child {
                        wait_for(&pids);
                    }
                    if forgotten == 0 {
                        tracing::warn!(
                            "a port of the program is in use, perhaps by closed connections, which the kernel \
                            keeps for a minute; trying again"
                        );
                        std::thread::sleep(PORTS_AGAIN);
                    }
                    // What CRIU has killed may still have its pids.
                    deadline = Instant::now() + REAPING;
                    worker = start.worker_again(manifest)?;
                }
                result => break result,
            }
        };
        Ok(Making { root, found: found.into_inner() })
    }
}

impl Start {
    /// Does something in the network namespace of the processes.
    fn there<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        match &self.network {
            Some(network) => network.visit(work),
            None => work(),
        }
    }

    /// Whether the kernel keeps ports of closed connections there.
    fn keeps_ports(&self) -> bool {
        self.there(|| Ok(closed::any_is_kept())).unwrap_or(false)
    }

    fn worker(&self, manifest: &Manifest) -> Result<RestoreWorker, Error> {
        let (shell_job, _) = crate::engine::dump::option_values(&manifest.criu.options);
        let Streams { is_detached, outputs } = &self.streams;
        let mut inherited = stdio::inherited(&manifest.processes, *is_detached, outputs)?;
        for process in &manifest.processes {
            for listener in &process.listeners {
                let pid = process.pid;
                let socket = self.there(|| sockets::listen(listener, pid));
                let socket = socket.map_err(|source| match source.kind() {
                    // The pid is free: another restore is about to take it.
                    io::ErrorKind::AddrInUse => Error::Busy { pid },
                    _ => Error::Io { what: format!("cannot listen for process {pid}"), source },
                })?;
                let key = format!("socket:[{}]", listener.inode);
                inherited.push(InheritFd { key, fd: socket });
            }
        }
        let (hold, network) = (Some(self.at_work.as_fd()), self.network.as_ref());
        Ok(self.criu.start_restore(inherited, hold, shell_job, network)?)
    }

    /// Once more: what CRIU had made, and has killed, may have the names of the program's listeners for a moment.
    fn worker_again(&self, manifest: &Manifest) -> Result<RestoreWorker, Error> {
        let deadline = Instant::now() + REAPING;
        loop {
            match self.worker(manifest) {
                Err(Error::Busy { .. }) if Instant::now() < deadline => std::thread::sleep(AGAIN),
                done => return done,
            }
        }
    }
}

/// The options of the dump, which the restore repeats.
fn options<'a>(
    manifest: &Manifest,
    is_child: bool,
    files: &'a CriuFiles,
    root: Option<&'a Staged>,
) -> RestoreOptions<'a> {
    let (_, names) = crate::engine::dump::option_values(&manifest.criu.options);
    RestoreOptions {
        tcp_established: !names.tcp_close,
        tcp_close: names.tcp_close,
        file_locks: names.file_locks,
        ext_unix_sk: names.ext_unix_sk,
        root: root.map(|staged| staged.root.as_path()),
        external: root.map(|staged| staged.external.clone()).unwrap_or_default(),
        rst_sibling: is_child,
        work: files.work(),
        plan: files.plan().cloned(),
        pids: manifest.processes.iter().map(|process| process.pid).collect(),
        ..RestoreOptions::new(files.images())
    }
}
