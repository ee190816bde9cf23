//! `gpucr restore --new-pids`: the same image several times at once, each with its own pids.

use std::fs::File;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, MAY_FALL_BACK, Piped, Started, binary, finish, refused, show, until};
use rustix::process::Signal;
use serde_json::Value;

const ARGS: [&str; 2] = ["--steps", "120"];

fn lines(path: &Path) -> Vec<String> {
    std::fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// The pids of a process, outermost first, and whether it lives.
fn inner_pid(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_ascii_whitespace().next_back()?.parse().ok()
}

/// Restores one image so often at once: all are at work at the same time before any may end.
fn at_once(name: &str, ways: &[&[&str]]) -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, name, &[])?;
    let (out, events) = (|n: usize| format!("out-{n}"), |n: usize| format!("events-{n}"));
    let restores = ways.iter().enumerate().map(|(n, args)| {
        piped.restore(&lab, &[args, &["--events", &events(n)][..]].concat(), &out(n))
    });
    let restores: Vec<_> = restores.collect();
    // A restored program must print something to show that it lives.
    piped.pace.allow(20)?;
    for n in 0..ways.len() {
        until("it goes on", || !lines(&lab.path(out(n))).is_empty())?;
        // A process that ends while its memory comes may be a reason to restore everything again.
        let has = |event: &str| {
            lab.events(&events(n)).is_ok_and(|all| all.iter().any(|e| e["event"] == event))
        };
        until("all of its memory is there", || has("restored"))?;
    }
    piped.pace.allow_all()?;
    for (n, restore) in restores.into_iter().enumerate() {
        let status = restore?.wait()?;
        ensure!(status.success(), "{name} {n}: {status}");
        let twice = piped.printed_twice(&lab, &out(n))?;
        let was_again = lab.events(&events(n))?.iter().any(|event| event["event"] == "again");
        ensure!(
            was_again || twice.is_empty(),
            "{name} {n} was restored once, and printed twice: {twice:?}"
        );
        ensure!(!was_again || MAY_FALL_BACK.contains(&name), "{name} {n} was restored again");
    }
    Ok(())
}

/// In full, and on demand.
fn twice_at_once(name: &str) -> Result<()> {
    at_once(name, &[&[], &["--on-demand"]])
}

gpucr_tests::each_workload!(twice_at_once);

#[test]
fn one_image_three_times_at_once() -> Result<()> {
    at_once("launcher", &[&[], &[], &[]])
}

#[test]
fn a_program_in_the_background_is_known_by_its_pid_outside() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    let pid = piped.pid;
    let mut outer = Vec::new();
    for _ in 0..2 {
        let output = lab.run(["restore", "--new-pids", "--detach", "--json", "image"])?;
        ensure!(output.status.success(), "{}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["inner_pid"] == pid, "{report}");
        let known = report["pid"].as_u64().context("pid")? as u32;
        ensure!(known != pid && inner_pid(known) == Some(pid), "{report}");
        outer.push(known);
    }
    // Both can be looked at from outside.
    let rows = lab.run(["ps", "--json", "--timeout", "20s"])?;
    let rows: Value = serde_json::from_slice(&rows.stdout)?;
    for pid in &outer {
        let found = rows.as_array().context("rows")?.iter().any(|row| row["pid"] == *pid);
        ensure!(found, "{pid} is not in {rows:#}");
        let traced = lab.run(["trace", "--no-observe", "--pid", &pid.to_string(), "--for", "0"])?;
        ensure!(traced.status.success(), "{}", show(&traced));
    }
    // And from inside dumped again.
    let (one, pid) = (outer[0].to_string(), pid.to_string());
    let mut inside = Command::new("nsenter");
    inside.args(["--target", &one, "--pid", "--mount"]).arg(binary("gpucr"));
    inside.args(["dump", "--pid", &pid, "-o"]).arg(lab.path("second"));
    let output = finish(&mut inside)?;
    ensure!(output.status.success(), "{}", show(&output));
    // Its namespace ends with it; the other one goes on to its end.
    until("its namespace ends", || inner_pid(outer[0]).is_none())?;
    ensure!(inner_pid(outer[1]).is_some());
    piped.pace.allow_all()?;
    until("it ends", || inner_pid(outer[1]).is_none())
}

/// By the pid that it has outside, to a place that is named from the directory of the command.
#[test]
fn an_instance_is_dumped_from_outside() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    // To a pipe: CRIU does not save files that were opened in another mount namespace.
    let mut first = lab.gpucr();
    first.args(["restore", "--new-pids", "image"]).stdout(Stdio::piped());
    let mut first = Started::spawn(&mut first)?;
    let (mut from, mut to) =
        (first.stdout.take().context("piped")?, File::create(lab.path("out"))?);
    let reader = std::thread::spawn(move || std::io::copy(&mut from, &mut to));
    piped.pace.allow(20)?;
    until("it goes on", || !lines(&lab.path("out")).is_empty())?;
    let outer = children(children(first.id())?[0])?[0];
    ensure!(inner_pid(outer) == Some(piped.pid) && outer != piped.pid);
    let dump = |args: &[&str], image: &str| -> Result<()> {
        let mut command = lab.gpucr();
        command.args(["dump", "--json", "--pid", &outer.to_string(), "-o", image]).args(args);
        let output = finish(&mut command)?;
        ensure!(output.status.success(), "{}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["pid"] == outer && lab.path(image).join("manifest").is_file(), "{report}");
        Ok(())
    };
    dump(&["--leave-running"], "running")?;
    // What fails is told as it would be without a namespace.
    let output = lab.run(["dump", "--pid", &outer.to_string(), "-o", "running"])?;
    refused(&output, 1, &["not empty", "Nothing was changed"])?;
    piped.pace.allow(20)?;
    let before = lines(&lab.path("out")).len();
    until("it runs on", || lines(&lab.path("out")).len() > before)?;
    dump(&[], "ended")?;
    ensure!(first.wait()?.code() == Some(128 + libc::SIGKILL));
    reader.join().map_err(|_| anyhow::anyhow!("it has panicked"))??;
    std::fs::rename(lab.path("image"), lab.path("original"))?;
    std::fs::rename(lab.path("ended"), lab.path("image"))?;
    let mut second = piped.restore(&lab, &[], "rest")?;
    piped.pace.allow_all()?;
    ensure!(second.wait()?.success());
    let all = [std::fs::read(lab.path("out"))?, std::fs::read(lab.path("rest"))?].concat();
    std::fs::write(lab.path("all"), all)?;
    piped.came_out_right(&lab, "all")
}

fn kill(pid: u32, signal: Signal) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid as i32).context("a pid")?;
    Ok(rustix::process::kill_process(pid, signal)?)
}

fn children(pid: u32) -> Result<Vec<u32>> {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    Ok(children.split_whitespace().map(str::parse).collect::<Result<_, _>>()?)
}

/// The first process of the namespace above the program.
fn first_of(pid: u32) -> Result<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let parent = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(1));
    Ok(parent.context("a parent")?.parse()?)
}

#[test]
fn signals_and_exit_codes_pass_through() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    let mut child = piped.restore(&lab, &[], "out-1")?;
    piped.pace.allow(20)?;
    until("it goes on", || !lines(&lab.path("out-1")).is_empty())?;
    kill(child.id(), Signal::TERM)?;
    ensure!(child.wait()?.code() == Some(128 + 15));
    // The command outside is killed: the program goes on.
    let mut child = piped.restore(&lab, &[], "out-2")?;
    piped.pace.allow(20)?;
    until("it goes on", || !lines(&lab.path("out-2")).is_empty())?;
    child.kill()?;
    child.wait()?;
    piped.pace.allow_all()?;
    until("it ends", || lines(&lab.path("out-2")).iter().any(|line| line.starts_with("result ")))
}

#[test]
fn the_death_of_the_first_process_ends_everything() -> Result<()> {
    let lab = Lab::new();
    let _piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    let output = lab.run(["restore", "--new-pids", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let pid: u32 = String::from_utf8(output.stdout)?.trim().parse()?;
    let first = first_of(pid)?;
    kill(first, Signal::KILL)?;
    until("the program ends", || inner_pid(pid).is_none())
}

/// gpucr dies in the middle, outside or inside, or fails there: nothing is left.
#[test]
fn nothing_is_left_of_a_restore_that_fails() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    let refused = |output: Output, phase: &str, word: &str| {
        ensure!(output.status.code() == Some(1), "{phase}: {}", show(&output));
        ensure!(
            String::from_utf8_lossy(&output.stderr).contains(word),
            "{phase}: {}",
            show(&output)
        );
        Ok(())
    };
    for phase in ["preflight", "load", "extract", "criu", "driver", "attach", "resume"] {
        let mut command = lab.gpucr();
        command.args(["restore", "--new-pids", "image"]);
        let output = finish(command.env("GPUCR_FAULT", format!("fail:{phase}")))?;
        refused(output, phase, "was asked for")?;

        let log = lab.path(format!("log-{phase}"));
        command.env("GPUCR_FAULT", format!("hold:{phase}")).env("GPUCR_LOG", "debug");
        command.env("GPUCR_FAULT_FILE", lab.path("never")).stderr(File::create(&log)?);
        let child = Started::spawn(command.stdout(Stdio::null()))?;
        let begun = format!("begins phase=\"{phase}\"");
        until("the phase begins", || lines(&log).iter().any(|line| line.contains(&begun)))?;
        let first = children(child.id())?;
        ensure!(first.len() == 1, "{first:?}");
        kill(first[0], Signal::KILL)?;
        let mut output = child.wait_with_output()?;
        output.stderr = std::fs::read(&log)?;
        refused(output, phase, "was killed")?;
    }
    until("nothing is left", || processes(&lab).is_empty())?;
    // The image is as it was.
    let mut child = piped.restore(&lab, &[], "out")?;
    piped.pace.allow_all()?;
    ensure!(child.wait()?.success());
    Ok(())
}

#[test]
fn the_namespace_ends_with_the_command_before_the_program_runs() -> Result<()> {
    let lab = Lab::new();
    let _piped = Piped::in_the_middle(&lab, "sgd", &ARGS)?;
    let mut command = lab.gpucr();
    command.args(["restore", "--new-pids", "image"]);
    command.env("GPUCR_FAULT", "hold:driver").env("GPUCR_FAULT_FILE", lab.path("never"));
    let mut child = Started::spawn(&mut command)?;
    let at_work = || processes(&lab).iter().any(|line| line.contains("workload"));
    until("the processes are there", at_work)?;
    child.kill()?;
    child.wait()?;
    until("nothing is left", || processes(&lab).is_empty())
}

/// The command lines of all processes that were started in this lab.
fn processes(lab: &Lab) -> Vec<String> {
    let home = lab.path(".").canonicalize().unwrap_or_default();
    let all = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let here = all
        .filter(|entry| std::fs::read_link(entry.path().join("cwd")).is_ok_and(|cwd| cwd == home));
    here.filter_map(|entry| std::fs::read_to_string(entry.path().join("cmdline")).ok()).collect()
}
