//! Each workload goes to another gpucr and back again while it runs, and ends as if it had not.

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, ends_well};
use gpucr_tests::{Lab, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "60", "--step-delay-ms", "20"];

fn there_and_back(workload: &str) -> Result<()> {
    let expected = undisturbed(workload, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(workload, &ARGS)?;
    for way in ["there", "back"] {
        let sides = Pair::new(&lab, &program)?.run(&mut program)?;
        let (source, destination) = sides.reports().context(way)?;
        let goes_on = source["new_pid"] == program.pid && destination["pid"] == program.pid;
        ensure!(goes_on, "{way}: {}", sides.show());
        let before = program.output().len();
        program.allow(2)?;
        until("it goes on", || program.output().len() > before).context(way)?;
    }
    ends_well(&mut program, &expected)
}

gpucr_tests::each_workload!(there_and_back);
