//! What the runtime asks about contexts by private tables.

use super::slots::called;
use crate::api::arguments::Out;
use crate::api::context::given_or_current;
use crate::lifetime;
use crate::settings::device;

/// The handle of a device's primary context, which need not exist yet: it comes to be when the runtime
/// makes it current.
pub(super) extern "C" fn primary_context(out: Out<u64>, ordinal: i32) -> u32 {
    called("primary_context", || {
        let device = device(ordinal)?;
        out.check()?;
        out.set(lifetime::primary_handle(device))
    })
}

/// The number of a context, as `cuCtxGetId` gives it.
pub(super) extern "C" fn context_number(context: u64, out: Out<u64>) -> u32 {
    called("context_number", || out.set(given_or_current(context)?.handle))
}

/// Tells the driver something that needs no answer.
pub(super) extern "C" fn runtime_notice(_what: u64) {
    let _ = called("runtime_notice", || Ok(()));
}

/// Whether a context is of a kind that the runtime must refuse (one of graphics interoperation, for instance): none
/// is.
pub(super) extern "C" fn context_check(_context: u64, kind: Out<u32>, _more: Out<u64>) -> u32 {
    called("context_check", || kind.set(0))
}

/// Whether the process is in a state that the runtime must refuse: it is not.
pub(super) extern "C" fn process_check() -> u32 {
    let _ = called("process_check", || Ok(()));
    0
}
