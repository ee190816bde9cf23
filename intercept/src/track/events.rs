//! Events that processes share by legacy IPC handles. As long as a program makes none this is little more than the
//! jumps to the driver.
//!
//! The driver's own event is one that no other process could open. It stands for what this process has recorded last;
//! what another one has is in [shared memory](crate::state::events).

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use gpucr_wire::peers::{PeerReply, PeerRequest};

use super::offered::{For, Offered};
use super::owners::{ask_owner, tell_owner};
use super::support::{hold_for, put};
use crate::abi::real;
use crate::abi::types::{
    Code, ERROR_INVALID_CONTEXT, ERROR_INVALID_HANDLE, ERROR_INVALID_VALUE, ERROR_MAP_FAILED,
    ERROR_NOT_READY, ERROR_OPERATING_SYSTEM, ERROR_UNKNOWN, IpcHandle, STREAM_PER_THREAD, SUCCESS,
};
use crate::state::memory::Origin;
use crate::state::{events, gate, peers};
use crate::usage::{self, Kind, Thing, ending};
use crate::watch::faults;

/// `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`, which go together.
const SHARED: u32 = 2 | 4;
const DISABLE_TIMING: u32 = 2;
/// For how long a wait looks all the time, and how often after that.
const AT_ONCE: Duration = Duration::from_micros(50);
const PAUSE: Duration = Duration::from_micros(100);
/// How often it asks the driver whether the context is broken.
const ASK: Duration = Duration::from_millis(2);

/// Runs what one of these functions does. A mistake of ours that panics becomes an error of the call.
fn carefully(body: impl FnOnce() -> Code) -> Code {
    let _uncancelled = crate::cancel::not_now();
    let code = catch_unwind(AssertUnwindSafe(body)).unwrap_or(ERROR_UNKNOWN);
    let is_bad = code != SUCCESS && code != ERROR_NOT_READY;
    if is_bad && faults::is_wanted() { faults::look(code) } else { code }
}

/// The stream that the functions without suffix know by this name.
fn plain(stream: usize, per_thread: bool) -> u64 {
    if per_thread && stream == 0 { STREAM_PER_THREAD } else { stream as u64 }
}

/// Whether what is done in a stream becomes part of a capture, or is refused for one.
fn is_captured(stream: u64) -> bool {
    let mut status = 0;
    // SAFETY: writes one value.
    let code = unsafe { real::cuStreamIsCapturing(stream, &mut status) };
    code != SUCCESS || status != 0
}

/// What is done in a stream waits for launches there that can be interrupted.
fn queued(stream: u64) -> Option<gate::Inside> {
    gate::is_interruptible().then(|| {
        let inside = gate::enter();
        hold_for(Some(stream));
        inside
    })
}

fn record(event: usize, stream: u64, pass: impl FnOnce() -> Code) -> Code {
    let _queued = queued(stream);
    let Some(event) = events::find(event as u64) else { return pass() };
    let _inside = gate::enter();
    let code = pass();
    if code != SUCCESS {
        return code;
    }
    event.record(stream, is_captured(stream)).err().unwrap_or(SUCCESS)
}

fn wait(stream: u64, event: usize, flags: usize, pass: impl FnOnce() -> Code) -> Code {
    let _queued = queued(stream);
    let Some(event) = events::find(event as u64) else { return pass() };
    let _inside = gate::enter();
    match event.foreign_record() {
        // The driver knows no other flags than 0 and 1.
        Some(record) if flags as u32 <= 1 && !is_captured(stream) => {
            event.wait(stream, record).err().unwrap_or(SUCCESS)
        }
        _ => pass(),
    }
}

fn query(event: usize, pass: impl FnOnce() -> Code) -> Code {
    let record = events::find(event as u64);
    let record = record.and_then(|event| Some((event.foreign_record()?, event)));
    let Some((record, event)) = record else { return pass() };
    match pass() {
        // What this process has recorded before does not matter any more.
        SUCCESS | ERROR_NOT_READY if event.is_passed(record) => SUCCESS,
        SUCCESS | ERROR_NOT_READY => ERROR_NOT_READY,
        code => code,
    }
}

fn synchronize(handle: usize, pass: impl FnOnce() -> Code) -> Code {
    let record = events::find(handle as u64);
    let record = record.and_then(|event| Some((event.foreign_record()?, event)));
    let Some((record, event)) = record else { return pass() };
    let (since, mut asked) = (Instant::now(), Instant::now());
    while !event.is_passed(record) {
        if since.elapsed() < AT_ONCE {
            std::hint::spin_loop();
            continue;
        }
        std::thread::sleep(PAUSE);
        if asked.elapsed() >= ASK {
            asked = Instant::now();
            // SAFETY: the program's own event.
            let code = unsafe { real::cuEventQuery(handle as u64) };
            if code != SUCCESS && code != ERROR_NOT_READY {
                return code;
            }
        }
    }
    // SAFETY: the program's own event.
    match unsafe { real::cuEventQuery(handle as u64) } {
        SUCCESS | ERROR_NOT_READY => SUCCESS,
        code => code,
    }
}

fn destroy(event: usize, pass: impl FnOnce() -> Code) -> Code {
    let code = ending(&[Kind::Unsupported(Thing::Event)], event as u64, pass);
    if code == SUCCESS
        && let Some(origin) = events::destroyed(event as u64)
    {
        tell_owner(origin);
    }
    code
}

/// Functions of events, which only count once there is one that processes share.
macro_rules! event_functions {
    ($(fn $name:ident($($argument:ident),*) = $serve:ident($($given:expr),*) if $condition:expr;)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub(crate) unsafe extern "C" fn $name($($argument: usize),*) -> Code {
            if !$condition {
                return pass_on!($name($($argument),*));
            }
            carefully(|| $serve($($given,)* || pass_on!($name($($argument),*))))
        }
    )*};
}

event_functions! {
    fn cuEventRecord(event, stream) = record(event, plain(stream, false)) if events::any() || gate::is_interruptible();
    fn cuEventRecord_ptsz(event, stream) = record(event, plain(stream, true)) if events::any() || gate::is_interruptible();
    fn cuEventRecordWithFlags(event, stream, flags) =
        record(event, plain(stream, false)) if events::any() || gate::is_interruptible();
    fn cuEventRecordWithFlags_ptsz(event, stream, flags) =
        record(event, plain(stream, true)) if events::any() || gate::is_interruptible();
    fn cuStreamWaitEvent(stream, event, flags) =
        wait(plain(stream, false), event, flags) if events::any() || gate::is_interruptible();
    fn cuStreamWaitEvent_ptsz(stream, event, flags) =
        wait(plain(stream, true), event, flags) if events::any() || gate::is_interruptible();
    fn cuEventQuery(event) = query(event) if events::any();
    fn cuEventSynchronize(event) = synchronize(event) if events::any();
    fn cuEventDestroy(event) = destroy(event) if events::any() || usage::has_had_events();
    fn cuEventDestroy_v2(event) = destroy(event) if events::any() || usage::has_had_events();
}

/// Makes an event that others may be given.
fn create(out: *mut u64) -> Result<u64, Code> {
    let mut event = 0;
    // SAFETY: writes one value.
    real::check(unsafe { real::cuEventCreate(&mut event, DISABLE_TIMING) })?;
    let context = real::current_context().map_or(0, |(context, _)| context);
    let made = if out.is_null() { Err(ERROR_INVALID_VALUE) } else { events::made(event, context) };
    made.map(|()| event).inspect_err(|_| {
        // SAFETY: made just now, and nobody has it.
        unsafe { real::cuEventDestroy_v2(event) };
    })
}

/// The handle of an event of this process.
fn offer(event: &events::Event) -> Result<IpcHandle, Code> {
    let name = events::offer(event).ok_or(ERROR_INVALID_HANDLE)?;
    let own = Offered::own(name, 0).map_err(|_| ERROR_OPERATING_SYSTEM)?;
    Ok(IpcHandle(own.to_bytes(For::Event)))
}

/// Opens an event of another process under the shim.
fn open(offered: &Offered) -> Result<u64, Code> {
    let (context, _) = real::current_context()?;
    let Offered { owner, pid, namespace, name, .. } = *offered;
    let own = peers::identity().ok_or(ERROR_OPERATING_SYSTEM)?;
    if owner == own {
        return Err(ERROR_INVALID_CONTEXT);
    }
    let request = PeerRequest::Event { owner, event: name, opener: own };
    let Some((PeerReply::Event { arena, cell, base }, fd)) = ask_owner(offered, &request) else {
        return Err(ERROR_MAP_FAILED);
    };
    let origin = Origin { owner, pid, namespace, block: events::peer_name(name) };
    let mut event = 0;
    // SAFETY: writes one value.
    let made = real::check(unsafe { real::cuEventCreate(&mut event, DISABLE_TIMING) });
    let handed = events::Handed { arena, cell, base, fd };
    let opened = made.and_then(|()| {
        events::opened(event, context, origin, &handed).inspect_err(|_| {
            // SAFETY: made just now, and nobody has it.
            unsafe { real::cuEventDestroy_v2(event) };
        })
    });
    opened.map(|()| event).inspect_err(|_| tell_owner(origin))
}

exported! {
    fn cuEventCreate(out: *mut u64, flags: u32) {
        // Others without timing cannot be shared, which the driver says itself.
        if flags & SHARED != SHARED {
            return call!(cuEventCreate(out, flags));
        }
        if flags & !(SHARED | 1) != 0 || out.is_null() {
            return call!(cuEventCreate(out, flags));
        }
        let _inside = gate::enter();
        put(out, create(out))
    }
    fn cuIpcGetEventHandle(out: *mut c_void, event: u64) {
        let _inside = gate::enter();
        if let Some(event) = events::find(event) {
            if out.is_null() {
                return ERROR_INVALID_VALUE;
            }
            return put(out.cast(), offer(&event));
        }
        let code = call!(cuIpcGetEventHandle(out, event));
        if code == SUCCESS {
            let context = real::current_context().map_or(0, |(context, _)| context);
            usage::began(Thing::Event, event, "cuIpcGetEventHandle", context);
        }
        code
    }
    fn cuIpcOpenEventHandle(out: *mut u64, handle: IpcHandle) {
        let _inside = gate::enter();
        if let Some(offered) = Offered::of(&handle.0, For::Event) {
            return if out.is_null() { ERROR_INVALID_VALUE } else { put(out, open(&offered)) };
        }
        let code = call!(cuIpcOpenEventHandle(out, handle));
        if code == SUCCESS {
            let context = real::current_context().map_or(0, |(context, _)| context);
            let event = super::support::written(out);
            usage::began(Thing::Event, event, "cuIpcOpenEventHandle", context);
        }
        code
    }
}
