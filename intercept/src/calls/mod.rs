//! Decoders of calls: what the arguments of a driver function say, as values. Nothing is changed in here, and
//! nobody is told but the [`Effects`](effects::Effects) that is given.
//!
//! `driver.table` names them: those of [`launches`], [`copies`], [`fills`] and [`values`] are shown the arguments
//! before a call, those of [`outcomes`] after one that has succeeded.

mod arguments;
mod copies;
pub(crate) mod effects;
mod fills;
pub(crate) mod heads;
mod launches;
pub(crate) mod nodes;
pub(crate) mod outcomes;
mod values;

pub(crate) use copies::*;
pub(crate) use fills::*;
pub(crate) use launches::*;
pub(crate) use outcomes::*;
pub(crate) use values::*;
