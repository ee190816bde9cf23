//! `cargo xtask test`: set-up, build, every test.

use anyhow::Result;

use crate::{leftover, python, setup, sys};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keep so many threads busy meanwhile: no test may depend on a machine being idle
    #[arg(long, value_name = "THREADS", default_value_t = 0)]
    busy: usize,
    /// Passed on to `cargo nextest run`, or to `cargo test` where nextest is not installed
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

/// Sets the machine up, builds everything and runs every test.
///
/// # Errors
/// Set-up or build failed, a test did, or tests have left processes behind.
pub(crate) fn run(args: &Args) -> Result<()> {
    setup::run(&setup::Args::default())?;
    python::ensure()?;
    python::ensure_nvcc()?;
    // The end-to-end tests start `gpucr` and `workload` and load the shim and the software driver
    // from the target folder; building a test crate alone would not bring these up to date.
    sys::run(sys::cargo().args(["build", "--workspace"]))?;

    for _ in 0..args.busy {
        // They end with this process.
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    let mark = std::process::id().to_string();
    if sys::succeeds(sys::cargo().args(["nextest", "--version"])) {
        let mut nextest = sys::cargo();
        nextest.env(leftover::MARK, &mark).args(["nextest", "run", "--workspace"]);
        // Half of the time tests wait for programs that wait.
        if !args.args.iter().any(|arg| arg.starts_with("-j") || arg.contains("threads")) {
            let cores = std::thread::available_parallelism().map_or(1, usize::from);
            nextest.arg(format!("--test-threads={}", 2 * cores));
        }
        sys::run(nextest.args(&args.args))?;
        // nextest leaves out the examples in the documentation.
        if args.args.is_empty() {
            sys::run(sys::cargo().args(["test", "--workspace", "--doc", "--quiet"]))?;
        }
    } else {
        // nextest gives each test a process; here those of a file share one, and its device.
        let mut test = sys::cargo();
        test.env("RUST_TEST_THREADS", "1").env(leftover::MARK, &mark);
        sys::run(test.args(["test", "--workspace"]).args(&args.args))?;
    }
    leftover::none(&mark)?;
    sys::say("tests", "all passed");
    Ok(())
}
