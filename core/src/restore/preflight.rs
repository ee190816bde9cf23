//! What a restore looks at before it changes anything.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::criu::Criu;
use crate::device::Driver;
use crate::error::Error;
use crate::held::Drivers;
use crate::image::{DriverKind, Manifest};
use crate::library;

use super::devices::{self, MappedDevice, Placement};
use super::source::Source;

/// How long a process that has ended may take until somebody has waited for it.
pub(super) const REAPING: Duration = Duration::from_secs(3);

/// What a restore works with.
pub(super) struct Plan {
    pub(super) criu: Criu,
    pub(super) driver: Arc<Driver>,
    pub(super) placement: Placement,
}

/// Checks host and image; puts the files in place that the image carries.
pub(super) fn check(
    image: &Source,
    device_map: &[MappedDevice],
    drivers: &Drivers,
) -> Result<Plan, Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    let manifest = image.manifest();
    let criu = Criu::find()?;
    check_pids(manifest)?;
    for file in &manifest.required {
        let meta = std::fs::metadata(&file.path)
            .map_err(|_| Error::FileMissing { path: file.path.clone() })?;
        if meta.len() != file.size {
            return Err(Error::FileChanged {
                path: file.path.clone(),
                found: meta.len(),
                expected: file.size,
            });
        }
    }
    for (number, carried) in manifest.carried.iter().enumerate() {
        let bytes = image.carried(number)?;
        // An image must not write anywhere else.
        if !library::is_place_of(&carried.path, &bytes) {
            return Err(Error::Misplaced { path: carried.path.clone() });
        }
        library::put(&carried.path, &bytes, carried.mode & 0o755)?;
    }
    let driver = driver(manifest, drivers)?;
    let root = manifest.processes[0].pid;
    let placement = devices::place(root, &manifest.devices, &driver.devices()?, device_map)?;
    Ok(Plan { criu, driver, placement })
}

/// Checks that no process or thread has one of the image's pids.
pub(super) fn check_pids(manifest: &Manifest) -> Result<(), Error> {
    manifest.thread_ids().into_iter().try_for_each(wait_until_free)
}

/// A pid is in use until its process was waited for. Processes that a dump has just ended are so
/// by init or a shell, in a moment; others are not waited for.
fn wait_until_free(pid: u32) -> Result<(), Error> {
    let deadline = Instant::now() + REAPING;
    // `/proc` has an entry for each thread too, though it does not list them.
    while Path::new(&format!("/proc/{pid}")).exists() {
        let status = procfs::process::Process::new(pid as i32).and_then(|p| p.status());
        let ended = status.as_ref().map_or(true, |s| s.state.starts_with(['Z', 'X']));
        if !ended || Instant::now() >= deadline {
            let by = match status {
                Ok(status) if status.tgid == pid as i32 => format!("by {}", status.name),
                Ok(status) => format!("by a thread of {}, pid {}", status.name, status.tgid),
                Err(error) => error.to_string(),
            };
            return Err(Error::PidInUse { pid, by });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// The driver that the program had; another one cannot take its state back.
fn driver(manifest: &Manifest, drivers: &Drivers) -> Result<Arc<Driver>, Error> {
    let wanted = &manifest.driver;
    let name = |kind: DriverKind, version: i32| {
        let whose = match kind {
            DriverKind::Soft => "the software driver",
            DriverKind::Nvidia => "NVIDIA's driver",
        };
        format!("{whose} for CUDA {}.{}", version / 1000, version % 1000 / 10)
    };
    if !wanted.path.is_file() {
        return Err(Error::OtherDriver {
            needed: format!("{} at {}", name(wanted.kind, wanted.version), wanted.path.display()),
            found: "no file there".into(),
        });
    }
    let file = wanted.path.canonicalize().unwrap_or_else(|_| wanted.path.clone());
    // Both take a while: the one of a processor, the other of the device.
    let (driver, hash) = std::thread::scope(|scope| {
        let hash = scope.spawn(|| crate::dump::hash_file(&file));
        (drivers.open(&wanted.path), super::bulk::joined(hash))
    });
    let driver = driver?;
    let version = driver.version()?;
    if version != wanted.version || hash? != wanted.file_hash {
        return Err(Error::OtherDriver {
            needed: format!(
                "the very build of {} that it was made with",
                name(wanted.kind, wanted.version)
            ),
            found: name(library::kind(&wanted.path), version),
        });
    }
    Ok(driver)
}
