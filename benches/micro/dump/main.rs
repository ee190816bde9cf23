//! Dump and restore of a program on the software driver, with real CRIU, compared with the bare way: the
//! driver's own checkpoint and CRIU, on the same program started without gpucr, by turns.
//!
//! Then, how far a program gets while its memory is copied.
//!
//! Ends with exit status 1 if gpucr's own memory exceeds its limit, or the program gets too little done.

mod bare;
mod memory;
mod program;
mod progress;
mod way;

use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpucr_benches::{build, built, data, limits, machine, median, print_table, size};

use memory::Peak;
use program::Program;
use way::{Run, Setup, bytes_below, gpucr};

#[derive(Parser)]
struct Args {
    /// Bytes of device memory that the program holds
    #[arg(long, default_value = "2G", value_parser = size)]
    size: u64,
    /// Runs of each way, by turns
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Where images are made: a file system in memory, or the disk is measured too
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// Memory that gpucr itself may use, to which a hundredth of the device memory is added
    #[arg(long, default_value = "1G", value_parser = size)]
    memory_limit: u64,
    /// Bytes of device memory of the program that is watched while it is dumped
    #[arg(long, default_value = "256M", value_parser = size)]
    watched_size: u64,
    /// Rate of copies while it is watched, in GB/s
    #[arg(long, default_value_t = 0.05)]
    watched_gbps: f64,
    /// Watch it, and measure nothing else
    #[arg(long)]
    progress_only: bool,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// The memory of gpucr's own processes in one run.
struct Memory {
    dump: Peak,
    restore: Peak,
    bulk: u64,
}

fn phases(report: &serde_json::Value, prefix: &str) -> Vec<(String, f64)> {
    let phases = report["phases"].as_array().map_or(&[][..], Vec::as_slice);
    let phase = |phase: &serde_json::Value| {
        Some((format!("{prefix} {}", phase["name"].as_str()?), phase["ms"].as_f64()?))
    };
    phases.iter().filter_map(phase).collect()
}

fn with_gpucr(setup: &Setup) -> Result<(Run, Memory)> {
    let mut command = Command::new(&setup.gpucr);
    command.args(["run", "--device", "soft", "--"]).arg(&setup.holder);
    let mut program = Program::start(command, setup, 0)?;
    let image = setup.dir.join("image");

    let mut dump = Command::new(&setup.gpucr);
    dump.args(["dump", "--json", "--pid", &program.pid().to_string(), "-o"]).arg(&image);
    let (report, dump_peak) = gpucr(&mut dump, setup)?;
    program.ended()?;
    let number =
        |name: &str| report[name].as_f64().with_context(|| format!("{name} in the report"));
    let bulk = number("bulk_bytes")? as u64;
    ensure!(bulk >= setup.size, "only {bulk} bytes were saved as bulk memory");

    let before = program.output().len();
    let start = Instant::now();
    let mut restore = Command::new(&setup.gpucr);
    restore.args(["restore", "--detach", "--json"]).arg(&image);
    let watch = program.next_step(before, start);
    let (second, restore_peak) = gpucr(&mut restore, setup)?;
    let restore = watch.wait()?;
    let run = Run {
        stopped: number("stopped_ms")?,
        total: number("total_ms")?,
        restore,
        stored: bytes_below(&image)?,
        phases: [phases(&report, "dump"), phases(&second, "restore")].concat(),
    };
    program.finish(setup)?;
    std::fs::remove_dir_all(&image)?;
    Ok((run, Memory { dump: dump_peak, restore: restore_peak, bulk }))
}

fn middle(runs: &[Run], of: impl Fn(&Run) -> f64) -> f64 {
    median(&runs.iter().map(of).collect::<Vec<_>>())
}

fn row(name: &str, runs: &[Run], size: u64) -> Vec<String> {
    let seconds = |ms: f64| format!("{:.2} s", ms / 1e3);
    let rate = |ms: f64| format!("{:.2} GB/s", size as f64 / ms / 1e6);
    let (total, restore) = (middle(runs, |r| r.total), middle(runs, |r| r.restore));
    vec![
        name.to_owned(),
        seconds(middle(runs, |r| r.stopped)),
        seconds(total),
        rate(total),
        seconds(restore),
        rate(restore),
        format!("{:.0} MiB", middle(runs, |r| r.stored as f64) / f64::from(1 << 20)),
    ]
}

/// The phases that all runs have, in the order of the first, as medians.
fn print_phases(runs: &[Run]) {
    let Some(first) = runs.first() else { return };
    let of = |run: &Run, name: &str| {
        run.phases.iter().find(|(other, _)| other == name).map_or(0.0, |(_, ms)| *ms)
    };
    let row = |(name, _): &(String, f64)| {
        vec![name.clone(), format!("{:.1} ms", middle(runs, |run| of(run, name)))]
    };
    print_table(&["gpucr's phases", "time"], &first.phases.iter().map(row).collect::<Vec<_>>());
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    ensure!(args.size > 0 && args.runs > 0, "nothing to measure");
    let machine = machine();
    build(&["-p", "gpucr-benches", "--example", "holder"])?;
    let binaries = build(&["-p", "gpucr", "-p", "gpucr-intercept", "-p", "softcuda"])?;
    let dir = tempfile::tempdir_in(&args.dir)?;
    let setup = Setup {
        gpucr: built(&binaries, "gpucr")?,
        holder: built(&binaries, "examples/holder")?,
        driver: built(&binaries, "libsoftcuda.so")?,
        size: args.size,
        dir: dir.path().to_owned(),
    };
    if args.progress_only {
        println!("{machine}");
        return watch(&args, &setup);
    }
    let checkpoint = bare::Checkpoint::open(&setup.driver)?;

    let (mut ours, mut theirs, mut used) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.runs {
        let (run, memory) = with_gpucr(&setup)?;
        ours.push(run);
        used.push(memory);
        theirs.push(bare::run(&setup, &checkpoint)?);
    }

    println!("{machine}");
    println!(
        "A program with {} MiB of device memory (40 % bf16 weights, 20 % fp32, 20 % zeros, 20 % \
         repeated) on the software driver; images in {}; medians of {} runs by turns\n",
        args.size >> 20,
        args.dir.display(),
        args.runs
    );
    print_table(
        &["way", "stopped", "dump", "", "restore to next step", "", "image"],
        &[
            row("gpucr, zstd level 1", &ours, args.size),
            row("driver checkpoint + CRIU", &theirs, args.size),
        ],
    );
    println!();
    print_phases(&ours);
    println!();
    let sample = usize::try_from(args.size.min(256 << 20))?;
    limits::print(&data::mixture(sample), &mut vec![1; sample]);
    println!(
        "\ngpucr hashes, compresses, syncs and checks; the bare way does not. The software \
         driver copies device memory at the speed of host memory, a GPU's driver slower than that."
    );

    println!();
    let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20));
    let most = |of: fn(&Memory) -> u64| used.iter().map(of).max().unwrap_or(0);
    let limit = args.memory_limit + used.iter().map(|m| m.bulk).min().unwrap_or(0) / 100;
    let (dump, restore) = (most(|m| m.dump.own), most(|m| m.restore.own));
    let rows = [
        ("gpucr and watchdog, dump", dump, mib(limit)),
        ("gpucr and watchdog, restore", restore, mib(limit)),
        ("CRIU, dump", most(|m| m.dump.criu), "none".into()),
        ("VmHWM of gpucr, dump (with mapped device memory)", most(|m| m.dump.high), "none".into()),
    ];
    let rows: Vec<_> =
        rows.into_iter().map(|(name, bytes, limit)| vec![name.into(), mib(bytes), limit]).collect();
    print_table(&["memory, most in any run", "peak", "limit"], &rows);
    if dump.max(restore) > limit {
        println!("\nLIMIT EXCEEDED: gpucr used {} of its own memory", mib(dump.max(restore)));
        return Ok(ExitCode::FAILURE);
    }
    println!("\nwithin the limit\n");
    watch(&args, &setup)
}

/// Measures how far a program gets during a dump.
fn watch(args: &Args, setup: &Setup) -> Result<ExitCode> {
    let setup = Setup { size: args.watched_size, ..setup.clone() };
    if progress::measure(&setup, args.runs, args.watched_gbps)? {
        println!("\nwithin the limits");
        return Ok(ExitCode::SUCCESS);
    }
    println!("\nLIMIT BROKEN: see the last column");
    Ok(ExitCode::FAILURE)
}
