//! Pools of other processes.
//!
//! What a pool is exported as is a descriptor of a small file that names its process, device and number; nobody can change what
//! the file says. An allocation of a pool is exported as memory is for an IPC handle, and opened like that, but it is
//! freed as the program frees what it has allocated itself.

use std::fs::File;
use std::os::unix::fs::FileExt;

use rustix::fd::{BorrowedFd, OwnedFd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};

use crate::context;
use crate::device_memory;
use crate::ipc::{self, Handle};
use crate::pools::{self, Kind, Pool};
use crate::settings::device;
use crate::status::{Code, Outcome};

/// What the file begins with.
const MAGIC: [u8; 8] = *b"softpool";
/// What the file has for ever.
const SEALS: SealFlags =
    SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW).union(SealFlags::SEAL);

/// A descriptor by which other processes get the pool.
///
/// # Errors
/// `INVALID_VALUE` for a pool that was not made to be shared; `OUT_OF_MEMORY`, `OPERATING_SYSTEM`.
pub(crate) fn export(pool: &Pool) -> Outcome<OwnedFd> {
    if pool.kind() != Kind::Shareable {
        return Err(Code::INVALID_VALUE);
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = memfd_create("softcuda-pool", flags).map_err(|_| Code::OUT_OF_MEMORY)?;
    let file = File::from(file);
    let mut text = MAGIC.to_vec();
    text.extend(std::process::id().to_le_bytes());
    text.extend((pool.device as u32).to_le_bytes());
    text.extend(pool.number().to_le_bytes());
    file.write_all_at(&text, 0).map_err(|_| Code::OPERATING_SYSTEM)?;
    fcntl_add_seals(&file, SEALS).map_err(|_| Code::OPERATING_SYSTEM)?;
    Ok(file.into())
}

/// Makes the pool of a descriptor one of this process: its handle.
///
/// # Errors
/// `INVALID_VALUE` for what [`export`] has not given; `INVALID_DEVICE` where the process has fewer devices.
pub(crate) fn import(descriptor: BorrowedFd<'_>) -> Outcome<u64> {
    // Of a file without these seals nothing is read: a pipe could keep us waiting.
    if fcntl_get_seals(descriptor) != Ok(SEALS) {
        return Err(Code::INVALID_VALUE);
    }
    let mut text = [0; 20];
    let file = descriptor.try_clone_to_owned().map_err(|_| Code::OPERATING_SYSTEM)?;
    File::from(file).read_exact_at(&mut text, 0).map_err(|_| Code::INVALID_VALUE)?;
    if text[..8] != MAGIC {
        return Err(Code::INVALID_VALUE);
    }
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|byte| text[at + byte]));
    let kind = Kind::Imported { process: number(8), number: number(16) };
    let ordinal = i32::try_from(number(12)).map_err(|_| Code::INVALID_VALUE)?;
    Ok(pools::create(device(ordinal)?, 0, kind).handle)
}

/// What another process needs to open an allocation.
///
/// # Errors
/// `INVALID_VALUE` for what is not the first address of an allocation of a pool that can be shared; `OUT_OF_MEMORY`.
pub(crate) fn export_pointer(address: u64) -> Outcome<Handle> {
    let (size, pool) = pools::share(address)?;
    let shared = context::while_idle(|| device_memory::share_part(address, size))?;
    Ok(ipc::handle(&shared, pool))
}

/// Opens an allocation of a pool of another process.
///
/// # Errors
/// `INVALID_VALUE` for a pool that was not imported, or an allocation that is not of it; those of
/// [`ipc::open`].
pub(crate) fn import_pointer(pool: &Pool, handle: &Handle) -> Outcome<u64> {
    let owner = Kind::Imported { process: handle.process(), number: handle.pool() };
    if pool.kind() != owner {
        return Err(Code::INVALID_VALUE);
    }
    ipc::open(handle, ipc::OF_POOL)
}
