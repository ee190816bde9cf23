//! Stores as people use them: one that is meant without being named, images by name, tags, lists, and what is forgotten.

use std::path::Path;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, finish, refused, show};
use serde_json::Value;

/// Runs gpucr with the lab's store as the one that is meant.
fn run(lab: &Lab, args: &[&str]) -> Result<Output> {
    finish(lab.gpucr().args(args).env("GPUCR_STORE", lab.path("store")))
}

/// The same, which has to succeed. Gives what is printed.
fn said(lab: &Lab, args: &[&str]) -> Result<String> {
    let output = run(lab, args)?;
    ensure!(output.status.success(), "{args:?}: {}", show(&output));
    Ok(String::from_utf8(output.stdout)?)
}

/// Three images of a program that runs on: `one`, `two` with a tag, and one with a name of its own.
fn dumped(lab: &Lab) -> Result<Program> {
    let program = lab.at_work("sgd", &["--steps", "60", "--step-delay-ms", "1"])?;
    let pid = program.pid.to_string();
    let dump = ["dump", "--leave-running", "--pid", &pid];
    said(lab, &[&dump[..], &["--name", "one"]].concat())?;
    said(lab, &[&dump[..], &["--name", "two", "--tag", "good", "--tag", "v=1"]].concat())?;
    // A second later by the clock of images.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    said(lab, &dump)?;
    Ok(program)
}

/// The names of the images in the store, the newest first.
fn listed(lab: &Lab, args: &[&str]) -> Result<Vec<String>> {
    let list = said(lab, &[&["ls", "--json", "--sort", "age"][..], args].concat())?;
    let list: Value = serde_json::from_str(&list)?;
    let images = list["images"].as_array().context("images")?;
    Ok(images.iter().map(|image| image["name"].as_str().unwrap_or_default().to_owned()).collect())
}

#[test]
fn images_are_named_by_their_names() -> Result<()> {
    let lab = Lab::new();
    let mut program = dumped(&lab)?;
    let names = listed(&lab, &[])?;
    ensure!(names.len() == 3 && names[0].starts_with("workload-"), "{names:?}");
    ensure!(said(&lab, &["verify", "latest"])?.contains(&names[0]), "the newest");
    said(&lab, &["inspect", "two"])?;
    ensure!(said(&lab, &["diff", "one", "latest"])?.contains("changed"));
    said(&lab, &["diff", "store/images/one", "two"])?;
    ensure!(listed(&lab, &["--tag", "good"])? == ["two"]);
    ensure!(listed(&lab, &["--filter", "on"])?.contains(&"one".to_owned()));
    let wide = said(&lab, &["ls", "--wide"])?;
    ensure!(
        wide.contains("IDENTITY") && wide.contains("good,v=1") && wide.contains("3 images"),
        "{wide}"
    );
    refused(&run(&lab, &["inspect", "three"])?, 1, &["no image three in the store", "gpucr ls"])?;

    // What lies in the current directory does not take the place of an image.
    std::fs::create_dir(lab.path("one"))?;
    let both = run(&lab, &["inspect", "one"])?;
    refused(&both, 2, &["in this directory and in the store", "./one", "images/one"])?;
    refused(&run(&lab, &["inspect", "./one"])?, 1, &["it has no manifest"])?;
    std::fs::remove_dir(lab.path("one"))?;

    program.kill();
    let output = run(&lab, &["restore", "--dry-run", "latest"])?;
    ensure!(output.status.success(), "{}", show(&output));
    for args in [&["restore", "latest"][..], &["restore", "--new-pids", "latest"]] {
        program.let_go()?;
        let output = run(&lab, args)?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
    }
    said(&lab, &["rm", "one", "latest"])?;
    ensure!(listed(&lab, &[])? == ["two"]);
    Ok(())
}

#[test]
fn a_file_of_settings_names_the_store() -> Result<()> {
    let lab = Lab::new();
    let mut program = dumped(&lab)?;
    program.kill();
    let settings = lab.path("settings/gpucr");
    std::fs::create_dir_all(&settings)?;
    let run = |text: &str, args: &[&str]| -> Result<Output> {
        std::fs::write(settings.join("config"), text)?;
        let mut command = lab.gpucr();
        command.args(args).env_remove("GPUCR_STORE").env("XDG_CONFIG_HOME", lab.path("settings"));
        finish(&mut command)
    };
    let good = format!("# ours\nstore = {}\n", lab.path("store").display());
    for args in [&["ls"][..], &["verify", "two"], &["gc"]] {
        let output = run(&good, args)?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
    }
    refused(&run("stor = x\n", &["ls"])?, 2, &["settings/gpucr/config, line 1", "store = DIR"])?;
    if !Path::new("/etc/gpucr/config").exists() {
        refused(&run("", &["ls"])?, 2, &["no store is named", "GPUCR_STORE"])?;
        let dump = ["dump", "--pid", "1", "--name", "x"];
        refused(&run("", &dump)?, 2, &["no store is named"])?;
        refused(&run("", &["inspect", "latest"])?, 1, &["latest", "need a default store"])?;
    }
    Ok(())
}

#[test]
fn what_is_told_of_a_wrong_use_of_every() -> Result<()> {
    let lab = Lab::new();
    let output = run(&lab, &["dump", "--pid", "1", "--every", "1s", "-o", "image"])?;
    refused(&output, 2, &["cannot be used with"])?;
    let output = run(&lab, &["dump", "--pid", "1", "--every", "10", "--store", "store"])?;
    refused(&output, 2, &["10s, 10m or 10h"])
}

#[test]
fn what_no_rule_keeps_is_forgotten() -> Result<()> {
    let lab = Lab::new();
    let mut program = dumped(&lab)?;
    program.kill();
    let names = listed(&lab, &[])?;
    refused(&run(&lab, &["forget"])?, 2, &["--keep-last"])?;
    let forget = ["forget", "--keep-last", "1"];
    let would = said(&lab, &[&forget[..], &["--dry-run"]].concat())?;
    ensure!(would.contains("2 images would be removed, 1 kept"), "{would}");
    ensure!(listed(&lab, &[])? == names, "nothing was removed");
    let done: Value = serde_json::from_str(&said(
        &lab,
        &[&forget[..], &["--keep-tag", "good", "--json"]].concat(),
    )?)?;
    ensure!(done["removed"] == serde_json::json!(["one"]), "{done}");
    ensure!(listed(&lab, &[])? == [names[0].clone(), "two".into()]);
    said(&lab, &["forget", "--keep-daily", "5", "--keep-within", "1d", "store"])?;
    ensure!(listed(&lab, &[])?.len() == 2, "all are of today");
    said(&lab, &["gc"])?;
    said(&lab, &["verify", "two"])?;
    Ok(())
}

#[test]
fn metrics_are_written_for_prometheus() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "60", "--step-delay-ms", "1"])?;
    lab.dump(&program, &lab.path("image"), &["--metrics", "dump.prom"])?;
    program.wait()?;
    let text = std::fs::read_to_string(lab.path("dump.prom"))?;
    for wanted in
        ["gpucr_dumps_total 1", "gpucr_dump_last_success 1", "phase_seconds{phase=\"gate\"}"]
    {
        ensure!(text.contains(wanted), "no {wanted}: {text}");
    }
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').context("a name and a value")?;
        ensure!(name.starts_with("gpucr_dump") && value.parse::<f64>().is_ok(), "{line}");
    }
    program.let_go()?;
    let output = lab.run(["restore", "image", "--metrics", "restore.prom"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let text = std::fs::read_to_string(lab.path("restore.prom"))?;
    ensure!(
        text.contains("gpucr_restores_total 1") && text.contains("gpucr_restore_running_seconds"),
        "{text}"
    );
    lab.run(["restore", "none", "--metrics", "restore.prom"])?;
    let text = std::fs::read_to_string(lab.path("restore.prom"))?;
    ensure!(text.contains("gpucr_restore_failures_total 1"), "{text}");
    Ok(())
}

/// The spans on a line of `--traces`: the names, and the whole one.
fn spans(line: &str) -> Result<(Vec<String>, Value)> {
    let line: Value = serde_json::from_str(line)?;
    let spans = &line["resourceSpans"][0]["scopeSpans"][0]["spans"];
    let spans = spans.as_array().context("spans")?;
    let names = spans.iter().filter_map(|span| span["name"].as_str().map(str::to_owned));
    Ok((names.collect(), spans[0].clone()))
}

#[test]
fn traces_are_written_for_opentelemetry() -> Result<()> {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "60", "--step-delay-ms", "1"])?;
    lab.dump(&program, &lab.path("image"), &["--traces", "spans.json"])?;
    program.wait()?;
    program.let_go()?;
    for (image, worked) in [("image", true), ("none", false)] {
        let mut command = lab.gpucr();
        command.env("TRACEPARENT", format!("00-{TRACE}-b7ad6b7169203331-01"));
        let output = command.args(["restore", image, "--traces", "spans.json"]).output()?;
        ensure!(output.status.success() == worked, "{}", show(&output));
    }
    let text = std::fs::read_to_string(lab.path("spans.json"))?;
    let lines: Vec<&str> = text.lines().collect();
    ensure!(lines.len() == 3, "{text}");
    let (names, dump) = spans(lines[0])?;
    ensure!(names.first().is_some_and(|name| name == "gpucr dump"), "{names:?}");
    ensure!(names.iter().any(|name| name == "gate") && dump["status"]["code"] == 1, "{text}");
    ensure!(dump["parentSpanId"] == "" && dump["traceId"] != TRACE, "{dump}");
    let (names, restore) = spans(lines[1])?;
    ensure!(names.iter().any(|name| name == "driver"), "{names:?}");
    ensure!(restore["traceId"] == TRACE && restore["status"]["code"] == 1, "{restore}");
    let (names, failed) = spans(lines[2])?;
    ensure!(names == ["gpucr restore"] && failed["status"]["code"] == 2, "{failed}");
    ensure!(failed["attributes"][0]["key"] == "error.type", "{failed}");
    Ok(())
}
