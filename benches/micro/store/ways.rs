//! The ways to put the data into files and to get it back.

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Result, ensure};
use gpucr_core::store::{ChunkId, ChunkReader, ChunkWriter, Compression, MAX_CHUNK};
use rayon::prelude::*;

pub(crate) const LEVEL_1: &str = "store, level 1";
pub(crate) const RAW: &str = "store, raw";
pub(crate) const TAR: &str = "tar | zstd -1 -T0";
pub(crate) const CP: &str = "cp --reflink=never";
pub(crate) const RESTIC: &str = "restic";

/// One way. Seconds of each run; bytes on the file system.
pub(crate) struct Way {
    pub(crate) name: &'static str,
    kind: Kind,
    pub(crate) write: Vec<f64>,
    pub(crate) read: Vec<f64>,
    pub(crate) stored: u64,
}

enum Kind {
    Store(Compression),
    /// Commands for `sh`.
    Shell {
        /// Before each run; its time does not count.
        prepare: &'static str,
        /// From the file `plain` to whatever begins with `stored`.
        write: &'static str,
        /// From there to the file `back`; empty if there is nothing to learn from it.
        read: &'static str,
    },
}

/// All ways whose commands are there.
pub(crate) fn all() -> Vec<Way> {
    let new = |name, kind| Way { name, kind, write: Vec::new(), read: Vec::new(), stored: 0 };
    let shell = |name, prepare, write, read| new(name, Kind::Shell { prepare, write, read });
    let mut ways = vec![
        new(LEVEL_1, Kind::Store(Compression::Level(1))),
        new(RAW, Kind::Store(Compression::None)),
    ];
    if exists("tar") && exists("zstd") {
        ways.push(shell(
            TAR,
            "",
            "tar -cf - plain | zstd -q -1 -T0 -o stored",
            "mkdir out; zstd -q -d -c stored | tar -C out -xf -; mv out/plain back; rmdir out",
        ));
        let synced = "tar -cf - plain | zstd -q -1 -T0 -o stored; sync stored";
        ways.push(shell("tar | zstd -1 -T0, then sync", "", synced, ""));
    }
    if exists("cp") {
        ways.push(shell(CP, "", "cp --reflink=never plain stored", ""));
        let synced = "cp --reflink=never plain stored; sync stored";
        ways.push(shell("cp --reflink=never, then sync", "", synced, ""));
    }
    if exists("restic") {
        ways.push(shell(
            RESTIC,
            "restic -q init -r stored",
            "restic -q --no-cache -r stored backup plain",
            "restic -q --no-cache -r stored restore latest --target out; \
             find out -type f -exec mv {} back ';'; rm -r out",
        ));
    }
    ways
}

impl Way {
    /// One run; `plain` is the data, which is in the file `dir/plain` as well.
    pub(crate) fn run(&mut self, plain: &[u8], back: &mut [u8], dir: &Path) -> Result<()> {
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
            Kind::Shell { prepare, write, read } => {
                shell(dir, prepare)?;
                self.write.push(shell(dir, write)?);
                self.stored = bytes_below(&dir.join("stored"))?;
                if !read.is_empty() {
                    self.read.push(shell(dir, read)?);
                    let size = std::fs::metadata(dir.join("back"))?.len();
                    ensure!(size == plain.len() as u64, "{}: something else came back", self.name);
                }
                shell(dir, "rm -rf stored back")?;
            }
        }
        Ok(())
    }
}

/// Writes the data, changes a little in a hundredth of its chunks, and writes it again next to what is
/// there. Returns the bytes that this took; the data is as before.
pub(crate) fn second_dump(plain: &mut [u8], dir: &Path) -> Result<f64> {
    let change = |plain: &mut [u8]| {
        let chunks = plain.len() / MAX_CHUNK;
        // By 101, so that the data of all kinds has its share.
        for chunk in plain.chunks_mut(MAX_CHUNK).step_by(101).take(chunks / 100) {
            chunk[chunk.len() / 2] ^= 0x55;
        }
    };
    let known: HashSet<ChunkId> = plain.par_chunks(MAX_CHUNK).map(ChunkId::of).collect();
    change(plain);
    let place = tempfile::tempdir_in(dir)?;
    let writer = ChunkWriter::create(place.path(), Compression::Level(1))?;
    let written = plain.par_chunks(MAX_CHUNK).try_for_each(|chunk| {
        if known.contains(&ChunkId::of(chunk)) { Ok(()) } else { writer.put(chunk).map(drop) }
    });
    change(plain);
    written?;
    Ok(writer.finish()?.stored_bytes as f64)
}

/// Runs a command in `dir` and tells how many seconds it took.
fn shell(dir: &Path, command: &str) -> Result<f64> {
    let start = Instant::now();
    let status = Command::new("sh")
        .current_dir(dir)
        .args(["-ec", command])
        .env("RESTIC_PASSWORD", "benchmark")
        .stdin(Stdio::null())
        .status()?;
    ensure!(status.success(), "`{command}` failed");
    Ok(start.elapsed().as_secs_f64())
}

/// Bytes of a file, or of all files below a directory.
fn bytes_below(path: &Path) -> Result<u64> {
    let meta = std::fs::symlink_metadata(path)?;
    if !meta.is_dir() {
        return Ok(meta.len());
    }
    std::fs::read_dir(path)?.map(|entry| bytes_below(&entry?.path())).sum()
}

/// Whether a command is installed.
pub(crate) fn exists(command: &str) -> bool {
    let mut asked = Command::new(command);
    let version = if command == "restic" { "version" } else { "--version" };
    let status = asked.arg(version).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}
