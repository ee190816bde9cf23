//! Green contexts: contexts that have a part of a device's multiprocessors. Blocks are executed by the processors of
//! the host, so that what a green context has is kept and reported only.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::context::Context;
use crate::handles::{Table, new_handle};
use crate::lifetime;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// All green contexts.
pub(crate) static GREEN: Table<Green> = Table::new();
/// What green contexts are to have.
pub(crate) static DESCRIPTIONS: Table<Description> = Table::new();

/// A green context.
pub(crate) struct Green {
    /// The value that programs hold.
    pub(crate) handle: u64,
    /// The context that its streams are in.
    pub(crate) context: Arc<Context>,
    /// The primary context of its device, which it keeps alive.
    pub(crate) primary: Arc<Context>,
    /// What it has.
    pub(crate) part: Multiprocessors,
}

/// What a green context is to have.
pub(crate) struct Description {
    /// The multiprocessors.
    pub(crate) part: Multiprocessors,
}

/// Some of the multiprocessors of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Multiprocessors {
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// How many.
    pub(crate) count: u32,
}

/// A part as programs describe it to `cuDevSmResourceSplit`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    /// How many multiprocessors; 0 for as many as are left.
    pub(crate) count: u32,
    /// How many of them have to be able to work together in clusters; 0 for the device's own number.
    pub(crate) together: u32,
    /// The number counts more than that they can.
    pub(crate) backfill: bool,
}

/// How the multiprocessors of a device can be split, by its compute capability as NVIDIA documents it: the least
/// number of a part, and what it is a multiple of.
pub(crate) fn limits(device: usize) -> (u32, u32) {
    match settings().model(device).generation.capability.0 {
        ..=6 => (1, 1),
        7 => (2, 2),
        8 => (4, 2),
        _ => (8, 8),
    }
}

impl Multiprocessors {
    /// All of a device.
    pub(crate) fn of(device: usize) -> Multiprocessors {
        Multiprocessors { device, count: settings().model(device).multiprocessors }
    }

    /// Parts with at least so many multiprocessors each, as many as there can be, and the rest. `coscheduled`: those
    /// of a part can work together in clusters.
    ///
    /// # Errors
    /// `INVALID_RESOURCE_CONFIGURATION` when there are fewer.
    pub(crate) fn split(
        self,
        least: u32,
        coscheduled: bool,
    ) -> Outcome<(u32, Multiprocessors, u32)> {
        if least > self.count || self.count == 0 {
            return Err(Code::INVALID_RESOURCE_CONFIGURATION);
        }
        let (smallest, multiple) = match limits(self.device) {
            (8, 8) if !coscheduled => (2, 2),
            limits => limits,
        };
        let each = least.max(smallest).next_multiple_of(multiple).min(self.count);
        let parts = self.count / each;
        Ok((parts, Multiprocessors { count: each, ..self }, self.count - parts * each))
    }
}

impl Group {
    /// How many of the multiprocessors of a device are in this part, of those that are left of a whole. All that are
    /// left count as next to each other.
    ///
    /// # Errors
    /// `INVALID_VALUE` for numbers that no part can have, `INVALID_RESOURCE_CONFIGURATION` when fewer are left. The part
    /// that is as large as what is left may be empty.
    pub(crate) fn take(&self, whole: Multiprocessors, left: u32) -> Outcome<u32> {
        let (usual, most) = match limits(whole.device) {
            (8, 8) => (8, 32),
            _ => (2, 2),
        };
        let together = if self.together == 0 { usual } else { self.together };
        if together > most || !together.is_multiple_of(2) {
            return Err(Code::INVALID_VALUE);
        }
        let unit = if self.backfill { 2 } else { together };
        let count = match self.count {
            0 if self.backfill => left,
            0 => left - left % together,
            count if count <= whole.count && count.is_multiple_of(unit) => count,
            _ => return Err(Code::INVALID_VALUE),
        };
        if count > left || (count > 0 && count < together) {
            return Err(Code::INVALID_RESOURCE_CONFIGURATION);
        }
        Ok(count)
    }
}

/// Creates a green context.
///
/// # Errors
/// Those of creating a context.
pub(crate) fn create(part: Multiprocessors) -> Outcome<Arc<Green>> {
    let primary = lifetime::retain_primary(part.device)?;
    let context = lifetime::create(part.device, 0);
    let context = context.inspect_err(|_| {
        let _ = lifetime::release_primary(part.device);
    })?;
    context.primary.store(primary.handle, Ordering::Relaxed);
    let green = Arc::new(Green { handle: new_handle(), context, primary, part });
    GREEN.insert(green.handle, green.clone());
    Ok(green)
}

/// Ends a green context with its streams.
///
/// # Errors
/// `INVALID_VALUE` for what is none.
pub(crate) fn destroy(handle: u64) -> Outcome {
    let green = GREEN.remove(handle).ok_or(Code::INVALID_VALUE)?;
    lifetime::destroy(&green.context);
    lifetime::release_primary(green.part.device)
}

/// The green context of a context, if it is one's.
pub(crate) fn of_context(context: u64) -> Option<Arc<Green>> {
    GREEN.all().into_iter().find(|green| green.context.handle == context)
}
