//! `criu restore`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use super::error::CriuError;
use super::find::Criu;
use super::log;
use super::memory::{Keep, Loading, OnDemandError, OnDemandMemory, Plan, why_not_late};
use super::rpc::{InheritFdEntry, Kind, Opts, Request};
use super::swrk::{Start, Swrk, Work, above_stdio};
use crate::base::faults::fault;
use crate::host::network::NetworkNamespace;

const ACTION: &str = "restore the processes";
/// Name of the log file in the work directory.
const LOG: &str = "restore.log";

/// A descriptor that the restored processes get in place of one that they had.
#[derive(Debug)]
pub struct InheritFd {
    /// What it replaces, in CRIU's words: `pipe:[INODE]`, `tty[RDEV:DEV]` in hexadecimal, or a
    /// path without its leading slash.
    pub key: String,
    /// The descriptor.
    pub fd: OwnedFd,
}

/// Memory comes when it is touched.
pub struct OnDemand<'a> {
    /// What has the descriptors besides.
    pub(crate) keep: Keep,
    /// What brings it, from the moment on when processes may run. It must not be dropped before they have ended, or all
    /// memory is there.
    pub(crate) memory: &'a mut Option<OnDemandMemory>,
}

/// What to restore and how. The options that were used for the dump must be repeated.
pub struct RestoreOptions<'a> {
    /// The directory with CRIU's files; it may lie on a mount that has no path.
    pub images: BorrowedFd<'a>,
    /// The pids that the processes will have: by them they are found if CRIU has to be stopped.
    pub pids: Vec<u32>,
    /// Where `restore.log` is written; in `images` if there is none.
    pub work: Option<BorrowedFd<'a>>,
    /// Restore established TCP connections.
    pub tcp_established: bool,
    /// Restore established TCP connections as closed ones.
    pub tcp_close: bool,
    /// Restore file locks.
    pub file_locks: bool,
    /// Restore Unix sockets that were connected to processes outside.
    pub ext_unix_sk: bool,
    /// Resources that come from elsewhere.
    pub external: Vec<String>,
    /// What becomes the root of processes that had mounts of their own: it has to be a mount point.
    pub root: Option<&'a Path>,
    /// The root of the tree becomes a child of this process, which must wait for it. Otherwise it
    /// becomes a child of init, or of the nearest subreaper.
    pub rst_sibling: bool,
    /// 0 to 4; errors are in the log at every level.
    pub log_level: i32,
    /// The private memory that is not left to CRIU.
    pub(crate) plan: Option<Arc<Plan>>,
    /// That memory comes when it is touched; else before any process runs.
    pub on_demand: Option<OnDemand<'a>>,
}

impl<'a> RestoreOptions<'a> {
    /// Restores what is in `images`, with every option off.
    pub fn new(images: BorrowedFd<'a>) -> Self {
        Self {
            images,
            pids: Vec::new(),
            work: None,
            tcp_established: false,
            tcp_close: false,
            file_locks: false,
            ext_unix_sk: false,
            external: Vec::new(),
            root: None,
            rst_sibling: false,
            log_level: 4,
            plan: None,
            on_demand: None,
        }
    }
}

/// A CRIU that waits for the request to restore, see [`DumpWorker`](super::DumpWorker).
pub struct RestoreWorker {
    swrk: Swrk,
    inherited: Vec<(String, OwnedFd)>,
    shell_job: bool,
}

/// Why a restore failed. CRIU has killed whatever it had restored so far, unless it died itself: then what was
/// `made` may still be there.
#[derive(Debug)]
pub enum RestoreError<E> {
    /// CRIU failed.
    Criu(CriuError),
    /// The callback failed.
    Callback(E),
}

impl Criu {
    /// Why host memory cannot come on this host while programs run. `None` if it can.
    pub fn why_no_late_memory() -> Option<String> {
        why_not_late()
    }

    /// Starts a process that will serve one restore. The restored processes get `inherit_fds` in
    /// place of descriptors that they had; `hold` is a descriptor that CRIU itself holds while it
    /// is at work. With `shell_job` the tree joins the caller's session and terminal, which must
    /// be the caller's standard input. The processes are made in the network namespace `network`, or in the caller's.
    ///
    /// # Errors
    /// CRIU cannot be started, this process has no room for descriptors, or gpucr was asked to end.
    pub fn start_restore(
        &self,
        inherit_fds: Vec<InheritFd>,
        hold: Option<BorrowedFd<'_>>,
        shell_job: bool,
        network: Option<&NetworkNamespace>,
    ) -> Result<RestoreWorker, CriuError> {
        let run = |source| CriuError::Run { path: self.path().to_owned(), source };
        let mut inherited = Vec::new();
        for InheritFd { key, fd } in inherit_fds {
            inherited.push((key, above_stdio(fd).map_err(run)?));
        }
        let for_processes = inherited.iter().map(|(_, fd)| fd.as_fd());
        let inherit: Vec<BorrowedFd<'_>> = for_processes.chain(hold).collect();
        let (path, stop) = (self.path(), self.stop.clone());
        let (options, in_session, inherit) = (&[], shell_job, &inherit);
        let variable = None;
        let start =
            Start { path, action: ACTION, options, variable, inherit, in_session, network, stop };
        let swrk = Swrk::start(&start)?;
        Ok(RestoreWorker { swrk, inherited, shell_job })
    }
}

impl RestoreWorker {
    /// Restores a process tree and returns the pid of its root, which then runs.
    ///
    /// When the processes exist and do not run yet, CRIU asks whether they may. Then `made` is called at once:
    /// from there on they are there until somebody kills them, whatever becomes of CRIU. When their memory is
    /// in its place too, `post_restore` is called; if that fails, or the memory did, CRIU kills them.
    ///
    /// # Errors
    /// `post_restore` failed, or CRIU did, for example because gpucr was asked to end. [`RestoreError`] says what has
    /// become of the processes.
    pub fn restore<E>(
        self,
        options: RestoreOptions<'_>,
        made: &mut dyn FnMut(),
        post_restore: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<u32, RestoreError<E>> {
        let mut refusal = None;
        let result = self.run(options, made, &mut || match post_restore() {
            Ok(()) => true,
            Err(error) => {
                refusal = Some(error);
                false
            }
        });
        match (refusal, result) {
            (Some(error), _) => Err(RestoreError::Callback(error)),
            (None, result) => result.map_err(RestoreError::Criu),
        }
    }

    fn run(
        self,
        mut options: RestoreOptions<'_>,
        made: &mut dyn FnMut(),
        post_restore: &mut dyn FnMut() -> bool,
    ) -> Result<u32, CriuError> {
        let Self { mut swrk, inherited, shell_job } = self;
        swrk.begin(Work::Restore(std::mem::take(&mut options.pids)));
        let work = options.work.unwrap_or(options.images);
        let (keep, mut memory) =
            options.on_demand.take().map(|OnDemand { keep, memory }| (keep, memory)).unzip();
        let loading = options.plan.take().map(|plan| Loading::start(plan, work, keep));
        let mut loading = loading.transpose().map_err(|source| CriuError::Memory { source })?;
        let is_left = loading.is_some();
        tracing::debug!(is_left, "private memory");
        let mut spilled = None;
        let entry =
            |(key, fd): &(String, OwnedFd)| InheritFdEntry { key: key.clone(), fd: fd.as_raw_fd() };
        swrk.send(&Request {
            kind: Kind::Restore as i32,
            opts: Some(Opts {
                images_dir_fd: options.images.as_raw_fd(),
                work_dir_fd: Some(work.as_raw_fd()),
                shell_job: Some(shell_job),
                tcp_established: Some(options.tcp_established),
                tcp_close: Some(options.tcp_close),
                file_locks: Some(options.file_locks),
                ext_unix_sk: Some(options.ext_unix_sk),
                inherit_fd: inherited.iter().map(entry).collect(),
                external: std::mem::take(&mut options.external),
                root: options.root.map(|root| root.display().to_string()),
                rst_sibling: Some(options.rst_sibling),
                log_level: Some(options.log_level),
                log_file: Some(LOG.into()),
                manage_cgroups_mode: Some(0),
                notify_scripts: Some(true),
                lazy_pages: Some(is_left),
                ..Opts::default()
            }),
            ..Request::default()
        })?;
        let response = loop {
            let response = match swrk.receive(None) {
                Err(CriuError::Interrupted) => return Err(swrk.take_back()),
                received => received?,
            };
            if response.kind != Kind::Notify as i32 {
                break response;
            }
            let stage = response.notify.and_then(|n| n.script).unwrap_or_default();
            tracing::debug!(stage, "criu restore");
            let success = match stage.as_str() {
                "post-restore" => {
                    made();
                    let loaded =
                        loading.as_mut().map_or(Ok(None), |loading| loading.finish(swrk.stop()));
                    let loaded = loaded.map(|on_demand| {
                        if let Some(memory) = &mut memory {
                            **memory = on_demand;
                        }
                    });
                    let injected = fault("host-memory").map_err(std::io::Error::other);
                    spilled = loaded.and(injected.map_err(Into::into)).err();
                    spilled.is_none() && post_restore()
                }
                _ => true,
            };
            swrk.send(&Request {
                kind: Kind::Notify as i32,
                notify_success: Some(success),
                ..Request::default()
            })?;
        };
        drop(loading);
        if let Some(error) = spilled {
            swrk.finish();
            return Err(match error {
                OnDemandError::Untold => CriuError::Untold,
                OnDemandError::Io(source) if source.kind() == std::io::ErrorKind::Interrupted => {
                    CriuError::Interrupted
                }
                OnDemandError::Io(source) => CriuError::Memory { source },
            });
        }
        if !response.success {
            let printed = swrk.finish();
            let message = response.message.or(Some(printed));
            return Err(log::failure(ACTION, work, LOG, message));
        }
        let pid = response.restore.map(|r| r.pid).and_then(|pid| u32::try_from(pid).ok());
        match pid {
            Some(pid) if response.kind == Kind::Restore as i32 && pid > 0 => {
                swrk.finish();
                log::pass_on(work, LOG);
                Ok(pid)
            }
            _ => Err(swrk.protocol("it answered another question")),
        }
    }
}
