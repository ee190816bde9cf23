//! `gpucr trace`.

use std::process::ExitCode;

use gpucr_core::access::trace::{self, Checked, Options, Process, Row, Set};
use gpucr_core::stop::Stop;

use crate::args::TraceArgs;
use crate::commands::{LARGEST, io_error, print_json, say};
use crate::table::Table;
use crate::{Outcome, display, signals};

pub(crate) fn run(args: &TraceArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    let options = Options {
        pid: args.pid,
        time: args.time,
        observe: !args.no_observe,
        check: args.check,
        stop: Stop::new(signals.stop),
    };
    let progress = display::waiting(args.json, "watching", args.time);
    let report = trace::trace(&options)?;
    drop(progress);
    if args.json {
        print_json(&report)?;
        return Ok(ExitCode::SUCCESS);
    }
    for (number, process) in report.processes.iter().enumerate() {
        if number > 0 {
            say!("");
        }
        tell(args, process, report.seconds);
    }
    Ok(ExitCode::SUCCESS)
}

fn tell(args: &TraceArgs, process: &Process, seconds: f64) {
    say!("process {}: {}", process.pid, display::command(&process.command, 80));
    say!(
        "{}{}: {} of {} kernels",
        display::time(seconds * 1000.0),
        if process.ended { ", then it ended" } else { "" },
        counted(process.launches, "launch", "launches"),
        process.kernels.len(),
    );
    let rows: Vec<&Row> = process.kernels.iter().chain(&process.operations).collect();
    if rows.is_empty() && process.unknown_launches == 0 {
        say!("Nothing was launched.");
        return;
    }
    let shown = if args.all { rows.len() } else { LARGEST };
    let mut heads = vec!["KERNEL", ">LAUNCHES", ">ARGS", ">READS", ">WRITES", "FROM", "IDEMPOTENT"];
    if process.checked.is_some() {
        heads.push("CHECKED");
    }
    let mut table = Table::new(&heads);
    // Operations are few, and always shown.
    for row in process.kernels.iter().take(shown).chain(&process.operations) {
        table.row(cells(row, process.checked.is_some()));
    }
    table.print();
    let left = process.kernels.len().saturating_sub(shown);
    if left > 0 {
        say!("  and {left} kernels that write less (--all shows them)");
    }
    if process.unknown_launches > 0 {
        say!(
            "{} could not be looked into, and may have touched anything.",
            counted(process.unknown_launches, "launch", "launches")
        );
    }
    if let Some(checked) = &process.checked {
        say!("Checked, one by one: {} of {} launches.", counts(checked), checked.launches);
    }
    if process.host_functions > 0 {
        say!(
            "{} ran in streams.",
            counted(process.host_functions, "host function", "host functions")
        );
    }
    if rows.iter().any(|row| row.indirect == Some(true)) {
        say!("* follows pointers that lie in memory, and may reach more than is shown.");
    }
    if !args.no_observe && !process.observed && !process.ended {
        eprintln!(
            "The device memory could not be compared: gpucr had no context of its own on the \
             device. Kernels without readable code are taken to write all that they are given."
        );
    }
}

fn cells(row: &Row, checked: bool) -> Vec<String> {
    let mark = if row.indirect == Some(true) { " *" } else { "" };
    let mut cells = vec![
        format!("{}{mark}", display::kernel(&row.name)),
        row.launches.to_string(),
        row.arguments.map_or_else(|| "?".into(), |count| count.to_string()),
        set(&row.reads),
        set(&row.writes),
        row.derived.join(", "),
        match row.idempotent {
            Some(true) => "yes",
            Some(false) => "no",
            None => "unknown",
        }
        .to_owned(),
    ];
    if checked {
        cells.push(row.checked.as_ref().map_or_else(|| "-".to_owned(), counts));
    }
    cells
}

fn counts(checked: &Checked) -> String {
    let Checked { exact, too_much, wrong, .. } = checked;
    format!("{exact} right, {too_much} too much, {wrong} wrong")
}

/// How many allocations, and their bytes.
fn set(set: &Set) -> String {
    if set.everything {
        return "anything".to_owned();
    }
    match set.allocations {
        0 => "-".to_owned(),
        count => format!("{count}: {}", display::bytes(set.bytes)),
    }
}

fn counted(count: u64, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_say_what_they_hold() {
        let of = |allocations, bytes, everything| set(&Set { allocations, bytes, everything });
        assert_eq!(of(0, 0, false), "-");
        assert_eq!(of(3, 5 << 20, false), "3: 5.00 MiB");
        assert_eq!(of(1, 1, true), "anything");
    }
}
