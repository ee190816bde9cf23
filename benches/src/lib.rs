//! What the benchmarks share: building what they measure, medians, tables, and the description of
//! the machine that belongs to every number.

pub mod data;
pub mod limits;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The directory that holds the release binaries of the workspace: the one above the running
/// benchmark's.
///
/// # Errors
/// When the benchmark lies in no `deps` directory of cargo's.
pub fn binaries() -> Result<PathBuf> {
    let exe = std::env::current_exe()?.canonicalize()?;
    let deps = exe.parent().context("the benchmark lies in a directory")?;
    ensure!(deps.ends_with("deps"), "{} was not built by `cargo bench`", exe.display());
    Ok(deps.parent().context("deps lies in a directory")?.to_owned())
}

/// Builds parts of the workspace as a user gets them (the release profile), next to the running
/// benchmark, and returns the directory. `args` are those of `cargo build`. A benchmark that was
/// started without cargo takes what is there.
///
/// # Errors
/// When the build fails.
pub fn build(args: &[&str]) -> Result<PathBuf> {
    let binaries = binaries()?;
    if let Some(cargo) = std::env::var_os("CARGO") {
        let target = binaries.parent().context("a profile's directory lies in the target's")?;
        let status = Command::new(cargo)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args(["build", "--quiet", "--release", "--target-dir"])
            .arg(target)
            .args(args)
            .status()
            .context("cargo starts")?;
        ensure!(status.success(), "cargo build {} failed", args.join(" "));
    }
    Ok(binaries)
}

/// A file that [`build`] has made.
///
/// # Errors
/// When it is not there.
pub fn built(dir: &Path, name: &str) -> Result<PathBuf> {
    let path = dir.join(name);
    ensure!(path.is_file(), "{} is not there: start this with `cargo bench`", path.display());
    Ok(path)
}

/// The median; the mean of the middle two where there is no middle one.
///
/// # Panics
/// Without values.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 }
}

/// Parses a number of bytes such as `512M` or `2G` (powers of 1024).
///
/// # Errors
/// When the text is no such number.
pub fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.trim_end_matches(char::is_alphabetic) {
        digits if digits.len() == text.len() => (digits, 0),
        digits => match &text[digits.len()..] {
            "K" => (digits, 10),
            "M" => (digits, 20),
            "G" => (digits, 30),
            unit => return Err(format!("unknown unit {unit}: use K, M or G")),
        },
    };
    let number: u64 = digits.parse().map_err(|e| format!("{text}: {e}"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too much"))
}

/// One line that tells on which machine and when the numbers below it were measured, and what else
/// ran there.
pub fn machine() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, key: &str| {
        let line = text.lines().find(|line| line.starts_with(key));
        line.and_then(|line| line.split(':').nth(1)).unwrap_or("unknown").trim().to_owned()
    };
    let cpu = field(&read("/proc/cpuinfo"), "model name");
    let memory = field(&read("/proc/meminfo"), "MemTotal");
    let gib = memory.split(' ').next().and_then(|kb| kb.parse::<f64>().ok()).unwrap_or(0.0);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let load = read("/proc/loadavg");
    let load = load.split(' ').next().unwrap_or("unknown");
    let date = Command::new("date").arg("-u").arg("+%Y-%m-%d %H:%M UTC").output();
    let date = date.map(|o| String::from_utf8_lossy(&o.stdout).trim().to_owned());
    format!(
        "{cpu}, {cores} cores, {:.0} GiB, Linux {}, {}; load average before the start {load}",
        gib / f64::from(1 << 20),
        read("/proc/sys/kernel/osrelease").trim(),
        date.unwrap_or_default(),
    )
}

/// Prints rows in columns: the first one to the left, the others to the right.
pub fn print_table(header: &[&str], rows: &[Vec<String>]) {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &[String]| {
        let mut text = String::new();
        for (column, (cell, &width)) in cells.iter().zip(&widths).enumerate() {
            if column == 0 {
                text.push_str(&format!("{cell:<width$}"));
            } else {
                text.push_str(&format!("   {cell:>width$}"));
            }
        }
        println!("{}", text.trim_end());
    };
    line(&header.iter().map(|&cell| cell.to_owned()).collect::<Vec<_>>());
    line(&widths.iter().map(|&width| "-".repeat(width)).collect::<Vec<_>>());
    for row in rows {
        line(row);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn sizes() {
        assert_eq!(size("7"), Ok(7));
        assert_eq!(size("512M"), Ok(512 << 20));
        assert_eq!(size("2G"), Ok(2 << 30));
        assert!(size("2X").is_err());
        assert!(size("G").is_err());
        assert!(size("99999999999G").is_err());
    }
}
