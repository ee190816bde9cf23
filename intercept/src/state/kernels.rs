//! The kernels that have been launched or are part of a graph: their parameters, and where they
//! come from. The driver is asked once for each.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use gpucr_wire::access::Param;
use gpucr_wire::twice;

use super::images;
use crate::abi::real;
use crate::abi::types::{
    Code, ERROR_INVALID_HANDLE, ERROR_INVALID_VALUE, EXTRA_BUFFER, EXTRA_SIZE, SUCCESS,
};
use crate::resettable::Resettable;

/// More than all arguments of a kernel together can have, bytes.
const LARGEST_BUFFER: usize = 32 << 10;
/// More parameters than a kernel can have: its buffer is at most 32,764 bytes.
const PARAMS: usize = 1 << 15;

/// A kernel.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) id: u64,
    pub(crate) name: String,
    pub(crate) image: u64,
    /// `None`: the driver does not tell.
    pub(crate) params: Option<Vec<Param>>,
    /// The words that may be pointers.
    pub(crate) words: Vec<Word>,
}

/// An aligned word of a parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) param: u32,
    /// In the parameter.
    pub(crate) offset: u32,
}

/// What is known of the kernels behind the driver's handles.
#[derive(Default)]
struct KernelHandles {
    by_handle: HashMap<u64, Arc<Kernel>>,
    /// What handles meant before they were [forgotten](KernelHandles::forget): most mean the same again.
    former: HashMap<u64, Arc<Kernel>>,
}

/// So many kernels are remembered that may come back.
const FORMER: usize = 1 << 14;

impl KernelHandles {
    /// The driver says that this is behind the handle.
    fn add(&mut self, handle: u64, fresh: Kernel) -> Arc<Kernel> {
        let former = self.former.remove(&handle).filter(|former| former.is_same(&fresh));
        let kernel = former.unwrap_or_else(|| Arc::new(fresh));
        self.by_handle.entry(handle).or_insert(kernel).clone()
    }

    /// Handles may come to mean something else.
    fn forget(&mut self) {
        if self.former.len() > FORMER {
            self.former.clear();
        }
        self.former.extend(self.by_handle.drain());
    }
}

/// Where the arguments of a launch are: `kernelParams` and `extra`, either of which may be null.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arguments {
    pub(crate) params: *const *const u8,
    pub(crate) extra: *const *const c_void,
}

impl Kernel {
    /// Calls `note` with the number and value of each word of the kernel's arguments.
    ///
    /// # Safety
    /// These are the arguments of a launch of this kernel.
    pub(crate) unsafe fn words(
        &self,
        &Arguments { params, extra }: &Arguments,
        note: &mut dyn FnMut(usize, u64),
    ) {
        // SAFETY: `params` points to as many pointers as the kernel has parameters, each to that
        // parameter. `extra` ends with 0, and names a buffer and its size.
        unsafe {
            if !params.is_null() {
                for (number, word) in self.words.iter().enumerate() {
                    let param = params.add(word.param as usize).read();
                    if !param.is_null() {
                        let place = param.add(word.offset as usize).cast::<u64>();
                        note(number, place.read_unaligned());
                    }
                }
                return;
            }
            let Some((buffer, size)) = packed(extra) else { return };
            let word = |offset: usize| buffer.add(offset).cast::<u64>().read_unaligned();
            let Some(params) = &self.params else {
                // The driver has not looked at the size yet.
                let words = size.min(LARGEST_BUFFER) / 8;
                (0..words).for_each(|number| note(number, word(8 * number)));
                return;
            };
            for (number, of) in self.words.iter().enumerate() {
                let offset = (params[of.param as usize].offset + of.offset) as usize;
                if offset + 8 <= size {
                    note(number, word(offset));
                }
            }
        }
    }

    /// A copy of the kernel's arguments as one buffer; `None` if they or their layout are not known.
    ///
    /// # Safety
    /// These are the arguments of a launch of this kernel.
    pub(crate) unsafe fn packed(
        &self,
        &Arguments { params, extra }: &Arguments,
    ) -> Option<Vec<u8>> {
        let layout = self.params.as_ref()?;
        let ends = layout.iter().map(|param| param.offset as usize + param.size as usize);
        let size = ends.max().unwrap_or(0);
        if size > LARGEST_BUFFER {
            return None;
        }
        let mut buffer = vec![0; size];
        if size == 0 {
            return Some(buffer);
        }
        // SAFETY: as in `words`.
        unsafe {
            if params.is_null() {
                let (given, bytes) = packed(extra)?;
                let bytes = bytes.min(size);
                std::ptr::copy_nonoverlapping(given, buffer.as_mut_ptr(), bytes);
                return Some(buffer);
            }
            for (number, of) in layout.iter().enumerate() {
                let param = params.add(number).read();
                if param.is_null() {
                    return None;
                }
                let to = &mut buffer[of.offset as usize..][..of.size as usize];
                std::ptr::copy_nonoverlapping(param, to.as_mut_ptr(), to.len());
            }
        }
        Some(buffer)
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.name, self.image, &self.params) == (&other.name, other.image, &other.params)
    }
}

/// The buffer of packed arguments and its size.
///
/// # Safety
/// `extra` is null or the last argument of a launch.
unsafe fn packed(extra: *const *const c_void) -> Option<(*const u8, usize)> {
    let (mut buffer, mut size) = (std::ptr::null::<u8>(), 0);
    // SAFETY: by the contract of launches a list of names and values that ends with 0.
    unsafe {
        let mut next = extra;
        while !next.is_null() {
            let (name, value) = (next.read() as usize, next.add(1));
            match name {
                EXTRA_BUFFER => buffer = value.read().cast(),
                EXTRA_SIZE => {
                    let place = value.read().cast::<usize>();
                    if place.is_null() {
                        return None;
                    }
                    size = place.read_unaligned();
                }
                _ => break,
            }
            next = next.add(2);
        }
    }
    (!buffer.is_null()).then_some((buffer, size))
}

static HANDLES: Resettable<Mutex<Option<KernelHandles>>> = Resettable::new(Mutex::new(None));
static LAST_ID: AtomicU64 = AtomicU64::new(0);
/// Goes up when handles may come to mean something else.
static GENERATION: AtomicU64 = AtomicU64::new(1);

fn with<T>(work: impl FnOnce(&mut KernelHandles) -> T) -> T {
    let mut known = HANDLES.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(known.get_or_insert_default())
}

/// Handles that were looked up before this changed must be looked up again.
pub(crate) fn generation() -> u64 {
    GENERATION.load(Ordering::Acquire)
}

/// The kernel of a `CUfunction` or `CUkernel` that is being launched. Asks the driver, once for each.
pub(crate) fn find(handle: u64) -> Arc<Kernel> {
    if let Some(kernel) = with(|known| known.by_handle.get(&handle).cloned()) {
        return kernel;
    }
    let fresh = ask(handle);
    with(|known| known.add(handle, fresh))
}

/// A kernel of which nothing is known but that it was launched.
pub(crate) fn nameless() -> Kernel {
    Kernel { id: LAST_ID.fetch_add(1, Ordering::Relaxed) + 1, ..Kernel::default() }
}

fn ask(handle: u64) -> Kernel {
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
    kernel
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

/// The name of a kernel that has been launched, which is not kept; empty if the driver does not tell, as where another
/// context than the kernel's is current. Nobody may unload it meanwhile.
pub(crate) fn name_of(handle: u64) -> String {
    let (_, is_kernel) = params(handle);
    name(handle, is_kernel)
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
    let places = params.iter().map(|param| (param.offset, param.size));
    twice::words(places).map(|(param, offset)| Word { param, offset }).collect()
}

/// A module, library or context is about to go, and kernels with it. All handles are looked up again:
/// which of them belong to a library only the driver knows.
///
/// To be called before the driver is. A thread that is given the same handle again afterwards would
/// otherwise be taken to launch what it meant before, and its arguments read by the wrong layout.
pub(crate) fn forget() {
    with(KernelHandles::forget);
    GENERATION.fetch_add(1, Ordering::Release);
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the caller's duty.
    unsafe { HANDLES.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_is_never_taken_for_what_it_meant_before_a_module_went() {
        let kernel = |size| Kernel {
            name: "same".to_owned(),
            params: Some(vec![Param { offset: 0, size }]),
            ..nameless()
        };
        let mut known = KernelHandles::default();
        let (one, other) = (known.add(1, kernel(8)), known.add(2, kernel(8)));
        known.forget();
        assert!(known.by_handle.is_empty(), "whatever the handle belongs to");
        assert_eq!(known.add(1, kernel(8)).id, one.id, "it has stayed what it was");
        let new = known.add(2, kernel(4));
        assert_ne!(new.id, other.id);
        assert_eq!(new.params, kernel(4).params);
    }

    #[test]
    fn a_size_that_no_kernel_has_is_not_believed() {
        let arguments = vec![1_u64; LARGEST_BUFFER / 8];
        let size = usize::MAX;
        let extra: [*const c_void; 5] = [
            EXTRA_BUFFER as _,
            arguments.as_ptr().cast(),
            EXTRA_SIZE as _,
            (&raw const size).cast(),
            std::ptr::null(),
        ];
        let mut noted = 0;
        // SAFETY: a list of names and values.
        unsafe {
            let arguments = Arguments { params: std::ptr::null(), extra: extra.as_ptr() };
            Kernel::default().words(&arguments, &mut |_, _| noted += 1);
        }
        assert_eq!(noted, arguments.len());
    }
}
