//! `cuMemFree` waits for what the device still does with the memory, as the driver's does.

mod support;

use std::ffi::c_void;
use std::io::BufRead;
use std::sync::Arc;

use support::{ENV_PROGRAM, Library, Program, say};

/// Not a test: the program that the other one starts.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        run();
    }
}

/// Has a stream wait for a word of host memory before it fills device memory, and frees that meanwhile.
fn run() {
    let cuda = Arc::new(Library::open("libcuda.so.1"));
    let (mut context, mut stream, mut memory) = (0u64, 0u64, 0u64);
    cuda.must("cuInit", &[0]);
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    cuda.must("cuCtxSetCurrent", &[context]);
    cuda.must("cuStreamCreate", &[&raw mut stream as u64, 1]);
    // Small: it shares a block, of which the driver hears nothing when it is freed.
    cuda.must("cuMemAlloc_v2", &[&raw mut memory as u64, 4096]);
    let (mut word, mut address) = (std::ptr::null_mut::<c_void>(), 0u64);
    cuda.must("cuMemHostAlloc", &[&raw mut word as u64, 4096, 2]);
    cuda.must("cuMemHostGetDevicePointer_v2", &[&raw mut address as u64, word as u64, 0]);
    let word = word.cast::<u32>();
    // SAFETY: the driver gave so much memory, and nobody uses it yet.
    unsafe { word.write_volatile(0) };
    cuda.must("cuStreamWaitValue32_v2", &[stream, address, 1, 1]);
    cuda.must("cuMemsetD32Async", &[memory, 7, 1024, stream]);
    say("ready");
    let mut free = None;
    for line in std::io::stdin().lock().lines() {
        match line.expect("a line").as_str() {
            "free" => {
                let cuda = cuda.clone();
                free = Some(std::thread::spawn(move || {
                    cuda.must("cuCtxSetCurrent", &[context]);
                    cuda.must("cuMemFree_v2", &[memory]);
                    say("freed");
                }));
                say("freeing");
            }
            "go on" => {
                // SAFETY: the word is mapped and aligned; volatile, as the device looks at it.
                unsafe { word.write_volatile(1) };
                free.take().expect("it was begun").join().expect("it is freed");
            }
            other => panic!("what is {other}?"),
        }
    }
    std::process::exit(0);
}

#[test]
fn memory_is_freed_once_the_device_is_through_with_it() {
    let mut program = Program::start();
    assert_eq!(program.ask("free"), "freeing");
    assert_eq!(program.line(2_000), None, "it is freed while the device is about to fill it");
    program.tell("go on");
    assert_eq!(program.line(60_000).as_deref(), Some("freed"));
}
