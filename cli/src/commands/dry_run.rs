//! `--dry-run`: everything that is in the way, at once.

use std::process::ExitCode;

use serde_json::json;

use super::{Outcome, print_json, say};
use crate::failure::{CliError, FAILED};

/// What there is, or else nothing, and what is in its way is told with all else.
pub(crate) fn or_tell<T: Default>(it: Result<T, CliError>, blockers: &mut Vec<CliError>) -> T {
    it.unwrap_or_else(|error| {
        blockers.push(error);
        T::default()
    })
}

/// Tells what is in the way of `what`, each with what to do about it.
pub(crate) fn tell(what: &str, blockers: Vec<CliError>, as_json: bool) -> Outcome {
    let is_clear = blockers.is_empty();
    if as_json {
        let all = blockers.iter().map(|b| json!({"what": b.message(), "remedy": b.remedy()}));
        print_json(&json!({"possible": is_clear, "blockers": all.collect::<Vec<_>>()}))?;
    } else {
        match blockers.len() {
            0 => say!("nothing known would prevent {what}"),
            1 => say!("one thing would prevent {what}:"),
            count => say!("{count} things would prevent {what}:"),
        }
        for blocker in &blockers {
            say!("- {}", blocker.message());
            for line in blocker.remedy().unwrap_or_default().lines() {
                say!("  {line}");
            }
        }
    }
    Ok(if is_clear { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}
