//! The driver's side: its types, the functions of its library and the slots through which they are called.
//! Nothing in here knows what the shim keeps of a program.

pub(crate) mod diverted;
pub(crate) mod library;
pub(crate) mod real;
pub(crate) mod slots;
pub(crate) mod table;
pub(crate) mod types;
