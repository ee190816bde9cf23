//! How much of CRIU's page files is stored once when one program is dumped several times, for ways
//! to cut these files. Needs root and CRIU, as `gpucr check` tells.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use gpucr_benches::{build, built, machine, median, print_table};
use gpucr_core::criu::Criu;
use gpucr_core::image::{Cut, FILE_CUT, ImageReader};
use gpucr_core::store::{ChunkId, ChunkWriter, Compression};

#[derive(Parser)]
struct Args {
    /// Dumps of each program
    #[arg(long, default_value_t = 3)]
    dumps: usize,
    /// Seconds from one dump to the next
    #[arg(long, default_value_t = 3)]
    pause: u64,
    /// Where images are made
    #[arg(long, default_value = "/dev/shm")]
    dir: PathBuf,
    /// Workloads of tests/ that are dumped, on the software driver
    #[arg(long, value_delimiter = ',', default_value = "sgd,threads,small-allocs")]
    workloads: Vec<String>,
    /// Given by cargo
    #[arg(long, hide = true)]
    bench: bool,
}

/// A program with a heap of small objects, some of which change and grow.
const PYTHON: &str = "
import random, time
data = {i: [random.random() for _ in range(8)] for i in range(60000)}
text = ['line %d of text' % i for i in range(200000)]
n = len(data)
while True:
    for _ in range(300):
        data[random.randrange(n)] = [random.random() for _ in range(8)]
    data[n] = [random.random() for _ in range(500)]
    n += 1
    time.sleep(0.05)
";

/// A program that is killed in the end.
struct Program(Child);

impl Program {
    fn start(mut command: Command) -> Result<Self> {
        // A session of its own, as a daemon has: CRIU cannot save half a session.
        let mut session = Command::new("setsid");
        session.arg(command.get_program()).args(command.get_args());
        session.envs(command.get_envs().filter_map(|(key, value)| Some((key, value?))));
        command = session;
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let program = Self(command.spawn().context("the program starts")?);
        sleep(Duration::from_secs(4));
        Ok(program)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Fails when it has ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The page files in a directory of CRIU's, one after the other.
fn pages(dir: &Path) -> Result<Vec<u8>> {
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    names.retain(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("pages-"))
    });
    names.sort();
    let mut bytes = Vec::new();
    for name in names {
        bytes.extend(std::fs::read(name)?);
    }
    Ok(bytes)
}

/// Dumps a workload several times and returns its pages.
fn workload(args: &Args, bin: &Path, dir: &Path, name: &str) -> Result<Vec<Vec<u8>>> {
    let gpucr = built(bin, "gpucr")?;
    let mut command = Command::new(&gpucr);
    command.args(["run", "--device", "soft", "--"]).arg(built(bin, "workload")?);
    command.args([name, "--size", "medium", "--steps", "1000000", "--step-delay-ms", "5"]);
    let program = Program::start(command)?;
    (0..args.dumps)
        .map(|number| {
            let image = dir.join(format!("image-{number}"));
            let mut dump = Command::new(&gpucr);
            dump.args(["dump", "--leave-running", "--pid", &program.0.id().to_string(), "-o"]);
            let done = dump.arg(&image).stdin(Stdio::null()).output()?;
            ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            let files = dir.join(format!("files-{number}"));
            std::fs::create_dir(&files)?;
            let to = File::open(&files)?;
            let image = ImageReader::open(&image)?;
            for file in &image.manifest().criu.files {
                image.extract_file(file, to.as_fd())?;
            }
            sleep(Duration::from_secs(args.pause));
            pages(&files)
        })
        .collect()
}

/// Dumps a Python program several times, by CRIU alone, and returns its pages.
fn python(args: &Args, dir: &Path) -> Result<Vec<Vec<u8>>> {
    let mut command = Command::new("python3");
    command.args(["-c", PYTHON]);
    let program = Program::start(command)?;
    (0..args.dumps)
        .map(|number| {
            let files = dir.join(format!("files-{number}"));
            std::fs::create_dir(&files)?;
            let mut criu = Command::new(Criu::find(None)?.path());
            criu.args(["dump", "--leave-running", "-t", &program.0.id().to_string(), "-D"]);
            let done = criu.arg(&files).stdin(Stdio::null()).output()?;
            ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
            sleep(Duration::from_secs(args.pause));
            pages(&files)
        })
        .collect()
}

/// One row of the table: the dumps, stored in one store by this cut. The bytes that the later dumps
/// add are the mean of all but the first.
fn row(name: &str, cut: Cut, dumps: &[Vec<u8>], dir: &Path) -> Result<Vec<String>> {
    let (mut known, mut chunks, mut plain) = (HashSet::new(), Vec::new(), Vec::new());
    let (mut stored, mut seconds) = (Vec::new(), Vec::new());
    for dump in dumps {
        // What a dump adds is measured as a store of its own with the chunks that are new.
        let place = tempfile::tempdir_in(dir)?;
        let writer = ChunkWriter::create(place.path(), Compression::Level(1))?;
        let (mut number, mut new) = (0, 0);
        let start = Instant::now();
        for piece in cut.pieces(dump) {
            number += 1;
            if known.insert(ChunkId::of(piece)) {
                new += piece.len();
                writer.put(piece)?;
            }
        }
        stored.push(writer.finish()?.stored_bytes as f64);
        seconds.push(start.elapsed().as_secs_f64());
        chunks.push(number as f64);
        plain.push(100.0 * new as f64 / dump.len() as f64);
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    Ok(vec![
        name.to_owned(),
        format!("{:.0}", median(&chunks)),
        format!("{:.1} %", 100.0 - mean(&plain[1..])),
        format!("{:.2} MiB", stored[0] / f64::from(1 << 20)),
        format!("{:.2} MiB", mean(&stored[1..]) / f64::from(1 << 20)),
        format!("{:.0} ms", seconds[0] * 1e3),
    ])
}

fn fixed(len: usize) -> Cut {
    Cut { min: len, mark: 4096, max: len }
}

fn by_marks(min: usize, mark: usize, max: usize) -> Cut {
    Cut { min: min << 10, mark: mark << 10, max: max << 10 }
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.dumps > 1, "one dump shares nothing");
    let machine = machine();
    let bin =
        build(&["-p", "gpucr", "-p", "gpucr-intercept", "-p", "softcuda", "-p", "gpucr-tests"])?;
    println!("{machine}");
    println!("{} dumps of each program, {} s apart, zstd level 1", args.dumps, args.pause);
    let mut programs: Vec<(&str, Vec<Vec<u8>>)> = Vec::new();
    for name in &args.workloads {
        let dir = tempfile::tempdir_in(&args.dir)?;
        programs.push((name, workload(&args, &bin, dir.path(), name)?));
    }
    let dir = tempfile::tempdir_in(&args.dir)?;
    programs.push(("a Python program", python(&args, dir.path())?));

    let kib = |bytes: usize| bytes >> 10;
    let chosen = format!(
        "marks, {} to {} KiB, {} apart (chosen)",
        kib(FILE_CUT.min),
        kib(FILE_CUT.max),
        kib(FILE_CUT.mark)
    );
    let ways = [
        ("each page", fixed(4 << 10)),
        ("every 16 KiB", fixed(16 << 10)),
        ("every 64 KiB", fixed(64 << 10)),
        ("every 2 MiB", fixed(2 << 20)),
        ("marks, 4 to 64 KiB, 16 apart", by_marks(4, 16, 64)),
        (chosen.as_str(), FILE_CUT),
        ("marks, 16 to 256 KiB, 64 apart", by_marks(16, 64, 256)),
        ("marks, 64 to 1024 KiB, 256 apart", by_marks(64, 256, 1024)),
    ];
    for (name, dumps) in &programs {
        println!("\n{name}: {:.1} MiB of pages\n", dumps[0].len() as f64 / f64::from(1 << 20));
        let rows = ways
            .iter()
            .map(|(name, cut)| row(name, *cut, dumps, dir.path()))
            .collect::<Result<Vec<_>>>()?;
        let header =
            ["cut", "chunks", "stored once", "first dump", "each further", "time of the first"];
        print_table(&header, &rows);
    }
    Ok(())
}
