//! What a scheduler can do around a restore: a command before the program goes on, and word of it.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Started, exists, finish, refused, show, undisturbed, until};

const ARGS: [&str; 2] = ["--steps", "200"];

/// An image of a program in the middle of its work, which has ended.
fn dumped(lab: &Lab) -> Result<(PathBuf, Program)> {
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    program.wait()?;
    Ok((image, program))
}

#[test]
fn a_command_runs_before_the_program_does() -> Result<()> {
    let lab = Lab::new();
    let (_, mut program) = dumped(&lab)?;
    let printed = program.output();
    // All processes are there, and nobody was told that the program runs.
    let hook = "kill -0 $GPUCR_PID && test ! -e ready && echo $GPUCR_PID $GPUCR_IMAGE > hook && \
                cp log log-then; echo from the hook";
    let mut command = lab.gpucr();
    command.args(["restore", "--detach", "--exec-before-resume", hook, "--ready-file", "ready"]);
    let output = finish(command.arg("image"))?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(String::from_utf8_lossy(&output.stderr).contains("from the hook"), "{}", show(&output));
    ensure!(output.stdout == format!("{}\n", program.pid).as_bytes(), "{}", show(&output));
    let said = std::fs::read_to_string(lab.path("hook"))?;
    ensure!(said == format!("{} image\n", program.pid), "{said}");
    ensure!(std::fs::read_to_string(lab.path("log-then"))? == printed);
    ensure!(std::fs::read_to_string(lab.path("ready"))? == format!("{}\n", program.pid));
    ensure!(!lab.path("ready.unfinished").exists());
    program.let_go()?;
    until("its end", || program.series().last().is_some_and(|line| line.starts_with("result ")))?;
    ensure!(program.series() == undisturbed("sgd", &ARGS)?);
    Ok(())
}

#[test]
fn a_command_that_fails_ends_the_restore() -> Result<()> {
    let lab = Lab::new();
    let (image, program) = dumped(&lab)?;
    let printed = program.output();
    for namespace in [&[][..], &["--new-pids"]] {
        let mut command = lab.gpucr();
        command.args(["restore", "--exec-before-resume", "echo no such network; exit 7"]);
        let output = finish(command.args(["--ready-file", "ready"]).args(namespace).arg("image"))?;
        refused(&output, 1, &["no such network", "exit status: 7", "before any of"])?;
        ensure!(!lab.path("ready").exists() && !lab.path("ready.unfinished").exists());
        ensure!(program.output() == printed);
    }
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == undisturbed("sgd", &ARGS)?);
    Ok(())
}

#[test]
fn a_command_runs_before_the_program_is_stopped() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    let dump =
        |hook: &str| lab.run(["dump", "--pid", &pid, "-o", "image", "--exec-before-stop", hook]);
    refused(&dump("echo not now; exit 3")?, 1, &["not now", "exit status: 3", "keeps running"])?;
    ensure!(!lab.path("image").exists() && program.is_running());
    let hook = "kill -0 $GPUCR_PID && echo $GPUCR_PID $GPUCR_IMAGE > hook";
    let output = dump(hook)?;
    ensure!(output.status.success(), "{}", show(&output));
    let said = std::fs::read_to_string(lab.path("hook"))?;
    ensure!(said.starts_with(&format!("{pid} ")) && said.ends_with("image\n"), "{said}");
    program.wait()?;
    let mut program = lab.restore(&lab.path("image"), program)?;
    program.result()?;
    ensure!(program.series() == undisturbed("sgd", &ARGS)?);
    Ok(())
}

#[test]
fn an_interrupt_ends_the_command_too() -> Result<()> {
    let lab = Lab::new();
    let (_, _program) = dumped(&lab)?;
    let mut command = lab.gpucr();
    command.args(["restore", "--exec-before-resume", "echo $$ > hook; sleep 1000", "image"]);
    let mut child = Started::spawn(&mut command)?;
    let said = || std::fs::read_to_string(lab.path("hook")).unwrap_or_default();
    until("the hook starts", || said().ends_with('\n'))?;
    let shell: u32 = said().trim().parse()?;
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT)?;
    ensure!(child.wait()?.code() == Some(1));
    ensure!(!exists(shell), "the hook goes on");
    Ok(())
}

#[test]
fn a_descriptor_tells_that_the_program_runs() -> Result<()> {
    let lab = Lab::new();
    let (_, mut program) = dumped(&lab)?;
    let (mut reading, writing) = std::io::pipe()?;
    rustix::io::fcntl_setfd(&writing, rustix::io::FdFlags::empty())?;
    let mut command = lab.gpucr();
    command.args(["restore", "--new-pids", "--detach", "--ready-fd"]);
    command.arg(writing.as_raw_fd().to_string()).arg("image");
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}", show(&output));
    drop((command, writing));
    // Its end shows that nobody keeps it open, the program least of all.
    let mut said = String::new();
    reading.read_to_string(&mut said)?;
    ensure!(said.as_bytes() == output.stdout, "{said:?} {}", show(&output));
    let inner = std::fs::read_to_string(format!("/proc/{}/status", said.trim()))?;
    let inner = inner.lines().find_map(|line| line.strip_prefix("NSpid:")).context("pids")?;
    ensure!(inner.split_whitespace().last() == Some(&program.pid.to_string()), "{inner}");
    program.let_go()?;
    // What cannot be told is refused before anything is restored.
    let output = lab.run(["restore", "--new-pids", "--ready-fd", "77", "image"])?;
    refused(&output, 1, &["--ready-fd", "Bad file descriptor"])?;
    let output = lab.run(["restore", "--new-pids", "--ready-file", "no/where", "image"])?;
    refused(&output, 1, &["--ready-file", "No such file"])
}

#[test]
fn events_tell_what_happens() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(20)?;
    let mut program = lab.start("sgd", &["--steps", "40", "--pace", pace.file()])?;
    program.wait_for("step ")?;
    let pid = program.pid.to_string();
    let output = lab.run(["dump", "--pid", &pid, "-o", "image", "--events", "dump.events"])?;
    ensure!(output.status.success(), "{}", show(&output));
    program.wait()?;
    program.let_go()?;
    pace.allow_all()?;
    let told = lab.events("dump.events")?;
    let names: Vec<_> = told.iter().map(|event| event["event"].clone()).collect();
    ensure!(names.last() == Some(&"dumped".into()), "{told:?}");
    ensure!(told[0]["phase"] == "preflight" && names.iter().filter(|n| *n == "phase").count() > 5);
    ensure!(
        told.last().is_some_and(|event| event["pid"] == program.pid && event["image"] == "image")
    );
    ensure!(told.windows(2).all(|two| two[0]["ms"].as_f64() <= two[1]["ms"].as_f64()), "{told:?}");

    for (number, args) in
        [&[][..], &["--new-pids"], &["--on-demand", "--new-pids"]].iter().enumerate()
    {
        let file = format!("restore-{number}.events");
        let restore = [&["restore", "--events", &file][..], args, &["image"]].concat();
        let output = lab.run(restore)?;
        ensure!(output.status.success(), "{}", show(&output));
        let told = lab.events(&file)?;
        let at = |name: &str| {
            told.iter().position(|event| event["event"] == name).context(name.to_owned())
        };
        let (running, restored, ended) = (at("running")?, at("restored")?, at("ended")?);
        // With a namespace two processes write, each in its own order.
        ensure!(running < ended && restored < ended && told[ended]["exit_code"] == 0, "{told:?}");
        let pid = &told[running][if number == 0 { "pid" } else { "inner_pid" }];
        ensure!(*pid == program.pid, "{told:?}");
        lab.rewind(&program, &lab.path("image"))?;
    }
    // What fails is told too.
    let output = lab.run(["restore", "--events", "failed.events", "image/packs"])?;
    ensure!(!output.status.success());
    let told = lab.events("failed.events")?;
    ensure!(told.last().is_some_and(|event| event["event"] == "failed"), "{told:?}");
    refused(&lab.run(["restore", "--events", "none/file", "image"])?, 1, &["--events"])
}
