//! `gpucr logs`.

use std::process::ExitCode;

use gpucr_core::{careful, criu};
use serde_json::json;

use crate::commands::{Outcome, io_error, print_json, say};
use crate::display;
use crate::escape::escaped_lines;
use crate::say;

/// A log that is kept has no more bytes.
const LARGEST: u64 = 64 << 20;

/// List the full CRIU logs of recent failures
///
/// When a dump or restore fails in CRIU, the error shows a few lines of its log. The full log is kept until the host
/// is rebooted; at most the ten newest are kept.
#[derive(clap::Args)]
#[command(after_long_help = "Examples:\n  gpucr logs\n  gpucr logs --last | grep -B5 Error")]
pub(crate) struct LogsArgs {
    /// Print the newest one
    #[arg(long)]
    pub(crate) last: bool,
    /// Print a JSON array
    #[arg(long, conflicts_with = "last")]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &LogsArgs) -> Outcome {
    let logs = criu::kept_logs().map_err(io_error("cannot read what is kept"))?;
    if args.json {
        let logs = logs
            .iter()
            .map(|(path, bytes)| json!({"path": path.to_string_lossy(), "bytes": bytes}));
        print_json(&logs.collect::<Vec<_>>())?;
        return Ok(ExitCode::SUCCESS);
    }
    match logs.first() {
        None => say!("no log is kept: nothing failed in CRIU since the host was started"),
        Some((newest, _)) if args.last => {
            let bytes =
                careful::read_regular(newest, LARGEST).map_err(io_error("cannot read it"))?;
            say::text(
                escaped_lines(String::from_utf8_lossy(&bytes).trim_end_matches('\n')).as_ref(),
            );
        }
        Some(_) => {
            for (path, bytes) in &logs {
                say!("{}  {}", path.display(), display::bytes(*bytes));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
