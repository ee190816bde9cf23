//! PTX: parsing, checking, translation and execution on the CPU.
//!
//! [`Module::load`] turns PTX text into a compact, fully checked form; [`run`] executes one
//! launch of one of its entries. Global addresses are host virtual addresses of this process:
//! the caller answers, through [`AddressSpace`], which of them a kernel may touch.
//!
//! Threads run in warps of 32 lanes. A register is an array of 32 lanes, so that one
//! instruction is one loop over lanes; divergent branches reconverge at their immediate
//! post-dominator. The warps of a block share one host thread; blocks run in parallel.

mod ast;
mod code;
mod diagnostic;
mod exec;
mod fragment;
mod image;
mod kernels;
mod lanes;
mod launch;
mod lexer;
mod link;
mod lower;
mod module;
mod parser;
mod trap;

pub use diagnostic::{Diagnostic, DiagnosticKind};
pub use image::{Beyond, Channel, Image, Images, Level, NoImages, Sampler, Texture};
pub use launch::{AddressSpace, Child, Heap, Launch, Launcher, NoHeap, NoLauncher, Replicas};
pub use link::{link, undefined};
pub use module::{Entry, Global, Module, Param, Reference, Relocation};
pub use trap::Trap;

/// Runs a launch to its end.
///
/// # Errors
/// The first [`Trap`] any thread hit. Memory then holds whatever the threads had written
/// until they stopped; no thread runs any more.
pub fn run<A: AddressSpace>(
    module: &Module,
    entry: &Entry,
    launch: &Launch<'_>,
    memory: &A,
) -> Result<(), Trap> {
    exec::run(module, entry, launch, memory)
}

#[cfg(test)]
mod tests;
