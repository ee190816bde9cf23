//! What launches may read and write: recorded while a checkpointer asks for it.
//!
//! `docs/access-sets.md` describes the method. A kernel's arguments are looked at word by word: one
//! that points into memory of ours counts for the whole allocation. Copies and fills say exactly
//! what they touch. Nothing rests on what is found here: it may be too much, and, where kernels
//! follow pointers that lie in memory, too little.
//!
//! While nothing is recorded a launch reads one flag, on the cache line of the gate's state. While
//! it is, each thread writes to a buffer of its own ([`recorder`]); which allocation a word points
//! into is found without a lock ([`index`]).
//!
//! The same forms tell what a call has to wait for while a checkpointer saves memory of the running
//! program ([`guard`]).

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpucr_wire::Accesses;
use gpucr_wire::reach::Sizes;

use crate::log::log;
use crate::{gate, memory, recent, synchronous};

pub(crate) mod faults;
pub(crate) mod forms;
mod graphs;
pub(crate) mod guard;
pub(crate) mod images;
pub(crate) mod index;
mod kernels;
mod recorder;

/// Whether launches are recorded.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    gate::is_recording()
}

/// A call is about to be made: it waits for what it may write, and is recorded, where these are asked
/// for. A mistake of ours must not reach the program.
#[inline(never)]
pub(crate) fn before(form: fn(&[usize]), arguments: &[usize]) {
    if gate::is_guarding() {
        show(|| guard::pass(form, arguments));
    }
    if is_on() {
        show(|| form(arguments));
    }
}

/// A call of which nothing is known is about to be made.
#[inline(never)]
pub(crate) fn before_unknown() {
    show(guard::wait_for_awaited);
}

/// Shows a form the arguments of a call for [`crate::synchronous`]; says whether that went well.
pub(crate) fn shown_to(form: fn(&[usize]), arguments: &[usize]) -> bool {
    show(|| form(arguments))
}

fn show(look: impl FnOnce()) -> bool {
    let looked = catch_unwind(AssertUnwindSafe(look)).is_ok();
    if !looked {
        log!("a launch could not be looked at");
    }
    looked
}

/// Follows a call that has been made.
#[inline(never)]
pub(crate) fn after(form: fn(&[usize]), arguments: &[usize], code: u32) {
    if forms::is_success(code) {
        show(|| form(arguments));
    }
}

/// A range that is read or written by something that is not a kernel.
fn range((operation, write, address, bytes): forms::Range) {
    if synchronous::range(address, bytes).is_some() {
        return;
    }
    guard::range(write, address, bytes)
        .unwrap_or_else(|| recorder::operation(operation, write, address, bytes));
}

/// A launch of the kernel of `handle`. `words` is called with the kernel and a place for the number
/// and the value of each word of its arguments.
fn launch(handle: u64, sizes: Sizes, words: impl Fn(&kernels::Kernel, &mut dyn FnMut(usize, u64))) {
    guard::launch(handle, &sizes, &words)
        .unwrap_or_else(|| recorder::launch(handle, &sizes, &words));
}

/// A launch of an executable graph.
fn graph(executable: u64) {
    guard::graph(executable).unwrap_or_else(|| recorder::graph(executable));
}

/// A host function.
fn host_function() {
    guard::host_function().unwrap_or_else(recorder::host_function);
}

/// Begins to record. Nothing happens if that goes on already.
pub(crate) fn start() {
    if !is_on() {
        recorder::begin();
        gate::set_recording(true);
    }
}

/// Ends recording and forgets what was recorded.
pub(crate) fn stop() {
    if is_on() {
        gate::set_recording(false);
        recorder::end();
        graphs::forget_former();
    }
}

/// What was launched since the last question.
pub(crate) fn take() -> Accesses {
    let (mut merged, launches) = recorder::take();
    graphs::expand(&mut merged, &launches);
    let mut ids: Vec<u64> = merged.touched().collect();
    ids.sort_unstable();
    ids.dedup();
    let mut accesses = merged.finish();
    accesses.allocations = memory::lock().extents(&ids);
    accesses
}

/// The name of a kernel that has been launched; empty if the driver does not tell, as where another context than
/// the kernel's is current. Nobody may unload it meanwhile.
pub(crate) fn kernel_name(handle: u64) -> String {
    kernels::name_of(handle)
}

/// A module or library is about to be unloaded.
pub(crate) fn unloading(owner: u64) {
    recent::forget();
    images::unloaded(owner);
    kernels::forget();
}

/// An executable graph is about to be destroyed.
pub(crate) fn destroying_graph(executable: u64) {
    graphs::going(executable);
}

/// A context is about to go or is gone, and its modules with it.
pub(crate) fn context_going() {
    recent::forget();
    kernels::forget();
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    gate::set_recording(false);
    gate::set_guarding(false);
    // SAFETY: the caller's duty.
    unsafe {
        recorder::reset();
        kernels::reset();
        images::reset();
        graphs::reset();
        guard::reset();
        index::reset();
    }
}
