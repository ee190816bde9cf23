//! The driver library, one of those for which the [host](super::drivers) vouches: NVIDIA's or the software driver.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp};

use super::host::HostDriver;

/// A driver call that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{function} failed: {name} ({code})")]
pub struct DriverError {
    /// The driver function.
    pub function: &'static str,
    /// Its result, a `CUresult`.
    pub code: i32,
    /// The result's name.
    pub name: String,
}

impl DriverError {
    /// Whether a device has no room for what was asked for, or none for another process.
    pub(crate) fn is_no_room(&self) -> bool {
        [code::OUT_OF_MEMORY, code::DEVICE_UNAVAILABLE].contains(&self.code)
    }
}

/// Results that are told apart.
pub mod code {
    /// A parameter was not accepted, for the checkpoint calls: not a CUDA process.
    pub const INVALID_VALUE: i32 = 1;
    /// No memory left on the device or in the host.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// The device is in exclusive use by another process.
    pub const DEVICE_UNAVAILABLE: i32 = 46;
    /// Not finished yet.
    pub const NOT_READY: i32 = 600;
}

/// Why a driver library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The library cannot be opened.
    #[error("the driver library {path} cannot be opened: {}", reason(cause))]
    Open {
        /// The library.
        path: PathBuf,
        /// The loader's reason.
        cause: libloading::Error,
    },
    /// There is no descriptor left for its file.
    #[error("the driver library {path} cannot be opened: {cause}")]
    File {
        /// The library.
        path: PathBuf,
        /// Why.
        cause: std::io::Error,
    },
    /// The library lacks a function that gpucr needs.
    #[error("the driver library {path} has no {function}: driver 570 or newer is needed")]
    TooOld {
        /// The library.
        path: PathBuf,
        /// The missing function.
        function: &'static str,
    },
}

/// What the loader itself has said, if it has.
fn reason(cause: &libloading::Error) -> String {
    std::error::Error::source(cause).map_or_else(|| cause.to_string(), ToString::to_string)
}

macro_rules! functions {
    ($($name:ident($($arg:ident: $ty:ty),*);)*) => {
        #[allow(non_snake_case)]
        struct Functions {
            $($name: unsafe extern "C" fn($($ty),*) -> c_int,)*
        }
        impl Functions {
            fn load(library: &libloading::Library, path: &Path) -> Result<Self, LoadError> {
                Ok(Self {$(
                    // SAFETY: the name is the driver API's and the type is the one that its
                    // header gives; the pointer is used only while the library is open, since
                    // `Driver` keeps it for ever.
                    $name: unsafe {
                        *library
                            .get(concat!(stringify!($name), "\0").as_bytes())
                            .map_err(|_| LoadError::TooOld {
                                path: path.to_owned(),
                                function: stringify!($name),
                            })?
                    },
                )*})
            }
        }
        impl Driver {$(
            /// The driver function of this name.
            ///
            /// # Errors
            /// The driver's result, where it is not success.
            ///
            /// # Safety
            ///
            /// Pointers must be what the driver API asks for.
            #[allow(non_snake_case, clippy::too_many_arguments)]
            pub unsafe fn $name(&self, $($arg: $ty),*) -> Result<(), DriverError> {
                // SAFETY: the caller keeps to the function's contract.
                self.check(stringify!($name), unsafe { (self.functions.$name)($($arg),*) })
            }
        )*}
    };
}

functions! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuGetErrorName(code: c_int, name: *mut *const c_char);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut c_int, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int);
    cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int);
    cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int);
    cuCtxCreate_v2(context: *mut *mut c_void, flags: c_uint, device: c_int);
    cuCtxDestroy_v2(context: *mut c_void);
    cuCtxSetCurrent(context: *mut c_void);
    cuCtxSynchronize();
    cuModuleLoadData(module: *mut *mut c_void, image: *const c_void);
    cuModuleUnload(module: *mut c_void);
    cuModuleGetFunction(function: *mut *mut c_void, module: *mut c_void, name: *const c_char);
    cuLaunchKernel(
        function: *mut c_void,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: *mut c_void,
        arguments: *mut *mut c_void,
        extra: *mut *mut c_void
    );
    cuStreamCreate(stream: *mut *mut c_void, flags: c_uint);
    cuStreamDestroy_v2(stream: *mut c_void);
    cuStreamSynchronize(stream: *mut c_void);
    cuEventCreate(event: *mut *mut c_void, flags: c_uint);
    cuEventDestroy_v2(event: *mut c_void);
    cuEventRecord(event: *mut c_void, stream: *mut c_void);
    cuEventQuery(event: *mut c_void);
    cuMemHostGetDevicePointer_v2(address: *mut u64, memory: *mut c_void, flags: c_uint);
    cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(memory: *mut c_void);
    cuMemHostRegister_v2(memory: *mut c_void, bytes: usize, flags: c_uint);
    cuMemHostUnregister(memory: *mut c_void);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: *mut c_void);
    cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: *mut c_void);
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: *mut c_void);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemsetD8Async(to: u64, value: u8, bytes: usize, stream: *mut c_void);
    cuMemAddressReserve(address: *mut u64, bytes: usize, align: usize, hint: u64, flags: u64);
    cuMemAddressFree(address: u64, bytes: usize);
    cuMemCreate(handle: *mut u64, bytes: usize, prop: *const CUmemAllocationProp, flags: u64);
    cuMemRelease(handle: u64);
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: u64, bytes: usize);
    cuMemSetAccess(address: u64, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemExportToShareableHandle(fd: *mut c_int, handle: u64, kind: c_uint, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, fd: *mut c_void, kind: c_uint);
    cuCheckpointProcessGetState(pid: c_int, state: *mut c_uint);
    cuCheckpointProcessLock(pid: c_int, args: *mut LockArgs);
    cuCheckpointProcessCheckpoint(pid: c_int, args: *mut CheckpointArgs);
    cuCheckpointProcessRestore(pid: c_int, args: *mut RestoreArgs);
    cuCheckpointProcessUnlock(pid: c_int, args: *mut CheckpointArgs);
}

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
const COMPUTE_MODE: c_int = 20;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `..._MINOR`.
const CAPABILITY: [c_int; 2] = [75, 76];
/// `CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`.
const VMM: c_int = 102;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`.
const POSIX_DESCRIPTORS: c_int = 103;

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub struct LockArgs {
    timeout_ms: c_uint,
    reserved: [u32; 15],
}

/// `CUcheckpointGpuPair`: a device at the checkpoint, and the one that takes its place.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePair {
    /// UUID of the old one.
    pub old: [u8; 16],
    /// UUID of the new one.
    pub new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
pub struct RestoreArgs {
    pairs: *const DevicePair,
    count: c_uint,
    reserved: [u32; 13],
}

/// The arguments of the other checkpoint calls: reserved, all zero.
#[repr(C, align(8))]
pub struct CheckpointArgs {
    reserved: [u8; 64],
}

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// Runs.
    Running,
    /// Driver calls block.
    Locked,
    /// Everything of the device is in host memory.
    Checkpointed,
    /// A restore failed; the process cannot be saved.
    Failed,
}

/// A device of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// What the driver's calls take.
    pub ordinal: i32,
    /// Stable identity.
    pub uuid: [u8; 16],
    /// The product's name.
    pub name: String,
    /// Where it is on the PCI bus, as the driver writes it; empty if the driver does not say.
    pub bus_id: String,
    /// Bytes of memory.
    pub memory: u64,
}

/// An opened and initialised driver library. It stays open until the process ends, since the
/// driver's own threads run in it.
pub struct Driver {
    library: Arc<HostDriver>,
    functions: Functions,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("path", &self.library.path()).finish_non_exhaustive()
    }
}

/// Why no driver is at hand.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The library is not usable.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The driver does not start.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

impl Driver {
    /// Loads the library and initialises it.
    ///
    /// # Errors
    /// It cannot be loaded, lacks a function that gpucr needs, or does not start. What was loaded stays so.
    pub fn open(library: &Arc<HostDriver>) -> Result<Self, OpenError> {
        let path = library.path();
        let unloadable = |cause| LoadError::Open { path: path.to_owned(), cause };
        // The loader gets the very file that was vouched for. It takes a name that it has seen for the library
        // that it has loaded under it, so the descriptor keeps its number as long as this process lives.
        let file = library
            .file()
            .try_clone()
            .map_err(|cause| LoadError::File { path: path.to_owned(), cause })?;
        let name = format!("/proc/self/fd/{}", file.into_raw_fd());
        // SAFETY: loading a driver library runs its initialisers, which are made for that.
        let loaded = unsafe {
            libloading::os::unix::Library::open(
                Some(name),
                libloading::os::unix::RTLD_NOW | libloading::os::unix::RTLD_LOCAL,
            )
        }
        .map_err(unloadable)?;
        let loaded = libloading::Library::from(loaded);
        let functions = Functions::load(&loaded, path)?;
        std::mem::forget(loaded);
        let driver = Self { library: library.clone(), functions };
        // SAFETY: takes no pointer.
        unsafe { driver.cuInit(0)? };
        Ok(driver)
    }

    /// The library.
    pub fn library(&self) -> &Arc<HostDriver> {
        &self.library
    }

    fn check(&self, function: &'static str, code: c_int) -> Result<(), DriverError> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: `name` receives a pointer to a static string, or stays null.
        let known = unsafe { (self.functions.cuGetErrorName)(code, &mut name) } == 0;
        let name = if known && !name.is_null() {
            // SAFETY: the driver gives a NUL-terminated static string.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "unknown error".to_owned()
        };
        Err(DriverError { function, code, name })
    }

    /// The version of the driver API, for example 13000.
    ///
    /// # Errors
    /// The driver's.
    pub fn version(&self) -> Result<i32, DriverError> {
        let mut version = 0;
        // SAFETY: `version` is a place for an int.
        unsafe { self.cuDriverGetVersion(&mut version)? };
        Ok(version)
    }

    /// The devices of the host.
    ///
    /// # Errors
    /// The driver's: it cannot tell what they are.
    pub fn devices(&self) -> Result<Vec<Device>, DriverError> {
        let mut count = 0;
        // SAFETY: `count` is a place for an int.
        unsafe { self.cuDeviceGetCount(&mut count)? };
        (0..count).map(|i| self.device(i)).collect()
    }

    fn device(&self, index: i32) -> Result<Device, DriverError> {
        let (mut ordinal, mut uuid, mut memory) = (0, [0; 16], 0);
        let mut name = [0u8; 128];
        // SAFETY: each call writes to a place of the size that it asks for or is told of.
        unsafe {
            self.cuDeviceGet(&mut ordinal, index)?;
            self.cuDeviceGetUuid_v2(&mut uuid, ordinal)?;
            self.cuDeviceTotalMem_v2(&mut memory, ordinal)?;
            self.cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as c_int, ordinal)?;
        }
        let mut bus_id = [0u8; 32];
        // SAFETY: the call writes to `bus_id`, whose size it is told.
        let known = unsafe {
            self.cuDeviceGetPCIBusId(bus_id.as_mut_ptr().cast(), bus_id.len() as c_int, ordinal)
        };
        let text = |bytes: &[u8]| {
            CStr::from_bytes_until_nul(bytes).unwrap_or_default().to_string_lossy().into_owned()
        };
        let bus_id = known.map_or_else(|_| String::new(), |()| text(&bus_id));
        Ok(Device { ordinal, uuid, name: text(&name), bus_id, memory: memory as u64 })
    }

    /// The compute capability of the device: 90 for 9.0.
    ///
    /// # Errors
    /// The driver's: there is no such device.
    pub fn capability(&self, device: &Device) -> Result<u32, DriverError> {
        let mut values = [0; 2];
        for (value, attribute) in values.iter_mut().zip(CAPABILITY) {
            // SAFETY: `value` is a place for an int.
            unsafe { self.cuDeviceGetAttribute(value, attribute, device.ordinal)? };
        }
        let [major, minor] = values.map(|value: c_int| value.max(0) as u32);
        Ok(major.saturating_mul(10).saturating_add(minor))
    }

    /// Whether any number of processes may have a context on the device, and not one alone or none.
    ///
    /// # Errors
    /// The driver's: there is no such device.
    pub fn is_shared(&self, device: &Device) -> Result<bool, DriverError> {
        let mut mode = 0;
        // SAFETY: `mode` is a place for an int.
        unsafe { self.cuDeviceGetAttribute(&mut mode, COMPUTE_MODE, device.ordinal)? };
        Ok(mode == 0)
    }

    /// Whether memory of the device can be handed to another process. Where it cannot, the driver's checkpoint
    /// alone saves it.
    ///
    /// # Errors
    /// The driver's: there is no such device.
    pub fn is_exportable(&self, device: &Device) -> Result<bool, DriverError> {
        let (mut managed, mut descriptors) = (0, 0);
        // SAFETY: both are places for an int.
        unsafe {
            self.cuDeviceGetAttribute(&mut managed, VMM, device.ordinal)?;
            self.cuDeviceGetAttribute(&mut descriptors, POSIX_DESCRIPTORS, device.ordinal)?;
        }
        Ok(managed != 0 && descriptors != 0)
    }

    /// Where the CUDA side of process `pid` stands.
    ///
    /// # Errors
    /// The driver's: [`code::INVALID_VALUE`] or another one if the process has no CUDA side.
    pub fn process_state(&self, pid: u32) -> Result<ProcessState, DriverError> {
        let mut state = 0;
        // SAFETY: `state` is a place for a `CUprocessState`.
        unsafe { self.cuCheckpointProcessGetState(pid as c_int, &mut state)? };
        Ok(match state {
            0 => ProcessState::Running,
            1 => ProcessState::Locked,
            2 => ProcessState::Checkpointed,
            _ => ProcessState::Failed,
        })
    }

    /// Blocks further driver calls of process `pid` and waits for those inside. `timeout_ms` 0 waits without limit.
    ///
    /// # Errors
    /// The driver's: the time is over, or the process does not run. The process runs on then.
    pub fn lock(&self, pid: u32, timeout_ms: u32) -> Result<(), DriverError> {
        let mut args = LockArgs { timeout_ms, reserved: [0; 15] };
        // SAFETY: the struct is the 64 bytes that the call asks for.
        unsafe { self.cuCheckpointProcessLock(pid as c_int, &mut args) }
    }

    /// Moves everything of a locked process from the device into its host memory.
    ///
    /// # Errors
    /// The driver's: the process is not locked, or has what the driver cannot checkpoint.
    pub fn checkpoint(&self, pid: u32) -> Result<(), DriverError> {
        let mut args = CheckpointArgs { reserved: [0; 64] };
        // SAFETY: the struct is the 64 bytes that the call asks for.
        unsafe { self.cuCheckpointProcessCheckpoint(pid as c_int, &mut args) }
    }

    /// Moves everything of a checkpointed process back to the device; it is locked then. With `pairs`, which
    /// must name every device of the host that the process could see (driver 580 refuses others with
    /// `INVALID_VALUE`), to other ones.
    ///
    /// # Errors
    /// The driver's: the process is not checkpointed, or a device has no room for it. With driver 580 no later one
    /// succeeds where there was no room.
    pub fn restore(&self, pid: u32, pairs: &[DevicePair]) -> Result<(), DriverError> {
        let list = if pairs.is_empty() { std::ptr::null() } else { pairs.as_ptr() };
        let mut args = RestoreArgs { pairs: list, count: pairs.len() as c_uint, reserved: [0; 13] };
        // SAFETY: the struct is the 64 bytes that the call asks for, and the list has so many pairs.
        unsafe { self.cuCheckpointProcessRestore(pid as c_int, &mut args) }
    }

    /// Lets a locked process go on.
    ///
    /// # Errors
    /// The driver's: the process is not locked.
    pub fn unlock(&self, pid: u32) -> Result<(), DriverError> {
        let mut args = CheckpointArgs { reserved: [0; 64] };
        // SAFETY: the struct is the 64 bytes that the call asks for.
        unsafe { self.cuCheckpointProcessUnlock(pid as c_int, &mut args) }
    }
}
