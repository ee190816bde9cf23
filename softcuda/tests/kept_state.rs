//! What softcuda keeps and reports: attributes of streams and kernel nodes, settings of core dumps, logs; and
//! questions whose answer is that there is none.

mod support;

use std::ffi::CStr;
use std::sync::Mutex;

use support::graphs::*;
use support::*;

unsafe extern "C" {
    fn cuStreamGetAttribute(stream: u64, id: u32, value: *mut u8) -> u32;
    fn cuStreamSetAttribute(stream: u64, id: u32, value: *const u8) -> u32;
    safe fn cuStreamCopyAttributes(to: u64, from: u64) -> u32;
    safe fn cuStreamCreateWithPriority(stream: &mut u64, flags: u32, priority: i32) -> u32;
    safe fn cuStreamGetPriority(stream: u64, priority: &mut i32) -> u32;
    safe fn cuGraphKernelNodeSetParams_v2(node: u64, parameters: &Kernel) -> u32;
    fn cuGraphKernelNodeGetAttribute(node: u64, id: u32, value: *mut u8) -> u32;
    fn cuGraphKernelNodeSetAttribute(node: u64, id: u32, value: *const u8) -> u32;
    safe fn cuGraphKernelNodeCopyAttributes(to: u64, from: u64) -> u32;
    fn cuGraphAddEmptyNode(node: &mut u64, graph: u64, after: *const u64, count: usize) -> u32;
    fn cuGraphDebugDotPrint(graph: u64, path: *const i8, flags: u32) -> u32;
    safe fn cuMemGetHandleForAddressRange(
        handle: &mut i32,
        address: u64,
        size: usize,
        kind: u32,
        flags: u64,
    ) -> u32;
    fn cuOccupancyMaxActiveClusters(out: &mut i32, function: u64, config: &Config) -> u32;
    fn cuOccupancyMaxPotentialClusterSize(out: &mut i32, function: u64, config: &Config) -> u32;
    fn cuCoredumpGetAttribute(id: u32, value: *mut u8, size: &mut usize) -> u32;
    fn cuCoredumpGetAttributeGlobal(id: u32, value: *mut u8, size: &mut usize) -> u32;
    fn cuCoredumpSetAttribute(id: u32, value: *const u8, size: &mut usize) -> u32;
    fn cuCoredumpSetAttributeGlobal(id: u32, value: *const u8, size: &mut usize) -> u32;
    safe fn cuLogsRegisterCallback(
        callback: Option<extern "C" fn(u64, u32, *const i8, usize)>,
        data: u64,
        out: &mut u64,
    ) -> u32;
    safe fn cuLogsUnregisterCallback(callback: u64) -> u32;
    safe fn cuLogsCurrent(iterator: &mut u32, flags: u32) -> u32;
    fn cuLogsDumpToMemory(iterator: *mut u32, to: *mut u8, size: &mut usize, flags: u32) -> u32;
    fn cuLogsDumpToFile(iterator: *mut u32, path: *const i8, flags: u32) -> u32;
    safe fn cuMemAllocManaged(address: &mut u64, size: usize, flags: u32) -> u32;
    fn cuMemPrefetchBatchAsync(
        addresses: *const u64,
        sizes: *const usize,
        count: usize,
        locations: *const [u32; 2],
        firsts: *const usize,
        places: usize,
        flags: u64,
        stream: u64,
    ) -> u32;
    fn cuMemDiscardBatchAsync(
        addresses: *const u64,
        sizes: *const usize,
        count: usize,
        flags: u64,
        stream: u64,
    ) -> u32;
    fn cuMemRangeGetAttribute(
        out: *mut i32,
        bytes: usize,
        number: u32,
        address: u64,
        size: usize,
    ) -> u32;
    fn cuLibraryLoadData(
        library: &mut u64,
        code: *const u8,
        names: u64,
        values: u64,
        count: u32,
        library_names: u64,
        library_values: u64,
        library_count: u32,
    ) -> u32;
    fn cuLibraryGetManaged(
        address: &mut u64,
        size: &mut usize,
        library: u64,
        name: *const i8,
    ) -> u32;
    fn cuLibraryGetUnifiedFunction(function: &mut u64, library: u64, name: *const i8) -> u32;
}

/// `CUlaunchConfig`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: *const [u64; 9],
    count: u32,
}

const NOT_FOUND: u32 = 500;
const OPERATING_SYSTEM: u32 = 304;
const INVALID_CLUSTER_SIZE: u32 = 912;
const CODE: &CStr = c".version 8.0\n.target sm_80\n.address_size 64\n.entry k() { ret; }\n";

fn value(first: i32) -> [u8; 64] {
    let mut value = [0; 64];
    value[..4].copy_from_slice(&first.to_le_bytes());
    value
}

#[track_caller]
fn first(code: u32, value: [u8; 64]) -> i32 {
    ok(code);
    i32::from_le_bytes(value[..4].try_into().unwrap())
}

fn of_stream(stream: u64, id: u32) -> (u32, [u8; 64]) {
    let mut value = [0xee; 64];
    // SAFETY: there is room for the largest attribute.
    (unsafe { cuStreamGetAttribute(stream, id, value.as_mut_ptr()) }, value)
}

fn set_of_stream(stream: u64, id: u32, first: i32) -> u32 {
    // SAFETY: the value is as large as the largest attribute.
    unsafe { cuStreamSetAttribute(stream, id, value(first).as_ptr()) }
}

#[test]
fn streams_keep_attributes() {
    context();
    let (mut one, mut other) = (0, 0);
    ok(cuStreamCreateWithPriority(&mut one, 1, -2));
    ok(cuStreamCreate(&mut other, 0));
    let number = |stream, id| {
        let (code, value) = of_stream(stream, id);
        first(code, value)
    };
    // As driver 580 has them at first: window, waiting, priority, memory domains.
    assert_eq!([1, 3, 8, 10].map(|id| number(one, id)), [0, -1, -2, 0]);
    assert_eq!(of_stream(one, 9).1[..3], [0, 1, 0xee]);
    for id in [0, 2, 4, 5, 6, 7, 11, 14, 99] {
        assert_eq!(of_stream(one, id).0, INVALID_VALUE, "{id}");
        assert_eq!(set_of_stream(one, id, 0), INVALID_VALUE, "{id}");
    }
    for (id, first, code) in [
        (3, 0, INVALID_VALUE),
        (3, 4, 0),
        (3, 5, INVALID_VALUE),
        (8, -99, 0),
        (9, 0x0302, 0),
        (9, 0x0004, INVALID_VALUE),
        (10, 1, 0),
        (10, 2, INVALID_VALUE),
    ] {
        assert_eq!(set_of_stream(one, id, first), code, "{id} {first}");
    }
    ok(cuStreamCopyAttributes(other, one));
    assert_eq!([3, 8, 10].map(|id| number(other, id)), [4, -5, 1]);
    let mut priority = 7;
    ok(cuStreamGetPriority(one, &mut priority));
    assert_eq!(priority, -5);
    ok(set_of_stream(0, 3, 1));
    assert_eq!(number(0, 3), 1);
    assert_eq!(cuStreamCopyAttributes(other, 12345), INVALID_HANDLE);
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(cuStreamGetAttribute(one, 3, std::ptr::null_mut()), INVALID_VALUE);
        assert_eq!(cuStreamSetAttribute(one, 3, std::ptr::null()), INVALID_VALUE);
    }
}

fn function() -> u64 {
    let (mut module, mut function) = (0, 0);
    // SAFETY: the texts are C strings.
    unsafe {
        ok(cuModuleLoadData(&mut module, CODE.as_ptr().cast()));
        ok(cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()));
    }
    function
}

#[test]
fn kernel_nodes_keep_attributes() {
    context();
    let function = function();
    let (each, extra, kernel, context) = (std::ptr::null(), 0, 0, 0);
    let of = |grid| Kernel {
        function,
        grid,
        block: [32, 1, 1],
        shared: 0,
        each,
        extra,
        kernel,
        context,
    };
    let (mut graph, mut one, mut other, mut empty) = (0, 0, 0, 0);
    ok(cuGraphCreate(&mut graph, 0));
    // SAFETY: the nodes depend on none, and the kernel has no parameters.
    unsafe {
        ok(cuGraphAddKernelNode_v2(&mut one, graph, std::ptr::null(), 0, &of([4, 1, 1])));
        ok(cuGraphAddKernelNode_v2(&mut other, graph, std::ptr::null(), 0, &of([4, 1, 1])));
        ok(cuGraphAddEmptyNode(&mut empty, graph, std::ptr::null(), 0));
    }
    let get = |node, id| {
        let mut value = [0xee; 64];
        // SAFETY: there is room for the largest attribute.
        let code = unsafe { cuGraphKernelNodeGetAttribute(node, id, value.as_mut_ptr()) };
        (code, value)
    };
    // SAFETY: the value is as large as the largest attribute.
    let set =
        |node, id, first| unsafe { cuGraphKernelNodeSetAttribute(node, id, value(first).as_ptr()) };
    for (id, number, code) in [
        (2, 1, 0),
        (4, 1, 0),
        (4, 2, NOT_SUPPORTED),
        (5, 2, 0),
        (5, 3, INVALID_VALUE),
        (8, -3, 0),
        (14, 50, 0),
        (14, 101, INVALID_VALUE),
        (3, 1, INVALID_VALUE),
    ] {
        assert_eq!(set(one, id, number), code, "{id} {number}");
    }
    ok(cuGraphKernelNodeCopyAttributes(other, one));
    // Other parameters leave them as they are.
    ok(cuGraphKernelNodeSetParams_v2(one, &of([2, 1, 1])));
    for node in [one, other] {
        let numbers = [2, 4, 5, 8, 14].map(|id| {
            let (code, value) = get(node, id);
            first(code, value)
        });
        assert_eq!(numbers, [1, 1, 2, -3, 50]);
    }
    assert_eq!(get(one, 3).0, INVALID_VALUE);
    assert_eq!(get(empty, 2).0, INVALID_VALUE);
    assert_eq!(cuGraphKernelNodeCopyAttributes(other, empty), INVALID_VALUE);
}

#[test]
fn a_graph_is_printed() {
    context();
    let (mut graph, mut one, mut other) = (0, 0, 0);
    ok(cuGraphCreate(&mut graph, 0));
    // SAFETY: the first node depends on none, the second on the first.
    unsafe {
        ok(cuGraphAddEmptyNode(&mut one, graph, std::ptr::null(), 0));
        ok(cuGraphAddEmptyNode(&mut other, graph, &one, 1));
    }
    let path = std::env::temp_dir().join(format!("softcuda-graph-{}", std::process::id()));
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the paths are C strings, or null.
    let print = |path: *const i8, flags| unsafe { cuGraphDebugDotPrint(graph, path, flags) };
    ok(print(name.as_ptr(), 1));
    let verbose = std::fs::read_to_string(&path).unwrap();
    assert!(verbose.contains(&format!("node_1 [label=\"1: empty {other:#x}\"];")), "{verbose}");
    ok(print(name.as_ptr(), 0));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(text.starts_with("digraph ") && text.ends_with("}\n"), "{text}");
    for line in
        ["node_0 [label=\"0: empty\"];", "node_1 [label=\"1: empty\"];", "node_0 -> node_1;"]
    {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!(print(std::ptr::null(), 0), INVALID_VALUE);
    assert_eq!(print(c"/nowhere/graph".as_ptr(), 0), OPERATING_SYSTEM);
    assert_eq!(print(name.as_ptr(), 1 << 16), INVALID_VALUE);
}

#[test]
fn memory_has_no_dma_buffers() {
    context();
    let memory = allocate(4 * GRANULE);
    let mut handle = -1;
    let ask = |handle: &mut i32, at, size, kind, flags| {
        cuMemGetHandleForAddressRange(handle, at, size, kind, flags)
    };
    for (at, size, kind, flags, code) in [
        (memory, GRANULE, 1, 0, NOT_SUPPORTED),
        (memory, GRANULE, 1, 1, NOT_SUPPORTED),
        (memory, GRANULE, 2, 0, INVALID_VALUE),
        (memory, GRANULE, 1, 2, INVALID_VALUE),
        (memory, 1000, 1, 0, INVALID_VALUE),
        (memory, 0, 1, 0, INVALID_VALUE),
        (memory + 8, GRANULE, 1, 0, INVALID_VALUE),
        (4096, GRANULE, 1, 0, INVALID_VALUE),
    ] {
        assert_eq!(ask(&mut handle, at, size, kind, flags), code, "{at} {size} {kind} {flags}");
    }
    assert_eq!(handle, -1);
}

#[test]
fn a_cluster_is_one_block_before_compute_capability_9() {
    context();
    let function = function();
    let ask = |cluster: Option<[u32; 3]>| {
        let [x, y, z] = cluster.unwrap_or_default().map(u64::from);
        let mut attribute = [0; 9];
        (attribute[0], attribute[1], attribute[2]) = (4, x | y << 32, z);
        let (attributes, count) = (&raw const attribute, cluster.is_some().into());
        let (grid, block) = ([8, 1, 1], [64, 1, 1]);
        let config = Config { grid, block, shared: 0, stream: 0, attributes, count };
        let (mut active, mut size) = (-1, -1);
        // SAFETY: the attribute is there for the calls.
        let codes = unsafe {
            let code = cuOccupancyMaxActiveClusters(&mut active, function, &config);
            [code, cuOccupancyMaxPotentialClusterSize(&mut size, function, &config)]
        };
        (codes, active, size)
    };
    assert_eq!(ask(None), ([0; 2], 0, 1));
    let (codes, active, size) = ask(Some([1; 3]));
    assert!(codes == [0; 2] && active >= 32 && size == 1, "{codes:?} {active} {size}");
    for cluster in [[2, 1, 1], [3, 1, 1], [0, 1, 1], [1, 2, 1]] {
        assert_eq!(ask(Some(cluster)), ([INVALID_CLUSTER_SIZE; 2], -1, -1), "{cluster:?}");
    }
}

#[test]
fn settings_of_core_dumps_are_kept() {
    context();
    let get = |is_global: bool, id: u32, room: usize| {
        let (mut value, mut size) = ([0xee; 64], room);
        let get = if is_global { cuCoredumpGetAttributeGlobal } else { cuCoredumpGetAttribute };
        // SAFETY: there is as much room as said.
        (unsafe { get(id, value.as_mut_ptr(), &mut size) }, value)
    };
    let set = |is_global: bool, id: u32, value: &[u8]| {
        let mut size = value.len();
        let set = if is_global { cuCoredumpSetAttributeGlobal } else { cuCoredumpSetAttribute };
        // SAFETY: there are as many bytes as said.
        unsafe { set(id, value.as_ptr(), &mut size) }
    };
    // As driver 580 has them at first, of the process and of the context.
    for (id, global, own) in
        [(1, Some(0), Some(0)), (2, Some(1), Some(1)), (3, Some(0), Some(0)), (4, Some(0), None)]
    {
        for (is_global, expected) in [(true, global), (false, own)] {
            let (code, value) = get(is_global, id, 1);
            assert_eq!((code == 0).then_some(value[0]), expected, "{id} {is_global}");
            assert_eq!(get(is_global, id, 4).0, INVALID_VALUE, "{id}");
        }
    }
    ok(set(false, 3, &[1]));
    assert_eq!((get(false, 3, 1).1[0], get(true, 3, 1).1[0]), (1, 0));
    assert_eq!(set(false, 4, &[1]), INVALID_VALUE, "of the process only");
    ok(set(true, 4, &[1]));
    assert_eq!(get(true, 4, 1).1[0], 1);
    assert_eq!(set(true, 1, &[1, 0, 0, 0]), INVALID_VALUE);
    ok(set(true, 5, b"/tmp/core\0"));
    assert_eq!(get(true, 5, 10).1[..11], *b"/tmp/core\0\xee");
    assert_eq!(get(true, 5, 4).1[..5], *b"/tmp\xee");
    assert_eq!(set(true, 5, &[b'x'; 1025]), INVALID_VALUE);
    assert_eq!(set(true, 6, b"/tmp/pipe\0"), NOT_SUPPORTED);
    ok(set(false, 7, &[3, 0, 0, 0]));
    assert_eq!(get(false, 7, 4).1[..5], [3, 0, 0, 0, 0xee]);
    assert_eq!(get(false, 8, 1).0, INVALID_VALUE);
    let mut size = 0;
    // SAFETY: null asks for the size.
    unsafe { ok(cuCoredumpGetAttribute(1, std::ptr::null_mut(), &mut size)) };
    assert_eq!(size, 1);
}

static HEARD: Mutex<Vec<String>> = Mutex::new(Vec::new());

extern "C" fn hear(data: u64, level: u32, message: *const i8, length: usize) {
    // SAFETY: the driver gives a C string.
    let text = unsafe { CStr::from_ptr(message) }.to_str().unwrap();
    assert_eq!((data, level, length), (42, 0, text.len()));
    HEARD.lock().unwrap().push(text.to_owned());
}

#[test]
#[ignore = "a program for other tests"]
fn logging_program() {
    context();
    let (mut callback, mut iterator) = (0, 0);
    assert_eq!(cuLogsRegisterCallback(None, 0, &mut callback), INVALID_VALUE);
    ok(cuLogsRegisterCallback(Some(hear), 42, &mut callback));
    assert_eq!(cuLogsCurrent(&mut iterator, 1), INVALID_VALUE);
    HEARD.lock().unwrap().clear();
    ok(cuLogsCurrent(&mut iterator, 0));
    assert_eq!(cuMemFree_v2(64), INVALID_VALUE);
    assert_eq!(cuStreamQuery(99), INVALID_HANDLE);
    let said = [
        "cuMemFree_v2 returns CUDA_ERROR_INVALID_VALUE",
        "cuStreamQuery returns CUDA_ERROR_INVALID_HANDLE",
    ];
    assert_eq!(*HEARD.lock().unwrap(), said);
    let mut buffer = [0xee_u8; 4096];
    let mut dump = |iterator: *mut u32, room: usize| {
        let mut size = room;
        // SAFETY: there is as much room as said.
        let code = unsafe { cuLogsDumpToMemory(iterator, buffer.as_mut_ptr(), &mut size, 0) };
        let text =
            CStr::from_bytes_until_nul(&buffer).map(|text| text.to_string_lossy().into_owned());
        (code, size, text.unwrap_or_default())
    };
    let all = format!("{}\n{}\n", said[0], said[1]);
    let mut from = iterator;
    assert_eq!(dump(&mut from, 4096), (0, all.len(), all.clone()));
    // The iterator has moved on: nothing is left.
    assert_eq!(dump(&mut from, 4096), (0, 0, String::new()));
    let mut from = iterator;
    let (code, size, text) = dump(&mut from, all.len());
    assert!(
        code == 0 && size < all.len() && text.ends_with(&format!("left out]\n{}\n", said[1])),
        "{text}"
    );
    let mut from = iterator;
    let (code, size, _) = dump(&mut from, 10);
    assert_eq!((code, size), (INVALID_VALUE, 0));
    ok(cuLogsUnregisterCallback(callback));
    assert_eq!(cuLogsUnregisterCallback(callback), INVALID_VALUE);
    let path = std::env::temp_dir().join(format!("softcuda-logs-{}", std::process::id()));
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the path is a C string; without an iterator all is dumped.
    unsafe { ok(cuLogsDumpToFile(std::ptr::null_mut(), name.as_ptr(), 0)) };
    let written = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert!(written.contains(&all), "{written}");
}

#[test]
fn failing_calls_are_logged() {
    Program::start("logging_program", &[]).finish();
}

#[test]
fn batches_of_prefetches() {
    context();
    let (mut one, mut other, mut stream) = (0, 0, 0);
    ok(cuMemAllocManaged(&mut one, 8192, 1));
    ok(cuMemAllocManaged(&mut other, 4096, 1));
    ok(cuStreamCreate(&mut stream, 0));
    let (addresses, sizes) = ([one, one + 4096, other], [4096; 3]);
    // Device 0, and the host.
    let locations = [[1, 0], [2, 0]];
    let prefetch = |firsts: &[usize], flags, stream| {
        // SAFETY: the arrays are as long as said.
        unsafe {
            let (at, sizes, to) = (addresses.as_ptr(), sizes.as_ptr(), locations.as_ptr());
            let count = firsts.len();
            cuMemPrefetchBatchAsync(at, sizes, 3, to, firsts.as_ptr(), count, flags, stream)
        }
    };
    for firsts in [&[][..], &[1], &[0, 0], &[0, 3]] {
        assert_eq!(prefetch(firsts, 0, stream), INVALID_VALUE, "{firsts:?}");
    }
    assert_eq!(prefetch(&[0], 1, stream), INVALID_VALUE);
    assert_eq!(prefetch(&[0], 0, 0), INVALID_VALUE, "the legacy stream");
    ok(prefetch(&[0, 2], 0, stream));
    let last = |address| {
        let mut device = -9;
        // SAFETY: the attribute has four bytes.
        ok(unsafe { cuMemRangeGetAttribute(&mut device, 4, 4, address, 4096) });
        device
    };
    assert_eq!(addresses.map(last), [0, 0, -1]);
    // SAFETY: the arrays are as long as said.
    unsafe {
        ok(cuMemDiscardBatchAsync(addresses.as_ptr(), sizes.as_ptr(), 3, 0, stream));
        let plain = [allocate(4096)];
        let code = cuMemDiscardBatchAsync(plain.as_ptr(), sizes.as_ptr(), 1, 0, stream);
        assert_eq!(code, INVALID_VALUE);
        let code = cuMemDiscardBatchAsync(addresses.as_ptr(), sizes.as_ptr(), 0, 0, stream);
        assert_eq!(code, INVALID_VALUE);
    }
}

#[test]
fn libraries_have_nothing_that_is_unified() {
    context();
    let (mut library, mut found, mut size) = (0, 0, 0);
    // SAFETY: the texts are C strings.
    unsafe {
        ok(cuLibraryLoadData(&mut library, CODE.as_ptr().cast(), 0, 0, 0, 0, 0, 0));
        let name = c"k".as_ptr();
        assert_eq!(cuLibraryGetManaged(&mut found, &mut size, library, name), NOT_FOUND);
        assert_eq!(cuLibraryGetUnifiedFunction(&mut found, library, name), NOT_FOUND);
        assert_eq!(cuLibraryGetManaged(&mut found, &mut size, 9, name), INVALID_HANDLE);
        let null = std::ptr::null();
        assert_eq!(cuLibraryGetUnifiedFunction(&mut found, library, null), INVALID_VALUE);
    }
}
