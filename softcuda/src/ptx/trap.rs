use thiserror::Error;

/// Why a launch ended early.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Trap {
    /// A thread touched memory that is not mapped for it (`CUDA_ERROR_ILLEGAL_ADDRESS`).
    #[error("kernel `{kernel}` accessed the unmapped address {address:#x}")]
    IllegalAddress {
        /// The first byte of the access.
        address: u64,
        /// The kernel's name.
        kernel: String,
    },
    /// An access not aligned to its size (`CUDA_ERROR_MISALIGNED_ADDRESS`).
    #[error("kernel `{kernel}` accessed {size} bytes at the misaligned address {address:#x}")]
    Misaligned {
        /// The first byte of the access.
        address: u64,
        /// Bytes accessed at once.
        size: usize,
        /// The kernel's name.
        kernel: String,
    },
    /// A `trap` instruction (`CUDA_ERROR_LAUNCH_FAILED`).
    #[error("kernel `{kernel}` executed a trap instruction")]
    Trapped {
        /// The kernel's name.
        kernel: String,
    },
    /// `free` of an address that is not allocated by `malloc` (`CUDA_ERROR_LAUNCH_FAILED`).
    #[error("kernel `{kernel}` freed {address:#x}, which is not allocated")]
    InvalidFree {
        /// The address.
        address: u64,
        /// The kernel's name.
        kernel: String,
    },
    /// `cudaGraphSetConditional` with a handle that the launch's caller does not know (`CUDA_ERROR_LAUNCH_FAILED`).
    #[error("kernel `{kernel}` set the graph condition {handle:#x}, which there is not")]
    UnknownCondition {
        /// The handle.
        handle: u64,
        /// The kernel's name.
        kernel: String,
    },
    /// A failed device-side `assert` (`CUDA_ERROR_ASSERT`).
    #[error("kernel `{kernel}`: assertion `{message}` failed")]
    Assert {
        /// The asserted expression, with file, line and function where known.
        message: String,
        /// The kernel's name.
        kernel: String,
    },
    /// The caller set [`Launch::cancel`](super::Launch::cancel).
    #[error("the launch was cancelled")]
    Cancelled,
    /// An instruction that cannot be executed, such as a call through an address that is no
    /// function's (`CUDA_ERROR_ILLEGAL_INSTRUCTION`).
    #[error("kernel `{kernel}`: illegal instruction: {reason}")]
    IllegalInstruction {
        /// What could not be executed.
        reason: String,
        /// The kernel's name.
        kernel: String,
    },
    /// All warps of a block wait for each other (`CUDA_ERROR_LAUNCH_FAILED`).
    #[error("kernel `{kernel}`: the warps of a block wait for each other at a barrier")]
    Deadlock {
        /// The kernel's name.
        kernel: String,
    },
    /// Call depth or local memory ran out (`CUDA_ERROR_LAUNCH_FAILED`).
    #[error("kernel `{kernel}` ran out of stack")]
    StackOverflow {
        /// The kernel's name.
        kernel: String,
    },
    /// The launch does not fit the kernel (`CUDA_ERROR_INVALID_VALUE`); nothing ran.
    #[error("kernel `{kernel}` cannot be launched: {reason}")]
    InvalidLaunch {
        /// What does not fit.
        reason: String,
        /// The kernel's name.
        kernel: String,
    },
}
