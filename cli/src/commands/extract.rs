//! `gpucr extract`.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::extract::{Extract, Memory, Stretch};
use gpucr_core::image::ImageReader;

use crate::commands::{Outcome, io_error, print_json, say};
use crate::failure::CliError;
use crate::output::Output;
use crate::{display, signals, values};

/// Write memory from an image to a file
///
/// Extracts device memory or host memory of any process, by its address in the program. Nothing is run, and neither a
/// device nor root is needed.
#[derive(clap::Args)]
#[command(override_usage = "gpucr extract [OPTIONS] --pid PID --address ADDRESS -o FILE <IMAGE>")]
#[command(after_long_help = "\
Without --length the file gets everything from the address to the end of that block of device memory, or of that \
mapping. A range with --length may span several that follow each other without a gap. FILE is written under \
another name first and then renamed, replacing what was there. Zeros that are not stored in the image become \
holes in FILE, which take no space.\n\n\
`gpucr inspect --all` lists the blocks of device memory and their addresses. What the driver saved (pools, \
arrays, all memory of programs that were not started with `gpucr run`) cannot be extracted by address. Of memory \
mapped from files, the image has the pages that the program changed.\n\n\
Example:\n  gpucr extract image/ --pid 4242 --address 0x302000000 --length 4MiB -o weights.bin")]
pub(crate) struct ExtractArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// The process, by the pid that it had in the program
    #[arg(long, value_parser = values::pids())]
    pub(crate) pid: u32,
    /// The first address, such as 0x7f0000000000
    #[arg(long, value_parser = values::address)]
    pub(crate) address: u64,
    /// How many bytes, such as 4096, 0x1000 or 4KiB [default: to the end of the block or mapping]
    #[arg(long, value_parser = values::length)]
    pub(crate) length: Option<u64>,
    /// Where to write the bytes; may be a pipe or /dev/stdout
    #[arg(short = 'o', long = "output", value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Print the result as one JSON object (on stderr, if the bytes go to /dev/stdout)
    #[arg(long)]
    pub(crate) json: bool,
}

/// What is printed with `--json`.
#[derive(serde::Serialize)]
struct Report<'a> {
    pid: u32,
    bytes: u64,
    stretches: &'a [Stretch],
}

/// What can go wrong while the file is written.
enum Failed {
    Core(Error),
    File(io::Error),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

pub(crate) fn run(args: &ExtractArgs) -> Outcome {
    let nothing = |error: Error| CliError::from(error).state("Nothing was written.");
    let image = ImageReader::open(&args.image).map_err(|error| nothing(error.into()))?;
    let found = Extract::find(&image, args.pid, args.address, args.length).map_err(nothing)?;
    let what = format!("cannot write {}", args.output.display());
    let cannot = io_error(&what);
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let output = Output::prepare(&args.output).map_err(&cannot)?;
    // A pipe or device.
    let as_it_is = !output.is_file();
    let progress = display::progress(args.json);
    progress.phase("extract", Some(found.bytes()));
    let state = match as_it_is {
        true => "What was written is only a part: discard it.".to_owned(),
        false => format!("What was at {} is as it was.", args.output.display()),
    };
    // Who reads a pipe may never read on.
    signals.settle_at_last({
        let state = state.clone();
        move || state
    });
    let written = output
        .write_by(|file| found.write(file, &signals.stop, progress.as_ref()).map_err(Failed::Core));
    drop(progress);
    match written {
        Ok(()) => {}
        Err(Failed::Core(error)) => return Err(CliError::from(error).state(state)),
        Err(Failed::File(error)) => return Err(cannot(error).state(state)),
    }
    tell(args, &found, as_it_is)?;
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &ExtractArgs, found: &Extract<'_>, as_it_is: bool) -> Result<(), CliError> {
    let (pid, stretches) = (args.pid, found.stretches());
    let report = Report { pid, bytes: found.bytes(), stretches };
    // Words between the bytes would be bytes.
    match (args.json, as_it_is) {
        (true, true) => return crate::say::note_json(&report),
        (true, false) => return print_json(&report),
        (false, true) => return Ok(()),
        (false, false) => {}
    }
    say!("{}: {} of process {pid}", args.output.display(), display::bytes(report.bytes));
    for stretch in stretches {
        let what = match stretch.memory {
            Memory::Device { owner, block } if owner == pid => {
                format!("block {block} of device memory")
            }
            Memory::Device { owner, block } => {
                format!("block {block} of device memory, which belongs to process {owner}")
            }
            Memory::Host {} => "host memory".to_owned(),
            Memory::Shared {} => "shared host memory".to_owned(),
        };
        let zeros = match stretch.zeros {
            0 => String::new(),
            zeros => {
                format!(", {} of them zeros without bytes in the image", display::bytes(zeros))
            }
        };
        say!("  {:#x}  {} {what}{zeros}", stretch.address, display::bytes(stretch.bytes));
    }
    Ok(())
}
