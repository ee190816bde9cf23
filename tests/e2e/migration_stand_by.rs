//! At a destination in a pid namespace of its own, a restore stands by while memory comes.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, Side, ends_well, made};
use gpucr_tests::{Lab, Program, kill, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";

fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// A migration whose source waits where it was asked to.
struct Moving {
    source: Side,
    destination: Side,
    /// The source goes on when this file is there.
    go_on: PathBuf,
}

impl Moving {
    /// Begins it; `fault` is what happens to the source.
    fn begin(lab: &Lab, program: &Program, fault: &str) -> Result<Self> {
        let go_on = lab.path("go-on");
        let mut pair = Pair::new(lab, program)?;
        pair.source.env("GPUCR_FAULT", fault).env("GPUCR_FAULT_FILE", &go_on);
        let destination = Side::start(&mut pair.destination_in_namespaces())?;
        let source = Side::start(&mut pair.source)?;
        Ok(Self { source, destination, go_on })
    }

    /// The restore that stands by at the destination, or has.
    fn restore(&self) -> Option<u32> {
        let is_below = |pid| {
            let mut above = std::iter::successors(Some(pid), |pid| parent_of(*pid));
            above.any(|pid| pid == self.destination.pid())
        };
        std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
            let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
            let command = std::fs::read(entry.path().join("cmdline")).ok()?;
            let stands_by = command.split(|byte| *byte == 0).any(|word| word == b"--stand-by");
            (stands_by && is_below(pid)).then_some(pid)
        })
    }

    fn wait_for_restore(&self) -> Result<u32> {
        until("a restore stands by", || self.restore().is_some())?;
        self.restore().context("it stands by")
    }

    fn let_go_on(&self) -> Result<()> {
        Ok(std::fs::write(&self.go_on, "")?)
    }

    /// Lets the source go on, and waits until the program is there, and comes to its end.
    fn arrives(mut self, mut program: Program, expected: &[String]) -> Result<()> {
        self.let_go_on()?;
        until("the program is there", || {
            program.is_running();
            self.destination.said().contains("\"pid\"") || !self.source.is_at_work()
        })?;
        let source = self.source.end()?;
        ensure!(source.status.success(), "{}", show(&source));
        program.pid = made(&program).context("it runs there")?;
        ends_well(&mut program, expected)?;
        ensure!(self.destination.is_at_work(), "its namespace ended before");
        Ok(())
    }

    /// Lets the source go on, which fails, with nothing left at the destination.
    fn fails(self) -> Result<()> {
        self.let_go_on()?;
        ensure!(!self.source.end()?.status.success());
        std::fs::remove_file(&self.go_on)?;
        Ok(())
    }
}

fn stays(program: &mut Program, expected: &[String]) -> Result<()> {
    ensure!(made(program).is_none(), "it runs there");
    program.result()?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}

#[test]
fn the_restore_that_stands_by_makes_the_processes() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    let mut moving = Moving::begin(&lab, &program, "hold:decide")?;
    until("its processes are made", || made(&program).is_some() || !moving.source.is_at_work())?;
    let restore = moving.restore().context("it is the one that stood by")?;
    moving.arrives(program, &expected)?;
    until("the restore has ended", || !Path::new(&format!("/proc/{restore}")).exists())
}

#[test]
fn a_restore_that_stood_by_and_was_killed_is_not_missed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    let moving = Moving::begin(&lab, &program, "hold:precopy")?;
    kill(moving.wait_for_restore()?)?;
    moving.arrives(program, &expected)
}

#[test]
fn nothing_stands_by_when_the_destination_was_killed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let moving = Moving::begin(&lab, &program, "hold:precopy")?;
    kill(parent_of(moving.wait_for_restore()?).context("whoever has started it")?)?;
    until("it has ended", || moving.restore().is_none())?;
    moving.fails()?;
    stays(&mut program, &expected)
}

#[test]
fn nothing_stands_by_when_the_source_has_given_up() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    for fault in ["hold:precopy,fail:precopy", "hold:precopy,kill:precopy"] {
        let moving = Moving::begin(&lab, &program, fault)?;
        moving.wait_for_restore()?;
        moving.let_go_on()?;
        until("it has ended", || moving.restore().is_none())?;
        moving.fails()?;
    }
    stays(&mut program, &expected)
}
