//! Device memory that is kept for a program while the driver has it checkpointed.
//!
//! What a program's contexts have on a device is free for anybody from its checkpoint on, and its restore needs all
//! of it again. Where another process has taken it meanwhile the restore fails, and with driver 580 no later one of
//! that process succeeds. So gpucr takes what has become free, and gives it back just before the restore.
//!
//! A descriptor is all that is kept. The memory lives as long as one of it is open anywhere, so the watchdog
//! has a copy of each; and it is free as soon as the last is closed.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::context::{Context, GRANULE};
use super::driver::{Device, Driver, DriverError};

/// Smaller pieces are not tried where memory is short.
const SMALLEST: u64 = 32 * GRANULE;

/// Takes what becomes free on the devices.
pub(crate) struct Reserver {
    contexts: Vec<Arc<Context>>,
}

impl Reserver {
    /// For the devices of these contexts.
    pub(crate) fn new(contexts: Vec<Arc<Context>>) -> Self {
        Self { contexts }
    }

    /// For these devices too. Where there is no room for a context of gpucr's own nothing is kept.
    pub(crate) fn add(&mut self, driver: &Arc<Driver>, devices: &[Device]) {
        for device in devices {
            if self.contexts.iter().any(|context| context.device().uuid == device.uuid) {
                continue;
            }
            match Context::create(driver, device) {
                Ok(context) => self.contexts.push(context),
                Err(error) => {
                    tracing::warn!(%error, device = device.name, "no memory of this device is reserved for it");
                }
            }
        }
    }

    /// Bytes that are free on each device now.
    pub(crate) fn free(&self) -> Vec<u64> {
        // Without an answer nothing is taken: as if all were free before.
        self.contexts.iter().map(|context| context.free_memory().unwrap_or(u64::MAX)).collect()
    }

    /// Takes what has become free since `before`, which [`free`](Self::free) has given, as far as nobody else has.
    pub(crate) fn take_since(&self, before: &[u64]) -> Freed {
        let mut freed = Freed::default();
        for (context, before) in self.contexts.iter().zip(before) {
            let Ok(now) = context.free_memory() else { continue };
            let wanted = now.saturating_sub(*before).next_multiple_of(GRANULE);
            if wanted > 0 {
                freed.bytes.push((context.device().uuid, wanted));
                freed.memory.extend(take(context, wanted));
            }
        }
        freed
    }
}

/// What has become free, and of it what gpucr has taken.
#[derive(Default)]
pub(crate) struct Freed {
    /// Descriptors of the memory that was taken.
    pub(crate) memory: Vec<OwnedFd>,
    /// By the UUID of the device, bytes that have become free.
    pub(crate) bytes: Vec<([u8; 16], u64)>,
}

/// Takes so many bytes of the context's device, in whole granules, or as many as there are. What is
/// missing is logged: the restore needs it, but it may be free again by then.
pub(crate) fn take(context: &Context, wanted: u64) -> Vec<OwnedFd> {
    let mut taken = Vec::new();
    let wanted = wanted / GRANULE * GRANULE;
    if let Err(error) = take_pieces(context, wanted, &mut taken) {
        let device = &context.device().name;
        tracing::warn!(%error, device, wanted, "not all of the program's memory can be reserved for it");
    }
    taken
}

/// In one piece, or in as few as there is room for.
fn take_pieces(
    context: &Context,
    mut wanted: u64,
    taken: &mut Vec<OwnedFd>,
) -> Result<(), DriverError> {
    let mut piece = wanted;
    while wanted > 0 {
        piece = piece.min(wanted);
        match context.keep(piece) {
            Ok(memory) => {
                taken.push(memory);
                wanted -= piece;
            }
            Err(error) if piece <= SMALLEST => return Err(error),
            Err(_) => piece = (piece / 2).next_multiple_of(GRANULE),
        }
    }
    Ok(())
}
