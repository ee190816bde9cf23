//! `gpucr ps`.

use std::process::ExitCode;
use std::time::Duration;

use gpucr_core::kinds;
use gpucr_core::process::survey::{Said, Seen, survey};
use gpucr_wire::GateState;

use crate::commands::{Outcome, io_error, note_folded, print_json, say_folded};
use crate::paint::Paint;
use crate::template::{self, Template, template};
use crate::values::duration;
use crate::{display, fold, say};

/// The column at which what is said of a program begins in the lines below its own.
const BELOW: usize = 10;
/// The columns before the command.
const BESIDES: usize = 71;

/// List the programs that run under gpucr
#[derive(clap::Args)]
pub(crate) struct PsArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
    /// Print one line per program from a template with fields of the JSON array, such as '{{.pid}} {{.state}}'
    #[arg(long, value_name = "TEMPLATE", value_parser = template, conflicts_with = "json")]
    pub(crate) format: Option<Template>,
    /// How long to wait for the answers of all programs together
    #[arg(long, value_name = "DURATION", default_value = "1500ms", value_parser = duration)]
    pub(crate) timeout: Duration,
}

#[derive(serde::Serialize)]
struct Row {
    pid: u32,
    command: Vec<String>,
    /// `running`, `stopped`, `detached`; `busy` while another gpucr works on it; `silent` if it did not answer, or
    /// not as an agent does.
    state: &'static str,
    devices: Vec<String>,
    /// Bytes that gpucr copies itself. This and what follows are not known of a process that does not tell.
    bulk_bytes: Option<u64>,
    allocations: Option<u64>,
    /// Bytes that are left to the driver's checkpoint, as far as they are counted.
    driver_bytes: Option<u64>,
    launches: Option<u64>,
    /// Whether memory is left to the driver because it cannot be handed to another process.
    private: bool,
    /// What would make a dump refuse.
    unsupported: Vec<String>,
}

pub(crate) fn run(args: &PsArgs) -> Outcome {
    let survey = survey(args.timeout).map_err(io_error("cannot read /proc"))?;
    if !survey.is_complete {
        note_folded!(
            "Not all processes were examined in time, so some may be missing: give a longer --timeout."
        );
    }
    for seen in &survey.seen {
        if let Said::Nothing(why) = &seen.said {
            note_folded!("process {} did not answer: {why}", seen.pid);
        }
    }
    let rows: Vec<Row> = survey.seen.into_iter().map(row).collect();
    if let Some(template) = &args.format {
        return template::print(template, &rows);
    }
    if args.json {
        print_json(&rows)?;
        return Ok(ExitCode::SUCCESS);
    }
    let head = format!(
        "{:>8}  {:<9} {:>12} {:>12} {:>10}  {:<12} COMMAND",
        "PID", "STATE", "BY GPUCR", "BY DRIVER", "LAUNCHES", "DEVICES"
    );
    say::painted(&[(Paint::Head, &head)]);
    let width = fold::width(std::io::stdout());
    // What does not fit behind the other columns goes on below them, in one line more where a terminal is narrow.
    let longest = width.map_or(usize::MAX, |width| width.saturating_sub(BESIDES).max(60));
    for row in rows {
        // The beginning tells one from another: `GPU-` and eight digits.
        let devices: Vec<&str> = row.devices.iter().map(|uuid| &uuid[..12]).collect();
        say_folded!(
            BELOW,
            "{:>8}  {:<9} {:>12} {:>12} {:>10}  {:<12} {}",
            row.pid,
            row.state,
            known(row.bulk_bytes, display::bytes),
            known(row.driver_bytes, display::bytes),
            known(row.launches, |count| count.to_string()),
            devices.join(","),
            display::command(&row.command, longest),
        );
        if row.private {
            say_folded!(
                BELOW,
                "{:BELOW$}slow to dump: its device memory cannot be shared with another process",
                ""
            );
        }
        for what in row.unsupported {
            let pieces = [(Paint::Bad, "cannot be dumped"), (Paint::Plain, &*format!(": {what}"))];
            let space = " ".repeat(BELOW);
            say::painted_folded(BELOW, &[&[(Paint::Plain, &*space)], &pieces[..]].concat());
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A number, or that it is not known.
fn known(count: Option<u64>, shown: impl Fn(u64) -> String) -> String {
    count.map_or_else(|| "-".to_owned(), shown)
}

fn row(seen: Seen) -> Row {
    let (state, counts) = match seen.said {
        Said::Holds(GateState::Open {}, counts) => ("running", Some(*counts)),
        Said::Holds(GateState::Closed {} | GateState::Closing {}, counts) => {
            ("stopped", Some(*counts))
        }
        Said::Holds(GateState::Detached {} | GateState::Parted {}, counts) => {
            ("detached", Some(*counts))
        }
        Said::Busy => ("busy", None),
        Said::Nothing(_) => ("silent", None),
    };
    let is_known = counts.is_some();
    let counts = counts.unwrap_or_default();
    let known = |count: u64| is_known.then_some(count);
    let mut unsupported = kinds::refused(&counts, kinds::by_driver);
    let driver_bytes = kinds::driver_bytes(&counts);
    unsupported.extend(counts.ungated);
    Row {
        pid: seen.pid,
        command: seen.command,
        state,
        devices: counts.devices.iter().map(gpucr_core::device_uuid).collect(),
        bulk_bytes: known(counts.bulk_bytes),
        allocations: known(counts.allocations),
        driver_bytes: known(driver_bytes),
        launches: known(counts.launches),
        private: counts.private,
        unsupported,
    }
}
