//! `gpucr completions`, and the hidden `gpucr generate-man`.

use std::process::ExitCode;

use clap::CommandFactory;

use crate::Outcome;
use crate::args::{Args, CompletionsArgs, GenerateManArgs};
use crate::commands::io_error;

pub(crate) fn completions(args: &CompletionsArgs) -> Outcome {
    clap_complete::generate(args.shell, &mut Args::command(), "gpucr", &mut std::io::stdout());
    Ok(ExitCode::SUCCESS)
}

/// Writes gpucr.1 and a page for each subcommand.
pub(crate) fn man(args: &GenerateManArgs) -> Outcome {
    clap_mangen::generate_to(Args::command().disable_help_subcommand(true), &args.dir)
        .map_err(io_error(&format!("cannot write to {}", args.dir.display())))?;
    Ok(ExitCode::SUCCESS)
}
