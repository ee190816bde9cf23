//! Errors of the device, while memory is awaited or shared, or while somebody watches over the program.
//!
//! A program that was restored before its memory is there runs on guesses: a kernel that follows pointers
//! which lie in memory may touch what is not mapped yet. The device then stops all work of the context,
//! and every call fails from then on. The program must not see that: it is no error of its own. So the
//! first thread that gets such an error tells the restore and goes no further, and the restore ends the
//! program and makes it anew, with all of its memory. The same holds for a program that shares memory with other
//! instances, which is mapped read-only, and writes it. Such a program outlives who has restored it: where
//! nobody is left to be told it gets the error.
//!
//! A `gpucr run` that watches over the program ([`supervisor`]) is only told, since a program that ends with a failure
//! after that is restored; it gets the error.
//!
//! Calls that pass the gate look at what they give back. Those that do not are a mere jump through a slot
//! (see [`crate::abi::slots`]): for as long as memory is awaited or shared, and always where somebody watches over the
//! program, the slots of those that programs make most, and by which they wait for the device, lead through here.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::broken::{is_fault, is_lasting};
use super::own::is_ours;
use super::{guard, interrupt, meeting, supervisor};
use crate::abi::slots::{SLOTS, resolve};
use crate::abi::table::{Wrapper, index};
use crate::abi::types::{Code, ERROR_CONTEXT_IS_DESTROYED};
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::gate;
use crate::state::memory::pools;
use crate::state::memory::vmm::Driver;

/// How often it is seen whether there still is somebody to be told.
const LISTENING: Duration = Duration::from_secs(1);

/// Whether errors that the program gets are to be looked at.
#[inline]
pub(crate) fn is_wanted() -> bool {
    gate::is_watching() || supervisor::is_there()
}

/// The program is about to get this code. Does not return if it must not.
#[cold]
pub(crate) fn look(code: Code) -> Code {
    if !is_lasting(code) || is_ours() {
        return code;
    }
    if is_fault(code) {
        // As long as there is somebody who can be expected to end the program.
        while guard::tell_fault(code) {
            log!("error {code} while memory is awaited or shared: this attempt is over");
            std::thread::sleep(LISTENING);
        }
    }
    // A program gets that one of its own doing.
    if code != ERROR_CONTEXT_IS_DESTROYED {
        supervisor::tell_broken(code);
    }
    code
}

/// Whether a program calls the function of this name to wait for the device.
const fn waits(name: &str) -> bool {
    const WORD: &[u8] = b"Synchronize";
    let (name, mut begin) = (name.as_bytes(), 0);
    while begin + WORD.len() <= name.len() {
        let mut same = 0;
        while same < WORD.len() && name[begin + same] == WORD[same] {
            same += 1;
        }
        if same == WORD.len() {
            return true;
        }
        begin += 1;
    }
    false
}

/// Functions that jump to the driver, with one in place of each that looks at what it gives back.
macro_rules! looked_at {
    ($($name:ident($($argument:ident),*))*) => {
        /// Positions of the functions: the program is given jumps through their slots, or what is written by hand and
        /// goes on through the slot as a jump does.
        pub(crate) static LOOKED_AT: [usize; REAL.len()] = [$(index::$name),*];
        /// Names the functions below by number.
        #[allow(non_camel_case_types)]
        enum Number { $($name),* }
        /// The driver's functions.
        static REAL: [AtomicPtr<()>; [$(Number::$name as usize),*].len()] =
            [const { AtomicPtr::new(std::ptr::null_mut()) }; _];
        /// What looks, in the order of the jumps.
        static LOOKING: [Wrapper; REAL.len()] =
            [$(Wrapper(index::$name, looking::$name as *const ())),*];
        #[allow(non_snake_case)]
        mod looking {
            use super::*;
            $(pub(super) unsafe extern "C-unwind" fn $name($($argument: usize),*) -> Code {
                let target = REAL[Number::$name as usize].load(Ordering::Acquire);
                // SAFETY: what the slot held before is the driver's function (or its stub), which takes
                // these integers and returns a CUresult.
                let call = || unsafe {
                    let real: unsafe extern "C-unwind" fn($(looked_at!(@ $argument)),*) -> Code =
                        std::mem::transmute(target);
                    real($($argument),*)
                };
                const ASKS: bool = is_wait(stringify!($name));
                let code = if ASKS { interrupt::truthful(call) } else { call() };
                const WAITS: bool = waits(stringify!($name));
                if WAITS && code == 0 && pools::is_due() && !is_ours() {
                    pools::tidy(&Driver);
                }
                if WAITS && code == 0 && meeting::is_awaited() && !is_ours() {
                    meeting::come_back();
                }
                if code == 0 { code } else { look(code) }
            })*
        }
    };
    (@ $argument:ident) => { usize };
}

looked_at! {
    cuCtxSynchronize()
    cuCtxSynchronize_v2(context)
    cuEventCreate(out, flags)
    cuEventDestroy_v2(event)
    cuEventElapsedTime(out, start, end)
    cuEventElapsedTime_v2(out, start, end)
    cuEventQuery(event)
    cuEventRecord(event, stream)
    cuEventRecord_ptsz(event, stream)
    cuEventRecordWithFlags(event, stream, flags)
    cuEventRecordWithFlags_ptsz(event, stream, flags)
    cuEventSynchronize(event)
    cuFuncGetAttribute(out, attribute, function)
    cuFuncSetAttribute(function, attribute, value)
    cuKernelGetAttribute(out, attribute, kernel, device)
    cuKernelSetAttribute(attribute, value, kernel, device)
    cuMemGetInfo_v2(free, total)
    cuModuleGetFunction(out, module, name)
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, function, threads, shared, flags)
    cuStreamCreate(out, flags)
    cuStreamCreateWithPriority(out, flags, priority)
    cuStreamGetCaptureInfo_v2(stream, out, id, graph, nodes, count)
    cuStreamGetCaptureInfo_v2_ptsz(stream, out, id, graph, nodes, count)
    cuStreamGetCaptureInfo_v3(stream, out, id, graph, nodes, edges, count)
    cuStreamGetCaptureInfo_v3_ptsz(stream, out, id, graph, nodes, edges, count)
    cuStreamIsCapturing(stream, out)
    cuStreamIsCapturing_ptsz(stream, out)
    cuStreamQuery(stream)
    cuStreamQuery_ptsz(stream)
    cuStreamSynchronize(stream)
    cuStreamSynchronize_ptsz(stream)
    cuStreamWaitEvent(stream, event, flags)
    cuStreamWaitEvent_ptsz(stream, event, flags)
}

/// Whether a function waits for work in a stream or asks whether it is over.
const fn is_wait(name: &str) -> bool {
    const BEGIN: [&[u8]; 3] = [b"cuCtxSynchronize", b"cuStreamSynchronize", b"cuStreamQuery"];
    let (name, mut of) = (name.as_bytes(), 0);
    while of < BEGIN.len() {
        let mut at = 0;
        while at < BEGIN[of].len() && at < name.len() && BEGIN[of][at] == name[at] {
            at += 1;
        }
        if at == BEGIN[of].len() {
            return true;
        }
        of += 1;
    }
    false
}

/// Why slots lead through here; each is a bit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// Memory is awaited or shared.
    Memory = 1,
    /// A call that waits for the device is awaited.
    Meeting = 2,
    /// Somebody watches over the program.
    Supervisor = 4,
    /// Kernels may be interrupted.
    Interruptible = 8,
    /// Pools give memory back when the program synchronises.
    Pools = 16,
}

/// Why slots lead through here now.
static REASONS: Resettable<Mutex<u32>> = Resettable::new(Mutex::new(0));

/// Leads the slots through here for one more reason, or one less; with none of them back.
pub(crate) fn watch(why: Why, on: bool) {
    let mut reasons = REASONS.get().lock().unwrap_or_else(PoisonError::into_inner);
    *reasons = if on { *reasons | why as u32 } else { *reasons & !(why as u32) };
    for (Wrapper(slot, looking), real) in LOOKING.iter().zip(&REAL) {
        // Puts the driver's function into the slot: a stub that is still there would do so later, in
        // our place.
        let driver = resolve(*slot as u32).cast_mut();
        if *reasons != 0 {
            // It stays there for those who are still on their way through here when this is over.
            real.store(driver, Ordering::Release);
            SLOTS[*slot].store(looking.cast_mut(), Ordering::Release);
        }
    }
}

/// In the child of a fork: nobody changes the reasons, which stay.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    let reasons = match REASONS.get().try_lock() {
        Ok(reasons) => *reasons,
        Err(_) => Why::Pools as u32,
    };
    // SAFETY: the caller's duty.
    unsafe { REASONS.reset(Mutex::new(reasons)) };
}
