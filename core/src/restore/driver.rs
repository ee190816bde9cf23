//! The driver that a program had; another one cannot take its state back.

use std::sync::Arc;

use crate::device::Driver;
use crate::error::Error;
use crate::held::Drivers;
use crate::image::{self, DriverKind};
use crate::library;

/// Whether there is a driver where the program had its own.
pub(super) fn is_there(wanted: &image::Driver) -> Result<(), Error> {
    if wanted.path.is_file() { Ok(()) } else { Err(other(wanted, "no file there".into())) }
}

/// Opens it. That takes some tenths of a second where nobody uses a device.
///
/// # Errors
/// It is another build; it does not start.
pub(crate) fn open(wanted: &image::Driver) -> Result<Arc<Driver>, Error> {
    is_there(wanted)?;
    let file = wanted.path.canonicalize().unwrap_or_else(|_| wanted.path.clone());
    // Both take a while: the one of a processor, the other of the device.
    let (driver, hash) = std::thread::scope(|scope| {
        let hash = scope.spawn(|| crate::dump::hash_file(&file));
        (Drivers::default().open(&wanted.path), super::bulk::joined(hash))
    });
    let driver = driver?;
    let version = driver.version()?;
    if version != wanted.version || hash? != wanted.file_hash {
        return Err(other(wanted, name(library::kind(&wanted.path), version)));
    }
    Ok(driver)
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
