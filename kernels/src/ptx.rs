//! Directions from PTX.
//!
//! For each kernel, [`from_ptx`] computes which words of its parameters each register may hold a copy
//! of, or an address made from; then it looks at each access to memory. The order of instructions,
//! predicates and branches are left out of account: an instruction that may not run counts as one
//! that does. Every value is a set of words and of marks (see `ptx/value.rs`), every instruction adds to
//! the sets of what it writes, and that is repeated until nothing changes. Functions that a kernel
//! calls are part of it: their parameters get the values of all their calls, so recursion is nothing
//! special.
//!
//! # Rules
//!
//! - A load of a whole word of a parameter yields that word. A load of a part of one yields a number.
//! - What is computed has the words of all operands, except that a comparison has none.
//! - A load is a read of all words of its address, a store a write, an atomic operation or a reduction
//!   both. Asynchronous copies, matrix loads and stores go by the spaces that they name.
//! - Local and shared memory are one place each: what is stored there comes back from any load.
//!   Stored parameter words in global memory are not followed; what is loaded from there is a
//!   *foreign* value.
//! - An access through a foreign value, or through an address that no parameter went into, makes the
//!   kernel [`indirect`](super::Kernel::indirect). So do textures, surfaces, tensor maps, calls through
//!   pointers and calls of functions without a body, whose arguments become
//!   [`Unknown`](super::Direction::Unknown).
//! - An instruction that has no rule makes all words of its operands `Unknown`.
//!
//! # What they take for granted
//!
//! - Pointers are made from a pointer and numbers. Of foreign values, one of 32 bits or less, one that
//!   is multiplied (by 2 to 2^24, by a register), shifted left by 1 to 12 bits, or divided, is a number:
//!   `a[b[i]]` does not make a kernel indirect. Numbers that are put together from parts (packed,
//!   inserted, shifted left by 24 bits or more) are foreign values again.
//! - A thread's loads from const memory, its stack and its shared memory find what this kernel has put
//!   there, or the module's initial values.
//! - Values do not flow through predicates.
//!
//! NVIDIA documents instructions and their operands in "Parallel Thread Execution ISA".

mod calls;
mod classes;
mod error;
mod flow;
mod parse;
mod reach;
mod rules;
mod value;

#[cfg(test)]
mod coverage;
#[cfg(test)]
mod tests;

pub use error::PtxError;

use crate::Kernel;

/// The kernels of a module, in its order, with a direction for each word.
///
/// A kernel that is too large to be followed has [`Unknown`](super::Direction::Unknown) words and is
/// indirect; so have the last ones of a module that would take more than seconds altogether. Functions and instructions of any later PTX version are accepted.
///
/// # Errors
/// [`PtxError`], if no functions can be made out.
pub fn from_ptx(ptx: &str) -> Result<Vec<Kernel>, PtxError> {
    from_ptx_of(ptx, |_| true)
}

/// The same of those with certain names.
///
/// # Errors
/// As [`from_ptx`].
pub fn from_ptx_of(ptx: &str, is_wanted: impl Fn(&str) -> bool) -> Result<Vec<Kernel>, PtxError> {
    let module = parse::module(ptx)?;
    let entries = module.functions.iter().enumerate();
    let entries = entries.filter(|(_, one)| one.is_entry && is_wanted(one.name));
    let mut work = flow::MOST_WORK;
    Ok(entries.map(|(index, _)| flow::kernel(&module, index, &mut work)).collect())
}
