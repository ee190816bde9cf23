//! The checkpointer: what `gpucr dump` and `gpucr restore` do.
//!
//! Start with [`dump`] and [`restore`]: each is one list of phases. `docs/design.md` explains why
//! they are in this order, and what holds after a failure in each.

pub mod access;
mod cores;
pub mod criu;
pub mod device;
pub mod diff;
pub mod dump;
pub mod error;
mod held;
mod helper;
#[doc(hidden)]
pub mod hostile;
pub mod image;
pub mod keeper;
pub mod library;
pub mod limits;
mod mapping;
mod names;
pub mod namespace;
pub mod phase;
pub mod process;
pub mod restore;
mod scratch;
pub mod sharing;
mod stage;
pub mod stop;
pub mod store;
pub mod timeline;
pub mod transfer;
pub mod verify;
pub mod warm;

pub use error::{Error, Failure, Left};
pub use phase::{Progress, Quiet};

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
