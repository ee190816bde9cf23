//! The way of gpucr into containers: what is in its way there, and what it leaves behind.

use std::fs::File;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_tests::container::{InContainer, Libraries, RootTree};
use gpucr_tests::{Lab, refused, show, until};
use rustix::process::{Pid, Signal, kill_process};

const ARGS: [&str; 3] = ["sgd", "--steps", "8"];
/// The steps that it makes before it is dumped.
const BEFORE: usize = 4;

fn dump(lab: &Lab, program: &InContainer, args: &[&str]) -> Result<()> {
    let pid = program.pid.to_string();
    let output = lab.run([&["dump", "--pid", &pid], args].concat())?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(())
}

/// The letter of the state of a process.
fn state(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn signal(pid: u32, signal: Signal) -> Result<()> {
    Ok(kill_process(Pid::from_raw(pid as i32).context("a pid")?, signal)?)
}

/// A dump of a program that is held up, by the gpucr in the container.
struct Held {
    command: std::process::Child,
    inner: u32,
    go: std::path::PathBuf,
}

impl Held {
    fn start(lab: &Lab, program: &InContainer, phase: &str) -> Result<Self> {
        let go = lab.path("go");
        let mut command = lab.gpucr();
        command.args(["dump", "--pid", &program.pid.to_string(), "-o", "image"]);
        command.env("GPUCR_FAULT", format!("hold:{phase}")).env("GPUCR_FAULT_FILE", &go);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut inner = None;
        until("gpucr is in the container", || {
            let pid = command.id();
            let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
            inner = children.ok().and_then(|all| all.split_whitespace().next()?.parse().ok());
            inner.is_some()
        })?;
        let inner = inner.context("it is there")?;
        until("it has begun", || unfinished(lab).is_ok_and(|count| count > 0))?;
        Ok(Self { command, inner, go })
    }
}

/// How many unfinished images there are.
fn unfinished(lab: &Lab) -> Result<usize> {
    let names = std::fs::read_dir(lab.path("."))?.collect::<std::io::Result<Vec<_>>>()?;
    let is_one = |name: &str| name.starts_with(".image.partial-");
    Ok(names.iter().filter(|entry| is_one(&entry.file_name().to_string_lossy())).count())
}

#[test]
fn the_first_process_runs_when_the_dump_is_over() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Mounted)?;
    let mut program = tree.start_below_another(&ARGS, BEFORE)?;
    dump(&lab, &program, &["-o", "image"])?;
    ensure!(state(program.inner).is_some_and(|state| state != 'T'), "it is stopped");
    ensure!(state(program.pid).is_none_or(|state| state == 'Z'), "the program was to end");
    ensure!(matches!(program.first.try_wait(), Ok(None)), "the container was to stay");
    Ok(())
}

#[test]
fn a_first_process_that_was_stopped_before_stays_so() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let mut program = tree.start(&ARGS, BEFORE)?;
    let is_stopped = || state(program.inner) == Some('T');
    signal(program.inner, Signal::STOP)?;
    until("it has stopped", is_stopped)?;
    for args in [&["--dry-run"][..], &["--leave-running", "-o", "one"], &["-o", "image"]] {
        dump(&lab, &program, args)?;
        ensure!(is_stopped(), "it goes on after {args:?}");
    }
    signal(program.inner, Signal::CONT)?;
    ensure!(program.first.wait()?.code() == Some(128 + libc::SIGKILL));
    Ok(())
}

/// Of capabilities(7).
const CAP_SYS_PTRACE: i32 = 19;
const CAP_SYS_ADMIN: i32 = 21;

/// What nobody there can get any more somebody may have.
#[test]
fn where_somebody_has_kept_what_gpucr_could_be_traced_with_it_does_not_go() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let lost = &[CAP_SYS_PTRACE, CAP_SYS_ADMIN];
    let mut program = tree.start_keeping(CAP_SYS_PTRACE, lost, &ARGS, BEFORE)?;
    let pid = program.pid.to_string();
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    refused(&output, 1, &["CAP_SYS_PTRACE", "--cap-drop SYS_PTRACE"])?;
    ensure!(matches!(program.first.try_wait(), Ok(None)), "it was to run on");
    Ok(())
}

/// A process of the container may stop gpucr, which is root as it is.
#[test]
fn a_gpucr_that_is_stopped_there_goes_on_and_leaves_no_core() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let program = tree.start(&ARGS, BEFORE)?;
    let held = Held::start(&lab, &program, "export")?;
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", held.inner))?;
    let core = limits.lines().find(|line| line.starts_with("Max core file size"));
    let core: Vec<_> = core.context("it is told")?.split_whitespace().skip(4).take(2).collect();
    ensure!(core == ["1", "1"], "{core:?}");
    signal(held.inner, Signal::STOP)?;
    File::create(&held.go)?;
    let output = held.command.wait_with_output()?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(show(&output).contains("was stopped by a signal"), "{}", show(&output));
    Ok(())
}

/// The kernel ends gpucr with the container, and the watchdog too.
#[test]
fn nothing_is_left_when_the_container_ends_meanwhile() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let mut program = tree.start(&ARGS, BEFORE)?;
    let held = Held::start(&lab, &program, "export")?;
    signal(program.inner, Signal::KILL)?;
    let output = held.command.wait_with_output()?;
    refused(&output, 1, &["was killed", "The program has ended"])?;
    ensure!(unfinished(&lab)? == 0 && !lab.path("image").exists(), "something is left");
    program.first.wait()?;
    Ok(())
}

#[test]
fn a_migration_is_refused_before_anything_is_started() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let mut program = tree.start(&ARGS, BEFORE)?;
    let pid = program.pid.to_string();
    let output = lab.run(["migrate", "--pid", &pid, "--to", "ssh://nowhere.invalid"])?;
    refused(&output, 1, &["is in a container", "gpucr restore --root DIR"])?;
    ensure!(matches!(program.first.try_wait(), Ok(None)), "it was to run on");
    Ok(())
}

/// CRIU could not make such mounts in the place of this host's.
#[test]
fn mounts_of_its_own_below_the_root_of_the_host_are_refused_with_what_to_do() -> Result<()> {
    let lab = Lab::new();
    // With nothing open from outside.
    let script = r#"for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval "exec $fd>&-"; done
        exec "$GPUCR" run --device soft -- "$WORKLOAD" sgd --step-delay-ms 20 > log 2>&1 < /dev/null"#;
    let mut command = Command::new("unshare");
    command.args(["--mount", "setsid", "--wait", "bash", "-c", script]).current_dir(lab.path("."));
    command
        .env("GPUCR", gpucr_tests::binary("gpucr"))
        .env("WORKLOAD", gpucr_tests::binary("workload"));
    let mut program = gpucr_tests::Started::spawn(&mut command)?;
    let log = || std::fs::read_to_string(lab.path("log")).unwrap_or_default();
    until("it is at work", || log().contains("step ")).with_context(log)?;
    let id = program.id();
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children"))?;
    let pid = children.split_whitespace().next().map_or(id.to_string(), str::to_owned);
    let words = ["mounts of its own", &format!("nsenter --target {pid} --mount gpucr")];
    let output = lab.run(["dump", "--dry-run", "--pid", &pid])?;
    ensure!(words.iter().all(|word| show(&output).contains(word)), "{}", show(&output));
    refused(&lab.run(["dump", "--pid", &pid, "-o", "image"])?, 1, &words)?;
    let mut inside = Command::new("nsenter");
    inside.args(["--target", &pid, "--mount"]).arg(gpucr_tests::binary("gpucr"));
    inside.args(["dump", "--pid", &pid, "-o"]).arg(lab.path("image"));
    let output = gpucr_tests::finish(&mut inside)?;
    ensure!(output.status.success(), "{}", show(&output));
    program.wait()?;
    Ok(())
}
