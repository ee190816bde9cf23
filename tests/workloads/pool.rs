//! Pools of stream-ordered memory.

use std::ffi::c_void;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use anyhow::{Context as _, Result};
use cudarc::driver::sys::{CUmemAllocationHandleType, CUmemPoolProps};

use crate::cuda::{Handle, check, driver};
use crate::gpu::{Gpu, Stream};
use crate::vmm::{access, properties};

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

    /// A pool that other processes may be given.
    pub(crate) fn shareable(gpu: &Gpu) -> Result<Self> {
        Self::made(gpu, CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    }

    /// By what other processes are given it.
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let mut fd = -1i32;
        let out = (&raw mut fd).cast();
        // SAFETY: there is room for the result, which is a descriptor for this kind of handle.
        let code = unsafe { (driver().cuMemPoolExportToShareableHandle)(out, self.0, POSIX_FD, 0) };
        check("cuMemPoolExportToShareableHandle", code)?;
        // SAFETY: the driver has made it for this program.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// The pool of another process, whose memory this device uses.
    pub(crate) fn import(gpu: &Gpu, ticket: &OwnedFd) -> Result<Self> {
        let (mut pool, fd) = (0, ticket.as_raw_fd() as usize as *mut c_void);
        // SAFETY: a place for the result; for this kind of handle the pointer is the descriptor.
        let code = unsafe {
            (driver().cuMemPoolImportFromShareableHandle)(&raw mut pool, fd, POSIX_FD, 0)
        };
        check("cuMemPoolImportFromShareableHandle", code)?;
        let (pool, access) = (Self(pool), access(gpu.device()));
        // SAFETY: one description, which is readable.
        let code = unsafe { (driver().cuMemPoolSetAccess)(pool.0, &raw const access, 1) };
        check("cuMemPoolSetAccess", code)?;
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

    /// By what a process that has its pool is given it: hexadecimal digits.
    pub(crate) fn export(&self) -> Result<String> {
        let mut data = [0u64; 8];
        // SAFETY: there is room for the 64 bytes.
        let code =
            unsafe { (driver().cuMemPoolExportPointer)(data.as_mut_ptr().cast(), self.address) };
        check("cuMemPoolExportPointer", code)?;
        Ok(data.iter().map(|word| format!("{word:016x}")).collect())
    }

    /// What another process has exported so.
    pub(crate) fn import(pool: &Pool, exported: &str) -> Result<Self> {
        let mut data = [0u64; 8];
        for (at, word) in data.iter_mut().enumerate() {
            let digits = exported.get(16 * at..16 * at + 16).context("digits")?;
            *word = u64::from_str_radix(digits, 16)?;
        }
        let mut address = 0;
        // SAFETY: a place for the result, and 64 bytes that are readable.
        let code = unsafe {
            let data = data.as_mut_ptr().cast();
            (driver().cuMemPoolImportPointer)(&raw mut address, pool.0, data)
        };
        check("cuMemPoolImportPointer", code)?;
        Ok(Self { address })
    }

    /// Frees it after what the stream does until now.
    pub(crate) fn free(self, stream: &Stream) -> Result<()> {
        // SAFETY: plain values, which the driver checks.
        check("cuMemFreeAsync", unsafe { (driver().cuMemFreeAsync)(self.address, stream.0) })
    }
}
