//! Pointers that programs pass. They cross the C boundary as these types, which are only ever made
//! by a C caller, so that the promise of the driver API (a pointer that is not null is valid for
//! its type and count for the length of the call) is stated and used in one place.

use std::ffi::{CStr, c_char};

use crate::status::{Code, Outcome};

/// Where a result goes; may be null.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// The place of a result that the caller names in another argument.
    pub(crate) fn at_address(address: u64) -> Out<T> {
        Out(address as *mut T)
    }

    /// The place.
    pub(crate) fn address(&self) -> u64 {
        self.0 as u64
    }

    /// Fails for null. For use before anything is done that would have to be undone.
    ///
    /// # Errors
    /// `INVALID_VALUE`.
    pub(crate) fn check(&self) -> Outcome {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    /// Stores a result.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn set(&self, value: T) -> Outcome {
        self.check()?;
        // SAFETY: not null, so the caller promises that a `T` may be written there.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores a result if the caller wants it.
    pub(crate) fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }

    /// Stores several results one after the other.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null with anything to store.
    pub(crate) fn set_all(&self, values: impl IntoIterator<Item = T>) -> Outcome {
        for (index, value) in values.into_iter().enumerate() {
            self.check()?;
            // SAFETY: not null, so the caller promises room for as many as it asked for.
            unsafe { self.0.add(index).write_unaligned(value) };
        }
        Ok(())
    }
}

impl<T: Copy> Out<T> {
    /// What the caller stored at a place of an array.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn at(&self, index: usize) -> Outcome<T> {
        self.check()?;
        // SAFETY: not null, so the caller promises an array of at least the count that it gave.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Stores at a place of an array.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn set_at(&self, index: usize, value: T) -> Outcome {
        self.check()?;
        // SAFETY: as for `at`.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }

    /// What the caller stored there before the call, for arguments that go both ways.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(&self) -> Outcome<T> {
        self.check()?;
        // SAFETY: not null, so the caller promises an initialised `T`.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

/// Where an argument lies; may be null.
#[repr(transparent)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// An argument that is not given.
    pub(crate) fn null() -> In<T> {
        In(std::ptr::null())
    }

    /// An argument at a place that the caller names in another argument.
    pub(crate) fn at_address(address: u64) -> In<T> {
        In(address as *const T)
    }

    /// The place.
    pub(crate) fn address(&self) -> u64 {
        self.0 as u64
    }

    /// Whether the caller passed null.
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// The argument.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn get(&self) -> Outcome<T> {
        self.at(0)
    }

    /// The argument at a place of an array.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null.
    pub(crate) fn at(&self, index: usize) -> Outcome<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller promises an array of at least the count that it gave.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// A string; may be null.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

impl Text {
    /// The string.
    ///
    /// # Errors
    /// `INVALID_VALUE` for null and for bytes that are no UTF-8.
    pub(crate) fn get(&self) -> Outcome<&str> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller promises a string that ends in NUL.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| Code::INVALID_VALUE)
    }
}

/// An address that programs pass as such: a host pointer to remember, or to copy from or to.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Address(pub(crate) u64);

/// A buffer for text with its size.
pub(crate) fn set_text(to: &Out<u8>, size: usize, text: &[u8]) -> Outcome {
    if size == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let shown = &text[..text.len().min(size - 1)];
    to.set_all(shown.iter().copied().chain([0]))
}

/// Copies `size` bytes that a pointer inside another argument points to.
///
/// # Safety
/// `from` points to at least `size` readable bytes.
pub(crate) unsafe fn read_bytes(from: *const u8, size: usize) -> Vec<u8> {
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(from, size) }.to_vec()
}
