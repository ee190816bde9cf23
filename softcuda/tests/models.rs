//! Models of GPUs that softcuda presents its devices as.

mod support;

use support::*;

unsafe extern "C" {
    safe fn cuDeviceGetCount(count: &mut i32) -> u32;
    fn cuDeviceGetName(name: *mut u8, size: i32, device: i32) -> u32;
    safe fn cuDeviceTotalMem_v2(bytes: &mut usize, device: i32) -> u32;
    safe fn cuDeviceGetAttribute(value: &mut i32, attribute: u32, device: i32) -> u32;
    safe fn cuDeviceComputeCapability(major: &mut i32, minor: &mut i32, device: i32) -> u32;
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
    safe fn cuLibraryGetModule(module: &mut u64, library: u64) -> u32;
    safe fn cuFuncGetAttribute(value: &mut i32, attribute: u32, function: u64) -> u32;
    safe fn cuFuncSetAttribute(function: u64, attribute: u32, value: i32) -> u32;
    fn cuLaunchKernelEx(
        config: &Config,
        function: u64,
        each: *const *const u8,
        extra: *const u64,
    ) -> u32;
    fn cuOccupancyMaxActiveClusters(out: &mut i32, function: u64, config: &Config) -> u32;
    fn cuOccupancyMaxPotentialClusterSize(out: &mut i32, function: u64, config: &Config) -> u32;
    safe fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: &mut i32,
        function: u64,
        threads: i32,
        shared: usize,
    ) -> u32;
}

const NOTHING: [u64; 8] = [0; 8];
const OTHER_TARGET: u32 = 218;
const HOPPER: &str = "NVIDIA H100 80GB HBM3,9.0,132,80G";
const BOTH: &str = "NVIDIA H100 80GB HBM3,9.0,132,80G;NVIDIA L4,8.9,58,24G";

#[track_caller]
fn attribute(number: u32, device: i32) -> i32 {
    let mut value = -1;
    ok(cuDeviceGetAttribute(&mut value, number, device));
    value
}

fn ptx(target: &str) -> Vec<u8> {
    let text =
        format!(".version 8.8\n.target {target}\n.address_size 64\n.entry k() {{ ret; }}\n\0");
    text.into_bytes()
}

fn load(target: &str) -> (u32, u64) {
    let mut module = 0;
    // SAFETY: the text ends in NUL.
    (unsafe { cuModuleLoadData(&mut module, ptx(target).as_ptr()) }, module)
}

/// Name, capability, multiprocessors and memory of each device.
fn describe() -> String {
    let mut count = 0;
    ok(cuDeviceGetCount(&mut count));
    let one = |device| {
        let (mut name, mut bytes, mut major, mut minor) = ([0; 64], 0, 0, 0);
        // SAFETY: the buffer is as large as said.
        ok(unsafe { cuDeviceGetName(name.as_mut_ptr(), 64, device) });
        ok(cuDeviceTotalMem_v2(&mut bytes, device));
        ok(cuDeviceComputeCapability(&mut major, &mut minor, device));
        assert_eq!((attribute(75, device), attribute(76, device)), (major, minor));
        let name = std::ffi::CStr::from_bytes_until_nul(&name).unwrap().to_str().unwrap();
        format!("{name},{major}.{minor},{},{}G", attribute(16, device), bytes >> 30)
    };
    (0..count).map(one).collect::<Vec<_>>().join(";")
}

#[test]
#[ignore = "a program for other tests"]
fn describing_program() {
    ok(cuInit(0));
    say(describe());
}

#[test]
fn devices_are_what_is_asked_for() {
    let described = |environment: &[(&str, &str)]| {
        let mut program = Program::start("describing_program", environment);
        let said = program.hear();
        program.finish();
        said
    };
    assert_eq!(described(&[("SOFTCUDA_DEVICE", HOPPER)]), HOPPER);
    assert_eq!(described(&[("SOFTCUDA_DEVICE", BOTH)]), BOTH);
    // The number of devices has its own setting: the last model stands for all beyond the list.
    let [count, fewer] = ["3", "1"].map(|count| ("SOFTCUDA_DEVICES", count));
    let [first, last] = BOTH.split(';').collect::<Vec<_>>().try_into().unwrap();
    assert_eq!(described(&[("SOFTCUDA_DEVICE", BOTH), count]), [first, last, last].join(";"));
    assert_eq!(described(&[("SOFTCUDA_DEVICE", BOTH), fewer]), first);
    let plain = described(&[("SOFTCUDA_MEMORY", "3G")]);
    assert!(plain.starts_with("softcuda,8.0,") && plain.ends_with(",3G"), "{plain}");
}

#[test]
#[ignore = "a program for other tests"]
fn mistaken_program() {
    assert_eq!(cuInit(0), INVALID_VALUE);
}

#[test]
fn a_malformed_model_is_an_error() {
    for (value, says) in [
        ("NVIDIA H100,9.0,132", "3 fields"),
        ("NVIDIA H100,9.7,132,80G", "9.7 is none of 5.0"),
        ("NVIDIA H100,9.0,none,80G", "number of SMs"),
        ("NVIDIA H100,9.0,132,much", "memory"),
    ] {
        let said = mistake("mistaken_program", "SOFTCUDA_DEVICE", value);
        assert!(said.contains("softcuda: SOFTCUDA_DEVICE: ") && said.contains(says), "{said}");
    }
}

#[test]
#[ignore = "a program for other tests"]
fn limited_program() {
    context();
    // Threads and shared memory of a multiprocessor, shared memory and registers of a block, blocks.
    assert_eq!([39, 81, 97, 106].map(|n| attribute(n, 0)), [2048, 228 << 10, 227 << 10, 32]);
    assert_eq!([39, 81, 97, 106].map(|n| attribute(n, 1)), [1536, 100 << 10, 99 << 10, 24]);
    let [on_first, on_second] = [0, 1].map(|device| {
        let mut context = 0;
        ok(cuCtxCreate_v2(&mut context, 0, device));
        let (code, module) = load("sm_80");
        ok(code);
        let (mut function, mut blocks, mut version, mut of_ptx) = (0, 0, 0, 0);
        // SAFETY: the name is a C string.
        ok(unsafe { cuModuleGetFunction(&mut function, module, c"k".as_ptr().cast()) });
        ok(cuFuncGetAttribute(&mut version, 6, function));
        ok(cuFuncGetAttribute(&mut of_ptx, 5, function));
        assert_eq!(of_ptx, 80);
        ok(cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, function, 256, 40 << 10));
        let more = cuFuncSetAttribute(function, 8, 200 << 10);
        (version, blocks, more)
    });
    assert_eq!((on_first, on_second), ((90, 5, 0), (89, 2, INVALID_VALUE)));
}

#[test]
fn limits_are_those_of_the_model() {
    Program::start("limited_program", &[("SOFTCUDA_DEVICE", BOTH)]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn loading_program() {
    context();
    for (target, on_hopper) in [
        ("sm_75", true),
        ("sm_90", true),
        ("sm_90a", true),
        ("sm_80a", false),
        ("sm_100", false),
        ("sm_100a", false),
        ("sm_120", false),
    ] {
        assert_eq!(load(target).0, if on_hopper { 0 } else { OTHER_TARGET }, "{target}");
    }
    // Where a library is loaded in a context of another device, it is looked at again.
    let (mut library, mut module, mut context) = (0, 0, 0);
    // SAFETY: the text ends in NUL.
    let code = unsafe { cuLibraryLoadData(&mut library, ptx("sm_90").as_ptr(), 0, 0, 0, 0, 0, 0) };
    ok(code);
    ok(cuLibraryGetModule(&mut module, library));
    ok(cuCtxCreate_v2(&mut context, 0, 1));
    assert_eq!(cuLibraryGetModule(&mut module, library), OTHER_TARGET);
    assert_eq!(load("sm_90").0, OTHER_TARGET);
    ok(load("sm_89").0);
}

#[test]
fn ptx_for_other_devices_is_refused() {
    Program::start("loading_program", &[("SOFTCUDA_DEVICE", BOTH)]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn restored_program() {
    context();
    write(allocate(4), &[7]);
    say("ready");
    listen();
}

#[test]
#[ignore = "a program for other tests"]
fn restoring_program() {
    let pid = listen().parse().unwrap();
    say(cuCheckpointProcessRestore(pid, &NOTHING));
}

#[test]
fn a_process_is_restored_to_the_same_kind_of_device_only() {
    let hopper = [("SOFTCUDA_DEVICE", HOPPER)];
    let mut program = Program::start("restored_program", &hopper);
    assert_eq!(program.hear(), "ready");
    ok(cuCheckpointProcessLock(program.pid(), &NOTHING));
    ok(cuCheckpointProcessCheckpoint(program.pid(), &NOTHING));
    let fewer = [("SOFTCUDA_DEVICE", "NVIDIA H100 80GB HBM3,9.0,114,80G")];
    for (environment, code) in [(&fewer[..], NOT_SUPPORTED), (&[], NOT_SUPPORTED), (&hopper, 0)] {
        let mut restoring = Program::start("restoring_program", environment);
        restoring.tell(&program.pid().to_string());
        assert_eq!(restoring.hear(), code.to_string(), "{environment:?}");
        restoring.finish();
    }
    ok(cuCheckpointProcessUnlock(program.pid(), &NOTHING));
    program.tell("end");
    program.finish();
}

const INVALID_CLUSTER_SIZE: u32 = 912;

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

/// `sizes(out)` stores how many blocks the cluster of each block has; `fours` has to have four.
const CLUSTERS: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry sizes(.param .u64 p0)
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [p0]; mov.u32 %r0, %ctaid.x; mad.wide.u32 %d1, %r0, 4, %d0;
    mov.u32 %r1, %cluster_nctarank; st.global.u32 [%d1], %r1; ret;
}
.visible .entry fours(.param .u64 p0) .explicitcluster .reqnctapercluster 4, 1, 1
{
    .reg .b64 %d<2>; .reg .b32 %r<2>;
    ld.param.u64 %d0, [p0]; mov.u32 %r0, %ctaid.x; mad.wide.u32 %d1, %r0, 4, %d0;
    mov.u32 %r1, %cluster_nctarank; st.global.u32 [%d1], %r1; ret;
}
\0";

#[test]
#[ignore = "a program for other tests"]
fn clustered_program() {
    context();
    let (mut module, mut sizes, mut fours) = (0, 0, 0);
    // SAFETY: texts and names end in NUL.
    unsafe {
        ok(cuModuleLoadData(&mut module, CLUSTERS.as_ptr()));
        ok(cuModuleGetFunction(&mut sizes, module, c"sizes".as_ptr().cast()));
        ok(cuModuleGetFunction(&mut fours, module, c"fours".as_ptr().cast()));
    }
    let data = allocate(256);
    // What a launch of so many blocks gives, what it stored, and both answers about occupancy.
    let run = |function: u64, blocks: u32, cluster: Option<u32>, cooperative: bool| {
        let size = u64::from(cluster.unwrap_or_default());
        let attributes = [
            [2, cooperative.into(), 0, 0, 0, 0, 0, 0, 0],
            [4, size | 1 << 32, 1, 0, 0, 0, 0, 0, 0],
        ];
        let count = 1 + u32::from(cluster.is_some());
        let (grid, block, attributes) = ([blocks, 1, 1], [32, 1, 1], attributes.as_ptr());
        let config = Config { grid, block, shared: 0, stream: 0, attributes, count };
        ok(cuMemsetD32_v2(data, 99, 32));
        let each = [(&raw const data).cast()];
        let (mut active, mut most) = (-1, -1);
        // SAFETY: the attributes and the parameters are there for the calls.
        unsafe {
            let code = cuLaunchKernelEx(&config, function, each.as_ptr(), std::ptr::null());
            cuOccupancyMaxActiveClusters(&mut active, function, &config);
            cuOccupancyMaxPotentialClusterSize(&mut most, function, &config);
            ok(cuCtxSynchronize());
            (code, read(data, 17)[..=blocks as usize].to_vec(), active, most)
        }
    };
    let launched = |blocks: usize, size: u32| {
        let mut words = vec![size; blocks];
        words.push(99);
        words
    };
    let (code, words, alone, most) = run(sizes, 8, Some(1), false);
    assert_eq!((code, words, most), (0, launched(8, 1), 8));
    assert_eq!(run(sizes, 8, Some(2), false), (0, launched(8, 2), alone / 2, 8));
    assert_eq!(run(sizes, 16, Some(8), false), (0, launched(16, 8), alone / 8, 8));
    let refused = |function, blocks, cluster, cooperative| {
        let (code, words, ..) = run(function, blocks, cluster, cooperative);
        assert_eq!(words, vec![99; blocks as usize + 1]);
        code
    };
    assert_eq!(refused(sizes, 7, Some(2), false), INVALID_CLUSTER_SIZE);
    assert_eq!(refused(sizes, 16, Some(16), false), INVALID_CLUSTER_SIZE);
    assert_eq!(refused(sizes, 8, Some(2), true), NOT_SUPPORTED);
    // `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`
    ok(cuFuncSetAttribute(sizes, 14, 1));
    assert_eq!(run(sizes, 16, Some(16), false), (0, launched(16, 16), alone / 16, 16));

    // The shape that the kernel has.
    let mut value = 0;
    for (number, expected) in [(10, 1), (11, 4), (12, 1), (13, 1), (14, 0)] {
        ok(cuFuncGetAttribute(&mut value, number, fours));
        assert_eq!(value, expected, "attribute {number}");
    }
    for cluster in [None, Some(4)] {
        let (code, words, ..) = run(fours, 8, cluster, false);
        assert_eq!((code, words), (0, launched(8, 4)));
    }
    assert_eq!(refused(fours, 8, Some(2), false), INVALID_CLUSTER_SIZE);
    assert_eq!(refused(fours, 6, None, false), INVALID_CLUSTER_SIZE);
}

#[test]
fn clusters_have_several_blocks_where_the_model_has_them() {
    Program::start("clustered_program", &[("SOFTCUDA_DEVICE", HOPPER)]).finish();
}
