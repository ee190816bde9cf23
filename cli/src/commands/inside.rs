//! A dump or migration of a program that lives in a pid namespace of its own: CRIU has to see the pids that the program sees.

use std::ffi::{OsStr, OsString};
use std::process::{Command, ExitCode};

use gpucr_core::namespace;

use crate::commands::{Outcome, io_error};
use crate::failure::{CliError, FAILED};
use crate::signals::SignalPlan;

/// This command line again, that of the subcommand `name`, with more behind that.
pub(crate) fn again(name: &str, more: &[&OsStr]) -> Command {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // Options of gpucr itself may be before it: none of them takes a value.
    let at = arguments.iter().position(|argument| argument == name).map_or(0, |at| at + 1);
    let mut command = Command::new("/proc/self/exe");
    command.args(&arguments[..at]).args(more).args(&arguments[at..]);
    command
}

/// Runs this command again in the namespace of process `pid`, which has the pid `inner` there.
pub(crate) fn run(name: &str, pid: u32, inner: u32, signals: &SignalPlan) -> Outcome {
    let mut command = again(name, &["--inside".as_ref(), inner.to_string().as_ref()]);
    let mut child = namespace::spawn_in(pid, &mut command)
        .map_err(io_error("cannot enter the pid namespace of the program"))?;
    signals.pass_to(child.id());
    let status = child.wait();
    signals.keep();
    match status.map_err(io_error("cannot wait for the gpucr that was started there"))?.code() {
        Some(code) => Ok(ExitCode::from(code as u8)),
        None => Err(CliError::new(
            FAILED,
            "the gpucr that was started in the program's pid namespace was \
        killed"
                .to_owned(),
        )
        .state("The program keeps running, or its image is complete.")),
    }
}
