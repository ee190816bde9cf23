//! The mappings of processes with their flags, as `/proc/PID/smaps` has them, without what that costs.
//!
//! To print `smaps` the kernel counts all pages of the process: some 5 ms for each GiB of small pages, for which a
//! program may be stopped, or kept from changing its mappings. Nothing else prints their flags. So here the lines are
//! those of `/proc/PID/maps`, and the flags come from a program that the kernel runs over the mappings; where it cannot
//! run, or does not agree with the lines, or has flags that are not known by name, `smaps` is read.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;

use rustix::fs::MemfdFlags;

use self::examples::Examples;
use self::iterator::{Flags, Program};
use self::names::{Names, Sample};

mod examples;
mod iterator;
mod names;
mod types;

/// Set to anything, `smaps` is read, for tests and measurements.
const ENV_SMAPS: &str = "GPUCR_READ_SMAPS";
/// How often mappings are listed of a process that changes them meanwhile.
const ATTEMPTS: usize = 3;
/// From here on addresses are the kernel's.
const KERNEL: u64 = 1 << 63;

/// What lists mappings on this host.
#[derive(Debug)]
struct Lister {
    program: Program,
    names: Names,
}

static LISTER: OnceLock<Option<Lister>> = OnceLock::new();

/// Gets ready to list mappings, which takes some milliseconds the first time.
pub(crate) fn prepare() {
    lister();
}

/// What `/proc/PID/smaps` has of each mapping in its first line and the line `VmFlags`.
///
/// # Errors
/// The process has ended, or must not be looked at.
pub(crate) fn read(pid: i32) -> io::Result<Vec<u8>> {
    match listed(pid)? {
        Some(text) => Ok(text),
        None => std::fs::read(format!("/proc/{pid}/smaps")),
    }
}

/// A file with what [`read`] reads, or `smaps` itself.
///
/// # Errors
/// The process has ended, must not be looked at, or no file can be made.
pub(crate) fn open(pid: i32) -> io::Result<OwnedFd> {
    let Some(text) = listed(pid)? else {
        return Ok(File::open(format!("/proc/{pid}/smaps"))?.into());
    };
    let mut file = File::from(rustix::fs::memfd_create("gpucr-smaps", MemfdFlags::CLOEXEC)?);
    file.write_all(&text)?;
    file.rewind()?;
    Ok(file.into())
}

/// `None` if `smaps` is to be read.
fn listed(pid: i32) -> io::Result<Option<Vec<u8>>> {
    let Some(lister) = lister() else { return Ok(None) };
    for _ in 0..ATTEMPTS {
        let maps = std::fs::read(format!("/proc/{pid}/maps"))?;
        let flags = match lister.program.mappings(pid) {
            Ok(flags) => flags,
            Err(error) => {
                tracing::debug!(%error, pid, "mappings are read with their pages");
                return Ok(None);
            }
        };
        match lister.names.beside(&maps, &flags) {
            Ok(text) => return Ok(Some(text)),
            Err(Unlisted::Changed) => {}
            Err(Unlisted::Unknown(bits)) => {
                tracing::debug!(
                    bits = format!("{bits:#x}"),
                    pid,
                    "mappings are read with their pages"
                );
                return Ok(None);
            }
        }
    }
    Ok(None)
}

/// Why mappings cannot be listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unlisted {
    /// Lines and flags are not of the same mappings.
    Changed,
    /// One has these flags, of which not all names are known.
    Unknown(u64),
}

fn lister() -> Option<&'static Lister> {
    let made = LISTER.get_or_init(|| {
        if std::env::var_os(ENV_SMAPS).is_some() {
            return None;
        }
        Lister::make()
            .inspect_err(|error| tracing::debug!(%error, "mappings are read with their pages"))
            .ok()
    });
    made.as_ref()
}

impl Lister {
    fn make() -> io::Result<Self> {
        let program = Program::load()?;
        let _examples = Examples::make();
        let own = std::process::id() as i32;
        let before = program.mappings(own)?;
        let smaps = std::fs::read("/proc/self/smaps")?;
        let after = program.mappings(own)?;
        // Other threads change mappings too.
        let lasts = |flags: &Flags| iterator::at(&after, &flags.addresses) == Some(flags);
        let lasting: Vec<Flags> = before.into_iter().filter(lasts).collect();
        let smaps = String::from_utf8_lossy(&smaps);
        Ok(Self { program, names: Names::learn(&samples(&smaps, &lasting)) })
    }
}

/// The mappings that are both in a file `smaps` and among these, which are in the order of their addresses.
fn samples<'a>(smaps: &'a str, flags: &[Flags]) -> Vec<Sample<'a>> {
    let (mut samples, mut current) = (Vec::new(), None);
    for line in smaps.lines() {
        if let Some(names) = line.strip_prefix("VmFlags:") {
            let bits = current.take().and_then(|range| Some(iterator::at(flags, &range)?.bits));
            let names = names.split_ascii_whitespace().collect();
            samples.extend(bits.map(|bits| Sample { bits, names }));
        } else if let Some(range) = addresses(line) {
            current = Some(range);
        }
    }
    samples
}

impl Names {
    /// The lines of a file `maps`, and behind each the flags of the mapping by their names.
    fn beside(&self, maps: &[u8], flags: &[Flags]) -> Result<Vec<u8>, Unlisted> {
        let (mut text, mut flags) = (Vec::with_capacity(maps.len() * 2), flags.iter());
        for line in maps.split_inclusive(|byte| *byte == b'\n') {
            let range = range(line).ok_or(Unlisted::Changed)?;
            text.extend(line);
            if range.start >= KERNEL {
                continue;
            }
            let its = flags.next().filter(|its| its.addresses == range);
            let bits = its.ok_or(Unlisted::Changed)?.bits;
            text.extend(b"VmFlags: ");
            text.extend(self.of(bits).ok_or(Unlisted::Unknown(bits))?.bytes());
            text.push(b'\n');
        }
        flags.next().is_none().then_some(text).ok_or(Unlisted::Changed)
    }
}

/// The addresses in a line of a file `maps`, whose end may be a name of any bytes.
fn range(line: &[u8]) -> Option<Range<u64>> {
    let words = line.split(|byte| *byte == b' ').next()?;
    addresses(str::from_utf8(words).ok()?)
}

/// The addresses of the mapping that a line begins, if it begins one.
pub(super) fn addresses(line: &str) -> Option<Range<u64>> {
    let (start, end) = line.split_ascii_whitespace().next()?.split_once('-')?;
    let number = |digits| u64::from_str_radix(digits, 16).ok();
    Some(number(start)?..number(end)?)
}

#[cfg(test)]
mod tests;
