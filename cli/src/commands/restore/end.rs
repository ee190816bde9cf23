//! How a restored program ends, and what the command says of it.

use std::os::unix::process::ExitStatusExt;
use std::process::{ExitCode, ExitStatus};

use rustix::process::WaitStatus;

use super::args::RestoreArgs;
use crate::commands::{Outcome, print_json};
use crate::say;

/// How the program ended.
#[derive(Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct End {
    /// Its exit code; absent while it runs, or if a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) signal: Option<i32>,
}

impl End {
    /// From what `wait` says.
    pub(super) fn of(status: WaitStatus) -> Self {
        Self { exit_code: status.exit_status(), signal: status.terminating_signal() }
    }

    /// gpucr's own exit code: as a shell does for a signal.
    pub(crate) fn exit_code(self) -> ExitCode {
        let code = self.exit_code.or(self.signal.map(|signal| 128 + signal)).unwrap_or(1);
        ExitCode::from(code as u8)
    }
}

impl From<ExitStatus> for End {
    fn from(status: ExitStatus) -> Self {
        Self { exit_code: status.code(), signal: status.signal() }
    }
}

/// What is printed with `--json`.
#[derive(serde::Serialize)]
struct Printed<R> {
    #[serde(flatten)]
    report: R,
    #[serde(flatten)]
    end: End,
}

/// The program runs in the background.
pub(super) fn started(args: &RestoreArgs, report: impl serde::Serialize, pid: u32) -> Outcome {
    if args.json {
        print_json(&Printed { report, end: End::default() })?;
    } else {
        // Whoever wants no summary wants this all the same: it is what the command prints.
        say::text(&pid.to_string());
    }
    Ok(ExitCode::SUCCESS)
}

/// The program that ran in the foreground has ended.
pub(super) fn ended(args: &RestoreArgs, report: impl serde::Serialize, end: End) -> Outcome {
    if args.json {
        print_json(&Printed { report, end })?;
    }
    Ok(end.exit_code())
}
