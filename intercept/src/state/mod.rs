//! What the shim keeps of the program. The child of a fork forgets all of it. Nothing in here
//! knows of calls, nor of those who watch them.

pub(crate) mod contexts;
pub(crate) mod events;
pub(crate) mod gate;
pub(crate) mod graphs;
pub(crate) mod images;
pub(crate) mod index;
pub(crate) mod kernels;
pub(crate) mod memory;
pub(crate) mod peers;
pub(crate) mod range;
pub(crate) mod recent;
