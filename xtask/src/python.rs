//! A Python with NVIDIA's bindings of the driver API, for the test that runs a program on them.

use std::path::Path;
use std::process::Command;

use anyhow::Result;

use crate::debian::Apt;
use crate::sys;

/// The version that `softcuda/tests/users/run.sh` tests too.
const BINDINGS: &str = "cuda-bindings==13.5.0";

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
    match install(&own) {
        Ok(()) => sys::say("python", format!("installed {BINDINGS} in {}", own.display())),
        Err(error) => sys::say("python", format!("{BINDINGS} cannot be installed: {error:#}")),
    }
    Ok(())
}

fn has_bindings(python: &Path) -> bool {
    sys::succeeds(Command::new(python).args(["-c", "import cuda.bindings.driver"]))
}

fn install(own: &Path) -> Result<()> {
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv"]).arg(own);
    if !sys::succeeds(&mut venv) {
        Apt::default().install(&["python3-venv"])?;
        sys::capture(&mut venv)?;
    }
    let mut pip = Command::new(own.join("bin/python"));
    sys::capture(pip.args(["-m", "pip", "install", "--quiet", BINDINGS])).map(drop)
}
