//! Pools of stream-ordered memory.

use std::os::fd::{FromRawFd as _, OwnedFd};

use anyhow::Result;
use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemPoolProps};

use crate::cuda::{Handle, check, driver};
use crate::gpu::{Gpu, Stream};
use crate::vmm::properties;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_FD: u32 = 1;
/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
const THRESHOLD: u32 = 4;

/// A pool, destroyed on drop.
pub(crate) struct Pool(Handle);

impl Pool {
    /// A pool of plain memory that keeps `threshold` bytes when the program synchronises.
    pub(crate) fn new(gpu: &Gpu, mut threshold: u64) -> Result<Self> {
        let pool = Self::made(gpu, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE)?;
        let value = (&raw mut threshold).cast();
        // SAFETY: the pool lives, and the value is readable.
        let code = unsafe { (driver().cuMemPoolSetAttribute)(pool.0, THRESHOLD, value) };
        check("cuMemPoolSetAttribute", code)?;
        Ok(pool)
    }

    /// A pool that was exported, so that other processes could have it.
    pub(crate) fn exported(gpu: &Gpu) -> Result<Self> {
        let kind = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let (pool, mut fd) = (Self::made(gpu, kind)?, -1i32);
        let out = (&raw mut fd).cast();
        // SAFETY: there is room for the result, which is a descriptor for this kind of handle.
        let code = unsafe { (driver().cuMemPoolExportToShareableHandle)(out, pool.0, POSIX_FD, 0) };
        check("cuMemPoolExportToShareableHandle", code)?;
        // SAFETY: the driver has made it for this program.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(pool)
    }

    fn made(gpu: &Gpu, handle_types: CUmemAllocationHandleType) -> Result<Self> {
        let memory = properties(gpu.device(), true);
        let properties = CUmemPoolProps {
            allocType: memory.type_,
            handleTypes: handle_types,
            location: memory.location,
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = 0;
        // SAFETY: both pointers are valid for the call.
        let code = unsafe { (driver().cuMemPoolCreate)(&raw mut pool, &raw const properties) };
        check("cuMemPoolCreate", code)?;
        Ok(Self(pool))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: the handle came from `cuMemPoolCreate` and is destroyed once.
        unsafe { (driver().cuMemPoolDestroy)(self.0) };
    }
}

/// Memory in the order of streams. It is not freed by itself.
#[derive(Clone, Copy)]
pub(crate) struct Piece {
    /// Where it begins.
    pub(crate) address: u64,
}

impl Piece {
    /// Memory of a pool, or of the device's own one, for what the stream does from now on.
    pub(crate) fn new(bytes: usize, pool: Option<&Pool>, stream: &Stream) -> Result<Self> {
        let mut address = 0;
        let out = &raw mut address;
        // SAFETY: there is room for the result, and the handles live.
        let code = unsafe {
            match pool {
                Some(pool) => (driver().cuMemAllocFromPoolAsync)(out, bytes, pool.0, stream.0),
                None => (driver().cuMemAllocAsync)(out, bytes, stream.0),
            }
        };
        check("cuMemAllocAsync", code)?;
        Ok(Self { address })
    }

    /// Frees it after what the stream does until now.
    pub(crate) fn free(self, stream: &Stream) -> Result<()> {
        // SAFETY: plain values, which the driver checks.
        check("cuMemFreeAsync", unsafe { (driver().cuMemFreeAsync)(self.address, stream.0) })
    }
}
