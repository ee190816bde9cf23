//! What the launches of a program read and write.
//!
//! The shim records what the arguments of launches point to ([`gpucr_wire::access`]); here it is
//! added up ([`Tally`]) and put together with what is known of the kernels ([`Kernels`]): their code,
//! their names, and what changed in memory while they ran. `docs/access-sets.md` describes the method.
//! Nothing rests on it.

mod check;
mod learn;
mod report;
mod session;
mod sharing;
mod tally;
pub mod trace;
mod twice;
mod written;

pub use learn::Kernels;
pub(crate) use sharing::sharing;

pub(crate) use crate::engine::memory::Extent;
pub use tally::Tally;
pub(crate) use written::{Blamed, Written, written};
