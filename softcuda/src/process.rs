//! What belongs to the process as a whole: initialisation, and what happens after `fork`.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::device_memory;
use crate::exclusive;
use crate::forked::{self, is_forked};
use crate::multicast;
use crate::service;
use crate::settings::{self, settings};
use crate::shared_events;
use crate::status::{Code, Outcome};
use crate::virtual_memory;

static INITIALISED: AtomicBool = AtomicBool::new(false);

extern "C" fn before_fork() {
    virtual_memory::before_fork();
}

extern "C" fn in_parent() {
    virtual_memory::after_fork();
}

extern "C" fn in_child() {
    // Only the forking thread lives on here, and locks may be held for ever: from now on every
    // call is refused before it takes one.
    forked::set();
    virtual_memory::close_in_child();
    multicast::close_left_in_child();
    device_memory::close_in_child();
    shared_events::close_in_child();
    exclusive::close_in_child();
    service::close_after_fork();
}

/// What `cuInit` does. Calling it again is harmless.
///
/// # Errors
/// `NOT_INITIALIZED` in the child of an initialised process, `INVALID_VALUE` for settings that mean nothing,
/// `NO_DEVICE` without devices,
/// `OPERATING_SYSTEM` when the service thread cannot be started; the process is then not
/// initialised.
pub(crate) fn initialise() -> Outcome {
    static STARTING: Mutex<()> = Mutex::new(());
    if is_forked() {
        return Err(Code::NOT_INITIALIZED);
    }
    let _guard = STARTING.lock();
    if INITIALISED.load(Ordering::SeqCst) {
        return Ok(());
    }
    settings::check()?;
    if settings().devices == 0 {
        return Err(Code::NO_DEVICE);
    }
    service::start()?;
    // SAFETY: in the child, the handlers wait for no lock but the allocator's, which the C library
    // itself keeps usable there, and give none back.
    let handlers =
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    if handlers != 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    INITIALISED.store(true, Ordering::SeqCst);
    Ok(())
}

/// Fails unless `cuInit` has succeeded in this very process.
pub(crate) fn check_initialised() -> Outcome {
    if INITIALISED.load(Ordering::Relaxed) && !is_forked() {
        Ok(())
    } else {
        Err(Code::NOT_INITIALIZED)
    }
}
