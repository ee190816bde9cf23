//! `gpucr trace`.

use std::process::ExitCode;
use std::time::Duration;

use gpucr_core::access::trace::{self, Checked, MadeTwice, Options, Process, Repeated, Row, Set};
use gpucr_core::stop::Stop;

use crate::commands::{LARGEST, Outcome, io_error, note_folded, print_json, say, say_folded};
use crate::table::Table;
use crate::values::{duration, pids};
use crate::{display, signals};

/// Show what a running program does with its device memory
///
/// Watches for a while which kernels, copies and fills a program launches, and shows for each kernel which
/// allocations it reads and which it may write. The program must have been started with `gpucr run`; it keeps
/// running, and is left as it was. Recording costs it a fraction of a microsecond per launch.
#[derive(clap::Args)]
#[command(after_long_help = "\
READS and WRITES give the number of allocations that a kernel's arguments pointed to, and their size in bytes: a \
pointer counts as its whole allocation. The kernels that may write the most come first.\n\n\
FROM says how gpucr knows what is read and written: `code` from the kernel's PTX; `name` from its C++ name, \
which shows which pointers point to const data; `observed` because the memory did not change while the kernel was \
being launched; `assumed` means that nothing is known, so the memory counts as read and written. Copies and fills \
are `exact`.\n\n\
IDEMPOTENT is yes if running the kernel twice has the same effect as running it once, because, judging by its \
arguments, it writes nothing that it reads; it is no if the kernel reads and writes through the same pointer. \
Each launch is judged by its own arguments: `12 of 30` means that 12 of 30 launches are idempotent. --twice runs \
these a second time and counts how many of them changed device memory.\n\n\
INTERRUPTIBLE is `between blocks`, `at barriers`, `in loops` or `by abort` for kernels that a dump can interrupt \
if `gpucr run --interruptible` names them; for others it gives the reason why they cannot be interrupted. \
`between blocks` works at every --interrupt-level, `at barriers` needs level barrier, loop or abort, `in loops` \
needs loop or abort, and `by abort` needs abort and all launches to be idempotent.\n\n\
CHECKED, with --check, compares for each launch the chunks (2 MiB) that gpucr expected to change with those that \
did. It counts the launches for which the two were the same, those for which more were expected, and those for \
which other chunks changed.\n\n\
To observe, gpucr hashes all device memory at the beginning and the end. That needs a context of its own on the \
device and takes, for a short time, half of the device's speed; --no-observe turns it off.\n\n\
Example:\n  gpucr run -- ./train &\n  gpucr trace --pid $! --for 5s\n  \
gpucr trace --pid $! --json | jq '.processes[].kernels[] | {name, launches, writes}'")]
pub(crate) struct TraceArgs {
    /// Root of the process tree
    #[arg(short = 't', long = "pid", alias = "tree", value_name = "PID", value_parser = pids())]
    pub(crate) pid: u32,
    /// How long to watch; Ctrl-C ends it early and shows the results so far
    #[arg(long = "for", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) time: Duration,
    /// Do not hash the device memory
    #[arg(long, conflicts_with = "check")]
    pub(crate) no_observe: bool,
    /// Stop the program after each launch, and compare what changed in device memory with what the launch was
    /// expected to write. The program is slowed down to some hundreds of launches per second
    #[arg(long)]
    pub(crate) check: bool,
    /// With --check: run launches that are idempotent a second time, and compare device memory. Only for programs
    /// whose results you can afford to lose: if a launch is not idempotent after all, it leaves wrong values in
    /// memory
    #[arg(long, requires = "check")]
    pub(crate) twice: bool,
    /// Show every kernel, not only the 20 that may write the most
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON object, with every argument of every kernel
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &TraceArgs) -> Outcome {
    let signals = signals::handle().map_err(io_error("cannot handle signals"))?;
    // Its end is the end of the recording, and opens the gates.
    signals.settle_at_last(|| {
        "The program keeps running; its launches could not be read in time.".into()
    });
    let options = Options {
        pid: args.pid,
        time: args.time,
        observe: !args.no_observe,
        check: args.check,
        twice: args.twice,
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
    say_folded!(2, "process {}: {}", process.pid, display::command(&process.command, 80));
    say_folded!(
        2,
        "{}{}: {} of {}",
        display::time(seconds * 1000.0),
        if process.ended { ", then it ended" } else { "" },
        display::counted(process.launches, "launch", "launches"),
        display::counted(process.kernels.len() as u64, "kernel", "kernels"),
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
    if args.twice {
        heads.push("TWICE");
    }
    heads.push("INTERRUPTIBLE");
    let mut table = Table::new(&heads);
    // Operations are few, and always shown.
    for row in process.kernels.iter().take(shown).chain(&process.operations) {
        table.row(cells(row, process.checked.is_some(), args.twice));
    }
    table.print();
    let left = process.kernels.len().saturating_sub(shown);
    if left > 0 {
        say!("  and {left} kernels that write less (--all shows them)");
    }
    if process.unknown_launches > 0 {
        say_folded!(
            2,
            "{} could not be analysed, and may have touched any memory.",
            display::counted(process.unknown_launches, "launch", "launches")
        );
    }
    if let Some(checked) = &process.checked {
        say_folded!(
            2,
            "Checked, one by one: {} of {} launches.",
            counts(checked),
            checked.launches
        );
    }
    if process.host_functions > 0 {
        say_folded!(
            2,
            "{} ran in streams.",
            display::counted(process.host_functions, "host function", "host functions")
        );
    }
    if rows.iter().any(|row| row.indirect == Some(true)) {
        say_folded!(
            2,
            "* follows pointers that are stored in memory, and may reach more than is shown."
        );
    }
    if !args.no_observe && !process.observed && !process.ended {
        note_folded!(
            "The device memory could not be compared: gpucr had no context of its own on the \
             device. Kernels without readable code are assumed to write everything that they are given."
        );
    }
}

fn cells(row: &Row, checked: bool, twice: bool) -> Vec<String> {
    let mark = if row.indirect == Some(true) { " *" } else { "" };
    let mut cells = vec![
        format!("{}{mark}", display::kernel(&row.name)),
        row.launches.to_string(),
        row.arguments.map_or_else(|| "?".into(), |count| count.to_string()),
        set(&row.reads),
        set(&row.writes),
        row.derived.join(", "),
        idempotent(row),
    ];
    if checked {
        cells.push(row.checked.as_ref().map_or_else(|| "-".to_owned(), counts));
    }
    if twice {
        let made = |t: &MadeTwice| {
            let same = t.launches.saturating_sub(t.differed);
            let skipped =
                if t.skipped > 0 { format!(", {} skipped", t.skipped) } else { String::new() };
            format!("{same} same, {} not{skipped}", t.differed)
        };
        cells.push(row.twice.as_ref().map_or_else(|| "-".to_owned(), made));
    }
    cells.push(match (&row.interruptible, &row.interruptible_reason) {
        (Some(level), _) => level.place().to_owned(),
        (None, Some(why)) => format!("no: {why}"),
        (None, None) => "-".to_owned(),
    });
    cells
}

fn idempotent(row: &Row) -> String {
    let is_so = |one: &&Repeated| one.idempotent == Some(true);
    let launches: u64 = row.repeated.iter().filter(is_so).map(|one| one.launches).sum();
    let answer = match row.idempotent {
        Some(true) => "yes".to_owned(),
        Some(false) => "no".to_owned(),
        None if launches > 0 => format!("{launches} of {}", row.launches),
        None => "unknown".to_owned(),
    };
    match row.idempotent_reason {
        Some(reason) => format!("{answer}: {reason}"),
        None => answer,
    }
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
