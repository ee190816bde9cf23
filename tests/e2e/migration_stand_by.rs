//! At a destination in a pid namespace of its own, a restore stands by while memory comes.

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, Side, ends_well, made};
use gpucr_tests::{Lab, kill, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";
fn parent_of(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// The restore that stands by, or has, below a destination.
fn restore_below(destination: &Side) -> Option<u32> {
    let is_below = |pid| {
        std::iter::successors(Some(pid), |pid| parent_of(*pid)).any(|pid| pid == destination.pid())
    };
    std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let command = std::fs::read(entry.path().join("cmdline")).ok()?;
        let stands_by = command.split(|byte| *byte == 0).any(|word| word == b"--stand-by");
        (stands_by && is_below(pid)).then_some(pid)
    })
}

#[test]
fn the_restore_that_stands_by_makes_the_processes() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.env("GPUCR_FAULT", "hold:decide").env("GPUCR_FAULT_FILE", &go_on);
    let mut destination = Side::start(&mut pair.destination_in_namespaces())?;
    let mut source = Side::start(&mut pair.source)?;
    drop(pair.sockets);
    until("its processes are made", || made(&program).is_some() || !source.is_at_work())?;
    let restore = restore_below(&destination).context("it is the one that stood by")?;
    ensure!(made(&program).is_some(), "{}", show(&source.end()?));
    std::fs::write(&go_on, "")?;
    until("the program is there", || {
        program.is_running();
        destination.said().contains("\"pid\"")
    })?;
    ensure!(source.end()?.status.success());
    until("the restore has ended", || !std::path::Path::new(&format!("/proc/{restore}")).exists())?;
    program.pid = made(&program).context("it runs there")?;
    ends_well(&mut program, &expected)?;
    ensure!(destination.is_at_work(), "its namespace ended before");
    Ok(())
}

#[test]
fn a_restore_that_stood_by_and_was_killed_is_not_missed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.env("GPUCR_FAULT", "hold:precopy").env("GPUCR_FAULT_FILE", &go_on);
    let destination = Side::start(&mut pair.destination_in_namespaces())?;
    let mut source = Side::start(&mut pair.source)?;
    drop(pair.sockets);
    until("a restore stands by", || restore_below(&destination).is_some())?;
    kill(restore_below(&destination).context("it stands by")?)?;
    std::fs::write(&go_on, "")?;
    until("the program is there", || {
        program.is_running();
        destination.said().contains("\"pid\"") || !source.is_at_work()
    })?;
    let source = source.end()?;
    ensure!(source.status.success(), "{}", show(&source));
    program.pid = made(&program).context("it runs there")?;
    ends_well(&mut program, &expected)
}

#[test]
fn nothing_stands_by_when_the_destination_was_killed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.env("GPUCR_FAULT", "hold:precopy").env("GPUCR_FAULT_FILE", &go_on);
    let destination = Side::start(&mut pair.destination_in_namespaces())?;
    let source = Side::start(&mut pair.source)?;
    drop(pair.sockets);
    until("a restore stands by", || restore_below(&destination).is_some())?;
    let restore = restore_below(&destination).context("it stands by")?;
    kill(parent_of(restore).context("whoever has started it")?)?;
    until("it has ended", || restore_below(&destination).is_none())?;
    std::fs::write(&go_on, "")?;
    ensure!(!source.end()?.status.success());
    program.result()?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}

#[test]
fn nothing_stands_by_when_the_source_has_given_up() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    for fault in ["hold:precopy,fail:precopy", "hold:precopy,kill:precopy"] {
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.env("GPUCR_FAULT", fault).env("GPUCR_FAULT_FILE", &go_on);
        let destination = Side::start(&mut pair.destination_in_namespaces())?;
        let source = Side::start(&mut pair.source)?;
        drop(pair.sockets);
        until("a restore stands by", || restore_below(&destination).is_some())?;
        std::fs::write(&go_on, "")?;
        ensure!(!source.end()?.status.success());
        until("it has ended", || restore_below(&destination).is_none())?;
        ensure!(made(&program).is_none(), "{fault}");
        std::fs::remove_file(&go_on)?;
    }
    program.result()?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}
