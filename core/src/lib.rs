//! The checkpointer: what `gpucr dump` and `gpucr restore` do.
//!
//! Start with [`dump`] and [`restore`]: each is one list of phases. `docs/design.md` explains why
//! they are in this order, and what holds after a failure in each.
//!
//! It is built in floors, and each knows only those before it, which a test checks
//! (`xtask/src/walls.rs`):
//!
//! 1. `base`: the system, progress, time, and faults for tests. Knows nothing of CUDA or of images.
//! 2. [`store`]: chunks of bytes by their hash. Knows nothing of images, processes or CUDA.
//! 3. [`image`]: what was stopped, in a directory; and what is done with images alone.
//! 4. [`cuda`]: the driver, and the device memory that gpucr itself handles.
//! 5. [`kernels`]: what kernels do to memory, as their code tells.
//! 6. `host`: the processes of a program, their agents, and CRIU.
//! 7. `engine`: dump, restore and trace, put together of all these.

mod base;
pub mod cuda;
mod engine;
mod host;
pub mod image;
pub mod kernels;
#[cfg(test)]
#[path = "../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "the crate that it is of exports it")]
mod skip;
pub mod store;

pub use base::format::{device_uuid, hex};
pub use base::io_error::IoError;
pub use base::progress::{Pass, Progress, Quiet};
pub use base::{careful, file_tree, format, limits, phase, stop, timeline};
pub use engine::error::{Error, Failure, Left};
#[doc(hidden)]
pub use engine::hostile;
pub use engine::{
    access, dump, error, extract, interrupted, kinds, launched, migrate, multicast, open_blocks,
    restore, sharing, warm, watchdog,
};
pub use host::{container, criu, namespace, network, process, shield};
pub use image::{diff, library, transfer, trust, verify};
