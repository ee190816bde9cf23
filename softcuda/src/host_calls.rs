//! Functions of the program that streams and user objects call.

/// A function of the program, which it promises may be called with its argument.
#[derive(Clone, Copy)]
pub(crate) struct HostCall {
    /// The function.
    pub(crate) function: unsafe extern "C" fn(u64),
    /// Its argument.
    pub(crate) data: u64,
}
