//! Once a kernel has broken its context, allocations fail with its error, as the driver's do: also those that the shim
//! serves from memory that it has.

mod support;

use std::io::BufRead;

use support::{ENV_PROGRAM, Library, Program, say};

/// Writes to an address that nothing is at.
const PTX: &std::ffi::CStr = c"
.version 8.0
.target sm_70
.address_size 64
.visible .entry stray()
{
    .reg .b64 %rd<2>;
    mov.u64 %rd1, 64;
    st.global.u32 [%rd1], 7;
    ret;
}
";
/// Fits into the block that the first allocation has made.
const SMALL: u64 = 4096;
/// Has a block of its own.
const LARGE: u64 = 4 << 20;
/// `CUDA_ERROR_ILLEGAL_ADDRESS`
const ILLEGAL_ADDRESS: &str = "700";

/// Not a test: the program that the others start.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        run();
    }
}

/// Allocates, captures and breaks its context as it is told to, and says with which codes.
fn run() {
    let cuda = Library::open("libcuda.so.1");
    let (mut context, mut module, mut function) = (0u64, 0u64, 0u64);
    let (mut stream, mut memory, mut pitch) = (0u64, 0u64, 0u64);
    cuda.must("cuInit", &[0]);
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    cuda.must("cuCtxSetCurrent", &[context]);
    cuda.must("cuModuleLoadData", &[&raw mut module as u64, PTX.as_ptr() as u64]);
    let name = c"stray".as_ptr() as u64;
    cuda.must("cuModuleGetFunction", &[&raw mut function as u64, module, name]);
    // One that the legacy stream waits for.
    cuda.must("cuStreamCreate", &[&raw mut stream as u64, 0]);
    cuda.must("cuMemAlloc_v2", &[&raw mut memory as u64, SMALL]);
    say("ready");
    let (out, row) = (&raw mut memory as u64, &raw mut pitch as u64);
    for line in std::io::stdin().lock().lines() {
        let code = match line.expect("a line").as_str() {
            "small" => cuda.call("cuMemAlloc_v2", &[out, SMALL]),
            "large" => cuda.call("cuMemAlloc_v2", &[out, LARGE]),
            "rows" => cuda.call("cuMemAllocPitch_v2", &[out, row, 100, 3, 4]),
            "capture" => cuda.call("cuStreamBeginCapture_v2", &[stream, 0]),
            "end" => cuda.call("cuStreamEndCapture", &[stream, out]),
            "break" => {
                cuda.must("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]);
                cuda.call("cuCtxSynchronize", &[])
            }
            "another" => {
                cuda.must("cuCtxCreate_v2", &[&raw mut context as u64, 0, 0]);
                cuda.call("cuMemAlloc_v2", &[out, SMALL])
            }
            other => panic!("what is {other}?"),
        };
        say(&code.to_string());
    }
    std::process::exit(0);
}

#[test]
fn a_broken_context_gives_no_memory() {
    let mut program = Program::start();
    assert_eq!(program.ask("break"), ILLEGAL_ADDRESS);
    for what in ["small", "large", "rows", "small"] {
        assert_eq!(program.ask(what), ILLEGAL_ADDRESS, "{what}");
    }
    // Others do.
    assert_eq!(program.ask("another"), "0");
}

#[test]
fn memory_is_given_during_a_capture_and_spoils_none() {
    let mut program = Program::start();
    assert_eq!(program.ask("capture"), "0");
    for what in ["small", "large", "rows"] {
        assert_eq!(program.ask(what), "0", "{what}");
    }
    assert_eq!(program.ask("end"), "0");
}
