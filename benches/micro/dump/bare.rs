//! The bare way: the driver's checkpoint functions and the `criu` command, and nothing else.

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use gpucr_core::criu::Criu;
use libloading::Library;

use crate::program::Program;
use crate::way::{Run, Setup, bytes_below, milliseconds};

type Step = unsafe extern "C" fn(c_int, *mut c_void) -> c_int;

/// The checkpoint functions of a driver, and CRIU.
pub(crate) struct Checkpoint {
    lock: Step,
    checkpoint: Step,
    restore: Step,
    unlock: Step,
    criu: Criu,
    _library: Library,
}

impl Checkpoint {
    pub(crate) fn open(driver: &Path) -> Result<Self> {
        // SAFETY: loading a driver is what any program of its API does.
        let library = unsafe { Library::new(driver) }.context("the driver library")?;
        // SAFETY: the types are those of cuda.h, and the library stays open with the functions.
        unsafe {
            let init = library.get::<unsafe extern "C" fn(u32) -> c_int>(b"cuInit\0")?;
            let code = init(0);
            ensure!(code == 0, "cuInit failed with {code}");
            Ok(Self {
                lock: *library.get(b"cuCheckpointProcessLock\0")?,
                checkpoint: *library.get(b"cuCheckpointProcessCheckpoint\0")?,
                restore: *library.get(b"cuCheckpointProcessRestore\0")?,
                unlock: *library.get(b"cuCheckpointProcessUnlock\0")?,
                criu: Criu::find(None)?,
                _library: library,
            })
        }
    }
}

fn step(name: &str, function: Step, pid: u32) -> Result<()> {
    // All argument structures have 64 bytes; zeros ask for nothing special and no time limit.
    let mut arguments = [0u64; 8];
    // SAFETY: the structure is large enough and lives during the call.
    let code = unsafe { function(pid as c_int, arguments.as_mut_ptr().cast()) };
    ensure!(code == 0, "{name} failed with {code}");
    Ok(())
}

fn criu(checkpoint: &Checkpoint, images: &Path, args: &[&str]) -> Result<()> {
    let log = images.join("criu.log");
    let status = Command::new(checkpoint.criu.path())
        .args(args)
        .args(["-v1", "--manage-cgroups=ignore", "-o"])
        .arg(&log)
        .arg("-D")
        .arg(images)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    ensure!(status.success(), "criu {}: {status}\n{}", args[0], said());
    Ok(())
}

/// One run. The program stands still for all of the dump.
pub(crate) fn run(setup: &Setup, checkpoint: &Checkpoint) -> Result<Run> {
    let libraries = setup.dir.join("driver");
    std::fs::create_dir_all(&libraries)?;
    std::fs::copy(&setup.driver, libraries.join("libcuda.so.1"))?;
    let images = setup.dir.join("criu");
    std::fs::create_dir(&images)?;
    let mut command = Command::new(&setup.holder);
    command.env("LD_LIBRARY_PATH", &libraries);
    let mut program = Program::start(command, setup, 0)?;
    let pid = program.pid();

    let start = Instant::now();
    step("lock", checkpoint.lock, pid)?;
    step("checkpoint", checkpoint.checkpoint, pid)?;
    criu(checkpoint, &images, &["dump", "-t", &pid.to_string()])?;
    let stopped = milliseconds(start);
    program.ended()?;

    let watch_from = program.output().len();
    let start = Instant::now();
    let watch = program.next_step(watch_from, start);
    criu(checkpoint, &images, &["restore", "-d"])?;
    step("restore", checkpoint.restore, pid)?;
    step("unlock", checkpoint.unlock, pid)?;
    let restore = watch.wait()?;
    let stored = bytes_below(&images)?;
    program.finish(setup)?;
    std::fs::remove_dir_all(&images)?;
    Ok(Run { stopped, total: stopped, restore, stored, phases: Vec::new() })
}
