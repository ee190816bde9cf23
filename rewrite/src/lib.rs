//! Twins of kernels: PTX text in, PTX text out.
//!
//! A twin computes what its kernel computes, and can be stopped between two of its blocks and gone on with later. Its
//! last parameter is the address of a [control block](control), and before anything else the first thread of each
//! block looks there: if the flag is set, or if another launch has claimed this block, all threads of the block end;
//! else the block is claimed for this launch, and runs as it would have. A block that has begun comes to its end, so
//! that the blocks that are claimed are those that are done once the launch is over, and the twin is launched again with the
//! same control block for those that are left. Where two launches run at the same time each block is run by one of them.
//!
//! The text is kept as it is, apart from what is put in: the parameter and the [prologue](rewrite). So nothing has to be known here of
//! what a kernel does.

pub mod control;
#[doc(hidden)]
pub mod hostile;
pub mod lexer;
mod scan;
mod twin;

pub use lexer::Syntax;
pub use twin::{Rewritten, Why, rewrite};
