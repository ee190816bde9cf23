//! Which errors leave a context broken.

use crate::abi::types::{
    Code, ERROR_ASSERT, ERROR_CONTEXT_IS_DESTROYED, ERROR_DEVICE_UNAVAILABLE,
    ERROR_ECC_UNCORRECTABLE, ERROR_HARDWARE_STACK_ERROR, ERROR_ILLEGAL_ADDRESS,
    ERROR_LAUNCH_FAILED, ERROR_LAUNCH_TIMEOUT, ERROR_NVLINK_UNCORRECTABLE,
};

/// Codes that leave a context broken, besides those between [`ERROR_HARDWARE_STACK_ERROR`] and
/// [`ERROR_LAUNCH_FAILED`].
const FAULTS: [Code; 3] = [ERROR_ILLEGAL_ADDRESS, ERROR_LAUNCH_TIMEOUT, ERROR_ASSERT];

/// Codes that are no fault of a kernel, and leave a context broken all the same.
const LASTING: [Code; 4] = [
    ERROR_DEVICE_UNAVAILABLE,
    ERROR_ECC_UNCORRECTABLE,
    ERROR_NVLINK_UNCORRECTABLE,
    ERROR_CONTEXT_IS_DESTROYED,
];

/// Whether a kernel has left its context broken, which it may have done for want of memory.
pub(super) fn is_fault(code: Code) -> bool {
    FAULTS.contains(&code) || (ERROR_HARDWARE_STACK_ERROR..=ERROR_LAUNCH_FAILED).contains(&code)
}

/// Whether this is what each call of a context gives from some failure on, until the context is destroyed.
pub(crate) fn is_lasting(code: Code) -> bool {
    is_fault(code) || LASTING.contains(&code)
}
