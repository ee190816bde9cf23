//! `gpucr ps`.

use std::process::ExitCode;
use std::time::Duration;

use gpucr_core::process::{Agent, ProcessInfo};
use gpucr_wire::{Counts, GateState};

use crate::commands::{io_error, print_json, say};
use crate::{Outcome, args::PsArgs, display};

/// A program that is in the middle of a dump does not answer.
const ANSWER: Duration = Duration::from_millis(500);

#[derive(serde::Serialize)]
struct Row {
    pid: u32,
    command: Vec<String>,
    /// `running`, `stopped`, `detached`, or `busy` while another gpucr works on it.
    state: &'static str,
    devices: Vec<String>,
    /// Bytes that gpucr copies itself.
    bulk_bytes: u64,
    allocations: u64,
    /// Bytes that are left to the driver's checkpoint, as far as they are counted.
    driver_bytes: u64,
    launches: u64,
    /// What would make a dump refuse.
    unsupported: Vec<String>,
}

pub(crate) fn run(args: &PsArgs) -> Outcome {
    let mut rows = Vec::new();
    for entry in std::fs::read_dir("/proc").map_err(io_error("cannot read /proc"))? {
        let name = entry.map_err(io_error("cannot read /proc"))?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else { continue };
        // Processes come and go, and those of other users cannot be read.
        let Ok(process) = ProcessInfo::read(pid) else { continue };
        if Agent::listens(&process) && process.driver_libraries.iter().any(|_| true) {
            rows.push(row(&process));
        }
    }
    rows.sort_by_key(|row| row.pid);
    if args.json {
        print_json(&rows)?;
        return Ok(ExitCode::SUCCESS);
    }
    say!(
        "{:>8}  {:<9} {:>12} {:>12} {:>10}  {:<10} COMMAND",
        "PID",
        "STATE",
        "OURS",
        "DRIVER'S",
        "LAUNCHES",
        "DEVICES"
    );
    for row in rows {
        let devices: Vec<&str> = row.devices.iter().map(|uuid| &uuid[..8]).collect();
        say!(
            "{:>8}  {:<9} {:>12} {:>12} {:>10}  {:<10} {}",
            row.pid,
            row.state,
            display::bytes(row.bulk_bytes),
            display::bytes(row.driver_bytes),
            row.launches,
            devices.join(","),
            display::command(&row.command, 60),
        );
        for what in row.unsupported {
            say!("          cannot be dumped: {what}");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn row(process: &ProcessInfo) -> Row {
    let asked = Agent::connect(process, ANSWER).and_then(|mut agent| {
        let counts = agent.counts()?;
        Ok((agent.hello().gate, counts))
    });
    let (state, counts) = match asked {
        Ok((GateState::Open {}, counts)) => ("running", counts),
        Ok((GateState::Closed {}, counts)) => ("stopped", counts),
        Ok((GateState::Detached {}, counts)) => ("detached", counts),
        Err(_) => ("busy", Counts::default()),
    };
    let mut unsupported = counts.unsupported.clone();
    if counts.managed > 0 {
        unsupported.push(format!("managed memory ({} allocations)", counts.managed));
    }
    if counts.shared > 0 {
        unsupported.push(format!("memory shared with other processes ({} handles)", counts.shared));
    }
    Row {
        pid: process.pid,
        command: process.command.clone(),
        state,
        devices: counts.devices.iter().map(|uuid| gpucr_core::hex(uuid)).collect(),
        bulk_bytes: counts.bulk_bytes,
        allocations: counts.allocations,
        driver_bytes: counts.pool_bytes + counts.pinned_bytes,
        launches: counts.launches,
        unsupported,
    }
}
