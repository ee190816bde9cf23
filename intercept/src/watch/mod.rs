//! Who wants to know what calls do: the [`recorder`], while a checkpointer asks for what launches read and write, and
//! the [`guard`], while calls have to wait for memory.
//!
//! `docs/access-sets.md` describes the method. A kernel's arguments are looked at word by word: one
//! that points into memory of ours counts for the whole allocation. Copies and fills say exactly
//! what they touch. Nothing rests on what is found here: it may be too much, and, where kernels
//! follow pointers that lie in memory, too little.
//!
//! While nobody asks a launch reads one flag, on the cache line of the gate's state. Else its arguments are decoded
//! once ([`crate::calls`]), and who asks takes what comes of that: while launches are recorded each thread writes to
//! a buffer of its own; which allocation a word points into is found without a lock
//! ([`index`](crate::state::index)).

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpucr_wire::Accesses;

use crate::abi::real;
use crate::abi::types::{Code, POINTER_IS_MANAGED, SUCCESS};
use crate::calls::effects::{Decoded, Decoder, Effects, Launch};
use crate::calls::nodes;
use crate::calls::outcomes::{Outcome, OutcomeDecoder};
use crate::cancel;
use crate::log::log;
use crate::state::range::Range;
use crate::state::{gate, graphs, images, kernels, memory, recent};
use crate::usage;

pub(crate) mod again;
pub(crate) mod broken;
mod classes;
pub(crate) mod faults;
pub(crate) mod guard;
pub(crate) mod interrupt;
pub(crate) mod meeting;
pub(crate) mod own;
mod packed;
pub(crate) mod recorder;
pub(crate) mod supervisor;
pub(crate) mod synchronous;

use interrupt::Patience;
use recorder::Recorder;

/// Whether launches are recorded.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    gate::is_recording()
}

/// A call is about to be made: it waits for what it may write, and is recorded, where these are asked
/// for. A mistake of ours must not reach the program.
#[inline(never)]
pub(crate) fn before(decoder: Decoder, arguments: &[usize]) {
    if gate::is_holding() {
        before_holding(decoder, arguments, Patience::Limited);
    }
    if !gate::is_guarding() {
        if is_on() {
            shielded(|| decoder(arguments, &mut Recorder));
            if again::is_keeping() {
                shielded(|| decoder(arguments, &mut again::Keeper::default()));
            }
        }
        return;
    }
    shielded(|| {
        let call = Decoded::of(decoder, arguments);
        shielded(|| guard::pass(&call));
        if is_on() {
            call.show(&mut Recorder);
        }
    });
    // Others may have launched something while that waited outside of the gate.
    if gate::is_holding() {
        before_holding(decoder, arguments, Patience::Limited);
    }
}

/// The same for a call that comes back when its copy is done. `waits`: after all that was in its stream before.
#[inline(never)]
pub(crate) fn before_synchronous(decoder: Decoder, arguments: &[usize], waits: bool) {
    if waits
        && gate::is_holding()
        && let Ok((context, _)) = real::current_context()
    {
        before_holding(decoder, arguments, Patience::ForBlocking(context));
    }
    before(decoder, arguments);
}

/// The same for a launch: what it has come to, if it was made in another way.
#[inline(never)]
pub(crate) fn before_launch(
    decoder: Decoder,
    arguments: &[usize],
    per_thread: bool,
) -> Option<Code> {
    before(decoder, arguments);
    let mut made = None;
    if gate::is_interruptible() {
        // The stack must not be unwound from the driver's calls into this.
        let _uncancelled = cancel::not_now();
        shielded(|| made = interrupt::launch(decoder, arguments, per_thread));
    }
    made
}

/// Called when the driver is there: kernels may be interrupted from now on, if the program was started so.
pub(crate) fn begin() {
    if interrupt::begin() {
        // Functions that wait, and pass no gate.
        faults::watch(faults::Why::Interruptible, true);
    }
}

/// A call waits for what can be interrupted and comes before it.
#[cold]
fn before_holding(decoder: Decoder, arguments: &[usize], patience: Patience) {
    shielded(|| {
        let mut stream = StreamOf(None);
        decoder(arguments, &mut stream);
        interrupt::hold(stream.0, patience);
    });
}

/// The stream that a call is for, where its decoder tells.
struct StreamOf(Option<u64>);

impl Effects for StreamOf {
    fn stream(&mut self, stream: u64) {
        self.0 = Some(stream);
    }

    fn range(&mut self, _: Range) {}

    fn launch(&mut self, _: &Launch) {}

    fn graph(&mut self, _: u64) {}

    fn host_function(&mut self) {}
}

/// A call of which nothing is known is about to be made.
#[inline(never)]
pub(crate) fn before_unknown() {
    if gate::is_holding() {
        shielded(|| interrupt::hold(None, Patience::Limited));
    }
    shielded(guard::wait_for_awaited);
}

/// Follows a call that has been made.
#[inline(never)]
pub(crate) fn after(decoder: OutcomeDecoder, arguments: &[usize], code: Code) {
    if code == SUCCESS {
        shielded(|| decoder(arguments).map_or((), keep));
    }
}

/// Does what looks at a call; says whether that went well.
fn shielded(look: impl FnOnce()) -> bool {
    let looked = catch_unwind(AssertUnwindSafe(look)).is_ok();
    if !looked {
        log!("a launch could not be looked at");
    }
    looked
}

/// Keeps what a call has done, whether anything is recorded or not.
fn keep(outcome: Outcome) {
    match outcome {
        Outcome::Loaded { owner, image } => {
            images::made(owner);
            // SAFETY: the driver has loaded it from there.
            unsafe { images::loaded(owner, image) }
        }
        Outcome::LoadedFromFile { owner, path } => {
            images::made(owner);
            // SAFETY: the driver has read the path from there.
            unsafe { images::loaded_from_file(owner, path) }
        }
        Outcome::VariableOfLibrary { library, address } => variable_seen(address, library, 0),
        Outcome::VariableOfModule { module, address } => match images::library_of(module) {
            Some(library) => variable_seen(address, library, 0),
            None => {
                let context = real::current_context().map_or(0, |(context, _)| context);
                variable_seen(address, module, context);
            }
        },
        Outcome::FunctionOfKernel { function, kernel } => {
            images::function_of_kernel(function, kernel);
        }
        Outcome::ModuleOfLibrary { module, library } => images::module_of_library(module, library),
        Outcome::GraphMade { executable, graph } => {
            graphs::made(executable, nodes::of_graph(graph));
        }
        Outcome::NodeSet { executable, node, given } => {
            // SAFETY: the driver has just accepted these parameters.
            graphs::set(executable, node, unsafe { nodes::given(given) });
        }
    }
}

/// The program has been told where a variable of `owner` is, which ends with `context` too unless that is 0. Counts it
/// if it is managed memory.
fn variable_seen(address: u64, owner: u64, context: u64) {
    let mut managed = 0u64;
    let out = (&raw mut managed).cast();
    // SAFETY: there is room for what the attribute is, a flag.
    let code = unsafe { real::cuPointerGetAttribute(out, POINTER_IS_MANAGED, address) };
    if code == SUCCESS && managed != 0 {
        usage::managed_variable(address, owner, context);
    }
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
    let merged = recorder::take();
    let mut ids: Vec<u64> = merged.touched().collect();
    ids.sort_unstable();
    ids.dedup();
    let mut accesses = merged.finish();
    accesses.allocations = memory::lock().extents(&ids);
    accesses
}

/// A module or library is about to be unloaded.
pub(crate) fn unloading(owner: u64) {
    recent::forget();
    if gate::is_interruptible() {
        if gate::is_holding() {
            interrupt::hold(None, Patience::Limited);
        }
        if let Some(image) = images::of(owner) {
            interrupt::image_going(image);
        }
    }
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
