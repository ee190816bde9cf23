//! How far a program gets while it is dumped.
//!
//! The rate of copies between host and device is limited, in gpucr only, so that the copy of the memory
//! is most of the dump, as it is on a GPU. A step of the program waits 5 ms, as for a device, writes
//! 64 KiB and reads and compares 64 KiB.

use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use gpucr_benches::{median, print_table};

use crate::program::Program;
use crate::way::{Setup, gpucr, milliseconds};

/// Bytes that change all the time, whatever the size of the memory besides.
const WRITTEN: u64 = 8 << 20;
/// How long the program is watched before each dump.
const UNDISTURBED: Duration = Duration::from_secs(1);
/// Share of the undisturbed steps that a program must make while its memory is copied, and
/// that it may make at most while it is stopped for that.
const LEAST: f64 = 0.8;
const MOST_STOPPED: f64 = 0.2;

const PROTOCOLS: [&str; 3] = ["cow", "recopy", "stop"];

/// What one dump came to.
struct Share {
    total: f64,
    stopped: f64,
    /// Steps made during the dump by those that the program would have made in that time.
    steps: f64,
}

fn steps(program: &Program) -> usize {
    program.output().lines().filter(|line| line.starts_with("step ")).count()
}

fn dump(program: &Program, setup: &Setup, protocol: &str, gbps: f64) -> Result<Share> {
    let (before, start) = (steps(program), Instant::now());
    sleep(UNDISTURBED);
    let rate = (steps(program) - before) as f64 / milliseconds(start);

    let image = setup.dir.join("image");
    let mut command = Command::new(&setup.gpucr);
    command
        .args(["dump", "--json", "--leave-running", "--compress", "none", "--protocol", protocol])
        .args(["--pid", &program.pid().to_string(), "-o"])
        .arg(&image)
        .env("SOFTCUDA_PCIE_GBPS", gbps.to_string());
    let (before, start) = (steps(program), Instant::now());
    let (report, _) = gpucr(&mut command, setup)?;
    let (total, made) = (milliseconds(start), steps(program) - before);
    std::fs::remove_dir_all(&image)?;
    let stopped = report["stopped_ms"].as_f64().context("stopped_ms in the report")?;
    Ok(Share { total, stopped, steps: made as f64 / (rate * total) })
}

/// Dumps one program with each protocol by turns while it runs on, and prints its shares. `false` if
/// one is out of bounds.
pub(crate) fn measure(setup: &Setup, runs: usize, gbps: f64) -> Result<bool> {
    let mut command = Command::new(&setup.gpucr);
    command.args(["run", "--device", "soft", "--"]).arg(&setup.holder);
    let program = Program::start(command, setup, WRITTEN)?;
    let mut shares: [Vec<Share>; 3] = Default::default();
    for _ in 0..runs {
        for (protocol, shares) in PROTOCOLS.iter().zip(&mut shares) {
            shares.push(dump(&program, setup, protocol, gbps)?);
        }
    }
    program.finish(setup)?;

    println!(
        "Steps that a program with {} MiB, of which {} MiB change all the time, makes during a dump \
         that leaves it running, of those that it makes undisturbed; copies at {gbps} GB/s; medians \
         of {runs} runs by turns. The program needs little of the CPU, on which gpucr and the software \
         driver's hashing run too: on a GPU the device hashes.\n",
        setup.size >> 20,
        WRITTEN >> 20,
    );
    let mut within = true;
    let rows: Vec<_> = PROTOCOLS
        .iter()
        .zip(&shares)
        .map(|(&protocol, shares)| {
            let middle = |of: fn(&Share) -> f64| median(&shares.iter().map(of).collect::<Vec<_>>());
            let share = middle(|share| share.steps);
            let limit = match protocol {
                "stop" => format!("at most {:.0} %", MOST_STOPPED * 100.0),
                _ => format!("at least {:.0} %", LEAST * 100.0),
            };
            within &= if protocol == "stop" { share <= MOST_STOPPED } else { share >= LEAST };
            vec![
                protocol.to_owned(),
                format!("{:.2} s", middle(|share| share.total) / 1e3),
                format!("{:.2} s", middle(|share| share.stopped) / 1e3),
                format!("{:.0} %", share * 100.0),
                limit,
            ]
        })
        .collect();
    print_table(&["protocol", "dump", "stopped", "steps", "limit"], &rows);
    Ok(within)
}
