//! Contexts, memory, streams, modules and launches: a thin, checked layer over the driver API.

use std::ffi::{CString, c_int, c_void};

use anyhow::{Context as _, Result, bail, ensure};

use crate::cuda::{Handle, LIMIT_STACK_SIZE, NOT_READY, check, driver, load};

/// Types that are plain bits: any bytes are a value, and there is no padding.
///
/// # Safety
/// Implement it only for types of which that is true.
pub(crate) unsafe trait Plain: Copy + Default {}
// SAFETY: primitive numbers have no padding, and every bit pattern is a value.
unsafe impl Plain for u8 {}
// SAFETY: a primitive number, as `u8` is.
unsafe impl Plain for u32 {}
// SAFETY: a primitive number, as `u8` is.
unsafe impl Plain for u64 {}
// SAFETY: a primitive number, as `u8` is.
unsafe impl Plain for f32 {}

/// The bytes of a slice of plain values.
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: the slice is valid memory of exactly this size, and `Plain` values have no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// A context on a device, current in the thread that made it.
pub(crate) struct Gpu {
    device: c_int,
    context: Handle,
    primary: bool,
}

impl Gpu {
    /// Loads the driver and makes the first device's primary context current, as the runtime does.
    pub(crate) fn open() -> Result<Self> {
        Self::with_context(0, true)
    }

    /// The same on any device: the one of this number, counted round and round.
    pub(crate) fn open_at(number: u32) -> Result<Self> {
        Self::with_context(number, true)
    }

    /// Opens the device with a context of the program's own.
    pub(crate) fn open_own_context() -> Result<Self> {
        Self::with_context(0, false)
    }

    fn with_context(number: u32, primary: bool) -> Result<Self> {
        load()?;
        let (d, mut device, mut context, mut count) = (driver(), 0, 0, 0);
        // SAFETY: the out-pointers are valid for the calls; `cuInit` has no precondition.
        unsafe {
            check("cuInit", (d.cuInit)(0))?;
            check("cuDeviceGetCount", (d.cuDeviceGetCount)(&raw mut count))?;
            let number = number as c_int % count.max(1);
            check("cuDeviceGet", (d.cuDeviceGet)(&raw mut device, number))?;
            if primary {
                let code = (d.cuDevicePrimaryCtxRetain)(&raw mut context, device);
                check("cuDevicePrimaryCtxRetain", code)?;
            } else {
                check("cuCtxCreate", (d.cuCtxCreate)(&raw mut context, 0, device))?;
            }
        }
        let gpu = Self { device, context, primary };
        gpu.make_current()?;
        Ok(gpu)
    }

    /// How many devices there are.
    pub(crate) fn count() -> Result<u32> {
        load()?;
        let mut count = 0;
        // SAFETY: `cuInit` has no precondition, and `count` is a place for the result.
        unsafe {
            check("cuInit", (driver().cuInit)(0))?;
            check("cuDeviceGetCount", (driver().cuDeviceGetCount)(&raw mut count))?;
        }
        Ok(count.max(0) as u32)
    }

    /// Lets the current context use memory of this one.
    pub(crate) fn open_to_this(&self, other: &Self) -> Result<()> {
        // SAFETY: both contexts live.
        let code = unsafe { (driver().cuCtxEnablePeerAccess)(other.context, 0) };
        check("cuCtxEnablePeerAccess", code)
    }

    /// Starts a copy from memory of another device.
    pub(crate) fn copy_from(
        &self,
        to: u64,
        other: &Self,
        from: u64,
        bytes: usize,
        stream: &Stream,
    ) -> Result<()> {
        let (own, other) = (self.context, other.context);
        // SAFETY: takes no host pointers; a bad device address is an error code.
        let code = unsafe { (driver().cuMemcpyPeerAsync)(to, own, from, other, bytes, stream.0) };
        check("cuMemcpyPeerAsync", code)
    }

    /// The device.
    pub(crate) fn device(&self) -> c_int {
        self.device
    }

    /// Makes the context current in the calling thread.
    pub(crate) fn make_current(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        check("cuCtxSetCurrent", unsafe { (driver().cuCtxSetCurrent)(self.context) })
    }

    /// Waits for all work of the context.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: takes no pointers.
        check("cuCtxSynchronize", unsafe { (driver().cuCtxSynchronize)() })
    }

    /// Sets the stack of each GPU thread, in bytes.
    pub(crate) fn set_stack_size(&self, bytes: usize) -> Result<()> {
        // SAFETY: takes no pointers.
        let code = unsafe { (driver().cuCtxSetLimit)(LIMIT_STACK_SIZE, bytes) };
        check("cuCtxSetLimit", code)
    }

    /// The stack of each GPU thread, in bytes.
    pub(crate) fn stack_size(&self) -> Result<usize> {
        let mut bytes = 0;
        // SAFETY: `bytes` is a valid place for the result.
        let code = unsafe { (driver().cuCtxGetLimit)(&raw mut bytes, LIMIT_STACK_SIZE) };
        check("cuCtxGetLimit", code)?;
        Ok(bytes)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // An error here has no one to tell: the results are out already.
        // SAFETY: the context was retained or made by `with_context`, and is given up once.
        unsafe {
            if self.primary {
                (driver().cuDevicePrimaryCtxRelease)(self.device);
            } else {
                (driver().cuCtxDestroy)(self.context);
            }
        }
    }
}

/// Copies plain values to device memory and waits for it.
pub(crate) fn write_at<T: Plain>(address: u64, values: &[T]) -> Result<()> {
    // SAFETY: the slice is readable for its whole size; a bad device address is an error code.
    let code =
        unsafe { (driver().cuMemcpyHtoD)(address, values.as_ptr().cast(), size_of_val(values)) };
    check("cuMemcpyHtoD", code)
}

/// Copies `count` plain values back from device memory.
pub(crate) fn read_at<T: Plain>(address: u64, count: usize) -> Result<Vec<T>> {
    let mut values = vec![T::default(); count];
    let bytes = size_of_val(values.as_slice());
    // SAFETY: the vector is writable for its whole size, and `T` takes any bytes.
    let code = unsafe { (driver().cuMemcpyDtoH)(values.as_mut_ptr().cast(), address, bytes) };
    check("cuMemcpyDtoH", code)?;
    Ok(values)
}

/// Sets `words` 32-bit words of device memory.
pub(crate) fn fill_at(address: u64, value: u32, words: usize) -> Result<()> {
    // SAFETY: takes no host pointers; a bad device address is an error code.
    check("cuMemsetD32", unsafe { (driver().cuMemsetD32)(address, value, words) })
}

/// An allocation on the device, freed on drop.
pub(crate) struct Buffer {
    address: u64,
    bytes: usize,
}

impl Buffer {
    /// An allocation with undefined content.
    pub(crate) fn new(bytes: usize) -> Result<Self> {
        let mut address = 0;
        // SAFETY: `address` is a valid place for the result.
        check("cuMemAlloc", unsafe { (driver().cuMemAlloc)(&raw mut address, bytes) })?;
        Ok(Self { address, bytes })
    }

    /// Room for `count` values of `T`, all zero. The size is rounded up to whole words.
    pub(crate) fn zeroed<T: Plain>(count: usize) -> Result<Self> {
        let buffer = Self::new((count * size_of::<T>()).next_multiple_of(4))?;
        fill_at(buffer.address, 0, buffer.bytes / 4)?;
        Ok(buffer)
    }

    /// An allocation that holds a copy of the values.
    pub(crate) fn holding<T: Plain>(values: &[T]) -> Result<Self> {
        let buffer = Self::new(size_of_val(values))?;
        write_at(buffer.address, values)?;
        Ok(buffer)
    }

    /// The address on the device.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    /// The size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// A copy of the whole content.
    pub(crate) fn read<T: Plain>(&self) -> Result<Vec<T>> {
        read_at(self.address, self.bytes / size_of::<T>())
    }

    /// Element `index` alone.
    pub(crate) fn read_one<T: Plain>(&self, index: usize) -> Result<T> {
        ensure!((index + 1) * size_of::<T>() <= self.bytes, "read past the end of a buffer");
        Ok(read_at(self.address + (index * size_of::<T>()) as u64, 1)?[0])
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the address came from `cuMemAlloc` and is freed once.
        unsafe { (driver().cuMemFree)(self.address) };
    }
}

/// A stream, destroyed on drop. Handle 0 is the default stream.
pub(crate) struct Stream(pub(crate) Handle);

impl Stream {
    /// A stream with the given `CU_STREAM_*` flags.
    pub(crate) fn new(flags: u32) -> Result<Self> {
        let mut handle = 0;
        // SAFETY: `handle` is a valid place for the result.
        check("cuStreamCreate", unsafe { (driver().cuStreamCreate)(&raw mut handle, flags) })?;
        Ok(Self(handle))
    }

    /// Waits for all work of the stream.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream lives as long as `self`.
        check("cuStreamSynchronize", unsafe { (driver().cuStreamSynchronize)(self.0) })
    }

    /// Whether all work of the stream is done.
    pub(crate) fn is_idle(&self) -> Result<bool> {
        // SAFETY: the stream lives as long as `self`.
        match unsafe { (driver().cuStreamQuery)(self.0) } {
            NOT_READY => Ok(false),
            code => check("cuStreamQuery", code).map(|()| true),
        }
    }

    /// Starts a copy to device memory.
    ///
    /// # Safety
    /// `values` must stay alive and unchanged until the stream has done this copy.
    pub(crate) unsafe fn copy_in<T: Plain>(&self, address: u64, values: &[T]) -> Result<()> {
        // SAFETY: the slice is readable, and the caller keeps it so until the copy is done.
        let code = unsafe {
            let bytes = size_of_val(values);
            (driver().cuMemcpyHtoDAsync)(address, values.as_ptr().cast(), bytes, self.0)
        };
        check("cuMemcpyHtoDAsync", code)
    }

    /// Starts a copy from device memory.
    ///
    /// # Safety
    /// `values` must stay alive and untouched until the stream has done this copy.
    pub(crate) unsafe fn copy_out<T: Plain>(&self, values: &mut [T], address: u64) -> Result<()> {
        // SAFETY: the slice is writable, and the caller leaves it alone until the copy is done.
        let code = unsafe {
            let bytes = size_of_val(values);
            (driver().cuMemcpyDtoHAsync)(values.as_mut_ptr().cast(), address, bytes, self.0)
        };
        check("cuMemcpyDtoHAsync", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the handle came from `cuStreamCreate` and is destroyed once.
        unsafe { (driver().cuStreamDestroy)(self.0) };
    }
}

/// A module made from PTX, unloaded on drop.
pub(crate) struct Module {
    handle: Handle,
    ptx: &'static str,
}

/// If this is set modules are loaded from fat binaries, with machine code for the capabilities besides that it lists: `80,90`.
const FAT_BINARY: &str = "WORKLOAD_FAT_BINARY";

/// A fat binary with this text, and with machine code that nobody can run. Its form is described in
/// `softcuda/src/fatbin.rs`.
fn fat_binary(text: &[u8], generations: &str) -> Result<Vec<u8>> {
    let target = std::str::from_utf8(text)?.split("sm_").nth(1).context("a target")?;
    let target: String = target.chars().take_while(char::is_ascii_digit).collect();
    let mut entries = Vec::new();
    let mut put = |kind: u16, capability: u32, contents: &[u8]| {
        let contents =
            [contents, &vec![0; contents.len().next_multiple_of(8) - contents.len()]].concat();
        let mut header = [0u8; 64];
        header[..2].copy_from_slice(&kind.to_le_bytes());
        header[4..8].copy_from_slice(&64u32.to_le_bytes());
        header[8..16].copy_from_slice(&(contents.len() as u64).to_le_bytes());
        header[28..32].copy_from_slice(&capability.to_le_bytes());
        entries.extend([&header[..], &contents].concat());
    };
    for generation in generations.split(',').filter(|generation| !generation.is_empty()) {
        put(2, generation.parse()?, b"\x7fELF");
    }
    put(1, target.parse()?, text);
    let mut whole = 0xba55_ed50u32.to_le_bytes().to_vec();
    whole.extend([1, 0, 16, 0]);
    whole.extend((entries.len() as u64).to_le_bytes());
    Ok([whole, entries].concat())
}

impl Module {
    /// Loads a module.
    pub(crate) fn load(ptx: &'static str) -> Result<Self> {
        let text = CString::new(ptx).context("PTX with a NUL byte")?.into_bytes_with_nul();
        let image = match std::env::var(FAT_BINARY) {
            Ok(generations) => fat_binary(&text, &generations)?,
            Err(_) => text,
        };
        let mut handle = 0;
        // SAFETY: the image ends as it says itself, and lives through the call; `handle` takes the result.
        let code = unsafe { (driver().cuModuleLoadData)(&raw mut handle, image.as_ptr().cast()) };
        check("cuModuleLoadData", code)?;
        Ok(Self { handle, ptx })
    }

    /// A kernel of the module. It must not be used after the module is dropped (the driver then
    /// reports an error).
    pub(crate) fn kernel(&self, name: &str) -> Result<Kernel> {
        let text = CString::new(name).context("kernel name")?;
        let mut handle = 0;
        // SAFETY: the name ends in NUL and lives through the call; `handle` takes the result.
        let code =
            unsafe { (driver().cuModuleGetFunction)(&raw mut handle, self.handle, text.as_ptr()) };
        check("cuModuleGetFunction", code).with_context(|| format!("kernel {name}"))?;
        Ok(Kernel { handle, parameters: parameter_sizes(self.ptx, name)?, name: name.to_owned() })
    }

    /// Address and size in bytes of a variable of the module.
    pub(crate) fn global(&self, name: &str) -> Result<(u64, usize)> {
        let text = CString::new(name).context("variable name")?;
        let (mut address, mut bytes) = (0, 0);
        // SAFETY: the name ends in NUL and lives through the call; the out-pointers are valid.
        let code = unsafe {
            let (address, bytes) = (&raw mut address, &raw mut bytes);
            (driver().cuModuleGetGlobal)(address, bytes, self.handle, text.as_ptr())
        };
        check("cuModuleGetGlobal", code).with_context(|| format!("variable {name}"))?;
        Ok((address, bytes))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: the handle came from `cuModuleLoadData` and is unloaded once.
        unsafe { (driver().cuModuleUnload)(self.handle) };
    }
}

/// The sizes of a kernel's parameters, read from its PTX: what the driver will read at a launch.
fn parameter_sizes(ptx: &str, kernel: &str) -> Result<Vec<usize>> {
    let head = format!(".entry {kernel}(");
    let (_, rest) = ptx.split_once(&head).with_context(|| format!("no kernel {kernel} in PTX"))?;
    let (list, _) = rest.split_once(')').context("parameter list without an end")?;
    let mut sizes = Vec::new();
    for line in list.lines().filter(|line| line.contains(".param")) {
        let element = match line.split_whitespace().find(|w| {
            let kind = w.get(1..2).unwrap_or_default();
            w.starts_with('.') && w[2..].parse::<u32>().is_ok() && "usbf".contains(kind)
        }) {
            Some(kind) => kind[2..].parse::<usize>()? / 8,
            None => bail!("parameter without a type: {line}"),
        };
        let count = match line.split_once('[') {
            Some((_, n)) => n.trim_end_matches([']', ',']).parse()?,
            None => 1,
        };
        sizes.push(element * count);
    }
    Ok(sizes)
}

/// One argument of a launch: its bytes.
pub(crate) struct Arg(Vec<u8>);

impl From<u32> for Arg {
    fn from(value: u32) -> Self {
        Self(value.to_ne_bytes().to_vec())
    }
}

impl From<f32> for Arg {
    fn from(value: f32) -> Self {
        Self(value.to_ne_bytes().to_vec())
    }
}

impl From<u64> for Arg {
    fn from(value: u64) -> Self {
        Self(value.to_ne_bytes().to_vec())
    }
}

impl From<&Buffer> for Arg {
    fn from(buffer: &Buffer) -> Self {
        buffer.address.into()
    }
}

impl From<Packed> for Arg {
    fn from(mut packed: Packed) -> Self {
        packed.align(packed.align);
        Self(packed.bytes)
    }
}

/// A struct argument, laid out as a C compiler would: each field at its natural alignment.
#[derive(Default)]
pub(crate) struct Packed {
    bytes: Vec<u8>,
    align: usize,
}

impl Packed {
    fn align(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to.max(1)), 0);
    }

    /// Appends a field of `N` bytes, aligned to its size.
    pub(crate) fn field<const N: usize>(mut self, bytes: [u8; N]) -> Self {
        self.align(N);
        self.align = self.align.max(N);
        self.bytes.extend(bytes);
        self
    }

    /// Appends a 32-bit field.
    pub(crate) fn word(self, value: u32) -> Self {
        self.field(value.to_ne_bytes())
    }

    /// Appends a struct, padded to its own alignment as C does.
    pub(crate) fn nested(mut self, mut inner: Self) -> Self {
        inner.align(inner.align);
        self.align(inner.align);
        self.align = self.align.max(inner.align);
        self.bytes.extend(inner.bytes);
        self
    }

    /// Appends a pointer.
    pub(crate) fn pointer(self, address: u64) -> Self {
        self.field(address.to_ne_bytes())
    }
}

/// The arguments of a launch, each converted to its bytes.
#[macro_export]
macro_rules! args {
    ($( $value:expr ),* $(,)?) => { &[$( $crate::gpu::Arg::from($value) ),*] };
}

/// How many blocks and threads a launch has, and its dynamic shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    blocks: (u32, u32),
    threads: (u32, u32),
    shared: u32,
}

impl Shape {
    /// At least `n` threads in a row, 128 to a block.
    pub(crate) fn covering(n: u32) -> Self {
        Self::of(n.div_ceil(128), 128)
    }

    /// `blocks` times `threads`, one-dimensional.
    pub(crate) fn of(blocks: u32, threads: u32) -> Self {
        Self { blocks: (blocks, 1), threads: (threads, 1), shared: 0 }
    }

    /// The same with so much dynamic shared memory for each block, bytes.
    pub(crate) fn sharing(self, shared: u32) -> Self {
        Self { shared, ..self }
    }

    /// Threads of all blocks.
    pub(crate) fn all_threads(&self) -> u32 {
        self.blocks.0 * self.blocks.1 * self.threads.0 * self.threads.1
    }

    /// One block of `threads`.
    pub(crate) const fn row(threads: u32) -> Self {
        Self { blocks: (1, 1), threads: (threads, 1), shared: 0 }
    }

    /// At least `width` times `height` threads, in blocks of 16 by 8.
    pub(crate) fn plane(width: u32, height: u32) -> Self {
        let blocks = (width.div_ceil(16), height.div_ceil(8));
        Self { blocks, threads: (16, 8), shared: 0 }
    }

    /// This shape with this much dynamic shared memory, in bytes.
    pub(crate) fn with_shared(self, bytes: u32) -> Self {
        Self { shared: bytes, ..self }
    }
}

/// A kernel of a loaded module.
pub(crate) struct Kernel {
    handle: Handle,
    parameters: Vec<usize>,
    name: String,
}

impl Kernel {
    /// Launches on the default stream.
    pub(crate) fn run(&self, shape: Shape, args: &[Arg]) -> Result<()> {
        self.launch(0, shape, args)
    }

    /// Launches on a stream.
    pub(crate) fn run_on(&self, stream: &Stream, shape: Shape, args: &[Arg]) -> Result<()> {
        self.launch(stream.0, shape, args)
    }

    /// The driver's handle.
    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    /// Pointers to the arguments, in number and sizes as the kernel declares them. They are good for
    /// as long as `args` are.
    pub(crate) fn places(&self, args: &[Arg]) -> Result<Vec<*mut c_void>> {
        let sizes = args.iter().map(|arg| arg.0.len());
        ensure!(
            sizes.clone().eq(self.parameters.iter().copied()),
            "{} takes parameters of {:?} bytes, not {:?}",
            self.name,
            self.parameters,
            sizes.collect::<Vec<_>>()
        );
        Ok(args.iter().map(|arg| arg.0.as_ptr().cast_mut().cast()).collect())
    }

    fn launch(&self, stream: Handle, shape: Shape, args: &[Arg]) -> Result<()> {
        let mut places = self.places(args)?;
        let ((gx, gy), (bx, by)) = (shape.blocks, shape.threads);
        // SAFETY: the driver only reads the parameters, before it returns; their number and sizes
        // are what the kernel declares (`places` checks that).
        let code = unsafe {
            let (shared, list) = (shape.shared, places.as_mut_ptr());
            let none = std::ptr::null_mut();
            (driver().cuLaunchKernel)(self.handle, gx, gy, 1, bx, by, 1, shared, stream, list, none)
        };
        check("cuLaunchKernel", code).with_context(|| format!("kernel {}", self.name))
    }
}

#[cfg(test)]
mod tests {
    use super::{Arg, Packed, parameter_sizes};

    #[test]
    fn parameter_sizes_are_read_from_ptx() {
        let ptx = "
            .visible .entry other(.param .u64 other_param_0) { ret; }
            .visible .entry two(
                .param .u64 .ptr .global .align 4 two_param_0,
                .param .f32 two_param_1,
                .param .align 8 .b8 two_param_2[40]
            )
            { ret; }
            .visible .entry none()
            { ret; }";
        assert_eq!(parameter_sizes(ptx, "two").unwrap(), [8, 4, 40]);
        assert!(parameter_sizes(ptx, "none").unwrap().is_empty());
        assert!(parameter_sizes(ptx, "absent").is_err());
    }

    #[test]
    fn embedded_kernels_declare_what_the_structs_hold() {
        let structs = include_str!("kernels/structs.ptx");
        assert_eq!(parameter_sizes(structs, "structs_apply").unwrap(), [56]);
        assert_eq!(parameter_sizes(structs, "structs_spread").unwrap(), [8, 4, 56, 4]);
        assert_eq!(parameter_sizes(structs, "structs_split").unwrap(), [12, 4, 8]);
        let mlp = include_str!("kernels/mlp.ptx");
        assert_eq!(parameter_sizes(mlp, "adamw_update").unwrap(), [8, 8, 8, 8, 4, 28]);
    }

    #[test]
    fn packed_structs_have_the_layout_of_c() {
        let inner = Packed::default().pointer(0x1111_2222_3333_4444).word(5);
        let all = Packed::default().field([7u8]).nested(inner).field(3u16.to_ne_bytes());
        let Arg(bytes) = all.into();
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[0], 7);
        assert_eq!(bytes[8..16], 0x1111_2222_3333_4444u64.to_ne_bytes());
        assert_eq!(bytes[16..20], 5u32.to_ne_bytes());
        assert_eq!(bytes[24..26], 3u16.to_ne_bytes());
    }
}
