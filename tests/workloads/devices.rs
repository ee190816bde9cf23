//! One process on several devices: each changes memory of the next one directly, and copies go between them. One block
//! of the program's own is open to all of them.

use anyhow::{Result, ensure};

use crate::args;
use crate::cuda::{STREAM_NON_BLOCKING, check, driver};
use crate::event::Event;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream, read_at, write_at};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;
use crate::vmm::{access, properties};

const PTX: &str = include_str!("kernels/mixer.ptx");
/// More devices than these are left alone.
const MOST: u32 = 4;

/// What there is on a device.
struct Device {
    kernel: Kernel,
    _module: Module,
    stream: Stream,
    words: Buffer,
    copy: Buffer,
    changed: Event,
    gpu: Gpu,
    /// What the host expects.
    host: Vec<u32>,
}

impl Device {
    fn open(number: u32, words: usize, seed: u32) -> Result<Self> {
        let gpu = Gpu::open_at(number)?;
        let module = Module::load(PTX)?;
        let host = filled(words, seed.wrapping_add(number));
        Ok(Self {
            kernel: module.kernel("mixer_round")?,
            _module: module,
            stream: Stream::new(STREAM_NON_BLOCKING)?,
            words: Buffer::holding(&host)?,
            copy: Buffer::new(4 * words)?,
            changed: Event::new()?,
            gpu,
            host,
        })
    }

    /// Changes memory of any device.
    fn mix(&self, address: u64, words: usize, step: u32) -> Result<()> {
        self.gpu.make_current()?;
        let shape = Shape::covering(words as u32);
        self.kernel.run_on(&self.stream, shape, args![address, words as u32, step])
    }
}

/// A block of the program's own on the first device, open to all.
fn shared(devices: &[Device], words: usize) -> Result<u64> {
    let (d, properties) = (driver(), properties(devices[0].gpu.device(), false));
    let access: Vec<_> = devices.iter().map(|device| access(device.gpu.device())).collect();
    let (mut handle, mut address, bytes) = (0, 0, 4 * words);
    // SAFETY: the pointers are valid for the calls; the driver checks handle and range.
    unsafe {
        let code = (d.cuMemCreate)(&raw mut handle, bytes, &raw const properties, 0);
        check("cuMemCreate", code)?;
        let code = (d.cuMemAddressReserve)(&raw mut address, bytes, 0, 0, 0);
        check("cuMemAddressReserve", code)?;
        check("cuMemMap", (d.cuMemMap)(address, bytes, 0, handle, 0))?;
        let code = (d.cuMemSetAccess)(address, bytes, access.as_ptr(), access.len());
        check("cuMemSetAccess", code)?;
    }
    Ok(address)
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let words: usize = run.pick(1 << 19, 1 << 20, 16 << 20);
    let steps = run.plan(60, 200, 500);
    let count = Gpu::count()?.clamp(1, MOST);
    let mut devices: Vec<Device> =
        (0..count).map(|number| Device::open(number, words, run.seed)).collect::<Result<_>>()?;
    let number = devices.len();
    let next = |at: usize| (at + 1) % number;
    for at in (0..number).filter(|at| next(*at) != *at) {
        devices[at].gpu.make_current()?;
        devices[at].gpu.open_to_this(&devices[next(at)].gpu)?;
    }
    let block = shared(&devices, words)?;
    let mut in_block = filled(words, 99);
    write_at(block, &in_block)?;
    run.ready()?;
    for step in 0..steps {
        for device in &mut devices {
            device.mix(device.words.address(), words, step)?;
            device.changed.record(&device.stream)?;
            mixer_round(&mut device.host, step);
        }
        for (at, device) in devices.iter().enumerate() {
            let other = &devices[next(at)];
            device.gpu.make_current()?;
            other.changed.hold(&device.stream)?;
            let (to, from) = (device.copy.address(), other.words.address());
            device.gpu.copy_from(to, &other.gpu, from, 4 * words, &device.stream)?;
        }
        devices.iter().try_for_each(|device| device.stream.synchronize())?;
        for at in 0..number {
            let (address, step) = (devices[next(at)].words.address(), step + 1000);
            devices[at].mix(address, words, step)?;
        }
        let by = step as usize % number;
        devices[by].mix(block, words, step)?;
        mixer_round(&mut in_block, step);
        devices.iter().try_for_each(|device| device.stream.synchronize())?;
        let mut line = String::new();
        for at in 0..number {
            let copied: Vec<u32> = devices[at].copy.read()?;
            ensure!(copied == devices[next(at)].host, "step {step}: the copy on device {at}");
            line += &format!("{:08x} ", copied[7]);
        }
        for device in &mut devices {
            mixer_round(&mut device.host, step + 1000);
            ensure!(device.words.read::<u32>()? == device.host, "step {step}: the words");
        }
        ensure!(read_at::<u32>(block, words)? == in_block, "step {step}: the block");
        run.step(step, format_args!("{line}{:08x}", in_block[7]))?;
    }
    devices.iter().for_each(|device| run.absorb(&device.host));
    run.finish()
}
