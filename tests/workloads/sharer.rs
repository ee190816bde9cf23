//! A pool of memory that other processes could open, in the middle third of the steps: the driver cannot checkpoint the
//! program then, and before and after it can.

use std::os::fd::{FromRawFd as _, OwnedFd};

use anyhow::Result;
use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemPoolProps};

use crate::cuda::{Handle, check, driver};
use crate::gpu::{Buffer, Gpu, fill_at};
use crate::report::Run;
use crate::vmm::properties;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;

/// A pool that was exported; destroyed on drop.
struct Pool(Handle);

impl Pool {
    fn exported(gpu: &Gpu) -> Result<Self> {
        let memory = properties(gpu.device(), true);
        let properties = CUmemPoolProps {
            allocType: memory.type_,
            handleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location: memory.location,
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let (mut pool, mut fd) = (0, -1i32);
        // SAFETY: the pointers are valid for the calls; for this kind of handle the result is a descriptor.
        unsafe {
            let code = (driver().cuMemPoolCreate)(&raw mut pool, &raw const properties);
            check("cuMemPoolCreate", code)?;
            let out = (&raw mut fd).cast();
            let code = (driver().cuMemPoolExportToShareableHandle)(out, pool, POSIX_FD, 0);
            check("cuMemPoolExportToShareableHandle", code)?;
            drop(OwnedFd::from_raw_fd(fd));
        }
        Ok(Self(pool))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle came from `cuMemPoolCreate` and is destroyed once.
        unsafe { (driver().cuMemPoolDestroy)(self.0) };
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    let steps = run.plan(60, 300, 300);
    let gpu = Gpu::open()?;
    let words = Buffer::zeroed::<u32>(1 << 20)?;
    let mut pool = None;
    run.ready()?;

    for step in 0..steps {
        if step == steps / 3 {
            pool = Some(Pool::exported(&gpu)?);
        } else if step == steps * 2 / 3 {
            pool = None;
        }
        fill_at(words.address(), step, 1 << 10)?;
        let state = if pool.is_some() { "shared" } else { "alone" };
        run.step(step, format_args!("{state} {}", words.read_one::<u32>(7)?))?;
    }
    gpu.synchronize()?;
    run.absorb(&words.read::<u32>()?);
    run.finish()
}
