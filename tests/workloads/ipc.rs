//! Memory of other processes, by legacy IPC handles.

use anyhow::{Result, ensure};

use crate::cuda::{check, driver};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY: u32 = 1;

/// Memory of another process.
pub(crate) struct Opened {
    handle: [u64; 8],
    pub(crate) address: u64,
}

impl Opened {
    /// Opens it by its handle.
    pub(crate) fn open(handle: [u64; 8]) -> Result<Self> {
        let mut address = 0;
        // SAFETY: a place for the result, and a handle by value.
        let code = unsafe { (driver().cuIpcOpenMemHandle)(&raw mut address, handle, LAZY) };
        check("cuIpcOpenMemHandle", code)?;
        Ok(Self { handle, address })
    }

    /// Opens it a second time, closes both, and opens it anew.
    pub(crate) fn reopened(self) -> Result<Self> {
        let twice = Self::open(self.handle)?;
        ensure!(twice.address == self.address, "opened twice it is at two places");
        let handle = self.handle;
        drop((twice, self));
        Self::open(handle)
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: the address came from `cuIpcOpenMemHandle`, and is closed once for each time.
        unsafe { (driver().cuIpcCloseMemHandle)(self.address) };
    }
}

/// The handle of an allocation, as text.
pub(crate) fn offer(address: u64) -> Result<String> {
    let mut handle = [0u64; 8];
    // SAFETY: there is room for the 64 bytes of a handle.
    let code = unsafe { (driver().cuIpcGetMemHandle)(handle.as_mut_ptr().cast(), address) };
    check("cuIpcGetMemHandle", code)?;
    Ok(handle.map(|word| format!("{word:016x}")).concat())
}

/// A handle that was text.
pub(crate) fn parsed(text: &str) -> Result<[u64; 8]> {
    ensure!(text.len() == 128, "a handle has 64 bytes");
    let mut handle = [0; 8];
    for (place, word) in handle.iter_mut().zip(text.as_bytes().chunks_exact(16)) {
        *place = u64::from_str_radix(std::str::from_utf8(word)?, 16)?;
    }
    Ok(handle)
}
