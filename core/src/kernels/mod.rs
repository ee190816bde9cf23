//! Which of its parameters' memory a kernel reads and writes, as far as its code tells.
//!
//! A launch hands a kernel a block of parameters. Those of its words of 8 bytes that hold addresses
//! of device memory lead to all that it touches, unless it follows pointers that lie in memory. There
//! are three sources, and [`Source`] tells which one a statement has:
//!
//! - PTX ([`from_ptx`]): the flow of values from parameters to the addresses of loads and stores.
//!   That is `gpucr-kernels`, which the shim uses too.
//! - a mangled name ([`from_name`]): `const float *` is read, if nobody casts the `const` away.
//! - machine code ([`from_cubin`]): the layout of the parameters only.
//!
//! `gpucr-fatbin` finds PTX and machine code in what a program gives to `cuModuleLoadData`.
//!
//! Statements err towards more: a word may be said to be written that never is. They err towards less
//! only where [`Kernel::indirect`] says that the kernel's memory is not told by its parameters, and
//! where a name promises too much. Nothing here may therefore decide what an image contains; it
//! decides what is worth copying first.

mod cubin;
mod names;

pub use gpucr_kernels::{Direction, Kernel, Param, PtxError, Source, Word, from_ptx};

pub use cubin::{CubinError, from_cubin};
pub use names::{from_name, readable};
