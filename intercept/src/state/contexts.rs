//! The contexts that the program has: whatever made one is seen, or else whatever makes one
//! current. Contexts made through the driver's private tables are primary ones, which the driver
//! itself reports.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};

use crate::abi::real;
use crate::resettable::Resettable;

static KNOWN: Resettable<Mutex<BTreeMap<u64, i32>>> = Resettable::new(Mutex::new(BTreeMap::new()));
/// Goes up when a context is gone: its handle may come back as another one's.
static GENERATION: AtomicU64 = AtomicU64::new(1);

/// Held while somebody takes or gives up a primary context, the agent's reading of it included. Its owner may
/// take the lock of the tables of memory; the other order is for a closed gate, when nobody gives a context up.
static PRIMARY: Resettable<Mutex<()>> = Resettable::new(Mutex::new(()));

thread_local! {
    /// The context that this thread saw last, and in which generation.
    static LAST: Cell<(u64, u64)> = const { Cell::new((0, 0)) };
}

fn with<T>(work: impl FnOnce(&mut BTreeMap<u64, i32>) -> T) -> T {
    work(&mut KNOWN.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner()))
}

/// A context of `device` exists.
pub(crate) fn seen(context: u64, device: i32) {
    with(|known| known.insert(context, device));
}

/// A context has become current on this thread. Called often, and mostly with the same one.
pub(crate) fn became_current(context: u64) {
    let now = (context, GENERATION.load(Ordering::Relaxed));
    if context == 0 || LAST.get() == now {
        return;
    }
    if let Ok((current, device)) = real::current_context()
        && current == context
    {
        seen(context, device);
        LAST.set(now);
    }
}

/// A context is gone.
pub(crate) fn gone(context: u64) {
    with(|known| known.remove(&context));
    GENERATION.fetch_add(1, Ordering::Relaxed);
}

/// No other thread takes, gives up or looks at a primary context.
pub(crate) struct Primaries {
    _alone: MutexGuard<'static, ()>,
}

/// Waits until no other thread is about to take or give up a primary context.
pub(crate) fn primaries() -> Primaries {
    let alone = PRIMARY.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Primaries { _alone: alone }
}

impl Primaries {
    /// The primary context of a device if it is active, and notes it as seen.
    pub(crate) fn active(&self, device: i32) -> Option<u64> {
        let context = retained_and_released(device)?;
        seen(context, device);
        Some(context)
    }
}

fn retained_and_released(device: i32) -> Option<u64> {
    let (mut flags, mut active, mut context) = (0, 0, 0);
    // SAFETY: each call writes the given places; what is retained is released at once, and lives on because it
    // was active before and nobody else gives it up meanwhile.
    unsafe {
        if real::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) != 0 || active == 0 {
            return None;
        }
        if real::cuDevicePrimaryCtxRetain(&mut context, device) != 0 {
            return None;
        }
        real::cuDevicePrimaryCtxRelease_v2(device);
    }
    Some(context)
}

/// Every context and its device, those included that only the driver knows of.
pub(crate) fn all() -> Vec<(u64, i32)> {
    for device in 0..real::device_count() {
        primaries().active(device);
    }
    with(|known| known.iter().map(|(context, device)| (*context, *device)).collect())
}

/// Some context of `device`.
pub(crate) fn of_device(device: i32) -> Option<u64> {
    primaries()
        .active(device)
        .or_else(|| with(|known| known.iter().find(|(_, on)| **on == device).map(|(c, _)| *c)))
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's duty.
    unsafe {
        KNOWN.reset(Mutex::new(BTreeMap::new()));
        PRIMARY.reset(Mutex::new(()));
    }
}
