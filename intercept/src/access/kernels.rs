//! The kernels that have been launched or are part of a graph: their parameters, and where they
//! come from. The driver is asked once for each.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gpucr_wire::access::Param;

use super::images;
use crate::driver::{Code, ERROR_INVALID_HANDLE, ERROR_INVALID_VALUE, SUCCESS};
use crate::fork::Resettable;
use crate::real;

/// More parameters than a kernel can have: its buffer is at most 32,764 bytes.
const PARAMS: usize = 1 << 15;

/// A kernel.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(super) id: u64,
    pub(super) name: String,
    pub(super) image: u64,
    /// `None`: the driver does not tell.
    pub(super) params: Option<Vec<Param>>,
    /// The words that may be pointers.
    pub(super) words: Vec<Word>,
}

/// An aligned word of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Word {
    pub(super) param: u32,
    /// In the parameter.
    pub(super) offset: u32,
}

/// What is known of the kernels behind the driver's handles.
#[derive(Default)]
struct Known {
    by_handle: HashMap<u64, Arc<Kernel>>,
    /// Which module or library a handle's kernel belongs to.
    owners: HashMap<u64, Vec<u64>>,
}

static KNOWN: Resettable<Mutex<Option<Known>>> = Resettable::new(Mutex::new(None));
static LAST_ID: AtomicU64 = AtomicU64::new(0);
/// Goes up when handles may come to mean something else.
static GENERATION: AtomicU64 = AtomicU64::new(1);

fn with<T>(work: impl FnOnce(&mut Known) -> T) -> T {
    let mut known = KNOWN.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(known.get_or_insert_default())
}

/// Handles that were looked up before this changed must be looked up again.
pub(super) fn generation() -> u64 {
    GENERATION.load(Ordering::Acquire)
}

/// The kernel of a `CUfunction` or `CUkernel` that is being launched. Asks the driver, once for each.
pub(super) fn find(handle: u64) -> Arc<Kernel> {
    if let Some(kernel) = with(|known| known.by_handle.get(&handle).cloned()) {
        return kernel;
    }
    let (kernel, owner) = ask(handle);
    let kernel = Arc::new(kernel);
    with(|known| {
        known.owners.entry(owner).or_default().push(handle);
        known.by_handle.entry(handle).or_insert(kernel).clone()
    })
}

/// A kernel of which nothing is known but that it was launched.
pub(super) fn nameless() -> Kernel {
    Kernel { id: LAST_ID.fetch_add(1, Ordering::Relaxed) + 1, ..Kernel::default() }
}

fn ask(handle: u64) -> (Kernel, u64) {
    let mut kernel = nameless();
    let (params, is_kernel) = params(handle);
    kernel.words = words(params.as_deref().unwrap_or(&[]));
    kernel.params = params;
    kernel.name = name(handle, is_kernel);
    let mut owner = 0;
    // SAFETY: each writes one value. The program is launching what the handle names.
    let code = unsafe {
        if is_kernel {
            real::cuKernelGetLibrary(&mut owner, handle)
        } else {
            real::cuFuncGetModule(&mut owner, handle)
        }
    };
    if code != SUCCESS {
        owner = 0;
    }
    kernel.image = images::of_kernel(handle).or_else(|| images::of(owner)).unwrap_or(0);
    (kernel, owner)
}

/// The parameters, and whether the handle is a `CUkernel`.
fn params(handle: u64) -> (Option<Vec<Param>>, bool) {
    type Ask = unsafe fn(u64, usize, *mut usize, *mut usize) -> Code;
    let all = |ask: Ask| -> Result<Vec<Param>, Code> {
        let mut params = Vec::new();
        for index in 0..PARAMS {
            let (mut offset, mut size) = (0, 0);
            // SAFETY: writes two values; the program is launching what the handle names.
            match unsafe { ask(handle, index, &mut offset, &mut size) } {
                SUCCESS => params.push(Param { offset: offset as u32, size: size as u32 }),
                // Beyond the last one.
                ERROR_INVALID_VALUE => break,
                code => return Err(code),
            }
        }
        Ok(params)
    };
    match all(real::cuFuncGetParamInfo) {
        Ok(params) => (Some(params), false),
        Err(ERROR_INVALID_HANDLE) => (all(real::cuKernelGetParamInfo).ok(), true),
        Err(_) => (None, false),
    }
}

fn name(handle: u64, is_kernel: bool) -> String {
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: each writes one pointer; the program is launching what the handle names.
    let code = unsafe {
        if is_kernel {
            real::cuKernelGetName(&mut name, handle)
        } else {
            real::cuFuncGetName(&mut name, handle)
        }
    };
    if code != SUCCESS || name.is_null() {
        return String::new();
    }
    // SAFETY: the driver gives a C string that lives as long as the module.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The words of parameters that are aligned in the parameter buffer.
fn words(params: &[Param]) -> Vec<Word> {
    let of = |(index, param): (usize, &Param)| {
        let first = param.offset.next_multiple_of(8) - param.offset;
        let end = param.size;
        (first..end)
            .step_by(8)
            .filter(move |offset| offset + 8 <= end)
            .map(move |offset| Word { param: index as u32, offset })
    };
    params.iter().enumerate().flat_map(of).collect()
}

/// A module or library is gone, and its kernels with it.
pub(super) fn owner_gone(owner: u64) {
    with(|known| {
        for handle in known.owners.remove(&owner).unwrap_or_default() {
            known.by_handle.remove(&handle);
        }
    });
    GENERATION.fetch_add(1, Ordering::Release);
}

/// A context is gone, and all its functions with it. Of others nothing need be known either.
pub(super) fn context_gone() {
    with(|known| *known = Known::default());
    GENERATION.fetch_add(1, Ordering::Release);
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(super) unsafe fn reset() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's duty.
    unsafe { KNOWN.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_whole_words_can_be_pointers() {
        let param = |offset, size| Param { offset, size };
        let words = words(&[param(0, 8), param(8, 4), param(12, 20), param(32, 24), param(56, 7)]);
        let word = |param, offset| Word { param, offset };
        // The third begins in the middle of a word.
        assert_eq!(
            words,
            [word(0, 0), word(2, 4), word(2, 12), word(3, 0), word(3, 8), word(3, 16)]
        );
    }
}
