//! Every workload, dumped and restored at random moments, ends as if it had never been touched.

use std::time::Duration;

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Random, last_step, undisturbed};

/// Starts the program; it goes on by itself, but not to its end before its dumps are done.
fn start(lab: &Lab, name: &str, steps: usize) -> Result<(Program, Pace)> {
    let pace = Pace::new()?;
    pace.allow(steps * 3 / 4)?;
    let mut program = lab.start(name, &["--step-delay-ms", "20", "--pace", pace.file()])?;
    program.wait_for("ready")?;
    Ok((program, pace))
}

fn wait_for_a_random_moment(random: &mut Random) {
    std::thread::sleep(Duration::from_millis(random.below(400)));
}

/// Dumps, kills and restores the program three times: a restored one is dumped again.
fn dumped_and_restored(name: &str, steps: usize, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let mut random = Random(name.bytes().map(u64::from).sum());
    let (mut program, pace) = start(&lab, name, steps)?;
    for number in 0..3 {
        wait_for_a_random_moment(&mut random);
        let image = lab.path(format!("image-{number}"));
        let report = lab.dump(&program, &image, &[])?;
        ensure!(report["pid"] == program.pid && report["left_running"] == false, "{report}");
        // A restored program must print something to show that it lives.
        pace.allow(steps.div_ceil(50))?;
        program = lab.restore(&image, program)?;
    }
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{name}: {:#?}\nis not {expected:#?}", program.series());
    Ok(())
}

/// Dumps the program while it runs on; both it and the image end well.
fn dumped_and_left_running(name: &str, steps: usize, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let mut random = Random(name.bytes().map(u64::from).sum::<u64>() + 1);
    let (mut program, pace) = start(&lab, name, steps)?;
    wait_for_a_random_moment(&mut random);
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running"])?;
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{name}: the program that ran on differs");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{name}: the restored program differs");
    Ok(())
}

fn thrice_and_left_running(name: &str) -> Result<()> {
    let expected = undisturbed(name, &[])?;
    let steps = last_step(&expected)?;
    dumped_and_restored(name, steps, &expected)?;
    dumped_and_left_running(name, steps, &expected)
}

gpucr_tests::each_workload!(thrice_and_left_running);
