//! How contexts begin and end, the primary contexts of devices among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::arrays;
use crate::capture;
use crate::context::{self, CONTEXTS, Context, STREAMS, take_off};
use crate::device_memory;
use crate::events::EVENTS;
use crate::exclusive;
use crate::faults;
use crate::handles::new_handle;
use crate::host_memory;
use crate::ipc;
use crate::local_storage;
use crate::managed_memory;
use crate::modules;
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};
use crate::switching;
use crate::textures;

/// Creates a context on a device.
///
/// # Errors
/// `DEVICE_UNAVAILABLE` when the device is in exclusive mode and another process has it, or after a failed primary
/// context was reset; `OUT_OF_MEMORY` without room for what each context is set to take.
pub(crate) fn create(device: usize, flags: u32) -> Outcome<Arc<Context>> {
    create_as(new_handle(), device, flags, false)
}

fn create_as(handle: u64, device: usize, flags: u32, is_primary: bool) -> Outcome<Arc<Context>> {
    faults::present()?;
    if SPOILED[device].load(Ordering::SeqCst) {
        return Err(Code::DEVICE_UNAVAILABLE);
    }
    exclusive::acquire(device)?;
    switching::come();
    if settings().context_memory > 0 {
        // Freed with all that belongs to the context.
        device_memory::allocate(device, handle, settings().context_memory)
            .inspect_err(|_| exclusive::release(device))?;
    }
    let context = Arc::new(Context::new(handle, device, flags, is_primary));
    CONTEXTS.insert(handle, context.clone());
    Ok(context)
}

/// Ends a context: its work is waited for, then everything that belongs to it is freed.
pub(crate) fn destroy(context: &Arc<Context>) {
    if context.destroyed.swap(true, Ordering::SeqCst) {
        return;
    }
    if context.failure.load(Ordering::SeqCst) != 0 {
        context.cancel.store(true, Ordering::SeqCst);
    }
    context.wait_all();
    context.prints.flush();
    local_storage::end_context(context.handle);
    CONTEXTS.remove(context.handle);
    for stream in STREAMS.remove_where(|s| s.context == context.handle) {
        stream.close();
    }
    let streams = std::mem::take(&mut *context.streams.lock());
    for stream in streams.all() {
        capture::forget(stream.handle);
        stream.close();
    }
    context.legacy.close();
    EVENTS.remove_where(|event| event.context == context.handle);
    modules::unload_context(context.handle);
    arrays::forget_context(context.handle);
    textures::forget_context(context.handle);
    device_memory::free_context(context.handle);
    host_memory::free_context(context.handle);
    managed_memory::free_context(context.handle);
    ipc::close_context(context.handle);
    take_off(context);
    exclusive::release(context.device);
}

/// A device's primary context.
#[derive(Default)]
struct Primary {
    /// The handle of each context that is or will be the primary one, once somebody has asked for it.
    handle: Option<u64>,
    context: Option<Arc<Context>>,
    references: u64,
    flags: u32,
}

impl Primary {
    fn get_or_create(&mut self, device: usize) -> Outcome<Arc<Context>> {
        let context = match &self.context {
            Some(context) => context.clone(),
            None => create_as(self.handle(), device, self.flags, true)?,
        };
        self.context = Some(context.clone());
        Ok(context)
    }

    fn handle(&mut self) -> u64 {
        *self.handle.get_or_insert_with(new_handle)
    }
}

static PRIMARY: [Mutex<Primary>; MAX_DEVICES] =
    [const { Mutex::new(Primary { handle: None, context: None, references: 0, flags: 0 }) };
        MAX_DEVICES];

/// Devices that this process has lost: a GPU's driver (580.159.04) makes no context any more after the reset of a primary
/// one that a kernel had failed.
static SPOILED: [AtomicBool; MAX_DEVICES] = [const { AtomicBool::new(false) }; MAX_DEVICES];

/// The primary context of a device, created if need be; counts a reference.
///
/// # Errors
/// As [`create`].
pub(crate) fn retain_primary(device: usize) -> Outcome<Arc<Context>> {
    let mut primary = PRIMARY[device].lock();
    let context = primary.get_or_create(device)?;
    primary.references += 1;
    Ok(context)
}

/// The primary context of a device, if there is one.
pub(crate) fn primary(device: usize) -> Option<Arc<Context>> {
    PRIMARY[device].lock().context.clone()
}

/// The handle that the primary context of a device has whenever it exists. It need not exist.
pub(crate) fn primary_handle(device: usize) -> u64 {
    PRIMARY[device].lock().handle()
}

/// The context behind a handle that is to be made current. A primary context is created if its handle is known and it
/// does not exist.
///
/// # Errors
/// `INVALID_CONTEXT` for anything else; as [`create`].
pub(crate) fn to_be_current(handle: u64) -> Outcome<Arc<Context>> {
    if let Ok(context) = context::by_handle(handle) {
        return Ok(context);
    }
    for (device, primary) in PRIMARY.iter().enumerate() {
        let mut primary = primary.lock();
        if primary.handle == Some(handle) {
            return primary.get_or_create(device);
        }
    }
    Err(Code::INVALID_CONTEXT)
}

/// Drops a reference to the primary context; the last one destroys it.
///
/// # Errors
/// `INVALID_CONTEXT` when there is no reference.
pub(crate) fn release_primary(device: usize) -> Outcome {
    let mut primary = PRIMARY[device].lock();
    primary.references = primary.references.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    let last = if primary.references == 0 { primary.context.take() } else { None };
    drop(primary);
    if let Some(context) = last {
        destroy(&context);
    }
    Ok(())
}

/// Destroys the primary context, no matter what refers to it. After a failed one there is no other.
pub(crate) fn reset_primary(device: usize) {
    let mut primary = PRIMARY[device].lock();
    primary.references = 0;
    let last = primary.context.take();
    // Not under the lock: what is called at the end of a context may ask for another one.
    drop(primary);
    if let Some(context) = last {
        if context.failure.load(Ordering::SeqCst) != 0 {
            SPOILED[device].store(true, Ordering::SeqCst);
        }
        destroy(&context);
    }
}

/// Flags of the primary context and whether it exists.
pub(crate) fn primary_state(device: usize) -> (u32, bool) {
    let primary = PRIMARY[device].lock();
    match &primary.context {
        Some(context) => (context.flags.load(Ordering::Relaxed), true),
        None => (primary.flags, false),
    }
}

/// Sets the flags of the primary context.
pub(crate) fn set_primary_flags(device: usize, flags: u32) {
    let mut primary = PRIMARY[device].lock();
    primary.flags = flags;
    if let Some(context) = &primary.context {
        context.flags.store(flags, Ordering::Relaxed);
    }
}
