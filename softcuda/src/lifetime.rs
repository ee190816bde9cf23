//! How contexts begin and end, the primary contexts of devices among them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::arrays;
use crate::capture;
use crate::context::{CONTEXTS, Context, STREAMS, take_off};
use crate::device_memory;
use crate::events::EVENTS;
use crate::exclusive;
use crate::faults;
use crate::handles::new_handle;
use crate::host_memory;
use crate::ipc;
use crate::managed_memory;
use crate::modules;
use crate::settings::{MAX_DEVICES, settings};
use crate::status::{Code, Outcome};
use crate::textures;

/// Creates a context on a device.
///
/// # Errors
/// `DEVICE_UNAVAILABLE` when the device is in exclusive mode and another process has it; `OUT_OF_MEMORY`
/// without room for what each context is set to take.
pub(crate) fn create(device: usize, flags: u32, is_primary: bool) -> Outcome<Arc<Context>> {
    faults::present()?;
    exclusive::acquire(device)?;
    let handle = new_handle();
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
    context: Option<Arc<Context>>,
    references: u64,
    flags: u32,
}

static PRIMARY: [Mutex<Primary>; MAX_DEVICES] =
    [const { Mutex::new(Primary { context: None, references: 0, flags: 0 }) }; MAX_DEVICES];

/// The primary context of a device, created if need be; counts a reference.
///
/// # Errors
/// As [`create`].
pub(crate) fn retain_primary(device: usize) -> Outcome<Arc<Context>> {
    let mut primary = PRIMARY[device].lock();
    let context = match &primary.context {
        Some(context) => context.clone(),
        None => create(device, primary.flags, true)?,
    };
    primary.context = Some(context.clone());
    primary.references += 1;
    Ok(context)
}

/// The primary context of a device, if there is one.
pub(crate) fn primary(device: usize) -> Option<Arc<Context>> {
    PRIMARY[device].lock().context.clone()
}

/// Drops a reference to the primary context; the last one destroys it.
///
/// # Errors
/// `INVALID_CONTEXT` when there is no reference.
pub(crate) fn release_primary(device: usize) -> Outcome {
    let mut primary = PRIMARY[device].lock();
    primary.references = primary.references.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    if primary.references == 0
        && let Some(context) = primary.context.take()
    {
        destroy(&context);
    }
    Ok(())
}

/// Destroys the primary context, whoever refers to it.
pub(crate) fn reset_primary(device: usize) {
    let mut primary = PRIMARY[device].lock();
    primary.references = 0;
    if let Some(context) = primary.context.take() {
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
