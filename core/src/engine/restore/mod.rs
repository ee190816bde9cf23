//! `gpucr restore`: from an image to a running program.
//!
//! `phases.rs` is the list of phases; [`restore`] is who tries again. The image is only read. Whatever can fail early
//! does so before CRIU lets the processes run: from then on their host side runs, and waits only
//! where it calls the driver, until the gates open. A failure ends whatever had been restored.

mod bulk;
mod demand;
mod devices;
pub(crate) mod driver;
mod hook;
mod load;
mod memory;
mod phases;
mod preflight;
mod share;
mod source;
#[cfg(test)]
mod source_tests;
mod stdio;
mod unshared;

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::base::phase::{Phase, PhaseTime};
use crate::base::progress::Progress;
use crate::engine::error::{Error, Failure, Left};
use crate::engine::sharing::Holder;
use crate::host::process::tree::raw_pid;
use crate::host::process::{AgentError, LAST_MOMENTS, ProcessInfo, Tree};
use crate::image::trust::Trust;
pub use demand::{OnDemand, take_back_output};
pub use devices::{Identity, MappedDevice, Moved};
use phases::attempt;
pub use share::{Shared, Watch};
pub use unshared::remember as remember_unshared;

/// What to restore, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The image.
    pub image: PathBuf,
    /// Which images are restored.
    pub trust: Trust,
    /// Take it from memory, if `gpucr warm` keeps it there.
    pub warm: bool,
    /// The program does not become a child of this process, and gets none of its streams.
    pub detach: bool,
    /// A shell command that is run when the processes are there and their memory is loaded, before any of
    /// them runs. If it fails the restore does.
    pub before_resume: Option<OsString>,
    /// Devices that others of this host take the place of.
    pub device_map: Vec<MappedDevice>,
    /// The program goes on before its memory is there, and gets it when it asks for it.
    pub on_demand: bool,
    /// The program shares device memory that it does not write with other instances of the image: who is to
    /// hold it if this is the first. Only of a program that is not detached, and not on demand.
    pub share: Option<Holder>,
    /// Is told the pid of the program's root when the program is about to go on; and nothing if it is ended
    /// again, which can only be on demand or if it shares memory, before it is restored once more.
    pub goes_on: Option<GoesOn>,
    /// Set by a signal handler to end the restore. Once the program goes on, that says that it was asked to
    /// end itself.
    pub stop: Arc<AtomicBool>,
}

/// See [`Options::goes_on`].
#[derive(Clone)]
pub struct GoesOn(pub Arc<dyn Fn(Option<u32>) + Send + Sync>);

impl std::fmt::Debug for GoesOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GoesOn")
    }
}

impl Options {
    fn tell(&self, pid: Option<u32>) {
        if let Some(GoesOn(tell)) = &self.goes_on {
            tell(pid);
        }
    }
}

/// What a restore did.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Report {
    /// The image.
    #[serde(serialize_with = "crate::base::format::lossy")]
    pub image: PathBuf,
    /// Its identity.
    pub id: String,
    /// Root of the process tree; a child of this process unless it was detached.
    pub pid: u32,
    /// By whom memory was loaded: `outside`, `inside` or `driver`, as in a dump's report.
    pub copied: &'static str,
    /// Whether the image was kept warm, so that nothing was read, decompressed and checked.
    pub warm: bool,
    /// Whether the process that keeps it warm has loaded the device memory, from pinned memory.
    pub by_holder: bool,
    /// Bytes of device memory that gpucr loaded.
    pub bulk_bytes: u64,
    /// Devices that others have taken the place of.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub moved: Vec<Moved>,
    /// What became of `--on-demand`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_demand: Option<OnDemand>,
    /// What became of `--share`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<Shared>,
    /// Until the program went on.
    pub running_ms: f64,
    /// The whole restore.
    pub total_ms: f64,
    /// Its phases. The load runs beside `extract` and `criu`, which waits for it.
    pub phases: Vec<PhaseTime>,
}

/// Restores a program. See [`Failure::left`] for what holds after a failure. If it shares memory, the
/// [`Watch`] that comes with the report has to be asked for as long as the program runs.
pub fn restore(
    options: &Options,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    let failure = match attempt(options, options.on_demand, progress) {
        Err(failure) if options.on_demand => failure,
        done => return done,
    };
    if !matches!(*failure.error, Error::Missed { .. } | Error::EndedAwaiting { .. }) {
        return Err(failure);
    }
    // Image and host are as they should be: it was a guess about the program that was wrong.
    tracing::warn!(error = %failure.error, "restoring again, with all memory before the program goes on");
    let (mut report, watch) = once_more(options, failure.phase, failure.left, progress)?;
    report.on_demand =
        Some(OnDemand { fallen_back: Some(failure.error.to_string()), ..OnDemand::default() });
    Ok((report, watch))
}

/// After a [`Watch`] has said that the program with root `pid` cannot go on: ends it, gives up what it has
/// shared, and restores it anew, with all memory its own. That is [remembered](remember_unshared).
pub fn restore_unshared(
    options: Options,
    watch: Watch,
    pid: u32,
    why: &Error,
    progress: &Arc<dyn Progress>,
) -> Result<Report, Failure> {
    tracing::warn!(error = %why, "restoring again, with all memory the program's own");
    unshared::remember(&options.image);
    let killed = kill(ProcessInfo::read(pid).ok().iter());
    wait_for(&[&[pid], &killed[..]].concat());
    watch.leave();
    let options = Options { share: None, ..options };
    // By signals that the program was given, and has survived.
    options.stop.store(false, Ordering::Relaxed);
    let (mut report, _) = once_more(&options, Phase::Share, Left::NotRestoredButRan, progress)?;
    report.shared = Some(Shared { fallen_back: Some(why.to_string()), ..Shared::default() });
    Ok(report)
}

/// Restores a program that has run already, and was ended in that `phase`.
fn once_more(
    options: &Options,
    phase: Phase,
    left: Left,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    options.tell(None);
    let manifest = options.trust.manifest(&options.image);
    let manifest =
        manifest.map_err(|error| Failure { phase, error: Box::new(error.into()), left })?;
    demand::take_back_output(&manifest);
    attempt(options, false, progress)
}

/// Ends those of these processes that have not ended, and their descendants. Gives the pids of all that it has
/// ended, parents before their children.
fn kill<'a>(processes: impl Iterator<Item = &'a ProcessInfo>) -> Vec<u32> {
    let mut killed = Vec::new();
    // Of each the descendants: where a process has ended, those that it leaves are in the tree of no other.
    for process in processes {
        let tree = Tree::read(process.pid);
        // If it has ended its pid may be that of a stranger.
        if process.has_ended() {
            continue;
        }
        if let Ok(tree) = tree {
            tree.kill();
            killed.extend(tree.pids());
        }
        process.kill();
    }
    killed
}

/// What an agent has answered; `None` if its process was at its end before that. That is no failure: the host
/// side of a program runs while its memory is brought back, and may have had nothing else to do any more.
fn unless_ended<T>(
    process: &ProcessInfo,
    answer: Result<T, impl Into<Error>>,
) -> Result<Option<T>, Error> {
    match answer.map_err(Into::into) {
        Err(error @ Error::Agent(AgentError::Broken { .. } | AgentError::Absent { .. }))
            if process.ends_within(LAST_MOMENTS) =>
        {
            tracing::debug!(%error, pid = process.pid, "it has ended");
            Ok(None)
        }
        answer => answer.map(Some),
    }
}

/// Waits for the end of processes that were killed, as far as they are children of this one. The root
/// comes first: what it leaves behind becomes a child if this is the first process of a pid namespace.
fn wait_for(pids: &[u32]) {
    use rustix::process::{WaitOptions, waitpid};
    // Whoever has died before it could kill them is not waited for without end.
    let deadline = Instant::now() + preflight::REAPING;
    for pid in pids.iter().filter_map(|pid| raw_pid(*pid)) {
        while matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
            && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}
