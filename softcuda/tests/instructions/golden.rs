//! What a GPU made of the table: a file of results by name.
//!
//! The file is zstd over lines of text and the bytes that they announce:
//!
//!     golden 1 <device>
//!     <fingerprint> <length> <name>
//!     <length bytes of results>
//!
//! or, where the driver refused a program, `<fingerprint> refused <name>` and no bytes. The
//! fingerprint is FNV-1a over the PTX, the inputs and the launches: a result belongs to one program only.

use super::driver::Driver;
use super::job::{Argument, Job, Picture, Reading};
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};

pub(crate) struct Golden {
    /// The device and driver that made it.
    pub(crate) device: String,
    results: HashMap<String, (u64, Option<Vec<u8>>)>,
}

pub(crate) enum Found<'a> {
    Result(&'a [u8]),
    /// The driver refused the program.
    Refused,
    /// There is no result, or it is one of another program of that name.
    Missing,
}

impl Golden {
    /// # Errors
    /// When the file cannot be read or is none of this kind.
    pub(crate) fn read(path: &Path) -> io::Result<Golden> {
        let mut lines = BufReader::new(zstd::Decoder::new(std::fs::File::open(path)?)?);
        let bad = |text: &str| io::Error::other(format!("bad line in golden data: {text}"));
        let mut line = String::new();
        lines.read_line(&mut line)?;
        let device =
            line.trim_end().strip_prefix("golden 1 ").ok_or_else(|| bad(&line))?.to_owned();
        let mut results = HashMap::new();
        loop {
            line.clear();
            if lines.read_line(&mut line)? == 0 {
                return Ok(Golden { device, results });
            }
            // Names may end in spaces.
            let mut parts = line.trim_end_matches('\n').splitn(3, ' ');
            let (Some(print), Some(length), Some(name)) =
                (parts.next(), parts.next(), parts.next())
            else {
                return Err(bad(&line));
            };
            let print = u64::from_str_radix(print, 16).map_err(|_| bad(&line))?;
            let mut bytes = None;
            if length != "refused" {
                let mut found = vec![0; length.parse().map_err(|_| bad(&line))?];
                lines.read_exact(&mut found)?;
                bytes = Some(found);
            }
            results.insert(name.to_owned(), (print, bytes));
        }
    }

    pub(crate) fn find(&self, job: &Job) -> Found<'_> {
        match self.results.get(&job.name) {
            Some((print, result)) if *print == fingerprint(job) => match result {
                Some(bytes) => Found::Result(bytes),
                None => Found::Refused,
            },
            _ => Found::Missing,
        }
    }
}

/// The files of golden data in the repository.
#[allow(dead_code)]
pub(crate) fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let entries = std::fs::read_dir(folder).expect("golden data").flatten();
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    files.sort();
    assert!(!files.is_empty(), "there is golden data");
    files
}

/// Runs all jobs and writes the file, and calls `each` with every result; the names of the refused
/// ones, with the reason.
///
/// # Errors
/// When the file cannot be written.
#[allow(dead_code)]
pub(crate) fn write(
    driver: &Driver,
    jobs: &[Job],
    path: &Path,
    mut each: impl FnMut(&Job, &[u8]),
) -> io::Result<Vec<String>> {
    let mut out = zstd::Encoder::new(std::fs::File::create(path)?, 19)?;
    writeln!(out, "golden 1 {}", driver.name)?;
    let mut refused = Vec::new();
    for job in jobs {
        let print = fingerprint(job);
        match driver.run(job) {
            Ok(bytes) => {
                writeln!(out, "{print:x} {} {}", bytes.len(), job.name)?;
                out.write_all(&bytes)?;
                each(job, &bytes);
            }
            Err(reason) => {
                writeln!(out, "{print:x} refused {}", job.name)?;
                refused.push(format!("{}: {reason}", job.name));
            }
        }
    }
    out.finish()?.sync_all()?;
    Ok(refused)
}

fn fingerprint(job: &Job) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    add(job.ptx.as_bytes());
    job.buffers.iter().for_each(|buffer| add(buffer));
    for picture in &job.pictures {
        let Picture { shape, format, channels, bytes, reading } = picture;
        add(format!("{shape:?} {format} {channels}").as_bytes());
        add(bytes);
        let Reading { beyond, filter, flags, level_filter, bias, levels, border, .. } = reading;
        add(format!("{beyond:?} {filter} {flags} {level_filter} {bias} {levels:?} {border:?}")
            .as_bytes());
    }
    for launch in &job.launches {
        add(launch.kernel.as_bytes());
        let (grid, block, shared) = launch.shape;
        [grid, block, shared].iter().for_each(|n| add(&n.to_le_bytes()));
        for argument in &launch.arguments {
            let bits = match *argument {
                Argument::Buffer(number)
                | Argument::Texture(number)
                | Argument::Surface(number) => number as u64,
                Argument::U32(value) => value.into(),
                Argument::F32(value) => value.to_bits().into(),
            };
            add(&bits.to_le_bytes());
        }
    }
    hash
}
