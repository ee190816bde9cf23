//! Checkpoints and restores by way of storage of the caller's choice, on the caller's side: the memory of the other
//! process is mapped into this one, device by device, until the caller has copied it.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::fcntl_get_seals;

use crate::address_space::{self, Access, GRANULE};
use crate::capture;
use crate::context::{self, Context};
use crate::handles::new_handle;
use crate::lifetime;
use crate::placement;
use crate::requests::{Request, ask};
use crate::saved_bytes::{SEALS, STORAGE};
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};
use crate::streams::{NON_BLOCKING, Stream};

/// `CUcheckpointCustomStoragePerDeviceData`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DeviceData {
    address: u64,
    size: usize,
    stream: u64,
}

/// `CUcheckpointCustomStorageInfo`.
#[repr(C)]
pub(crate) struct Info {
    handle: u64,
    per_device: *const DeviceData,
    count: u32,
}

/// A checkpoint or a restore that is not complete.
struct Operation {
    process: i32,
    mapped: Vec<Mapped>,
    // What the caller was told. Boxes, since the caller has their addresses.
    info: Box<Info>,
    _devices: Box<[DeviceData]>,
}

// SAFETY: the pointer leads to what the operation owns.
unsafe impl Send for Operation {}

/// The storage of one device.
struct Mapped {
    address: u64,
    size: u64,
    stream: Arc<Stream>,
    context: Arc<Context>,
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.context.destroy_stream(&self.stream);
        address_space::unback(self.address, self.size);
        address_space::unreserve(self.address);
    }
}

static OPERATIONS: Mutex<Option<HashMap<u64, Operation>>> = Mutex::new(None);

/// Begins a checkpoint: gives the address of an [`Info`], which lives until [`complete`].
///
/// # Errors
/// `NOT_SUPPORTED` for this very process, `INVALID_CONTEXT` without the primary contexts of all devices that the
/// process uses, and those of the checkpoint.
pub(crate) fn checkpoint(process: i32) -> Outcome<u64> {
    begin(process, Request::CheckpointToStorage, 0)
}

/// Begins a restore onto other devices, or the same ones: see [`checkpoint`].
///
/// # Errors
/// As [`checkpoint`], and those of the restore.
pub(crate) fn restore(process: i32, devices: u32) -> Outcome<u64> {
    begin(process, Request::RestoreFromStorage, devices)
}

fn begin(process: i32, request: Request, devices: u32) -> Outcome<u64> {
    if u32::try_from(process) == Ok(std::process::id()) {
        return Err(Code::NOT_SUPPORTED);
    }
    let used = ask(process, Request::Devices, 0)?;
    for number in (0..MAX_DEVICES).filter(|number| used & 1 << number != 0) {
        primary_on(placement::moved(devices, number))?;
    }
    ask(process, request, devices)?;
    let mapped = map_all(process)?;
    let data: Box<[DeviceData]> = mapped
        .iter()
        .map(|m| DeviceData { address: m.address, size: m.size as usize, stream: m.stream.handle })
        .collect();
    let handle = new_handle();
    let info = Info { handle, per_device: data.as_ptr(), count: data.len() as u32 };
    let operation = Operation { process, mapped, info: Box::new(info), _devices: data };
    let address = &raw const *operation.info as u64;
    OPERATIONS.lock().get_or_insert_default().insert(handle, operation);
    Ok(address)
}

/// Ends an operation: waits for its streams, takes the memory away and has the process go on.
///
/// # Errors
/// `INVALID_VALUE` for what is no operation, `STREAM_CAPTURE_UNSUPPORTED` when a stream of it captures, and those of
/// the process. The operation is at its end all the same, unless a stream captures.
pub(crate) fn complete(handle: u64) -> Outcome {
    let mut operations = OPERATIONS.lock();
    let operations = operations.get_or_insert_default();
    let operation = operations.get(&handle).ok_or(Code::INVALID_VALUE)?;
    for Mapped { stream, context, .. } in &operation.mapped {
        capture::refuse(context, stream)?;
    }
    let Some(operation) = operations.remove(&handle) else { return Err(Code::INVALID_VALUE) };
    // Also what other streams still copy must be done before the memory goes.
    context::wait_everything();
    drop(operation.mapped);
    ask(operation.process, Request::Complete, 0).map(|_| ())
}

/// The primary context on a device of the host.
fn primary_on(number: usize) -> Outcome<Arc<Context>> {
    let ordinal = placement::ordinal_on(number, settings().devices);
    ordinal.and_then(lifetime::primary).ok_or(Code::INVALID_CONTEXT)
}

/// Maps all storage that a process has ready.
fn map_all(process: i32) -> Outcome<Vec<Mapped>> {
    let gone = |_| Code::OPERATING_SYSTEM;
    let mut found = Vec::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd")).map_err(gone)? {
        let path = entry.map_err(gone)?.path();
        let Ok(target) = fs::read_link(&path) else { continue };
        let target = target.to_string_lossy();
        let number = target.strip_prefix("/memfd:").and_then(|name| name.strip_prefix(STORAGE));
        let number = number.and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
        if let Some(number) = number {
            // Another file may be in its place by now: its opening must not wait nor change anything. It is no storage
            // without the seals, which `map` asks for.
            let mut how = File::options();
            how.read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
            found.push((number, how.open(path).map_err(gone)?));
        }
    }
    found.sort_unstable_by_key(|(number, _)| *number);
    found.iter().map(|(number, memory)| map(*number, memory)).collect()
}

fn map(number: usize, memory: &File) -> Outcome<Mapped> {
    let size = memory.metadata().map_err(|_| Code::OPERATING_SYSTEM)?.size();
    let sealed = fcntl_get_seals(memory).is_ok_and(|seals| seals == SEALS);
    if size == 0 || !size.is_multiple_of(GRANULE) || !sealed {
        return Err(Code::OPERATING_SYSTEM);
    }
    let context = primary_on(number)?;
    let address = address_space::reserve(size, GRANULE, 0)?;
    address_space::back(address, size, memory.as_fd(), 0)
        .and_then(|()| address_space::protect(address, size, Access::ReadWrite))
        .inspect_err(|_| {
            address_space::unback(address, size);
            address_space::unreserve(address);
        })?;
    let stream = context.create_stream(NON_BLOCKING, 0);
    Ok(Mapped { address, size, stream, context })
}
