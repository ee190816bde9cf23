//! Two processes that have memory of each other, by exported handles: each changes what is the other's, in turn. One
//! handle is inherited, the other one sent over a socket.

use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Result, ensure};
use gpucr_wire::Connection;
use rustix::io::{FdFlags, fcntl_setfd};

use crate::args;
use crate::cuda::{check, driver};
use crate::gpu::{Gpu, Kernel, Module, Shape, read_at, write_at};
use crate::numbers::{filled, mixer_round};
use crate::report::Run;
use crate::second::Second;
use crate::vmm::{access, properties};

const PTX: &str = include_str!("kernels/mixer.ptx");
/// Where the second process finds the descriptors of the first one's memory and of a socket to it, and the words.
const ENV: &str = "WORKLOAD_HANDLES";
/// Words of the second process.
const SMALL: u32 = 1 << 19;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// What is mapped; unmapped and released on drop. Its handle is kept, as NCCL does.
pub(crate) struct Mapped {
    pub(crate) handle: u64,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl Mapped {
    /// New memory of a device.
    pub(crate) fn create(gpu: &Gpu, bytes: usize) -> Result<Self> {
        let (properties, mut handle) = (properties(gpu.device(), true), 0);
        // SAFETY: the pointers are valid for the call.
        let code =
            unsafe { (driver().cuMemCreate)(&raw mut handle, bytes, &raw const properties, 0) };
        check("cuMemCreate", code)?;
        Self::map(gpu, handle, bytes)
    }

    /// Maps what is behind a descriptor.
    pub(crate) fn import(gpu: &Gpu, fd: &OwnedFd, bytes: usize) -> Result<Self> {
        Self::map(gpu, import(fd)?, bytes)
    }

    /// Maps what is behind a handle.
    pub(crate) fn map(gpu: &Gpu, handle: u64, bytes: usize) -> Result<Self> {
        let (d, access, mut address) = (driver(), access(gpu.device()), 0);
        // SAFETY: the pointers are valid for the calls; the driver checks handle and range.
        unsafe {
            let code = (d.cuMemAddressReserve)(&raw mut address, bytes, 0, 0, 0);
            check("cuMemAddressReserve", code)?;
            check("cuMemMap", (d.cuMemMap)(address, bytes, 0, handle, 0))?;
            let code = (d.cuMemSetAccess)(address, bytes, &raw const access, 1);
            check("cuMemSetAccess", code)?;
        }
        Ok(Self { handle, address, bytes })
    }

    fn export(&self) -> Result<OwnedFd> {
        export(self.handle)
    }
}

/// A descriptor of what is behind a handle.
pub(crate) fn export(handle: u64) -> Result<OwnedFd> {
    let mut fd = -1i32;
    // SAFETY: for this kind of handle the result is a descriptor.
    let code = unsafe {
        let out = (&raw mut fd).cast();
        (driver().cuMemExportToShareableHandle)(out, handle, POSIX_FD, 0)
    };
    check("cuMemExportToShareableHandle", code)?;
    // SAFETY: it is new, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A handle of what is behind a descriptor.
pub(crate) fn import(fd: &OwnedFd) -> Result<u64> {
    let (mut handle, fd) = (0, fd.as_raw_fd() as usize as *mut _);
    // SAFETY: a place for the result; for this kind of handle the pointer is the descriptor.
    let code = unsafe { (driver().cuMemImportFromShareableHandle)(&raw mut handle, fd, POSIX_FD) };
    check("cuMemImportFromShareableHandle", code)?;
    Ok(handle)
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped, reserved and got by this value, once.
        unsafe {
            (driver().cuMemUnmap)(self.address, self.bytes);
            (driver().cuMemAddressFree)(self.address, self.bytes);
            (driver().cuMemRelease)(self.handle);
        }
    }
}

fn mix(kernel: &Kernel, gpu: &Gpu, address: u64, words: u32, step: u32) -> Result<()> {
    kernel.run(Shape::covering(words), args![address, words, step])?;
    gpu.synchronize()
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return second(&given);
    }
    let words: u32 = run.pick(1 << 20, 1 << 22, 64 << 20);
    let steps = run.plan(100, 400, 1000);
    let gpu = Gpu::open_at(0)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let mut host = filled(words as usize, run.seed);
    let own = Mapped::create(&gpu, 4 * words as usize)?;
    write_at(own.address, &host)?;
    let ticket = own.export()?;
    let (here, there) = UnixStream::pair()?;
    fcntl_setfd(&ticket, FdFlags::empty())?;
    fcntl_setfd(&there, FdFlags::empty())?;
    let given = format!("{} {} {words}", ticket.as_raw_fd(), there.as_raw_fd());
    let mut other = Second::start("handles", ENV, &given)?;
    drop((ticket, there));
    let of_second = Connection::new(here).receive_fds(1)?.remove(0);
    let bytes = 4 * SMALL as usize;
    let mut others = Mapped::import(&gpu, &of_second, bytes)?;
    run.line(format_args!("child pid={}", other.pid()))?;
    run.ready()?;
    let mut small = filled(SMALL as usize, 7);
    let checked = run.checkable(2 * u64::from(words));
    for step in 0..steps {
        mix(&round, &gpu, own.address, words, step)?;
        other.tell(step)?;
        let said = other.hear()?;
        mix(&round, &gpu, others.address, SMALL, step)?;
        if step % 16 == 7 {
            // From a ticket that is kept, and was perhaps made in an earlier life.
            let again = Mapped::import(&gpu, &of_second, bytes)?;
            drop(std::mem::replace(&mut others, again));
        }
        let seen: Vec<u32> = read_at(others.address, SMALL as usize)?;
        run.step(step, format_args!("{said} {:08x}", seen[5]))?;
        if step < checked {
            mixer_round(&mut host, step);
            mixer_round(&mut host, step + 1000);
            mixer_round(&mut small, step);
            ensure!(seen == small, "step {step}: the memory of the second process is wrong");
        }
    }
    other.end()?;
    let last: Vec<u32> = read_at(own.address, words as usize)?;
    ensure!(checked < steps || last == host, "the final words are wrong");
    run.absorb(&last);
    run.finish()
}

/// The second process: mixes the first one's memory whenever it is told to.
fn second(given: &str) -> Result<()> {
    let numbers: Vec<i32> = given.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [ticket, socket, words] = numbers[..] else { anyhow::bail!("three numbers") };
    // SAFETY: the first process leaves both descriptors to this one, which uses each here alone.
    let (ticket, socket) =
        unsafe { (OwnedFd::from_raw_fd(ticket), UnixStream::from_raw_fd(socket)) };
    let words = words as u32;
    let gpu = Gpu::open_at(1)?;
    let module = Module::load(PTX)?;
    let round = module.kernel("mixer_round")?;
    let own = Mapped::create(&gpu, 4 * SMALL as usize)?;
    write_at(own.address, &filled(SMALL as usize, 7))?;
    let mut others = Mapped::import(&gpu, &ticket, 4 * words as usize)?;
    Connection::new(socket).send_fds(&[own.export()?])?;
    for line in std::io::stdin().lines() {
        let step: u32 = line?.trim().parse()?;
        mix(&round, &gpu, others.address, words, step + 1000)?;
        if step % 16 == 3 {
            let again = Mapped::import(&gpu, &ticket, 4 * words as usize)?;
            drop(std::mem::replace(&mut others, again));
        }
        let seen: u32 = read_at(others.address + 4 * u64::from(words - 1), 1)?[0];
        println!("{seen:08x}");
    }
    Ok(())
}
