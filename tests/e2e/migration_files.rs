//! Files that a program has open go along with it to a host that lacks them: one with a folder of its own.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migrated::{End, is_so};
use gpucr_tests::migration::{Pair, Side, ends_well, made, put_elsewhere};
use gpucr_tests::{Lab, Program, refused, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";
/// Where the program has its files, and what the destination has there.
const DATA: &str = "data";
const THERE: &str = "there";
/// All that it has open there.
const NAMES: [&str; 3] = ["input", "log", "output"];

/// A program that has its log, a file to read and one to write in a folder.
fn program(lab: &Lab) -> Result<Program> {
    std::fs::create_dir(lab.path(DATA))?;
    std::fs::create_dir(lab.path(THERE))?;
    let input: Vec<u8> = (0..3u32 << 20).map(|n| (n % 251) as u8).collect();
    std::fs::write(lab.path("data/input"), input)?;
    std::fs::write(lab.path("data/output"), "so far\n")?;
    std::fs::set_permissions(lab.path("data/output"), PermissionsExt::from_mode(0o604))?;
    std::os::unix::fs::chown(lab.path("data/output"), Some(123), Some(456))?;
    lab.at_work_with_files("7<data/input 8>>data/output", "data/log", WORKLOAD, &ARGS)
}

/// A pair of which the destination has nothing yet, and permits these folders.
fn pair(lab: &Lab, program: &Program, below: &[&str]) -> Result<Pair> {
    let mut pair = Pair::elsewhere(lab, program, DATA, THERE)?;
    pair.source.args(["--files", "copy"]);
    for below in below {
        pair.destination.arg("--files-below").arg(lab.path(below));
    }
    Ok(pair)
}

/// A command on the other host.
fn there(lab: &Lab, args: &[&str]) -> Result<Command> {
    let mut command = lab.gpucr();
    put_elsewhere(lab, &mut command, DATA, THERE)?;
    command.args(args);
    Ok(command)
}

/// What is in the folder of the destination.
fn names_there(lab: &Lab) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(lab.path(THERE))?;
    let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.sort_unstable();
    Ok(names)
}

/// Migrates in vain.
fn in_vain(pair: Pair, words: &[&str]) -> Result<()> {
    let Pair { mut source, mut destination, sockets } = pair;
    let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let (source, destination) = (source.end()?, destination.end()?);
    refused(&source, 1, words).with_context(|| show(&destination))?;
    refused(&destination, 1, words)
}

/// The program goes on at the destination, where its files are what they were at the source.
fn goes_on_there(lab: &Lab, program: &mut Program, expected: &[String]) -> Result<()> {
    ensure!(names_there(lab)? == NAMES, "{:?}", names_there(lab)?);
    for name in ["input", "output"] {
        let paths = [DATA, THERE].map(|folder| lab.path(folder).join(name));
        let [here, there] = &paths;
        ensure!(std::fs::read(here)? == std::fs::read(there)?, "{name} is the same");
        let facts = |path: &PathBuf| -> Result<_> {
            let meta = std::fs::metadata(path)?;
            Ok((meta.uid(), meta.gid(), meta.mode()))
        };
        ensure!(facts(here)? == facts(there)?, "{name} has the same owner and mode");
    }
    let left = program.output();
    let pid = made(program).context("it runs there")?;
    program.goes_on_as(pid, lab.path("there/log"));
    ensure!(program.output().starts_with(&left), "{left} was in the log:\n{}", program.output());
    ends_well(program, expected)?;
    ensure!(std::fs::read_to_string(lab.path("data/log"))? == left, "it stays at the source");
    Ok(())
}

#[test]
fn what_a_program_has_open_goes_along_to_a_host_that_lacks_it() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = program(&lab)?;
    // As long as nobody wants it, and permits it there, it is all in the way.
    let in_the_way: Vec<String> =
        NAMES.iter().map(|name| format!("{}/{name}, which", lab.path(DATA).display())).collect();
    let mut words: Vec<&str> = in_the_way.iter().map(String::as_str).collect();
    in_vain(Pair::elsewhere(&lab, &program, DATA, THERE)?, &words)?;
    words.push("--files-below");
    in_vain(pair(&lab, &program, &[])?, &words)?;
    in_vain(pair(&lab, &program, &["dat", "data/log", "store"])?, &words[..1])?;
    let mut could = pair(&lab, &program, &[DATA])?;
    could.source.arg("--dry-run");
    could.run(&mut program)?.reports()?;
    ensure!(names_there(&lab)?.is_empty(), "nothing was made");
    program.wait_for_progress()?;
    let sides = pair(&lab, &program, &["", "nowhere"])?.run(&mut program)?;
    let (_, destination) = sides.reports()?;
    let made: Vec<_> = NAMES.iter().map(|name| lab.path(DATA).join(name)).collect();
    ensure!(destination["files"] == serde_json::json!(made), "{destination}");
    goes_on_there(&lab, &mut program, &expected)
}

#[test]
fn what_is_there_is_not_touched_and_has_to_be_the_same() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = program(&lab)?;
    let number = |name: &str| std::fs::metadata(lab.path(name)).map(|meta| meta.ino());
    std::fs::write(lab.path("there/output"), "so")?;
    let named = format!("{}/output exists there with 2 bytes", lab.path(DATA).display());
    in_vain(pair(&lab, &program, &[DATA])?, &[&named])?;
    std::fs::write(lab.path("there/output"), "so far, and further")?;
    // What is longer may be the same file still: it is found when the program stands still.
    in_vain(pair(&lab, &program, &[DATA])?, &["output has 19 bytes now and had 7"])?;
    ensure!(names_there(&lab)? == ["output"], "{:?}", names_there(&lab)?);
    ensure!(std::fs::read(lab.path("there/output"))? == b"so far, and further", "untouched");
    // A log would be gone on with, and lack what is in the other.
    std::fs::write(lab.path("there/log"), program.output() + &"and more\n".repeat(1000))?;
    std::fs::remove_file(lab.path("there/output"))?;
    in_vain(pair(&lab, &program, &[DATA])?, &["log has"])?;
    std::fs::remove_file(lab.path("there/log"))?;
    ensure!(program.is_running(), "it runs on");
    std::fs::copy(lab.path("data/input"), lab.path("there/input"))?;
    std::fs::copy(lab.path("data/output"), lab.path("there/output"))?;
    std::os::unix::fs::chown(lab.path("there/output"), Some(123), Some(456))?;
    let before = number("there/input")?;
    let (_, destination) = pair(&lab, &program, &[DATA])?.run(&mut program)?.reports()?;
    ensure!(destination["files"] == serde_json::json!([lab.path("data/log")]), "{destination}");
    ensure!(number("there/input")? == before, "it is the same file");
    goes_on_there(&lab, &mut program, &expected)
}

#[test]
fn files_of_a_program_that_does_not_come_are_removed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination) in [
        ("fail:decide", ""),
        ("kill:prepare", ""),
        ("cut-after:manifest", ""),
        ("", "fail:written"),
        ("", "fail:placed"),
        ("", "fail:made"),
    ] {
        let lab = Lab::new();
        let mut program = program(&lab)?;
        let mut pair = pair(&lab, &program, &[DATA])?;
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination}: {}", sides.show());
        ensure!(!sides.source.status.success(), "{}", told());
        ensure!(names_there(&lab)?.is_empty(), "{:?}: {}", names_there(&lab)?, told());
        is_so(&lab, program, End::Stays, &expected).with_context(told)?;
    }
    Ok(())
}

/// The name of the only migration that the destination of a lab has noted.
fn noted(lab: &Lab) -> Result<String> {
    let output = lab.run(["receive", "--list", "--json"])?;
    let all: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let store = lab.path("store");
    let is_own = |record: &&serde_json::Value| {
        record["image"].as_str().is_some_and(|image| PathBuf::from(image).starts_with(&store))
    };
    let record = all.iter().find(is_own).with_context(|| show(&output))?;
    Ok(record["id"].as_str().context("it has a name")?.to_owned())
}

#[test]
fn files_that_a_killed_destination_has_made_are_removed_when_it_is_told_to() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination) in
        [("", "kill:written"), ("", "kill:placed"), ("", "kill:made"), ("kill:decide", "")]
    {
        let lab = Lab::new();
        let mut program = program(&lab)?;
        let mut pair = pair(&lab, &program, &[DATA])?;
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination}: {}", sides.show());
        ensure!(!sides.source.status.success(), "{}", told());
        ensure!(names_there(&lab)?.len() == 3, "{:?}: {}", names_there(&lab)?, told());
        let id = noted(&lab).with_context(told)?;
        until("the processes that were made are gone", || made(&program).is_none())?;
        let aborted = Side::start(&mut there(&lab, &["receive", "--abort", &id])?)?.end()?;
        ensure!(aborted.status.success(), "{}", show(&aborted));
        ensure!(names_there(&lab)?.is_empty(), "{:?}: {}", names_there(&lab)?, told());
        is_so(&lab, program, End::Stays, &expected).with_context(told)?;
    }
    Ok(())
}

#[test]
fn files_of_a_program_that_was_handed_over_stay_until_it_runs() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = program(&lab)?;
    let mut pair = pair(&lab, &program, &[DATA])?;
    pair.destination.env("GPUCR_FAULT", "kill:handover");
    let sides = pair.run(&mut program)?;
    ensure!(!sides.destination.status.success(), "{}", sides.show());
    let id = noted(&lab)?;
    until("the source has none of it", || !program.is_running())?;
    let aborted = Side::start(&mut there(&lab, &["receive", "--abort", &id])?)?.end()?;
    refused(&aborted, 1, &["the only copy of it"])?;
    let resumed = Side::start(&mut there(&lab, &["receive", "--resume", &id])?)?.end()?;
    ensure!(resumed.status.success(), "{}", show(&resumed));
    goes_on_there(&lab, &mut program, &expected)?;
    let source = lab.run(["migrate", "--list", "--json"])?;
    if String::from_utf8_lossy(&source.stdout).contains(&id) {
        let forgotten = lab.run(["migrate", "--forget", &id])?;
        ensure!(forgotten.status.success(), "{}", show(&forgotten));
    }
    Ok(())
}
