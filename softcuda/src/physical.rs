//! Physical memory of the devices and of the host, as `cuMemCreate` makes it.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use rustix::fd::OwnedFd;

use crate::device_memory::refund;

/// Physical memory. It lives while a handle or a mapping refers to it, here or elsewhere.
pub(crate) struct Physical {
    /// Size in bytes, whole granules.
    pub(crate) size: u64,
    /// Ordinal of the device.
    pub(crate) device: usize,
    /// It is host memory, which counts on no device.
    pub(crate) is_host: bool,
    /// The handle types that it was created with.
    pub(crate) handle_types: u32,
    /// It came from another process (or from this one, through a descriptor).
    pub(crate) imported: bool,
    /// A descriptor of it was given out.
    pub(crate) exported: AtomicBool,
    /// The memory; `None` while the process is checkpointed.
    pub(crate) memory: Mutex<Option<OwnedFd>>,
    /// Whether it counts as used on the device; not while the process is checkpointed.
    pub(crate) counted: AtomicBool,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if self.counted.load(Ordering::Relaxed) {
            refund(self.device, self.size);
        }
    }
}
