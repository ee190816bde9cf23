//! Events, also those that processes share.

use std::ffi::c_uint;

use anyhow::Result;

use crate::cuda::{EVENT_DISABLE_TIMING, EVENT_INTERPROCESS, Handle, NOT_READY, check, driver};
use crate::gpu::Stream;

/// An event without timing, destroyed on drop.
pub(crate) struct Event(pub(crate) Handle);

impl Event {
    /// A new event; counts as done until it is recorded.
    pub(crate) fn new() -> Result<Self> {
        Self::with_flags(0)
    }

    /// A new event that other processes can open, and its handle, as text.
    pub(crate) fn shared() -> Result<(Self, String)> {
        let event = Self::with_flags(EVENT_INTERPROCESS)?;
        let mut handle = [0u64; 8];
        // SAFETY: there is room for the 64 bytes of a handle.
        let code = unsafe { (driver().cuIpcGetEventHandle)(handle.as_mut_ptr().cast(), event.0) };
        check("cuIpcGetEventHandle", code)?;
        Ok((event, handle.map(|word| format!("{word:016x}")).concat()))
    }

    /// An event of another process.
    pub(crate) fn opened(handle: [u64; 8]) -> Result<Self> {
        let mut event = 0;
        // SAFETY: a place for the result, and a handle by value.
        let code = unsafe { (driver().cuIpcOpenEventHandle)(&raw mut event, handle) };
        check("cuIpcOpenEventHandle", code)?;
        Ok(Self(event))
    }

    fn with_flags(flags: c_uint) -> Result<Self> {
        let (mut handle, flags) = (0, flags | EVENT_DISABLE_TIMING);
        // SAFETY: `handle` is a valid place for the result.
        check("cuEventCreate", unsafe { (driver().cuEventCreate)(&raw mut handle, flags) })?;
        Ok(Self(handle))
    }

    /// Records the event after the stream's work so far.
    pub(crate) fn record(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live as long as the references.
        check("cuEventRecord", unsafe { (driver().cuEventRecord)(self.0, stream.0) })
    }

    /// Lets the stream's later work wait for the event.
    pub(crate) fn hold(&self, stream: &Stream) -> Result<()> {
        // SAFETY: both handles live as long as the references.
        check("cuStreamWaitEvent", unsafe { (driver().cuStreamWaitEvent)(stream.0, self.0, 0) })
    }

    /// Whether the event is passed.
    pub(crate) fn is_done(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { (driver().cuEventQuery)(self.0) } {
            NOT_READY => Ok(false),
            code => check("cuEventQuery", code).map(|()| true),
        }
    }

    /// Waits for the event.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the event lives as long as `self`.
        check("cuEventSynchronize", unsafe { (driver().cuEventSynchronize)(self.0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the handle came from `cuEventCreate` and is destroyed once.
        unsafe { (driver().cuEventDestroy)(self.0) };
    }
}
