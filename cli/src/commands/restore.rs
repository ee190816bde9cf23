//! `gpucr restore`.

use std::process::ExitCode;

use gpucr_core::restore::{self, Options, Report};
use rustix::process::{Pid, WaitId, WaitIdOptions, WaitOptions, WaitStatus};

use crate::args::RestoreArgs;
use crate::commands::{io_error, print_json, say};
use crate::signals::{self, SignalPlan};
use crate::{Outcome, display};

/// The report, with what the program ended with.
#[derive(serde::Serialize)]
struct Ended<'a> {
    #[serde(flatten)]
    report: &'a Report,
    /// The program's exit code; absent while it runs, or if a signal ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    exit_code: Option<i32>,
    /// The signal that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    signal: Option<i32>,
}

pub(crate) fn run(args: &RestoreArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let options =
        Options { image: args.image.clone(), detach: args.detach, stop: signals.stop.clone() };
    let progress = display::progress(args.json);
    let report = restore::restore(&options, &progress)?;
    drop(progress);
    if args.detach {
        if args.json {
            print_json(&Ended { report: &report, exit_code: None, signal: None })?;
        } else {
            say!("{}", report.pid);
        }
        return Ok(ExitCode::SUCCESS);
    }

    signals.pass_to(report.pid);
    let status = wait(report.pid, &signals).map_err(io_error("cannot wait for the program"))?;
    let (exit_code, signal) = (status.exit_status(), status.terminating_signal());
    if args.json {
        print_json(&Ended { report: &report, exit_code, signal })?;
    }
    // As a shell does for a signal.
    let code = exit_code.or(signal.map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(code as u8))
}

/// Waits for the end of the program, which is a child of this process.
fn wait(pid: u32, signals: &SignalPlan) -> std::io::Result<WaitStatus> {
    let pid = Pid::from_raw(pid as i32).ok_or(std::io::ErrorKind::NotFound)?;
    // First only its end, while its pid is still its own: until then signals are passed on.
    let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(pid), ended))?;
    signals.keep();
    let status = rustix::process::waitpid(Some(pid), WaitOptions::empty())?;
    status.map(|(_, status)| status).ok_or(std::io::ErrorKind::NotFound.into())
}
