//! What the commands do, put together of all the floors below.

pub mod access;
pub(crate) mod device_state;
pub mod dump;
pub mod error;
pub(crate) mod held;
pub mod hostile;
pub mod keeper;
pub mod kinds;
pub(crate) mod mapped;
pub(crate) mod memory;
pub mod restore;
mod sections;
pub mod sharing;
pub mod warm;
