//! `gpucr trace`: what a running program reads and writes.

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Started, finish, refused, show, undisturbed, until};
use serde_json::Value;

fn traced(lab: &Lab, program: &Program, args: &[&str]) -> Result<Value> {
    traced_while(lab, program, args, || Ok(()))
}

/// Traces a program, and does something once its launches are recorded.
fn traced_while(
    lab: &Lab,
    program: &Program,
    args: &[&str],
    meanwhile: impl FnOnce() -> Result<()>,
) -> Result<Value> {
    let pid = program.pid.to_string();
    let log = lab.path("trace.log");
    let mut command = lab.gpucr();
    command.args(["trace", "--json", "--pid", &pid, "--for", "1.5s"]).args(args);
    command.env("GPUCR_LOG", "gpucr_core=debug").env("NO_COLOR", "1");
    command.stdout(std::process::Stdio::piped()).stderr(std::fs::File::create(&log)?);
    let trace = Started::spawn(&mut command)?;
    until_recording(&log)?;
    meanwhile()?;
    let output = trace.wait_with_output()?;
    ensure!(output.status.success(), "{}{}", show(&output), std::fs::read_to_string(&log)?);
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let processes = report["processes"].as_array().context("processes")?;
    ensure!(processes.len() == 1, "{report}");
    Ok(processes[0].clone())
}

fn until_recording(log: &std::path::Path) -> Result<()> {
    let said = || std::fs::read_to_string(log).unwrap_or_default();
    until("the trace records", || said().contains("recording")).with_context(said)
}

/// A workload that has made its first steps, and makes more when its pace allows them.
fn paced(lab: &Lab, name: &str, args: &[&str]) -> Result<(Program, Pace)> {
    let pace = Pace::new()?;
    pace.allow(10)?;
    let mut program = lab.start(name, &[args, &["--pace", pace.file()]].concat())?;
    program.wait_for("step ")?;
    Ok((program, pace))
}

fn row<'a>(process: &'a Value, list: &str, name: &str) -> Result<&'a Value> {
    let rows = process[list].as_array().context("rows")?;
    let found = rows.iter().find(|row| row["name"] == name);
    found.with_context(|| format!("no {name} in {process:#}"))
}

/// Parameter and direction of each word of a kernel that has pointed to device memory.
fn words(row: &Value) -> Vec<(u64, String)> {
    let words = row["words"].as_array().into_iter().flatten();
    words
        .map(|word| {
            let direction = word["direction"].as_str().unwrap_or_default();
            (word["parameter"].as_u64().unwrap_or(99), direction.to_owned())
        })
        .collect()
}

#[test]
fn a_program_is_described_by_its_launches_and_does_not_notice() -> Result<()> {
    let args = ["--steps", "300"];
    let expected = undisturbed("sgd", &args)?;
    let lab = Lab::new();
    let (mut program, pace) = paced(&lab, "sgd", &args)?;
    let process = traced_while(&lab, &program, &[], || pace.allow(200))?;
    ensure!(process["pid"] == program.pid && process["ended"] == false, "{process:#}");
    ensure!(process["observed"] == true && process["unknown_launches"] == 0, "{process:#}");
    let kernels = process["kernels"].as_array().context("kernels")?;
    let launches: u64 = kernels.iter().filter_map(|kernel| kernel["launches"].as_u64()).sum();
    ensure!(process["launches"] == launches && launches > 50, "{process:#}");
    let bytes: Vec<u64> =
        kernels.iter().filter_map(|kernel| kernel["writes"]["bytes"].as_u64()).collect();
    ensure!(bytes.is_sorted_by(|a, b| a >= b), "not in order of what they write: {bytes:?}");
    // sgd_update(weights, gradient, velocity, ...) changes two in place and reads the other.
    let update = row(&process, "kernels", "sgd_update")?;
    ensure!(update["idempotent"] == false, "{update:#}");
    ensure!(update["idempotent_reason"] == "reads and writes one argument", "{update:#}");
    ensure!(update["derived"] == serde_json::json!(["code"]), "{update:#}");
    let pair = |parameter, direction: &str| (parameter, direction.to_owned());
    let found = words(update);
    ensure!(
        found == [pair(0, "read-write"), pair(1, "read"), pair(2, "read-write")],
        "{found:?} {update:#}"
    );
    let batch = row(&process, "kernels", "mlp_batch")?;
    ensure!(batch["reads"]["allocations"] == 0 && batch["idempotent"] == true, "{batch:#}");
    // The loss is read back at each step.
    let copies = row(&process, "operations", "copies")?;
    ensure!(copies["reads"]["bytes"].as_u64() > Some(0), "{copies:#}");
    ensure!(copies["writes"]["bytes"] == 0 && copies["derived"][0] == "exact", "{copies:#}");
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{:#?}\nis not {expected:#?}", program.series());
    Ok(())
}

/// One of its arguments points to memory of the host, which it changes.
#[test]
fn a_kernel_that_changes_memory_of_the_host_is_not_said_to_be_idempotent() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.start("pinned", &["--steps", "4000", "--step-delay-ms", "5"])?;
    program.wait_for("step ")?;
    let process = traced(&lab, &program, &["--no-observe"])?;
    let direct = row(&process, "kernels", "pinned_mapped")?;
    ensure!(direct["launches"].as_u64() > Some(0) && direct["idempotent"].is_null(), "{direct:#}");
    ensure!(direct["idempotent_reason"] == "memory that is not followed", "{direct:#}");
    Ok(())
}

#[test]
fn pointers_that_cannot_be_seen_are_said_to_be_missing() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.start("indirect", &["--steps", "4000", "--step-delay-ms", "5"])?;
    program.wait_for("step ")?;
    let process = traced(&lab, &program, &["--no-observe"])?;
    ensure!(process["observed"] == false, "{process:#}");
    let touch = row(&process, "kernels", "table_touch")?;
    ensure!(touch["indirect"] == true && touch["idempotent"].is_null(), "{touch:#}");
    // The trace as a table for people; its last line explains the mark.
    let pid = program.pid.to_string();
    let output = lab.run(["trace", "--pid", &pid, "--for", "0.5"])?;
    let text = String::from_utf8(output.stdout.clone())?;
    let lines: Vec<&str> = text.lines().collect();
    ensure!(output.status.success() && lines.len() > 5, "{}", show(&output));
    ensure!(lines[0].starts_with(&format!("process {pid}: ")), "{text}");
    let heads: Vec<&str> = lines[2].split_whitespace().collect();
    let expected =
        ["KERNEL", "LAUNCHES", "ARGS", "READS", "WRITES", "FROM", "IDEMPOTENT", "INTERRUPTIBLE"];
    ensure!(heads == expected, "{text}");
    ensure!(text.contains("table_touch *") && text.contains("  between blocks"), "{text}");
    ensure!(touch["interruptible"] == "block", "{touch:#}");
    ensure!(text.contains("unknown: follows pointers in memory"), "{text}");
    ensure!(lines.last().is_some_and(|line| line.starts_with("* follows pointers")), "{text}");
    Ok(())
}

/// Kernels whose code says what they write do write it, and nothing else; one that follows pointers in
/// memory is found out.
#[test]
fn sets_are_checked_launch_by_launch() -> Result<()> {
    let args = ["--steps", "300"];
    let expected = undisturbed("sgd", &args)?;
    let lab = Lab::new();
    let (mut program, pace) = paced(&lab, "sgd", &args)?;
    let process = traced_while(&lab, &program, &["--check"], || pace.allow(200))?;
    let count = |name: &str| process["checked"][name].as_u64().unwrap_or(0);
    ensure!(count("launches") > 20 && count("wrong") == 0, "{process:#}");
    ensure!(count("exact") > 0, "{process:#}");
    ensure!(count("exact") + count("too_much") == count("launches"), "{process:#}");
    let update = row(&process, "kernels", "sgd_update")?;
    ensure!(update["checked"]["launches"] == update["launches"], "{update:#}");
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{:#?}\nis not {expected:#?}", program.series());

    let mut program = lab.start("indirect", &["--steps", "4000"])?;
    program.wait_for("step ")?;
    let process = traced(&lab, &program, &["--check"])?;
    let touch = row(&process, "kernels", "table_touch")?;
    ensure!(touch["checked"]["wrong"].as_u64() > Some(0), "{process:#}");
    let output =
        lab.run(["trace", "--check", "--for", "0.5", "--pid", &program.pid.to_string()])?;
    let text = String::from_utf8(output.stdout.clone())?;
    ensure!(text.contains("Checked, one by one: "), "{}", show(&output));
    ensure!(text.contains(" CHECKED"), "{text}");
    Ok(())
}

/// Launches that are idempotent are made a second time, and the program does not notice.
#[test]
fn launches_that_are_idempotent_are_made_twice() -> Result<()> {
    let args = ["--steps", "300"];
    let expected = undisturbed("sgd", &args)?;
    let lab = Lab::new();
    let (mut program, pace) = paced(&lab, "sgd", &args)?;
    let process = traced_while(&lab, &program, &["--check", "--twice"], || pace.allow(200))?;
    let batch = row(&process, "kernels", "mlp_batch")?;
    let twice = &batch["twice"];
    ensure!(twice["launches"] == batch["launches"], "{batch:#}");
    ensure!(twice["launches"].as_u64() > Some(0) && twice["differed"] == 0, "{batch:#}");
    ensure!(twice["skipped"] == 0, "{batch:#}");
    let update = row(&process, "kernels", "sgd_update")?;
    ensure!(update["twice"].is_null(), "{update:#}");
    let output =
        lab.run(["trace", "--twice", "--for", "0.5", "--pid", &program.pid.to_string()])?;
    refused(&output, 2, &["--check"])?;
    pace.allow_all()?;
    program.result()?;
    ensure!(program.series() == expected, "{:#?}\nis not {expected:#?}", program.series());
    Ok(())
}

/// A check that cannot look at the memory says so, and the program goes on.
#[test]
fn a_check_without_a_view_of_the_memory_is_refused() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.start("scatter", &["--steps", "4000", "--step-delay-ms", "5"])?;
    program.wait_for("step ")?;
    let mut command = lab.gpucr();
    command.args(["trace", "--check", "--pid", &program.pid.to_string(), "--for", "10"]);
    let output = finish(command.env("SOFTCUDA_FAULT", "cuCtxCreate_v2:1:2"))?;
    refused(&output, 1, &["cannot look at the device memory", "a context of its own"])?;
    program.wait_for_progress()
}

#[test]
fn what_cannot_be_traced_is_refused() -> Result<()> {
    let lab = Lab::new();
    let own = std::process::id().to_string();
    let output = lab.run(["trace", "--pid", &own, "--for", "1"])?;
    refused(&output, 1, &["runs under gpucr", "gpucr run"])?;
    // A dump and a trace of the same process take turns.
    let mut program = lab.start("scatter", &["--steps", "4000", "--step-delay-ms", "5"])?;
    program.wait_for("step ")?;
    let pid = program.pid.to_string();
    let mut long = lab.gpucr();
    long.args(["trace", "--json", "--no-observe", "--pid", &pid, "--for", "1h"]);
    let log = lab.path("trace.log");
    long.env("GPUCR_LOG", "gpucr_core=debug").stderr(std::fs::File::create(&log)?);
    let mut long = Started::spawn(long.stdout(std::process::Stdio::piped()))?;
    // An interrupt before it records would refuse it.
    until_recording(&log)?;
    let output = lab.run(["trace", "--pid", &pid, "--for", "0"])?;
    refused(&output, 1, &["another gpucr is at work"])?;
    // An interrupt ends it with what there is.
    let id = rustix::process::Pid::from_child(&long);
    rustix::process::kill_process(id, rustix::process::Signal::INT)?;
    let report = std::io::read_to_string(long.stdout.take().context("piped")?)?;
    ensure!(long.wait()?.success());
    let report: Value = serde_json::from_str(&report)?;
    ensure!(report["processes"][0]["pid"] == program.pid, "{report:#}");
    Ok(())
}
