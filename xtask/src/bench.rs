//! `cargo xtask bench`: the micro benchmarks.

use anyhow::Result;

use crate::sys;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to `cargo bench`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Builds the shim and the software driver as users get them, and runs the benchmarks.
///
/// # Errors
/// Something does not build, or a benchmark fails.
pub(crate) fn run(args: &Args) -> Result<()> {
    // The benchmarks open these two by path, so they are no dependencies that cargo knows of.
    sys::run(sys::cargo().args(["build", "--release", "-p", "gpucr-intercept", "-p", "softcuda"]))?;
    sys::run(sys::cargo().args(["bench", "-p", "gpucr-benches"]).args(&args.args))
}
