//! The command line. The options of a command are next to it, in `commands/`. Flags that CRIU has too carry its names.

use clap::{Parser, Subcommand};

use crate::commands::check::CheckArgs;
use crate::commands::diff::DiffArgs;
use crate::commands::dump::DumpArgs;
use crate::commands::extract::ExtractArgs;
use crate::commands::forget::ForgetArgs;
use crate::commands::gc::GcArgs;
use crate::commands::generate::{CompletionsArgs, GenerateManArgs};
use crate::commands::inspect::InspectArgs;
use crate::commands::key::KeyArgs;
use crate::commands::logs::LogsArgs;
use crate::commands::ls::LsArgs;
use crate::commands::migrate::MigrateArgs;
use crate::commands::ps::PsArgs;
use crate::commands::receive::{ReceiveArgs, RelayArgs};
use crate::commands::report::ReportArgs;
use crate::commands::restore::RestoreArgs;
use crate::commands::restore::namespace::InitArgs;
use crate::commands::rm::RmArgs;
use crate::commands::run::RunArgs;
use crate::commands::trace::TraceArgs;
use crate::commands::transfer::{ExportArgs, ImportArgs};
use crate::commands::verify::VerifyArgs;
use crate::commands::warm::WarmArgs;

/// Checkpoint and restore running CUDA programs.
///
/// Start a program with `gpucr run`, save it with `gpucr dump` while it runs, and bring it back with `gpucr restore`:
/// it resumes where it left off. `gpucr check` tells whether this host can do that.
#[derive(Parser)]
#[command(name = "gpucr", version, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes: 0 success; 1 failure: the error says what state the program and the image are in, or that everything \
was done but the result could not be written; 2 wrong usage; 3 this host lacks something (see gpucr check). \
gpucr run ends with the exit code of its program, with 127 if that is not found, and with 126 if it cannot be run.\n\n\
Environment: GPUCR_LOG=debug logs each step; GPUCR_CRIU names the CRIU to use; GPUCR_LIB_DIR names the directory \
of gpucr's own libraries; GPUCR_STORE names the default store (if it is not set, `store = DIR` in \
~/.config/gpucr/config or /etc/gpucr/config does), whose images can be given by name alone, or as `latest`; \
GPUCR_HOST_DRIVER names a driver library to trust besides those that are found.")]
pub(crate) struct Args {
    /// Print no progress and no summary; errors, warnings and JSON are still printed
    ///
    /// Commands whose purpose is to print something, such as ls, are not affected, and neither is the pid that restore
    /// --detach prints.
    #[arg(short, long, global = true)]
    pub(crate) quiet: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Dump(DumpArgs),
    Restore(RestoreArgs),
    Migrate(MigrateArgs),
    Receive(ReceiveArgs),
    Warm(WarmArgs),
    Ps(PsArgs),
    Trace(TraceArgs),
    Inspect(InspectArgs),
    Extract(ExtractArgs),
    Verify(VerifyArgs),
    Report(ReportArgs),
    Diff(DiffArgs),
    Export(ExportArgs),
    Import(ImportArgs),
    Ls(LsArgs),
    Rm(RmArgs),
    Forget(ForgetArgs),
    Gc(GcArgs),
    Key(KeyArgs),
    Check(CheckArgs),
    Logs(LogsArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    GenerateMan(GenerateManArgs),
    #[command(hide = true)]
    Watchdog,
    #[command(hide = true)]
    Init(InitArgs),
    #[command(hide = true)]
    Relay(RelayArgs),
    #[command(hide = true)]
    WarmHolder,
    #[command(hide = true)]
    SharingHolder,
}

impl Command {
    /// Whether it does something, and does not only tell something.
    pub(crate) fn acts(&self) -> bool {
        match self {
            Self::Run(_)
            | Self::Dump(_)
            | Self::Restore(_)
            | Self::Migrate(_)
            | Self::Receive(_) => true,
            Self::Verify(_) | Self::Extract(_) | Self::Export(_) | Self::Import(_) => true,
            Self::Rm(_) | Self::Forget(_) | Self::Gc(_) => true,
            Self::Warm(args) => args.image.is_some(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
