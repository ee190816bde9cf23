//! What is known of the host memory of the programs, from the first copies to the image.

use std::collections::HashMap;

use gpucr_wire::table::Range;
use rayon::prelude::*;

use super::copied::found_again;
use super::watched::Watched;
use crate::base::ranges::Ranges;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::host::criu::LeftMemory;
use crate::image::{Contents, FileChunk, ImageWriter, Reused};

/// `0` has no host memory copied ahead. `hash` has it copied whether it is tracked or not, and all of it read at the
/// stop. `check` reads it to compare it with what tracking says.
const ENV_HOST_AHEAD: &str = "GPUCR_HOST_AHEAD";
/// Bytes of a page.
const PAGE: u64 = 4096;

/// How host memory is copied ahead.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Mode {
    /// Not at all.
    Off,
    /// What is tracked.
    #[default]
    Tracked,
    /// As before, and at the stop everything is read and compared.
    Checked,
    /// All, and nothing is tracked.
    Hashed,
}

impl Mode {
    /// The one that is asked for.
    pub(super) fn asked() -> Self {
        let asked = std::env::var_os(ENV_HOST_AHEAD);
        match asked.as_ref().and_then(|asked| asked.to_str()) {
            Some("0") => Self::Off,
            Some("check") => Self::Checked,
            Some("hash") => Self::Hashed,
            _ => Self::Tracked,
        }
    }
}

/// What has come of host memory.
#[derive(Debug, Clone, Default, PartialEq, serde::Serialize)]
pub struct HostMemory {
    /// Processes whose memory was tracked up to the stop.
    pub tracked: u64,
    /// Bytes that were copied while the program ran, those copied again too.
    pub ahead_bytes: u64,
    /// Passes in which they were copied.
    pub passes: u64,
    /// Bytes that devices may have written: they are among those that were read while the program stood still.
    pub pinned_bytes: u64,
    /// Bytes that were read while the program stood still.
    pub left_bytes: u64,
    /// Of these, bytes that were copied to memory of gpucr's own, and written when the program ran again.
    pub aside_bytes: u64,
    /// Bytes that had been copied before and were not read any more.
    pub kept_bytes: u64,
    /// Bytes of the chunks that had been copied before and had changed, or were not where they had been.
    pub changed_bytes: u64,
    /// Bytes of chunks that had changed unseen. Only where that was looked for (`GPUCR_HOST_AHEAD=check`).
    pub unseen_bytes: Option<u64>,
}

/// The host memory of the programs, as far as it is copied ahead.
#[derive(Default)]
pub(in crate::engine::dump) struct Host {
    mode: Mode,
    watched: Vec<Watched>,
    /// For each file of pages what need not be read.
    reused: HashMap<String, Vec<(u64, FileChunk)>>,
    account: HostMemory,
}

impl Host {
    /// What was copied of these processes.
    pub(super) fn new(mode: Mode, watched: Vec<Watched>, account: HostMemory) -> Self {
        Self { mode, watched, account, reused: HashMap::new() }
    }

    /// Asks, now that the gates are closed and the devices idle, which memory devices may have written.
    pub(in crate::engine::dump) fn ask_pinned(&mut self, cuda_processes: &mut [CudaProcess]) {
        for watched in &mut self.watched {
            let of = |program: &&mut CudaProcess| program.process.pid == watched.pid;
            let agent =
                cuda_processes.iter_mut().find(of).and_then(|program| program.agent.as_mut());
            match agent.map(|agent| agent.pinned()) {
                Some(Ok(ranges)) => watched.except(&pages(&ranges)),
                failed => {
                    tracing::debug!(?failed, pid = watched.pid, "it does not say what is pinned");
                    watched.give_up();
                }
            }
        }
    }

    /// Finds out, once the programs are frozen, what of the memory that was `left` in them need not be read.
    pub(in crate::engine::dump) fn settle(
        &mut self,
        image: &ImageWriter,
        left: &LeftMemory,
    ) -> Result<(), Error> {
        self.reused.clear();
        let account = &mut self.account;
        (account.tracked, account.left_bytes, account.kept_bytes) = (0, 0, 0);
        (account.changed_bytes, account.pinned_bytes, account.aside_bytes) = (0, 0, 0);
        for (file, pid, places) in left.places() {
            let all: u64 = places.iter().map(|place| place.len).sum();
            let watched = self.watched.iter_mut().find(|watched| watched.pid == pid);
            let (mut reused, mut kept) = (Vec::new(), 0);
            if let Some(watched) = watched
                && let Some(unchanged) = watched.unchanged()
            {
                reused = found_again(watched.copied(), &places, &unchanged);
                kept = bytes(&reused);
                account.tracked += 1;
                account.pinned_bytes += watched.pinned_bytes();
                account.changed_bytes += watched.copied_bytes() - kept;
            }
            if self.mode == Mode::Checked {
                let unseen = check(image, file, &mut reused)?;
                *account.unseen_bytes.get_or_insert_default() += unseen;
                kept -= unseen;
            }
            account.kept_bytes += kept;
            account.left_bytes += all - kept;
            self.reused.insert(file.name().to_owned(), reused);
        }
        Ok(())
    }

    /// What of the file of pages with this name need not be read.
    pub(in crate::engine::dump) fn reused(&self, name: &str) -> &Reused {
        self.reused.get(name).map_or(&[], Vec::as_slice)
    }

    /// So many bytes of what was left are in memory of gpucr's own.
    pub(in crate::engine::dump) fn copied_aside(&mut self, bytes: u64) {
        self.account.aside_bytes += bytes;
    }

    /// What is reported, if any memory was copied ahead.
    pub(in crate::engine::dump) fn report(&self) -> Option<HostMemory> {
        (self.account.passes > 0).then(|| self.account.clone())
    }

    /// Nothing is tracked any more. What was copied counts for nothing if the programs are stopped again.
    pub(in crate::engine::dump) fn end(&mut self) {
        self.watched.clear();
    }
}

fn bytes(reused: &Reused) -> u64 {
    reused.par_iter().map(|(_, chunk)| u64::from(chunk.len)).sum()
}

/// The pages that ranges lie in.
pub(super) fn pages(ranges: &[Range]) -> Ranges {
    let page = |range: &Range| {
        let end = range.address.saturating_add(range.size);
        (range.address / PAGE * PAGE, end.saturating_add(PAGE - 1) / PAGE * PAGE)
    };
    ranges.iter().map(page).collect()
}

/// Reads what need not be read, and takes out what is not as it was said to be. Gives the bytes of that.
fn check(
    image: &ImageWriter,
    file: &dyn Contents,
    reused: &mut Vec<(u64, FileChunk)>,
) -> Result<u64, Error> {
    let stretch = |(at, chunk): &(u64, FileChunk)| *at..*at + u64::from(chunk.len);
    let stretches: Vec<_> = reused.iter().map(stretch).collect();
    let mut found = image.add_stretches(file, &stretches)?.into_iter();
    let before = bytes(reused);
    reused.retain(|placed| {
        let is_same = found.next().is_some_and(|found| found == [*placed]);
        if !is_same {
            tracing::warn!("{} at {} has changed unseen", file.name(), placed.0);
        }
        is_same
    });
    Ok(before - bytes(reused))
}
