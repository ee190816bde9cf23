//! `gpucr report`.

use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::careful;
use gpucr_core::timeline::{self, Trace};

use crate::commands::Outcome;
use crate::failure::{CliError, FAILED};
use crate::output::Output;
use crate::{display, escape, say};

/// Draw the timeline of a dump as a web page
///
/// Reads what `gpucr dump --timeline` wrote, and makes one HTML file that needs nothing else. It has a table of where
/// the dump ran and what the result was; a picture of the phases, the passes of the pre-copy, the hash passes, the
/// copies and the time for which the program was stopped, with bytes copied and bytes found changed over time; the
/// same as a table; and the memory that changed after it was copied, with the kernels that may have written it.
#[derive(clap::Args)]
#[command(after_long_help = "\
The timeline is in Chrome's trace event format: https://ui.perfetto.dev opens it as it is, to zoom in. A hash \
pass hashes all device memory on the device; what changed between two passes counts as found changed. Copies \
named `ahead` were made while the program ran, `what is left` while it was stopped, and `shadows` after it \
continued, from copies that had been set aside on the device. Calls are shown as blocked if they waited because \
they might write memory that was still being saved after the program continued.\n\n\
Example:\n  gpucr dump --pid 4242 --leave-running -o image --timeline dump.json\n  \
gpucr report dump.json -o dump.html")]
pub(crate) struct ReportArgs {
    /// The timeline
    #[arg(value_name = "TIMELINE")]
    pub(crate) timeline: PathBuf,
    /// The page, which is replaced if it exists; `-` for stdout
    #[arg(short = 'o', long = "output", value_name = "FILE.html")]
    pub(crate) output: PathBuf,
}

/// A timeline of a day with a copy every millisecond has a few hundred megabytes.
const LARGEST: u64 = 1 << 30;

pub(crate) fn run(args: &ReportArgs) -> Outcome {
    let path = args.timeline.display();
    let mut trace = read(&args.timeline).map_err(|problem| {
        CliError::new(FAILED, format!("{path} is not a timeline of a dump: {problem}"))
            .state("Nothing was written.")
            .help("make one with `gpucr dump --timeline FILE`")
    })?;
    for name in trace.marks.iter_mut().flat_map(|mark| &mut mark.misspeculation.suspects) {
        *name = display::kernel(name);
    }
    let page = timeline::page(&trace, &title(&trace, &args.timeline));
    let page = escape::escaped_lines(&page);
    if args.output.as_os_str() == "-" {
        say::text(&page);
        return Ok(ExitCode::SUCCESS);
    }
    let written = Output::prepare(&args.output).and_then(|output| output.write(page.as_bytes()));
    written.map_err(|error| {
        CliError::new(FAILED, format!("cannot write {}: {error}", args.output.display()))
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Whose timeline it is; older ones do not say, and have the name of the file.
fn title(trace: &Trace, path: &Path) -> String {
    let fact = |name| trace.about.iter().find(|fact| fact.name == name);
    match (fact("process"), fact("host")) {
        (Some(process), Some(host)) => {
            format!("Timeline of process {} on {}", process.value, host.value)
        }
        _ => format!("Timeline {}", path.file_stem().unwrap_or_default().to_string_lossy()),
    }
}

fn read(path: &Path) -> Result<Trace, String> {
    let bytes = careful::read_regular(path, LARGEST).map_err(|error| error.to_string())?;
    let text = String::from_utf8(bytes).map_err(|error| error.to_string())?;
    Trace::read(&text).map_err(|error| error.to_string())
}
