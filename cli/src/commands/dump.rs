//! `gpucr dump`.

pub(crate) mod about;
pub(crate) mod args;
mod once;
mod options;
mod repeat;
mod tell;

use std::path::Path;
use std::process::ExitCode;

use gpucr_core::timeline::{Fact, Timeline, Trace};
use gpucr_core::{Error, dump, namespace};

pub(crate) use args::DumpArgs;
pub(crate) use repeat::clean;

use crate::commands::{Outcome, dry_run, inside, io_error, print_json};
use crate::events::Events;
use crate::failure::{CliError, FAILED};
use crate::metrics::Metrics;
use crate::output::Output;
use crate::traces::Traces;
use crate::{escape, signals};

pub(crate) fn run(args: &DumpArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(|| {
        "gpucr could not wait until its work was finished. The watchdog settles the rest: the program keeps \
        running, and there is no image unless it was already complete."
            .into()
    });
    if args.inside.is_none()
        && let Some(entry) = namespace::entry(args.pid).map_err(Error::from)?
    {
        return inside::run_dump(&entry, &signals);
    }
    let outside = inside::begin(args.inside, args.first_process)?;
    if args.dry_run {
        let mut blockers = Vec::new();
        let signer = dry_run::or_tell(options::signer(args), &mut blockers);
        let options = options::options(args, signer, signals.stop)?;
        blockers.extend(dump::blockers(&options).into_iter().map(CliError::from));
        return dry_run::tell(&format!("a dump of process {}", args.pid), blockers, args.json);
    }
    let options = options::options(args, options::signer(args)?, signals.stop)?;
    let events = Events::open(args.events.as_deref())?;
    if let Some(interval) = args.every {
        return repeat::run(args, options, (&events, outside.as_ref()), interval);
    }
    let mut metrics = Metrics::new(args.metrics.as_deref(), "dump");
    let traces = Traces::open(args.traces.as_deref(), "dump")?;
    // Better before the dump than after it.
    let timeline = args.timeline.as_deref().map(prepare_timeline).transpose()?;
    let outcome = once::dump(args, &options, (&events, outside.as_ref()), (&mut metrics, &traces));
    // The timeline of a dump that failed is written too.
    let written = timeline.map_or(Ok(()), |output| {
        let facts = about::facts(args.pid, options.leave_running, &outcome);
        write_timeline(output, &options.timeline, facts)
    });
    let report = outcome?;
    if args.json {
        print_json(&report)?;
    } else {
        tell::tell(args, &options, &report);
    }
    written.map_err(|error| error.state("The image is complete."))?;
    Ok(ExitCode::SUCCESS)
}

/// Prepares the file of `--timeline`: better before the work than after it.
///
/// # Errors
/// It cannot be written.
pub(crate) fn prepare_timeline(path: &Path) -> Result<Output, CliError> {
    Output::prepare(path).map_err(|source| {
        CliError::new(FAILED, format!("cannot write {}: {source}", path.display()))
            .state("Nothing was changed.")
    })
}

/// Writes what was recorded, and what is to be said of it.
///
/// # Errors
/// The file cannot be written.
pub(crate) fn write_timeline(
    output: Output,
    timeline: &Timeline,
    about: Vec<Fact>,
) -> Result<(), CliError> {
    let trace = timeline.trace().map(|trace| Trace { about, ..trace }.write()).unwrap_or_default();
    let written = output.write(escape::escaped_json(&trace).as_bytes());
    written.map_err(|source| CliError::new(FAILED, format!("cannot write the timeline: {source}")))
}
