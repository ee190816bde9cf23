//! Streams.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::arguments::Out;
use super::driver_api;
use crate::address_space;
use crate::capture;
use crate::context::{self, DefaultStream, STREAMS, stream_and_context};
use crate::events::EVENTS;
use crate::graphs::Work;
use crate::operations::{HostCall, Operation};
use crate::pools;
use crate::status::{Code, Outcome};
use crate::streams::NON_BLOCKING;

pub(super) type HostFunction = Option<unsafe extern "C" fn(u64)>;
/// `CU_EVENT_WAIT_EXTERNAL`.
const EXTERNAL: u32 = 1;

type Callback = Option<unsafe extern "C" fn(u64, u32, u64)>;

fn create(out: &Out<u64>, flags: u32, priority: i32) -> Outcome {
    out.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = context::current()?;
    out.set(context.create_stream(flags, priority.clamp(-5, 0)).handle)
}

fn destroy(handle: u64) -> Outcome {
    let stream = STREAMS.get(handle).ok_or(Code::INVALID_HANDLE)?;
    let context = context::by_handle(stream.context)?;
    context.destroy_stream(&stream);
    Ok(())
}

/// The comparisons of `cuStreamWaitValue`; the top flag asks for a flush, which is nothing here.
fn compare(flags: u32, seen: u64, wanted: u64, bits: u32) -> Outcome<bool> {
    Ok(match flags & !(1 << 30) {
        // "Greater or equal" is cyclic: the difference is looked at as a signed number.
        0 => ((seen.wrapping_sub(wanted) << (64 - bits)) as i64) >= 0,
        1 => seen == wanted,
        2 => seen & wanted != 0,
        3 => (!(seen | wanted)) << (64 - bits) != 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn check_value(address: u64, size: u64) -> Outcome {
    if address.is_multiple_of(size) && address_space::is_accessible(address, size) {
        Ok(())
    } else {
        Err(Code::INVALID_VALUE)
    }
}

fn load(address: u64, bits: u32) -> u64 {
    // SAFETY: aligned and accessible when the operation was submitted, and memory is not taken
    // away before the operation is over, since freeing and unmapping wait for it.
    unsafe {
        if bits == 32 {
            AtomicU32::from_ptr(address as *mut u32).load(Ordering::SeqCst).into()
        } else {
            AtomicU64::from_ptr(address as *mut u64).load(Ordering::SeqCst)
        }
    }
}

fn store(address: u64, value: u64, bits: u32) {
    // SAFETY: as for `load`.
    unsafe {
        if bits == 32 {
            AtomicU32::from_ptr(address as *mut u32).store(value as u32, Ordering::SeqCst);
        } else {
            AtomicU64::from_ptr(address as *mut u64).store(value, Ordering::SeqCst);
        }
    }
}

fn wait_value(
    mode: DefaultStream,
    stream: u64,
    address: u64,
    value: u64,
    flags: u32,
    bits: u32,
) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    check_value(address, u64::from(bits / 8))?;
    compare(flags, 0, value, bits)?;
    let owner = context.clone();
    context.submit(&stream, Vec::new(), move || {
        let mut pause = Duration::from_micros(5);
        let reached = || compare(flags, load(address, bits), value, bits).unwrap_or(true);
        while !reached() && !owner.has_failed() {
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    })?;
    Ok(())
}

fn write_value(
    mode: DefaultStream,
    stream: u64,
    address: u64,
    value: u64,
    flags: u32,
    bits: u32,
) -> Outcome {
    let (stream, context) = stream_and_context(stream, mode)?;
    check_value(address, u64::from(bits / 8))?;
    // The only flag leaves out a memory barrier.
    if flags & !1 != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let owner = context.clone();
    context.submit(&stream, Vec::new(), move || {
        if !owner.has_failed() {
            store(address, value, bits);
        }
    })?;
    Ok(())
}

driver_api! {
    call fn cuStreamCreate(out: Out<u64>, flags: u32) {
        create(&out, flags, 0)
    }

    call fn cuStreamCreateWithPriority(out: Out<u64>, flags: u32, priority: i32) {
        create(&out, flags, priority)
    }

    call fn cuStreamDestroy(handle: u64) {
        destroy(handle)
    }

    call fn cuStreamDestroy_v2(handle: u64) {
        destroy(handle)
    }

    stream(mode) fn cuStreamSynchronize, cuStreamSynchronize_ptsz(handle: u64) {
        let (stream, context) = stream_and_context(handle, mode)?;
        capture::refuse(&context, &stream)?;
        // The legacy stream stands for all streams that synchronise with it.
        context.submit_marker(&stream)?.wait();
        pools::tidy(None);
        context.check()
    }

    stream(mode) fn cuStreamQuery, cuStreamQuery_ptsz(handle: u64) {
        let (stream, context) = stream_and_context(handle, mode)?;
        capture::refuse(&context, &stream)?;
        if context.is_idle(&stream) { Ok(()) } else { Err(Code::NOT_READY) }
    }

    stream(mode) fn cuStreamWaitEvent, cuStreamWaitEvent_ptsz(
        handle: u64, event: u64, flags: u32,
    ) {
        if flags & !EXTERNAL != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let (stream, context) = stream_and_context(handle, mode)?;
        let number = event;
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        if flags == EXTERNAL {
            let captured = capture::record(&stream, Work::Wait(number, event))?;
            return if captured { Ok(()) } else { Err(Code::INVALID_VALUE) };
        }
        if let Some(mark) = event.mark() {
            return capture::join(&context, &stream, &mark);
        }
        capture::refuse_outside_event(&stream)?;
        // An event that was never recorded is nothing to wait for.
        if let Some(position) = event.position().filter(|position| !position.is_reached()) {
            context.submit(&stream, vec![position], || ())?;
        }
        Ok(())
    }

    stream(mode) fn cuStreamGetFlags, cuStreamGetFlags_ptsz(handle: u64, out: Out<u32>) {
        out.set(stream_and_context(handle, mode)?.0.flags)
    }

    stream(mode) fn cuStreamGetPriority, cuStreamGetPriority_ptsz(handle: u64, out: Out<i32>) {
        out.set(stream_and_context(handle, mode)?.0.priority)
    }

    stream(mode) fn cuStreamGetId, cuStreamGetId_ptsz(handle: u64, out: Out<u64>) {
        out.set(stream_and_context(handle, mode)?.0.handle)
    }

    stream(mode) fn cuStreamGetCtx, cuStreamGetCtx_ptsz(handle: u64, out: Out<u64>) {
        out.set(stream_and_context(handle, mode)?.1.handle)
    }

    stream(mode) fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(
        handle: u64, out: Out<u64>, green: Out<u64>,
    ) {
        green.set_if_wanted(0);
        out.set(stream_and_context(handle, mode)?.1.handle)
    }

    stream(mode) fn cuStreamGetDevice, cuStreamGetDevice_ptsz(handle: u64, out: Out<i32>) {
        out.set(stream_and_context(handle, mode)?.1.device as i32)
    }

    stream(mode) fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz(
        handle: u64, function: HostFunction, data: u64,
    ) {
        let function = function.ok_or(Code::INVALID_VALUE)?;
        let (stream, context) = stream_and_context(handle, mode)?;
        context.enqueue(&stream, Operation::Host(HostCall { function, data })).map(|_| ())
    }

    stream(mode) fn cuStreamAddCallback, cuStreamAddCallback_ptsz(
        handle: u64, function: Callback, data: u64, flags: u32,
    ) {
        let function = function.filter(|_| flags == 0).ok_or(Code::INVALID_VALUE)?;
        let (stream, context) = stream_and_context(handle, mode)?;
        let owner = context.clone();
        context.submit(&stream, Vec::new(), move || {
            let status = owner.check().err().map_or(0, |code| code.0);
            // SAFETY: the caller promises a function that may be called with its data.
            unsafe { function(handle, status, data) };
        })?;
        Ok(())
    }

    stream(mode) fn cuStreamWaitValue32_v2, cuStreamWaitValue32_v2_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        wait_value(mode, stream, address, value.into(), flags, 32)
    }

    stream(mode) fn cuStreamWaitValue64_v2, cuStreamWaitValue64_v2_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        wait_value(mode, stream, address, value, flags, 64)
    }

    stream(mode) fn cuStreamWriteValue32_v2, cuStreamWriteValue32_v2_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        write_value(mode, stream, address, value.into(), flags, 32)
    }

    stream(mode) fn cuStreamWriteValue64_v2, cuStreamWriteValue64_v2_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        write_value(mode, stream, address, value, flags, 64)
    }

    stream(mode) fn cuStreamWaitValue32, cuStreamWaitValue32_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        wait_value(mode, stream, address, value.into(), flags, 32)
    }

    stream(mode) fn cuStreamWaitValue64, cuStreamWaitValue64_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        wait_value(mode, stream, address, value, flags, 64)
    }

    stream(mode) fn cuStreamWriteValue32, cuStreamWriteValue32_ptsz(
        stream: u64, address: u64, value: u32, flags: u32,
    ) {
        write_value(mode, stream, address, value.into(), flags, 32)
    }

    stream(mode) fn cuStreamWriteValue64, cuStreamWriteValue64_ptsz(
        stream: u64, address: u64, value: u64, flags: u32,
    ) {
        write_value(mode, stream, address, value, flags, 64)
    }
}

#[cfg(test)]
mod tests {
    use super::compare;

    #[test]
    fn comparisons() {
        assert_eq!(compare(0, 5, 5, 32), Ok(true));
        assert_eq!(compare(0, 4, 5, 32), Ok(false));
        assert_eq!(compare(0, 1, u32::MAX.into(), 32), Ok(true));
        assert_eq!(compare(1, 4, 5, 64), Ok(false));
        assert_eq!(compare(2, 6, 4, 64), Ok(true));
        assert_eq!(compare(3, u32::MAX.into(), 0, 32), Ok(false));
        assert_eq!(compare(3, 0, 1, 32), Ok(true));
        assert!(compare(4, 0, 0, 32).is_err());
    }
}
