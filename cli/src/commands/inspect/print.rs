//! What `gpucr inspect` shows to people.

use std::collections::{BTreeMap, HashSet};

use gpucr_core::kinds;

use super::rows::{BlockRow, ProcessRow, Summary};
use crate::commands::{LARGEST, say, say_folded};
use crate::display;
use crate::table::Table;

/// The column at which what a line says begins, behind its label.
const TEXT: usize = 11;

/// Prints all of it, of blocks and files only the largest unless `all` is wanted.
pub(super) fn print(summary: &Summary<'_>, all: bool) {
    say!("image      {}", summary.id);
    for ancestor in &summary.ancestors {
        say!("builds on  {}", ancestor.display());
    }
    if let Some(store) = &summary.store {
        say!("in store   {}", store.display());
    }
    say_folded!(
        TEXT,
        "made       {} on {} by gpucr {}",
        summary.created,
        summary.hostname,
        summary.gpucr_version
    );
    say_folded!(TEXT, "kernel     {}", summary.kernel);
    say_folded!(
        TEXT,
        "driver     {} (CUDA {}.{})",
        summary.driver.display(),
        summary.driver_version / 1000,
        summary.driver_version % 1000 / 10
    );
    say_folded!(TEXT, "criu       {} {}", summary.criu_version, summary.criu_options.join(" "));
    say_folded!(
        TEXT,
        "size       {} device memory + {} host side + {} libraries, stored in {} ({:.2} : 1)",
        display::bytes(summary.bulk_bytes),
        display::bytes(summary.host_bytes),
        display::bytes(summary.library_bytes),
        display::bytes(summary.stored_bytes),
        summary.ratio
    );
    say_folded!(
        TEXT,
        "chunks     {}, {} of them of one repeated byte; {} stored in {}",
        summary.chunks.count,
        summary.chunks.constant,
        display::bytes(summary.chunks.bytes),
        display::bytes(summary.chunks.stored_bytes)
    );
    if summary.unneeded_bytes > 0 {
        say_folded!(
            TEXT,
            "unneeded   {} of chunks that changed after they had been copied",
            display::bytes(summary.unneeded_bytes)
        );
    }
    say!("processes");
    print_tree(summary);
    print_devices(summary);
    print_blocks(summary, all);
    print_files(summary, all);
    for file in summary.files.iter().filter(|file| all || file.open) {
        say_folded!(TEXT, "needs      {} with {} bytes", file.path.display(), file.size);
    }
    let hidden = summary.files.iter().filter(|file| !file.open).count();
    if !all && hidden > 0 {
        say!("needs {hidden} more mapped files: --all shows them");
    }
    if summary.sections.iter().any(|section| section.kind == "network") {
        say!("network    a namespace of its own: gpucr restore --netns PATH");
    }
    if let Some(places) = &summary.container {
        say!("container  with a root directory of its own: gpucr restore --root DIR");
        for place in places {
            say!("mount      {} (--mount {}=PATH)", place.display(), place.display());
        }
    }
    print_opened(summary);
    for part in &summary.multicast {
        let of = match part.owner == part.pid {
            true => String::new(),
            false => format!(" of process {}", part.owner),
        };
        say_folded!(
            TEXT,
            "multicast  process {} has object {}{of}, of {} devices: {} of its blocks are bound",
            part.pid,
            part.object,
            part.devices,
            part.bound.len()
        );
    }
    for one in &summary.interrupted {
        say_folded!(
            TEXT,
            "interrupted {}: kernel {} of process {}, {}",
            one.level.place(),
            display::kernel(&one.kernel),
            one.pid,
            one.standing()
        );
    }
    say_folded!(TEXT, "stopped    {} up to the commit", display::time(summary.stopped_ms));
    for phase in summary.phases {
        say_folded!(TEXT, "phase      {:<11} {}", phase.name, display::time(phase.ms));
    }
}

/// The processes, each below its parent.
fn print_tree(summary: &Summary<'_>) {
    let known: HashSet<u32> = summary.processes.iter().map(|process| process.pid).collect();
    let mut children: BTreeMap<u32, Vec<&ProcessRow<'_>>> = BTreeMap::new();
    // What to print next: the last comes first. A process is taken out of `children` when it is
    // printed, so that parents in a circle end this.
    let mut stack: Vec<(&ProcessRow<'_>, String, &str)> = Vec::new();
    for process in &summary.processes {
        if known.contains(&process.ppid) && process.ppid != process.pid {
            children.entry(process.ppid).or_default().push(process);
        } else {
            stack.insert(0, (process, "  ".into(), ""));
        }
    }
    while let Some((process, indent, branch)) = stack.pop() {
        let below = indent.chars().count() + branch.chars().count() + 2;
        say_folded!(below, "{indent}{branch}{}", process_line(process));
        let next = match branch {
            "" => indent,
            "├─ " => indent + "│  ",
            _ => indent + "   ",
        };
        let children = children.remove(&process.pid).unwrap_or_default();
        for (number, child) in children.iter().enumerate().rev() {
            let branch = if number + 1 == children.len() { "└─ " } else { "├─ " };
            stack.push((child, next.clone(), branch));
        }
    }
    for process in children.values().flatten() {
        say_folded!(4, "  {}", process_line(process));
    }
}

fn process_line(process: &ProcessRow<'_>) -> String {
    let kind = match (process.cuda, process.under_gpucr) {
        (false, _) => "no CUDA".to_owned(),
        (true, true) => {
            let bytes = process.blocks.iter().map(|block| block.size).sum();
            let blocks = display::counted(process.blocks.len() as u64, "block", "blocks");
            format!("under gpucr, {} in {blocks}", display::bytes(bytes))
        }
        (true, false) => "CUDA, not under gpucr".to_owned(),
    };
    format!("{} {} ({kind})", process.pid, display::command(process.command, 60))
}

fn print_devices(summary: &Summary<'_>) {
    if summary.devices.is_empty() {
        return;
    }
    say!("devices");
    let mut table = Table::new(&["DEVICE", ">MEMORY", ">IN IMAGE", "UUID"]);
    for device in &summary.devices {
        table.row(vec![
            device.name.to_owned(),
            display::bytes(device.memory),
            display::bytes(device.bulk_bytes),
            device.uuid.clone(),
        ]);
    }
    table.print();
}

fn print_blocks(summary: &Summary<'_>, all: bool) {
    let mut blocks: Vec<(u32, &BlockRow)> = Vec::new();
    for process in &summary.processes {
        blocks.extend(process.blocks.iter().map(|block| (process.pid, block)));
    }
    if blocks.is_empty() {
        return;
    }
    let number = |uuid: &str| summary.devices.iter().position(|device| device.uuid == uuid);
    blocks.sort_by_key(|(pid, block)| (std::cmp::Reverse(block.size), *pid, block.id));
    let shown = if all { blocks.len() } else { blocks.len().min(LARGEST) };
    say!("device memory");
    let mut table = Table::new(&[
        ">PID", ">BLOCK", ">DEV", ">ADDRESS", ">SIZE", ">STORED", ">RATIO", ">ALLOCS", "BY",
    ]);
    for (pid, block) in &blocks[..shown] {
        table.row(vec![
            pid.to_string(),
            block.id.to_string(),
            number(&block.device).map_or("?".into(), |number| number.to_string()),
            block.address.clone(),
            display::bytes(block.size),
            display::bytes(block.stored_bytes),
            ratio(block.size, block.stored_bytes),
            block.allocations.to_string(),
            kinds::of_block(block.kind).name().to_owned(),
        ]);
    }
    table.print();
    if shown < blocks.len() {
        say!("  and {} smaller ones: --all shows them", blocks.len() - shown);
    }
}

fn print_files(summary: &Summary<'_>, all: bool) {
    let criu = summary.criu_files.iter().map(|f| (f.size, f.stored_bytes, f.name.to_owned()));
    let libraries = summary.libraries.iter();
    let libraries = libraries.map(|f| (f.size, f.stored_bytes, f.path.display().to_string()));
    let mut files: Vec<(u64, u64, String)> = criu.chain(libraries).collect();
    if files.is_empty() {
        return;
    }
    files.sort_by(|x, y| y.0.cmp(&x.0).then(x.2.cmp(&y.2)));
    let shown = if all { files.len() } else { files.len().min(LARGEST) };
    say!("files");
    let mut table = Table::new(&[">SIZE", ">STORED", ">RATIO", "FILE"]);
    for (size, stored, name) in &files[..shown] {
        table.row(vec![
            display::bytes(*size),
            display::bytes(*stored),
            ratio(*size, *stored),
            name.clone(),
        ]);
    }
    table.print();
    if shown < files.len() {
        say!("  and {} smaller ones: --all shows them", files.len() - shown);
    }
}

/// Who has memory of whom open.
fn print_opened(summary: &Summary<'_>) {
    let mut pairs: BTreeMap<(u32, u32), (usize, u64)> = BTreeMap::new();
    for open in &summary.opened {
        let (blocks, bytes) = pairs.entry((open.pid, open.owner)).or_default();
        (*blocks, *bytes) = (*blocks + 1, bytes.saturating_add(open.size));
    }
    for ((pid, owner), (blocks, bytes)) in pairs {
        let s = if blocks == 1 { "" } else { "s" };
        let bytes = display::bytes(bytes);
        say_folded!(
            TEXT,
            "shared     process {pid} has {blocks} block{s} of process {owner} open, {bytes}"
        );
    }
}

/// Plain bytes for each stored byte.
fn ratio(plain: u64, stored: u64) -> String {
    match (plain, stored) {
        (0, _) => "-".into(),
        (_, 0) => "no data".into(),
        _ => format!("{:.2}", plain as f64 / stored as f64),
    }
}
