//! Memory whose synchronous copies and fills always wait: `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`.
//!
//! A call without `Async` in its name may come back before it is done, within a device for example. A program that
//! lets others reach its memory, such as a network card, asks for memory where none does. The driver takes that for
//! memory of its own `cuMemAlloc` and not for mapped memory, from which the shim serves `cuMemAlloc`. So the shim
//! remembers it for each allocation, and waits itself.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::abi::real;
use crate::abi::types::{Code, SUCCESS};
use crate::calls::effects::{Decoder, Effects, Launch};
use crate::state::memory;
use crate::state::range::Range;

/// Whether any allocation was ever to be so. Most programs do not know of it.
static WANTED: AtomicBool = AtomicBool::new(false);

/// There is such memory from now on.
pub(crate) fn want() {
    WANTED.store(true, Ordering::Relaxed);
}

/// Whether there may be such memory.
#[inline(always)]
pub(crate) fn is_wanted() -> bool {
    WANTED.load(Ordering::Relaxed)
}

/// Whether a call touches such memory.
#[derive(Default)]
struct Found(bool);

impl Effects for Found {
    fn range(&mut self, range: Range) {
        self.0 = self.0 || memory::lock().is_synchronous(range.address, range.bytes);
    }

    // Calls that should be synchronous are copies and fills.
    fn launch(&mut self, _: &Launch) {}

    fn graph(&mut self, _: u64) {}

    fn host_function(&mut self) {}
}

/// After a call that should have been synchronous has succeeded, outside of the gate: waits for the stream that it was
/// for if it has touched such memory. The code that the call is to give back.
#[inline(never)]
pub(crate) fn finish(decoder: Decoder, arguments: &[usize], stream: u64) -> Code {
    let mut found = Found::default();
    let looked = super::shielded(|| decoder(arguments, &mut found));
    if looked && !found.0 {
        return SUCCESS;
    }
    // SAFETY: one of the streams that each context has.
    unsafe { real::cuStreamSynchronize(stream) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;
    use crate::abi::slots::SLOTS;
    use crate::abi::table::index;
    use crate::exports::{cuMemcpyDtoD_v2, cuMemsetD8_v2_ptds};
    use crate::state::memory::fake::Fake;

    const MIB: u64 = 1 << 20;
    /// The stream that was waited for.
    static WAITED: AtomicU64 = AtomicU64::new(0);

    extern "C" fn done() -> Code {
        SUCCESS
    }

    extern "C" fn synchronize(stream: u64) -> Code {
        WAITED.store(stream, Ordering::SeqCst);
        SUCCESS
    }

    #[test]
    fn calls_that_touch_memory_which_is_to_be_synchronous_are_waited_for() {
        let put = |slot: usize, function: *const ()| {
            SLOTS[slot].store(function.cast_mut(), Ordering::SeqCst);
        };
        put(index::cuMemcpyDtoD_v2, done as *const ());
        put(index::cuMemsetD8_v2_ptds, done as *const ());
        put(index::cuStreamSynchronize, synchronize as *const ());
        let fake = Fake::new();
        let mut memory = crate::state::memory::Memory::default();
        let [plain, wanted] =
            [3 * MIB, 100].map(|size| memory.allocate(&fake, 0, 1, size).unwrap());
        memory.allocation_at_mut(wanted + 99).expect("inside").synchronous = true;
        assert!(memory.is_synchronous(wanted + 50, 1) && memory.is_synchronous(wanted - 50, 100));
        assert!(!memory.is_synchronous(wanted + 100, 50) && !memory.is_synchronous(wanted, 0));
        assert!(!memory.is_synchronous(plain, 3 * MIB));
        let (plain, wanted) = (plain as usize, wanted as usize);
        *crate::state::memory::lock() = memory;
        want();
        let waited = |call: &dyn Fn() -> Code| {
            WAITED.store(0, Ordering::SeqCst);
            assert_eq!(call(), SUCCESS);
            WAITED.load(Ordering::SeqCst)
        };
        // SAFETY: the functions that take the driver's place touch nothing.
        let copy = |to, from, size| move || unsafe { cuMemcpyDtoD_v2(to, from, size) };
        // SAFETY: the functions that take the driver's place touch nothing.
        let fill = |to, count| move || unsafe { cuMemsetD8_v2_ptds(to, 0, count) };
        assert_eq!(waited(&copy(plain, plain + 100, 10)), 0);
        assert_eq!(waited(&copy(wanted, plain, 10)), 1);
        assert_eq!(waited(&copy(plain, wanted + 90, 10)), 1);
        assert_eq!(waited(&fill(plain, 100)), 0);
        assert_eq!(waited(&fill(wanted, 100)), 2, "the stream of this thread");
        // Freed memory is not asked about any more, nor what takes its place.
        let freed = crate::state::memory::lock().take(wanted as u64).expect("known");
        crate::state::memory::lock().release(&fake, freed);
        let again = crate::state::memory::lock().allocate(&fake, 0, 1, 100).expect("room");
        assert_eq!(again, wanted as u64);
        assert_eq!(waited(&fill(wanted, 100)), 0);
    }
}
