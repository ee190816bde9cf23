//! The driver and the device memory that gpucr itself handles.

mod bounce;
pub mod context;
pub mod driver;
mod drivers;
pub mod hash;
mod host;
pub mod lanes;
mod reserve;
pub mod staging;
mod turns;

pub use context::{Context, Event, SharedBlock, Stream};
pub use driver::{Device, Driver, DriverError, ProcessState};
pub use drivers::{Drivers, ENV_HOST_DRIVER};
pub use hash::{Hashed, Hasher, Key};
pub use host::HostDriver;
pub use lanes::{Filled, Lane, Queue, Span, TransferError};
pub(crate) use reserve::{Freed, Reserver, take};
pub use staging::{Pinned, Staging};

#[cfg(test)]
pub(crate) mod tests;
