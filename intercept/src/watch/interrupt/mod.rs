//! Kernels that a dump can interrupt between two of their blocks, at barriers or in their loops, or abort and begin again:
//! `gpucr run --interruptible`.
//!
//! `docs/interruption.md` says what it is for and why it is right. A launch that matches is made with the kernel's
//! [twin](twins), and is an [instance](instances) up to its end. While there is one, whatever would be queued behind it waits in
//! the shim; so nothing follows it in its stream when the agent [interrupts](resume) it, and it is launched again, for
//! what is left, before anything else. Calls that wait for it or ask for it are [called again](truthful)
//! when it was interrupted meanwhile.
//!
//! Nothing of this happens in a program that was not started so.

use crate::state::gate;

mod instances;
mod launch;
mod layout;
mod lengths;
mod recent;
mod repeat;
mod resume;
mod settings;
mod twins;

pub(crate) use instances::{Patience, hold, truthful};
pub(crate) use launch::launch;
pub(crate) use resume::{give_up, interrupt, relaunch, relaunch_later, standing};
pub(crate) use settings::{begin, why_none};
pub(crate) use twins::why_not;

/// The modules and libraries that were loaded from an image are about to go.
pub(crate) fn image_going(image: u64) {
    // What is not known to be over may run still: its module is kept.
    twins::image_going(image, instances::are_over());
}

/// A context is gone, and all that was in it.
pub(crate) fn context_gone(context: u64) {
    instances::context_gone(context);
    lengths::context_gone(context);
    twins::context_gone(context);
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    gate::set_holding(false);
    // SAFETY: the caller's duty.
    unsafe {
        instances::reset();
        lengths::reset();
        resume::reset();
        twins::reset();
    }
}
