//! Twins of kernels: PTX text in, PTX text out.
//!
//! A twin computes what its kernel computes, and can be stopped and gone on with later. Its
//! last parameter is the address of a [control block](control). A kernel has up to four of them.
//!
//! One is stopped between two of its blocks: before anything else the first thread of each
//! block looks there: if the flag is set, or if another launch has claimed this block, all threads of the block end;
//! else the block is claimed for this launch, and runs as it would have. A block that has begun comes to its end, so
//! that the blocks that are claimed are those that are done once the launch is over, and the twin is launched again with the
//! same control block for those that are left. Where two launches run at the same time each block is run by one of them.
//! The text is kept as it is, apart from what is put in: the parameter and the [prologue](rewrite). So nothing has to be known here of
//! what a kernel does.
//!
//! The other is stopped in its loops, if all that its threads do is [their own matter](Inside): each thread looks at the flag
//! at ends of loops, saves its registers behind the control block's states, and ends. Launched again it goes on from there; a
//! thread that has come to its end, or that another launch runs, ends at once, and one that has not begun begins.
//!
//! The third is stopped at barriers of its blocks, if what its threads do together [is over there](Inside): a block's first
//! thread looks at the flag, all decide alike at a later barrier, save their registers and the block's shared memory, and
//! end. Launched again the block goes on behind that barrier.
//!
//! The fourth saves nothing: threads end in their loops or blocks at barriers, and begin anew when it is launched again.
//! Who launches it has to know that doing this launch twice is the same as doing it once.

mod aborted;
mod again;
mod alone;
mod backward;
mod barriers;
mod body;
pub mod control;
mod counted;
mod edits;
#[doc(hidden)]
pub mod hostile;
mod inside;
pub mod lexer;
mod live;
mod loops;
mod opcodes;
mod scan;
mod shared;
mod twin;
mod uniform;
mod unroll;
mod writer;

pub use alone::alone;
pub use inside::Inside;
pub use lexer::Syntax;
pub use twin::{Aborted, AtBarriers, How, InLoops, Rewritten, Twins, Why, rewrite, rewrite_with};
pub use writer::Polls;
