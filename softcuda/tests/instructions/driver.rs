//! A CUDA driver, softcuda or another, through its C interface.

use super::job::{Argument, Job, Picture, Reading, Shape};
use super::table::Random;
use super::twins::{Level, Twins};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

type Status = c_uint;

/// Finds a function of a driver by its name in the library; null is none.
pub(crate) type Find = Box<dyn Fn(&str) -> *const c_void>;

/// A driver with the main context of its first device.
pub(crate) struct Driver {
    find: Find,
    /// The name of the device and the version of the driver.
    pub(crate) name: String,
}

/// A picture on a device; what it has not is 0.
struct Shown {
    texture: u64,
    surface: u64,
    array: u64,
    levels: u64,
    memory: u64,
}

/// Calls a function of the driver by name; an error of the driver is an error.
macro_rules! call {
    ($find:expr, $name:ident($($argument:expr => $type:ty),*)) => {{
        let address = $find(stringify!($name));
        if address.is_null() {
            return Err(concat!(stringify!($name), " is not there").to_owned());
        }
        // SAFETY: the types are those of the function in cuda.h. Every pointer that is passed
        // outlives the call and has room for what it announces; the callers of this macro see
        // to it.
        let status = unsafe {
            let function: unsafe extern "C" fn($($type),*) -> Status = std::mem::transmute(address);
            function($($argument),*)
        };
        match status {
            0 => Ok(()),
            status => Err(format!("{} returned {status}", stringify!($name))),
        }
    }};
}

impl Driver {
    /// Initialises a driver.
    ///
    /// # Errors
    /// What the driver refused, in words.
    pub(crate) fn new(library: Find) -> Result<Driver, String> {
        let (mut version, mut device, mut context) = (0, 0, null_mut());
        let mut name = [0u8; 128];
        call!(library, cuInit(0 => c_uint))?;
        call!(library, cuDriverGetVersion(&raw mut version => *mut c_int))?;
        call!(library, cuDeviceGet(&raw mut device => *mut c_int, 0 => c_int))?;
        call!(library, cuDeviceGetName(name.as_mut_ptr() => *mut u8, 127 => c_int, device => c_int))?;
        call!(library, cuDevicePrimaryCtxRetain(&raw mut context => *mut *mut c_void, device => c_int))?;
        call!(library, cuCtxSetCurrent(context => *mut c_void))?;
        let name = String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned();
        Ok(Driver { find: library, name: format!("{name}, CUDA {version}") })
    }

    /// Runs a job; the bytes of its result.
    ///
    /// # Errors
    /// The call that failed; for a module, what the driver says about it.
    pub(crate) fn run(&self, job: &Job) -> Result<Vec<u8>, String> {
        Ok(self.run_as(job, None)?.0)
    }

    /// The same by twins, each launch in parts; and how many launches were made in parts of this level.
    ///
    /// # Errors
    /// As [`Driver::run`].
    pub(crate) fn run_in_parts(&self, job: &Job, level: Level) -> Result<(Vec<u8>, usize), String> {
        self.run_as(job, Some(&Twins::of(job, level)))
    }

    fn run_as(&self, job: &Job, twins: Option<&Twins>) -> Result<(Vec<u8>, usize), String> {
        let library = &self.find;
        let module = self.load(twins.map_or(&job.ptx, |twins| &twins.ptx))?;
        let (mut random, mut in_parts) = (Random::new(job.name.len() as u64), 0);
        let mut buffers = Vec::new();
        for bytes in &job.buffers {
            let mut address = 0;
            call!(library, cuMemAlloc_v2(&raw mut address => *mut u64, bytes.len() => usize))?;
            call!(library, cuMemcpyHtoD_v2(address => u64, bytes.as_ptr() => *const u8, bytes.len() => usize))?;
            buffers.push(address);
        }
        let mut pictures = Vec::new();
        for picture in &job.pictures {
            pictures.push(self.show(picture)?);
        }
        for launch in &job.launches {
            let mut parts = twins.and_then(|twins| twins.parts(launch, &mut random));
            let name = parts.as_ref().map_or(launch.kernel, |parts| &parts.name);
            let name = CString::new(name).map_err(|error| error.to_string())?;
            let mut function = null_mut();
            call!(library, cuModuleGetFunction(&raw mut function => *mut *mut c_void, module => *mut c_void, name.as_ptr() => *const c_char))?;
            let mut arguments: Vec<u64> = launch
                .arguments
                .iter()
                .map(|argument| match *argument {
                    Argument::Buffer(number) => buffers[number],
                    Argument::Texture(number) => pictures[number].texture,
                    Argument::Surface(number) => pictures[number].surface,
                    Argument::U32(value) => value.into(),
                    Argument::F32(value) => value.to_bits().into(),
                })
                .collect();
            let (grid, block, shared) = launch.shape;
            let mut control = 0;
            if let Some(parts) = &parts {
                call!(library, cuMemAlloc_v2(&raw mut control => *mut u64, parts.control.len() => usize))?;
                arguments.push(control);
            }
            let pointers: Vec<*const u64> = arguments.iter().map(|a| &raw const *a).collect();
            loop {
                if let Some(parts) = &parts {
                    let bytes = &parts.control;
                    call!(library, cuMemcpyHtoD_v2(control => u64, bytes.as_ptr() => *const u8, bytes.len() => usize))?;
                }
                call!(library, cuLaunchKernel(
                    function => *mut c_void,
                    grid => c_uint, 1 => c_uint, 1 => c_uint,
                    block => c_uint, 1 => c_uint, 1 => c_uint,
                    shared => c_uint, null_mut() => *mut c_void,
                    pointers.as_ptr() => *const *const u64, null_mut() => *mut c_void
                ))?;
                let Some(parts) = &mut parts else { break };
                let mut after = vec![0u8; parts.control.len()];
                call!(library, cuMemcpyDtoH_v2(after.as_mut_ptr() => *mut u8, control => u64, after.len() => usize))?;
                if !parts.go_on(after) {
                    in_parts += usize::from(twins.is_some_and(|twins| parts.is_at(twins.level)));
                    break;
                }
            }
            if control != 0 {
                call!(library, cuMemFree_v2(control => u64))?;
            }
        }
        call!(library, cuCtxSynchronize())?;
        let mut result = vec![0; job.buffers[job.result].len()];
        call!(library, cuMemcpyDtoH_v2(result.as_mut_ptr() => *mut u8, buffers[job.result] => u64, result.len() => usize))?;
        for shown in pictures {
            self.take_down(&shown)?;
        }
        for address in buffers {
            call!(library, cuMemFree_v2(address => u64))?;
        }
        call!(library, cuModuleUnload(module => *mut c_void))?;
        Ok((result, in_parts))
    }

    /// Makes a texture of a picture, and a surface if it can be one.
    fn show(&self, picture: &Picture) -> Result<Shown, String> {
        let library = &self.find;
        let mut shown = Shown { texture: 0, surface: 0, array: 0, levels: 0, memory: 0 };
        // Kind, handle or address, format and channels, sizes, pitch.
        let mut resource = [0u64; 18];
        let element = u64::from(picture.format) | u64::from(picture.channels) << 32;
        let Shape::Array { flags, levels, .. } = picture.shape else {
            let size = picture.bytes.len();
            call!(library, cuMemAlloc_v2(&raw mut shown.memory => *mut u64, size => usize))?;
            call!(library, cuMemcpyHtoD_v2(shown.memory => u64, picture.bytes.as_ptr() => *const u8, size => usize))?;
            resource[..4].copy_from_slice(&[2, shown.memory, element, size as u64]);
            if let Shape::Rows { width, height, pitch } = picture.shape {
                let sizes = [width as u64, height as u64, pitch as u64];
                resource[0] = 3;
                resource[3..6].copy_from_slice(&sizes);
            }
            call!(library, cuTexObjectCreate(&raw mut shown.texture => *mut u64, resource.as_ptr() => *const u64, &raw const picture.reading => *const Reading, std::ptr::null() => *const c_void))?;
            return Ok(shown);
        };
        let [width, height, depth] = picture.level(0).map(|n| n as u64);
        let descriptor = [width, height, depth, element, u64::from(flags)];
        if levels > 1 {
            call!(library, cuMipmappedArrayCreate(&raw mut shown.levels => *mut u64, descriptor.as_ptr() => *const u64, levels as c_uint => c_uint))?;
        } else {
            call!(library, cuArray3DCreate_v2(&raw mut shown.array => *mut u64, descriptor.as_ptr() => *const u64))?;
        }
        let mut done = 0;
        for level in 0..levels {
            let mut array = shown.array;
            if levels > 1 {
                call!(library, cuMipmappedArrayGetLevel(&raw mut array => *mut u64, shown.levels => u64, level as c_uint => c_uint))?;
            }
            let [width, height, depth] = picture.level(level).map(|n| n.max(1) as u64);
            let row = width * picture.element() as u64;
            let mut copy = [0u64; 25];
            (copy[4], copy[5], copy[9], copy[10]) =
                (1, picture.bytes[done..].as_ptr() as u64, row, height);
            (copy[15], copy[18]) = (3, array);
            (copy[22], copy[23], copy[24]) = (row, height, depth);
            call!(library, cuMemcpy3D_v2(copy.as_ptr() => *const u64))?;
            done += (row * height * depth) as usize;
        }
        resource[0] = u64::from(levels > 1);
        resource[1] = if levels > 1 { shown.levels } else { shown.array };
        call!(library, cuTexObjectCreate(&raw mut shown.texture => *mut u64, resource.as_ptr() => *const u64, &raw const picture.reading => *const Reading, std::ptr::null() => *const c_void))?;
        if flags & 2 != 0 {
            call!(library, cuSurfObjectCreate(&raw mut shown.surface => *mut u64, resource.as_ptr() => *const u64))?;
        }
        Ok(shown)
    }

    fn take_down(&self, shown: &Shown) -> Result<(), String> {
        let library = &self.find;
        call!(library, cuTexObjectDestroy(shown.texture => u64))?;
        if shown.surface != 0 {
            call!(library, cuSurfObjectDestroy(shown.surface => u64))?;
        }
        if shown.array != 0 {
            call!(library, cuArrayDestroy(shown.array => u64))?;
        }
        if shown.levels != 0 {
            call!(library, cuMipmappedArrayDestroy(shown.levels => u64))?;
        }
        if shown.memory != 0 {
            call!(library, cuMemFree_v2(shown.memory => u64))?;
        }
        Ok(())
    }

    fn load(&self, ptx: &str) -> Result<*mut c_void, String> {
        const ERROR_LOG_BUFFER: c_uint = 5;
        const ERROR_LOG_BUFFER_BYTES: c_uint = 6;
        let image = CString::new(ptx).map_err(|error| error.to_string())?;
        let mut log = vec![0u8; 2048];
        let mut names = [ERROR_LOG_BUFFER, ERROR_LOG_BUFFER_BYTES];
        let mut values = [log.as_mut_ptr() as usize, log.len()];
        let mut module = null_mut();
        call!(self.find, cuModuleLoadDataEx(
            &raw mut module => *mut *mut c_void, image.as_ptr() => *const c_char,
            2 => c_uint, names.as_mut_ptr() => *mut c_uint, values.as_mut_ptr() => *mut usize
        ))
        .map_err(|error| {
            let text = String::from_utf8_lossy(&log);
            format!("{error}: {}", text.trim_end_matches('\0').trim())
        })?;
        Ok(module)
    }
}
