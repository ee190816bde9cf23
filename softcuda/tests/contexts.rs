//! Contexts: their references, what they wait for, and green contexts.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuCtxAttach(context: &mut u64, flags: u32) -> u32;
    safe fn cuCtxDetach(context: u64) -> u32;
    safe fn cuCtxGetCurrent(context: &mut u64) -> u32;
    safe fn cuCtxGetExecAffinity(out: &mut [u32; 2], kind: u32) -> u32;
    safe fn cuCtxRecordEvent(context: u64, event: u64) -> u32;
    safe fn cuCtxWaitEvent(context: u64, event: u64) -> u32;
    safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
    safe fn cuDeviceGetProperties(out: &mut [i32; 14], device: i32) -> u32;
    safe fn cuDevicePrimaryCtxRetain(context: &mut u64, device: i32) -> u32;
    safe fn cuDevicePrimaryCtxRelease(device: i32) -> u32;
    safe fn cuDevicePrimaryCtxGetState(device: i32, flags: &mut u32, active: &mut i32) -> u32;
    fn cuDeviceGetHostAtomicCapabilities(
        out: *mut u32,
        operations: *const u32,
        count: u32,
        device: i32,
    ) -> u32;
    fn cuDeviceGetP2PAtomicCapabilities(
        out: *mut u32,
        operations: *const u32,
        count: u32,
        one: i32,
        other: i32,
    ) -> u32;
    safe fn cuDeviceGetDevResource(device: i32, out: &mut Resource, kind: u32) -> u32;
    safe fn cuCtxGetDevResource(context: u64, out: &mut Resource, kind: u32) -> u32;
    safe fn cuGreenCtxGetDevResource(green: u64, out: &mut Resource, kind: u32) -> u32;
    fn cuDevSmResourceSplitByCount(
        parts: *mut Resource,
        count: &mut u32,
        whole: &Resource,
        rest: &mut Resource,
        flags: u32,
        least: u32,
    ) -> u32;
    fn cuDevSmResourceSplit(
        parts: *mut Resource,
        count: u32,
        whole: &Resource,
        rest: &mut Resource,
        flags: u32,
        groups: *mut [u32; 16],
    ) -> u32;
    fn cuDevResourceGenerateDesc(out: &mut u64, resources: *const Resource, count: u32) -> u32;
    safe fn cuGreenCtxCreate(out: &mut u64, description: u64, device: i32, flags: u32) -> u32;
    safe fn cuGreenCtxDestroy(green: u64) -> u32;
    safe fn cuGreenCtxGetId(green: u64, id: &mut u64) -> u32;
    safe fn cuCtxFromGreenCtx(context: &mut u64, green: u64) -> u32;
    safe fn cuGreenCtxStreamCreate(out: &mut u64, green: u64, flags: u32, priority: i32) -> u32;
    safe fn cuStreamGetGreenCtx(stream: u64, green: &mut u64) -> u32;
    safe fn cuStreamGetCtx_v2(stream: u64, context: &mut u64, green: &mut u64) -> u32;
    safe fn cuGreenCtxRecordEvent(green: u64, event: u64) -> u32;
    safe fn cuGreenCtxWaitEvent(green: u64, event: u64) -> u32;
}

/// `CUdevResource`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Resource {
    kind: u32,
    padding: [u32; 23],
    count: u32,
    smallest: u32,
    multiple: u32,
    rest: [u32; 9],
}

const NOTHING: Resource =
    Resource { kind: 0, padding: [0; 23], count: 0, smallest: 0, multiple: 0, rest: [0; 9] };
const INVALID_DEVICE: u32 = 101;
const INVALID_CONTEXT: u32 = 201;
const UNSUPPORTED_AFFINITY: u32 = 224;
const INVALID_RESOURCE_TYPE: u32 = 914;
const INVALID_CONFIGURATION: u32 = 915;
const SM: u32 = 1;

#[test]
fn a_context_ends_with_its_last_reference() {
    let context = context();
    let mut again = 0;
    assert_eq!(cuCtxAttach(&mut again, 1), INVALID_VALUE);
    ok(cuCtxAttach(&mut again, 0));
    assert_eq!(again, context);
    let memory = allocate(4);
    ok(cuCtxDetach(again));
    write(memory, &[3]);
    assert_eq!(read(memory, 1), [3]);
    let mut current = 0;
    ok(cuCtxGetCurrent(&mut current));
    assert_eq!(current, context);
    let mut other = 0;
    ok(cuCtxCreate_v2(&mut other, 0, 0));
    assert_eq!(cuCtxDetach(context), INVALID_CONTEXT, "it is not current");
    ok(cuCtxDetach(other));
    ok(cuCtxSetCurrent(context));
    ok(cuCtxDetach(context));
    assert_eq!(cuCtxDetach(context), INVALID_CONTEXT);
    assert_eq!(cuCtxAttach(&mut again, 0), INVALID_CONTEXT);
}

#[test]
#[ignore = "a program for other tests"]
fn asking_program() {
    context();
    let mut affinity = [9; 2];
    ok(cuCtxGetExecAffinity(&mut affinity, 0));
    assert_eq!(affinity, [0, 132]);
    assert_eq!(cuCtxGetExecAffinity(&mut affinity, 1), UNSUPPORTED_AFFINITY);
    let mut properties = [0; 14];
    ok(cuDeviceGetProperties(&mut properties, 0));
    for (property, number) in properties.iter().zip(1..) {
        let mut value = -1;
        ok(cuDeviceGetAttribute(&mut value, number, 0));
        assert_eq!(*property, value, "attribute {number}");
    }
    let operations: Vec<u32> = (0..13).collect();
    let mut out = vec![0; 13];
    // SAFETY: the arrays are as long as said, or longer.
    unsafe {
        let host = |out: &mut [u32], operations: &[u32], count| {
            cuDeviceGetHostAtomicCapabilities(out.as_mut_ptr(), operations.as_ptr(), count, 0)
        };
        ok(host(&mut out, &operations, 13));
        assert_eq!((out[0], out[4], out[9], out[10], out[12]), (31, 14, 27, 28, 0));
        assert_eq!(host(&mut out, &[0, 13], 2), INVALID_VALUE);
        assert_eq!(host(&mut out, &operations, 0), INVALID_VALUE);
        let peer = |one, other, out: &mut [u32]| {
            cuDeviceGetP2PAtomicCapabilities(out.as_mut_ptr(), operations.as_ptr(), 13, one, other)
        };
        let host = out.clone();
        assert_eq!(peer(0, 0, &mut out), INVALID_DEVICE);
        assert_eq!(peer(0, 2, &mut out), INVALID_DEVICE);
        ok(peer(0, 1, &mut out));
        assert_eq!(out, host);
    }
}

#[test]
fn devices_answer_what_they_can() {
    let environment = [("SOFTCUDA_DEVICE", "H,9.0,132,8G"), ("SOFTCUDA_DEVICES", "2")];
    Program::start("asking_program", &environment).finish();
}

extern "C" fn wait_for_word(flag: u64) {
    // SAFETY: the flag is a pinned word that lives until the stream is done.
    let flag = unsafe { &*(flag as *const std::sync::atomic::AtomicU32) };
    while flag.load(std::sync::atomic::Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
}

#[test]
fn a_context_waits_for_an_event() {
    let first = context();
    let flag = std::sync::atomic::AtomicU32::new(0);
    let (mut busy, mut event) = (0, 0);
    ok(cuStreamCreate(&mut busy, 1));
    ok(cuEventCreate(&mut event, 0));
    ok(cuLaunchHostFunc(busy, wait_for_word, &raw const flag as u64));
    ok(cuCtxRecordEvent(first, event));
    let mut second = 0;
    ok(cuCtxCreate_v2(&mut second, 0, 0));
    let (memory, mut before, mut after) = (allocate(8), 0, 0);
    ok(cuStreamCreate(&mut before, 1));
    ok(cuCtxWaitEvent(second, event));
    // Streams that were there, and those that come later.
    ok(cuStreamCreate(&mut after, 1));
    ok(cuMemsetD32Async(memory, 1, 1, before));
    ok(cuMemsetD32Async(memory + 4, 2, 1, after));
    for stream in [before, after] {
        assert_eq!(cuStreamQuery(stream), NOT_READY);
    }
    flag.store(1, std::sync::atomic::Ordering::SeqCst);
    for stream in [before, after] {
        ok(cuStreamSynchronize(stream));
    }
    assert_eq!(read(memory, 2), [1, 2]);
    // It is passed: there is nothing to wait for.
    ok(cuCtxWaitEvent(second, event));
    assert_eq!(cuCtxWaitEvent(second, 7), INVALID_HANDLE);
    ok(cuStreamCreate(&mut after, 1));
    ok(cuStreamQuery(after));
}

fn split(whole: &Resource, wanted: u32, flags: u32, least: u32) -> (u32, Vec<u32>, u32) {
    let mut parts = vec![NOTHING; wanted as usize];
    let (mut count, mut rest) = (wanted, NOTHING);
    // SAFETY: there is room for as many as said.
    let code = unsafe {
        let parts = if wanted == 0 { std::ptr::null_mut() } else { parts.as_mut_ptr() };
        cuDevSmResourceSplitByCount(parts, &mut count, whole, &mut rest, flags, least)
    };
    let counts = parts.iter().take(count as usize).map(|part| part.count).collect();
    (code, if wanted == 0 { vec![count] } else { counts }, rest.count)
}

#[test]
#[ignore = "a program for other tests"]
fn green_program() {
    let current = context();
    let mut whole = NOTHING;
    assert_eq!(cuDeviceGetDevResource(0, &mut whole, 2), INVALID_RESOURCE_TYPE);
    assert_eq!(cuDeviceGetDevResource(1, &mut whole, SM), INVALID_DEVICE);
    ok(cuDeviceGetDevResource(0, &mut whole, SM));
    assert_eq!((whole.kind, whole.count, whole.smallest, whole.multiple), (SM, 132, 8, 8));
    // How many there can be, and what they are.
    assert_eq!(split(&whole, 0, 0, 64), (0, vec![2], 0));
    assert_eq!(split(&whole, 5, 0, 64), (0, vec![64, 64], 4));
    assert_eq!(split(&whole, 2, 0, 9), (0, vec![16, 16], 100));
    assert_eq!(split(&whole, 3, 1, 1), (0, vec![2, 2, 2], 126));
    assert_eq!(split(&whole, 1, 0, 132), (0, vec![132], 0));
    assert_eq!(split(&whole, 1, 0, 133).0, INVALID_CONFIGURATION);
    assert_eq!(split(&NOTHING, 1, 0, 1).0, INVALID_RESOURCE_TYPE);

    let (mut parts, mut count, mut rest) = ([NOTHING; 2], 2, NOTHING);
    let (mut description, mut green) = (0, 0);
    // SAFETY: there is room for two, and there are two.
    unsafe {
        ok(cuDevSmResourceSplitByCount(parts.as_mut_ptr(), &mut count, &whole, &mut rest, 0, 16));
        ok(cuDevResourceGenerateDesc(&mut description, parts.as_ptr(), 2));
        assert_eq!(cuDevResourceGenerateDesc(&mut green, parts.as_ptr(), 0), INVALID_VALUE);
        let twice = [whole, whole];
        let code = cuDevResourceGenerateDesc(&mut green, twice.as_ptr(), 2);
        assert_eq!(code, INVALID_CONFIGURATION);
        assert_eq!(cuDevResourceGenerateDesc(&mut green, &NOTHING, 1), INVALID_RESOURCE_TYPE);
    }
    assert_eq!(cuGreenCtxCreate(&mut green, description, 0, 0), INVALID_VALUE);
    ok(cuGreenCtxCreate(&mut green, description, 0, 1));
    let (mut own, mut primary, mut part, mut id) = (0, 0, NOTHING, 0);
    ok(cuCtxFromGreenCtx(&mut own, green));
    ok(cuGreenCtxGetDevResource(green, &mut part, SM));
    assert_eq!(part.count, 32);
    ok(cuCtxGetDevResource(own, &mut part, SM));
    assert_eq!(part.count, 32);
    ok(cuCtxGetDevResource(current, &mut part, SM));
    assert_eq!(part.count, 132);
    ok(cuGreenCtxGetId(green, &mut id));
    assert_ne!(id, 0);

    // Its streams know it, others have none.
    ok(cuDevicePrimaryCtxRetain(&mut primary, 0));
    let (mut stream, mut other) = (0, 0);
    assert_eq!(cuGreenCtxStreamCreate(&mut stream, green, 0, 0), INVALID_VALUE);
    ok(cuGreenCtxStreamCreate(&mut stream, green, 1, 0));
    ok(cuStreamCreate(&mut other, 1));
    for (stream, expected, regular) in [(stream, green, primary), (other, 0, current)] {
        let (mut found, mut context, mut again) = (7, 7, 7);
        ok(cuStreamGetGreenCtx(stream, &mut found));
        ok(cuStreamGetCtx_v2(stream, &mut context, &mut again));
        assert_eq!((found, again, context), (expected, expected, regular));
    }
    // Memory and events of the primary context can be used there.
    ok(cuCtxSetCurrent(primary));
    let (memory, mut event) = (allocate(4), 0);
    ok(cuEventCreate(&mut event, 0));
    ok(cuMemsetD32Async(memory, 9, 1, stream));
    ok(cuEventRecord(event, stream));
    ok(cuEventSynchronize(event));
    assert_eq!(read(memory, 1), [9]);
    ok(cuGreenCtxRecordEvent(green, event));
    ok(cuGreenCtxWaitEvent(green, event));
    ok(cuStreamSynchronize(stream));

    assert_eq!(cuCtxDestroy_v2(own), INVALID_CONTEXT, "it belongs to the green one");
    ok(cuMemFree_v2(memory));
    ok(cuDevicePrimaryCtxRelease(0));
    let (mut flags, mut active) = (0, 0);
    ok(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 1, "the green context keeps it");
    ok(cuGreenCtxDestroy(green));
    ok(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 0);
    assert_eq!(cuGreenCtxDestroy(green), INVALID_VALUE);
    assert_eq!(cuStreamQuery(stream), INVALID_HANDLE);
}

#[test]
fn green_contexts_have_a_part_of_a_device() {
    Program::start("green_program", &[("SOFTCUDA_DEVICE", "H,9.0,132,8G")]).finish();
}

/// Releases the primary context when its thread ends.
struct AtTheEnd(std::sync::mpsc::Sender<u32>);

impl Drop for AtTheEnd {
    fn drop(&mut self) {
        let mut current = 7;
        ok(cuCtxGetCurrent(&mut current));
        let _ = self.0.send(cuDevicePrimaryCtxRelease(0));
    }
}

thread_local! {
    static AT_THE_END: std::cell::RefCell<Option<AtTheEnd>> = const { std::cell::RefCell::new(None) };
}

#[test]
fn a_thread_that_ends_can_still_release_its_context() {
    ok(cuInit(0));
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        // What is used first by the thread is destroyed last.
        AT_THE_END.with_borrow_mut(|end| *end = Some(AtTheEnd(sender)));
        let mut primary = 0;
        ok(cuDevicePrimaryCtxRetain(&mut primary, 0));
        ok(cuCtxSetCurrent(primary));
    });
    thread.join().unwrap();
    assert_eq!(receiver.recv(), Ok(0));
    let (mut flags, mut active) = (0, 7);
    ok(cuDevicePrimaryCtxGetState(0, &mut flags, &mut active));
    assert_eq!(active, 0);
}

/// Splits into groups of so many multiprocessors, so many together, with flags: the code or what came of it, as the
/// parts and as the groups say, and the rest. Without `parts`, the groups alone.
fn grouped(
    whole: &Resource,
    wanted: &[[u32; 3]],
    parts: bool,
) -> Result<(Vec<u32>, Vec<u32>, u32), u32> {
    let mut groups: Vec<[u32; 16]> = vec![[0; 16]; wanted.len()];
    for (group, [count, together, flags]) in groups.iter_mut().zip(wanted) {
        (group[0], group[1], group[3]) = (*count, *together, *flags);
    }
    let (mut found, mut rest) = (vec![NOTHING; wanted.len()], NOTHING);
    let place = if parts { found.as_mut_ptr() } else { std::ptr::null_mut() };
    let count = wanted.len() as u32;
    // SAFETY: there is room for as many parts as there are groups.
    let code =
        unsafe { cuDevSmResourceSplit(place, count, whole, &mut rest, 0, groups.as_mut_ptr()) };
    let counts = found.iter().map(|part| part.count).collect();
    let numbers = groups.iter().map(|group| group[0]).collect();
    if code == 0 { Ok((counts, numbers, rest.count)) } else { Err(code) }
}

#[test]
#[ignore = "a program for other tests"]
fn grouping_program() {
    ok(cuInit(0));
    let mut whole = NOTHING;
    ok(cuDeviceGetDevResource(0, &mut whole, SM));
    assert_eq!(whole.count, 20);
    let groups = |wanted: &[[u32; 3]]| grouped(&whole, wanted, true);
    let both = |counts: &[u32], rest| Ok((counts.to_vec(), counts.to_vec(), rest));
    assert_eq!(groups(&[[8, 0, 0]]), both(&[8], 12));
    assert_eq!(groups(&[[4, 2, 0], [4, 4, 0]]), both(&[4, 4], 12));
    // As many as are left, in eights, in fours, and all.
    assert_eq!(groups(&[[0, 0, 0]]), both(&[16], 4));
    assert_eq!(groups(&[[8, 4, 0], [0, 4, 0]]), both(&[8, 12], 0));
    assert_eq!(groups(&[[8, 4, 0], [0, 8, 1]]), both(&[8, 12], 0));
    assert_eq!(groups(&[[10, 8, 1]]), both(&[10], 10));
    // Nothing is left.
    assert_eq!(groups(&[[20, 2, 0], [0, 2, 0]]), Err(INVALID_CONFIGURATION));
    let (_, numbers, rest) = grouped(&whole, &[[20, 2, 0], [0, 2, 0]], false).unwrap();
    assert_eq!((numbers, rest), (vec![20, 0], 0));
    assert_eq!(groups(&[[16, 0, 0], [8, 0, 0]]), Err(INVALID_CONFIGURATION));
    assert_eq!(groups(&[[4, 8, 1]]), Err(INVALID_CONFIGURATION));
    for wrong in [[3, 2, 0], [10, 4, 0], [22, 2, 0], [6, 3, 0], [34, 34, 0], [4, 2, 4]] {
        assert_eq!(groups(&[wrong]), Err(INVALID_VALUE), "{wrong:?}");
    }
    assert_eq!(groups(&[]), Err(INVALID_VALUE));
    assert_eq!(grouped(&NOTHING, &[[2, 2, 0]], true), Err(INVALID_RESOURCE_TYPE));
}

#[test]
fn multiprocessors_are_split_into_groups() {
    let device = ("SOFTCUDA_DEVICE", "softcuda,9.0,20,4G");
    Program::start("grouping_program", &[device, ("SOFTCUDA_DRIVER", "590")]).finish();
}
