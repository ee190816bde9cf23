//! What happens at `fork`: CUDA does not survive it, so the child starts afresh. This is the list of all that the
//! child resets; nobody but the first call of the program imports it.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::state::{contexts, events, gate, graphs, images, index, kernels, memory, peers, recent};
use crate::watch::{again, faults, guard, interrupt, meeting, recorder};
use crate::{agent, unknown, usage};

/// Sees to it that children start afresh. Called before the agent starts.
pub(crate) fn watch() {
    // Not a lock: a child of a fork that another thread makes meanwhile would find it taken for ever.
    static IS_WATCHED: AtomicBool = AtomicBool::new(false);
    if !IS_WATCHED.swap(true, Ordering::SeqCst) {
        // SAFETY: the handler is a function of this library, which is never unloaded.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    }
}

unsafe extern "C" fn in_child() {
    // SAFETY: in the child of a fork there is one thread, and it is here, not in the tables.
    unsafe {
        gate::reset();
        contexts::reset();
        usage::reset();
        memory::reset();
        recorder::reset();
        kernels::reset();
        images::reset();
        graphs::reset();
        guard::reset();
        faults::reset();
        again::reset();
        interrupt::reset();
        index::reset();
        recent::reset();
        agent::sharing::reset();
        agent::peers::reset();
        peers::reset();
        events::reset();
    }
    meeting::reset();
    unknown::reset();
    // SAFETY: the only thread of the child is here, not in the agent.
    unsafe { agent::reset() };
}
