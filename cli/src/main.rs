//! `gpucr`: checkpoint and restore of running CUDA programs.

mod args;
mod commands;
mod display;
mod events;
mod failure;
mod signals;
mod table;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;

use args::{Args, Command};
use failure::CliError;

/// What a subcommand gives back: the exit code, or what went wrong.
type Outcome = Result<ExitCode, CliError>;

fn main() -> ExitCode {
    let args = Args::parse();
    start_log();
    // What becomes a program must keep its limits; the others may have to open many packs.
    if !matches!(args.command, Command::Run(_)) {
        gpucr_core::limits::raise_open_files();
    }
    let outcome = match args.command {
        Command::Run(args) => commands::run::run(&args),
        Command::Dump(args) => commands::dump::run(&args),
        Command::Restore(args) => commands::restore::run(&args),
        Command::Warm(args) => commands::warm::run(&args),
        Command::Ps(args) => commands::ps::run(&args),
        Command::Trace(args) => commands::trace::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Ls(args) => commands::ls::run(&args),
        Command::Rm(args) => commands::rm::run(&args),
        Command::Gc(args) => commands::gc::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Diff(args) => commands::diff::run(&args),
        Command::Export(args) => commands::transfer::export(&args),
        Command::Import(args) => commands::transfer::import(&args),
        Command::Check(args) => commands::check::run(&args),
        Command::Completions(args) => commands::generate::completions(&args),
        Command::GenerateMan(args) => commands::generate::man(&args),
        Command::Keeper => commands::keeper::run(),
        Command::Init(args) => commands::restore::namespace::init(&args),
        Command::WarmHolder => commands::warm::hold(),
        Command::SharingHolder => commands::restore::hold(),
    };
    outcome.unwrap_or_else(failure::report)
}

/// `GPUCR_LOG=debug` (or any filter of tracing's) writes what the library does to stderr.
fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("GPUCR_LOG").unwrap_or_else(|_| EnvFilter::new("error"));
    let colours = std::io::stderr().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(colours);
    log.with_writer(std::io::stderr).init();
}
