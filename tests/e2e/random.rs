//! Generated programs: each is dumped several times at random moments, restored, and must end as if
//! nobody had touched it.
//!
//!     GPUCR_RANDOM_DUMPS=1000 cargo nextest run -p gpucr-tests -E 'binary(random)' --no-capture
//!     GPUCR_RANDOM_SEED=17 cargo nextest run …        # from this seed on; a failure names its seed

use std::time::Duration;

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Random, at_random, finish, show, undisturbed};

/// Dumps of each program.
const DUMPS: u64 = 3;
/// Steps of a program, few enough that each is printed, and those that it makes before its last dump at most.
const STEPS: [&str; 2] = ["--steps", "99"];
const BEFORE_THE_END: usize = 90;

/// One dump with a random protocol, at a random moment, at a random speed of copies. Gives the number of
/// chunks that were copied early and had changed since.
fn dump(lab: &Lab, program: &Program, image: &str, last: bool, random: &mut Random) -> Result<u64> {
    std::thread::sleep(Duration::from_millis(random.below(250)));
    let protocols = if last { ["stop", "recopy", "cow"] } else { ["stop", "recopy", "recopy"] };
    let protocol = protocols[random.below(3) as usize];
    let mut command = lab.gpucr();
    command.args(["dump", "--json", "--pid", &program.pid.to_string(), "-o", image]);
    command.args(["--protocol", protocol]);
    if last {
        command.arg("--leave-running");
    }
    if random.below(2) == 0 {
        command.env("SOFTCUDA_PCIE_GBPS", "0.03");
    }
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{protocol}: {}\n{}", show(&output), program.output());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["protocol"] == protocol, "{report}");
    Ok(report["validation"]["misspeculated"].as_u64().unwrap_or(0))
}

/// Dumps the program of a seed [`DUMPS`] times. Restored from each dump it goes on to the next; after
/// the last one both it and the image end well. Gives the number of chunks that were misspeculated.
fn dumped_and_restored(seed: u64) -> Result<u64> {
    let seed_text = seed.to_string();
    let args = [&STEPS[..], &["--seed", &seed_text]].concat();
    let lab = Lab::new();
    let expected = undisturbed("random", &args)?;

    let mut random = Random(seed);
    let pace = Pace::new()?;
    pace.allow(BEFORE_THE_END)?;
    let args = [&args[..], &["--step-delay-ms", "10", "--pace", pace.file()]].concat();
    let mut program = lab.start("random", &args)?;
    program.wait_for("ready")?;
    let mut misspeculated = 0;
    for number in 1..DUMPS {
        let image = format!("image-{number}");
        misspeculated += dump(&lab, &program, &image, false, &mut random)?;
        // A restored program must print something to show that it lives.
        pace.allow(1)?;
        program = lab.restore(&lab.path(image), program)?;
    }
    misspeculated += dump(&lab, &program, "last", true, &mut random)?;
    pace.allow_all()?;
    program.result()?;
    ensure!(
        program.series() == expected,
        "it ran on to {:#?}\nnot {expected:#?}",
        program.series()
    );
    lab.rewind(&program, &lab.path("last"))?;
    program = lab.restore(&lab.path("last"), program)?;
    program.result()?;
    ensure!(program.series() == expected, "restored: {:#?}\nnot {expected:#?}", program.series());
    Ok(misspeculated)
}

#[test]
fn generated_programs_end_as_if_nobody_had_touched_them() -> Result<()> {
    let misspeculated = at_random(6, DUMPS, "-E 'binary(random)'", dumped_and_restored)?;
    println!("{misspeculated} chunks had changed after they were copied");
    Ok(())
}
