//! Incremental images and shared stores, from the command line.

use std::fs::File;
use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, Started, finish, show, undisturbed, until};
use serde_json::Value;

const ARGS: [&str; 4] = ["--steps", "80", "--step-delay-ms", "20"];

/// Runs gpucr, which must succeed, and reads the JSON that it prints.
fn json(lab: &Lab, args: &[&str]) -> Result<Value> {
    let output = lab.run(args)?;
    ensure!(output.status.success(), "{args:?}: {}", show(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn dump_args<'a>(pid: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["dump", "--json", "--pid", pid], more].concat()
}

fn refused(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    ensure!(output.status.code() == Some(code), "{}", show(output));
    let message = String::from_utf8_lossy(&output.stderr);
    let flat = message.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
    for word in words {
        ensure!(flat.contains(word), "no `{word}` in: {message}");
    }
    Ok(())
}

/// Restores an image and compares what the program has computed in the end.
fn goes_on(lab: &Lab, image: &Path, program: Program, expected: &[String]) -> Result<()> {
    let mut program = lab.restore(image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

#[test]
fn an_incremental_image_is_restored_as_a_full_one() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    let first = lab.dump(&program, &lab.path("first"), &["--leave-running"])?;
    ensure!(first["new_bytes"] == first["stored_bytes"], "{first}");
    program.wait_for_progress()?;
    let second = json(&lab, &dump_args(&pid, &["-o", "second", "--parent", "first"]))?;
    let bytes = |report: &Value, key: &str| report[key].as_u64().context("a number");
    ensure!(bytes(&second, "new_bytes")? * 2 < bytes(&first, "new_bytes")?, "{first} {second}");
    ensure!(bytes(&second, "stored_bytes")? * 2 > bytes(&first, "stored_bytes")?, "{second}");
    let summary = json(&lab, &["inspect", "--json", "second"])?;
    ensure!(summary["kind"] == "incremental" && summary["id"] == second["id"], "{summary}");

    // The parent cannot be removed before it, nor be missing.
    refused(&lab.run(["rm", "first"])?, 1, &["parent of", "second", "--force"])?;
    std::fs::rename(lab.path("first"), lab.path("away"))?;
    refused(&lab.run(["restore", "second"])?, 1, &["which is not at", "put the parent back"])?;
    std::fs::rename(lab.path("away"), lab.path("first"))?;
    goes_on(&lab, &lab.path("second"), program, &expected)
}

#[test]
fn a_store_is_written_listed_restored_and_collected() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    let dump =
        |more: &[&str]| json(&lab, &dump_args(&pid, &[&["--store", "store"], more].concat()));
    let first = dump(&["--name", "first", "--leave-running"])?;
    program.wait_for_progress()?;
    let second = dump(&["--leave-running"])?;
    let bytes = |report: &Value, key: &str| report[key].as_u64().context("a number");
    ensure!(bytes(&second, "new_bytes")? * 2 < bytes(&first, "new_bytes")?, "{first} {second}");
    let name = second["image"].as_str().context("a path")?.rsplit('/').next().context("a name")?;
    ensure!(name.starts_with("workload-") && name.ends_with(&format!("-{pid}")), "{name}");
    refused(
        &lab.run(dump_args(&pid, &["--store", "store", "--name", "first"]))?,
        1,
        &["not empty", "Nothing was changed"],
    )?;

    let listing = json(&lab, &["ls", "--json", "store"])?;
    let images = listing["images"].as_array().context("images")?;
    ensure!(images.len() == 2 && images[0]["name"] == "first", "{listing}");
    ensure!(images[0]["id"] == first["id"] && images[0]["pid"] == program.pid, "{listing}");
    let shown = lab.run(["ls", "store"])?;
    ensure!(String::from_utf8_lossy(&shown.stdout).contains(name), "{}", show(&shown));

    let third = dump(&["--name", "third"])?;
    ensure!(bytes(&third, "new_bytes")? > 0, "{third}");
    json(&lab, &["rm", "--json", "store/images/first", &format!("store/images/{name}")])?;
    let report = json(&lab, &["gc", "--json", "store"])?;
    // What the others had alone may be too little for a pack to be written anew.
    ensure!(report["images"] == 1 && report["missing_chunks"] == 0, "{report}");
    goes_on(&lab, &lab.path("store/images/third"), program, &expected)?;
    json(&lab, &["rm", "--json", "store/images/third"])?;
    let report = json(&lab, &["gc", "--json", "store"])?;
    ensure!(report["images"] == 0 && bytes(&report, "freed_bytes")? > 0, "{report}");
    Ok(())
}

#[test]
fn a_store_on_a_read_only_mount_is_restored() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    json(&lab, &dump_args(&pid, &["--store", "store", "--name", "it"]))?;
    let mut program = program;
    program.wait()?;
    program.let_go()?;
    // In a mount namespace of its own, which ends with it.
    let script = "mount --bind store store && mount -o remount,ro,bind store && \
                  ! touch store/x 2>/dev/null && exec \"$GPUCR\" restore store/images/it";
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", script])
        .env("GPUCR", gpucr_tests::binary("gpucr"))
        .current_dir(lab.path("."));
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A dump that pauses in a phase; its report or error goes to files.
fn pausing(lab: &Lab, program: &Program, phase: &str, name: &str) -> Result<Started> {
    let mut command = lab.gpucr();
    command
        .args(["dump", "--json", "--pid", &program.pid.to_string(), "--store", "store"])
        .args(["--name", name])
        .env("GPUCR_FAULT", format!("pause:{phase}"))
        .stdout(std::fs::File::create(lab.path(format!("{name}.json")))?)
        .stderr(std::fs::File::create(lab.path(format!("{name}.err")))?);
    Ok(Started::spawn(&mut command)?)
}

#[test]
fn two_dumps_and_a_gc_at_once() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut first = lab.at_work("sgd", &ARGS)?;
    // Something to free, which the dumps may rely on.
    let pid = first.pid.to_string();
    json(&lab, &dump_args(&pid, &["--leave-running", "--store", "store", "--name", "old"]))?;
    json(&lab, &["rm", "--json", "store/images/old"])?;
    first.wait_for_progress()?;
    let second = Lab::new();
    let mut other = second.at_work("sgd", &ARGS)?;
    let mut dumps =
        [pausing(&lab, &first, "store", "one")?, pausing(&lab, &other, "store", "two")?];
    std::thread::sleep(std::time::Duration::from_millis(500));
    let report = json(&lab, &["gc", "--json", "store"])?;
    for (dump, name) in dumps.iter_mut().zip(["one", "two"]) {
        let status = dump.wait()?;
        let error = std::fs::read_to_string(lab.path(format!("{name}.err")))?;
        ensure!(status.success(), "{name}: {status} {error}");
    }
    ensure!(report["missing_chunks"] == 0, "{report}");
    let report = json(&lab, &["gc", "--json", "store"])?;
    ensure!(report["images"] == 2 && report["missing_chunks"] == 0, "{report}");
    first.wait()?;
    other.wait()?;
    goes_on(&lab, &lab.path("store/images/one"), first, &expected)?;
    goes_on(&second, &lab.path("store/images/two"), other, &expected)
}

#[test]
fn a_dump_that_is_killed_leaves_nothing_in_the_store() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    json(&lab, &dump_args(&pid, &["--leave-running", "--store", "store", "--name", "old"]))?;
    let names = |dir: &str| -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in std::fs::read_dir(lab.path("store").join(dir))? {
            names.push(entry?.file_name().to_string_lossy().into_owned());
        }
        names.sort();
        Ok(names)
    };
    let before = (names("images")?, names("packs")?, names("index")?);
    for phase in ["copy", "store", "commit"] {
        program.wait_for_progress()?;
        let mut command = lab.gpucr();
        command.args(dump_args(&pid, &["--store", "store", "--name", "new"]));
        let output = finish(command.env("GPUCR_FAULT", format!("kill:{phase}")))?;
        ensure!(!output.status.success(), "{phase}: {}", show(&output));
        // The watchdog sees to it.
        let is_as_before = || -> Result<bool> {
            Ok((names("images")?, names("packs")?, names("index")?) == before)
        };
        until("the store is as before", || is_as_before().unwrap_or(false)).context(phase)?;
    }
    program.wait_for_progress()
}

#[test]
fn commands_on_stores_refuse_what_is_none() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("folder"))?;
    std::fs::write(lab.path("folder/precious"), "data")?;
    for command in ["ls", "gc"] {
        refused(&lab.run([command, "folder"])?, 1, &["folder is not a gpucr store"])?;
        refused(&lab.run([command, "none"])?, 1, &["none"])?;
    }
    refused(&lab.run(["rm", "folder"])?, 1, &["folder is not a gpucr image"])?;
    ensure!(lab.path("folder/precious").exists());
    refused(&lab.run(["dump", "--pid", "1", "--name", "x"])?, 2, &["--store"])?;
    refused(&lab.run(["dump", "--pid", "1", "--store", "s", "-o", "x"])?, 2, &["cannot be used"])?;
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    let output = lab.run(dump_args(&pid, &["--store", "folder"]))?;
    refused(&output, 1, &["folder is not a gpucr store", "new or empty", "Nothing was changed"])?;
    program.wait_for_progress()
}

/// Images are taken for as long as the program lives, and the last ones kept; each is whole.
#[test]
fn a_program_is_saved_again_and_again() -> Result<()> {
    let lab = Lab::new();
    let mut undisturbed = lab.start("scatter", &["--steps", "300"])?;
    undisturbed.result()?;
    let lab = Lab::new();
    let mut program = lab.at_work("scatter", &["--steps", "300"])?;
    let mut command = lab.gpucr();
    command
        .args(["dump", "--json", "--pid", &program.pid.to_string(), "--store", "store"])
        .args(["--every", "1s", "--keep", "2"]);
    let (out, err) = (lab.path("reports"), lab.path("reports.err"));
    command.stdout(File::create(&out)?).stderr(File::create(&err)?);
    let mut dumps = Started::spawn(&mut command)?;
    let lines = || std::fs::read_to_string(&out).map_or(0, |text| text.lines().count());
    for done in 1..=3 {
        until("a dump is done", || lines() >= done)?;
        program.wait_for_progress()?;
    }
    // With its end the dumps end.
    program.result()?;
    let status = dumps.wait()?;
    let output = Output { status, stdout: std::fs::read(&out)?, stderr: std::fs::read(&err)? };
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.series() == undisturbed.series(), "the program that ran on differs");
    let reports: Vec<Value> = String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(|line| Ok(serde_json::from_str(line)?))
        .collect::<Result<_>>()?;
    ensure!(reports.len() > 2, "{}", show(&output));
    // Most of the memory is as it was at the first dump.
    let new = |report: &Value| report["new_bytes"].as_u64().unwrap_or(u64::MAX);
    ensure!(new(&reports[1]) < new(&reports[0]) / 4 * 3, "{} {}", reports[0], reports[1]);
    let mut images: Vec<_> = std::fs::read_dir(lab.path("store/images"))?
        .map(|entry| Ok(entry?.path()))
        .collect::<Result<_>>()?;
    images.sort();
    ensure!(images.len() == 2, "{images:?}");
    let first = reports[0]["image"].as_str().context("a path")?;
    ensure!(!lab.path(first).exists(), "{first} is there still");
    let mut old = program;
    for image in images {
        lab.rewind(&old, &image)?;
        let mut restored = lab.restore(&image, old)?;
        restored.result()?;
        ensure!(restored.series() == undisturbed.series(), "{}: differs", image.display());
        old = restored;
    }
    Ok(())
}
