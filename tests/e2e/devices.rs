//! Programs that go on on another device than that of the dump.

use std::process::Output;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Started, exists, finish, refused, show, undisturbed, until};
use serde_json::Value;

const ARGS: [&str; 2] = ["--steps", "60"];

/// Two devices, for the programs and for gpucr.
const DEVICES: (&str, &str) = ("SOFTCUDA_DEVICES", "2");

fn lab() -> Lab {
    let mut lab = Lab::new();
    lab.environment.push((DEVICES.0.into(), DEVICES.1.into()));
    lab
}

fn gpucr(lab: &Lab, args: &[&str]) -> Result<Output> {
    finish(lab.gpucr().args(args).env(DEVICES.0, DEVICES.1))
}

fn dump(lab: &Lab, pid: u32, image: &str) -> Result<()> {
    let output = gpucr(lab, &["dump", "--pid", &pid.to_string(), "-o", image])?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(())
}

/// A program that was dumped on device 0 and has ended.
fn dumped(lab: &Lab, pace: &Pace) -> Result<Program> {
    pace.allow(20)?;
    let args = [&ARGS[..], &["--step-delay-ms", "5", "--pace", pace.file()]].concat();
    let mut program = lab.start("sgd", &args)?;
    program.wait_for("ready")?;
    dump(lab, program.pid, "image")?;
    program.wait()?;
    program.let_go()?;
    Ok(program)
}

/// The last digits of the UUIDs of an image's devices, which are those of their numbers.
fn devices(lab: &Lab, image: &str) -> Result<Vec<String>> {
    let summary: Value =
        serde_json::from_slice(&gpucr(lab, &["inspect", "--json", image])?.stdout)?;
    let uuids = summary["devices"].as_array().context("a list")?.iter();
    uuids.map(|device| Ok(device["uuid"].as_str().context("a UUID")?[38..].to_owned())).collect()
}

/// A word of what a report says of the only device that was moved.
fn text<'a>(report: &'a Value, side: &str, of: &str) -> &'a str {
    report["moved"][0][side][of].as_str().unwrap_or_default()
}

#[test]
fn a_program_moves_and_is_dumped_there() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS)?;
    let lab = lab();
    let pace = Pace::new()?;
    let program = dumped(&lab, &pace)?;
    ensure!(devices(&lab, "image")? == ["00"]);
    // All of its memory first, and on demand; by number, and by UUID.
    let uuid = "GPU-736f6674-6375-6461-2d64-657669636501";
    for (number, map) in ["0=1", &format!("0={uuid}")].into_iter().enumerate() {
        let mut command = lab.gpucr();
        command.args(["restore", "--device-map", map, "image"]).env(DEVICES.0, DEVICES.1);
        if number == 1 {
            command.arg("--on-demand");
            lab.rewind(&program, &lab.path("image"))?;
        }
        let before = program.output().len();
        pace.allow(5)?;
        let mut restored = Started::spawn(&mut command)?;
        while program.output().len() == before {
            ensure!(restored.try_wait()?.is_none_or(|status| status.success()), "it ended");
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let image = format!("moved-{number}");
        dump(&lab, program.pid, &image)?;
        restored.wait()?;
        ensure!(devices(&lab, &image)? == ["01"], "{:?}", devices(&lab, &image)?);
    }
    // Back to the first one, and who has to know is told.
    let old = format!("{uuid} (0000:02:00.0)");
    let new = format!("{}0 (0000:01:00.0)", &uuid[..uuid.len() - 1]);
    lab.rewind(&program, &lab.path("moved-1"))?;
    let back = ["restore", "--detach", "--json", "--device-map", "0=0", "moved-1"];
    let output = gpucr(&lab, &back)?;
    ensure!(output.status.success(), "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    let moved = format!("has moved from the softcuda {old} to {new}.");
    ensure!(said.contains(&moved) && said.contains("old PCI bus id"), "{said}");
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let side =
        |side: &str| format!("{} ({})", text(&report, side, "uuid"), text(&report, side, "bus_id"));
    ensure!(side("old") == old && side("new") == new, "{report}");
    dump(&lab, program.pid, "back")?;
    // Where it stays on its device there is nothing to say.
    pace.allow_all()?;
    let output = gpucr(&lab, &["restore", "--device-map", "0=0", "back"])?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(!String::from_utf8_lossy(&output.stderr).contains("moved"), "{}", show(&output));
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

#[test]
fn devices_that_are_not_there() -> Result<()> {
    let lab = lab();
    let pace = Pace::new()?;
    let program = dumped(&lab, &pace)?;
    for (map, says) in [("0=2", "no such device"), ("1=0", "no such device"), ("0=1,0=0", "twice")]
    {
        let output = gpucr(&lab, &["restore", "--device-map", map, "image"])?;
        refused(&output, 1, &[says, "--device-map", "Nothing was changed"])?;
    }
    refused(&gpucr(&lab, &["restore", "--device-map", "here=there", "image"])?, 2, &["OLD=NEW"])?;
    ensure!(!std::path::Path::new(&format!("/proc/{}", program.pid)).exists());
    Ok(())
}

#[test]
fn a_program_does_not_go_on_on_another_model() -> Result<()> {
    const MODEL: &str = "SOFTCUDA_DEVICE";
    let [hopper, other] = ["NVIDIA H100 PCIe,9.0,114,8G", "NVIDIA L4,8.9,58,8G"];
    let mut lab = Lab::new();
    lab.environment.push((MODEL.into(), hopper.into()));
    let pace = Pace::new()?;
    pace.allow(20)?;
    let mut program = lab.start("sgd", &[&ARGS[..], &["--pace", pace.file()]].concat())?;
    program.wait_for("ready")?;
    let pid = program.pid.to_string();
    let dump =
        lab.gpucr().args(["dump", "--pid", &pid, "-o", "image"]).env(MODEL, hopper).output()?;
    ensure!(dump.status.success(), "{}", show(&dump));
    program.wait()?;
    program.let_go()?;
    // The image's device is there by its UUID, and is another model.
    let restore =
        |model: &str| finish(lab.gpucr().args(["restore", "--detach", "image"]).env(MODEL, model));
    let names = "a program on NVIDIA H100 PCIe cannot continue on NVIDIA L4";
    refused(&restore(other)?, 1, &[names, "the same kind", "The image is as it was"])?;
    // It was ended, and init takes it away when it gets to it.
    until("what was made is gone", || !exists(program.pid))?;
    pace.allow_all()?;
    let output = finish(lab.gpucr().args(["restore", "image"]).env(MODEL, hopper))?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.series() == undisturbed("sgd", &ARGS)?, "differs:\n{}", program.output());
    Ok(())
}
