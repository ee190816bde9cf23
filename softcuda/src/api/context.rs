//! Contexts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::arguments::{In, Out};
use super::driver_api;
use crate::capture;
use crate::context::{self, Context};
use crate::events::EVENTS;
use crate::green_contexts;
use crate::lifetime;
use crate::pools;
use crate::settings::{device, settings};
use crate::status::{Code, Outcome};
use crate::submission::DefaultStream;

/// Flags that `cuCtxCreate` takes: scheduling, host mapping, local memory, core dumps, memory
/// operations.
const KNOWN_FLAGS: u32 = 0x1ff;
/// `CU_LIMIT_STACK_SIZE`.
const STACK_SIZE: u32 = 0;
/// `CU_LIMIT_MALLOC_HEAP_SIZE`.
const HEAP_SIZE: u32 = 2;
/// `CU_EXEC_AFFINITY_TYPE_SM_COUNT`.
const SM_COUNT: u32 = 0;
/// The smallest stack that a device gives a thread, in bytes, whatever smaller value was set.
const SMALLEST_STACK: u64 = 16;

fn create(out: &Out<u64>, flags: u32, ordinal: i32) -> Outcome {
    let device = device(ordinal)?;
    out.check()?;
    if flags & !KNOWN_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let context = lifetime::create(device, flags)?;
    context::push(context.clone());
    out.set(context.handle)
}

/// The context of a handle; the current one for 0.
pub(super) fn given_or_current(handle: u64) -> Outcome<Arc<Context>> {
    if handle == 0 { context::current() } else { context::by_handle(handle) }
}

fn destroy(handle: u64) -> Outcome {
    let context = context::by_handle(handle)?;
    if context.is_primary || green_contexts::of_context(handle).is_some() {
        return Err(Code::INVALID_CONTEXT);
    }
    lifetime::destroy(&context);
    Ok(())
}

fn synchronize(context: &Context) -> Outcome {
    capture::refuse_in_context(context.handle)?;
    context.wait_all();
    context.prints.flush();
    pools::tidy(None);
    context.check()
}

driver_api! {
    call fn cuCtxCreate(out: Out<u64>, flags: u32, ordinal: i32) {
        create(&out, flags, ordinal)
    }

    call fn cuCtxCreate_v2(out: Out<u64>, flags: u32, ordinal: i32) {
        create(&out, flags, ordinal)
    }

    call fn cuCtxCreate_v3(
        out: Out<u64>, affinity: In<u64>, count: i32, flags: u32, ordinal: i32,
    ) {
        if !affinity.is_null() || count != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        create(&out, flags, ordinal)
    }

    call fn cuCtxCreate_v4(out: Out<u64>, params: In<[u64; 3]>, flags: u32, ordinal: i32) {
        // Pointer to affinities, their number (an int), pointer to graphics sharing.
        if !params.is_null() {
            let [_, count, graphics] = params.get()?;
            if count as u32 != 0 || graphics != 0 {
                return Err(Code::NOT_SUPPORTED);
            }
        }
        create(&out, flags, ordinal)
    }

    call fn cuCtxDestroy(handle: u64) {
        destroy(handle)
    }

    call fn cuCtxDestroy_v2(handle: u64) {
        destroy(handle)
    }

    call fn cuCtxPushCurrent(handle: u64) {
        context::push(lifetime::to_be_current(handle)?);
        Ok(())
    }

    call fn cuCtxPushCurrent_v2(handle: u64) {
        context::push(lifetime::to_be_current(handle)?);
        Ok(())
    }

    call fn cuCtxPopCurrent(out: Out<u64>) {
        let context = context::pop()?;
        out.set_if_wanted(context.handle);
        Ok(())
    }

    call fn cuCtxPopCurrent_v2(out: Out<u64>) {
        let context = context::pop()?;
        out.set_if_wanted(context.handle);
        Ok(())
    }

    call fn cuCtxSetCurrent(handle: u64) {
        context::set_current(match handle {
            0 => None,
            handle => Some(lifetime::to_be_current(handle)?),
        });
        Ok(())
    }

    call fn cuCtxGetCurrent(out: Out<u64>) {
        out.set(context::top().map_or(0, |context| context.handle))
    }

    call fn cuCtxGetDevice(out: Out<i32>) {
        out.set(context::top().ok_or(Code::INVALID_CONTEXT)?.device as i32)
    }

    call fn cuCtxGetDevice_v2(out: Out<i32>, handle: u64) {
        let context = match handle {
            0 => context::top().ok_or(Code::INVALID_CONTEXT)?,
            handle => context::by_handle(handle)?,
        };
        out.set(context.device as i32)
    }

    call fn cuCtxGetFlags(out: Out<u32>) {
        out.set(context::current()?.flags.load(Ordering::Relaxed))
    }

    call fn cuCtxSetFlags(flags: u32) {
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Code::INVALID_VALUE);
        }
        context::current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    call fn cuCtxGetId(handle: u64, out: Out<u64>) {
        out.set(given_or_current(handle)?.handle)
    }

    call fn cuCtxGetApiVersion(handle: u64, out: Out<u32>) {
        given_or_current(handle)?;
        out.set(3020)
    }

    call fn cuCtxSynchronize() {
        synchronize(&*context::current()?)
    }

    call fn cuCtxSynchronize_v2(handle: u64) {
        synchronize(&*given_or_current(handle)?)
    }

    call fn cuCtxGetLimit(out: Out<usize>, limit: u32) {
        let value = context::current()?.limit(limit)?.load(Ordering::Relaxed);
        out.set(value as usize)
    }

    call fn cuCtxSetLimit(limit: u32, value: usize) {
        let context = context::current()?;
        if limit == HEAP_SIZE && context.heap.is_there() {
            return Err(Code::INVALID_VALUE);
        }
        let smallest = if limit == STACK_SIZE { SMALLEST_STACK } else { 0 };
        let value = (value as u64).max(smallest).min(1 << 40);
        context.limit(limit)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    call fn cuCtxGetCacheConfig(out: Out<u32>) {
        out.set(context::current()?.cache_config.load(Ordering::Relaxed))
    }

    call fn cuCtxSetCacheConfig(config: u32) {
        if config > 3 {
            return Err(Code::INVALID_VALUE);
        }
        context::current()?.cache_config.store(config, Ordering::Relaxed);
        Ok(())
    }

    call fn cuCtxGetSharedMemConfig(out: Out<u32>) {
        out.set(context::current()?.shared_config.load(Ordering::Relaxed))
    }

    call fn cuCtxSetSharedMemConfig(config: u32) {
        if config > 2 {
            return Err(Code::INVALID_VALUE);
        }
        context::current()?.shared_config.store(config, Ordering::Relaxed);
        Ok(())
    }

    call fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        context::current()?;
        least.set_if_wanted(0);
        greatest.set_if_wanted(-5);
        Ok(())
    }

    call fn cuCtxResetPersistingL2Cache() {
        context::current()?;
        Ok(())
    }

    call fn cuCtxAttach(out: Out<u64>, flags: u32) {
        out.check()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        let context = context::current()?;
        context.attached.fetch_add(1, Ordering::Relaxed);
        out.set(context.handle)
    }

    call fn cuCtxDetach(handle: u64) {
        let context = context::by_handle(handle)?;
        if context::top().is_none_or(|top| top.handle != handle) {
            return Err(Code::INVALID_CONTEXT);
        }
        let one_less = |count: u32| count.checked_sub(1);
        let left = context.attached.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less);
        // The creation counts too.
        if left.is_err() { destroy(handle) } else { Ok(()) }
    }

    call fn cuCtxGetExecAffinity(out: Out<[u32; 2]>, kind: u32) {
        let context = context::current()?;
        out.check()?;
        if kind != SM_COUNT {
            return Err(Code::UNSUPPORTED_EXEC_AFFINITY);
        }
        out.set([kind, settings().model(context.device).multiprocessors])
    }

    call fn cuCtxWaitEvent(handle: u64, event: u64) {
        let context = given_or_current(handle)?;
        context.check()?;
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        capture::check_not_captured(&event)?;
        capture::refuse_in_context(context.handle)?;
        match event.position().filter(|position| !position.is_reached()) {
            Some(position) => context.wait_for(&position),
            None => Ok(()),
        }
    }

    call fn cuCtxRecordEvent(handle: u64, event: u64) {
        let context = given_or_current(handle)?;
        context.check()?;
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        let stream = context.stream(0, DefaultStream::Legacy)?;
        event.record_after(&context, &stream, context.positions())
    }
}
