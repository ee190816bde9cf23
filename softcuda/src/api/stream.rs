//! Streams.

use super::arguments::Out;
use super::driver_api;
use crate::capture;
use crate::context::{self, STREAMS};
use crate::events::EVENTS;
use crate::graphs::Work;
use crate::host_calls::HostCall;
use crate::operations::Operation;
use crate::pools;
use crate::settings::settings;
use crate::status::{Code, Outcome};
use crate::streams::NON_BLOCKING;
use crate::submission::stream_and_context;

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
    out.set(context.create_stream(flags, priority).handle)
}

fn destroy(handle: u64) -> Outcome {
    let stream = STREAMS.get(handle).ok_or(Code::INVALID_HANDLE)?;
    let context = context::by_handle(stream.context)?;
    context.destroy_stream(&stream);
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
        context.prints.flush();
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
        out.set(stream_and_context(handle, mode)?.0.attributes.lock().priority())
    }

    stream(mode) fn cuStreamGetId, cuStreamGetId_ptsz(handle: u64, out: Out<u64>) {
        out.set(stream_and_context(handle, mode)?.0.handle)
    }

    stream(mode) fn cuStreamGetCtx, cuStreamGetCtx_ptsz(handle: u64, out: Out<u64>) {
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

    stream(mode) fn cuLaunchHostFunc_v2, cuLaunchHostFunc_v2_ptsz(
        handle: u64, function: HostFunction, data: u64, _how_to_wait: u32,
    ) {
        settings().driver.since(13_010)?;
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
}
