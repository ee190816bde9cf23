//! Twins of kernels, in modules of the shim's own: see [`gpucr_rewrite`]. The program's modules stay as they are.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpucr_rewrite::{How, alone, rewrite_with};

use super::lengths::{self, Length};
use super::recent::Recent;
use super::repeat::{self, Repeat};
use super::settings::{insides, is_auto, is_named};
pub(super) use crate::abi::real::Relaxed;
use crate::abi::real::{self, check};
use crate::abi::types::{Code, SUCCESS};
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::{gate, images, kernels};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`
const MAX_THREADS: u32 = 0;
/// `CU_FUNC_ATTRIBUTE_NUM_REGS`
const REGISTERS: u32 = 4;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_SHARED: u32 = 8;
/// `CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH`
const CLUSTER_WIDTH: u32 = 11;
/// So much dynamic shared memory needs no leave, bytes.
const SHARED_WITHOUT_LEAVE: u32 = 48 << 10;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `..._MINOR`
const CAPABILITY: [u32; 2] = [75, 76];
/// No more text of a module is read, bytes.
const MOST_TEXT: usize = 64 << 20;
/// A multiprocessor gives registers to a thread by so many (CUDA C++ Programming Guide, compute capabilities).
const REGISTERS_AT_ONCE: u32 = 8;
/// So many keep no block from running: a multiprocessor has as many for each thread that can run on it.
const ENOUGH_REGISTERS: u32 = 32;
/// Threads have no more.
const MOST_REGISTERS: u32 = 255;
/// Why there are no twins of a kernel that was not found.
const NO_TEXT: &str = "its name is not in the PTX of its module";
/// Why there are none where nobody knows what the module was loaded from.
const NO_MODULE: &str = "its module is gone, or too large to be rewritten";

/// A kernel that can be interrupted.
pub(super) struct Twin {
    pub(super) kernel: Arc<kernels::Kernel>,
    /// Between two of its blocks.
    pub(super) between: Entry,
    /// Inside of them.
    pub(super) inside: Option<(Entry, Inside)>,
    /// The one that is aborted and begun again, if a launch may be.
    pub(super) aborted: Option<(Entry, Repeat)>,
    pub(super) recent: Recent,
}

/// What was made of a kernel's text.
#[derive(Clone)]
struct Twins {
    all: gpucr_rewrite::Twins,
    /// What its code does, if that is asked for.
    code: Option<Arc<gpucr_kernels::Kernel>>,
}

/// Where inside of its blocks a kernel is interrupted, and what is saved then, bytes: by each thread, and by those of a block
/// together. Dynamic shared memory is saved too, if it is a multiple of so many bytes as is said.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inside {
    Loops { saved: u64 },
    Barriers { saved: u64, shared: u64, dynamic: Option<u64> },
}

/// Where inside of its blocks a kernel is to be interrupted, and the name of the twin; or why it is not.
fn inside(twins: gpucr_rewrite::Twins) -> Result<(String, Inside), String> {
    let asked = insides();
    let why = match (twins.at_barriers, twins.in_loops) {
        (Ok(at), _) if asked.barriers => {
            let (saved, shared, dynamic) = (at.saved, at.shared, at.dynamic);
            return Ok((at.name, Inside::Barriers { saved, shared, dynamic }));
        }
        (_, Ok(of)) if asked.loops => return Ok((of.name, Inside::Loops { saved: of.saved })),
        (Err(at), Err(of)) if asked.loops => format!("in loops, {of}; at barriers, {at}"),
        (Err(at), _) if asked.barriers => at.to_string(),
        _ => "nobody has asked for that".to_owned(),
    };
    Err(why)
}

/// A function of ours to be launched in place of the program's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) function: u64,
    /// Where the address of the control block goes in the buffer of all parameters.
    pub(super) place: usize,
    max_threads: u32,
}

/// The twins of a kernel of the program, or why it has none.
struct Module {
    handle: u64,
    kernel: String,
    twins: Result<Twins, String>,
}

/// A module of ours with a kernel's twins.
type Loaded = (u64, Twins);

/// What is known of a kernel that the program launches.
#[derive(Clone, Default)]
pub(super) struct Found {
    /// If it depends on that whether it may be interrupted.
    pub(super) length: Option<Arc<Length>>,
    pub(super) twin: Option<Arc<Twin>>,
}

#[derive(Default)]
struct Known {
    /// By context and the program's handle; what a handle means changes with the generation, which is told too.
    known: HashMap<(u64, u64), (u64, Found)>,
    /// By context and image.
    modules: HashMap<(u64, u64), Vec<Module>>,
    /// Why kernels have none, by their names.
    reasons: HashMap<String, String>,
}

static TWINS: Resettable<Mutex<Option<Known>>> = Resettable::new(Mutex::new(None));

/// Held while a module is loaded.
static LOADING: Resettable<Mutex<()>> = Resettable::new(Mutex::new(()));

fn lock() -> MutexGuard<'static, Option<Known>> {
    TWINS.get().lock().unwrap_or_else(PoisonError::into_inner)
}

fn with<T>(work: impl FnOnce(&mut Known) -> T) -> T {
    work(lock().get_or_insert_default())
}

/// What is known of a kernel that is about to be launched in `context`, which is current. The twin of one that is named is
/// loaded; one that may be interrupted if it takes long has a twin here only if that has been [loaded](load).
pub(super) fn of(context: u64, handle: u64) -> Found {
    let generation = kernels::generation();
    let known = with(|twins| twins.known.get(&(context, handle)).cloned());
    if let Some((of, found)) = known
        && of == generation
    {
        return found;
    }
    let kernel = kernels::find(handle);
    let mut found = Found::default();
    if is_named(&kernel.name) {
        let module = module(context, handle, &kernel);
        found.twin = made(&kernel, module);
    } else if is_auto() {
        let length = lengths::of(&kernel);
        match loaded(context, kernel.image, &kernel.name).filter(|_| length.is_long()) {
            None => found.length = Some(length),
            Some(module) => {
                found.twin = made(&kernel, module);
                // What cannot have a twin is not measured.
                found.length = found.twin.is_some().then_some(length);
            }
        }
    }
    with(|twins| twins.known.insert((context, handle), (generation, found.clone())));
    found
}

/// Loads the twin of a kernel that takes long, if `rests` says that nothing runs in `context`, which is current; `None`
/// within: it has none. `None`: something runs.
pub(super) fn load(
    context: u64,
    handle: u64,
    length: &Arc<Length>,
    rests: impl FnOnce() -> bool,
) -> Option<Option<Arc<Twin>>> {
    let generation = kernels::generation();
    let kernel = &length.kernel;
    let module = match loaded(context, kernel.image, &kernel.name) {
        Some(module) => module,
        None => {
            let text = Rewritten::of(handle, kernel);
            if text.is_to_be_loaded() && !rests() {
                return None;
            }
            // Who rests is alone inside the gate, so nobody waits for it there.
            let _alone = LOADING.get().try_lock().ok()?;
            text.keep(context, kernel)
        }
    };
    let twin = made(kernel, module);
    let found = Found { length: twin.is_some().then(|| length.clone()), twin: twin.clone() };
    with(|twins| twins.known.insert((context, handle), (generation, found)));
    Some(twin)
}

/// The twin, if it can be made; why it cannot is kept.
fn made(kernel: &Arc<kernels::Kernel>, module: Result<Loaded, String>) -> Option<Arc<Twin>> {
    let made = module.and_then(|module| make(kernel.clone(), module));
    if let Err(why) = &made {
        log!("`{}` cannot be interrupted: {why}", kernel.name);
        with(|twins| twins.reasons.insert(kernel.name.clone(), why.clone()));
    }
    made.ok().map(Arc::new)
}

/// Why a kernel of this name could not be interrupted, as a remark; `None` if nothing was in the way, or nothing can be.
pub(crate) fn why_not(name: &str) -> Option<String> {
    if !gate::is_interruptible() {
        return None;
    }
    let why = match with(|twins| twins.reasons.get(name).cloned()) {
        Some(why) => why,
        None if is_named(name) => return None,
        None if is_auto() => lengths::why_not(name)?.to_owned(),
        None => "`--interruptible` does not name it".to_owned(),
    };
    Some(format!("not interrupted: {why}"))
}

/// Launches of a kernel cannot be interrupted for this reason, which is not the kernel's alone.
pub(super) fn note(kernel: &str, why: &str) {
    with(|twins| {
        if !twins.reasons.contains_key(kernel) {
            twins.reasons.insert(kernel.to_owned(), why.to_owned());
        }
    });
}

fn make(kernel: Arc<kernels::Kernel>, (module, twins): Loaded) -> Result<Twin, String> {
    let params = kernel.params.as_deref().ok_or("the driver does not tell its parameters")?;
    let end = params.iter().map(|param| (param.offset + param.size) as usize).max().unwrap_or(0);
    let between = entry(module, &kernel.name, params.len(), end)?;
    let aborted = aborted(&kernel, &twins).and_then(|(name, repeat)| {
        let entry = entry(module, &name, params.len(), end)?;
        Ok((entry, repeat))
    });
    if let Err(why) = &aborted {
        log!("`{}` is not aborted: {why}", kernel.name);
    }
    let inside = inside(twins.all).and_then(|(name, inside)| {
        let entry = entry(module, &name, params.len(), end)?;
        Ok((entry, inside))
    });
    if let Err(why) = &inside {
        log!("`{}` is not interrupted inside of its blocks: {why}", kernel.name);
    }
    let (inside, aborted) = (inside.ok(), aborted.ok());
    Ok(Twin { kernel, between, inside, aborted, recent: Recent::default() })
}

/// The name of the twin that is aborted, and for which launches that is right; or why it never is.
fn aborted(kernel: &kernels::Kernel, twins: &Twins) -> Result<(String, Repeat), String> {
    let twin = match &twins.all.aborted {
        Ok(twin) => twin,
        Err([why @ gpucr_rewrite::Inside::Unasked, _]) => return Err(why.to_string()),
        Err([alone, at]) => return Err(format!("in loops, {alone}; at barriers, {at}")),
    };
    let code = twins.code.as_deref().ok_or("its code is not known")?;
    Ok((twin.name.clone(), Repeat::of(kernel, code, twin.by_blocks)?))
}

/// A twin, by its name in a module of ours. The kernel has so many parameters, which end there.
fn entry(module: u64, name: &str, params: usize, end: usize) -> Result<Entry, String> {
    let name = CString::new(name).map_err(|error| error.to_string())?;
    let failed = |code: Code| format!("the driver does not take its twin (error {code})");
    let (mut function, mut max_threads) = (0, 0);
    let (mut place, mut size) = (0, 0);
    // SAFETY: each writes what it is given places for; the module is one that we have loaded.
    unsafe {
        check(real::cuModuleGetFunction(&mut function, module, name.as_ptr())).map_err(failed)?;
        check(real::cuFuncGetAttribute(&mut max_threads, MAX_THREADS, function)).map_err(failed)?;
        check(real::cuFuncGetParamInfo(function, params, &mut place, &mut size)).map_err(failed)?;
    }
    if size != 8 || place < end {
        return Err("its twin has other parameters".to_owned());
    }
    Ok(Entry { function, place, max_threads: max_threads.max(0) as u32 })
}

/// The module of ours with a kernel's twins, if it has been loaded, or why there are none.
fn loaded(context: u64, image: u64, kernel: &str) -> Option<Result<Loaded, String>> {
    with(|twins| {
        let modules = twins.modules.get(&(context, image))?;
        modules.iter().find(|module| module.kernel == kernel).map(Module::judged)
    })
}

/// The module of ours with a kernel's twins, loaded when they are first wanted.
fn module(context: u64, handle: u64, kernel: &kernels::Kernel) -> Result<Loaded, String> {
    let known = || loaded(context, kernel.image, &kernel.name);
    if let Some(judged) = known() {
        return judged;
    }
    // One at a time; those that launch other kernels do not wait for it.
    let _alone = LOADING.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(judged) = known() {
        return judged;
    }
    Rewritten::of(handle, kernel).keep(context, kernel)
}

impl Module {
    fn judged(&self) -> Result<Loaded, String> {
        self.twins.clone().map(|twins| (self.handle, twins))
    }
}

/// The text of a module of ours.
struct Rewritten {
    text: String,
    judged: Result<Twins, String>,
}

impl Rewritten {
    /// Twins of a kernel, which the program launches by this handle.
    fn of(handle: u64, kernel: &kernels::Kernel) -> Self {
        match Self::written(handle, kernel) {
            Ok((text, twins)) => Self { text, judged: Ok(twins) },
            Err(why) => Self { text: String::new(), judged: Err(why) },
        }
    }

    fn written(handle: u64, kernel: &kernels::Kernel) -> Result<(String, Twins), String> {
        let failed = |error: gpucr_rewrite::Syntax| error.to_string();
        let text = text(kernel.image)?;
        let how = How { aborted: insides().aborted, ..How::default() };
        let is_it = |name: &str| name == kernel.name;
        let mut rewritten = rewrite_with(&text, is_it, how).map_err(failed)?;
        let (_, judged) = rewritten.kernels.pop().ok_or(NO_TEXT)?;
        let twins = judged.map_err(|why| why.to_string())?;
        let code = how.aborted.then(|| repeat::code(&text, &kernel.name)).flatten().map(Arc::new);
        let inside = [
            twins.in_loops.as_ref().ok().map(|twin| twin.name.as_str()),
            twins.at_barriers.as_ref().ok().map(|twin| twin.name.as_str()),
            twins.aborted.as_ref().ok().map(|twin| twin.name.as_str()),
        ];
        let is_twin = |name: &str| name == kernel.name || inside.contains(&Some(name));
        let text = alone(&rewritten.text, is_twin, most_registers(handle)).map_err(failed)?;
        Ok((text, Twins { all: twins, code }))
    }

    fn is_to_be_loaded(&self) -> bool {
        self.judged.is_ok()
    }

    /// Loads the module in the current context, and keeps it, or why that has failed.
    fn keep(mut self, context: u64, kernel: &kernels::Kernel) -> Result<Loaded, String> {
        let mut handle = 0;
        if self.is_to_be_loaded()
            && let Err(failed) = load_text(self.text, &mut handle)
        {
            self.judged = Err(failed);
        }
        let module = Module { handle, kernel: kernel.name.clone(), twins: self.judged };
        let judged = module.judged();
        let key = (context, kernel.image);
        with(|twins| twins.modules.entry(key).or_default().push(module));
        judged
    }
}

/// How many registers a thread of a kernel's twins may have, so that as many blocks run at a time as of the program's
/// function: what the twin has to remember would cost some of them otherwise. `None`: the driver does not tell.
fn most_registers(function: u64) -> Option<u32> {
    let mut registers = 0;
    // SAFETY: writes one value; the program is launching the function.
    check(unsafe { real::cuFuncGetAttribute(&mut registers, REGISTERS, function) }).ok()?;
    let registers = u32::try_from(registers).ok()?.next_multiple_of(REGISTERS_AT_ONCE);
    Some(registers.clamp(ENOUGH_REGISTERS, MOST_REGISTERS))
}

fn load_text(text: String, handle: &mut u64) -> Result<(), String> {
    let text = CString::new(text).map_err(|error| error.to_string())?;
    let _relaxed = Relaxed::now();
    // SAFETY: a C string, and a place for the handle.
    check(unsafe { real::cuModuleLoadData(handle, text.as_ptr().cast()) })
        .map_err(|code| format!("the driver does not take the module of its twin (error {code})"))
}

/// The text of an image that runs on the device of the current context.
fn text(image: u64) -> Result<String, String> {
    let bytes = images::bytes(image).ok_or(NO_MODULE)?;
    let text = gpucr_fatbin::what_runs(&bytes, capability()?, MOST_TEXT);
    text.map_err(|why| why.to_string())
}

/// The compute capability of the device of the current context: 90 for 9.0.
fn capability() -> Result<u32, String> {
    let failed =
        |code: Code| format!("the driver does not tell what the device can do (error {code})");
    let (_, device) = real::current_context().map_err(failed)?;
    let mut values = [0; 2];
    for (value, attribute) in values.iter_mut().zip(CAPABILITY) {
        // SAFETY: writes one value.
        check(unsafe { real::cuDeviceGetAttribute(value, attribute, device) }).map_err(failed)?;
    }
    let [major, minor] = values.map(|value| value.max(0) as u32);
    Ok(major * 10 + minor)
}

impl Entry {
    /// Lets the twin be launched in place of the program's function, with so many threads and so much dynamic shared memory.
    /// What the program has set of its function counts.
    pub(super) fn admits(&self, function: u64, threads: u64, shared: u32) -> bool {
        let asked = |attribute| {
            let mut value = 0;
            // SAFETY: writes one value; the program is launching the function.
            let code = unsafe { real::cuFuncGetAttribute(&mut value, attribute, function) };
            (code == SUCCESS).then_some(value)
        };
        // Drivers that know no clusters do not know the attribute.
        if threads > self.max_threads.into() || asked(CLUSTER_WIDTH).is_some_and(|width| width > 0)
        {
            return false;
        }
        if shared <= SHARED_WITHOUT_LEAVE {
            return true;
        }
        let Some(leave) = asked(MAX_SHARED).filter(|leave| i64::from(*leave) >= shared.into())
        else {
            return false;
        };
        // SAFETY: plain numbers; the function is one that we have loaded.
        unsafe { real::cuFuncSetAttribute(self.function, MAX_SHARED, leave) == SUCCESS }
    }
}

/// The function has no twin any more.
pub(super) fn give_up(context: u64, function: u64, why: &str) {
    with(|twins| {
        if let Some((_, found)) = twins.known.get_mut(&(context, function))
            && let Some(twin) = std::mem::take(found).twin
        {
            twins.reasons.insert(twin.kernel.name.clone(), why.to_owned());
        }
    });
}

/// The modules and libraries that were loaded from an image are about to go, and the twins with them, unless one may be
/// running.
pub(super) fn image_going(image: u64, are_over: bool) {
    let gone = with(|twins| {
        let of: Vec<(u64, u64)> =
            twins.modules.keys().filter(|(_, of)| *of == image).copied().collect();
        let mut gone = Vec::new();
        for key in of {
            let modules = twins.modules.remove(&key).unwrap_or_default();
            gone.extend(modules.iter().map(|module| (key.0, module.handle)));
        }
        gone
    });
    if !are_over {
        return;
    }
    for (context, module) in gone.into_iter().filter(|(_, module)| *module != 0) {
        let _relaxed = Relaxed::now();
        let _ = real::with_context(context, || {
            // SAFETY: a module of ours, whose launches are over.
            check(unsafe { real::cuModuleUnload(module) })
        });
    }
}

/// A context is gone, with all modules in it.
pub(super) fn context_gone(context: u64) {
    with(|twins| {
        twins.known.retain(|(of, _), _| *of != context);
        twins.modules.retain(|(of, _), _| *of != context);
    });
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe {
        TWINS.reset(Mutex::new(None));
        LOADING.reset(Mutex::new(()));
    }
}
