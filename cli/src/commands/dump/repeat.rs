//! `gpucr dump --every`: images of a program for as long as it lives.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use gpucr_core::dump::{AfterFailure, Options, Series, Target};
use gpucr_core::{Error, Quiet, image};

use super::args::DumpArgs;
use super::once;
use super::options::destination;
use super::tell::tell;
use crate::commands::inside::Outside;
use crate::commands::{Outcome, note_folded, say_folded};
use crate::events::Events;
use crate::metrics::Metrics;
use crate::say::print_json_line;
use crate::traces::Traces;
use crate::{display, failure, stores};

/// How long a gc waits for other users of the store; what it does not get is freed the next time.
const PATIENCE: Duration = Duration::from_secs(5);

/// Dumps at once, and then at each multiple of `interval`, until the program ends or a signal comes.
/// A dump that fails is reported, and the next one is tried at its time; if the first one fails there
/// are no others.
pub(super) fn run(
    args: &DumpArgs,
    mut options: Options,
    (events, outside): (&Events, Option<&Outside>),
    interval: Duration,
) -> Outcome {
    let mut series = Series::begin(args.own_pid(), interval, options.stop.clone())?;
    let store = stores::store(args.store.as_deref())?;
    let mut metrics = Metrics::new(args.metrics.as_deref(), "dump");
    let traces = Traces::open(args.traces.as_deref(), "dump")?;
    while series.wait() {
        options.target = Target::Image(destination(args)?);
        match once::dump(args, &options, (events, outside), (&mut metrics, &traces)) {
            Ok(report) => {
                series.took(report.image.clone());
                if args.json {
                    print_json_line(&report)?;
                } else {
                    tell(args, &options, &report);
                }
            }
            Err(failure) => match series.after(failure) {
                AfterFailure::Another(failure) => failure::show(failure.into()),
                AfterFailure::Over => break,
                AfterFailure::GiveUp(failure) => return Err(failure.into()),
            },
        }
        let keep = args.keep.map_or(usize::MAX, |keep| keep as usize);
        clean(&store, series.surplus(keep), &options.stop);
        let left_out = series.advance();
        if left_out > 0 {
            let dumps = display::counted(left_out as u64, "dump is", "dumps are");
            note_folded!("A dump took longer than the interval: {dumps} skipped.");
        }
    }
    let fate = if series.has_ended() { "has ended" } else { "keeps running" };
    if !args.json {
        let (taken, kept) = (series.taken(), series.kept());
        let images = display::counted(taken, "image was", "images were");
        say_folded!(2, "process {} {fate}; {images} made, {kept} kept", args.pid);
    }
    Ok(ExitCode::SUCCESS)
}

/// Removes images that are not to be kept any more, and what nobody else needs of them.
pub(crate) fn clean(
    store: &Path,
    surplus: impl IntoIterator<Item = PathBuf>,
    stop: &Arc<AtomicBool>,
) {
    let mut any = false;
    for image in surplus {
        match image::remove(&image, false) {
            Ok(_) => any = true,
            // Somebody may have removed it by hand.
            Err(error) => failure::show(Error::from(error).into()),
        }
    }
    if any && let Err(error) = image::gc(store, PATIENCE, stop, &Quiet) {
        failure::show(Error::from(error).into());
    }
}
