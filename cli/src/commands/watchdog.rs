//! `gpucr watchdog`, hidden: the process that brings a program back if gpucr dies.

use std::process::ExitCode;

use crate::commands::{Outcome, io_error};

pub(crate) fn run() -> Outcome {
    gpucr_core::watchdog::main().map_err(io_error("the watchdog is started by gpucr alone"))?;
    Ok(ExitCode::SUCCESS)
}
