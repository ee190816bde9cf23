//! Two processes with host memory of `cuMemCreate` that the first one has exported, as NCCL shares it between ranks: each
//! process's device changes it, and each process's host, which no call tells of.

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::ptr;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{
    CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationProp, CUmemLocation, CUmemLocationType,
};
use rustix::io::{FdFlags, fcntl_setfd};

use crate::args;
use crate::cuda::{check, driver};
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;
use crate::second::Second;
use crate::vmm::{access, properties};

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where the second process finds the descriptor and the words.
const ENV: &str = "WORKLOAD_HOST_BLOCKS";
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

fn on_host() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: 0 }
}

/// Memory that is mapped for the host and a device; its handle is released at once.
struct Mapped {
    address: u64,
    words: usize,
}

impl Mapped {
    /// New memory, and a descriptor of it.
    fn create(gpu: &Gpu, words: usize) -> Result<(Self, OwnedFd)> {
        let properties =
            CUmemAllocationProp { location: on_host(), ..properties(gpu.device(), true) };
        let (mut handle, mut fd) = (0, -1i32);
        // SAFETY: the pointers are valid for the calls; for this kind of handle the result is a descriptor.
        unsafe {
            let code = (driver().cuMemCreate)(&raw mut handle, 4 * words, &raw const properties, 0);
            check("cuMemCreate", code)?;
            let out = (&raw mut fd).cast();
            let code = (driver().cuMemExportToShareableHandle)(out, handle, POSIX_FD, 0);
            check("cuMemExportToShareableHandle", code)?;
        }
        // SAFETY: it is new, and nobody else has it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok((Self::map(gpu, handle, words)?, fd))
    }

    fn import(gpu: &Gpu, fd: &OwnedFd, words: usize) -> Result<Self> {
        let (mut handle, fd) = (0, fd.as_raw_fd() as usize as *mut c_void);
        // SAFETY: a place for the result; for this kind of handle the pointer is the descriptor.
        let code =
            unsafe { (driver().cuMemImportFromShareableHandle)(&raw mut handle, fd, POSIX_FD) };
        check("cuMemImportFromShareableHandle", code)?;
        Self::map(gpu, handle, words)
    }

    fn map(gpu: &Gpu, handle: u64, words: usize) -> Result<Self> {
        let (d, bytes, mut address) = (driver(), 4 * words, 0);
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = [access(gpu.device()), CUmemAccessDesc { location: on_host(), flags }];
        // SAFETY: the pointers are valid for the calls; the driver checks handle and range.
        unsafe {
            let code = (d.cuMemAddressReserve)(&raw mut address, bytes, 0, 0, 0);
            check("cuMemAddressReserve", code)?;
            check("cuMemMap", (d.cuMemMap)(address, bytes, 0, handle, 0))?;
            let code = (d.cuMemSetAccess)(address, bytes, access.as_ptr(), access.len());
            check("cuMemSetAccess", code)?;
            check("cuMemRelease", (d.cuMemRelease)(handle))?;
        }
        Ok(Self { address, words })
    }

    fn at(&self, word: usize) -> *mut u32 {
        assert!(word < self.words);
        (self.address as *mut u32).wrapping_add(word)
    }

    fn read(&self, word: usize) -> u32 {
        // SAFETY: within the memory, which the host may read; others write to it, so it is volatile.
        unsafe { ptr::read_volatile(self.at(word)) }
    }

    fn write(&self, word: usize, value: u32) {
        // SAFETY: within the memory, which the host may write; others read it, so it is volatile.
        unsafe { ptr::write_volatile(self.at(word), value) };
    }

    fn contents(&self) -> Vec<u32> {
        (0..self.words).map(|word| self.read(word)).collect()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped and reserved by this value, once.
        unsafe {
            (driver().cuMemUnmap)(self.address, 4 * self.words);
            (driver().cuMemAddressFree)(self.address, 4 * self.words);
        }
    }
}

fn mix(kernel: &Kernel, gpu: &Gpu, memory: &Mapped, step: u32) -> Result<()> {
    let words = memory.words as u32;
    kernel.run(Shape::covering(words), args![memory.address, words, step])?;
    gpu.synchronize()
}

/// Where the host of either process writes in a step.
fn places(step: u32, words: usize) -> [usize; 2] {
    [step as usize * 977 % words, (step as usize * 4093 + 1) % words]
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return second(&given);
    }
    let words: usize = run.pick(1 << 19, 1 << 21, 1 << 24);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open_at(0)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let mut host = filled(words, run.seed);
    let (memory, ticket) = Mapped::create(&gpu, words)?;
    // Memory of the device too, so that there is something to copy while the program runs.
    let beside = Buffer::holding(&host)?;
    host.iter().enumerate().for_each(|(word, value)| memory.write(word, *value));
    fcntl_setfd(&ticket, FdFlags::empty())?;
    let mut other = Second::start("host-blocks", ENV, &format!("{} {words}", ticket.as_raw_fd()))?;
    drop(ticket);
    other.hear()?;
    run.line(format_args!("child pid={}", other.pid()))?;
    run.ready()?;
    for step in 0..steps {
        let [own, others] = places(step, words);
        mix(&round, &gpu, &memory, step)?;
        memory.write(own, step);
        other.tell(step)?;
        let said = other.hear()?;
        mixer_round(&mut host, step);
        host[own] = step;
        mixer_round(&mut host, step + 1000);
        host[others] = !step;
        ensure!(memory.contents() == host, "step {step}: the memory is wrong");
        run.step(step, format_args!("{said}"))?;
    }
    other.end()?;
    run.absorb(&memory.contents());
    run.absorb(&beside.read::<u32>()?);
    run.finish()
}

/// The second process: mixes the memory and writes to it whenever it is told to.
fn second(given: &str) -> Result<()> {
    let (fd, words) = given.split_once(' ').context("two numbers")?;
    // SAFETY: the first process leaves the descriptor to this one, which uses it here alone.
    let ticket = unsafe { OwnedFd::from_raw_fd(fd.parse()?) };
    let words: usize = words.parse()?;
    let gpu = Gpu::open_at(1)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let mut memory = Mapped::import(&gpu, &ticket, words)?;
    println!("has it");
    for line in std::io::stdin().lines() {
        let step: u32 = line?.trim().parse()?;
        mix(&round, &gpu, &memory, step + 1000)?;
        memory.write(places(step, words)[1], !step);
        println!("{:08x}", memory.read(words - 1));
        if step % 16 == 3 {
            // From a ticket that is kept, and was perhaps made in an earlier life.
            let again = Mapped::import(&gpu, &ticket, words)?;
            drop(std::mem::replace(&mut memory, again));
        }
    }
    Ok(())
}
