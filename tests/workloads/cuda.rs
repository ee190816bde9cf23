//! The driver library as the dynamic loader finds it, and the functions that the workloads call.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use anyhow::{Context as _, Result, bail, ensure};
use cudarc::driver::sys::{
    CUDA_KERNEL_NODE_PARAMS_v1, CUmemAccessDesc, CUmemAllocationProp, CUmemPoolProps,
    CUmulticastObjectProp,
};
use libloading::Library;

/// An opaque handle of the driver (context, stream, event, module, function, allocation).
pub(crate) type Handle = usize;

/// `CU_LIMIT_STACK_SIZE`: bytes of stack for each GPU thread.
pub(crate) const LIMIT_STACK_SIZE: c_uint = 0;
/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
/// `CU_EVENT_INTERPROCESS`.
pub(crate) const EVENT_INTERPROCESS: c_uint = 4;
/// `CU_MEMHOSTALLOC_DEVICEMAP`.
pub(crate) const HOST_ALLOC_DEVICE_MAP: c_uint = 2;
/// The version for which `cuGetProcAddress` is asked: the functions below then have the versions
/// that their symbols name (`cuCtxCreate` took other parameters from 11.4 on, `cuCtxSynchronize`
/// from 13.0 on).
const API_VERSION: c_int = 11000;
/// The version for which functions that came later are asked.
const LATER: c_int = 12010;
/// `CUDA_ERROR_NOT_READY`.
pub(crate) const NOT_READY: c_int = 600;

macro_rules! driver_functions {
    ($( $name:ident = $symbol:literal ( $( $arg:ty ),* ); )*) => {
        /// Function pointers into the driver library, which stays loaded as long as they exist.
        #[allow(non_snake_case)]
        pub(crate) struct Driver {
            $( pub(crate) $name: unsafe extern "C" fn($( $arg ),*) -> c_int, )*
            _library: Library,
        }

        impl Driver {
            fn open(lookup: Lookup) -> Result<Self> {
                // SAFETY: running a driver library's constructors is what this program is for, and
                // the name is the one that every CUDA program opens.
                let library = unsafe { Library::new("libcuda.so.1") }
                    .context("cannot load libcuda.so.1: no CUDA driver on the library path")?;
                Ok(Self {
                    $( $name: {
                        let address = find(&library, lookup, $symbol)?;
                        // SAFETY: `find` gives the address of this function, whose type is the one
                        // that cuda.h declares; function pointers have the size of `address`.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> c_int>(
                                address,
                            )
                        }
                    }, )*
                    _library: library,
                })
            }
        }
    };
}

/// How the functions of the driver are found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lookup {
    /// By the dynamic loader, as most programs that use the driver API do.
    Symbols,
    /// By `cuGetProcAddress`, as the CUDA runtime does.
    GetProcAddress,
}

/// The address of a function, never null. `symbol` is its exported name, version included.
fn find(library: &Library, lookup: Lookup, symbol: &CStr) -> Result<*mut c_void> {
    type GetProcAddress =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> c_int;
    let text = symbol.to_string_lossy();
    let address: *mut c_void = match lookup {
        // SAFETY: the symbol's address is taken, nothing behind it is read.
        Lookup::Symbols => *unsafe { library.get(symbol.to_bytes_with_nul()) }
            .with_context(|| format!("libcuda.so.1 lacks {text}"))?,
        Lookup::GetProcAddress => {
            // SAFETY: the type is the one that cuda.h declares.
            let ask: GetProcAddress = *unsafe { library.get(b"cuGetProcAddress_v2\0") }
                .context("libcuda.so.1 lacks cuGetProcAddress_v2")?;
            let name = CString::new(text.trim_end_matches("_v2")).context("function name")?;
            let version = if text.starts_with("cuMulticast") { LATER } else { API_VERSION };
            let (mut address, mut status) = (std::ptr::null_mut(), 0);
            // SAFETY: the name ends in NUL, and the out-pointers are valid for the call.
            let code = unsafe { ask(name.as_ptr(), &raw mut address, version, 0, &raw mut status) };
            ensure!(code == 0, "cuGetProcAddress of {text} failed with {code}, status {status}");
            address
        }
    };
    ensure!(!address.is_null(), "the driver gives no address for {text}");
    Ok(address)
}

driver_functions! {
    cuInit = c"cuInit" (c_uint);
    cuGetErrorName = c"cuGetErrorName" (c_int, *mut *const c_char);
    cuDeviceGet = c"cuDeviceGet" (*mut c_int, c_int);
    cuDeviceGetCount = c"cuDeviceGetCount" (*mut c_int);
    cuDevicePrimaryCtxRetain = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    cuDevicePrimaryCtxRelease = c"cuDevicePrimaryCtxRelease_v2" (c_int);
    cuCtxCreate = c"cuCtxCreate_v2" (*mut Handle, c_uint, c_int);
    cuCtxDestroy = c"cuCtxDestroy_v2" (Handle);
    cuCtxEnablePeerAccess = c"cuCtxEnablePeerAccess" (Handle, c_uint);
    cuMemcpyPeerAsync = c"cuMemcpyPeerAsync" (u64, Handle, u64, Handle, usize, Handle);
    cuCtxSetCurrent = c"cuCtxSetCurrent" (Handle);
    cuCtxSynchronize = c"cuCtxSynchronize" ();
    cuCtxSetLimit = c"cuCtxSetLimit" (c_uint, usize);
    cuCtxGetLimit = c"cuCtxGetLimit" (*mut usize, c_uint);
    cuModuleLoadData = c"cuModuleLoadData" (*mut Handle, *const c_void);
    cuModuleUnload = c"cuModuleUnload" (Handle);
    cuModuleGetFunction = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    cuModuleGetGlobal = c"cuModuleGetGlobal_v2" (*mut u64, *mut usize, Handle, *const c_char);
    cuLaunchKernel = c"cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void,
        *mut *mut c_void
    );
    cuMemAlloc = c"cuMemAlloc_v2" (*mut u64, usize);
    cuMemFree = c"cuMemFree_v2" (u64);
    cuMemcpyHtoD = c"cuMemcpyHtoD_v2" (u64, *const c_void, usize);
    cuMemcpyDtoH = c"cuMemcpyDtoH_v2" (*mut c_void, u64, usize);
    cuMemcpyHtoDAsync = c"cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, Handle);
    cuMemcpyDtoHAsync = c"cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, Handle);
    cuMemcpyDtoDAsync = c"cuMemcpyDtoDAsync_v2" (u64, u64, usize, Handle);
    cuMemsetD32Async = c"cuMemsetD32Async" (u64, c_uint, usize, Handle);
    cuMemsetD32 = c"cuMemsetD32_v2" (u64, c_uint, usize);
    cuMemHostAlloc = c"cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    cuMemFreeHost = c"cuMemFreeHost" (*mut c_void);
    cuMemHostRegister = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    cuMemHostUnregister = c"cuMemHostUnregister" (*mut c_void);
    cuMemHostGetDevicePointer = c"cuMemHostGetDevicePointer_v2" (*mut u64, *mut c_void, c_uint);
    cuStreamCreate = c"cuStreamCreate" (*mut Handle, c_uint);
    cuStreamDestroy = c"cuStreamDestroy_v2" (Handle);
    cuStreamSynchronize = c"cuStreamSynchronize" (Handle);
    cuStreamQuery = c"cuStreamQuery" (Handle);
    cuStreamWaitEvent = c"cuStreamWaitEvent" (Handle, Handle, c_uint);
    cuEventCreate = c"cuEventCreate" (*mut Handle, c_uint);
    cuEventDestroy = c"cuEventDestroy_v2" (Handle);
    cuEventRecord = c"cuEventRecord" (Handle, Handle);
    cuEventQuery = c"cuEventQuery" (Handle);
    cuEventSynchronize = c"cuEventSynchronize" (Handle);
    cuIpcGetMemHandle = c"cuIpcGetMemHandle" (*mut c_void, u64);
    cuIpcOpenMemHandle = c"cuIpcOpenMemHandle_v2" (*mut u64, [u64; 8], c_uint);
    cuIpcCloseMemHandle = c"cuIpcCloseMemHandle" (u64);
    cuIpcGetEventHandle = c"cuIpcGetEventHandle" (*mut c_void, Handle);
    cuIpcOpenEventHandle = c"cuIpcOpenEventHandle" (*mut Handle, [u64; 8]);
    cuMemPoolCreate = c"cuMemPoolCreate" (*mut Handle, *const CUmemPoolProps);
    cuMemPoolDestroy = c"cuMemPoolDestroy" (Handle);
    cuMemPoolSetAttribute = c"cuMemPoolSetAttribute" (Handle, c_uint, *mut c_void);
    cuMemAllocAsync = c"cuMemAllocAsync" (*mut u64, usize, Handle);
    cuMemAllocFromPoolAsync = c"cuMemAllocFromPoolAsync" (*mut u64, usize, Handle, Handle);
    cuMemFreeAsync = c"cuMemFreeAsync" (u64, Handle);
    cuMemPoolExportToShareableHandle = c"cuMemPoolExportToShareableHandle" (
        *mut c_void, Handle, c_uint, u64
    );
    cuMemPoolImportFromShareableHandle = c"cuMemPoolImportFromShareableHandle" (
        *mut Handle, *mut c_void, c_uint, u64
    );
    cuMemPoolExportPointer = c"cuMemPoolExportPointer" (*mut c_void, u64);
    cuMemPoolImportPointer = c"cuMemPoolImportPointer" (*mut u64, Handle, *mut c_void);
    cuMemPoolSetAccess = c"cuMemPoolSetAccess" (Handle, *const CUmemAccessDesc, usize);
    cuGraphCreate = c"cuGraphCreate" (*mut Handle, c_uint);
    cuGraphDestroy = c"cuGraphDestroy" (Handle);
    cuGraphAddKernelNode = c"cuGraphAddKernelNode" (
        *mut Handle, Handle, *const Handle, usize, *const CUDA_KERNEL_NODE_PARAMS_v1
    );
    cuGraphInstantiate = c"cuGraphInstantiate_v2" (
        *mut Handle, Handle, *mut Handle, *mut c_char, usize
    );
    cuGraphExecDestroy = c"cuGraphExecDestroy" (Handle);
    cuGraphExecKernelNodeSetParams = c"cuGraphExecKernelNodeSetParams" (
        Handle, Handle, *const CUDA_KERNEL_NODE_PARAMS_v1
    );
    cuGraphLaunch = c"cuGraphLaunch" (Handle, Handle);
    cuMemGetAllocationGranularity = c"cuMemGetAllocationGranularity" (
        *mut usize, *const CUmemAllocationProp, c_uint
    );
    cuMemAddressReserve = c"cuMemAddressReserve" (*mut u64, usize, usize, u64, u64);
    cuMemAddressFree = c"cuMemAddressFree" (u64, usize);
    cuMemCreate = c"cuMemCreate" (*mut u64, usize, *const CUmemAllocationProp, u64);
    cuMemRelease = c"cuMemRelease" (u64);
    cuMemMap = c"cuMemMap" (u64, usize, usize, u64, u64);
    cuMemUnmap = c"cuMemUnmap" (u64, usize);
    cuMemSetAccess = c"cuMemSetAccess" (u64, usize, *const CUmemAccessDesc, usize);
    cuMemExportToShareableHandle = c"cuMemExportToShareableHandle" (*mut c_void, u64, c_uint, u64);
    cuMemImportFromShareableHandle = c"cuMemImportFromShareableHandle" (
        *mut u64, *mut c_void, c_uint
    );
    cuMulticastCreate = c"cuMulticastCreate" (*mut u64, *const CUmulticastObjectProp);
    cuMulticastAddDevice = c"cuMulticastAddDevice" (u64, c_int);
    cuMulticastBindMem = c"cuMulticastBindMem" (u64, usize, u64, usize, usize, u64);
    cuMulticastUnbind = c"cuMulticastUnbind" (u64, c_int, usize, usize);
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
static LOOKUP: OnceLock<Lookup> = OnceLock::new();

/// Chooses how [`load`] finds functions; the first choice holds.
pub(crate) fn choose_lookup(lookup: Lookup) {
    LOOKUP.get_or_init(|| lookup);
}

/// How [`load`] finds functions.
pub(crate) fn lookup() -> Lookup {
    *LOOKUP.get_or_init(|| Lookup::Symbols)
}

/// Loads the driver library. Needed once, before [`driver`].
pub(crate) fn load() -> Result<()> {
    if DRIVER.get().is_none() {
        // Only the main thread loads, so a lost race cannot happen; losing one would be harmless.
        let _ = DRIVER.set(Driver::open(lookup())?);
    }
    Ok(())
}

/// The loaded driver.
///
/// # Panics
/// When [`load`] has not succeeded before.
pub(crate) fn driver() -> &'static Driver {
    DRIVER.get().expect("the driver is loaded first")
}

/// Turns a result code into an error that names the call and the code.
pub(crate) fn check(call: &str, code: c_int) -> Result<()> {
    if code == 0 {
        return Ok(());
    }
    let mut name: *const c_char = std::ptr::null();
    // SAFETY: `name` is a valid place for the pointer; the driver stores one to a static string,
    // or leaves null.
    let known = unsafe { (driver().cuGetErrorName)(code, &raw mut name) } == 0 && !name.is_null();
    if known {
        // SAFETY: the driver's error names are static strings that end in NUL.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        bail!("{call} failed: {name} ({code})");
    }
    bail!("{call} failed with code {code}");
}
