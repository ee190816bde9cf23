//! Twins of kernels, in modules of the shim's own: see [`gpucr_rewrite`]. The program's modules stay as they are.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpucr_rewrite::{Twins, rewrite};

use super::settings::{is_in_loops, is_wanted};
pub(super) use crate::abi::real::Relaxed;
use crate::abi::real::{self, check};
use crate::abi::types::{Code, SUCCESS};
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::{gate, images, kernels};

/// `CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK`
const MAX_THREADS: u32 = 0;
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
/// Why there are no twins of a kernel that was not found.
const NO_TEXT: &str = "its name is not in the PTX of its module";
/// Why there are none where nobody knows what the module was loaded from.
const NO_MODULE: &str = "its module is gone, or too large to be rewritten";

/// A kernel that can be interrupted.
pub(super) struct Twin {
    pub(super) kernel: Arc<kernels::Kernel>,
    /// Between two of its blocks.
    pub(super) between: Entry,
    /// In its loops, and what each thread saves then, bytes.
    pub(super) in_loops: Option<(Entry, u64)>,
}

/// A function of ours to be launched in place of the program's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Entry {
    pub(super) function: u64,
    /// Where the address of the control block goes in the buffer of all parameters.
    pub(super) place: usize,
    max_threads: u32,
}

/// The twins of a program's module, and why other kernels have none.
struct Module {
    handle: u64,
    kernels: Vec<(String, Result<Twins, String>)>,
}

/// A module of ours with a kernel's twins.
type Loaded = (u64, Twins);

/// What is known of a handle: in which generation, and its twin.
type Found = (u64, Option<Arc<Twin>>);

#[derive(Default)]
struct Known {
    /// By context and the program's handle; what a handle means changes with the generation.
    known: HashMap<(u64, u64), Found>,
    /// By context and image.
    modules: HashMap<(u64, u64), Module>,
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

/// The twin of a kernel that is about to be launched in `context`, which is current; `None` if it has none, or none is
/// wanted.
pub(super) fn of(context: u64, handle: u64) -> Option<Arc<Twin>> {
    let generation = kernels::generation();
    let known = with(|twins| twins.known.get(&(context, handle)).cloned());
    if let Some((of, twin)) = known
        && of == generation
    {
        return twin;
    }
    let kernel = kernels::find(handle);
    let twin = if is_wanted(&kernel.name) {
        let made = make(context, kernel.clone());
        if let Err(why) = &made {
            log!("`{}` cannot be interrupted: {why}", kernel.name);
            with(|twins| twins.reasons.insert(kernel.name.clone(), why.clone()));
        }
        made.ok().map(Arc::new)
    } else {
        None
    };
    with(|twins| twins.known.insert((context, handle), (generation, twin.clone())));
    twin
}

/// Why a kernel of this name could not be interrupted, as a remark; `None` if nothing was in the way, or nothing can be.
pub(crate) fn why_not(name: &str) -> Option<String> {
    if !gate::is_interruptible() {
        return None;
    }
    let why = match with(|twins| twins.reasons.get(name).cloned()) {
        Some(why) => why,
        None if is_wanted(name) => return None,
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

fn make(context: u64, kernel: Arc<kernels::Kernel>) -> Result<Twin, String> {
    let params = kernel.params.as_deref().ok_or("the driver does not tell its parameters")?;
    let (module, twins) = module(context, kernel.image, &kernel.name)?;
    let end = params.iter().map(|param| (param.offset + param.size) as usize).max().unwrap_or(0);
    let between = entry(module, &kernel.name, params.len(), end)?;
    let wanted = if is_in_loops() {
        twins.in_loops.map_err(|why| why.to_string())
    } else {
        Err("nobody has asked for that".to_owned())
    };
    let in_loops = wanted.and_then(|in_loops| {
        let entry = entry(module, &in_loops.name, params.len(), end)?;
        Ok((entry, in_loops.saved))
    });
    if let Err(why) = &in_loops {
        log!("`{}` is not interrupted in loops: {why}", kernel.name);
    }
    Ok(Twin { kernel, between, in_loops: in_loops.ok() })
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

/// The module of ours with the twins of an image, loaded when the first is wanted.
fn module(context: u64, image: u64, kernel: &str) -> Result<Loaded, String> {
    let judged = |module: &Module| {
        let found = module.kernels.iter().find(|(name, _)| name == kernel);
        found.map_or(Err(NO_TEXT.to_owned()), |(_, judged)| {
            judged.clone().map(|twins| (module.handle, twins))
        })
    };
    let known = || with(|twins| twins.modules.get(&(context, image)).map(judged));
    if let Some(judged) = known() {
        return judged;
    }
    // One at a time; those that launch other kernels do not wait for it.
    let _alone = LOADING.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(judged) = known() {
        return judged;
    }
    let loaded = load(image)?;
    let judged = judged(&loaded);
    with(|twins| twins.modules.insert((context, image), loaded));
    judged
}

/// Loads the twins of an image in the current context.
fn load(image: u64) -> Result<Module, String> {
    let bytes = images::bytes(image).ok_or(NO_MODULE)?;
    let text = gpucr_fatbin::what_runs(&bytes, capability()?, MOST_TEXT);
    let text = text.map_err(|why| why.to_string())?;
    let rewritten = rewrite(&text, is_wanted).map_err(|error| error.to_string())?;
    let kernels = rewritten.kernels.into_iter();
    let mut kernels: Vec<_> =
        kernels.map(|(name, judged)| (name, judged.map_err(|why| why.to_string()))).collect();
    let mut handle = 0;
    if kernels.iter().any(|(_, judged)| judged.is_ok()) {
        let text = CString::new(rewritten.text).map_err(|error| error.to_string())?;
        let _relaxed = Relaxed::now();
        // SAFETY: a C string, and a place for the handle.
        let code = unsafe { real::cuModuleLoadData(&mut handle, text.as_ptr().cast()) };
        if code != SUCCESS {
            handle = 0;
            let failed = format!("the driver does not take the module of its twin (error {code})");
            kernels.iter_mut().for_each(|(_, judged)| *judged = Err(failed.clone()));
        }
    }
    Ok(Module { handle, kernels })
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
        if let Some((_, twin)) = twins.known.get_mut(&(context, function))
            && let Some(twin) = twin.take()
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
        of.into_iter().filter_map(|key| Some((key.0, twins.modules.remove(&key)?.handle))).collect()
    });
    let gone: Vec<(u64, u64)> = gone;
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
