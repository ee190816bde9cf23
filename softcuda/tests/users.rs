//! Programs that know nothing of softcuda: they load `libcuda.so.1`, find the library here, and run
//! unchanged.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaFunction, DriverError, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

#[path = "../../tests/src/skip.rs"]
#[expect(unreachable_pub, reason = "the crate that it is of exports it")]
mod skip;
use skip::skip;

/// A folder with the library under the name that programs look for, for `LD_LIBRARY_PATH`.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    // Beside the test; the one in the folder above may be older.
    let built = test.with_file_name("libsoftcuda.so");
    assert!(built.exists(), "{} is built with the tests", built.display());
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    // By both names: a program may ask for the second first, and find that of the machine.
    for name in ["libcuda.so.1", "libcuda.so"] {
        let link = folder.join(name);
        if !link.exists() {
            std::os::unix::fs::symlink(&built, link).expect("a link");
        }
    }
    folder
}

/// Runs a command with the library; fails the test unless it succeeds.
fn succeeds(command: &mut Command) {
    let folder = library();
    let output = command.env("LD_LIBRARY_PATH", &folder).output().expect("it starts");
    let _ = std::fs::remove_dir_all(&folder);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    print!("{}", text(&output.stdout));
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
}

#[test]
fn programs_on_cudarc_run() {
    let test = std::env::current_exe().expect("the test has a path");
    let arguments = ["--exact", "cudarc_program", "--ignored", "--nocapture"];
    succeeds(Command::new(test).args(arguments));
}

#[test]
fn programs_on_cuda_bindings_run() {
    // The machine's own, or that of `cargo xtask test`.
    let own = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).with_file_name("python/bin/python");
    let has_bindings = |python: &PathBuf| {
        let import = Command::new(python).args(["-c", "import cuda.bindings.driver"]).output();
        import.is_ok_and(|output| output.status.success())
    };
    let Some(python) = [PathBuf::from("python3"), own].into_iter().find(has_bindings) else {
        return skip("no python3 with cuda-bindings: run `cargo xtask test`");
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/users/bindings.py");
    succeeds(Command::new(python).arg(script));
}

const PTX: &str = "
.version 7.0
.target sm_80
.address_size 64

// out[i] = a * x[i] + out[i]
.visible .entry axpy(.param .u64 p_out, .param .u64 p_x, .param .f32 p_a, .param .u32 p_count)
{
    .reg .pred %p;
    .reg .b32 %r<5>;
    .reg .f32 %f<4>;
    .reg .b64 %rd<6>;
    ld.param.u64 %rd1, [p_out];
    ld.param.u64 %rd2, [p_x];
    ld.param.f32 %f1, [p_a];
    ld.param.u32 %r1, [p_count];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r2, %r2, %r3, %r4;
    setp.ge.u32 %p, %r2, %r1;
    @%p ret;
    mul.wide.u32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    ld.global.f32 %f3, [%rd5];
    fma.rn.f32 %f2, %f1, %f3, %f2;
    st.global.f32 [%rd4], %f2;
    ret;
}
";

#[test]
#[ignore = "a program of its own, which another test starts"]
fn cudarc_program() {
    let context = CudaContext::new(0).expect("a context");
    assert_eq!(context.name().expect("a name"), "softcuda");
    let axpy = context
        .load_module(Ptx::from_src(PTX))
        .and_then(|module| module.load_function("axpy"))
        .expect("the kernel");
    streams(&context, &axpy).expect("streams");
    graphs(&context, &axpy).expect("graphs");
    assert!(context.load_module(Ptx::from_src("no PTX")).is_err());
    context.synchronize().expect("the context is sound");
}

/// Copies, launches, and events between two streams.
fn streams(context: &Arc<CudaContext>, axpy: &CudaFunction) -> Result<(), DriverError> {
    let x: Vec<f32> = (0..1000).map(|i| i as f32).collect();
    let stream = context.default_stream();
    let on_device = stream.clone_htod(&x)?;
    let mut out = stream.alloc_zeros::<f32>(x.len())?;
    let other = stream.fork()?;
    let start = other.record_event(None)?;
    for factor in [2.0f32, 3.0] {
        let count = x.len() as u32;
        let mut launch = other.launch_builder(axpy);
        launch.arg(&mut out).arg(&on_device).arg(&factor).arg(&count);
        // SAFETY: the arguments are those of the kernel, and the arrays have that length.
        unsafe { launch.launch(LaunchConfig::for_num_elems(count)) }?;
    }
    let end = other.record_event(None)?;
    stream.join(&other)?;
    let five: Vec<f32> = x.iter().map(|x| 5.0 * x).collect();
    assert_eq!(stream.clone_dtoh(&out)?, five);
    end.synchronize()?;
    assert!(end.is_complete() && start.is_complete());

    let copy = stream.clone_dtod(&out)?;
    stream.memset_zeros(&mut out)?;
    assert_eq!(stream.clone_dtoh(&out)?, vec![0.0; x.len()]);
    assert_eq!(stream.clone_dtoh(&copy.slice(10..20))?, five[10..20]);
    Ok(())
}

fn graphs(context: &Arc<CudaContext>, axpy: &CudaFunction) -> Result<(), DriverError> {
    // The events that follow each array belong to work outside of the capture.
    // SAFETY: one stream only.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let x = stream.clone_htod(&[1.0f32; 64])?;
    let mut out = stream.clone_htod(&[0.0f32; 64])?;
    stream.synchronize()?;
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
    let mut launch = stream.launch_builder(axpy);
    launch.arg(&mut out).arg(&x).arg(&0.5f32).arg(&64u32);
    // SAFETY: as above.
    unsafe { launch.launch(LaunchConfig::for_num_elems(64)) }?;
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream.end_capture(flags)?.expect("something was captured");
    assert_eq!(stream.clone_dtoh(&out)?, [0.0; 64]);
    for round in 1..4u8 {
        graph.launch()?;
        assert_eq!(stream.clone_dtoh(&out)?, [0.5 * f32::from(round); 64]);
    }
    Ok(())
}
