//! What tests use of PyPI: a Python with NVIDIA's bindings of the driver API, for the test that runs a program on them,
//! and nvcc, for tests of programs that it compiles.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::debian::Apt;
use crate::sys;

/// The version that `softcuda/tests/users/begin.sh` has too, for which see there.
const BINDINGS: &str = "cuda-bindings==13.3.1";

/// nvcc and the CUDA runtime, in the versions that `softcuda/tests/users/runtime.sh` tests too.
const NVCC: [&str; 5] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
];

/// Sees to it that there is an nvcc: the one that `NVCC` names, the machine's, or one in the target folder. Where it
/// cannot be had that is said, and no failure: the tests that use it are left out then, and fail in CI.
///
/// # Errors
/// Nobody says where the target folder is.
pub(crate) fn ensure_nvcc() -> Result<()> {
    let own = sys::target_dir()?.join("nvcc");
    let named = std::env::var_os("NVCC").is_some();
    if named || sys::succeeds(Command::new("nvcc").arg("--version")) || has_nvcc(&own) {
        sys::say("python", "found nvcc");
        return Ok(());
    }
    match install(&own, &NVCC) {
        Ok(()) => sys::say("python", format!("installed {} in {}", NVCC[0], own.display())),
        Err(error) => sys::say("python", format!("{} cannot be installed: {error:#}", NVCC[0])),
    }
    Ok(())
}

/// Whether all of nvcc is in a folder: the runtime is installed last.
fn has_nvcc(own: &Path) -> bool {
    let show = ["-m", "pip", "show", "--quiet", "nvidia-cuda-nvcc", "nvidia-cuda-runtime"];
    sys::succeeds(Command::new(own.join("bin/python")).args(show))
}

/// Sees to it that the machine's Python or one in the target folder has the bindings. Where they cannot
/// be had that is said, and no failure: one test is left out then, and fails in CI.
///
/// # Errors
/// Nobody says where the target folder is.
pub(crate) fn ensure() -> Result<()> {
    let own = sys::target_dir()?.join("python");
    if [Path::new("python3"), &own.join("bin/python")].into_iter().any(has_bindings) {
        sys::say("python", "found cuda-bindings");
        return Ok(());
    }
    match install(&own, &[BINDINGS]) {
        Ok(()) => sys::say("python", format!("installed {BINDINGS} in {}", own.display())),
        Err(error) => sys::say("python", format!("{BINDINGS} cannot be installed: {error:#}")),
    }
    Ok(())
}

fn has_bindings(python: &Path) -> bool {
    sys::succeeds(Command::new(python).args(["-c", "import cuda.bindings.driver"]))
}

fn install(own: &Path, packages: &[&str]) -> Result<()> {
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(own);
    if !sys::succeeds(&mut venv) {
        Apt::default().install(&["python3-venv"])?;
        sys::capture(&mut venv)?;
    }
    let mut pip = Command::new(own.join("bin/python"));
    sys::capture(pip.args(["-m", "pip", "install", "--quiet"]).args(packages)).map(drop)
}
