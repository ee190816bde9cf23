//! Which of its parameters' memory a kernel reads and writes, as far as its PTX tells.
//!
//! [`from_ptx`] follows the values from parameters to the addresses of loads and stores. The documentation of
//! `ptx.rs` has the rules, and what they take for granted. [`code`] says by that what has to be known of a kernel to
//! decide whether doing one of its launches twice is the same as doing it once.
//!
//! A program can be begun anew by what the second one says (`docs/interruption.md`); all else is a guess about what to copy
//! first, and may be too little.

mod kernel;
mod ptx;
mod twice;

pub use kernel::{Direction, Kernel, Param, Source, Word};
pub use ptx::{PtxError, from_ptx, from_ptx_of};
pub use twice::code;
