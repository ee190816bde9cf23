//! Dumps that a signal or the program itself asks for.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::watched::{STEPS, Watched, images, signal};
use gpucr_tests::{Lab, Pace, binary, finish, kill, show, undisturbed, until};

const SIGNALS: [&str; 4] = ["--on-signal", "usr1=sync,usr2=now", "--restart", "1"];

/// Nothing is copied ahead: the workloads are not held, and on a busy machine that takes long.
const STOP: [&str; 2] = ["--protocol", "stop"];

/// A program that handles a signal, and starts the workload.
const HANDLER: &str = r#"
import signal, subprocess, sys
signal.signal(signal.SIGUSR1, lambda *_: print("caught", flush=True))
sys.exit(subprocess.call(sys.argv[1:]))
"#;

#[test]
fn signals_to_gpucr_run_save_the_program() -> Result<()> {
    let lab = Lab::new();
    let mut watched = Watched::held(&lab, &SIGNALS, &[])?;
    // It is held, and so waits for nothing; and it does not handle the signal that schedulers send to all.
    signal(watched.pid()?, libc::SIGUSR2)?;
    signal(watched.run.pid, libc::SIGUSR2)?;
    watched.wait_for_images(1)?;
    signal(watched.run.pid, libc::SIGUSR1)?;
    let mut looks = 0;
    until("an image behind a call that waits", || {
        looks += 1;
        // It gets further step by step, but not to its end.
        let may_go_on = looks % 40 == 0 && looks < 40 * 15;
        let _ = may_go_on.then(|| watched.pace.allow(1));
        watched.images().len() > 1
    })?;
    kill(watched.pid()?)?;
    watched.waits_for_restore()?;
    watched.comes_out_right()
}

#[test]
fn a_program_that_handles_the_signal_gets_what_is_sent_to_it() -> Result<()> {
    let lab = Lab::new();
    let front = ["python3", "-c", HANDLER];
    let mut watched = Watched::of(&lab, &front, &SIGNALS, &[])?;
    let workload = watched.pid()?;
    let status = std::fs::read_to_string(format!("/proc/{workload}/status"))?;
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    let root: u32 = parent.unwrap_or_default().trim().parse()?;
    signal(watched.run.pid, libc::SIGUSR2)?;
    watched.wait_for_images(1)?;
    ensure!(!watched.run.output().contains("caught"), "{}", watched.run.output());
    signal(root, libc::SIGUSR1)?;
    watched.run.wait_for("caught")?;
    ensure!(watched.images().len() == 1, "it was saved: {:?}", watched.images());
    // And so in its second life.
    kill(root)?;
    watched.waits_for_restore()?;
    let caught = || watched.run.output().matches("caught").count();
    until("the handler is there again", || signal(root, libc::SIGUSR1).is_ok() && caught() > 1)?;
    watched.comes_out_right()
}

#[test]
fn a_dump_waits_for_a_call_that_waits_for_the_device() -> Result<()> {
    let lab = Lab::new();
    for workload in ["sgd", "threads"] {
        // More steps than it makes in the time.
        let program = lab.at_work(workload, &["--steps", "5000", "--step-delay-ms", "20"])?;
        let image = lab.path(format!("image-{workload}"));
        let report = lab.dump(
            &program,
            &image,
            &[&STOP[..], &["--at-sync=5m", "--leave-running"]].concat(),
        )?;
        ensure!(report["at_sync"] == true, "{workload}: {report}");
        let report = lab.dump(&program, &lab.path(format!("second-{workload}")), &STOP)?;
        ensure!(report["at_sync"].is_null(), "{workload}: {report}");
    }
    // One that does not come there is stopped where it is.
    let mut program = lab.at_work("sgd", &["--steps", "40"])?;
    program.wait_for("step 30")?;
    let image = lab.path("image");
    let report = lab.dump(&program, &image, &["--at-sync=200ms"])?;
    ensure!(report["at_sync"] == false, "{report}");
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    Ok(())
}

/// As Slurm runs it: the shell is signalled before the time is over, the job is queued again and started once more.
#[test]
fn a_job_of_slurm_goes_on_where_it_was_saved() -> Result<()> {
    let lab = Lab::new();
    let expected = undisturbed("sgd", &STEPS)?;
    let pace = Pace::new()?;
    pace.allow(20)?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/examples/slurm.sh");
    // What the script calls: this gpucr, and a scheduler that only notes what it is told.
    let tools = lab.path("tools");
    std::fs::create_dir(&tools)?;
    std::os::unix::fs::symlink(binary("gpucr"), tools.join("gpucr"))?;
    let scontrol = tools.join("scontrol");
    std::fs::write(&scontrol, "#!/bin/sh\necho scontrol \"$@\"\n")?;
    std::fs::set_permissions(&scontrol, std::fs::Permissions::from_mode(0o755))?;
    let path = std::env::var("PATH").context("there is a PATH")?;
    let job = |log: &str| {
        let mut command = Command::new("bash");
        command.arg(&script).arg(binary("workload")).arg("sgd").args(STEPS);
        command.args(["--pace", pace.file(), "--log", "steps"]).current_dir(lab.path(""));
        command.env("PATH", format!("{}:{path}", tools.display()));
        command.env("GPUCR_JOBS", lab.path("jobs")).env("SLURM_JOB_ID", "7");
        lab.spawn(command, log)
    };
    let mut first = job("first")?;
    first.wait_for("step ")?;
    signal(first.pid, libc::SIGUSR1)?;
    let status = first.wait()?;
    let said = first.output();
    ensure!(status.success() && said.contains("scontrol requeue 7"), "{status}: {said}");
    ensure!(said.contains("saved and ended") && !said.contains("result"), "{said}");
    ensure!(images(&lab.path("jobs/7")).len() == 1, "{said}");

    pace.allow_all()?;
    let mut second = job("second")?;
    let status = second.wait()?;
    let said = second.output();
    ensure!(status.success() && said.contains("resuming from the image"), "{status}: {said}");
    let steps = std::fs::read_to_string(lab.path("steps"))?;
    let steps =
        steps.lines().filter(|line| line.starts_with("step ") || line.starts_with("result "));
    ensure!(steps.eq(expected.iter().map(String::as_str)), "{said}");

    // A job that fails does so with its own exit status.
    let mut command = Command::new("bash");
    command.arg(&script).args(["sh", "-c", "exit 3"]).current_dir(lab.path(""));
    command.env("PATH", format!("{}:{path}", tools.display()));
    command.env("GPUCR_JOBS", lab.path("jobs")).env("SLURM_JOB_ID", "8");
    let output = finish(&mut command)?;
    ensure!(output.status.code() == Some(3), "{}", show(&output));
    Ok(())
}
