//! `gpucr verify`.

use std::process::ExitCode;

use gpucr_core::verify::{self, Damage, Report};
use gpucr_core::{Error, hex};

use crate::args::VerifyArgs;
use crate::commands::{print_json, say};
use crate::failure::FAILED;
use crate::{Outcome, display};

pub(crate) fn run(args: &VerifyArgs) -> Outcome {
    let progress = display::progress(args.json);
    let report = verify::verify(&args.image, progress.as_ref()).map_err(Error::from)?;
    drop(progress);
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
        "{} chunks, {}, read from {}",
        report.chunks,
        display::bytes(report.bytes),
        display::bytes(report.stored_bytes)
    );
    if report.whole {
        let id = report.id.map(|id| hex(&id)).unwrap_or_default();
        say!("{image} is whole: {read}; identity {id}");
        return;
    }
    let chunks = report.damage.iter().filter(|damage| damage.chunk.is_some()).count();
    let files = report.damage.len() - chunks;
    say!("{image} is damaged: {chunks} bad chunks, {files} bad files; {read}");
    say!("The image was only read. It cannot be restored: copy it again from where it came from.");
}

fn print_damage(damage: &Damage, report: &Report) {
    // Within the image the name is enough.
    let file = damage
        .file
        .as_ref()
        .map(|file| file.strip_prefix(&report.image).unwrap_or(file).display().to_string());
    let Some(chunk) = damage.chunk else {
        say!("bad file   {}", file.unwrap_or_default());
        say!("           {}", damage.problem);
        return;
    };
    let place = match (file, damage.offset) {
        (Some(file), Some(offset)) => format!(" ({file}, offset {offset})"),
        (Some(file), None) => format!(" ({file})"),
        (None, _) => String::new(),
    };
    say!("bad chunk  {chunk}{place}: {}", damage.problem);
    for owner in &damage.owners {
        say!("           {owner}");
    }
    if damage.owners.is_empty() {
        say!("           nothing in the image needs it");
    }
}
