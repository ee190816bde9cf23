//! A program in a pipeline goes to another gpucr, and who writes its input and reads its output sees nothing of that.

use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, Side, Sides};
use gpucr_tests::{Lab, Pipes, Program, exists, kill, show, undisturbed, until};
use serde_json::Value;

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";
/// A gpucr that does not know how the program has ended.
const UNKNOWN: Option<i32> = Some(255);

/// Both sides of a migration, when the program has gone.
fn gone(pair: Pair, program: &mut Program) -> Result<(Side, Side)> {
    let Pair { mut source, mut destination, sockets } = pair;
    source.arg("--relay");
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let both = until("the program has gone", || {
        !program.is_running() || !source.is_at_work() || !destination.is_at_work()
    });
    both?;
    if !source.is_at_work() || !destination.is_at_work() {
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        anyhow::bail!("one has ended: {}", sides.show());
    }
    Ok((source, destination))
}

/// What the destination says of the program.
fn report(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| show(output))
}

/// Where the destination keeps what nobody reads.
fn kept(output: &Output) -> Result<PathBuf> {
    let report = report(output)?;
    let id = report["migration"].as_str().with_context(|| show(output))?;
    Ok(PathBuf::from(format!("/var/lib/gpucr/migrations/{id}.output")))
}

/// Everything that was read of the program, and no more.
fn came_out_right(program: &Program, pipes: Pipes, expected: &[String]) -> Result<()> {
    pipes.end()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

#[test]
fn what_reads_the_output_sees_nothing_of_a_migration() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let (source, destination) = gone(Pair::new(&lab, &program)?, &mut program)?;
    ensure!(!pipes.has_ended(), "there is more to come");
    program.allow(1 << 20)?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let (source, destination) = sides.reports()?;
    ensure!(source["new_pid"] == program.pid && destination["pid"] == program.pid, "{source}");
    came_out_right(&program, pipes, &expected)?;
    ensure!(!kept(&sides.destination)?.exists(), "nothing had to be kept");
    until("it is gone", || !exists(program.pid))?;
    lab.holds_only(&["errors", "log", "store"])
}
