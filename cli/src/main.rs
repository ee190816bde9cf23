//! `gpucr`: checkpoint and restore of running CUDA programs.

mod args;
mod bars;
mod commands;
mod display;
mod escape;
mod events;
mod failure;
mod fold;
mod inherited;
mod metrics;
mod output;
mod paint;
mod say;
mod signals;
mod stores;
mod table;
mod template;
mod terminal;
mod traces;
mod usage;
mod values;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use args::{Args, Command};
use clap::CommandFactory;
use failure::CliError;

/// What to do where an image cannot be opened that is named without a path.
const NO_STORE: &str =
    "check the path. `latest` and other names of images need a default store: set GPUCR_STORE=DIR";

fn main() -> ExitCode {
    let mut args = match usage::parse() {
        Ok(args) => args,
        Err(words) => return say_usage(&words),
    };
    start_log();
    if args.quiet && args.command.acts() {
        say::quieten();
    }
    // What becomes a program must keep its limits; the others may have to open many packs.
    if !matches!(args.command, Command::Run(_)) {
        gpucr_core::limits::raise_open_files();
    }
    let lacks_store = match name_images(&mut args.command) {
        Ok(lacks_store) => lacks_store,
        Err(error) => return say::settle(Err(error)),
    };
    if let Command::Restore(args) = &args.command {
        failure::set_image(&args.image);
    }
    let outcome = match args.command {
        Command::Run(args) => commands::run::run(&args),
        Command::Dump(args) => commands::dump::run(&args),
        Command::Restore(args) => commands::restore::run(&args),
        Command::Migrate(args) => commands::migrate::run(&args),
        Command::Receive(args) => commands::receive::run(&args),
        Command::Warm(args) => commands::warm::run(&args),
        Command::Ps(args) => commands::ps::run(&args),
        Command::Trace(args) => commands::trace::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Extract(args) => commands::extract::run(&args),
        Command::Ls(args) => commands::ls::run(&args),
        Command::Rm(args) => commands::rm::run(&args),
        Command::Forget(args) => commands::forget::run(&args),
        Command::Gc(args) => commands::gc::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Diff(args) => commands::diff::run(&args),
        Command::Export(args) => commands::transfer::export(&args),
        Command::Import(args) => commands::transfer::import(&args),
        Command::Key(args) => commands::key::run(&args),
        Command::Logs(args) => commands::logs::run(&args),
        Command::Check(args) => commands::check::run(&args),
        Command::Completions(args) => commands::generate::completions(&args, Args::command()),
        Command::GenerateMan(args) => commands::generate::man(&args, Args::command()),
        Command::Watchdog => commands::watchdog::run(),
        Command::Relay(args) => commands::receive::relay(&args),
        Command::Init(args) => commands::restore::namespace::init(&args),
        Command::WarmHolder => commands::warm::hold(),
        Command::SharingHolder => commands::restore::hold(),
    };
    say::settle(outcome.map_err(|error| {
        let needs_help = lacks_store && error.remedy().is_none();
        if needs_help { error.help(NO_STORE) } else { error }
    }))
}

/// Replaces the names of images in a store by their paths. Whether one of them is nowhere, and there is no store.
fn name_images(command: &mut Command) -> Result<bool, CliError> {
    let images: Vec<&mut PathBuf> = match command {
        Command::Restore(args) => match &args.resolved {
            // The command outside has done so.
            Some(path) => {
                args.image.clone_from(path);
                Vec::new()
            }
            None => vec![&mut args.image],
        },
        Command::Warm(args) => args.image.iter_mut().collect(),
        Command::Inspect(args) => vec![&mut args.image],
        Command::Verify(args) => vec![&mut args.image],
        Command::Diff(args) => vec![&mut args.before, &mut args.after],
        Command::Export(args) => vec![&mut args.image],
        Command::Extract(args) => vec![&mut args.image],
        Command::Dump(args) => args.parent.iter_mut().collect(),
        Command::Rm(args) => args.images.iter_mut().collect(),
        _ => Vec::new(),
    };
    images.into_iter().try_fold(false, |lacks_store, image| {
        *image = stores::image(image)?;
        Ok(lacks_store || stores::lacks_store(image))
    })
}

/// The help that was asked for, or what is wrong with the command line.
fn say_usage(words: &clap::Error) -> ExitCode {
    if words.use_stderr() {
        let text = usage::text(words, paint::has_colours(&io::stderr()));
        // That nobody can be told this is nothing that could be told.
        let _ = io::stderr().write_all(text.as_bytes());
    } else {
        say::text(usage::text(words, paint::has_colours(&io::stdout())).trim_end());
    }
    say::settle(Ok(ExitCode::from(words.exit_code() as u8)))
}

/// `GPUCR_LOG=debug` (or any filter of tracing's) writes what the library does to stderr.
fn start_log() {
    use tracing_subscriber::EnvFilter;
    let filter = EnvFilter::try_from_env("GPUCR_LOG").unwrap_or_else(|_| EnvFilter::new("error"));
    // Colours would be special characters among those that others may have sent.
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    log.with_writer(|| say::Log).init();
}
