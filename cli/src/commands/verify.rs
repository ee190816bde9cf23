//! `gpucr verify`.

use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::verify::{self, Damage, Report};
use gpucr_core::{Error, hex};

use crate::commands::key::TrustArgs;
use crate::commands::{Outcome, key, print_json, say, say_folded};
use crate::display;
use crate::failure::FAILED;

/// Check all data of an image for damage
///
/// Decompresses every chunk and checks it against its hash, on all cores. Continues after damage: each damaged chunk
/// is reported, with the process, block and address range or the file that it belongs to. The image is only read.
/// Exit code 0 if it is intact, 1 if not.
#[derive(clap::Args)]
#[command(after_long_help = "\
A damaged image cannot be restored: a restore makes the same checks and fails before anything runs. To repair \
it, copy the damaged files, which are named, again from where the image came from.\n\n\
Example:\n  gpucr verify /images/train && echo fine\n  \
gpucr verify --json /images/train | jq '.damage[].owners[]'")]
pub(crate) struct VerifyArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
}

pub(crate) fn run(args: &VerifyArgs) -> Outcome {
    let trust = key::trust(&args.trust)?;
    let progress = display::progress(args.json);
    let report = verify::verify(&args.image, progress.as_ref()).map_err(Error::from)?;
    drop(progress);
    if let Some(id) = &report.id {
        trust.check_image(&args.image, id).map_err(Error::from)?;
    }
    if args.json {
        print_json(&report)?;
    } else {
        print(&report);
    }
    Ok(if report.whole { ExitCode::SUCCESS } else { ExitCode::from(FAILED) })
}

fn print(report: &Report) {
    for damage in &report.damage {
        print_damage(damage, report);
    }
    let image = report.image.display();
    let read = format!(
        "{}, {}, read from {}",
        display::counted(report.chunks, "chunk", "chunks"),
        display::bytes(report.bytes),
        display::bytes(report.stored_bytes)
    );
    if report.whole {
        let id = report.id.map(|id| hex(&id)).unwrap_or_default();
        say_folded!(2, "{image} is intact: {read}; identity {id}");
        return;
    }
    let chunks = report.damage.iter().filter(|damage| damage.chunk.is_some()).count();
    let files = report.damage.len() - chunks;
    let chunks = display::counted(chunks as u64, "bad chunk", "bad chunks");
    let files = display::counted(files as u64, "bad file", "bad files");
    say_folded!(2, "{image} is damaged: {chunks}, {files}; {read}");
    say_folded!(
        2,
        "The image was only read. It cannot be restored: copy it again from where it came from."
    );
}

fn print_damage(damage: &Damage, report: &Report) {
    // Within the image the name is enough.
    let file = damage
        .file
        .as_ref()
        .map(|file| file.strip_prefix(&report.image).unwrap_or(file).display().to_string());
    let Some(chunk) = damage.chunk else {
        say!("bad file   {}", file.unwrap_or_default());
        say_folded!(11, "           {}", damage.problem);
        return;
    };
    let place = match (file, damage.offset) {
        (Some(file), Some(offset)) => format!(" ({file}, offset {offset})"),
        (Some(file), None) => format!(" ({file})"),
        (None, _) => String::new(),
    };
    say_folded!(11, "bad chunk  {chunk}{place}: {}", damage.problem);
    for owner in &damage.owners {
        say_folded!(11, "           {owner}");
    }
    if damage.owners.is_empty() {
        say_folded!(11, "           nothing in the image needs it");
    }
}
