//! Every workload, dumped and restored at random moments, ends as if it had never been touched.

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Program, Random};

/// The lines and the result of a run that nobody interrupts.
fn uninterrupted(name: &str) -> Result<Vec<String>> {
    let lab = Lab::new();
    let mut program = lab.start(name, &[])?;
    program.result()?;
    Ok(program.series())
}

/// A random moment after the start of a program. `false` if it has ended before that.
fn random_moment(program: &mut Program, random: &mut Random) -> Result<bool> {
    program.wait_for("ready")?;
    let moment = std::time::Duration::from_millis(random.below(400));
    std::thread::sleep(moment);
    Ok(program.is_running() && !program.output().contains("result "))
}

/// Dumps, kills and restores the program three times: a restored one is dumped again.
fn dumped_and_restored(name: &str, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let mut random = Random(name.bytes().map(u64::from).sum());
    let mut program = lab.start(name, &["--step-delay-ms", "20"])?;
    let mut dumps = 0;
    while dumps < 3 && random_moment(&mut program, &mut random)? {
        let image = lab.path(format!("image-{dumps}"));
        let report = lab.dump(&program, &image, &[])?;
        ensure!(report["pid"] == program.pid && report["left_running"] == false, "{report}");
        program = lab.restore(&image, program)?;
        dumps += 1;
    }
    ensure!(dumps > 0, "{name} ended before its first dump");
    program.result()?;
    ensure!(program.series() == expected, "{name}: {:#?}\nis not {expected:#?}", program.series());
    Ok(())
}

/// Dumps the program while it runs on; both it and the image end well.
fn dumped_and_left_running(name: &str, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let mut random = Random(name.bytes().map(u64::from).sum::<u64>() + 1);
    let mut program = lab.start(name, &["--step-delay-ms", "20"])?;
    ensure!(random_moment(&mut program, &mut random)?, "{name} ended before its dump");
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running"])?;
    program.result()?;
    ensure!(program.series() == expected, "{name}: the program that ran on differs");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{name}: the restored program differs");
    Ok(())
}

macro_rules! workloads {
    ($($test:ident $name:literal,)*) => {$(
        #[test]
        fn $test() -> Result<()> {
            let expected = uninterrupted($name)?;
            dumped_and_restored($name, &expected)?;
            dumped_and_left_running($name, &expected)
        }
    )*
        #[test]
        fn no_workload_is_left_out() -> Result<()> {
            let output = std::process::Command::new(gpucr_tests::binary("workload"))
                .arg("--list")
                .output()?;
            let listed = String::from_utf8(output.stdout)?;
            // The adversaries and the generated programs have tests of their own.
            let all = [&[$($name),*][..], &gpucr_tests::ADVERSARIES, &["random"]].concat();
            assert_eq!(listed.lines().collect::<Vec<_>>(), all);
            Ok(())
        }
    };
}

workloads! {
    sgd "sgd",
    adam "adam",
    attention "attention",
    stencil "stencil",
    histogram "histogram",
    streams "streams",
    threads "threads",
    structs "structs",
    indirect "indirect",
    small_allocs "small-allocs",
    late_modules "late-modules",
    pinned "pinned",
    stack "stack",
    realloc "realloc",
    vmm "vmm",
    launcher "launcher",
    family "family",
    scatter "scatter",
}
