//! The options of `gpucr run` with which it watches over the program.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;

use crate::commands::dump::DumpArgs;
use crate::commands::restore::RestoreArgs;
use crate::failure::{CliError, USAGE};
use crate::values::every;

/// With any of these gpucr stays as the parent of the program, which then has a pid of its own.
#[derive(clap::Args)]
#[command(next_help_heading = "Saving and restarting (gpucr stays, and needs root)")]
pub(crate) struct SupervisionArgs {
    /// Watch over the program and put its images into the store DIR, which is created if it does not exist
    /// [default with any of the options below: GPUCR_STORE, or the store in the config file]
    #[arg(long, value_name = "DIR")]
    pub(crate) store: Option<PathBuf>,
    /// Save the program at this interval; the first time is one interval after the start
    ///
    /// A dump that fails is reported, and the next one is made when it is due.
    #[arg(long, value_name = "DURATION", value_parser = every)]
    pub(crate) every: Option<Duration>,
    /// Save the program when gpucr run gets a signal, as in usr1=sync,usr2=now
    ///
    /// SIGNAL is usr1 or usr2. HOW is `now`; or `sync`: right after the program's next call that waits for the device
    /// (see --at-sync in gpucr-dump(1)); or `end`: now, and the dump ends the program. In the last case gpucr run
    /// exits with status 75; run again with --resume, it continues from the image. The signal is not passed on to the
    /// program. A signal that is sent to the program itself goes to the program's handler; if there is none nothing
    /// happens, since gpucr run starts the program with the signal ignored. So a scheduler may signal all processes
    /// of a job.
    #[arg(long, value_name = "SIGNAL=HOW", value_delimiter = ',', value_parser = on_signal)]
    pub(crate) on_signal: Vec<OnSignal>,
    /// Of the images that this gpucr makes without a name, keep only the newest N; older ones are removed [default:
    /// all]
    ///
    /// Images that were already in the store are never removed.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
    /// Restore the last image when the program fails, at most N times without a new image in between
    ///
    /// The program has failed if it was ended by SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSYS or
    /// SIGTRAP, or exited with the status that shells give for one of these (128 plus its number); or if it exited
    /// with a status other than 0 after a driver call told one of its processes that a context is broken or a device
    /// is gone. Any other exit status is taken as intended: the program is not restored, and gpucr run exits with
    /// that status. Nothing is restored once gpucr run has been asked to end. Any remaining processes of the program
    /// are killed before the restore. The second restore without a new image is made after one second; the delay then
    /// doubles each time, up to a minute.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) restart: Option<u32>,
    /// Start from the newest image in the store instead of running CMD, if there is one
    ///
    /// If that image is damaged and cannot be restored, --restart tries the one before it. This is for a job that is
    /// started several times; give each job its own store.
    #[arg(long)]
    pub(crate) resume: bool,
    /// An option for the dumps, such as --dump-arg=--tcp-close; may be repeated (see gpucr-dump(1))
    #[arg(long = "dump-arg", value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) dump_args: Vec<OsString>,
    /// The same for the restores, such as --restore-arg=--files=rewind (see gpucr-restore(1))
    #[arg(long = "restore-arg", value_name = "ARG", allow_hyphen_values = true)]
    pub(crate) restore_args: Vec<OsString>,
}

impl SupervisionArgs {
    /// Whether gpucr is to watch over the program.
    pub(crate) fn is_wanted(&self) -> bool {
        let Self { store, every, on_signal, keep, restart, resume, dump_args, restore_args } = self;
        store.is_some()
            || every.is_some()
            || !on_signal.is_empty()
            || keep.is_some()
            || restart.is_some()
            || *resume
            || !dump_args.is_empty()
            || !restore_args.is_empty()
    }

    /// Looks whether the options for dumps and restores are understood: better before the program runs than after.
    ///
    /// # Errors
    /// They are not, or they have no place here.
    pub(super) fn check(&self) -> Result<(), CliError> {
        let line =
            ["dump", "--pid", "1", "--leave-running", "--json", "--store", "/", "--events", "/"];
        let DumpLine { args } = parse("--dump-arg", &line, &self.dump_args)?;
        let is_out_of_place = args.dry_run
            || args.name.is_some()
            || args.every.is_some()
            || args.at_sync.is_some()
            || args.inside.is_some();
        in_place("--dump-arg", !is_out_of_place)?;
        let line = ["restore", "--events", "/", "/"];
        let RestoreLine { args } = parse("--restore-arg", &line, &self.restore_args)?;
        let is_out_of_place =
            args.detach || args.new_pids || args.dry_run || args.json || args.hold.is_some();
        in_place("--restore-arg", !is_out_of_place)
    }
}

/// The command line of a dump.
#[derive(Parser)]
struct DumpLine {
    #[command(flatten)]
    args: DumpArgs,
}

/// The command line of a restore.
#[derive(Parser)]
struct RestoreLine {
    #[command(flatten)]
    args: RestoreArgs,
}

/// What a signal to `gpucr run` has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OnSignal {
    pub(super) signal: i32,
    pub(super) how: How,
}

/// When the program is stopped for a dump.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum How {
    /// Behind the next call by which it waits for the device.
    Sync,
    /// At once.
    Now,
    /// At once, and it does not go on.
    End,
}

/// # Errors
/// The text is not of the form SIGNAL=HOW.
fn on_signal(text: &str) -> Result<OnSignal, String> {
    let (signal, how) = text.split_once('=').ok_or("SIGNAL=HOW is expected, as in usr1=sync")?;
    let signal = match signal.to_ascii_lowercase().trim_start_matches("sig") {
        "usr1" => libc::SIGUSR1,
        "usr2" => libc::SIGUSR2,
        _ => return Err("the signal has to be usr1 or usr2".into()),
    };
    let how = match how {
        "now" => How::Now,
        "sync" => How::Sync,
        "end" => How::End,
        _ => return Err("`now`, `sync` or `end` is expected after the `=`".into()),
    };
    Ok(OnSignal { signal, how })
}

/// Reads a command line with these options besides.
///
/// # Errors
/// It is not understood.
fn parse<T: Parser>(option: &str, line: &[&str], besides: &[OsString]) -> Result<T, CliError> {
    let line = line.iter().map(OsString::from).chain(besides.iter().cloned());
    T::try_parse_from(line).map_err(|error| {
        let words = error.to_string();
        let first = words.lines().next().unwrap_or_default();
        wrong(option, first.strip_prefix("error: ").unwrap_or(first))
    })
}

fn in_place(option: &str, is_in_place: bool) -> Result<(), CliError> {
    if is_in_place { Ok(()) } else { Err(wrong(option, "one of them cannot be used here")) }
}

fn wrong(option: &str, what: &str) -> CliError {
    let help = "each takes one word; give a value after a `=`, as in --dump-arg=--timeout=1m";
    CliError::new(USAGE, format!("the options of {option}: {what}")).help(help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: SupervisionArgs,
    }

    fn parsed(options: &[&str]) -> SupervisionArgs {
        Line::try_parse_from(["run"].iter().chain(options)).expect("it is understood").args
    }

    #[test]
    fn options_for_dumps_and_restores_are_looked_at_before() {
        assert!(parsed(&["--dump-arg=--tcp-close", "--dump-arg=--timeout=1m"]).check().is_ok());
        assert!(parsed(&["--restore-arg=--files=rewind"]).check().is_ok());
        let bad = |option: &str| parsed(&[option]).check().expect_err(option).message().to_owned();
        assert!(bad("--dump-arg=--tcp").contains("--dump-arg"), "not understood");
        assert!(bad("--dump-arg=--store=/a").contains("--store"), "given twice");
        assert!(bad("--dump-arg=--dry-run").contains("cannot be used here"));
        assert!(bad("--restore-arg=--detach").contains("cannot be used here"));
        assert!(bad("--restore-arg=/b").contains("--restore-arg"), "a second image");
    }

    #[test]
    fn signals_have_names() {
        let usr1 = OnSignal { signal: libc::SIGUSR1, how: How::Sync };
        let usr2 = OnSignal { signal: libc::SIGUSR2, how: How::Now };
        assert_eq!(parsed(&["--on-signal=usr1=sync,SIGUSR2=now"]).on_signal, [usr1, usr2]);
        for wrong in ["usr1", "usr1=", "term=now", "usr1=later", "=now"] {
            assert!(on_signal(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn without_any_of_its_options_gpucr_becomes_the_program() {
        assert!(!parsed(&[]).is_wanted());
        for option in [
            "--store=/a",
            "--every=1m",
            "--restart=1",
            "--resume",
            "--keep=1",
            "--on-signal=usr1=now",
        ] {
            assert!(parsed(&[option]).is_wanted(), "{option}");
        }
    }
}
