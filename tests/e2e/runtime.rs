//! A program of the CUDA runtime, compiled by nvcc, is dumped in the middle of its work, ends, and is restored: it prints
//! what it prints when nobody touches it.

use std::path::Path;

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Nvcc, skip};

/// Dumps the program with a protocol and restores it.
fn comes_back(protocol: &str) -> Result<()> {
    let Some(nvcc) = Nvcc::find(&std::env::current_exe()?) else {
        skip("no nvcc: set NVCC, or run `cargo xtask test`");
        return Ok(());
    };
    let lab = Lab::new();
    let steps = lab.path("steps");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../softcuda/tests/runtime/steps.cu");
    nvcc.compile([source], &steps).map_err(anyhow::Error::msg)?;
    let mut plain = lab.any_at_work(&steps, &["--steps", "40"])?;
    plain.result()?;
    let expected = plain.series();
    ensure!(expected.len() == 41, "{expected:?}");

    let program = lab.any_at_work(&steps, &["--steps", "40"])?;
    let image = lab.path("image");
    let report = lab.dump(&program, &image, &["--protocol", protocol])?;
    // Its memory is carried by gpucr, so the shim has seen where the runtime got it.
    ensure!(report["bulk_bytes"].as_u64() > Some(0), "{report}");
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "{protocol} differs:\n{}", program.output());
    Ok(())
}

#[test]
fn dumped_after_it_stopped() -> Result<()> {
    comes_back("stop")
}

#[test]
fn dumped_while_it_runs() -> Result<()> {
    comes_back("recopy")
}
