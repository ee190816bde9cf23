//! The address space as kernels see it.

use crate::address_space;
use crate::ptx::{AddressSpace, Replicas};
use crate::virtual_memory;

/// The address space as kernels see it.
pub(crate) struct DeviceView;

impl AddressSpace for DeviceView {
    fn is_mapped(&self, addr: u64, len: usize) -> bool {
        address_space::is_accessible(addr, len as u64)
    }

    fn is_writable(&self, addr: u64, len: usize) -> bool {
        address_space::is_writable(addr, len as u64)
    }

    fn replicas(&self, addr: u64, written: bool) -> Option<Replicas> {
        virtual_memory::replicas(addr, written)
    }
}
