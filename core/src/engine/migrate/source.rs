//! The source's side: a dump whose image goes to the other side, and then the program does.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::goal::Goal;
use super::link::{Link, Pulse};
use super::outgoing::{Outgoing, Terms};
use super::relay::Relaying;
use super::safety::SafetyImage;
use super::streams::Wanted;
use crate::base::clock::Clock;
use crate::base::format::milliseconds;
use crate::base::phase::Phase;
use crate::base::progress::Progress;
use crate::base::timeline::Timeline;
use crate::engine::dump::{self, CriuOptions, Feedback, Options, Target};
use crate::engine::error::{Error, Failure, Left};
use crate::image::Protocol;
use crate::image::trust::PrivateKey;
use crate::store::Compression;

/// Which program is to go, and how.
#[derive(Debug, Clone)]
pub struct Wishes {
    /// Root of the process tree.
    pub pid: u32,
    /// Only asks whether it could.
    pub dry_run: bool,
    /// For how long it may stand still at the source.
    pub max_stopped: Duration,
    /// For how long the link may hold it up; none for passes over its memory as long as each gains much.
    pub goal: Option<Goal>,
    /// How long the other side may take for its first word, besides the time for which it may be silent.
    pub patience: Duration,
    /// How memory is to be copied; none leaves the choice to gpucr.
    pub protocol: Option<Protocol>,
    /// Run in a shell before it is stopped.
    pub before_stop: Option<OsString>,
    /// Limit for closing the gate and draining, and for the driver's lock.
    pub timeout: Duration,
    /// How chunks are compressed.
    pub compression: Compression,
    /// The root is no session leader.
    pub shell_job: bool,
    /// Options of CRIU.
    pub criu: CriuOptions,
    /// Records what happens when, on both sides.
    pub timeline: Timeline,
    /// Connections besides the link, over which memory goes.
    pub streams: Option<Wanted>,
    /// Whether files that it has open go along, as far as the destination lacks them.
    pub copies_files: bool,
    /// Whether it goes though the other side may have too little disk space for its image.
    pub tight_disk: bool,
    /// Whether its standard streams are relayed, as far as they are pipes.
    pub relays: bool,
    /// Signs the image.
    pub sign: Option<Arc<PrivateKey>>,
    /// A new or empty directory for an image that is kept here until the program runs on the other side.
    pub safety_image: Option<PathBuf>,
    /// Set by a signal handler to end it.
    pub stop: Arc<AtomicBool>,
}

/// A program that has gone, or could go.
#[derive(Debug, serde::Serialize)]
pub struct Migrated {
    /// The migration's name.
    pub migration: String,
    /// Root of the process tree at the source.
    pub pid: u32,
    /// Its pid at the destination; none if it was only asked whether it could go.
    pub new_pid: Option<u32>,
    /// Bytes that went over the link.
    pub sent_bytes: u64,
    /// Chunks that went, each once.
    pub sent_chunks: u64,
    /// Chunks that the destination had.
    pub there_chunks: u64,
    /// From the moment at which the program was stopped to that at which it ran again.
    pub downtime_ms: f64,
    /// All of it.
    pub total_ms: f64,
    /// What the source has done; `stopped_ms` of it is up to the decision.
    pub dump: Option<dump::Report>,
    /// Outputs that somebody read here, and nobody there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub unread: Vec<&'static str>,
    /// Relays its standard streams.
    #[serde(skip)]
    pub relaying: Option<Relaying>,
}

/// Whose the program is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// The source's, of which this holds.
    Source(Left),
    /// The destination's, which has a complete image there.
    Destination {
        /// The migration's name.
        migration: String,
        /// Where the destination has the image.
        image: String,
    },
}

/// A migration that has failed on the source's side.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct MigrateFailure {
    /// In which phase.
    pub phase: Phase,
    /// What happened.
    #[source]
    pub error: Box<Error>,
    /// Whose the program is.
    pub owner: Owner,
    /// A complete image that was kept here, see [`Wishes::safety_image`].
    pub safety_image: Option<PathBuf>,
}

/// Brings a program to the other side of the link.
///
/// # Errors
/// See [`MigrateFailure::owner`] for what holds then.
pub fn migrate(
    link: Link,
    wishes: &Wishes,
    progress: &Arc<dyn Progress>,
) -> Result<Migrated, MigrateFailure> {
    let since = Instant::now();
    let link = Arc::new(link);
    let new = |path: &PathBuf| SafetyImage::new(path, wishes.compression);
    let safety = wishes.safety_image.as_ref().map(new).transpose();
    let greeted = safety.and_then(|safety| {
        let terms = Terms {
            compression: wishes.compression,
            max_stopped: wishes.max_stopped,
            patience: wishes.patience,
            goal: wishes.goal,
            streams: wishes.streams.clone(),
            copies_files: wishes.copies_files,
            tight_disk: wishes.tight_disk,
            relays: wishes.relays,
        };
        Outgoing::greet(link.clone(), terms, safety)
    });
    let peer = Arc::new(greeted.map_err(|error| MigrateFailure {
        phase: Phase::Offer,
        error: Box::new(error),
        owner: Owner::Source(Left::Untouched),
        safety_image: None,
    })?);
    let pulse = Pulse::start(link.clone());
    let options = options(wishes, &peer);
    let dumped = if wishes.dry_run {
        dump::offer(&options, progress).map(|()| None)
    } else {
        dump::dump(&options, progress).map(Some)
    };
    let report = dumped.map_err(|failure| {
        peer.abort(&failure.error);
        let Failure { phase, error, left } = failure;
        if matches!(left, Left::Untouched | Left::RolledBack | Left::Ended) {
            peer.remove_safety_image();
        }
        let safety_image = peer.complete_safety_image();
        MigrateFailure { phase, error, owner: Owner::Source(left), safety_image }
    })?;
    let mut new_pid = None;
    if report.is_some() {
        let mut clock = Clock::recorded(progress.as_ref(), wishes.timeline.clone());
        let entered = clock.enter(Phase::Handover, None).map_err(Error::from);
        let handed_over = entered.and_then(|()| peer.hand_over(&wishes.timeline));
        clock.end();
        new_pid = Some(handed_over.map_err(|error| MigrateFailure {
            phase: Phase::Handover,
            error: Box::new(error),
            owner: Owner::Destination { migration: peer.id().to_string(), image: peer.image() },
            safety_image: peer.complete_safety_image(),
        })?);
    }
    peer.remove_safety_image();
    let (sent_chunks, there_chunks) = peer.chunks();
    let ends = peer.take_ends().filter(|_| new_pid.is_some());
    let sent_bytes = link.sent();
    Ok(Migrated {
        migration: peer.id().to_string(),
        pid: wishes.pid,
        new_pid,
        sent_bytes,
        sent_chunks,
        there_chunks,
        downtime_ms: milliseconds(peer.downtime()),
        total_ms: milliseconds(since.elapsed()),
        dump: report,
        unread: peer.unread(),
        relaying: ends.map(|ends| Relaying::new(link, ends, pulse)),
    })
}

fn options(wishes: &Wishes, peer: &Arc<Outgoing>) -> Options {
    Options {
        pid: wishes.pid,
        target: Target::Peer(peer.clone()),
        leave_running: false,
        protocol: wishes.protocol,
        shadow_memory: None,
        host_memory_limit: None,
        before_stop: wishes.before_stop.clone(),
        timeout: wishes.timeout,
        compression: wishes.compression,
        shell_job: wishes.shell_job,
        criu: wishes.criu.clone(),
        tags: Vec::new(),
        at_sync: None,
        save_files: crate::engine::dump::SAVE_FILES,
        timeline: wishes.timeline.clone(),
        feedback: Feedback::default(),
        sign: wishes.sign.clone(),
        stop: wishes.stop.clone(),
    }
}
