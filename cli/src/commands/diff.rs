//! `gpucr diff`.

use std::process::ExitCode;

use gpucr_core::Error;
use gpucr_core::diff::{self, Change, Diff, Total};
use gpucr_core::image::{ImageReader, Manifest};

use crate::args::DiffArgs;
use crate::commands::{LARGEST, print_json, say};
use crate::table::Table;
use crate::{Outcome, display};

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

fn print(diff: &Diff, manifests: [&Manifest; 2], all: bool) {
    for (name, id, manifest) in [("A", &diff.a, manifests[0]), ("B", &diff.b, manifests[1])] {
        say!("{name}        {id}  {}", display::date(manifest.created));
    }
    if diff.a == diff.b {
        say!("same     both are the same image");
        return;
    }
    for process in &diff.processes {
        say!(
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
    say!(
        "cost     on top of A, B needs {} more of its {} chunks: {}, stored in {}",
        diff.cost.chunks,
        diff.cost.of_chunks,
        display::bytes(diff.cost.bytes),
        display::bytes(diff.cost.stored_bytes)
    );
}

fn total(name: &str, total: &Total) {
    say!(
        "{name:<7}  {} of {} changed ({}); A had {}",
        display::bytes(total.changed_bytes),
        display::bytes(total.bytes),
        display::percent(total.share),
        display::bytes(total.bytes_before)
    );
}
