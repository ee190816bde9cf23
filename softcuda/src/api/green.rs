//! Green contexts and the resources that they have.

use std::sync::Arc;

use cudarc::driver::sys;

use super::arguments::{In, Out};
use super::driver_api;
use crate::capture;
use crate::context;
use crate::events::EVENTS;
use crate::green_contexts::{
    self, DESCRIPTIONS, Description, GREEN, Green, Group, Multiprocessors,
};
use crate::handles::new_handle;
use crate::settings::{device, settings};
use crate::status::{Code, Outcome};
use crate::streams::NON_BLOCKING;
use crate::submission::{DefaultStream, stream_and_context};

/// `CU_DEV_RESOURCE_TYPE_SM`.
const SM: u32 = 1;
/// `CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING`.
const IGNORE_COSCHEDULING: u32 = 1;
/// `CU_GREEN_CTX_DEFAULT_STREAM`, which must be given.
const DEFAULT_STREAM: u32 = 1;

/// `CUdevResource`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Resource {
    kind: u32,
    /// Ordinal of the device and one; the API leaves this part to the driver.
    device: u32,
    unused: [u32; 22],
    count: u32,
    smallest: u32,
    multiple: u32,
    rest: [u32; 9],
}

const _: () = assert!(size_of::<Resource>() == size_of::<sys::CUdevResource>());

/// `CU_DEV_SM_RESOURCE_GROUP_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupParameters {
    count: u32,
    together: u32,
    preferred: u32,
    flags: u32,
    reserved: [u32; 12],
}

impl GroupParameters {
    /// # Errors
    /// `INVALID_VALUE` for flags other than `CU_DEV_SM_RESOURCE_GROUP_BACKFILL`, and for what is not zero behind them.
    fn group(&self) -> Outcome<Group> {
        if self.flags & !1 != 0 || self.reserved != [0; 12] {
            return Err(Code::INVALID_VALUE);
        }
        Ok(Group { count: self.count, together: self.together, backfill: self.flags != 0 })
    }
}

/// Splits multiprocessors into groups, one after the other; stores the numbers that were left to the driver.
fn split(
    parts: &Out<Resource>,
    whole: Multiprocessors,
    rest: &Out<Resource>,
    groups: &Out<GroupParameters>,
    count: u32,
) -> Outcome {
    let mut left = whole.count;
    let mut given = Vec::new();
    for index in 0..count as usize {
        let mut group = groups.at(index)?;
        group.count = group.group()?.take(whole, left)?;
        if group.count == 0 && parts.check().is_ok() {
            return Err(Code::INVALID_RESOURCE_CONFIGURATION);
        }
        left -= group.count;
        given.push(group);
    }
    if parts.check().is_ok() {
        let part = |group: &GroupParameters| Multiprocessors { count: group.count, ..whole };
        parts.set_all(given.iter().map(|group| Resource::new(part(group))))?;
    }
    rest.set_if_wanted(Resource::new(Multiprocessors { count: left, ..whole }));
    groups.set_all(given)
}

impl Resource {
    fn new(part: Multiprocessors) -> Resource {
        let (smallest, multiple) = green_contexts::limits(part.device);
        let (kind, device) = (if part.count == 0 { 0 } else { SM }, part.device as u32 + 1);
        Resource {
            kind,
            device,
            unused: [0; 22],
            count: part.count,
            smallest,
            multiple,
            rest: [0; 9],
        }
    }

    /// The multiprocessors.
    ///
    /// # Errors
    /// `INVALID_RESOURCE_TYPE` for another resource, or none of this driver.
    fn part(&self) -> Outcome<Multiprocessors> {
        let device = i32::try_from(self.device).ok().and_then(|n| device(n.checked_sub(1)?).ok());
        let device = device.filter(|_| self.kind == SM).ok_or(Code::INVALID_RESOURCE_TYPE)?;
        if self.count > settings().model(device).multiprocessors {
            return Err(Code::INVALID_RESOURCE_CONFIGURATION);
        }
        Ok(Multiprocessors { device, count: self.count })
    }
}

fn find(handle: u64) -> Outcome<Arc<Green>> {
    GREEN.get(handle).ok_or(Code::INVALID_VALUE)
}

fn give(out: &Out<Resource>, kind: u32, part: Multiprocessors) -> Outcome {
    out.check()?;
    if kind != SM {
        return Err(Code::INVALID_RESOURCE_TYPE);
    }
    out.set(Resource::new(part))
}

/// What a context has: a green one a part of its device, another one all of it.
fn part_of(context: u64) -> Outcome<Multiprocessors> {
    let device = context::by_handle(context)?.device;
    let green = green_contexts::of_context(context);
    Ok(green.map_or(Multiprocessors::of(device), |green| green.part))
}

driver_api! {
    call fn cuDeviceGetDevResource(ordinal: i32, out: Out<Resource>, kind: u32) {
        give(&out, kind, Multiprocessors::of(device(ordinal)?))
    }

    call fn cuCtxGetDevResource(handle: u64, out: Out<Resource>, kind: u32) {
        give(&out, kind, part_of(handle)?)
    }

    call fn cuGreenCtxGetDevResource(handle: u64, out: Out<Resource>, kind: u32) {
        give(&out, kind, find(handle)?.part)
    }

    stream(mode) fn cuStreamGetDevResource, cuStreamGetDevResource_ptsz(
        stream: u64, out: Out<Resource>, kind: u32,
    ) {
        settings().driver.since(13_010)?;
        give(&out, kind, part_of(stream_and_context(stream, mode)?.1.handle)?)
    }

    call fn cuDevSmResourceSplitByCount(
        parts: Out<Resource>, count: Out<u32>, whole: In<Resource>, rest: Out<Resource>, flags: u32,
        least: u32,
    ) {
        let wanted = count.get()?;
        let whole = whole.get()?.part()?;
        let (there, each, _) = whole.split(least, flags & IGNORE_COSCHEDULING == 0)?;
        if parts.address() == 0 {
            return count.set(there);
        }
        let given = there.min(wanted);
        parts.set_all((0..given).map(|_| Resource::new(each)))?;
        let left = whole.count - given * each.count;
        rest.set_if_wanted(Resource::new(Multiprocessors { count: left, ..whole }));
        count.set(given)
    }

    call fn cuDevSmResourceSplit(
        parts: Out<Resource>, count: u32, whole: In<Resource>, rest: Out<Resource>, flags: u32,
        groups: Out<GroupParameters>,
    ) {
        settings().driver.since(13_010)?;
        if count == 0 || flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        split(&parts, whole.get()?.part()?, &rest, &groups, count)
    }

    call fn cuDevResourceGenerateDesc(out: Out<u64>, resources: In<Resource>, count: u32) {
        out.check()?;
        let mut all = resources.at(0).and_then(|first| if count == 0 {
            Err(Code::INVALID_VALUE)
        } else {
            first.part()
        })?;
        for index in 1..count as usize {
            let part = resources.at(index)?.part()?;
            all.count = all.count.checked_add(part.count).ok_or(Code::INVALID_VALUE)?;
            if part.device != all.device || all.count > Multiprocessors::of(all.device).count {
                return Err(Code::INVALID_RESOURCE_CONFIGURATION);
            }
        }
        let handle = new_handle();
        DESCRIPTIONS.insert(handle, Arc::new(Description { part: all }));
        out.set(handle)
    }

    call fn cuGreenCtxCreate(out: Out<u64>, description: u64, ordinal: i32, flags: u32) {
        out.check()?;
        let description = DESCRIPTIONS.get(description).ok_or(Code::INVALID_VALUE)?;
        if flags != DEFAULT_STREAM || device(ordinal)? != description.part.device {
            return Err(Code::INVALID_VALUE);
        }
        out.set(green_contexts::create(description.part)?.handle)
    }

    call fn cuGreenCtxDestroy(handle: u64) {
        green_contexts::destroy(handle)
    }

    call fn cuGreenCtxGetId(handle: u64, out: Out<u64>) {
        out.set(find(handle)?.context.handle)
    }

    call fn cuCtxFromGreenCtx(out: Out<u64>, handle: u64) {
        out.set(find(handle)?.context.handle)
    }

    call fn cuGreenCtxStreamCreate(out: Out<u64>, handle: u64, flags: u32, priority: i32) {
        out.check()?;
        let green = find(handle)?;
        if flags != NON_BLOCKING {
            return Err(Code::INVALID_VALUE);
        }
        out.set(green.context.create_stream(flags, priority).handle)
    }

    call fn cuStreamGetGreenCtx(stream: u64, out: Out<u64>) {
        let (_, context) = stream_and_context(stream, DefaultStream::Legacy)?;
        out.set(green_contexts::of_context(context.handle).map_or(0, |green| green.handle))
    }

    stream(mode) fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz(
        stream: u64, out: Out<u64>, green: Out<u64>,
    ) {
        let (_, context) = stream_and_context(stream, mode)?;
        let found = green_contexts::of_context(context.handle);
        green.set_if_wanted(found.as_ref().map_or(0, |green| green.handle));
        out.set(found.map_or(context.handle, |green| green.primary.handle))
    }

    call fn cuGreenCtxRecordEvent(handle: u64, event: u64) {
        let context = find(handle)?.context.clone();
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        let stream = context.stream(0, DefaultStream::Legacy)?;
        event.record_after(&context, &stream, context.positions())
    }

    call fn cuGreenCtxWaitEvent(handle: u64, event: u64) {
        let context = find(handle)?.context.clone();
        let event = EVENTS.get(event).ok_or(Code::INVALID_HANDLE)?;
        capture::check_not_captured(&event)?;
        match event.position().filter(|position| !position.is_reached()) {
            Some(position) => context.wait_for(&position),
            None => Ok(()),
        }
    }
}
