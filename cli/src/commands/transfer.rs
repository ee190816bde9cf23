//! `gpucr export` and `gpucr import`.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::image::{self, Destination, ImageError};
use gpucr_core::stop::Stop;
use gpucr_core::transfer::{self, TarError};
use gpucr_core::{Progress, careful};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::commands::key::TrustArgs;
use crate::commands::{Outcome, io_error, key, print_json, say_folded};
use crate::escape::shell_word;
use crate::failure::{CliError, FAILED, USAGE};
use crate::say::note_json;
use crate::{display, signals};

/// Write an image to a single file, for transport
///
/// The file is an uncompressed tar that holds the whole image and nothing else, whatever other images or stores it
/// shares chunks with. Chunks are copied as they are stored, and verified while copying. `gpucr import` turns it into
/// the same image again, with the same identity; so does `tar xf` in an empty directory.
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr export /images/train train.tar\n  \
gpucr export /images/train - | ssh host gpucr import - -o /images/train")]
pub(crate) struct ExportArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// The file, which must not exist yet; `-` for stdout
    #[arg(value_name = "FILE.tar")]
    pub(crate) file: PathBuf,
    /// Print the result as one JSON object (on stderr, if the tar goes to stdout)
    #[arg(long)]
    pub(crate) json: bool,
}

/// Make an image from a file that `gpucr export` wrote
///
/// Every chunk is decompressed and checked before the image appears in its place; if anything fails before that,
/// nothing is left behind. It is safe to import a file from anywhere: members that do not belong to an image, links,
/// and names that lead elsewhere are refused. (But a restore runs the program in the image: restore only images from
/// people you trust.)
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr import train.tar -o /images/train\n  \
ssh host gpucr export /images/train - | gpucr import - -o /images/train")]
pub(crate) struct ImportArgs {
    /// The file; `-` for stdin
    #[arg(value_name = "FILE.tar")]
    pub(crate) file: PathBuf,
    /// Directory for the image: new, or empty
    #[arg(short = 'o', long = "output", value_name = "IMAGE", required_unless_present = "store")]
    pub(crate) image: Option<PathBuf>,
    /// Put the image into the store DIR instead, which keeps chunks that its images have in common only once
    #[arg(long, value_name = "DIR", conflicts_with = "image")]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: that of the file, without .tar]
    #[arg(long, requires = "store")]
    pub(crate) name: Option<String>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
}

const NO_IMAGE: &str = "There is no image; nothing was left behind.";

pub(crate) fn export(args: &ExportArgs) -> Outcome {
    let unfinished = args.file.clone();
    let stop = stop(move || {
        if is_dash(&unfinished) {
            return "What was written to stdout is only a part: discard it. The image is as it was.".into();
        }
        transfer::remove_unfinished(&unfinished);
        format!("There is no {}; the image is as it was.", unfinished.display())
    })?;
    let progress = display::progress(args.json);
    if is_dash(&args.file) {
        let report = export_to_stdout(&args.image, &stop, progress.as_ref())?;
        drop(progress);
        if args.json {
            note_json(&report)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = transfer::export_to_file(&args.image, &args.file, &stop, progress.as_ref())
        .map_err(|error| match error {
            TarError::Exists { .. } => CliError::from(error).state("Nothing was written."),
            _ => CliError::from(error)
                .state(format!("There is no {}; the image is as it was.", args.file.display())),
        })?;
    drop(progress);
    if args.json {
        print_json(&report)?;
    } else {
        say_folded!(
            2,
            "{}: {}, {} in {}; identity {}",
            args.file.display(),
            display::bytes(report.tar_bytes),
            display::bytes(report.bytes),
            display::counted(report.chunks, "chunk", "chunks"),
            report.id
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn export_to_stdout(
    image: &Path,
    stop: &Stop,
    progress: &dyn Progress,
) -> Result<transfer::Exported, CliError> {
    if std::io::stdout().is_terminal() {
        let image = shell_word(image);
        return Err(CliError::new(USAGE, "a tar makes no sense on a terminal").help(format!(
            "give a file name, or a pipe: gpucr export {image} - | ssh HOST gpucr import - -o IMAGE"
        )));
    }
    // Not through `Stdout`, whose buffer of lines would search the data for them.
    let mut out = std::io::stdout().as_fd().try_clone_to_owned().map(File::from);
    let out = out.as_mut().map_err(|error| CliError::new(FAILED, format!("stdout: {error}")))?;
    let mut counted = Counted { out, bytes: 0 };
    let exported = transfer::export(image, &mut counted, stop, progress);
    exported.map_err(|error| {
        let state = match counted.bytes {
            0 => "Nothing was written.",
            _ => "What was written to stdout is only a part: discard it. The image is as it was.",
        };
        CliError::from(error).state(state)
    })
}

pub(crate) fn import(args: &ImportArgs) -> Outcome {
    let to = destination(args)?;
    let trust = key::trust_with_policy(&args.trust)?;
    let target = to.path();
    let stop = stop(move || {
        let target = std::path::absolute(&target).unwrap_or(target);
        image::remove_unfinished(&target, std::process::id());
        NO_IMAGE.into()
    })?;
    let mut tar: Box<dyn Read> = if is_dash(&args.file) {
        if std::io::stdin().is_terminal() {
            let to = words(args);
            return Err(CliError::new(USAGE, "a tar is expected on stdin, which is a terminal")
                .help(format!(
                    "give a file name, or a pipe: ssh HOST gpucr export IMAGE - | gpucr import - {to}"
                )));
        }
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(io_error("stdin"))?;
        Box::new(Interruptible { file: stdin.into(), stop: stop.clone() })
    } else {
        Box::new(open(args)?)
    };
    let progress = display::progress(args.json);
    let report =
        transfer::import(&mut tar, &to, &trust, &stop, progress.as_ref()).map_err(|error| {
            match error {
                TarError::Io(_) if stop.is_set() => {
                    CliError::from(TarError::Interrupted).state(NO_IMAGE)
                }
                TarError::Image(ImageError::Output { .. }) => {
                    CliError::from(error).state("Nothing was changed.")
                }
                _ => CliError::from(error).state(NO_IMAGE),
            }
        })?;
    drop(progress);
    if args.json {
        print_json(&report)?;
    } else {
        say_folded!(
            2,
            "{}: {} in {}, stored in {}; identity {}",
            report.image.display(),
            display::bytes(report.bytes),
            display::counted(report.chunks, "chunk", "chunks"),
            display::bytes(report.stored_bytes),
            report.id
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn destination(args: &ImportArgs) -> Result<Destination, CliError> {
    if let Some(image) = &args.image {
        return Ok(Destination::Alone(image.clone()));
    }
    let name = match &args.name {
        Some(name) => Some(name.clone()),
        None if is_dash(&args.file) => None,
        None => args.file.file_stem().map(|name| name.to_string_lossy().into_owned()),
    };
    match (&args.store, name) {
        (Some(store), Some(name)) => Ok(Destination::Stored { store: store.clone(), name }),
        _ => Err(CliError::new(USAGE, "the image has no name").help("give it one with --name")),
    }
}

/// The options that say where an image goes, for a shell.
fn words(args: &ImportArgs) -> String {
    let place = |option: &str, path: &Option<PathBuf>| {
        path.as_ref().map(|path| format!("{option} {}", shell_word(path)))
    };
    let name = args.name.as_ref().map(PathBuf::from);
    let words = [place("-o", &args.image), place("--store", &args.store), place("--name", &name)];
    words.into_iter().flatten().collect::<Vec<_>>().join(" ")
}

/// Signals end it in order, with nothing left behind; `at_last` sees to that if it hangs.
fn stop(at_last: impl FnOnce() -> String + Send + 'static) -> Result<Stop, CliError> {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    signals.settle_at_last(at_last);
    Ok(Stop::new(signals.stop))
}

/// Opens a tar. It is to be a file: the user may have named a device or a FIFO, which never ends.
fn open(args: &ImportArgs) -> Result<File, CliError> {
    let path = &args.file;
    careful::open_regular(path).map_err(|error| {
        let no_file = error.kind() == std::io::ErrorKind::InvalidInput;
        let error = io_error(&format!("cannot open {}", path.display()))(error);
        let error = error.state("Nothing was changed.");
        match no_file {
            _ if path.is_dir() => error.help("give a tar, as `gpucr export` writes it"),
            true => error.help(format!("gpucr import - {} < {}", words(args), shell_word(path))),
            false => error,
        }
    })
}

/// Standard input, which may be a pipe into which nobody writes for long.
struct Interruptible {
    file: File,
    stop: Stop,
}

impl Read for Interruptible {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let look = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        loop {
            if self.stop.is_set() {
                return Err(std::io::Error::other("interrupted"));
            }
            let mut poll = [PollFd::new(&self.file, PollFlags::IN)];
            if rustix::event::poll(&mut poll, Some(&look)).is_ok_and(|ready| ready > 0) {
                return self.file.read(into);
            }
        }
    }
}

fn is_dash(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Tells whether anything was written.
struct Counted<'a> {
    out: &'a mut File,
    bytes: u64,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let len = self.out.write(bytes)?;
        self.bytes += len as u64;
        Ok(len)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
