//! Memory that is missing only because the checkpointer holds it.

use std::thread;
use std::time::Duration;

use crate::abi::types::{Code, ERROR_OUT_OF_MEMORY};
use crate::state::{gate, memory};
use crate::watch::guard;

/// Longer than the checkpointer takes to ask again for the blocks.
const LETTING_GO: Duration = Duration::from_secs(5);
/// Between two tries to get memory.
const PAUSE: Duration = Duration::from_millis(5);

/// Whether there is memory that nobody uses, and that is there again soon.
fn is_kept() -> bool {
    let memory = memory::lock();
    // Pools give nothing back as long as memory is awaited or still to be saved.
    memory.is_missed() || gate::is_guarding() && memory.have_pools_freed()
}

/// Passes the gate and asks for memory, and again for a while if there is none only because the
/// checkpointer holds what the program has given back: a dump must not make a program fail that
/// would have had enough.
///
/// The caller is outside of the gate, and so is the wait: a checkpointer that is closing the gate
/// lets go of the memory only once it is closed.
pub(crate) fn patiently<T>(ask: impl Fn() -> Result<T, Code>) -> Result<T, Code> {
    let mut left = LETTING_GO;
    // The checkpointer may have let go between the question and the check: then it is asked once more.
    let mut kept_before = true;
    loop {
        let inside = gate::enter();
        let answer = ask();
        let missing = matches!(answer, Err(ERROR_OUT_OF_MEMORY));
        let is_kept = missing && is_kept();
        if is_kept {
            // Memory that is still to be saved is kept until it is saved.
            guard::wait_for_all();
        }
        drop(inside);
        if !(is_kept || missing && kept_before) || left.is_zero() {
            return answer;
        }
        kept_before = is_kept;
        if is_kept {
            thread::sleep(PAUSE);
        }
        // Until it is closed the checkpointer does not ask.
        if gate::is_open() {
            left = left.saturating_sub(PAUSE);
        }
    }
}
