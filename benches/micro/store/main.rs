//! How fast the chunk store takes and gives bytes, beside the commands that one would use instead,
//! and beside what the machine can do: copying memory and hashing.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpucr_benches::{data, limits, machine, median, print_table, size};
use gpucr_core::store::{ChunkId, ChunkReader, ChunkWriter, Compression, MAX_CHUNK};
use rayon::prelude::*;

#[derive(Parser)]
struct Args {
    /// Bytes of data
    #[arg(long, default_value = "1G", value_parser = size)]
    size: u64,
    /// Runs of each way, by turns
    #[arg(long, default_value_t = 3)]
    runs: usize,
    /// Where stores and files are made: a file system in memory, or the disk is measured
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// One way to put the data into files and to get it back.
struct Way {
    name: &'static str,
    kind: Kind,
    /// Seconds of each run.
    write: Vec<f64>,
    read: Vec<f64>,
    stored: u64,
}

enum Kind {
    Store(Compression),
    /// Commands for `sh`: from file `plain` to `stored`, and from there to `back`.
    Shell(&'static str, &'static str),
}

impl Way {
    fn new(name: &'static str, kind: Kind) -> Self {
        Self { name, kind, write: Vec::new(), read: Vec::new(), stored: 0 }
    }

    /// One run; `plain` is the data, which is in the file `dir/plain` as well.
    fn run(&mut self, plain: &[u8], back: &mut [u8], dir: &Path) -> Result<()> {
        match self.kind {
            Kind::Store(compression) => {
                let place = tempfile::tempdir_in(dir)?;
                let start = Instant::now();
                let writer = ChunkWriter::create(place.path(), compression)?;
                let ids: Vec<ChunkId> = plain
                    .par_chunks(MAX_CHUNK)
                    .map(|chunk| writer.put(chunk))
                    .collect::<Result<_, _>>()?;
                self.stored = writer.finish()?.stored_bytes;
                self.write.push(start.elapsed().as_secs_f64());

                let start = Instant::now();
                let reader = ChunkReader::open(place.path())?;
                back.par_chunks_mut(MAX_CHUNK)
                    .zip(&ids)
                    .try_for_each(|(chunk, id)| reader.get(id, chunk))?;
                self.read.push(start.elapsed().as_secs_f64());
                ensure!(plain == back, "the store gave back something else");
            }
            Kind::Shell(write, read) => {
                self.write.push(shell(dir, write)?);
                self.stored = std::fs::metadata(dir.join("stored"))?.len();
                self.read.push(shell(dir, read)?);
                ensure!(
                    std::fs::metadata(dir.join("back"))?.len() == plain.len() as u64,
                    "{} gave back something else",
                    self.name
                );
                std::fs::remove_file(dir.join("stored"))?;
                std::fs::remove_file(dir.join("back"))?;
            }
        }
        Ok(())
    }
}

/// Runs a command in `dir` and tells how many seconds it took.
fn shell(dir: &Path, command: &str) -> Result<f64> {
    let start = Instant::now();
    let status = Command::new("sh").current_dir(dir).args(["-ec", command]).status()?;
    ensure!(status.success(), "`{command}` failed");
    Ok(start.elapsed().as_secs_f64())
}

fn exists(command: &str) -> bool {
    let mut asked = Command::new(command);
    let status = asked.arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

fn main() -> Result<()> {
    let args = Args::parse();
    let machine = machine();
    let len = usize::try_from(args.size).context("the size fits in memory")?;
    ensure!(len > 0 && args.runs > 0, "nothing to measure");
    let dir = tempfile::tempdir_in(&args.dir)?;
    let plain = data::mixture(len);
    let mut back = vec![1u8; len];
    std::fs::write(dir.path().join("plain"), &plain)?;

    let mut ways = vec![
        Way::new("store, zstd level 1", Kind::Store(Compression::Level(1))),
        Way::new("store, raw", Kind::Store(Compression::None)),
    ];
    if exists("tar") && exists("zstd") {
        ways.push(Way::new(
            "tar | zstd -1 -T0",
            Kind::Shell(
                "tar -cf - plain | zstd -q -1 -T0 -o stored",
                "zstd -q -d -c stored | tar -xf - --transform=s/plain/back/",
            ),
        ));
    }
    if exists("cp") {
        ways.push(Way::new("cp", Kind::Shell("cp plain stored", "cp stored back")));
    }
    for _ in 0..args.runs {
        for way in &mut ways {
            way.run(&plain, &mut back, dir.path())?;
        }
    }

    println!("{machine}");
    println!(
        "{} MiB (40 % bf16 weights, 20 % fp32, 20 % zeros, 20 % repeated) in {}; medians of {} \
         runs by turns\n",
        len >> 20,
        args.dir.display(),
        args.runs
    );
    let rate = |seconds: &[f64]| format!("{:.2} GB/s", len as f64 / median(seconds) / 1e9);
    let rows: Vec<_> = ways
        .iter()
        .map(|way| {
            let stored = format!("{:.1} %", 100.0 * way.stored as f64 / len as f64);
            vec![way.name.to_owned(), rate(&way.write), rate(&way.read), stored]
        })
        .collect();
    print_table(&["way", "write", "read", "stored"], &rows);
    println!();
    limits::print(&plain, &mut back);
    println!(
        "\nThe store takes from memory and gives to memory, syncs what it writes and checks what it \
         reads. The commands copy files, so reading makes a new file; they sync and check nothing."
    );
    Ok(())
}
