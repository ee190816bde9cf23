//! A launch that is kept, to be made once more.
//!
//! Only while a checkpointer lets a program make its launches one by one and has asked for it. Kept is what a plain
//! launch consists of: one with attributes, of a graph, or into a capture is not.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::packed;
use crate::abi::real;
use crate::abi::types::{Code, SUCCESS};
use crate::calls::effects::{Effects, Form, Launch};
use crate::resettable::Resettable;
use crate::state::kernels;
use crate::state::range::Range;

/// A launch of a kernel.
struct Call {
    context: u64,
    kernel: u64,
    form: Form,
    /// The buffer of all parameters.
    arguments: Vec<u8>,
}

/// What was launched since launches are kept.
enum Kept {
    Nothing,
    One(Call),
    /// Several launches, or one that cannot be kept.
    Other,
}

static IS_KEEPING: AtomicBool = AtomicBool::new(false);
static KEPT: Resettable<Mutex<Kept>> = Resettable::new(Mutex::new(Kept::Nothing));

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets what is kept; from now on launches are kept, or not.
pub(crate) fn keep(on: bool) {
    *kept() = Kept::Nothing;
    IS_KEEPING.store(on, Ordering::SeqCst);
}

/// Launches are not kept any more; the last one stays.
pub(crate) fn stop() {
    IS_KEEPING.store(false, Ordering::SeqCst);
}

/// Whether launches are kept.
pub(super) fn is_keeping() -> bool {
    IS_KEEPING.load(Ordering::Relaxed)
}

/// Keeps the launches of a call.
#[derive(Default)]
pub(super) struct Keeper {
    stream: u64,
}

impl Effects for Keeper {
    fn stream(&mut self, stream: u64) {
        self.stream = stream;
    }

    fn range(&mut self, range: Range) {
        // Another thread may have changed what the launch reads.
        if range.write {
            forget_one();
        }
    }

    fn launch(&mut self, launch: &Launch) {
        let call = call(launch, self.stream);
        let mut kept = kept();
        *kept = match (&*kept, call) {
            (Kept::Nothing, Some(call)) => Kept::One(call),
            _ => Kept::Other,
        };
    }

    fn graph(&mut self, _: u64) {
        *kept() = Kept::Other;
    }

    fn host_function(&mut self) {
        forget_one();
    }
}

/// Something else has happened since the launch.
fn forget_one() {
    let mut kept = kept();
    if matches!(*kept, Kept::One(_)) {
        *kept = Kept::Other;
    }
}

fn call(launch: &Launch, stream: u64) -> Option<Call> {
    let form = launch.form?;
    let (context, _) = real::current_context().ok()?;
    if is_capturing(stream) {
        return None;
    }
    let arguments = launch.packed(&kernels::find(launch.handle))?;
    Some(Call { context, kernel: launch.handle, form, arguments })
}

/// Whether work that is given to a stream becomes a part of a graph. The stream 0 is one of two.
fn is_capturing(stream: u64) -> bool {
    let asked = |ask: unsafe fn(u64, *mut u32) -> Code| {
        let mut status = 0;
        // SAFETY: writes one value; the program is launching something in this stream.
        let code = unsafe { ask(stream, &mut status) };
        code != SUCCESS || status != 0
    };
    asked(real::cuStreamIsCapturing) || stream == 0 && asked(real::cuStreamIsCapturing_ptsz)
}

/// Makes the launch once more, in the default stream of its context. `None` if none is kept.
///
/// The gate is closed and the devices idle.
pub(crate) fn launch() -> Option<Result<(), Code>> {
    let kept = std::mem::replace(&mut *kept(), Kept::Nothing);
    let Kept::One(Call { context, kernel, form, arguments }) = kept else { return None };
    Some(real::with_context(context, || packed::launch(kernel, form, 0, &arguments)))
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    stop();
    // SAFETY: the caller's duty.
    unsafe { KEPT.reset(Mutex::new(Kept::Nothing)) };
}
