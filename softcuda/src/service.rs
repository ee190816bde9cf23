//! The service thread: it listens on the abstract socket `softcuda-<namespace>-<pid>` and carries out
//! the checkpoint calls of other processes. The pid is the one that the process sees itself, the number
//! before it that of its pid namespace. One request per connection, answered in order.
//!
//! A process in CHECKPOINTED state is dumped by CRIU with this thread in `accept`; nothing else of
//! a connection may be left then, so the server closes its side before the caller goes on.

use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use crate::checkpoint::{self, Medium};
use crate::device_memory;
use crate::placement;
use crate::requests::{Request, address};
use crate::settings::settings;
use crate::status::{Code, Outcome, to_c};
use crate::streams::start_thread;

static LISTENER: AtomicI32 = AtomicI32::new(-1);

/// Starts the thread.
///
/// # Errors
/// `OPERATING_SYSTEM` when the name is taken or there is no thread to be had.
pub(crate) fn start() -> Outcome {
    let listener = address("/proc/self")
        .and_then(|address| UnixListener::bind_addr(&address))
        .map_err(|_| Code::OPERATING_SYSTEM)?;
    LISTENER.store(listener.as_raw_fd(), Ordering::SeqCst);
    start_thread("softcuda-service", move || {
        loop {
            match listener.accept() {
                Ok((connection, _)) => serve(connection),
                // Descriptors have run out, or the like: it may get better.
                Err(_) => std::thread::sleep(Duration::from_millis(100)),
            }
        }
    })
}

/// In the child of a fork: the parent alone answers for the name.
pub(crate) fn close_after_fork() {
    let listener = LISTENER.swap(-1, Ordering::SeqCst);
    if listener >= 0 {
        // SAFETY: the thread that owned the descriptor does not exist in the child.
        unsafe { libc::close(listener) };
    }
}

fn serve(mut connection: UnixStream) {
    // A caller that says nothing must not keep the others out.
    let limit = Some(Duration::from_secs(1));
    let mut request = [0; 8];
    if connection.set_read_timeout(limit).is_err() || connection.read_exact(&mut request).is_err() {
        return;
    }
    let kind = u32::from_le_bytes([request[0], request[1], request[2], request[3]]);
    let argument = u32::from_le_bytes([request[4], request[5], request[6], request[7]]);
    if !may_command(&connection) {
        answer(&connection, Err(Code::NOT_PERMITTED), 0);
    } else if kind == Request::Unlock as u32 {
        let unlocked = checkpoint::unlock(|| answer(&connection, Ok(()), 0));
        if unlocked.is_err() {
            answer(&connection, unlocked, 0);
        }
    } else {
        let (outcome, value) = carry_out(kind, argument);
        answer(&connection, outcome, value);
    }
}

/// A caller that has gone away does not get its answer, and that is all.
fn answer(mut connection: &UnixStream, outcome: Outcome, value: u32) {
    let mut message = [0; 8];
    message[..4].copy_from_slice(&to_c(outcome).to_le_bytes());
    message[4..].copy_from_slice(&value.to_le_bytes());
    let _ = connection.write_all(&message);
}

/// Only the same user and root may command this process.
fn may_command(connection: &UnixStream) -> bool {
    let own = rustix::process::geteuid();
    rustix::net::sockopt::socket_peercred(connection)
        .is_ok_and(|peer| peer.uid == own || peer.uid.is_root())
}

fn carry_out(kind: u32, argument: u32) -> (Outcome, u32) {
    const RESTORE_THREAD: u32 = Request::RestoreThread as u32;
    const STATE: u32 = Request::State as u32;
    const LOCK: u32 = Request::Lock as u32;
    const CHECKPOINT: u32 = Request::Checkpoint as u32;
    const RESTORE: u32 = Request::Restore as u32;
    const TO_STORAGE: u32 = Request::CheckpointToStorage as u32;
    const FROM_STORAGE: u32 = Request::RestoreFromStorage as u32;
    const COMPLETE: u32 = Request::Complete as u32;
    const DEVICES: u32 = Request::Devices as u32;
    const SHARED: u32 = Request::SharedMemory as u32;
    const KIND: u32 = Request::Kind as u32;
    match kind {
        RESTORE_THREAD => (Ok(()), rustix::thread::gettid().as_raw_nonzero().get() as u32),
        STATE => (Ok(()), checkpoint::state() as u32),
        LOCK => {
            let limit = Duration::from_millis(argument.into());
            (checkpoint::lock((argument != 0).then_some(limit)), 0)
        }
        CHECKPOINT => (checkpoint::checkpoint(Medium::Host), 0),
        RESTORE => (checkpoint::restore(argument, Medium::Host), 0),
        TO_STORAGE | FROM_STORAGE | COMPLETE if !settings().driver.has_custom_storage() => {
            (Err(Code::NOT_SUPPORTED), 0)
        }
        TO_STORAGE => (checkpoint::checkpoint(Medium::Storage), 0),
        FROM_STORAGE => (checkpoint::restore(argument, Medium::Storage), 0),
        COMPLETE => (checkpoint::complete(), 0),
        DEVICES => (Ok(()), checkpoint::devices()),
        KIND => {
            let ordinal = placement::ordinal_on(argument as usize, settings().devices);
            (Ok(()), ordinal.map_or(0, |ordinal| settings().model(ordinal).kind()))
        }
        SHARED => match device_memory::shared_descriptor(argument) {
            Ok(descriptor) => (Ok(()), descriptor as u32),
            Err(code) => (Err(code), 0),
        },
        _ => (Err(Code::NOT_SUPPORTED), 0),
    }
}
