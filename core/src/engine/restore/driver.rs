//! The driver that a program had; another one cannot take its state back.
//!
//! The image does not say which library is loaded: it says what one of this host's own has to be equal to.

use std::sync::Arc;

use crate::base::file_tree::FileTree;
use crate::base::foreign::Foreign;
use crate::cuda::{Driver, Drivers, HostDriver};
use crate::engine::error::Error;
use crate::image::{self, DriverKind};

/// The driver library of this host that is the same build, by its file. That takes a processor some hundredths
/// of a second.
///
/// # Errors
/// No such library is on this host.
pub(super) fn find(wanted: &image::Driver, drivers: &Drivers) -> Result<Arc<HostDriver>, Error> {
    let found = drivers.with_hash(&wanted.file_hash)?;
    found.ok_or_else(|| other(wanted, "no driver of that build".into()))
}

/// Checks that the restored program, which maps the file at the place in its tree that the image names, will have the same.
///
/// # Errors
/// Another file is at that place, or none.
pub(super) fn check_place(
    wanted: &image::Driver,
    library: &HostDriver,
    tree: &FileTree,
) -> Result<(), Error> {
    let file = Foreign::open_in(tree, &wanted.path)
        .map_err(|error| other(wanted, format!("no such file there ({error})")))?;
    if library.is(file)? { Ok(()) } else { Err(other(wanted, "another file there".into())) }
}

/// Opens the driver, which was [found](find). That takes some tenths of a second where no process uses a device.
///
/// # Errors
/// The driver does not start, or is of another version than its file has let expect.
pub(super) fn open(
    wanted: &image::Driver,
    library: &Arc<HostDriver>,
    drivers: &Drivers,
) -> Result<Arc<Driver>, Error> {
    let driver = drivers.open(library)?;
    let version = driver.version()?;
    if version != wanted.version {
        return Err(other(wanted, name(library.kind(), version)));
    }
    Ok(driver)
}

/// Finds the driver and opens it.
pub(crate) fn open_same(wanted: &image::Driver) -> Result<Arc<Driver>, Error> {
    let drivers = Drivers::default();
    open(wanted, &find(wanted, &drivers)?, &drivers)
}

fn other(wanted: &image::Driver, found: String) -> Error {
    let needed = name(wanted.kind, wanted.version);
    let path = wanted.path.display();
    let needed = format!("the same build of {needed} that it was made with, at {path}");
    Error::OtherDriver { needed, found }
}

fn name(kind: DriverKind, version: i32) -> String {
    let whose = match kind {
        DriverKind::Soft => "the software driver",
        DriverKind::Nvidia => "NVIDIA's driver",
    };
    format!("{whose} for CUDA {}.{}", version / 1000, version % 1000 / 10)
}
