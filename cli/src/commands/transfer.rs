//! `gpucr export` and `gpucr import`.

use std::fs::File;
use std::io::{IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use gpucr_core::image::{Destination, ImageError};
use gpucr_core::stop::Stop;
use gpucr_core::transfer;
use gpucr_core::{Error, Progress};

use crate::args::{ExportArgs, ImportArgs};
use crate::commands::{io_error, print_json, say};
use crate::failure::{CliError, FAILED, USAGE};
use crate::{Outcome, display, signals};

pub(crate) fn export(args: &ExportArgs) -> Outcome {
    let stop = stop()?;
    let progress = display::progress(args.json);
    if is_dash(&args.file) {
        let report = export_to_stdout(&args.image, &stop, progress.as_ref())?;
        drop(progress);
        if args.json {
            let text = serde_json::to_string_pretty(&report);
            eprintln!("{}", text.map_err(|e| CliError::new(FAILED, e.to_string()))?);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let report = transfer::export_to_file(&args.image, &args.file, &stop, progress.as_ref())
        .map_err(|error| match error {
            Error::Exists { .. } => CliError::from(error).state("Nothing was written."),
            _ => CliError::from(error)
                .state(format!("There is no {}; the image is as it was.", args.file.display())),
        })?;
    drop(progress);
    if args.json {
        print_json(&report)?;
    } else {
        say!(
            "{}: {}, {} in {} chunks; identity {}",
            args.file.display(),
            display::bytes(report.tar_bytes),
            display::bytes(report.bytes),
            report.chunks,
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
        return Err(CliError::new(USAGE, "a tar makes no sense on a terminal").help(
            "give a file name, or a pipe: gpucr export IMAGE - | ssh host gpucr import - …",
        ));
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
    let stop = stop()?;
    let mut tar: Box<dyn Read> = if is_dash(&args.file) {
        if std::io::stdin().is_terminal() {
            return Err(CliError::new(USAGE, "a tar is expected on stdin, which is a terminal")
                .help(
                    "give a file name, or a pipe: ssh host gpucr export IMAGE - | gpucr import - …",
                ));
        }
        Box::new(std::io::stdin().lock())
    } else {
        let name = args.file.display();
        Box::new(File::open(&args.file).map_err(io_error(&format!("cannot open {name}")))?)
    };
    let progress = display::progress(args.json);
    let report =
        transfer::import(&mut tar, &to, &stop, progress.as_ref()).map_err(|error| match error {
            Error::Image(ImageError::Output { .. }) => {
                CliError::from(error).state("Nothing was changed.")
            }
            _ => CliError::from(error).state("There is no image; nothing was left behind."),
        })?;
    drop(progress);
    if args.json {
        print_json(&report)?;
    } else {
        say!(
            "{}: {} in {} chunks, stored in {}; identity {}",
            report.image.display(),
            display::bytes(report.bytes),
            report.chunks,
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

/// Signals end it in order, with nothing left behind.
fn stop() -> Result<Stop, CliError> {
    Ok(Stop::new(signals::handle().map_err(io_error("cannot handle signals"))?.stop))
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
