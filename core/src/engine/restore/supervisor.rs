//! The only place that decides whether, and how, a program is restored once more.
//!
//! A restore that rests on a guess about the program can turn out to be wrong while the program runs, though image and
//! host are as they should be. Then the program is ended, its output is taken back, and it is restored with nothing
//! left to guess. That happens once: the second attempt cannot fail for such a reason.
//!
//! - On demand ([`Options::on_demand`]) the guess is what a call touches, and that no process moves its memory about
//!   after it has forked. That it was wrong shows before [`restore`] returns, and all memory is loaded first then.
//! - With shared memory ([`Options::share`]) the guess is what no instance writes. That it was wrong shows in
//!   [`Program::wait`], or in another process ([`restore_elsewhere`]). Then nothing is shared, and the image is
//!   remembered.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::base::file_tree::FileTree;
use crate::base::progress::Progress;
use crate::engine::error::{Error, Failure};
use crate::host::process::{ProcessInfo, kill_trees};
use crate::image::Manifest;

use super::files::FilePolicy;
use super::options::Options;
use super::output::Output;
use super::phases::attempt;
use super::processes::{wait_for, wait_until_ended};
use super::report::{OnDemand, Report, Shared};
use super::stdio::Outputs;
use super::unshared;
use super::watch::Watch;

/// A program that was restored. It runs on if this is dropped, but it is not restored again then if it has to be.
pub struct Program {
    options: Options,
    report: Report,
    watched: Option<Watched>,
    /// What is taken back if it is restored again.
    output: Output,
}

/// What there is to be watched over, and to whom a further restore shows its progress.
struct Watched {
    watch: Watch,
    progress: Arc<dyn Progress>,
}

/// What has happened to a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Happened {
    /// The program has ended. Its status stays to be waited for.
    Ended,
    /// The program was ended because it had written what it shared, and was restored again with its own memory. The
    /// [report](Program::report) is of that.
    RestoredAgain,
}

/// Restores a program.
///
/// # Errors
/// See [`Failure::left`] for what holds after a failure.
pub fn restore(options: Options, progress: Arc<dyn Progress>) -> Result<Program, Failure> {
    let output = Output::of(&options);
    let failure = match attempt(&options, &progress) {
        Err(failure) => failure,
        Ok((report, watch)) => return Ok(Program::new(options, report, watch, output, progress)),
    };
    let was_guess = matches!(
        *failure.error,
        Error::Missed { .. } | Error::EndedAwaiting { .. } | Error::MovedAwaiting
    );
    if !options.on_demand || !was_guess {
        return Err(failure);
    }
    // Image and host are as they should be: it was a guess about the program that was wrong.
    tracing::warn!(error = %failure.error, "restoring again, with all memory loaded before the program continues");
    let options = Options { on_demand: false, ..options };
    let (mut report, watch) = once_more(&options, &output, &progress)?;
    report.on_demand =
        Some(OnDemand { fallen_back: Some(failure.error.to_string()), ..OnDemand::default() });
    Ok(Program::new(options, report, watch, output, progress))
}

impl Program {
    fn new(
        options: Options,
        report: Report,
        watch: Option<Watch>,
        output: Output,
        progress: Arc<dyn Progress>,
    ) -> Self {
        let watched = watch.map(|watch| Watched { watch, progress });
        let mut options = options;
        if watched.is_none() {
            // It is not restored again: whoever is at the other ends of its streams is to see when the program closes them.
            options.outputs = Outputs::default();
        }
        Self { options, report, watched, output }
    }

    /// What the restore did: the last one, if the program was restored again.
    pub fn report(&self) -> &Report {
        &self.report
    }

    /// The report alone. The program is not watched over from then on.
    pub fn into_report(self) -> Report {
        self.report
    }

    /// The report, and what has to be watched over: for a process that becomes another program, which is to watch.
    pub fn into_parts(self) -> (Report, Option<Watch>) {
        (self.report, self.watched.map(|watched| watched.watch))
    }

    /// Waits until something has happened to the program, which is a child of this process. After
    /// [`Happened::RestoredAgain`] it can be waited for anew.
    ///
    /// # Errors
    /// The program had to be restored again, and that has failed.
    pub fn wait(&mut self) -> Result<Happened, Failure> {
        let pid = self.report.pid;
        if let Some(Watched { watch, progress }) = self.watched.take()
            && let Some(why) = watch.until_end(pid)
        {
            self.report =
                restore_unshared(&mut self.options, watch, &self.output, pid, &why, &progress)?;
            return Ok(Happened::RestoredAgain);
        }
        wait_until_ended(pid);
        Ok(Happened::Ended)
    }
}

/// After a [`Watch`] has said that the program with root `pid` cannot go on: ends it, gives up what it has
/// shared, and restores it anew, with all memory its own. That is remembered.
fn restore_unshared(
    options: &mut Options,
    watch: Watch,
    output: &Output,
    pid: u32,
    why: &Error,
    progress: &Arc<dyn Progress>,
) -> Result<Report, Failure> {
    tracing::warn!(error = %why, "restoring again, with no shared memory");
    unshared::remember(&options.image);
    let killed = kill_trees(ProcessInfo::read(pid).ok().iter());
    wait_for(&[&[pid], &killed[..]].concat());
    watch.leave();
    options.share = None;
    // Signals that the program was given, and has survived, have set the stop.
    options.stop.store(false, Ordering::Relaxed);
    let (mut report, _) = once_more(options, output, progress)?;
    report.shared = Some(fallen_back(why.to_string()));
    Ok(report)
}

/// Restores a program that has run already, and was ended.
fn once_more(
    options: &Options,
    output: &Output,
    progress: &Arc<dyn Progress>,
) -> Result<(Report, Option<Watch>), Failure> {
    options.tell(None);
    output.take_back();
    attempt(options, progress)
}

fn fallen_back(why: String) -> Shared {
    Shared { fallen_back: Some(why), ..Shared::default() }
}

/// What has become of an instance that another process has restored and watched over.
#[derive(Debug)]
pub enum Instance<T> {
    /// The instance has come to an end, or is there to stay.
    Done(T),
    /// The instance has written memory that it shared, which is the reason here, and does not exist any more.
    WroteShared(String),
}

/// Restores a program that another process restores and watches over, as the first one of a pid namespace does. `run`
/// has that process do so, and waits for what becomes of it. If that is [`Instance::WroteShared`], `run` is called once
/// more, after the output was taken back: it is given what the report has to say of sharing, and nothing may be shared.
///
/// # Errors
/// The error of `run`.
pub fn restore_elsewhere<T, E>(
    image: &Path,
    manifest: &Manifest,
    files: (FilePolicy, FileTree),
    mut run: impl FnMut(Option<Shared>) -> Result<Instance<T>, E>,
) -> Result<Instance<T>, E> {
    let output = Output::note(manifest, files.0, files.1);
    let why = match run(None)? {
        Instance::WroteShared(why) => why,
        done => return Ok(done),
    };
    output.take_back();
    unshared::remember(image);
    run(Some(fallen_back(why)))
}
