//! `gpucr gc`.

use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::image;

use crate::args::GcArgs;
use crate::commands::{io_error, print_json, say};
use crate::{Outcome, display, signals};

pub(crate) fn run(args: &GcArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let progress = display::progress(args.json);
    let report = image::gc(&args.store, args.wait, &signals.stop, progress.as_ref());
    drop(progress);
    let report = report.map_err(Error::from)?;
    if args.json {
        print_json(&report)?;
    } else {
        say!(
            "{}: {} freed, {} kept for {} images ({} moved)",
            args.store.display(),
            display::bytes(report.freed_bytes),
            display::bytes(report.kept_bytes),
            report.images,
            display::bytes(report.moved_bytes)
        );
    }
    if report.missing_chunks > 0 {
        eprintln!(
            "{} chunks that images need are missing: `gpucr verify` names those images.",
            report.missing_chunks
        );
    }
    Ok(ExitCode::SUCCESS)
}
