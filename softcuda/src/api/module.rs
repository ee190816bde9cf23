//! Modules.

use std::sync::Arc;

use super::arguments::{Address, In, Out, Text, read_bytes};
use super::driver_api;
use crate::context::{self, CONTEXTS};
use crate::fatbin;
use crate::modules::{self, MODULES, Module, Refusal};
use crate::ptx;
use crate::settings::settings;
use crate::status::{Code, Outcome};

/// The most text that is looked through for the NUL at its end.
const LONGEST_TEXT: usize = 256 << 20;

/// The version of the structure that programs embed which has a list of parts.
const WITH_PARTS: u32 = 2;
/// The most parts that are believed in.
const MOST_PARTS: usize = 1 << 16;

/// The bytes of an image: binaries are recognised by their first bytes, everything else is text
/// that ends in NUL.
pub(crate) fn image(address: Address) -> Outcome<Vec<u8>> {
    if address.0 == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let from = address.0 as *const u8;
    // SAFETY: the caller promises an image: text that ends in NUL, or a binary, all of which are
    // longer than the four bytes that tell them apart (and NUL ends a shorter text early).
    unsafe {
        let size = libc::strnlen(from.cast(), LONGEST_TEXT);
        let head = read_bytes(from, size.min(4));
        if head == b"\x7fELF" {
            return Ok(head);
        }
        if head == fatbin::WRAPPER_MAGIC {
            return read_wrapped(from);
        }
        if head == fatbin::MAGIC {
            return read_fatbin(from);
        }
        Ok(read_bytes(from, size))
    }
}

/// The bytes of the fat binary that the structure at an address, which programs embed, leads to. The second version of
/// it, of programs with separate compilation, leads to the containers of all parts besides; they are linked if what
/// nvcc has linked holds no PTX.
///
/// # Safety
/// It is such a structure.
unsafe fn read_wrapped(from: *const u8) -> Outcome<Vec<u8>> {
    // SAFETY: the caller's promise: magic number, version, pointer to the container, and for the second version
    // pointer to a list of containers, which ends in null.
    unsafe {
        let version = (from.add(4) as *const u32).read_unaligned();
        let [container, parts] = (from.add(8) as *const [u64; 2]).read_unaligned();
        if container == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let whole = read_fatbin(container as *const u8)?;
        let model = settings().model(likely_device());
        if version != WITH_PARTS || parts == 0 || modules::ptx_of(&whole, model).is_ok() {
            return Ok(whole);
        }
        let mut read = Vec::new();
        for index in 0..MOST_PARTS {
            match (parts as *const u64).add(index).read_unaligned() {
                0 => return report(modules::linked(&read, model), None),
                part => read.push(read_fatbin(part as *const u8)?),
            }
        }
        Err(Code::INVALID_IMAGE)
    }
}

/// The device for which code is that is loaded where no context need be current: a thread without one most likely will
/// have one on the first device.
pub(crate) fn likely_device() -> usize {
    context::top().map_or(0, |context| context.device)
}

/// The bytes of a fat binary.
///
/// # Safety
/// It is as long as its header says.
unsafe fn read_fatbin(from: *const u8) -> Outcome<Vec<u8>> {
    // SAFETY: the caller's promise; the header tells how much more there is.
    unsafe {
        let header = read_bytes(from, fatbin::HEADER);
        let size = fatbin::size(&header).map_err(|_| Code::INVALID_IMAGE)?;
        Ok(read_bytes(from, size))
    }
}

/// The bytes of an image in a file. A NUL is the end of a text but nothing special in a binary.
pub(crate) fn image_in_file(path: &str) -> Outcome<Vec<u8>> {
    let mut image = std::fs::read(path).map_err(|_| Code::FILE_NOT_FOUND)?;
    if !image.starts_with(b"\x7fELF") && !image.starts_with(&fatbin::MAGIC) {
        image.truncate(image.iter().position(|byte| *byte == 0).unwrap_or(image.len()));
    }
    Ok(image)
}

/// The log buffers among JIT options.
#[derive(Default)]
struct Logs {
    info: u64,
    info_size: usize,
    info_size_at: Option<usize>,
    error: u64,
    error_size: usize,
    error_size_at: Option<usize>,
}

/// JIT options: numbers and, for each, a value that is a pointer or a number in a pointer.
pub(crate) struct Options {
    pub(crate) count: u32,
    pub(crate) names: In<u32>,
    pub(crate) values: Out<u64>,
}

impl Options {
    /// `CU_JIT_MAX_REGISTERS`.
    ///
    /// # Errors
    /// As when options are read.
    pub(super) fn most_registers(&self) -> Outcome<Option<u32>> {
        let mut most = None;
        for index in 0..self.count as usize {
            if self.names.at(index)? == 0 {
                most = Some(self.values.at(index)? as u32).filter(|most| *most > 0);
            }
        }
        Ok(most)
    }

    fn logs(&self) -> Outcome<Logs> {
        let mut logs = Logs::default();
        for index in 0..self.count as usize {
            match self.names.at(index)? {
                3 => logs.info = self.values.at(index)?,
                4 => {
                    logs.info_size = self.values.at(index)? as u32 as usize;
                    logs.info_size_at = Some(index);
                }
                5 => logs.error = self.values.at(index)?,
                6 => {
                    logs.error_size = self.values.at(index)? as u32 as usize;
                    logs.error_size_at = Some(index);
                }
                // The others steer a compiler that is not there.
                _ => {}
            }
        }
        Ok(logs)
    }
}

/// Writes text with a NUL into a log; gives the bytes of text that were written.
fn write_log(to: u64, size: usize, text: &str) -> usize {
    if to == 0 || size == 0 {
        return 0;
    }
    let shown = text.len().min(size - 1);
    // SAFETY: the caller promises a buffer of the size that it gave with it.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr(), to as *mut u8, shown);
        (to as *mut u8).add(shown).write(0);
    }
    shown
}

/// Checks an image for a device and reports into the options' logs.
pub(crate) fn parse(
    image: &[u8],
    device: usize,
    options: Option<&Options>,
) -> Outcome<Arc<ptx::Module>> {
    report(modules::parse(image, settings().model(device)), options)
}

/// Reports a refusal, if there is one, into the options' logs.
pub(super) fn report<T>(parsed: Result<T, Refusal>, options: Option<&Options>) -> Outcome<T> {
    if let Some(options) = options.filter(|options| options.count > 0) {
        let logs = options.logs()?;
        let text = parsed.as_ref().err().map_or("", |refusal: &Refusal| refusal.text.as_str());
        let shown = write_log(logs.error, logs.error_size, text);
        if let Some(index) = logs.error_size_at {
            options.values.set_at(index, shown as u64)?;
        }
        let shown = write_log(logs.info, logs.info_size, "");
        if let Some(index) = logs.info_size_at {
            options.values.set_at(index, shown as u64)?;
        }
    }
    parsed.map_err(|refusal| {
        if settings().log {
            eprintln!("softcuda: module refused: {}", refusal.text);
        }
        refusal.code
    })
}

fn load(out: &Out<u64>, image: &[u8], options: Option<&Options>) -> Outcome {
    out.check()?;
    let context = context::current()?;
    let code = parse(image, context.device, options)?;
    context.prints.flush();
    out.set(modules::load(&context, code)?.handle)
}

/// Loads a module of the image at an address, in the current context.
///
/// # Errors
/// As `cuModuleLoadData`.
pub(super) fn load_at(out: &Out<u64>, address: Address) -> Outcome {
    load(out, &image(address)?, None)
}

/// The module of a handle.
pub(crate) fn find(handle: u64) -> Outcome<Arc<Module>> {
    MODULES.get(handle).ok_or(Code::INVALID_HANDLE)
}

driver_api! {
    call fn cuModuleLoad(out: Out<u64>, path: Text) {
        load(&out, &image_in_file(path.get()?)?, None)
    }

    call fn cuModuleLoadData(out: Out<u64>, address: Address) {
        load_at(&out, address)
    }

    call fn cuModuleLoadDataEx(
        out: Out<u64>, address: Address, count: u32, names: In<u32>, values: Out<u64>,
    ) {
        load(&out, &image(address)?, Some(&Options { count, names, values }))
    }

    call fn cuModuleLoadFatBinary(out: Out<u64>, address: Address) {
        load_at(&out, address)
    }

    call fn cuModuleUnload(handle: u64) {
        let module = find(handle)?;
        context::wait_everything();
        if let Some(context) = CONTEXTS.get(module.context) {
            context.prints.flush();
        }
        modules::unload(&module);
        Ok(())
    }

    call fn cuModuleGetLoadingMode(out: Out<u32>) {
        out.set(1)
    }

    call fn cuModuleGetFunction(out: Out<u64>, handle: u64, name: Text) {
        context::current()?;
        out.set(find(handle)?.function(name.get()?)?)
    }

    call fn cuModuleGetFunctionCount(out: Out<u32>, handle: u64) {
        out.set(find(handle)?.functions().len() as u32)
    }

    call fn cuModuleEnumerateFunctions(out: Out<u64>, count: u32, handle: u64) {
        out.set_all(find(handle)?.functions().into_iter().take(count as usize))
    }

    call fn cuModuleGetGlobal_v2(out: Out<u64>, bytes: Out<usize>, handle: u64, name: Text) {
        context::current()?;
        let (address, size) = find(handle)?.global(name.get()?)?;
        out.set_if_wanted(address);
        bytes.set_if_wanted(size);
        Ok(())
    }
}
