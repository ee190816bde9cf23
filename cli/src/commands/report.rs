//! `gpucr report`.

use std::path::Path;
use std::process::ExitCode;

use gpucr_core::timeline::{self, Trace};

use crate::args::ReportArgs;
use crate::commands::say;
use crate::failure::{CliError, FAILED};
use crate::{Outcome, display};

/// A timeline of a day with a copy every millisecond has a few hundred megabytes.
const LARGEST: u64 = 1 << 30;

pub(crate) fn run(args: &ReportArgs) -> Outcome {
    let path = args.timeline.display();
    let mut trace = read(&args.timeline).map_err(|problem| {
        CliError::new(FAILED, format!("{path} is no timeline of a dump: {problem}"))
            .state("Nothing was written.")
            .help("make one with `gpucr dump --timeline FILE`")
    })?;
    for name in trace.marks.iter_mut().flat_map(|mark| &mut mark.misspeculation.suspects) {
        *name = display::kernel(name);
    }
    let name = args.timeline.file_stem().unwrap_or_default().to_string_lossy();
    let page = timeline::page(&trace, &format!("gpucr dump: {name}"));
    if args.output.as_os_str() == "-" {
        say!("{page}");
        return Ok(ExitCode::SUCCESS);
    }
    std::fs::write(&args.output, page).map_err(|error| {
        CliError::new(FAILED, format!("cannot write {}: {error}", args.output.display()))
    })?;
    Ok(ExitCode::SUCCESS)
}

fn read(path: &Path) -> Result<Trace, String> {
    let length = std::fs::metadata(path).map_err(|error| error.to_string())?.len();
    if length > LARGEST {
        return Err(format!("it has {length} bytes"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    Trace::read(&text).map_err(|error| error.to_string())
}
