//! By which tools (profilers, debuggers) would be told of the runtime's calls. There are none: what the runtime finds
//! is zero and stays so.

use super::slots::called;
use crate::api::arguments::Out;
use crate::status::Outcome;

/// Words that the runtime reads, and tools would write.
struct Words<const N: usize>([std::sync::atomic::AtomicU32; N]);

impl<const N: usize> Words<N> {
    const fn zeros() -> Words<N> {
        Words([const { std::sync::atomic::AtomicU32::new(0) }; N])
    }

    fn give(&self, address: &Out<u64>, count: &Out<usize>) -> Outcome {
        address.set(self.0.as_ptr() as u64)?;
        count.set(N)
    }
}

/// Which functions of the runtime a tool listens to.
static CALLBACKS: Words<1024> = Words::zeros();
/// What else of tools the runtime looks at.
static STATE: Words<14> = Words::zeros();

/// Where the runtime finds which of its functions a tool listens to.
pub(super) extern "C" fn tools_callbacks(address: Out<u64>, count: Out<usize>) {
    let _ = called("tools_callbacks", || CALLBACKS.give(&address, &count));
}

/// Where the runtime finds what else it needs to know of tools.
pub(super) extern "C" fn tools_state(address: Out<u64>, count: Out<usize>) {
    let _ = called("tools_state", || STATE.give(&address, &count));
}
