//! The driver and the device memory that gpucr itself handles.

mod bounce;
pub mod context;
mod direct;
pub mod driver;
mod drivers;
pub mod hash;
mod host;
pub mod lanes;
mod reserve;
pub mod span;
pub mod staging;
pub mod stream;
mod transfer;
mod turns;

pub use context::{Context, SharedBlock};
pub use driver::{Device, Driver, DriverError, ProcessState};
pub use drivers::{Drivers, ENV_HOST_DRIVER};
pub use hash::{Hashed, Hasher, Key};
pub use host::HostDriver;
pub use lanes::Lane;
pub(crate) use reserve::{Freed, Reserver, take};
pub use span::Span;
pub use staging::{Pinned, Staging};
pub use stream::{Event, Stream};
pub use transfer::{Queue, TransferError};

pub use crate::store::Filled;

#[cfg(test)]
pub(crate) mod tests;
