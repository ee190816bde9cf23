//! What a restore checks before it changes anything.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use procfs::ProcError;
use procfs::process::Status;

use crate::base::file_tree::FileTree;
use crate::base::limits;
use crate::base::threads::joined;
use crate::cuda::{Driver, Drivers, HostDriver};
use crate::engine::error::Error;
use crate::host::criu::Criu;
use crate::image::Manifest;
use crate::image::library::{self, LibraryError};

use super::at_hand::AtHand;
use super::devices::{self, MappedDevice, Placement};
use super::driver;
use super::files::{FilePolicy, Files};
use super::processes::REAPING;
use super::source::Source;

/// The driver, and where the devices of the image are on this host.
pub(super) struct Opened {
    pub(super) driver: Arc<Driver>,
    pub(super) placement: Placement,
}

/// Checks host and image, but for what [`open`] does; puts the files in place that the image carries. Finds
/// CRIU, the driver library of this host, and what is to be done about files.
pub(super) fn check(
    image: &Source,
    files: (FilePolicy, &FileTree),
    at_hand: &AtHand,
    stop: &Arc<AtomicBool>,
) -> Result<(Criu, Arc<HostDriver>, Files), Error> {
    check_pids(image.manifest())?;
    check_but_pids(image, files, at_hand, stop)
}

/// The same without a look at pids.
pub(super) fn check_but_pids(
    image: &Source,
    files: (FilePolicy, &FileTree),
    at_hand: &AtHand,
    stop: &Arc<AtomicBool>,
) -> Result<(Criu, Arc<HostDriver>, Files), Error> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::NotRoot);
    }
    // CRIU is started to tell its version, and the rest does not wait for that.
    std::thread::scope(|scope| {
        let criu = scope.spawn(|| at_hand.criu(stop));
        let others = check_files_and_driver(image, files, &at_hand.drivers);
        let criu = joined(criu)?;
        let (driver, files) = others?;
        Ok((criu, driver, files))
    })
}

fn check_files_and_driver(
    image: &Source,
    (policy, tree): (FilePolicy, &FileTree),
    drivers: &Drivers,
) -> Result<(Arc<HostDriver>, Files), Error> {
    let manifest = image.manifest();
    limits::make_room_for(manifest.blocks().len() as u64)?;
    let (files, mut reasons) = Files::look(image, policy, tree)?;
    if !reasons.is_empty() {
        return Err(reasons.swap_remove(0));
    }
    let driver = driver::find(&manifest.driver, drivers)?;
    let root = library::library_root();
    for (number, carried) in manifest.carried.iter().enumerate() {
        let bytes = image.carried(number)?;
        // What lies there as a software driver this host vouches for: nothing else gets there.
        if library::is_soft(&carried.path) && *blake3::hash(&bytes).as_bytes() != driver.hash()? {
            return Err(LibraryError::Misplaced { path: carried.path.clone(), root }.into());
        }
        library::put_back(&carried.path, &bytes, &root, tree)?;
    }
    driver::check_place(&manifest.driver, &driver, tree)?;
    Ok((driver, files))
}

/// Opens the driver and finds the devices. That takes some tenths of a second where no process uses the device.
///
/// # Errors
/// The driver does not start; the host lacks a device, or it is of another kind.
pub(super) fn open(
    image: &Source,
    library: &Arc<HostDriver>,
    drivers: &Drivers,
    device_map: &[MappedDevice],
) -> Result<Opened, Error> {
    let manifest = image.manifest();
    let driver = driver::open(&manifest.driver, library, drivers)?;
    let root = manifest.processes[0].pid;
    let placement = devices::place(root, &manifest.devices, &driver.devices()?, device_map)?;
    Ok(Opened { driver, placement })
}

/// Checks that no process or thread has one of the image's pids.
pub(super) fn check_pids(manifest: &Manifest) -> Result<(), Error> {
    let free = |id| wait_until_free(id, Instant::now() + REAPING);
    manifest.thread_ids().into_iter().try_for_each(free)
}

/// The process that has this pid now, or of which a thread has it.
pub(super) fn process_of(id: u32) -> Option<u32> {
    let status = procfs::process::Process::new(id as i32).and_then(|p| p.status()).ok()?;
    u32::try_from(status.tgid).ok()
}

fn name_of(pid: u32, status: Result<&Status, &ProcError>) -> String {
    match status {
        Ok(status) if status.tgid == pid as i32 && has_ended(status) => format!(
            "by {}, which has ended, but its parent, process {}, has not waited for it",
            status.name, status.ppid
        ),
        Ok(status) if status.tgid == pid as i32 => format!("by {}", status.name),
        Ok(status) => format!("by a thread of {}, pid {}", status.name, status.tgid),
        Err(error) => error.to_string(),
    }
}

fn has_ended(status: &Status) -> bool {
    status.state.starts_with(['Z', 'X'])
}

/// A pid is in use until its process was waited for. Processes that a dump has just ended are so
/// by init or a shell, in a moment; others are not waited for.
///
/// # Errors
/// It is in use by a process that runs, or still at the deadline.
pub(super) fn wait_until_free(pid: u32, deadline: Instant) -> Result<(), Error> {
    // `/proc` has an entry for each thread too, though it does not list them.
    while Path::new(&format!("/proc/{pid}")).exists() {
        let status = procfs::process::Process::new(pid as i32).and_then(|p| p.status());
        let ended = status.as_ref().map_or(true, has_ended);
        if !ended || Instant::now() >= deadline {
            return Err(Error::PidInUse { pid, by: name_of(pid, status.as_ref()) });
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
