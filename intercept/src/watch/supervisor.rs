//! The `gpucr run` that watches over this program, if one does: how it is told something.
//!
//! Whoever tells it something is inside the gate meanwhile, so no connection leads out of the program while CRIU looks
//! at it.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use gpucr_wire::Connection;
use gpucr_wire::supervisor::{
    ENV_SUPERVISOR, LONGEST, SupervisorReply, SupervisorRequest, is_supervisor,
};

use crate::abi::types::Code;
use crate::cancel;
use crate::log::log;
use crate::state::gate;

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// Seconds before a broken context is told of again: each call gives the error.
const AGAIN: i64 = 1;

/// How often the program was restored.
static RESTORES: AtomicU32 = AtomicU32::new(0);

/// The program was restored, and is about to go on.
pub(crate) fn restored() {
    RESTORES.fetch_add(1, Ordering::SeqCst);
}

/// How often it was.
pub(crate) fn restores() -> u32 {
    RESTORES.load(Ordering::SeqCst)
}

/// Where it listens; none if nobody watches over the program.
fn name() -> Option<&'static str> {
    static NAME: OnceLock<Option<String>> = OnceLock::new();
    let name =
        NAME.get_or_init(|| std::env::var(ENV_SUPERVISOR).ok().filter(|name| is_supervisor(name)));
    name.as_deref()
}

/// Whether somebody watches over the program.
pub(crate) fn is_there() -> bool {
    name().is_some()
}

/// Tells it that a context is broken.
pub(crate) fn tell_broken(code: Code) {
    static TOLD: AtomicI64 = AtomicI64::new(i64::MIN);
    if !is_there() {
        return;
    }
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic).tv_sec;
    // After a restore the clock may be an earlier one.
    if now.abs_diff(TOLD.swap(now, Ordering::Relaxed)) < AGAIN as u64 {
        return;
    }
    if let Err(error) = ask(&SupervisorRequest::Broken { code }) {
        log!("nobody could be told that a context is broken: {error}");
    }
}

/// Tells it something, for an answer.
///
/// # Errors
/// It does not answer in time, or another user listens in its place.
pub(crate) fn ask(request: &SupervisorRequest) -> io::Result<SupervisorReply> {
    let name = name().ok_or(io::ErrorKind::NotFound)?;
    let _uncancelled = cancel::not_now();
    let _inside = gate::enter();
    let deadline = Instant::now() + PATIENCE;
    let mut connection = Connection::connect(name, Some(deadline), None)?;
    let peer = connection.peer()?.uid;
    if peer != 0 && peer != rustix::process::geteuid().as_raw() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "a stranger listens there"));
    }
    connection.send(request)?;
    connection.receive_at_most(LONGEST)
}
