//! `criu dump`.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::error::CriuError;
use super::find::Criu;
use super::log;
use super::mappings;
use super::rpc::{Kind, Opts, Request};
use super::swrk::{Start, Swrk, Work, above_stdio};
use crate::host::network::NetworkNamespace;

const ACTION: &str = "dump the processes";
/// Name of the log file in the work directory.
const LOG: &str = "dump.log";

/// What to dump and how. Options that are not told otherwise mirror CRIU's own of that name.
#[derive(Debug, Clone)]
pub struct DumpOptions<'a> {
    /// The root of the process tree.
    pub pid: u32,
    /// The directory that CRIU writes to; it may lie on a mount that has no path.
    pub images: BorrowedFd<'a>,
    /// Where `dump.log` is written; in `images` if there is none.
    pub work: Option<BorrowedFd<'a>>,
    /// Let the processes go on after a successful dump; else CRIU kills them.
    pub leave_running: bool,
    /// The session leader or the terminal may be outside of the tree.
    pub shell_job: bool,
    /// Save established TCP connections.
    pub tcp_established: bool,
    /// Restore established TCP connections as closed ones.
    pub tcp_close: bool,
    /// Save file locks.
    pub file_locks: bool,
    /// Save Unix sockets that are connected to processes outside.
    pub ext_unix_sk: bool,
    /// Keep the network away from TCP connections while they are saved. Those within the program need it not: both
    /// ends are frozen, and what the kernel still delivers between them is in the one queue, in the other, or in both,
    /// which TCP is made for.
    pub lock_network: bool,
    /// Resources that the restore will get from elsewhere, for example `tty[...]`.
    pub external: Vec<String>,
    /// Where mounts are that are left out.
    pub skipped_mounts: Vec<String>,
    /// 0 to 4; errors are in the log at every level.
    pub log_level: i32,
    /// Largest deleted file that is saved, bytes.
    pub ghost_limit: u32,
    /// How long the processes may take to freeze, seconds; CRIU's default is 10.
    pub timeout: Option<u32>,
    /// CRIU writes no private memory but lists it as left in the processes, from which the callback has to read it:
    /// see [`LeftMemory`](super::LeftMemory).
    pub leave_memory: bool,
}

impl<'a> DumpOptions<'a> {
    /// Dumps process `pid` and its descendants into `images`, with every option off.
    pub fn new(pid: u32, images: BorrowedFd<'a>) -> Self {
        Self {
            pid,
            images,
            work: None,
            leave_running: false,
            shell_job: false,
            tcp_established: false,
            tcp_close: false,
            file_locks: false,
            ext_unix_sk: false,
            lock_network: false,
            external: Vec::new(),
            skipped_mounts: Vec::new(),
            log_level: 4,
            // Its bytes are the program's, however many they are.
            ghost_limit: u32::MAX,
            timeout: None,
            leave_memory: false,
        }
    }
}

/// Why a dump failed.
#[derive(Debug)]
pub enum DumpError<E> {
    /// CRIU failed. The processes run on, but for one case: CRIU died, or could not be heard,
    /// after the callback had succeeded. Then they are running or killed.
    Criu {
        /// What CRIU said.
        error: CriuError,
        /// Whether the callback had succeeded.
        after_callback: bool,
    },
    /// The callback failed; CRIU let the processes run on.
    Callback(E),
}

impl<E: std::fmt::Display> std::fmt::Display for DumpError<E> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Criu { error, .. } => error.fmt(f),
            Self::Callback(error) => error.fmt(f),
        }
    }
}

impl<E: std::fmt::Display + std::fmt::Debug> std::error::Error for DumpError<E> {}

/// A CRIU that waits for the request to dump. Starting it ahead keeps the start out of the time
/// for which the program is stopped, and the fork away from driver threads at work. Dropped
/// without a request, it ends.
pub struct DumpWorker {
    swrk: Swrk,
}

impl Criu {
    /// Starts a process that will serve one dump, in the network namespace of the processes if one is given.
    ///
    /// # Errors
    /// CRIU cannot be started, or gpucr was asked to end.
    pub fn start_dump(&self, network: Option<&NetworkNamespace>) -> Result<DumpWorker, CriuError> {
        let (path, stop) = (self.path(), self.stop.clone());
        let run = |source| CriuError::Run { path: path.into(), source };
        let client = gone_client().map_err(run)?;
        let options = &["--ps-socket".to_owned(), client.as_raw_fd().to_string()];
        let mappings = self.asks_for_mappings().then(mappings::give).transpose().map_err(run)?;
        let variable = mappings
            .as_ref()
            .map(|mappings| (mappings::VARIABLE, mappings.as_raw_fd().to_string()));
        let inherit: Vec<_> =
            [Some(&client), mappings.as_ref()].into_iter().flatten().map(AsFd::as_fd).collect();
        let (inherit, in_session) = (inherit.as_slice(), false);
        let start =
            Start { path, action: ACTION, options, variable, inherit, in_session, network, stop };
        Ok(DumpWorker { swrk: Swrk::start(&start)? })
    }

    /// Starts a process and has it dump at once; see [`DumpWorker::dump`].
    ///
    /// # Errors
    /// The errors of [`DumpWorker::dump`]; or CRIU cannot be started, and the processes run on.
    pub fn dump<E>(
        &self,
        options: &DumpOptions<'_>,
        post_dump: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), DumpError<E>> {
        let worker = self.start_dump(None);
        worker
            .map_err(|error| DumpError::Criu { error, after_callback: false })?
            .dump(options, post_dump)
    }
}

/// A connection whose other end is closed. CRIU means to serve memory that it has left in processes to somebody who
/// asks for it on a connection, after the callback and before it lets go of the processes: there it finds that nobody
/// does. (Without one it would wait for a client at a TCP port that anybody can connect to.)
fn gone_client() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let (_, client) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    above_stdio(client)
}

/// The way in which CRIU keeps the network from connections, as [`Opts::network_lock`] has it. A restore takes the same.
fn network_lock(wanted: bool) -> i32 {
    let has_iptables = || {
        ["/usr/sbin", "/sbin"].iter().any(|dir| Path::new(dir).join("iptables-restore").exists())
    };
    match wanted {
        false => 3,
        true if has_iptables() => 1,
        true => 2,
    }
}

impl DumpWorker {
    /// Saves a process tree.
    ///
    /// When CRIU has written everything and the processes are still frozen, it calls
    /// `post_dump`. If that fails, CRIU lets them run on and the dump fails. If it succeeds, CRIU
    /// kills them, or lets them run on with `leave_running`. So this is the place to commit an
    /// image: until it has returned, the death of this process leaves the program running.
    ///
    /// # Errors
    /// `post_dump` failed, or CRIU did, for example because gpucr was asked to end. [`DumpError`] says what has become
    /// of the processes.
    pub fn dump<E>(
        self,
        options: &DumpOptions<'_>,
        post_dump: &mut dyn FnMut() -> Result<(), E>,
    ) -> Result<(), DumpError<E>> {
        let mut after_callback = false;
        let mut refusal = None;
        let result = self.run_dump(options, &mut || match post_dump() {
            Ok(()) => {
                after_callback = true;
                true
            }
            Err(error) => {
                refusal = Some(error);
                false
            }
        });
        match (refusal, result) {
            (Some(error), _) => Err(DumpError::Callback(error)),
            (None, Err(error)) => Err(DumpError::Criu { error, after_callback }),
            (None, Ok(())) => Ok(()),
        }
    }

    fn run_dump(
        self,
        options: &DumpOptions<'_>,
        post_dump: &mut dyn FnMut() -> bool,
    ) -> Result<(), CriuError> {
        let mut swrk = self.swrk;
        swrk.begin(Work::Dump);
        let work = options.work.unwrap_or(options.images);
        swrk.send(&Request {
            kind: Kind::Dump as i32,
            opts: Some(Opts {
                images_dir_fd: options.images.as_raw_fd(),
                work_dir_fd: Some(work.as_raw_fd()),
                pid: Some(i32::try_from(options.pid).unwrap_or(-1)),
                leave_running: Some(options.leave_running),
                shell_job: Some(options.shell_job),
                tcp_established: Some(options.tcp_established),
                tcp_close: Some(options.tcp_close),
                file_locks: Some(options.file_locks),
                ext_unix_sk: Some(options.ext_unix_sk),
                // `links::settle` sees to what comes of it.
                link_remap: Some(true),
                network_lock: Some(network_lock(options.lock_network)),
                external: options.external.clone(),
                skip_mnt: options.skipped_mounts.clone(),
                log_level: Some(options.log_level),
                log_file: Some(LOG.into()),
                ghost_limit: Some(options.ghost_limit),
                timeout: options.timeout,
                manage_cgroups_mode: Some(0),
                notify_scripts: Some(true),
                lazy_pages: Some(options.leave_memory),
                ..Opts::default()
            }),
            ..Request::default()
        })?;
        let mut called = false;
        loop {
            let response = match swrk.receive(None) {
                Err(CriuError::Interrupted) => return Err(swrk.take_back()),
                received => received?,
            };
            match Kind::try_from(response.kind) {
                Ok(Kind::Notify) => {
                    let stage = response.notify.and_then(|n| n.script).unwrap_or_default();
                    tracing::debug!(stage, "criu dump");
                    let success = if stage == "post-dump" {
                        called = true;
                        post_dump()
                    } else {
                        true
                    };
                    swrk.send(&Request {
                        kind: Kind::Notify as i32,
                        notify_success: Some(success),
                        ..Request::default()
                    })?;
                }
                Ok(Kind::Dump | Kind::Empty) if !response.success => {
                    let printed = swrk.finish();
                    let message = response.message.or(Some(printed));
                    return Err(log::failure(ACTION, work, LOG, message));
                }
                // A dump that passed the callback over would have committed nothing.
                Ok(Kind::Dump) if called => {
                    swrk.finish();
                    return Ok(());
                }
                _ => return Err(swrk.protocol("it answered another question")),
            }
        }
    }
}
