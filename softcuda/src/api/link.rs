//! The linker. It takes PTX and makes PTX, which modules are then loaded from.

use std::sync::Arc;

use parking_lot::Mutex;

use super::arguments::{Address, In, Out, Text, read_bytes};
use super::driver_api;
use super::module::{Options, image, image_in_file, report};
use crate::links::{self, Given, LINKS, Link};
use crate::modules::Refusal;
use crate::status::{Code, Outcome};

/// `CUjitInputType`.
const PTX: u32 = 1;
const FAT_BINARY: u32 = 2;
const LIBRARY: u32 = 4;

fn find(handle: u64) -> Outcome<Arc<Link>> {
    LINKS.get(handle).ok_or(Code::INVALID_HANDLE)
}

/// Fails for what holds no PTX.
fn check_kind(kind: u32) -> Outcome {
    match kind {
        PTX | FAT_BINARY | LIBRARY => Ok(()),
        0 | 3 => Err(Code::NO_BINARY_FOR_GPU), // cubin, object
        5 => Err(Code::NOT_SUPPORTED),         // NVVM
        _ => Err(Code::INVALID_VALUE),
    }
}

/// Reports into the logs of the options that a link was created with. What the driver gives is written to the program's
/// values only where the program has left them as they were.
fn report_to<T>(link: &Link, outcome: Result<T, Refusal>) -> Outcome<T> {
    let given = &link.given;
    let mut values = given.values.clone();
    let outcome = report(
        outcome,
        Some(&Options {
            count: given.names.len() as u32,
            names: In::at_address(given.names.as_ptr() as u64),
            values: Out::at_address(values.as_mut_ptr() as u64),
        }),
    );
    let mut last = given.last.lock();
    let place = Out::<u64>::at_address(given.place);
    for (index, value) in values.into_iter().enumerate() {
        let there = In::<u64>::at_address(given.place).at(index)?;
        if value != there && (there == last[index] || there == given.values[index]) {
            place.set_at(index, value)?;
            last[index] = value;
        }
    }
    outcome
}

/// Reports into the logs of this call's options, or else of the link's.
fn finish<T>(link: &Link, outcome: Result<T, Refusal>, own: &Options) -> Outcome<T> {
    if own.count > 0 {
        return report(outcome, Some(own));
    }
    report_to(link, outcome)
}

fn create(count: u32, names: In<u32>, values: Out<u64>, out: &Out<u64>) -> Outcome {
    out.check()?;
    let device = crate::context::current()?.device;
    let all = 0..count as usize;
    let given = Given {
        names: all.clone().map(|index| names.at(index)).collect::<Outcome<_>>()?,
        values: all.map(|index| values.at(index)).collect::<Outcome<Vec<_>>>()?,
        place: values.address(),
        last: Mutex::default(),
    };
    given.last.lock().clone_from(&given.values);
    let most_registers = Options { count, names, values }.most_registers()?;
    out.set(links::create(device, given, most_registers).handle)
}

fn add_data(
    handle: u64,
    kind: u32,
    data: Address,
    size: usize,
    name: &Text,
    own: &Options,
) -> Outcome {
    let link = find(handle)?;
    check_kind(kind)?;
    if data.0 == 0 || size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let bytes = if kind == FAT_BINARY {
        image(data)?
    } else {
        // SAFETY: not null, so the caller promises as many bytes as it says.
        unsafe { read_bytes(data.0 as *const u8, size) }
    };
    finish(&link, add(&link, kind, name.get().unwrap_or("a piece without name"), &bytes), own)
}

fn add_file(handle: u64, kind: u32, path: &Text, own: &Options) -> Outcome {
    let link = find(handle)?;
    check_kind(kind)?;
    let path = path.get()?;
    let bytes = if kind == LIBRARY {
        std::fs::read(path).map_err(|_| Code::FILE_NOT_FOUND)?
    } else {
        image_in_file(path)?
    };
    finish(&link, add(&link, kind, path, &bytes), own)
}

fn add(link: &Link, kind: u32, name: &str, bytes: &[u8]) -> Result<(), Refusal> {
    if kind == LIBRARY { link.add_library(name, bytes) } else { link.add(name, bytes) }
}

driver_api! {
    call fn cuLinkCreate(count: u32, names: In<u32>, values: Out<u64>, out: Out<u64>) {
        create(count, names, values, &out)
    }

    call fn cuLinkCreate_v2(count: u32, names: In<u32>, values: Out<u64>, out: Out<u64>) {
        create(count, names, values, &out)
    }

    call fn cuLinkAddData(
        handle: u64, kind: u32, data: Address, size: usize, name: Text, count: u32,
        names: In<u32>, values: Out<u64>,
    ) {
        add_data(handle, kind, data, size, &name, &Options { count, names, values })
    }

    call fn cuLinkAddData_v2(
        handle: u64, kind: u32, data: Address, size: usize, name: Text, count: u32,
        names: In<u32>, values: Out<u64>,
    ) {
        add_data(handle, kind, data, size, &name, &Options { count, names, values })
    }

    call fn cuLinkAddFile(
        handle: u64, kind: u32, path: Text, count: u32, names: In<u32>, values: Out<u64>,
    ) {
        add_file(handle, kind, &path, &Options { count, names, values })
    }

    call fn cuLinkAddFile_v2(
        handle: u64, kind: u32, path: Text, count: u32, names: In<u32>, values: Out<u64>,
    ) {
        add_file(handle, kind, &path, &Options { count, names, values })
    }

    call fn cuLinkComplete(handle: u64, out: Out<u64>, size: Out<usize>) {
        out.check()?;
        let link = find(handle)?;
        let (address, bytes) = report_to(&link, link.complete())?;
        size.set_if_wanted(bytes);
        out.set(address)
    }

    call fn cuLinkDestroy(handle: u64) {
        LINKS.remove(handle).map(|_| ()).ok_or(Code::INVALID_HANDLE)
    }
}
