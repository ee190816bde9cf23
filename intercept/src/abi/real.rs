//! Calls of the real driver.

use std::ffi::{c_char, c_int, c_void};
use std::mem;
use std::sync::atomic::Ordering;

use super::slots::SLOTS;
use super::table::index;
use super::types::{
    Access, AllocationProp, ArrayDescriptor, CAPTURE_RELAXED, Code, Copy3d, FillParams, IpcHandle,
    KernelNodeParams, Location, MemoryOpsParams, MulticastProp, PoolExport, PoolProperties,
};

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
    fn cuStreamSynchronize(stream: u64);
    fn cuStreamGetCtx(stream: u64, context: *mut u64);
    fn cuStreamGetCtx_ptsz(stream: u64, context: *mut u64);
    fn cuStreamGetId(stream: u64, id: *mut u64);
    fn cuStreamGetId_ptsz(stream: u64, id: *mut u64);
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
    fn cuStreamBeginRecaptureToGraph(
        stream: u64, mode: u32, graph: u64, callback: *const c_void, data: *mut c_void,
    );
    fn cuStreamBeginRecaptureToGraph_ptsz(
        stream: u64, mode: u32, graph: u64, callback: *const c_void, data: *mut c_void,
    );
    fn cuStreamEndCapture(stream: u64, graph: *mut u64);
    fn cuStreamEndCapture_ptsz(stream: u64, graph: *mut u64);
    fn cuStreamCreate(stream: *mut u64, flags: u32);
    fn cuStreamGetFlags(stream: u64, flags: *mut u32);
    fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32);
    fn cuStreamQuery(stream: u64);
    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: u64);
    fn cuStreamDestroy(stream: u64);
    fn cuStreamDestroy_v2(stream: u64);
    fn cuMemAlloc_v2(out: *mut u64, size: usize);
    fn cuMemFree_v2(address: u64);
    fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, address: u64);
    fn cuPointerGetAttribute(data: *mut c_void, attribute: u32, address: u64);
    fn cuPointerGetAttributes(
        count: u32, attributes: *mut u32, data: *mut *mut c_void, address: u64,
    );
    fn cuPointerSetAttribute(value: *const c_void, attribute: u32, address: u64);
    fn cuMemAllocAsync(out: *mut u64, size: usize, stream: u64);
    fn cuMemAllocAsync_ptsz(out: *mut u64, size: usize, stream: u64);
    fn cuMemAllocFromPoolAsync(out: *mut u64, size: usize, pool: u64, stream: u64);
    fn cuMemAllocFromPoolAsync_ptsz(out: *mut u64, size: usize, pool: u64, stream: u64);
    fn cuMemFreeAsync(address: u64, stream: u64);
    fn cuMemFreeAsync_ptsz(address: u64, stream: u64);
    fn cuMemPoolCreate(out: *mut u64, properties: *const PoolProperties);
    fn cuMemPoolExportToShareableHandle(out: *mut c_void, pool: u64, kind: u32, flags: u64);
    fn cuMemPoolImportFromShareableHandle(
        out: *mut u64, os_handle: *mut c_void, kind: u32, flags: u64,
    );
    fn cuMemPoolExportPointer(out: *mut PoolExport, address: u64);
    fn cuMemPoolImportPointer(out: *mut u64, pool: u64, data: *mut PoolExport);
    fn cuDeviceSetMemPool(device: i32, pool: u64);
    fn cuMemSetMemPool(location: *const Location, kind: u32, pool: u64);
    fn cuMemPoolGetAttribute(pool: u64, attribute: u32, value: *mut c_void);
    fn cuMemPoolSetAttribute(pool: u64, attribute: u32, value: *mut c_void);
    fn cuMemPoolDestroy(pool: u64);
    fn cuMemPoolTrimTo(pool: u64, keep: usize);
    fn cuMemPoolSetAccess(pool: u64, access: *const Access, count: usize);
    fn cuDeviceGetMemPool(pool: *mut u64, device: i32);
    fn cuDeviceGetDefaultMemPool(pool: *mut u64, device: i32);
    fn cuMemAllocManaged(out: *mut u64, size: usize, flags: u32);
    fn cuMemHostAlloc(out: *mut u64, size: usize, flags: u32);
    fn cuMemAllocHost(out: *mut u64, size: u32);
    fn cuMemAllocHost_v2(out: *mut u64, size: usize);
    fn cuMemHostRegister(address: u64, size: usize, flags: u32);
    fn cuMemHostRegister_v2(address: u64, size: usize, flags: u32);
    fn cuMemFreeHost(address: u64);
    fn cuMemHostUnregister(address: u64);
    fn cuMemGetAccess(flags: *mut u64, location: *const Location, address: u64);
    fn cuMemHostGetDevicePointer_v2(out: *mut u64, address: *mut c_void, flags: u32);
    fn cuEventCreate(out: *mut u64, flags: u32);
    fn cuEventRecord(event: u64, stream: u64);
    fn cuEventRecord_ptsz(event: u64, stream: u64);
    fn cuEventQuery(event: u64);
    fn cuEventElapsedTime(out: *mut f32, begin: u64, end: u64);
    fn cuEventDestroy_v2(event: u64);
    fn cuStreamWriteValue32_v2(stream: u64, address: u64, value: u32, flags: u32);
    fn cuStreamWaitValue32_v2(stream: u64, address: u64, value: u32, flags: u32);
    fn cuIpcGetEventHandle(out: *mut c_void, event: u64);
    fn cuIpcOpenEventHandle(out: *mut u64, handle: IpcHandle);
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
    fn cuMulticastCreate(out: *mut u64, properties: *const MulticastProp);
    fn cuMulticastGetGranularity(out: *mut usize, properties: *const MulticastProp, option: u32);
    fn cuMulticastUnbind(multicast: u64, device: i32, offset: usize, size: usize);
    fn cuMulticastAddDevice(multicast: u64, device: i32);
    fn cuMulticastBindAddr(multicast: u64, offset: usize, address: u64, size: usize, flags: u64);
    fn cuMulticastBindAddr_v2(
        multicast: u64, device: i32, offset: usize, address: u64, size: usize, flags: u64,
    );
    fn cuMulticastBindMem(
        multicast: u64, offset: usize, handle: u64, handle_offset: usize, size: usize, flags: u64,
    );
    fn cuMulticastBindMem_v2(
        multicast: u64, device: i32, offset: usize, handle: u64, handle_offset: usize, size: usize,
        flags: u64,
    );
    fn cuLogicalEndpointBindMem(
        endpoint: u32, device: i32, offset: u64, handle: u64, handle_offset: u64, size: u64,
        flags: u64,
    );
    fn cuArrayCreate(out: *mut u64, descriptor: *const c_void);
    fn cuArrayCreate_v2(out: *mut u64, descriptor: *const c_void);
    fn cuArray3DCreate(out: *mut u64, descriptor: *const c_void);
    fn cuArray3DCreate_v2(out: *mut u64, descriptor: *const c_void);
    fn cuMipmappedArrayCreate(out: *mut u64, descriptor: *const c_void, levels: u32);
    fn cuArray3DGetDescriptor_v2(out: *mut ArrayDescriptor, array: u64);
    fn cuArrayDestroy(array: u64);
    fn cuMipmappedArrayDestroy(array: u64);
    fn cuModuleLoadData(module: *mut u64, image: *const c_void);
    fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char);
    fn cuModuleUnload(module: u64);
    fn cuLibraryUnload(library: u64);
    fn cuGraphExecDestroy(executable: u64);
    fn cuLaunchKernel(
        kernel: u64, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: u64,
        params: *mut c_void, extra: *mut c_void,
    );
    fn cuFuncGetAttribute(value: *mut i32, attribute: u32, function: u64);
    fn cuFuncSetAttribute(function: u64, attribute: u32, value: i32);
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
    if code == super::types::SUCCESS { Ok(()) } else { Err(code) }
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
            return Err(super::types::ERROR_INVALID_CONTEXT);
        }
        check(cuCtxGetDevice(&mut device))?;
    }
    Ok((context, device))
}

/// While this lives, what this thread does is no matter of others' captures.
pub(crate) struct Relaxed(u32);

impl Relaxed {
    pub(crate) fn now() -> Self {
        Self(exchange(CAPTURE_RELAXED))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        exchange(self.0);
    }
}

fn exchange(mut mode: u32) -> u32 {
    // SAFETY: reads and writes one value.
    unsafe { cuThreadExchangeStreamCaptureMode(&mut mode) };
    mode
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

/// The device of this UUID; none if there is none here.
pub(crate) fn device_of(wanted: [u8; 16]) -> Option<i32> {
    (0..device_count()).find(|device| uuid(*device) == wanted)
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
    handle: super::types::IpcHandle,
    flags: u32,
) -> Code {
    let target = SLOTS[slot].load(Ordering::Relaxed);
    // SAFETY: both versions have this signature.
    let function: unsafe extern "C" fn(*mut u64, super::types::IpcHandle, u32) -> Code =
        unsafe { mem::transmute(target) };
    // SAFETY: the caller's duty.
    unsafe { function(out, handle, flags) }
}
