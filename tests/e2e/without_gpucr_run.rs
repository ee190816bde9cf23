//! Programs that were not started with `gpucr run`, and programs that cannot be dumped.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, Started, binary, finish, refused, show, until};

/// A workload on the software driver alone, with no shim in front of it.
fn bare(lab: &Lab, args: &[&str]) -> Result<Command> {
    std::fs::copy(binary("libsoftcuda.so"), lab.path("libcuda.so.1"))?;
    let mut command = Command::new(binary("workload"));
    command.args(args).env("LD_LIBRARY_PATH", lab.path(""));
    Ok(command)
}

/// Starts such a workload.
fn started_bare(lab: &Lab) -> Result<Program> {
    let command = bare(lab, &["sgd", "--steps", "60", "--step-delay-ms", "20"])?;
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    Ok(program)
}

#[test]
fn driver_and_criu_alone_carry_a_program() -> Result<()> {
    let plain = Lab::new();
    let mut uninterrupted = plain.start("sgd", &["--steps", "60"])?;
    uninterrupted.result()?;
    let lab = Lab::new();
    let program = started_bare(&lab)?;
    let image = lab.path("image");
    let report = lab.dump(&program, &image, &[])?;
    ensure!(report["protocol"] == "driver" && report["copied"] == "driver", "{report}");
    ensure!(report["bulk_bytes"] == 0, "{report}");
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == uninterrupted.series(), "differs:\n{}", program.output());
    Ok(())
}

/// The workload of multicast objects checks itself: the result depends on how many devices there are.
#[test]
fn processes_sum_their_memory_by_a_multicast_object() -> Result<()> {
    let mut results = Vec::new();
    for devices in ["1", "3"] {
        for lookup in [&[][..], &["--get-proc-address"]] {
            let lab = Lab::new();
            let mut command = bare(&lab, &[&["multicast", "--steps", "60"][..], lookup].concat())?;
            command.env("SOFTCUDA_DEVICE", "NVIDIA H100,9.0,4,1G").env("SOFTCUDA_DEVICES", devices);
            results.push(lab.spawn(command, "log")?.result()?);
        }
    }
    ensure!(results[0] == results[1] && results[2] == results[3], "{results:?}");
    ensure!(results[0] != results[2], "{results:?}");
    Ok(())
}

/// Nobody dumps a program whose host memory is not all there: what is missing would be zeros in the image.
#[test]
fn a_program_that_lacks_host_memory_is_not_dumped() -> Result<()> {
    let lab = Lab::new();
    let mut program = started_bare(&lab)?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    let mut command = lab.gpucr();
    command.args(["restore", "--on-demand", "--ready-file", "ready", "image"]);
    command.envs([("GPUCR_FAULT", "hold:stream"), ("GPUCR_FAULT_FILE", "go on")]);
    let restore = Started::spawn(&mut command)?;
    until("it runs", || lab.path("ready").exists())?;
    let dump = ["dump", "--pid", &program.pid.to_string(), "-R", "-o", "early"];
    refused(&lab.run(dump)?, 1, &["at work on"])?;
    std::fs::write(lab.path("go on"), "")?;
    ensure!(restore.wait_with_output()?.status.success());
    Ok(())
}

#[test]
fn an_image_of_another_driver_build_is_refused() -> Result<()> {
    let lab = Lab::new();
    let mut program = started_bare(&lab)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    // The padding of an ELF file's identification: another file, which loads all the same.
    let driver = std::fs::File::options().write(true).open(lab.path("libcuda.so.1"))?;
    driver.write_all_at(&[1], 15)?;
    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.code() == Some(3), "{}", show(&output));
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(message.contains("driver") && message.contains("Nothing was changed"), "{message}");
    ensure!(!Path::new(&format!("/proc/{}", program.pid)).exists());
    driver.write_all_at(&[0], 15)?;
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    Ok(())
}

#[test]
fn when_one_of_several_processes_cannot_be_locked_all_run_on() -> Result<()> {
    let plain = Lab::new();
    let mut uninterrupted = plain.start("family", &["--steps", "100"])?;
    uninterrupted.result()?;
    for fault in ["cuCheckpointProcessLock:2:600", "cuCheckpointProcessCheckpoint:3:999"] {
        let lab = Lab::new();
        let mut program = lab.at_work("family", &["--steps", "100"])?;
        let mut command = lab.gpucr();
        command.args(["dump", "--pid", &program.pid.to_string(), "-o", "image"]);
        let output = finish(command.env("SOFTCUDA_FAULT", fault))?;
        ensure!(output.status.code() == Some(1), "{fault}: {}", show(&output));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(message.contains("rolled back"), "{fault}: {message}");
        program.result()?;
        ensure!(program.series() == uninterrupted.series(), "{fault}: {}", program.output());
    }
    Ok(())
}

/// Run as a program of its own by the test below: it shares device memory with the process that has the
/// descriptor.
#[test]
#[ignore = "a helper process of another test"]
fn sharing_program() -> Result<()> {
    use cudarc::driver::sys::{
        CUmemAllocationHandleType as Handle, CUmemAllocationType as Kind, CUmemLocation,
        CUmemLocationType as Location, CUmemPoolProps,
    };
    let properties = CUmemPoolProps {
        allocType: Kind::CU_MEM_ALLOCATION_TYPE_PINNED,
        handleTypes: Handle::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        location: CUmemLocation { type_: Location::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
        win32SecurityAttributes: std::ptr::null_mut(),
        maxSize: 0,
        usage: 0,
        reserved: [0; 54],
    };
    // SAFETY: the functions are the driver API's, with the types of its header, and every pointer
    // is a place of the right type.
    unsafe {
        let cuda = libloading::Library::new("libcuda.so.1")?;
        let init: libloading::Symbol<unsafe extern "C" fn(u32) -> i32> = cuda.get(b"cuInit\0")?;
        ensure!(init(0) == 0, "cuInit");
        type Create = unsafe extern "C" fn(*mut usize, *const CUmemPoolProps) -> i32;
        let create: libloading::Symbol<Create> = cuda.get(b"cuMemPoolCreate\0")?;
        let mut pool = 0;
        ensure!(create(&mut pool, &properties) == 0, "cuMemPoolCreate");
        type Export = unsafe extern "C" fn(*mut i32, usize, u32, u64) -> i32;
        let export: libloading::Symbol<Export> = cuda.get(b"cuMemPoolExportToShareableHandle\0")?;
        let mut fd = -1;
        ensure!(export(&mut fd, pool, 1, 0) == 0, "cuMemPoolExportToShareableHandle");
        println!("sharing");
        std::thread::sleep(std::time::Duration::from_secs(120));
    }
    Ok(())
}

/// Run as a program of its own by the test below: it has managed memory.
#[test]
#[ignore = "a helper process of another test"]
fn managing_program() -> Result<()> {
    // SAFETY: the functions are the driver API's, with the types of its header, and every pointer
    // is a place of the right type.
    unsafe {
        let cuda = libloading::Library::new("libcuda.so.1")?;
        let init: libloading::Symbol<unsafe extern "C" fn(u32) -> i32> = cuda.get(b"cuInit\0")?;
        ensure!(init(0) == 0, "cuInit");
        type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
        let retain: libloading::Symbol<Retain> = cuda.get(b"cuDevicePrimaryCtxRetain\0")?;
        let mut context = 0;
        ensure!(retain(&mut context, 0) == 0, "cuDevicePrimaryCtxRetain");
        type SetCurrent = unsafe extern "C" fn(usize) -> i32;
        let set_current: libloading::Symbol<SetCurrent> = cuda.get(b"cuCtxSetCurrent\0")?;
        ensure!(set_current(context) == 0, "cuCtxSetCurrent");
        type Allocate = unsafe extern "C" fn(*mut u64, usize, u32) -> i32;
        let allocate: libloading::Symbol<Allocate> = cuda.get(b"cuMemAllocManaged\0")?;
        let mut address = 0;
        ensure!(allocate(&mut address, 1 << 20, 1) == 0, "cuMemAllocManaged");
        println!("sharing");
        std::thread::sleep(std::time::Duration::from_secs(120));
    }
    Ok(())
}

/// A dump of the helper program is refused in these words, and `gpucr ps` says it too.
fn refused_beforehand(helper: &str, words: &str, listed_words: &str) -> Result<()> {
    let lab = Lab::new();
    let mut command = lab.gpucr();
    // Where memory is left to the driver, it makes and shares the pool.
    command.env("SOFTCUDA_VMM", "private");
    command.args(["run", "--device", "soft", "--"]).arg(std::env::current_exe()?);
    command.args(["--ignored", "--exact", helper, "--nocapture"]);
    let mut program = lab.spawn(command, "log")?;
    while !program.output().contains("sharing\n") && program.is_running() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    ensure!(output.status.code() == Some(1), "{}\n{}", show(&output), program.output());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(message.contains(words), "{message}");
    ensure!(message.contains("Nothing was changed"), "{message}");
    ensure!(program.is_running() && !lab.path("image").exists());
    let listed = lab.run(["ps", "--timeout", "20s"])?;
    let listed = String::from_utf8(listed.stdout).context("text")?;
    ensure!(listed.contains(&format!("cannot be dumped: {listed_words}")), "{listed}");
    Ok(())
}

#[test]
fn what_cannot_be_checkpointed_is_named_before_anything_is_touched() -> Result<()> {
    const EXPORT: &str = "cuMemPoolExportToShareableHandle";
    refused_beforehand("sharing_program", EXPORT, EXPORT)?;
    refused_beforehand("managing_program", "managed memory (1", "managed memory")
}
