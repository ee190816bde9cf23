//! A program of the CUDA runtime, compiled by nvcc, is dumped in the middle of its work, ends, and is restored: it prints
//! what it prints when nobody touches it. And what such programs do that no dump can carry is refused.

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Nvcc, refused, skip};

/// Compiles a program of the software driver's tests in the lab's folder; `None` if there is no nvcc.
fn compiled(lab: &Lab, name: &str, flags: &[&str]) -> Result<Option<PathBuf>> {
    let Some(nvcc) = Nvcc::find(&std::env::current_exe()?) else {
        skip("no nvcc: set NVCC, or run `cargo xtask test`");
        return Ok(None);
    };
    let program = lab.path(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let source = source.join(format!("../softcuda/tests/runtime/{name}.cu"));
    let source = source.to_string_lossy().into_owned();
    let arguments = flags.iter().copied().chain([source.as_str()]);
    nvcc.compile(arguments, &program).map_err(anyhow::Error::msg)?;
    Ok(Some(program))
}

/// Dumps the program with a protocol and restores it.
fn comes_back(protocol: &str) -> Result<()> {
    let lab = Lab::new();
    let Some(steps) = compiled(&lab, "steps", &[])? else { return Ok(()) };
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

#[test]
fn a_managed_variable_is_refused_by_name_and_the_program_runs_on() -> Result<()> {
    let lab = Lab::new();
    let Some(steps) = compiled(&lab, "steps", &["-DMANAGED"])? else { return Ok(()) };
    let mut plain = lab.any_at_work(&steps, &["--steps", "40"])?;
    plain.result()?;
    let expected = plain.series();

    let mut program = lab.any_at_work(&steps, &["--steps", "40"])?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &["managed memory", "Nothing was changed"])?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// What the runtime's functions give when a kernel has failed, and that memory is there again after a reset.
#[test]
fn errors_are_those_that_there_are_without_the_shim() -> Result<()> {
    let lab = Lab::new();
    let Some(errors) = compiled(&lab, "errors", &[])? else { return Ok(()) };
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(errors);
    let mut program = lab.spawn(command, "log")?;
    program.wait()?;
    ensure!(program.output().ends_with("errors: passed\n"), "{}", program.output());
    Ok(())
}
