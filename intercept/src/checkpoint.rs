//! A program that asks to be saved. `libgpucr.so` has the functions for programs, and calls this one.
//!
//! The `gpucr run` that watches over the program is asked, and makes the dump as any other. The thread that asks waits
//! meanwhile, and so is in the image: it asks from time to time what has become of it, inside the gate, and goes on when
//! it gets an answer, or when it learns that it was restored.

use std::ffi::{CStr, c_char, c_int};
use std::panic::catch_unwind;
use std::thread;
use std::time::Duration;

use gpucr_wire::supervisor::{SupervisorReply, SupervisorRequest, code};

use crate::log::log;
use crate::state::gate;
use crate::watch::supervisor::{ask, is_there, restores};
use crate::{agent, cancel};

/// The pauses before it is asked again what has become of it: from the first each is longer, up to the last.
const FIRST: Duration = Duration::from_millis(5);
const LAST: Duration = Duration::from_millis(100);
/// Bytes of the longest name that is passed on, and more than there are in the longest good one.
const LONGEST_NAME: usize = 255;

/// Saves the program, and gives one of [`code`]'s numbers. `why` gets the reason of a failure, cut to `room` bytes with
/// its end.
///
/// # Safety
/// `name` is null or a string that ends with a zero; `why` has room for so many bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn gpucr_intercept_checkpoint(
    name: *const c_char,
    why: *mut c_char,
    room: usize,
) -> c_int {
    let _uncancelled = cancel::not_now();
    let outcome = catch_unwind(|| {
        if name.is_null() {
            return checkpoint("");
        }
        // SAFETY: the caller's duty.
        let name = unsafe { CStr::from_ptr(name) };
        checkpoint(name.to_str().map_err(|_| no_name("is no UTF-8"))?)
    });
    // SAFETY: the caller's duty.
    unsafe { tell(outcome, why, room) }
}

/// Whether a program could be saved by a call from this thread now: 0, or the number with which that would fail.
///
/// # Safety
/// `why` has room for so many bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn gpucr_intercept_can_checkpoint(why: *mut c_char, room: usize) -> c_int {
    let _uncancelled = cancel::not_now();
    let outcome = catch_unwind(|| check().map(|()| code::SAVED));
    // SAFETY: the caller's duty.
    unsafe { tell(outcome, why, room) }
}

/// Writes the reason of a failure, and gives the number.
///
/// # Safety
/// `why` has room for so many bytes.
unsafe fn tell(
    outcome: thread::Result<Result<c_int, Failed>>,
    why: *mut c_char,
    room: usize,
) -> c_int {
    let (number, reason) = match outcome {
        Ok(Ok(number)) => (number, String::new()),
        Ok(Err(failed)) => failed,
        Err(_) => (code::NOT_SAVED, "a mistake of gpucr's".to_owned()),
    };
    log!("checkpoint: {number} {reason}");
    if room > 0 {
        let length = reason.len().min(room - 1);
        // SAFETY: there is room for these and for the end.
        unsafe {
            std::ptr::copy_nonoverlapping(reason.as_ptr(), why.cast(), length);
            why.add(length).write(0);
        }
    }
    number
}

/// A number below 0, and the reason.
type Failed = (c_int, String);

fn no_name(why: &str) -> Failed {
    (code::BAD_NAME, format!("the name {why}"))
}

/// # Errors
/// Nobody watches over the program, or it cannot be saved while this thread waits.
fn check() -> Result<(), Failed> {
    let failed = |number, why: &str| Err((number, why.to_owned()));
    if !is_there() {
        return failed(code::NOT_WATCHED, "the program was not started by `gpucr run --store DIR`");
    }
    if !agent::is_there() {
        return failed(code::NO_CUDA, "this process has not called cuInit yet");
    }
    // The gate is not closed before the capture has ended, and this thread would not end it.
    if gate::is_capturing_here() {
        return failed(code::CAPTURING, "this thread has a stream capture under way");
    }
    Ok(())
}

fn checkpoint(name: &str) -> Result<c_int, Failed> {
    if name.len() > LONGEST_NAME {
        return Err(no_name("is too long"));
    }
    check()?;
    let before = restores();
    let mut request = SupervisorRequest::Save { name: name.to_owned() };
    let mut pause = FIRST;
    loop {
        let answer = ask(&request);
        // Whatever was answered, and by whom: this is another life.
        if restores() != before {
            return Ok(code::RESTORED);
        }
        match answer {
            Ok(SupervisorReply::Accepted { ticket }) => request = SupervisorRequest::Ask { ticket },
            Ok(SupervisorReply::Pending {}) => {}
            Ok(SupervisorReply::Saved {}) => return Ok(code::SAVED),
            Ok(SupervisorReply::Refused { code, why }) => return Err((code.min(-1), why)),
            Ok(SupervisorReply::Noted {}) => {
                return Err((code::NOT_WATCHED, "`gpucr run` does not understand it".to_owned()));
            }
            Err(error) => {
                return Err((code::NOT_WATCHED, format!("`gpucr run` does not answer: {error}")));
            }
        }
        thread::sleep(pause);
        pause = (pause * 2).min(LAST);
        if restores() != before {
            return Ok(code::RESTORED);
        }
    }
}
