//! Page-locked host memory: asynchronous copies both ways on two streams, and memory that kernels
//! read and write directly through its mapping.

use std::ffi::c_void;
use std::ptr::NonNull;

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::cuda::{HOST_ALLOC_DEVICE_MAP, check, driver};
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream};
use crate::numbers::mix;
use crate::report::Run;

const PTX: &str = include_str!("kernels/pinned.ptx");

/// Page-locked words, freed on drop.
pub(crate) struct Pinned {
    words: NonNull<u32>,
    count: usize,
    /// The address by which kernels reach them; 0 if they are not mapped.
    device: u64,
}

impl Pinned {
    /// `count` words, all zero; `mapped` for those that kernels reach too.
    pub(crate) fn new(count: usize, mapped: bool) -> Result<Self> {
        let mut place: *mut c_void = std::ptr::null_mut();
        let flags = if mapped { HOST_ALLOC_DEVICE_MAP } else { 0 };
        // SAFETY: `place` is a valid place for the result.
        let code = unsafe { (driver().cuMemHostAlloc)(&raw mut place, count * 4, flags) };
        check("cuMemHostAlloc", code)?;
        let words = NonNull::new(place.cast::<u32>()).context("cuMemHostAlloc gave null")?;
        // SAFETY: the driver gave `count` words, and no one else knows them yet.
        unsafe { words.write_bytes(0, count) };
        let mut pinned = Self { words, count, device: 0 };
        if mapped {
            // SAFETY: `place` is mapped host memory, and the out-pointer is valid.
            let code =
                unsafe { (driver().cuMemHostGetDevicePointer)(&raw mut pinned.device, place, 0) };
            check("cuMemHostGetDevicePointer", code)?;
        }
        Ok(pinned)
    }

    /// The address by which kernels reach the words; 0 if they are not mapped.
    pub(crate) fn device(&self) -> u64 {
        self.device
    }

    /// Has the device write all of them, from `address`.
    pub(crate) fn copy_from(&mut self, address: u64) -> Result<()> {
        let (to, bytes) = (self.words.as_ptr().cast(), self.count * 4);
        // SAFETY: room for so many bytes, which nobody has a reference to.
        check("cuMemcpyDtoH", unsafe { (driver().cuMemcpyDtoH)(to, address, bytes) })
    }

    /// Changes one word, which a kernel may be looking at.
    pub(crate) fn set(&self, index: usize, value: u32) {
        assert!(index < self.count, "a word of these");
        // SAFETY: within the allocation; volatile, as another processor reads it meanwhile.
        unsafe { self.words.as_ptr().add(index).write_volatile(value) };
    }

    /// The words. Call it only while no copy or kernel uses them.
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: `count` initialised words that live as long as `self`; the lane below touches
        // them only after it has waited for its stream.
        unsafe { std::slice::from_raw_parts(self.words.as_ptr(), self.count) }
    }

    /// The words, to be changed. Call it only while no copy or kernel uses them.
    fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as for `words`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.words.as_ptr(), self.count) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: the address came from `cuMemHostAlloc` and is freed once.
        unsafe { (driver().cuMemFreeHost)(self.words.as_ptr().cast()) };
    }
}

/// One stream with its buffers. Two of them take turns, so that copies overlap.
struct Lane {
    stream: Stream,
    input: Pinned,
    output: Pinned,
    mapped: Pinned,
    device_in: Buffer,
    device_out: Buffer,
    state: Buffer,
    // What the host expects of the device's state, the last output and the mapped words.
    host_state: Vec<u32>,
    host_output: Vec<u32>,
    host_mapped: Vec<u32>,
}

impl Lane {
    fn new(n: usize) -> Result<Self> {
        let zero = vec![0; n];
        Ok(Self {
            stream: Stream::new(0)?,
            input: Pinned::new(n, false)?,
            output: Pinned::new(n, false)?,
            mapped: Pinned::new(n, true)?,
            device_in: Buffer::zeroed::<u32>(n)?,
            device_out: Buffer::zeroed::<u32>(n)?,
            state: Buffer::zeroed::<u32>(n)?,
            host_state: zero.clone(),
            host_output: zero.clone(),
            host_mapped: zero,
        })
    }

    /// Waits for the lane's last turn and checks what it brought back.
    fn settle(&self) -> Result<u32> {
        self.stream.synchronize()?;
        ensure!(self.output.words() == self.host_output, "data copied back is wrong");
        ensure!(self.mapped.words() == self.host_mapped, "mapped memory is wrong");
        Ok(self.output.words().iter().fold(0, |all, &word| mix(all ^ word)))
    }

    /// Starts a turn. The lane must be settled.
    fn start(&mut self, transform: &Kernel, direct: &Kernel, seed: u32, step: u32) -> Result<()> {
        let n = self.host_state.len() as u32;
        for (i, word) in self.input.words_mut().iter_mut().enumerate() {
            let value = mix(seed.wrapping_add(step.wrapping_mul(n)).wrapping_add(i as u32));
            *word = value;
            self.host_state[i] = self.host_state[i].wrapping_mul(3).wrapping_add(value);
            self.host_output[i] = mix(self.host_state[i] ^ step);
            let add = self.host_state[i] ^ i as u32;
            self.host_mapped[i] = self.host_mapped[i].wrapping_add(add);
        }
        let (shape, stream) = (Shape::covering(n), &self.stream);
        // SAFETY: the pinned words live as long as the lane, whose fields are dropped only after
        // a `settle`, and nothing touches them before the next `settle` has waited.
        unsafe { stream.copy_in(self.device_in.address(), self.input.words())? };
        let arguments = args![&self.device_in, &self.device_out, &self.state, n, step];
        transform.run_on(stream, shape, arguments)?;
        // SAFETY: the pinned words of the output live and are left alone for as long as those of the input.
        unsafe { stream.copy_out(self.output.words_mut(), self.device_out.address())? };
        direct.run_on(stream, shape, args![self.mapped.device, &self.state, n])
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // After an error copies may be in flight: wait before the pinned memory goes. If waiting
        // fails too, the stream does no more work.
        let _ = self.stream.synchronize();
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let n: usize = run.pick(16 << 10, 1 << 20, 4 << 20);
    let steps = run.plan(300, 200, 500);
    let gpu = Gpu::open()?;
    let module = Module::load(PTX)?;
    let transform = module.kernel("pinned_transform")?;
    let direct = module.kernel("pinned_mapped")?;
    let mut lanes = [Lane::new(n)?, Lane::new(n)?];
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        let lane = &mut lanes[(step % 2) as usize];
        let before = lane.settle()?;
        lane.start(&transform, &direct, run.seed, step)?;
        run.step(step, format_args!("before {before:08x}"))?;
    }
    for lane in &lanes {
        lane.settle()?;
        ensure!(lane.state.read::<u32>()? == lane.host_state, "the device's state is wrong");
        run.absorb(&lane.host_state);
        run.absorb(lane.output.words());
        run.absorb(lane.mapped.words());
    }
    run.finish()
}
