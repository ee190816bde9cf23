//! Launches on several devices at once.

mod support;

use support::*;

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
struct OnDevice {
    function: u64,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    each: *const *const u64,
}

unsafe extern "C" {
    fn cuLaunchCooperativeKernelMultiDevice(list: *const OnDevice, count: u32, flags: u32) -> u32;
    safe fn cuStreamBeginCapture_v2(stream: u64, mode: u32) -> u32;
    safe fn cuStreamEndCapture(stream: u64, graph: &mut u64) -> u32;
}

const NO_WAIT_BEFORE: u32 = 1;
const NO_WAIT_AFTER: u32 = 2;
const NOT_READY: u32 = 600;
const INVALID_CONTEXT: u32 = 201;

/// Counts its threads.
const COUNT: &str = "
.version 7.0
.target sm_80
.address_size 64
.visible .entry count(.param .u64 at) {
    .reg .b64 %at;
    ld.param.u64 %at, [at];
    red.global.add.u32 [%at], 1;
    ret;
}
.visible .entry other(.param .u64 at) {
    ret;
}
\0";

/// A context on one of the devices.
struct Device {
    context: u64,
    stream: u64,
    kernels: [u64; 2],
    memory: u64,
}

impl Device {
    fn new(number: i32) -> Self {
        let (mut context, mut stream, mut module) = (0, 0, 0);
        ok(cuCtxCreate_v2(&mut context, 0, number));
        ok(cuStreamCreate(&mut stream, 1));
        // SAFETY: the image and the names end with NUL.
        let kernels = unsafe {
            ok(cuModuleLoadData(&mut module, COUNT.as_ptr()));
            [c"count", c"other"].map(|name| {
                let mut kernel = 0;
                ok(cuModuleGetFunction(&mut kernel, module, name.as_ptr().cast()));
                kernel
            })
        };
        let memory = allocate(64);
        write(memory, &[0; 2]);
        Self { context, stream, kernels, memory }
    }

    fn counted(&self) -> u32 {
        ok(cuCtxSetCurrent(self.context));
        read(self.memory, 1)[0]
    }

    /// Holds the stream up.
    fn hold(&self) {
        ok(cuCtxSetCurrent(self.context));
        ok(cuStreamWaitValue32_v2(self.stream, self.memory + 4, 1, 0));
    }

    fn let_go(&self) {
        ok(cuCtxSetCurrent(self.context));
        write(self.memory + 4, &[1]);
        ok(cuStreamSynchronize(self.stream));
        write(self.memory + 4, &[0]);
    }

    fn is_idle(&self) -> bool {
        let code = cuStreamQuery(self.stream);
        assert!(code == 0 || code == NOT_READY);
        code == 0
    }
}

/// Launches `count` on each, as changed.
fn launch(devices: &[&Device], flags: u32, change: impl Fn(&mut [OnDevice])) -> u32 {
    let arguments: Vec<[*const u64; 1]> =
        devices.iter().map(|device| [&raw const device.memory]).collect();
    let part = |(device, each): (&&Device, &[*const u64; 1])| OnDevice {
        function: device.kernels[0],
        grid: [2, 1, 1],
        block: [4, 2, 1],
        shared: 0,
        stream: device.stream,
        each: each.as_ptr(),
    };
    let mut list: Vec<OnDevice> = devices.iter().zip(&arguments).map(part).collect();
    change(&mut list);
    // SAFETY: the list has so many members, whose arguments live until the call returns.
    unsafe { cuLaunchCooperativeKernelMultiDevice(list.as_ptr(), list.len() as u32, flags) }
}

#[test]
fn one_kernel_on_two_devices() {
    Program::start("program", &[("SOFTCUDA_DEVICES", "2")]).finish();
}

#[test]
#[ignore = "a program for other tests"]
fn program() {
    context();
    let (zero, one) = (Device::new(0), Device::new(1));
    let both = [&zero, &one];
    let wait = || both.iter().for_each(|device| ok(cuStreamSynchronize(device.stream)));
    let counted = || both.map(Device::counted);

    // Nothing begins before all streams have come to it.
    zero.hold();
    ok(launch(&both, 0, |_| ()));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!one.is_idle());
    assert_eq!(counted(), [0, 0]);
    zero.let_go();
    wait();
    assert_eq!(counted(), [16, 16]);

    // Unless that is not wanted; then nothing goes on before all have run.
    zero.hold();
    ok(launch(&both, NO_WAIT_BEFORE, |_| ()));
    while one.counted() != 32 {
        std::thread::yield_now();
    }
    assert!(!one.is_idle());
    assert_eq!(counted(), [16, 32]);
    zero.let_go();
    wait();

    zero.hold();
    ok(launch(&both, NO_WAIT_BEFORE | NO_WAIT_AFTER, |_| ()));
    ok(cuStreamSynchronize(one.stream));
    assert_eq!(counted(), [32, 48]);
    zero.let_go();
    wait();
    assert_eq!(counted(), [48, 48]);

    assert_eq!(launch(&[], 0, |_| ()), INVALID_VALUE);
    assert_eq!(launch(&both, 4, |_| ()), INVALID_VALUE);
    assert_eq!(launch(&[&zero, &zero], 0, |_| ()), INVALID_VALUE, "a device twice");
    for stream in 0..=2 {
        assert_eq!(launch(&both, 0, |list| list[1].stream = stream), INVALID_VALUE, "{stream}");
    }
    assert_eq!(launch(&both, 0, |list| list[1].grid[0] = 3), INVALID_VALUE);
    assert_eq!(launch(&both, 0, |list| list[1].function = one.kernels[1]), INVALID_VALUE);
    let elsewhere = launch(&both, 0, |list| list[1].function = zero.kernels[0]);
    assert_eq!(elsewhere, INVALID_CONTEXT);
    assert_eq!(launch(&[&zero], 0, |list| list[0].grid[0] = 1 << 20), 720, "not all at once");
    ok(cuStreamBeginCapture_v2(one.stream, 0));
    assert_eq!(launch(&both, 0, |_| ()), 900);
    let mut graph = 0;
    assert_eq!(cuStreamEndCapture(one.stream, &mut graph), 901);
    wait();
    assert_eq!(counted(), [48, 48], "what is refused does nothing");
    ok(launch(&[&one], 0, |_| ()));
    wait();
    assert_eq!(counted(), [48, 64]);
}
