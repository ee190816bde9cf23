//! `gpucr gc`.

use std::process::ExitCode;
use std::time::Duration;

use gpucr_core::Error;
use gpucr_core::image;

use crate::commands::{Outcome, io_error, note_folded, print_json, say_folded};
use crate::stores::StoreArgs;
use crate::values::duration;
use crate::{display, signals};

/// Free data that no image in a store needs
///
/// Safe during dumps and restores, and at any time after a crash: nothing that an image needs is removed. It reads
/// all manifests, moves needed data out of files that hold mostly unneeded data, and merges small files. It then
/// waits until no dump or restore uses the store, and blocks new ones for the short moment in which it removes the
/// rest. If an image cannot be read, gc stops, since that image might need anything: put its files back, or remove it
/// with `gpucr rm`.
#[derive(clap::Args)]
#[command(after_long_help = "\
It needs free space for the data that it moves: at most half of what it frees, plus 1 GiB for small files that \
it merges. If it runs out of space, is interrupted, or gives up waiting, nothing is lost; the next gc does the \
rest. Dumps into the store that begin while it waits yield to it for ten seconds.\n\n\
Example:\n  gpucr rm /images/images/step-1000\n  gpucr gc /images")]
pub(crate) struct GcArgs {
    #[command(flatten)]
    pub(crate) store: StoreArgs,
    /// How long to wait for running dumps and restores to end
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    pub(crate) wait: Duration,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &GcArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals
        .settle_at_last(|| "No image was touched; the next gc removes what is left over.".into());
    let progress = display::progress(args.json);
    let store = args.store.store()?;
    let report = image::gc(&store, args.wait, &signals.stop, progress.as_ref());
    drop(progress);
    let report = report.map_err(Error::from)?;
    if args.json {
        print_json(&report)?;
    } else {
        say_folded!(
            2,
            "{}: {} freed, {} kept for {} ({} moved)",
            store.display(),
            display::bytes(report.freed_bytes),
            display::bytes(report.kept_bytes),
            display::counted(report.images as u64, "image", "images"),
            display::bytes(report.moved_bytes)
        );
    }
    if report.missing_chunks > 0 {
        note_folded!(
            "{} that images need {} missing: `gpucr verify` names those images.",
            display::counted(report.missing_chunks as u64, "chunk", "chunks"),
            if report.missing_chunks == 1 { "is" } else { "are" },
        );
    }
    Ok(ExitCode::SUCCESS)
}
