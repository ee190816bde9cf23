//! `gpucr diff`.

use std::path::PathBuf;
use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::diff::{self, Change, Diff, Total};
use gpucr_core::image::{ImageReader, Manifest};

use crate::commands::{LARGEST, Outcome, print_json, say, say_folded};
use crate::display;
use crate::table::Table;

/// Show what changed between two images
///
/// Compares the processes, each block of device memory, and each file, by the hashes of their chunks: no data is
/// read. What changed the most comes first; what did not change is left out. The last lines show how much space image
/// B needs in addition to image A if both share chunks.
#[derive(clap::Args)]
#[command(after_long_help = "\
Blocks are compared position by position, in chunks of 2 MiB: a chunk with one changed byte counts in full. For \
a file, the chunks count that the other image's file of the same name does not have, because CRIU may write the \
same pages in another order.\n\n\
Example:\n  gpucr diff /images/step-1000 /images/step-2000")]
pub(crate) struct DiffArgs {
    /// The image to start from
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// The image to compare with it
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// Show every block and file that changed, not only the 20 with the most changes
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON object that includes what did not change
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &DiffArgs) -> Outcome {
    let before = ImageReader::open(&args.before).map_err(Error::from)?;
    let after = ImageReader::open(&args.after).map_err(Error::from)?;
    let diff = diff::diff(&before, &after);
    if args.json {
        print_json(&diff)?;
    } else {
        print(&diff, [before.manifest(), after.manifest()], args.all);
    }
    Ok(ExitCode::SUCCESS)
}

/// The column at which what a line says begins, behind its label.
const TEXT: usize = 9;

fn print(diff: &Diff, manifests: [&Manifest; 2], all: bool) {
    for (name, id, manifest) in [("A", &diff.a, manifests[0]), ("B", &diff.b, manifests[1])] {
        say_folded!(TEXT, "{name}        {id}  {}", display::date(manifest.created));
    }
    if diff.a == diff.b {
        say!("same     both are the same image");
        return;
    }
    for process in &diff.processes {
        say_folded!(
            TEXT,
            "process  {} {}, {}",
            process.pid,
            display::command(&process.command, 60),
            match process.change {
                Change::New => "only in B",
                Change::Gone => "only in A",
                Change::Changed => "another command",
                Change::Same => "in both",
            }
        );
    }
    let changed: Vec<_> = diff.parts.iter().filter(|part| part.change != Change::Same).collect();
    let shown = if all { changed.len() } else { changed.len().min(LARGEST) };
    if !changed.is_empty() {
        let mut table = Table::new(&[">CHANGED", ">OF", ">SHARE", "HOW", "WHAT"]);
        for part in &changed[..shown] {
            let how = match (part.change, part.size_before, part.size) {
                (Change::New, ..) => "new".to_owned(),
                (Change::Gone, ..) => "gone".to_owned(),
                (_, Some(before), Some(size)) if before != size => {
                    format!("had {}", display::bytes(before))
                }
                _ => "changed".to_owned(),
            };
            table.row(vec![
                display::bytes(part.changed_bytes),
                display::bytes(part.size.or(part.size_before).unwrap_or(0)),
                display::percent(part.share),
                how,
                part.name.to_string(),
            ]);
        }
        table.print();
    }
    if shown < changed.len() {
        say!("  and {} more with fewer changes: --all shows them", changed.len() - shown);
    }
    say!("same     {} blocks and files", diff.parts.len() - changed.len());
    total("memory", &diff.memory);
    total("host", &diff.host);
    total("library", &diff.libraries);
    say_folded!(
        TEXT,
        "cost     on top of A, B needs {} more of its {}: {}, stored in {}",
        diff.cost.chunks,
        display::counted(diff.cost.of_chunks, "chunk", "chunks"),
        display::bytes(diff.cost.bytes),
        display::bytes(diff.cost.stored_bytes)
    );
}

fn total(name: &str, total: &Total) {
    say_folded!(
        TEXT,
        "{name:<7}  {} of {} changed ({}); A had {}",
        display::bytes(total.changed_bytes),
        display::bytes(total.bytes),
        display::percent(total.share),
        display::bytes(total.bytes_before)
    );
}
