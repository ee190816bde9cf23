//! What is behind handles and mappings of virtual memory management.

use std::sync::Arc;

use crate::multicast::Object;
use crate::physical::Physical;

/// What handles and mappings are of.
#[derive(Clone)]
pub(crate) enum Backing {
    /// Memory of a device.
    Memory(Arc<Physical>),
    /// Memory of several devices. Nothing lies at its addresses: `multimem` instructions find out what they stand for,
    /// and whatever else uses them fails. PTX leaves undefined what that does.
    Multicast(Arc<Object>),
}

impl Backing {
    /// The memory of a device.
    pub(crate) fn memory(&self) -> Option<&Arc<Physical>> {
        match self {
            Backing::Memory(physical) => Some(physical),
            Backing::Multicast(_) => None,
        }
    }

    /// The multicast object.
    pub(crate) fn multicast(&self) -> Option<&Arc<Object>> {
        match self {
            Backing::Memory(_) => None,
            Backing::Multicast(object) => Some(object),
        }
    }

    /// Size in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Backing::Memory(physical) => physical.size,
            Backing::Multicast(object) => object.size(),
        }
    }

    /// Ordinal of the device, or of one of them.
    pub(crate) fn device(&self) -> usize {
        match self {
            Backing::Memory(physical) => physical.device,
            Backing::Multicast(object) => object.device(),
        }
    }

    /// Whether it is host memory.
    pub(crate) fn is_host(&self) -> bool {
        self.memory().is_some_and(|memory| memory.is_host)
    }

    /// Whether other processes can have it.
    pub(crate) fn is_shareable(&self) -> bool {
        match self {
            Backing::Memory(physical) => physical.handle_types != 0,
            Backing::Multicast(object) => object.is_shareable(),
        }
    }

    /// Whether both are the same thing.
    pub(crate) fn is(&self, other: &Backing) -> bool {
        match (self, other) {
            (Backing::Memory(one), Backing::Memory(other)) => Arc::ptr_eq(one, other),
            (Backing::Multicast(one), Backing::Multicast(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}
