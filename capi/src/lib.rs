//! `libgpucr.so`: what programs call to be saved. `include/gpucr.h` describes the functions.
//!
//! The work is the shim's, which is in each process that uses CUDA under `gpucr run`; where there is none this library
//! only says so. What it has itself is the callbacks: lists that only grow, so that nothing of them is ever in the middle
//! of a change when a process forks.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::time::Duration;

/// Numbers of `gpucr.h`.
const RESTORED: c_int = 1;
const NOT_WATCHED: c_int = -1;
const NO_CUDA: c_int = -2;
const CALLBACK: c_int = -9;

/// Bytes of the longest reason, with its end.
const REASON: usize = 600;
/// How often a thread looks whether another one is done with the callbacks.
const LOOK: Duration = Duration::from_millis(1);

type Callback = unsafe extern "C" fn(*mut c_void);
type CanCheckpoint = unsafe extern "C" fn(*mut c_char, usize) -> c_int;
type Checkpoint = unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> c_int;

/// The functions of the shim.
struct Shim {
    can_checkpoint: CanCheckpoint,
    checkpoint: Checkpoint,
}

/// A callback, and the one that was registered after it.
struct Node {
    callback: Callback,
    data: *mut c_void,
    next: AtomicPtr<Node>,
}

/// Callbacks in the order in which they were registered.
struct Callbacks(AtomicPtr<Node>);

static BEFORE: Callbacks = Callbacks(AtomicPtr::new(ptr::null_mut()));
static AFTER: Callbacks = Callbacks(AtomicPtr::new(ptr::null_mut()));
static AFTER_RESTORE: Callbacks = Callbacks(AtomicPtr::new(ptr::null_mut()));

impl Callbacks {
    fn add(&self, callback: Option<Callback>, data: *mut c_void) -> c_int {
        let Some(callback) = callback else { return CALLBACK };
        let node = Box::new(Node { callback, data, next: AtomicPtr::new(ptr::null_mut()) });
        let node = Box::into_raw(node);
        let mut place = &self.0;
        loop {
            let added =
                place.compare_exchange(ptr::null_mut(), node, Ordering::AcqRel, Ordering::Acquire);
            match added {
                Ok(_) => return 0,
                // SAFETY: nodes are never freed.
                Err(next) => place = unsafe { &(*next).next },
            }
        }
    }

    fn call(&self) {
        CALLS_BACK.with(|calls| calls.set(true));
        let mut node = self.0.load(Ordering::Acquire);
        // SAFETY: nodes are never freed.
        while let Some(Node { callback, data, next }) = unsafe { node.as_ref() } {
            // SAFETY: whoever has registered it has said that it may be called with this.
            unsafe { callback(*data) };
            node = next.load(Ordering::Acquire);
        }
        CALLS_BACK.with(|calls| calls.set(false));
    }
}

thread_local! {
    /// Whether this thread counts among those that are saving the program.
    static SAVES: Cell<bool> = const { Cell::new(false) };
    /// Whether this thread is in a callback.
    static CALLS_BACK: Cell<bool> = const { Cell::new(false) };
    /// Why the last call in this thread has failed.
    static WHY: RefCell<CString> = RefCell::default();
}

/// Who may change what follows, and call back meanwhile.
static LOCK: AtomicBool = AtomicBool::new(false);
/// How many threads are saving the program.
static INSIDE: AtomicU32 = AtomicU32::new(0);
/// Whether the program was restored since the first of these came.
static WAS_RESTORED: AtomicBool = AtomicBool::new(false);

/// Has the lock, until it is dropped.
struct Locked;

impl Locked {
    fn take() -> Self {
        static WATCH: Once = Once::new();
        // SAFETY: the handler is a function of this library, which is not unloaded (see build.rs).
        WATCH.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
        });
        while LOCK.swap(true, Ordering::Acquire) {
            std::thread::sleep(LOOK);
        }
        Self
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        LOCK.store(false, Ordering::Release);
    }
}

/// In the child of a fork the other threads are gone that were saving the program. The one that there is may be, if a
/// callback has forked.
unsafe extern "C" fn in_child() {
    LOCK.store(false, Ordering::Relaxed);
    INSIDE.store(u32::from(SAVES.with(Cell::get)), Ordering::Relaxed);
    WAS_RESTORED.store(false, Ordering::Relaxed);
}

/// The functions of the shim, if it is in this process.
fn shim() -> Option<Shim> {
    // SAFETY: plain calls with strings; the library is not opened if it is not there yet.
    let functions = unsafe {
        let library = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        [c"gpucr_intercept_can_checkpoint", c"gpucr_intercept_checkpoint"]
            .map(|name| libc::dlsym(library, name.as_ptr()))
    };
    let [can_checkpoint, checkpoint] = functions;
    if can_checkpoint.is_null() || checkpoint.is_null() {
        return None;
    }
    // SAFETY: the shim's functions of these names have these types.
    Some(unsafe {
        Shim {
            can_checkpoint: std::mem::transmute::<*mut c_void, CanCheckpoint>(can_checkpoint),
            checkpoint: std::mem::transmute::<*mut c_void, Checkpoint>(checkpoint),
        }
    })
}

/// Saves the program. See `gpucr.h`.
///
/// # Safety
/// `name` is null or a string that ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gpucr_checkpoint(name: *const c_char) -> c_int {
    let failed = |code, why: &CStr| {
        set_reason(why);
        code
    };
    if CALLS_BACK.with(Cell::get) {
        return failed(CALLBACK, c"a callback cannot save the program");
    }
    let Some(Shim { can_checkpoint, checkpoint }) = shim() else {
        return match std::env::var_os("GPUCR_SUPERVISOR") {
            Some(_) => failed(NO_CUDA, c"this process does not use CUDA under gpucr yet"),
            None => failed(NOT_WATCHED, c"the program was not started by `gpucr run --store DIR`"),
        };
    };
    let mut why = [0 as c_char; REASON];
    // SAFETY: there is room for so many bytes.
    let code = unsafe { can_checkpoint(why.as_mut_ptr(), why.len()) };
    if code < 0 {
        // SAFETY: the shim has written a string with its end.
        return failed(code, unsafe { CStr::from_ptr(why.as_ptr()) });
    }
    {
        let _locked = Locked::take();
        SAVES.with(|saves| saves.set(true));
        if INSIDE.fetch_add(1, Ordering::SeqCst) == 0 {
            BEFORE.call();
        }
    }
    // SAFETY: the name is the caller's duty; there is room for so many bytes.
    let code = unsafe { checkpoint(name, why.as_mut_ptr(), why.len()) };
    // SAFETY: the shim has written a string with its end.
    set_reason(unsafe { CStr::from_ptr(why.as_ptr()) });
    let _locked = Locked::take();
    if code == RESTORED {
        WAS_RESTORED.store(true, Ordering::SeqCst);
    }
    SAVES.with(|saves| saves.set(false));
    if INSIDE.fetch_sub(1, Ordering::SeqCst) == 1 {
        match WAS_RESTORED.swap(false, Ordering::SeqCst) {
            true => AFTER_RESTORE.call(),
            false => AFTER.call(),
        }
    }
    code
}

fn set_reason(why: &CStr) {
    // A thread that ends has nobody to read it.
    let _ = WHY.try_with(|last| *last.borrow_mut() = why.to_owned());
}

/// Why the last call of [`gpucr_checkpoint`] in this thread has failed.
#[unsafe(no_mangle)]
pub extern "C" fn gpucr_reason() -> *const c_char {
    WHY.try_with(|why| why.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Registers a callback for before a dump.
#[unsafe(no_mangle)]
pub extern "C" fn gpucr_before_dump(callback: Option<Callback>, data: *mut c_void) -> c_int {
    BEFORE.add(callback, data)
}

/// Registers a callback for after a dump, for the program that goes on.
#[unsafe(no_mangle)]
pub extern "C" fn gpucr_after_dump(callback: Option<Callback>, data: *mut c_void) -> c_int {
    AFTER.add(callback, data)
}

/// Registers a callback for after a restore.
#[unsafe(no_mangle)]
pub extern "C" fn gpucr_after_restore(callback: Option<Callback>, data: *mut c_void) -> c_int {
    AFTER_RESTORE.add(callback, data)
}
