//! What the tests share: the functions of the driver, and programs that run in processes of their
//! own (the driver's state belongs to a process).

#![allow(dead_code)]

pub(crate) mod graphs;
pub(crate) mod multicast;
pub(crate) mod read_only;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

// The driver is linked in; nothing of it is called as Rust.
use softcuda as _;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const DEVICE_UNAVAILABLE: u32 = 46;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const ILLEGAL_STATE: u32 = 401;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const ILLEGAL_ADDRESS: u32 = 700;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;

pub(crate) const GRANULE: usize = 2 << 20;

unsafe extern "C" {
    pub(crate) safe fn cuInit(flags: u32) -> u32;
    pub(crate) safe fn cuDriverGetVersion(version: &mut i32) -> u32;
    pub(crate) safe fn cuCtxCreate_v2(context: &mut u64, flags: u32, device: i32) -> u32;
    pub(crate) safe fn cuCtxDestroy_v2(context: u64) -> u32;
    pub(crate) safe fn cuCtxSynchronize() -> u32;
    pub(crate) safe fn cuCtxSetCurrent(context: u64) -> u32;
    pub(crate) safe fn cuStreamQuery_ptsz(stream: u64) -> u32;
    pub(crate) safe fn cuMemsetD32Async_ptsz(to: u64, value: u32, count: usize, stream: u64)
    -> u32;
    pub(crate) safe fn cuLaunchHostFunc_ptsz(
        stream: u64,
        function: extern "C" fn(u64),
        data: u64,
    ) -> u32;
    pub(crate) fn cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, size: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, size: usize, stream: u64) -> u32;
    pub(crate) fn cuMemcpy2D_v2(copy: &[u64; 16]) -> u32;
    pub(crate) safe fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize) -> u32;
    pub(crate) safe fn cuMemAlloc_v2(address: &mut u64, size: usize) -> u32;
    pub(crate) safe fn cuMemFree_v2(address: u64) -> u32;
    pub(crate) safe fn cuMemsetD32_v2(address: u64, value: u32, count: usize) -> u32;
    pub(crate) safe fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: u64)
    -> u32;
    pub(crate) fn cuMemcpyHtoD_v2(to: u64, from: *const u8, size: usize) -> u32;
    pub(crate) fn cuMemcpyDtoH_v2(to: *mut u8, from: u64, size: usize) -> u32;
    pub(crate) safe fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, size: usize, stream: u64) -> u32;
    pub(crate) safe fn cuMemHostAlloc(address: &mut u64, size: usize, flags: u32) -> u32;
    pub(crate) safe fn cuMemFreeHost(address: u64) -> u32;
    pub(crate) safe fn cuStreamCreate(stream: &mut u64, flags: u32) -> u32;
    pub(crate) safe fn cuStreamDestroy_v2(stream: u64) -> u32;
    pub(crate) safe fn cuStreamSynchronize(stream: u64) -> u32;
    pub(crate) safe fn cuStreamQuery(stream: u64) -> u32;
    pub(crate) safe fn cuStreamWaitEvent(stream: u64, event: u64, flags: u32) -> u32;
    pub(crate) safe fn cuStreamWaitValue32_v2(
        stream: u64,
        address: u64,
        value: u32,
        flags: u32,
    ) -> u32;
    pub(crate) safe fn cuStreamWriteValue32_v2(
        stream: u64,
        address: u64,
        value: u32,
        flags: u32,
    ) -> u32;
    pub(crate) safe fn cuLaunchHostFunc(
        stream: u64,
        function: extern "C" fn(u64),
        data: u64,
    ) -> u32;
    pub(crate) safe fn cuEventCreate(event: &mut u64, flags: u32) -> u32;
    pub(crate) safe fn cuEventDestroy_v2(event: u64) -> u32;
    pub(crate) safe fn cuEventRecord(event: u64, stream: u64) -> u32;
    pub(crate) safe fn cuEventQuery(event: u64) -> u32;
    pub(crate) safe fn cuEventSynchronize(event: u64) -> u32;
    pub(crate) safe fn cuEventElapsedTime_v2(milliseconds: &mut f32, start: u64, end: u64) -> u32;
    pub(crate) fn cuModuleLoadData(module: &mut u64, image: *const u8) -> u32;
    pub(crate) fn cuModuleLoadDataEx(
        module: &mut u64,
        image: *const u8,
        count: u32,
        names: *const u32,
        values: *mut u64,
    ) -> u32;
    pub(crate) safe fn cuModuleUnload(module: u64) -> u32;
    pub(crate) fn cuModuleGetFunction(function: &mut u64, module: u64, name: *const u8) -> u32;
    pub(crate) fn cuModuleGetGlobal_v2(
        address: &mut u64,
        size: &mut usize,
        module: u64,
        name: *const u8,
    ) -> u32;
    pub(crate) fn cuLaunchKernel(
        function: u64,
        grid_x: u32,
        grid_y: u32,
        grid_z: u32,
        block_x: u32,
        block_y: u32,
        block_z: u32,
        shared: u32,
        stream: u64,
        parameters: *const *const u8,
        extra: *const u64,
    ) -> u32;
    pub(crate) safe fn cuMemAddressReserve(
        address: &mut u64,
        size: usize,
        alignment: usize,
        hint: u64,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMemAddressFree(address: u64, size: usize) -> u32;
    pub(crate) safe fn cuMemCreate(
        handle: &mut u64,
        size: usize,
        properties: &Properties,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMemRelease(handle: u64) -> u32;
    pub(crate) safe fn cuMemMap(
        address: u64,
        size: usize,
        offset: usize,
        handle: u64,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMemUnmap(address: u64, size: usize) -> u32;
    pub(crate) safe fn cuMemSetAccess(
        address: u64,
        size: usize,
        access: &Access,
        count: usize,
    ) -> u32;
    pub(crate) safe fn cuMemExportToShareableHandle(
        descriptor: &mut i32,
        handle: u64,
        kind: u32,
        flags: u64,
    ) -> u32;
    pub(crate) safe fn cuMemImportFromShareableHandle(handle: &mut u64, fd: u64, kind: u32) -> u32;
    pub(crate) safe fn cuCheckpointProcessGetRestoreThreadId(pid: i32, thread: &mut i32) -> u32;
    pub(crate) safe fn cuCheckpointProcessGetState(pid: i32, state: &mut u32) -> u32;
    pub(crate) safe fn cuCheckpointProcessLock(pid: i32, arguments: &[u64; 8]) -> u32;
    pub(crate) safe fn cuCheckpointProcessCheckpoint(pid: i32, arguments: &[u64; 8]) -> u32;
    pub(crate) safe fn cuCheckpointProcessRestore(pid: i32, arguments: &[u64; 8]) -> u32;
    pub(crate) safe fn cuCheckpointProcessUnlock(pid: i32, arguments: &[u64; 8]) -> u32;
}

/// `CUmemAllocationProp`.
#[repr(C)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handle_types: u32,
    pub(crate) location_kind: u32,
    pub(crate) location: i32,
    pub(crate) rest: [u64; 2],
}

/// `CUmemAccessDesc`.
#[repr(C)]
pub(crate) struct Access {
    pub(crate) location_kind: u32,
    pub(crate) location: i32,
    pub(crate) flags: u32,
}

/// Device 0, shareable as a descriptor.
pub(crate) const SHAREABLE: Properties =
    Properties { kind: 1, handle_types: 1, location_kind: 1, location: 0, rest: [0; 2] };
pub(crate) const READ_WRITE: Access = Access { location_kind: 1, location: 0, flags: 3 };

/// Fails the test unless the call succeeded.
#[track_caller]
pub(crate) fn ok(code: u32) {
    assert_eq!(code, 0, "CUDA error {code}");
}

/// Initialises and makes a context current.
#[track_caller]
pub(crate) fn context() -> u64 {
    let mut context = 0;
    ok(cuInit(0));
    ok(cuCtxCreate_v2(&mut context, 0, 0));
    context
}

#[track_caller]
pub(crate) fn allocate(size: usize) -> u64 {
    let mut address = 0;
    ok(cuMemAlloc_v2(&mut address, size));
    address
}

#[track_caller]
pub(crate) fn used() -> usize {
    let (mut free, mut total) = (0, 0);
    ok(cuMemGetInfo_v2(&mut free, &mut total));
    total - free
}

#[track_caller]
pub(crate) fn write(to: u64, values: &[u32]) {
    // SAFETY: the source is the slice itself.
    ok(unsafe { cuMemcpyHtoD_v2(to, values.as_ptr().cast(), size_of_val(values)) });
}

#[track_caller]
pub(crate) fn read(from: u64, count: usize) -> Vec<u32> {
    let mut values = vec![0; count];
    // SAFETY: the destination is the vector itself.
    ok(unsafe { cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), from, 4 * count) });
    values
}

/// Shareable memory, mapped and accessible: handle and address.
#[track_caller]
pub(crate) fn map_new(size: usize) -> (u64, u64) {
    let (mut handle, mut address) = (0, 0);
    ok(cuMemCreate(&mut handle, size, &SHAREABLE, 0));
    ok(cuMemAddressReserve(&mut address, size, 0, 0, 0));
    ok(cuMemMap(address, size, 0, handle, 0));
    ok(cuMemSetAccess(address, size, &READ_WRITE, 1));
    (handle, address)
}

/// A program in a process of its own: a test that is ignored otherwise. They talk in lines.
pub(crate) struct Program {
    child: Guarded,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    /// Starts the ignored test of this name in this test binary.
    pub(crate) fn start(name: &str, environment: &[(&str, &str)]) -> Program {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--ignored", "--nocapture", "--quiet"])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let mut child = Guarded(child.unwrap());
        let input = child.0.stdin.take().unwrap();
        let output = BufReader::new(child.0.stdout.take().unwrap());
        Program { child, input, output }
    }

    /// Takes everything of it off the device, and brings it back.
    pub(crate) fn checkpoint_and_restore(&self) {
        const NOTHING: [u64; 8] = [0; 8];
        let pid = self.pid();
        ok(cuCheckpointProcessLock(pid, &NOTHING));
        ok(cuCheckpointProcessCheckpoint(pid, &NOTHING));
        ok(cuCheckpointProcessRestore(pid, &NOTHING));
        ok(cuCheckpointProcessUnlock(pid, &NOTHING));
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.0.id() as i32
    }

    /// Has the program go on.
    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
    }

    /// The next thing that the program says.
    #[track_caller]
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "the program has ended");
            if let Some((_, said)) = line.split_once("say: ") {
                return said.trim().to_owned();
            }
        }
    }

    /// Waits for the end, which must be a success.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Program { mut child, input, output } = self;
        drop(input);
        let rest: Vec<String> = output.lines().map(Result::unwrap).collect();
        assert!(child.0.wait().unwrap().success(), "{}", rest.join("\n"));
    }

    /// Ends the program at once.
    pub(crate) fn kill(self) {}
}

/// What the ignored test of this name, which must succeed, writes to standard error with a setting.
#[track_caller]
pub(crate) fn mistake(name: &str, variable: &str, value: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture", "--quiet"])
        .env(variable, value)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A process that is killed with the test.
struct Guarded(Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// In a program: says something to the test.
pub(crate) fn say(text: impl std::fmt::Display) {
    println!("say: {text}");
}

/// In a program: waits for the next line of the test.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}
