//! The chunk store compared with the commands that one would use instead: time, size and memory, on the
//! same data in one run, by turns; and whether the bounds that gpucr sets itself are kept.
//!
//! Ends with exit status 1 if one is not.

mod bound;
mod chain;
mod memory;
mod ways;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpucr_benches::{data, limits, machine, median, print_table, size};

use bound::Bound;
use ways::{Way, exists};

#[derive(Parser)]
struct Args {
    /// Bytes of data
    #[arg(long, default_value = "4G", value_parser = size)]
    size: u64,
    /// Runs of each way, by turns
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Where stores and files are made: on a file system in memory, and on a disk
    #[arg(long, value_delimiter = ',', default_value = "/dev/shm,/var/tmp")]
    dirs: Vec<PathBuf>,
    /// Device memory of the image whose opening is measured
    #[arg(long, default_value = "139G", value_parser = size)]
    image: u64,
    /// Only print what this machine can do at best
    #[arg(long)]
    limits: bool,
    /// One of the processes whose memory is measured
    #[arg(long, hide = true, num_args = 3)]
    child: Option<Vec<String>>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    if let Some(child) = &args.child {
        memory::child(child)?;
        return Ok(ExitCode::SUCCESS);
    }
    let machine = machine();
    let len = usize::try_from(args.size).context("the size fits in memory")?;
    ensure!(len > 0 && args.runs > 0, "nothing to measure");
    println!("{machine}");
    println!(
        "{} MiB: 40 % bf16 weights, 20 % fp32 of an optimizer, 20 % zeros, 20 % repeated; medians \
         of {} runs by turns",
        len >> 20,
        args.runs
    );
    let mut plain = data::mixture(len);
    if args.limits {
        println!();
        limits::print(&plain, &mut vec![1; len]);
        return Ok(ExitCode::SUCCESS);
    }
    for name in ["tar", "zstd", "cp", "restic"] {
        if !exists(name) {
            println!("skipped, since it is not installed: {name}");
        }
    }
    let mut bounds = Vec::new();
    for dir in &args.dirs {
        side_by_side(&args, dir, &mut plain, &mut bounds)?;
    }
    let dir = args.dirs.first().context("a directory")?;
    bounds.push(chain::bound(dir, &mut plain, args.runs)?);
    drop(plain);
    bounds.extend(memory::bounds(dir, args.size, args.image, args.runs)?);

    println!();
    let met = bounds.iter().all(|bound| bound.met);
    let rows: Vec<_> = bounds
        .into_iter()
        .map(|b| vec![b.what, b.bound, b.measured, if b.met { "met" } else { "NOT MET" }.into()])
        .collect();
    print_table(&["asked of the store", "bound", "measured", ""], &rows);
    println!(
        "\nThe store takes from memory and gives to memory, syncs what it writes and checks what it \
         reads. The commands copy files that are in the page cache, so reading makes a new file; \
         they check nothing, and sync only where said."
    );
    Ok(if met { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Runs all ways in one directory, prints a table, and adds what is asked of them.
fn side_by_side(
    args: &Args,
    dir: &std::path::Path,
    plain: &mut [u8],
    bounds: &mut Vec<Bound>,
) -> Result<()> {
    let place = tempfile::tempdir_in(dir)?;
    std::fs::write(place.path().join("plain"), &*plain)?;
    let mut back = vec![1u8; plain.len()];
    let mut ways = ways::all();
    let mut second = Vec::new();
    for _ in 0..args.runs {
        for way in &mut ways {
            way.run(plain, &mut back, place.path())?;
        }
        second.push(ways::second_dump(plain, place.path())?);
    }

    let rate = |seconds: &[f64]| match seconds {
        [] => "-".to_owned(),
        seconds => format!("{:.2} GB/s", plain.len() as f64 / median(seconds) / 1e9),
    };
    let share = |stored: u64| 100.0 * stored as f64 / plain.len() as f64;
    println!("\nin {}\n", dir.display());
    let row = |way: &Way| {
        let stored = format!("{:.1} %", share(way.stored));
        vec![way.name.to_owned(), rate(&way.write), rate(&way.read), stored]
    };
    print_table(&["way", "write", "read", "stored"], &ways.iter().map(row).collect::<Vec<_>>());

    let way = |name| ways.iter().find(|way| way.name == name);
    let here = |what: &str| format!("{}: {what}", dir.display());
    let (Some(level1), Some(raw)) = (way(ways::LEVEL_1), way(ways::RAW)) else { return Ok(()) };
    let faster = |ours: &[f64], theirs: &[f64]| median(theirs) / median(ours);
    if let Some(tar) = way(ways::TAR) {
        bounds.extend([
            Bound::at_least(
                here("write at level 1, by tar | zstd"),
                1.5,
                faster(&level1.write, &tar.write),
            ),
            Bound::below(
                here("size, of tar | zstd's"),
                100.0,
                100.0 * level1.stored as f64 / tar.stored as f64,
                "%",
            ),
            Bound::at_least(here("read, by zstd -d | tar x"), 2.0, faster(&level1.read, &tar.read)),
        ]);
    }
    if let Some(cp) = way(ways::CP) {
        bounds.push(Bound::at_least(here("write raw, by cp"), 0.8, faster(&raw.write, &cp.write)));
    }
    if let Some(restic) = way(ways::RESTIC) {
        let write = faster(&level1.write, &restic.write);
        let read = faster(&level1.read, &restic.read);
        bounds.push(Bound::at_least(here("write, by restic"), 1.0, write));
        bounds.push(Bound::at_least(here("read, by restic"), 1.0, read));
    }
    let second = 100.0 * median(&second) / level1.stored as f64;
    bounds.push(Bound::below(here("second dump, of the first's bytes"), 1.5, second, "%"));
    Ok(())
}
