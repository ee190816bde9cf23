//! What the runtime keeps for each context.

use super::slots::called;
use crate::api::arguments::Out;
use crate::context;
use crate::local_storage::{self, Destructor};
use crate::status::{Code, Outcome};

/// The handle of the context that is meant; the current one for 0.
fn meant(handle: u64) -> Outcome<u64> {
    match handle {
        0 => Ok(context::top().ok_or(Code::INVALID_CONTEXT)?.handle),
        handle => Ok(context::by_handle(handle)?.handle),
    }
}

/// Keeps a value under a key, with what to call when the context ends.
pub(super) extern "C" fn local_put(
    handle: u64,
    key: u64,
    value: u64,
    destructor: Option<Destructor>,
) -> u32 {
    called("local_put", || {
        local_storage::put(meant(handle)?, key, value, destructor);
        Ok(())
    })
}

/// Forgets what is kept under a key.
pub(super) extern "C" fn local_delete(handle: u64, key: u64) -> u32 {
    called("local_delete", || local_storage::delete(meant(handle)?, key))
}

/// The value under a key.
pub(super) extern "C" fn local_get(value: Out<u64>, handle: u64, key: u64) -> u32 {
    called("local_get", || {
        value.check()?;
        value.set(local_storage::get(meant(handle)?, key)?)
    })
}
