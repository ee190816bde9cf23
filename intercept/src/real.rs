//! The real driver library: finding it, opening it, calling it.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::{env, fs, mem};

use gpucr_wire::ENV_DRIVER;

use crate::driver::{
    Access, AllocationProp, ArrayDescriptor, Code, Copy3d, FillParams, KernelNodeParams,
    MemoryOpsParams,
};
use crate::log::log;
use crate::table::{SLOTS, index};

/// Where the library lies on usual systems, after `LD_LIBRARY_PATH`.
const DIRECTORIES: &[&str] = &[
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64/nvidia",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

/// Tells one copy of this library from a driver, whatever file it lies in.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpucr_intercept_protocol() -> u32 {
    gpucr_wire::PROTOCOL_VERSION
}

/// The opened driver library. It stays open until the process ends.
pub(crate) struct Library {
    handle: *mut c_void,
    /// The file it came from.
    pub(crate) path: PathBuf,
}

// SAFETY: the handle is only passed to dlsym, which any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// The address of a function of the library.
    pub(crate) fn symbol(&self, name: &CStr) -> Option<*const ()> {
        // SAFETY: the handle is open and the name ends with a NUL.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const().cast())
    }

    fn open(path: PathBuf) -> Result<Self, String> {
        let name = CString::new(path.clone().into_os_string().into_vec())
            .map_err(|_| "its name holds a NUL".to_owned())?;
        // DEEPBIND: the library's references to its own functions must not reach ours.
        let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_DEEPBIND;
        // SAFETY: the name ends with a NUL. The driver's constructors are the driver's matter.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            // SAFETY: after a failed dlopen this is a C string, or null.
            let error = unsafe { libc::dlerror() };
            if error.is_null() {
                return Err("it cannot be opened".to_owned());
            }
            // SAFETY: not null, see above.
            return Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned());
        }
        let library = Self { handle, path };
        if library.symbol(c"gpucr_intercept_protocol").is_some() {
            return Err("it is a shim of gpucr, not a driver".to_owned());
        }
        if library.symbol(c"cuInit").is_none() {
            return Err("it has no cuInit".to_owned());
        }
        Ok(library)
    }
}

/// The file that this code was loaded from.
pub(crate) fn own_file() -> Option<PathBuf> {
    let mut info: libc::Dl_info = {
        // SAFETY: the structure holds pointers only, for which zero is a value.
        unsafe { mem::zeroed() }
    };
    // SAFETY: the address is in this library; the structure is writable.
    let found = unsafe { libc::dladdr(own_file as *const c_void, &mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr gives a C string that lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
}

/// The real driver library; `None` if there is none. Opened by the first call.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(find).as_ref()
}

fn find() -> Option<Library> {
    let own = own_file().and_then(|path| fs::metadata(path).ok()).map(|m| (m.dev(), m.ino()));
    let try_open = |path: &Path| {
        let meta = fs::metadata(path).ok()?;
        if own == Some((meta.dev(), meta.ino())) {
            return None;
        }
        match Library::open(path.to_path_buf()) {
            Ok(library) => {
                log!("driver: {}", path.display());
                Some(library)
            }
            Err(error) => {
                log!("{}: {error}", path.display());
                None
            }
        }
    };
    if let Some(path) = env::var_os(ENV_DRIVER).filter(|path| !path.is_empty()) {
        // Named explicitly: another driver in its place would be a surprise.
        let path = PathBuf::from(path);
        let library = if path.is_absolute() { try_open(&path) } else { None };
        if library.is_none() {
            log!("{ENV_DRIVER}={} is no driver library", path.display());
        }
        return library;
    }
    let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = env::split_paths(&listed).filter(|dir| dir.is_absolute()).collect::<Vec<_>>();
    let usual = DIRECTORIES.iter().map(PathBuf::from);
    let found = listed.into_iter().chain(usual).find_map(|dir| try_open(&dir.join("libcuda.so.1")));
    if found.is_none() {
        log!("no driver library found");
    }
    found
}

/// Typed calls of real functions, through the same slots as the forwarded ones.
macro_rules! real_functions {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {$(
        /// The real function of this name.
        ///
        /// # Safety
        /// As the driver's documentation of the function asks.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub(crate) unsafe fn $name($($argument: $type),*) -> Code {
            let target = SLOTS[index::$name].load(Ordering::Relaxed);
            // SAFETY: the slot holds the function of this name (or a stub that jumps to it), whose
            // C signature this is. Calling it is the caller's duty.
            unsafe {
                let function: unsafe extern "C" fn($($type),*) -> Code = mem::transmute(target);
                function($($argument),*)
            }
        }
    )*};
}

real_functions! {
    fn cuInit(flags: u32);
    fn cuDriverGetVersion(version: *mut c_int);
    fn cuGetProcAddress(symbol: *const c_char, out: *mut *const (), version: c_int, flags: u64);
    fn cuGetProcAddress_v2(
        symbol: *const c_char, out: *mut *const (), version: c_int, flags: u64, status: *mut c_int,
    );
    fn cuDeviceGetCount(count: *mut c_int);
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: i32);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: u32, device: i32);
    fn cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut c_int);
    fn cuDevicePrimaryCtxRetain(context: *mut u64, device: i32);
    fn cuDevicePrimaryCtxRelease(device: i32);
    fn cuDevicePrimaryCtxRelease_v2(device: i32);
    fn cuDevicePrimaryCtxReset(device: i32);
    fn cuDevicePrimaryCtxReset_v2(device: i32);
    fn cuCtxCreate(context: *mut u64, flags: u32, device: i32);
    fn cuCtxCreate_v2(context: *mut u64, flags: u32, device: i32);
    fn cuCtxCreate_v3(context: *mut u64, params: *mut c_void, count: c_int, flags: u32, device: i32);
    fn cuCtxCreate_v4(context: *mut u64, params: *mut c_void, flags: u32, device: i32);
    fn cuCtxDestroy(context: u64);
    fn cuCtxDestroy_v2(context: u64);
    fn cuCtxDetach(context: u64);
    fn cuCtxGetCurrent(context: *mut u64);
    fn cuCtxSetCurrent(context: u64);
    fn cuCtxPushCurrent(context: u64);
    fn cuCtxPushCurrent_v2(context: u64);
    fn cuCtxPopCurrent_v2(context: *mut u64);
    fn cuCtxGetDevice(device: *mut i32);
    fn cuCtxSynchronize();
    fn cuCtxGetLimit(value: *mut usize, limit: u32);
    fn cuCtxSetLimit(limit: u32, value: usize);
    fn cuCtxFromGreenCtx(context: *mut u64, green: u64);
    fn cuGreenCtxDestroy(green: u64);
    fn cuCtxEnablePeerAccess(peer: u64, flags: u32);
    fn cuCtxDisablePeerAccess(peer: u64);
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32);
    fn cuStreamIsCapturing(stream: u64, status: *mut u32);
    fn cuStreamIsCapturing_ptsz(stream: u64, status: *mut u32);
    fn cuStreamBeginCapture(stream: u64);
    fn cuStreamBeginCapture_ptsz(stream: u64);
    fn cuStreamBeginCapture_v2(stream: u64, mode: u32);
    fn cuStreamBeginCapture_v2_ptsz(stream: u64, mode: u32);
    fn cuStreamBeginCaptureToGraph(
        stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: u32,
    );
    fn cuStreamBeginCaptureToGraph_ptsz(
        stream: u64, graph: u64, nodes: *const u64, edges: *const c_void, count: usize, mode: u32,
    );
    fn cuStreamEndCapture(stream: u64, graph: *mut u64);
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64);
    fn cuStreamDestroy(stream: u64);
    fn cuStreamDestroy_v2(stream: u64);
    fn cuMemFree_v2(address: u64);
    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: u64);
    fn cuPointerGetAttributes(
        count: u32, attributes: *mut u32, data: *mut *mut c_void, address: u64,
    );
    fn cuMemAllocAsync(out: *mut u64, size: usize, stream: u64);
    fn cuMemAllocAsync_ptsz(out: *mut u64, size: usize, stream: u64);
    fn cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: u64, stream: u64);
    fn cuMemAllocFromPoolAsync_ptsz(out: *mut u64, size: usize, pool: u64, stream: u64);
    fn cuMemFreeAsync(address: u64, stream: u64);
    fn cuMemFreeAsync_ptsz(address: u64, stream: u64);
    fn cuMemAllocManaged(out: *mut u64, size: usize, flags: u32);
    fn cuMemHostAlloc(out: *mut u64, size: usize, flags: u32);
    fn cuMemAllocHost(out: *mut u64, size: u32);
    fn cuMemAllocHost_v2(out: *mut u64, size: usize);
    fn cuMemHostRegister(address: u64, size: usize, flags: u32);
    fn cuMemHostRegister_v2(address: u64, size: usize, flags: u32);
    fn cuMemFreeHost(address: u64);
    fn cuMemHostUnregister(address: u64);
    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, size: usize);
    fn cuMemcpyDtoD_v2(to: u64, from: u64, size: usize);
    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, size: usize);
    fn cuIpcGetMemHandle(out: *mut c_void, address: u64);
    fn cuIpcCloseMemHandle(address: u64);
    fn cuMemCreate(out: *mut u64, size: usize, prop: *const AllocationProp, flags: u64);
    fn cuMemRelease(handle: u64);
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: u64);
    fn cuMemUnmap(address: u64, size: usize);
    fn cuMemSetAccess(address: u64, size: usize, access: *const Access, count: usize);
    fn cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: u32, flags: u64);
    fn cuMemImportFromShareableHandle(out: *mut u64, os_handle: *mut c_void, kind: u32);
    fn cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void);
    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64);
    fn cuMemGetAllocationGranularity(out: *mut usize, prop: *const AllocationProp, option: u32);
    fn cuMemAddressReserve(
        out: *mut u64, size: usize, alignment: usize, address: u64, flags: u64,
    );
    fn cuMemAddressFree(address: u64, size: usize);
    fn cuMemMapArrayAsync(list: *mut c_void, count: u32, stream: u64);
    fn cuMemMapArrayAsync_ptsz(list: *mut c_void, count: u32, stream: u64);
    fn cuMulticastBindMem(
        multicast: u64, offset: usize, handle: u64, handle_offset: usize, size: usize, flags: u64,
    );
    fn cuArrayCreate(out: *mut u64, descriptor: *const c_void);
    fn cuArrayCreate_v2(out: *mut u64, descriptor: *const c_void);
    fn cuArray3DCreate(out: *mut u64, descriptor: *const c_void);
    fn cuArray3DCreate_v2(out: *mut u64, descriptor: *const c_void);
    fn cuMipmappedArrayCreate(out: *mut u64, descriptor: *const c_void, levels: u32);
    fn cuArray3DGetDescriptor_v2(out: *mut ArrayDescriptor, array: u64);
    fn cuArrayDestroy(array: u64);
    fn cuMipmappedArrayDestroy(array: u64);
    fn cuModuleUnload(module: u64);
    fn cuLibraryUnload(library: u64);
    fn cuGraphExecDestroy(executable: u64);
    fn cuFuncGetParamInfo(function: u64, index: usize, offset: *mut usize, size: *mut usize);
    fn cuKernelGetParamInfo(kernel: u64, index: usize, offset: *mut usize, size: *mut usize);
    fn cuFuncGetName(name: *mut *const c_char, function: u64);
    fn cuKernelGetName(name: *mut *const c_char, kernel: u64);
    fn cuFuncGetModule(module: *mut u64, function: u64);
    fn cuKernelGetLibrary(library: *mut u64, kernel: u64);
    fn cuGraphGetNodes(graph: u64, nodes: *mut u64, count: *mut usize);
    fn cuGraphNodeGetType(node: u64, kind: *mut u32);
    fn cuGraphKernelNodeGetParams_v2(node: u64, params: *mut KernelNodeParams);
    fn cuGraphMemcpyNodeGetParams(node: u64, params: *mut Copy3d);
    fn cuGraphMemsetNodeGetParams(node: u64, params: *mut FillParams);
    fn cuGraphBatchMemOpNodeGetParams(node: u64, params: *mut MemoryOpsParams);
    fn cuGraphChildGraphNodeGetGraph(node: u64, graph: *mut u64);
}

/// Turns a code into a result.
pub(crate) fn check(code: Code) -> Result<(), Code> {
    if code == crate::driver::SUCCESS { Ok(()) } else { Err(code) }
}

/// The current context of this thread, and its device.
///
/// # Errors
/// The driver's code; `ERROR_INVALID_CONTEXT` if there is none.
pub(crate) fn current_context() -> Result<(u64, i32), Code> {
    let (mut context, mut device) = (0, 0);
    // SAFETY: both calls write one value each to the given places.
    unsafe {
        check(cuCtxGetCurrent(&mut context))?;
        if context == 0 {
            return Err(crate::driver::ERROR_INVALID_CONTEXT);
        }
        check(cuCtxGetDevice(&mut device))?;
    }
    Ok((context, device))
}

/// Waits for all work of a context, whichever is current.
pub(crate) fn synchronize(context: u64) -> Result<(), Code> {
    with_context(context, || {
        // SAFETY: a context is current.
        check(unsafe { cuCtxSynchronize() })
    })
}

/// Runs `work` with `context` current, and puts back what was current before.
pub(crate) fn with_context<T>(
    context: u64,
    work: impl FnOnce() -> Result<T, Code>,
) -> Result<T, Code> {
    // SAFETY: the caller got the context from the driver; a stale one is refused by the driver.
    check(unsafe { cuCtxPushCurrent_v2(context) })?;
    let result = work();
    let mut popped = 0;
    // SAFETY: writes one value. What was pushed above is taken off again.
    unsafe { cuCtxPopCurrent_v2(&mut popped) };
    result
}

/// The UUID of a device; zeros if the driver does not say.
pub(crate) fn uuid(device: i32) -> [u8; 16] {
    let mut uuid = [0; 16];
    // SAFETY: both write 16 bytes.
    unsafe {
        if cuDeviceGetUuid_v2(&mut uuid, device) != 0 && cuDeviceGetUuid(&mut uuid, device) != 0 {
            uuid = [0; 16];
        }
    }
    uuid
}

/// How many devices there are.
pub(crate) fn device_count() -> i32 {
    let mut count = 0;
    // SAFETY: writes one value.
    if unsafe { cuDeviceGetCount(&mut count) } == 0 { count } else { 0 }
}

/// What `cuDriverGetVersion` says; 0 if it fails.
pub(crate) fn version() -> i32 {
    let mut version = 0;
    // SAFETY: writes one value.
    if unsafe { cuDriverGetVersion(&mut version) } == 0 { version } else { 0 }
}

/// Calls the version of `cuIpcOpenMemHandle` at `slot`, which takes 64 bytes by value.
///
/// # Safety
/// As the driver's documentation asks; `slot` is one of the two versions.
pub(crate) unsafe fn ipc_open(
    slot: usize,
    out: *mut u64,
    handle: crate::driver::IpcHandle,
    flags: u32,
) -> Code {
    let target = SLOTS[slot].load(Ordering::Relaxed);
    // SAFETY: both versions have this signature.
    let function: unsafe extern "C" fn(*mut u64, crate::driver::IpcHandle, u32) -> Code =
        unsafe { mem::transmute(target) };
    // SAFETY: the caller's duty.
    unsafe { function(out, handle, flags) }
}
