//! How much memory writing, reading and opening take: each in a process of its own, whose peak of
//! resident memory is asked for.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use gpucr_benches::data::{PIECE, fill_piece};
use gpucr_benches::median;
use gpucr_core::image::{
    Block, BlockKind, Counts, CriuImage, CudaProcess, Driver, DriverKind, ImageReader, ImageWriter,
    Manifest, Process, Protocol, Stdio,
};
use gpucr_core::store::{ChunkId, ChunkReader, ChunkWriter, Compression, MAX_CHUNK};
use rayon::prelude::*;

use crate::bound::Bound;

/// Measures in `dir`: a store of `size` bytes, and an image of `image` bytes of device memory.
pub(crate) fn bounds(dir: &Path, size: u64, image: u64, runs: usize) -> Result<Vec<Bound>> {
    let dir = tempfile::tempdir_in(dir)?;
    let run = |what: &str, name: &str, size: u64| start(what, &dir.path().join(name), size);
    let most =
        |what: &str, peak: f64| Bound::below(format!("memory for {what}"), 512.0, peak, "MiB");
    let (mib, gib) = (size >> 20, image >> 30);
    let (_, write) = run("write", "store", size)?;
    let (_, read) = run("read", "store", size)?;
    let mut bounds =
        vec![most(&format!("writing {mib} MiB"), write), most(&format!("reading {mib} MiB"), read)];
    let (commit, write) = run("image", "image", image)?;
    bounds.push(most(&format!("writing an image of {gib} GiB"), write));
    bounds.push(Bound::below(format!("committing an image of {gib} GiB"), 100.0, commit, "ms"));
    let (_, read) = run("verify", "image", image)?;
    bounds.push(most(&format!("reading an image of {gib} GiB"), read));
    let opened: Vec<_> =
        (0..runs.max(3)).map(|_| run("open", "image", image)).collect::<Result<_>>()?;
    let (times, peaks): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    let what = format!("opening an image of {gib} GiB");
    bounds.push(Bound::below(what.clone(), 50.0, median(&times), "ms"));
    bounds.push(Bound::below(format!("memory for {what}"), 64.0, median(&peaks), "MiB"));
    Ok(bounds)
}

/// Runs this program again as [`child`]; its milliseconds and the MiB of its peak.
fn start(what: &str, place: &Path, size: u64) -> Result<(f64, f64)> {
    let output = Command::new(std::env::current_exe()?)
        .args(["--child", what])
        .arg(place)
        .arg(size.to_string())
        .output()?;
    ensure!(output.status.success(), "{what}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout)?;
    let (ms, peak) = text.trim().split_once(' ').context("two numbers")?;
    Ok((ms.parse()?, peak.parse()?))
}

/// One process: does what its first argument says, with the place and the size that follow, and
/// prints its milliseconds (of an image those of its commit) and the MiB of its peak of resident memory.
pub(crate) fn child(args: &[String]) -> Result<()> {
    let [what, place, size] = args else { bail!("three arguments") };
    let (place, size): (&Path, u64) = (place.as_ref(), size.parse()?);
    let mut start = Instant::now();
    match what.as_str() {
        "write" => write(place, size)?,
        "read" => {
            let reader = ChunkReader::open(place)?;
            let damage = reader.verify();
            ensure!(damage.is_empty(), "{} chunks are damaged", damage.len());
        }
        "image" => start = write_image(place, size)?,
        "open" => drop(ImageReader::open(place)?),
        "verify" => {
            let damage = ImageReader::open(place)?.verify();
            ensure!(damage.is_empty(), "{} chunks are damaged", damage.len());
        }
        _ => bail!("unknown: {what}"),
    }
    let ms = start.elapsed().as_secs_f64() * 1e3;
    let status = std::fs::read_to_string("/proc/self/status")?;
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).context("VmHWM")?;
    let kib: f64 = peak.trim().trim_end_matches("kB").trim().parse()?;
    println!("{ms} {}", kib / 1024.0);
    Ok(())
}

/// Writes the mixture, of which no more is in memory than each thread works on.
fn write(place: &Path, size: u64) -> Result<()> {
    std::fs::create_dir(place)?;
    let writer = ChunkWriter::create(place, Compression::Level(1))?;
    (0..size.div_ceil(PIECE as u64)).into_par_iter().try_for_each_init(
        || vec![0; PIECE],
        |piece, number| {
            fill_piece(piece, number);
            piece.chunks(MAX_CHUNK).try_for_each(|chunk| writer.put(chunk).map(drop))
        },
    )?;
    writer.finish()?;
    Ok(())
}

/// Writes an image with so many bytes of device memory in chunks that are all different, and are
/// nearly all zeros so that they take no space. Gives the moment when its commit began.
fn write_image(place: &Path, size: u64) -> Result<Instant> {
    let writer = ImageWriter::create(place, Compression::Level(1))?;
    let number_of_chunks = size.div_ceil(MAX_CHUNK as u64);
    let chunks = (0..number_of_chunks)
        .into_par_iter()
        .map_init(
            || vec![0; MAX_CHUNK],
            |chunk, number| {
                chunk[..8].copy_from_slice(&(number + 1).to_le_bytes());
                writer.chunks().put(chunk)
            },
        )
        .collect::<Result<Vec<_>, _>>()?;
    let manifest = manifest(number_of_chunks * MAX_CHUNK as u64, chunks);
    let start = Instant::now();
    writer.commit(&manifest)?;
    Ok(start)
}

/// What the image of a program says that has one block of device memory.
pub(crate) fn manifest(size: u64, chunks: Vec<ChunkId>) -> Manifest {
    let block = Block {
        id: 1,
        device: [1; 16],
        size,
        kind: BlockKind::Heap,
        address: 0x7000_0000_0000,
        allocations: 1,
        chunks,
    };
    let cuda = CudaProcess { blocks: vec![block], shim: None, counts: Counts::default() };
    let process = Process {
        listeners: Vec::new(),
        pid: 42,
        ppid: 1,
        command: vec!["program".into()],
        exe: "/usr/bin/program".into(),
        cuda: Some(cuda),
        stdio: [Stdio::DevNull, Stdio::DevNull, Stdio::DevNull],
    };
    Manifest {
        created: 0,
        gpucr_version: "0".into(),
        hostname: "host".into(),
        kernel: "0".into(),
        protocol: Protocol::Stop,
        driver: Driver {
            path: "/usr/lib/libcuda.so.1".into(),
            version: 13000,
            kind: DriverKind::Soft,
            file_hash: [0; 32],
        },
        devices: Vec::new(),
        processes: vec![process],
        criu: CriuImage { version: "4.2".into(), files: Vec::new(), options: Vec::new() },
        carried: Vec::new(),
        required: Vec::new(),
        bulk_bytes: size,
        phases: Vec::new(),
        stopped_ms: 0.0,
        sections: Vec::new(),
    }
}
