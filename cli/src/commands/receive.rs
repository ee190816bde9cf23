//! `gpucr receive`.

mod relay;
mod restorer;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use gpucr_core::migrate::{
    self, Incoming, Link, MigrationId, Place, ReceiveFailure, Received, Record, Remains, Side,
    State,
};
use gpucr_core::restore::{MappedDevice, OutputFiles};
use gpucr_core::{Error, image, library};

use crate::commands::key::TrustArgs;
use crate::commands::migrate::{accept, given, plain_directory};
use crate::commands::restore::{network_at, outputs};
use crate::commands::{Outcome, io_error, key, note, print_json, say};
use crate::display;
use crate::failure::{CliError, FAILED};
use crate::output;
use crate::say::note_json;
use crate::signals::{self, SignalPlan};
use crate::values::interval;
pub(crate) use relay::{RelayArgs, run as relay};
use restorer::Restorer;

/// Receive a running program from another host
///
/// This is the other side of `gpucr migrate`, which starts it automatically when it connects with ssh. It takes one
/// program: the image is received and checked, and is complete on disk here, before the source hands the program
/// over. Then the program is restored and runs in the background, and its image is removed.
#[derive(clap::Args)]
#[command(override_usage = "gpucr receive [OPTIONS] <--from WHERE|--fd FD|--stdio>
       gpucr receive [OPTIONS] <--list|--resume ID|--abort ID>")]
#[command(after_long_help = "\
If anything fails before the program is handed over, nothing is left here. If the connection is lost at the very \
moment of the handover, the image stays, and only the source knows whether the program was handed over: see \
`gpucr migrate --list` there. If it was, --resume ID --handed-over restores it; if not, --abort ID removes the \
image. If a program was handed over but could not be restored, remove the cause and restore it with --resume ID.\n\n\
Images go into a store, so that data that was sent once need not be sent again; `gpucr gc` frees what no image \
needs.\n\n\
Examples:\n  gpucr receive --from unix:/run/next.sock --new-pids\n  gpucr receive --list\n  \
gpucr receive --resume 0123456789abcdef0123456789abcdef")]
#[group(id = "work", required = true, multiple = false,
        args = ["from", "fd", "stdio", "list", "resume", "abort"])]
pub(crate) struct ReceiveArgs {
    /// Wait for the source at a Unix socket, which is created: unix:PATH
    #[arg(long, value_name = "WHERE", value_parser = socket)]
    pub(crate) from: Option<PathBuf>,
    /// Reach the source through this file descriptor, an open socket that gpucr was started with
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) fd: Option<i32>,
    /// Reach the source through standard input and output
    #[arg(long)]
    pub(crate) stdio: bool,
    /// List this host's records of migrations that are not complete
    #[arg(long)]
    pub(crate) list: bool,
    /// Restore a program that was handed over but does not run yet
    #[arg(long, value_name = "ID")]
    pub(crate) resume: Option<MigrationId>,
    /// Remove the image of a program that was not handed over
    #[arg(long, value_name = "ID")]
    pub(crate) abort: Option<MigrationId>,
    /// With --resume: confirm that, according to the source, the program was handed over
    #[arg(long, requires = "resume")]
    pub(crate) handed_over: bool,
    /// With --resume: confirm that the program does not run here, after gpucr was killed while restoring it
    #[arg(long, requires = "resume")]
    pub(crate) not_running: bool,
    /// With --abort: confirm that the program runs here, after gpucr was killed while restoring it
    #[arg(long, requires = "abort")]
    pub(crate) running: bool,
    /// Directory for the image: new, or empty
    #[arg(short = 'o', long = "output", value_name = "IMAGE")]
    pub(crate) image: Option<PathBuf>,
    /// Put the image into the store DIR [default: /var/lib/gpucr/received]
    #[arg(long, value_name = "DIR", conflicts_with = "image")]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: migration-ID]
    #[arg(long, requires = "store")]
    pub(crate) name: Option<String>,
    /// Keep the image once the program runs
    #[arg(long)]
    pub(crate) keep_image: bool,
    /// Restore into a new pid namespace, where all pids are free
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// Restore in this network namespace: /run/netns/NAME, or /proc/PID/ns/net (see gpucr-restore(1))
    ///
    /// The migration itself uses the network in which gpucr runs. The namespace is not recorded: name it again with
    /// --resume.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["list", "abort"])]
    pub(crate) netns: Option<PathBuf>,
    /// Let the program continue on another device of the same kind (see gpucr-restore(1))
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',', value_parser = device_pair)]
    pub(crate) device_map: Vec<String>,
    /// Append the program's standard output to FILE, if it is a pipe at the source
    ///
    /// Without this option such output goes to /dev/null here, unless the source relays it. If the program is
    /// restored later, with --resume, its output goes to the file named with --resume, else to the one named first.
    /// Output that goes to a file at the source goes to the same file here.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["list", "abort"])]
    pub(crate) stdout: Option<PathBuf>,
    /// The same for its standard error; if one pipe serves both streams, either option covers both
    #[arg(long, value_name = "FILE", conflicts_with_all = ["list", "abort"])]
    pub(crate) stderr: Option<PathBuf>,
    /// Run CMD in a shell once the processes exist, before any of them runs (see gpucr-restore(1))
    ///
    /// If it fails before the source has handed the program over, the program continues there. CMD is not recorded:
    /// name it again with --resume.
    #[arg(long, value_name = "CMD", conflicts_with_all = ["list", "abort"])]
    pub(crate) exec_before_resume: Option<OsString>,
    /// Allow files that the program has open and that do not exist here to be created below DIR
    ///
    /// May be repeated; without it no file is created. The source has to send the files (`gpucr migrate --files
    /// copy`), and their directories must exist. Existing files are never touched.
    #[arg(long, value_name = "DIR", value_parser = plain_directory)]
    pub(crate) files_below: Vec<PathBuf>,
    /// Accept streams of `gpucr migrate --streams` at ADDRESS: an IP address and a port, with port 0 for any free one
    ///
    /// Without this option none are accepted. A connection is closed unless it presents the secret that the two sides
    /// agreed on over the link.
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) streams_at: Option<SocketAddr>,
    /// How long the source may be silent before it is considered lost
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = interval)]
    pub(crate) silence: Duration,
    /// Print the result as one JSON object (on stderr with --stdio)
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
}

fn socket(text: &str) -> Result<PathBuf, String> {
    let path = text.strip_prefix("unix:").filter(|path| !path.is_empty());
    path.map(PathBuf::from).ok_or_else(|| "it is not unix:PATH".into())
}

fn device_pair(text: &str) -> Result<String, String> {
    text.parse::<MappedDevice>().map(|_| text.to_owned())
}

pub(crate) fn run(args: &ReceiveArgs) -> Outcome {
    if args.list {
        return crate::commands::migrate::list(args.json);
    }
    if let Some(id) = args.abort {
        return abort(id, args.running);
    }
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    if let Some(id) = args.resume {
        return resume(args, id, &signals);
    }
    signals.settle_at_last(|| {
        "gpucr could not wait for what it was at. `gpucr receive --list` tells whether anything is left.".into()
    });
    let network = args.netns.as_deref().map(network_at).transpose()?;
    let outputs = output_files(args)?;
    // A pipe has somebody who writes to it from here on.
    let _open = outputs::open(&outputs, output::appendable)?;
    let incoming = Incoming {
        place: place(args),
        new_pids: args.new_pids,
        network: network.clone(),
        device_map: args.device_map.clone(),
        files_below: args.files_below.clone(),
        outputs: outputs.clone(),
        streams_at: args.streams_at,
        trust: key::trust_with_policy(&args.trust)?,
        stop: signals.stop.clone(),
    };
    let link = connect(args, &signals)?;
    let progress = display::progress(args.json || args.stdio);
    let hook = args.exec_before_resume.clone();
    let mut restore = Restorer::new(&signals, outputs, network, hook);
    let received = migrate::receive(link, &incoming, progress.as_ref(), &mut restore);
    drop(progress);
    let received = received?;
    let relay = restore.let_relay();
    if let Some(image) = received.image.as_deref().filter(|_| !args.keep_image) {
        remove(image);
    }
    // With ssh that terminal is the source's, which says it by itself.
    if !args.stdio {
        outputs::say_unread(&received.unread, "receive");
    }
    tell(args, &received)?;
    relay.into_iter().for_each(|relay| relay.wait(&signals));
    Ok(ExitCode::SUCCESS)
}

/// The files for the program's outputs.
fn output_files(args: &ReceiveArgs) -> Result<OutputFiles, CliError> {
    // They may be noted for a gpucr that is started elsewhere.
    let absolute = |path: &Option<PathBuf>| path.as_ref().map(std::path::absolute).transpose();
    let failed = || io_error("the file of --stdout or --stderr cannot be written");
    let (stdout, stderr) = (absolute(&args.stdout), absolute(&args.stderr));
    Ok(OutputFiles { stdout: stdout.map_err(failed())?, stderr: stderr.map_err(failed())? })
}

/// Where the image goes.
fn place(args: &ReceiveArgs) -> Place {
    match (&args.image, &args.store) {
        (Some(image), _) => Place::Directory(image.clone()),
        (None, Some(store)) => Place::Store(store.clone(), args.name.clone()),
        (None, None) => {
            let root = library::library_root();
            // Where it cannot be made, what is made in it tells so.
            let _ = std::fs::create_dir_all(&root);
            Place::Store(root.join("received"), None)
        }
    }
}

fn connect(args: &ReceiveArgs, signals: &SignalPlan) -> Result<Link, CliError> {
    if args.stdio {
        let failed = || io_error("standard input and output cannot be used");
        let reader = own_stream(0).map_err(failed())?;
        let writer = own_stream(1).map_err(failed())?;
        return Link::new(reader, writer, args.silence, signals.stop.clone()).map_err(failed());
    }
    let socket = match (&args.from, args.fd) {
        (Some(path), _) => accept(path, signals)?,
        (None, fd) => given(fd)?,
    };
    crate::commands::migrate::link(socket, args.silence, signals)
}

/// A standard stream for this alone: whatever else is written to it goes nowhere.
fn own_stream(number: i32) -> std::io::Result<std::os::fd::OwnedFd> {
    let null = std::fs::File::options().read(true).write(true).open("/dev/null")?;
    if number == 0 {
        let own = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
        rustix::stdio::dup2_stdin(&null)?;
        return Ok(own);
    }
    let own = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdout(), 3)?;
    rustix::stdio::dup2_stdout(&null)?;
    Ok(own)
}

/// The image of a program that runs is not needed any more.
fn remove(image: &Path) {
    if let Err(error) = image::remove(image, true) {
        note!(
            "gpucr: the program runs, but its image {} was not removed: {error}",
            image.display()
        );
    }
}

fn tell(args: &ReceiveArgs, received: &Received) -> Result<(), CliError> {
    match received.pid {
        _ if args.json && args.stdio => note_json(received)?,
        _ if args.json => print_json(received)?,
        _ if args.stdio => {}
        Some(pid) => say!("{pid}"),
        None => say!("the program can be received"),
    }
    Ok(())
}

impl From<ReceiveFailure> for CliError {
    fn from(failure: ReceiveFailure) -> Self {
        let ReceiveFailure { phase, error, remains } = failure;
        let error = Self::from(*error);
        match remains {
            Remains::Nothing => error.state(format!(
                "The migration failed in phase {phase}, before the program was handed over: the program belongs \
                to the source, and nothing is left here."
            )),
            Remains::InDoubt(id, image) => error
                .state(format!(
                    "The image is complete: {}. It is not known whether the source has handed the program over.",
                    image.display()
                ))
                .help(format!(
                    "run `gpucr migrate --list` there. If {id} was handed over: gpucr receive --resume {id} \
                     --handed-over; if not: gpucr receive --abort {id}"
                )),
            Remains::Parked(id, image) => error
                .state(format!(
                    "The program was handed over and does not run; its image is complete: {}.",
                    image.display()
                ))
                .help(format!("once the cause is removed: gpucr receive --resume {id}")),
        }
    }
}

/// What this host has noted of a migration to it.
fn record_of(id: MigrationId) -> Result<Record, CliError> {
    let record = Record::read(id, Side::Destination).map_err(Error::from)?;
    let none =
        || CliError::new(FAILED, format!("this host has no record of a migration {id} to it"));
    let record = record.ok_or_else(none)?;
    match record.at_work() {
        None => Ok(record),
        Some(pid) => Err(CliError::new(FAILED, format!("process {pid} is still working on it"))
            .state("Nothing was changed.")
            .help(format!("wait until it ends, or end it: kill {pid}"))),
    }
}

fn resume(args: &ReceiveArgs, id: MigrationId, signals: &SignalPlan) -> Outcome {
    let network = args.netns.as_deref().map(network_at).transpose()?;
    let outputs = output_files(args)?;
    let _open = outputs::open(&outputs, output::appendable)?;
    let mut record = record_of(id)?;
    let refused = |message: &str, help: String| {
        Err(CliError::new(FAILED, message.to_owned()).state("Nothing was changed.").help(help))
    };
    match record.state {
        State::Taken => {}
        State::Prepared if args.handed_over => {}
        State::Restoring if args.not_running => {}
        State::Prepared => {
            let help = format!(
                "ask there: gpucr migrate --list. If it was: gpucr receive --resume {id} --handed-over"
            );
            return refused("it is not known whether the source has handed the program over", help);
        }
        State::Restoring => {
            let help = format!(
                "see whether it does: gpucr ps. If not: gpucr receive --resume {id} --not-running; if it does: gpucr \
                 receive --abort {id} --running"
            );
            return refused("the program may run: gpucr was killed while it restored it", help);
        }
        _ => {
            return refused(
                "the program was not handed over",
                format!("gpucr receive --abort {id}"),
            );
        }
    }
    let outputs = OutputFiles {
        stdout: outputs.stdout.or(record.outputs.stdout.take()),
        stderr: outputs.stderr.or(record.outputs.stderr.take()),
    };
    if !outputs.is_empty() {
        let named = record.name_outputs(&outputs);
        named.map_err(|error| CliError::from(error).state("Nothing was changed."))?;
    }
    let hook = args.exec_before_resume.clone();
    let mut restore = Restorer::new(signals, outputs, network, hook);
    let brought = record.restore(&mut restore);
    let brought = brought.map_err(|error| {
        CliError::from(error).state("The program does not run; its image is as it was.")
    })?;
    let pid = brought.pid;
    outputs::say_unread(&brought.unread, "receive");
    // It has no link: what the program writes is kept.
    let relay = restore.let_relay();
    if let Some(image) = record.image.as_deref().filter(|_| !args.keep_image) {
        remove(image);
    }
    if args.json {
        print_json(&serde_json::json!({"migration": id.to_string(), "pid": pid}))?;
    } else {
        say!("{pid}");
    }
    relay.into_iter().for_each(|relay| relay.wait(signals));
    Ok(ExitCode::SUCCESS)
}

/// Removes what there is of a program that was not handed over, or that `runs` here.
fn abort(id: MigrationId, runs: bool) -> Outcome {
    let record = record_of(id)?;
    if runs && record.state != State::Restoring {
        return Err(CliError::new(FAILED, "the program does not run here: nothing was restored")
            .state("Nothing was changed.")
            .help(format!("gpucr receive --list tells how migration {id} stands")));
    }
    if matches!(record.state, State::Taken | State::Restoring) && !runs {
        return Err(CliError::new(
            FAILED,
            "the program was handed over: this image is the only copy of it",
        )
        .state("Nothing was changed.")
        .help(format!("gpucr receive --resume {id}")));
    }
    if let Some(image) = record.image.as_deref().filter(|image| image.exists()) {
        image::remove(image, true)?;
    }
    // Those of a program that runs are its own.
    if !runs {
        record.remove_files().map_err(Error::from)?;
    }
    record.remove().map_err(Error::from)?;
    Ok(ExitCode::SUCCESS)
}
