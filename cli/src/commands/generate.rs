//! `gpucr completions`, and the hidden `gpucr generate-man`.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;

use crate::commands::{Outcome, io_error};
use crate::say;

/// Print a completion script for a shell
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Write the manual pages
#[derive(clap::Args)]
pub(crate) struct GenerateManArgs {
    /// Where to
    pub(crate) dir: PathBuf,
}

/// Prints the script for the command line of `gpucr`.
pub(crate) fn completions(args: &CompletionsArgs, mut gpucr: Command) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut gpucr, "gpucr", &mut script);
    say::text(String::from_utf8_lossy(&script).trim_end_matches('\n'));
    Ok(ExitCode::SUCCESS)
}

/// Writes gpucr.1 and a page for each subcommand.
pub(crate) fn man(args: &GenerateManArgs, gpucr: Command) -> Outcome {
    clap_mangen::generate_to(gpucr.disable_help_subcommand(true), &args.dir)
        .map_err(io_error(&format!("cannot write to {}", args.dir.display())))?;
    Ok(ExitCode::SUCCESS)
}
