//! The driver that a program had; another one cannot take its state back.

use std::sync::Arc;

use crate::device::Driver;
use crate::error::Error;
use crate::held::Drivers;
use crate::image::{self, DriverKind};
use crate::library;

/// Checks that the driver where the program had its own is the same build, by its file. That takes a processor
/// some hundredths of a second.
pub(super) fn check(wanted: &image::Driver) -> Result<(), Error> {
    if !wanted.path.is_file() {
        return Err(other(wanted, "no file there".into()));
    }
    let file = wanted.path.canonicalize().unwrap_or_else(|_| wanted.path.clone());
    if crate::dump::hash_file(&file)? != wanted.file_hash {
        return Err(other(wanted, "another build".into()));
    }
    Ok(())
}

/// Opens the driver, which was [checked](check). That takes some tenths of a second where nobody uses a device.
///
/// # Errors
/// It does not start.
pub(super) fn open(wanted: &image::Driver) -> Result<Arc<Driver>, Error> {
    let driver = Drivers::default().open(&wanted.path)?;
    let version = driver.version()?;
    if version != wanted.version {
        return Err(other(wanted, name(library::kind(&wanted.path), version)));
    }
    Ok(driver)
}

/// Both at once.
pub(crate) fn open_checked(wanted: &image::Driver) -> Result<Arc<Driver>, Error> {
    check(wanted)?;
    open(wanted)
}

fn other(wanted: &image::Driver, found: String) -> Error {
    let needed = name(wanted.kind, wanted.version);
    let path = wanted.path.display();
    let needed = format!("the very build of {needed} that it was made with, at {path}");
    Error::OtherDriver { needed, found }
}

fn name(kind: DriverKind, version: i32) -> String {
    let whose = match kind {
        DriverKind::Soft => "the software driver",
        DriverKind::Nvidia => "NVIDIA's driver",
    };
    format!("{whose} for CUDA {}.{}", version / 1000, version % 1000 / 10)
}
