//! Whatever fails in a dump or a restore: either the program goes on and ends well, or the image
//! is complete, and the message says which.

use std::process::Output;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{
    Dumped, Lab, PausedDump, Program, SmallDisk, Squatter, Started, exists, finish, refused, show,
    undisturbed, until,
};

/// The phases of a dump, in order.
const DUMP_PHASES: [&str; 11] = [
    "preflight",
    "attach",
    "precopy",
    "gate",
    "export",
    "validate",
    "copy",
    "detach",
    "checkpoint",
    "criu",
    "store",
];
/// Phases on whose beginning nothing of a program has been touched.
const UNTOUCHED: [&str; 2] = ["preflight", "attach"];
/// What else of a dump can fail: each side of what is done at once, both together, and the commit.
const BETWEEN: [&str; 4] = ["detached", "validated", "validated,fail:detached", "commit"];
/// The phases of a restore, in order.
const RESTORE_PHASES: [&str; 6] = ["preflight", "load", "extract", "criu", "driver", "attach"];

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];

fn dump_with(lab: &Lab, program: &Program, environment: &[(&str, &str)]) -> Result<Output> {
    let mut command = lab.gpucr();
    command.args(["dump", "--pid", &program.pid.to_string(), "-o", "image"]);
    finish(command.envs(environment.iter().copied()))
}

/// The program goes on after a dump that failed, ends as if nothing had been, and can be dumped
/// again meanwhile.
fn goes_on(lab: &Lab, mut program: Program, expected: &[String]) -> Result<()> {
    program.wait_for_progress()?;
    lab.holds_only(&["log"])?;
    let image = lab.path("second");
    // The quickest, before the program comes to its end.
    lab.dump(&program, &image, &["--protocol", "stop"]).context("a second dump")?;
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

#[test]
fn a_failure_in_any_phase_of_a_dump_rolls_it_back() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for phase in DUMP_PHASES.into_iter().chain(BETWEEN) {
        let lab = Lab::new();
        let program = lab.at_work("sgd", &ARGS)?;
        let fault = format!("fail:{phase}");
        let output = dump_with(&lab, &program, &[("GPUCR_FAULT", &fault)])?;
        ensure!(output.status.code() == Some(1), "{phase}: {}", show(&output));
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        let said = if UNTOUCHED.contains(&phase) { "Nothing was changed" } else { "rolled back" };
        ensure!(message.contains(said), "{phase}: {message}");
        goes_on(&lab, program, &expected).with_context(|| format!("{phase}: {message}"))?;
    }
    Ok(())
}

#[test]
fn gpucr_killed_in_any_phase_of_a_dump_leaves_the_program_running() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    // Hashing ends before or after the detach, as it happens.
    for phase in DUMP_PHASES.into_iter().chain(["detached", "validated", "left-memory", "commit"]) {
        let lab = Lab::new();
        let program = lab.at_work("sgd", &ARGS)?;
        let fault = format!("kill:{phase}");
        let output = dump_with(&lab, &program, &[("GPUCR_FAULT", &fault)])?;
        ensure!(!output.status.success(), "{phase}: {}", show(&output));
        goes_on(&lab, program, &expected).with_context(|| format!("killed in {phase}"))?;
    }
    Ok(())
}

/// The watchdog of a gpucr that was killed has the program to itself until all of it runs again; another dump waits for
/// that.
#[test]
fn a_dump_waits_for_the_watchdog_of_one_that_was_killed() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for phase in ["gate", "checkpoint", "criu"] {
        let lab = Lab::new();
        let program = lab.at_work("sgd", &ARGS)?;
        // The watchdog takes its time, so that the second dump comes before it.
        let fault = format!("kill:{phase},pause:left-alone");
        let output = dump_with(&lab, &program, &[("GPUCR_FAULT", &fault)])?;
        ensure!(!output.status.success(), "{phase}: {}", show(&output));
        let image = lab.path("second");
        let dumped = lab.dump(&program, &image, &["--protocol", "stop"]);
        dumped.with_context(|| format!("after a death in {phase}"))?;
        let mut restored = lab.restore(&image, program)?;
        restored.result()?;
        ensure!(restored.series() == expected, "{phase}: differs:\n{}", restored.output());
    }
    Ok(())
}

/// Memory that cannot be read from a frozen program is written by CRIU, in a second try; where CRIU writes it in any
/// case, nothing is read.
#[test]
fn memory_that_cannot_be_read_from_the_program_is_written_by_criu() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for (left_running, environment) in [
        (false, &[("GPUCR_FAULT", "fail:left-memory")][..]),
        (true, &[("GPUCR_FAULT", "fail:left-memory")]),
        (false, &[("GPUCR_FAULT", "kill:left-memory"), ("GPUCR_CRIU_WRITES_MEMORY", "1")]),
    ] {
        let lab = Lab::new();
        let mut program = lab.at_work("sgd", &ARGS)?;
        let mut command = lab.gpucr();
        command.args(["dump", "--pid", &program.pid.to_string(), "-o", "image"]);
        command.args(left_running.then_some("--leave-running"));
        let output = finish(command.envs(environment.iter().copied()))?;
        ensure!(output.status.success(), "{environment:?}: {}", show(&output));
        if left_running {
            program.result()?;
            ensure!(program.series() == expected, "the program that ran on differs");
            lab.rewind(&program, &lab.path("image"))?;
        } else {
            program.wait()?;
        }
        let mut restored = lab.restore(&lab.path("image"), program)?;
        restored.result()?;
        ensure!(restored.series() == expected, "{environment:?}: the restored program differs");
    }
    Ok(())
}

#[test]
fn gpucr_killed_after_the_commit_leaves_a_complete_image_and_a_running_program() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let mut command = lab.gpucr();
    command
        .args(["dump", "--leave-running", "--protocol", "recopy", "-o", "image"])
        .args(["--pid", &program.pid.to_string()])
        .env("GPUCR_FAULT", "kill:resume");
    let output = finish(&mut command)?;
    ensure!(!output.status.success(), "{}", show(&output));
    program.result()?;
    ensure!(program.series() == expected, "the program that ran on differs");
    lab.rewind(&program, &lab.path("image"))?;
    let mut restored = lab.restore(&lab.path("image"), program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "the restored program differs");
    Ok(())
}

#[test]
fn a_restore_that_fails_or_is_killed_leaves_the_image_and_no_process() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    for phase in RESTORE_PHASES {
        for fault in ["fail", "kill"] {
            let mut command = lab.gpucr();
            command.arg("restore").arg(&image).env("GPUCR_FAULT", format!("{fault}:{phase}"));
            let output = finish(&mut command)?;
            ensure!(!output.status.success(), "{fault}:{phase}: {}", show(&output));
            let ended = until("no process is left", || !exists(program.pid));
            ended.with_context(|| format!("{fault}:{phase}"))?;
            lab.holds_only(&["log", "image"])?;
        }
    }
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// Disks that are full at ever later points of the dump, up to one that has room enough.
#[test]
fn a_full_disk_rolls_the_dump_back() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work("sgd", &ARGS[..2])?;
    let (mut untouched, mut rolled_back) = (0, 0);
    for kib in (1024..64 << 10).step_by(768) {
        let disk = SmallDisk::mount(lab.path("disk"), kib)?;
        let mut command = lab.gpucr();
        command.args(["dump", "--pid", &program.pid.to_string(), "-o", "disk/image"]);
        let output = finish(&mut command)?;
        if output.status.success() {
            ensure!(untouched > 0 && rolled_back > 0, "{untouched} {rolled_back}");
            let mut program = lab.restore(&lab.path("disk/image"), program)?;
            program.kill();
            drop(disk);
            let lines = program.series();
            ensure!(expected.starts_with(&lines), "differs:\n{}", program.output());
            return Ok(());
        }
        let left: Vec<_> = std::fs::read_dir(lab.path("disk"))?.collect();
        ensure!(output.status.code() == Some(1), "{}", show(&output));
        ensure!(left.is_empty(), "left on the full disk: {left:?}");
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(message.contains("space"), "{message}");
        untouched += u32::from(message.contains("Nothing was changed"));
        rolled_back += u32::from(message.contains("rolled back"));
    }
    anyhow::bail!("no disk was large enough")
}

/// A device that admits no second context: the program copies by itself.
#[test]
fn without_room_for_a_second_context_memory_is_copied_from_inside() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for fault in ["cuCtxCreate_v2:1:2", "cuCtxCreate_v2:1:46", "cuMemHostRegister_v2:1:2"] {
        is_copied("sgd", "inside", fault, &expected)?;
    }
    Ok(())
}

/// In parts, each to and from its own place.
#[test]
fn memory_larger_than_what_it_passes_through_is_copied_from_inside() -> Result<()> {
    is_copied("one-block", "inside", "cuCtxCreate_v2:1:2", &undisturbed("one-block", &ARGS[..2])?)
}

/// Then it allocates what it pins.
#[test]
fn a_driver_need_not_pin_what_it_has_not_allocated() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for fault in ["cuMemHostRegister_v2:1:801", "cuMemHostRegister_v2:2:1"] {
        is_copied("sgd", "outside", fault, &expected)?;
    }
    Ok(())
}

/// Dumps and restores with a fault of gpucr's own driver. The dump says that it copied this way.
fn is_copied(name: &str, way: &str, fault: &str, expected: &[String]) -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work(name, &ARGS)?;
    let image = lab.path("image");
    let mut command = lab.gpucr();
    command.args(["dump", "--json", "--pid", &program.pid.to_string(), "-o", "image"]);
    let output = finish(command.env("SOFTCUDA_FAULT", fault))?;
    ensure!(output.status.success(), "{fault}: {}", show(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["copied"] == way, "{fault}: {report}");
    // And the restore in the same corner.
    let mut program = lab.restore_with(&image, program, &[("SOFTCUDA_FAULT", fault)])?;
    program.result()?;
    ensure!(program.series() == expected, "{fault}: differs:\n{}", program.output());
    Ok(())
}

/// Neither gpucr nor the program itself gets the memory.
#[test]
fn a_device_that_is_too_small_is_one_clear_error() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let mut lab = Lab::new();
    lab.environment.push(("SOFTCUDA_FAULT".into(), "cuMemCreate:2:2".into()));
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    let mut command = lab.gpucr();
    let output =
        finish(command.args(["restore", "image"]).env("SOFTCUDA_FAULT", "cuCtxCreate_v2:1:2"))?;
    refused(&output, 1, &["no memory for block", "were ended again", "free memory of the device"])?;
    ensure!(!exists(program.pid), "something is left");
    let mut program = lab.restore_with(&image, program, &[("SOFTCUDA_FAULT", "")])?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// The host side of a program that was dumped at its end comes there while the restore is at work.
#[test]
fn a_driver_that_shuts_down_before_it_has_its_stacks_back_is_no_failure() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let mut lab = Lab::new();
    // The first call makes them smaller.
    lab.environment.push(("SOFTCUDA_FAULT".into(), "cuCtxSetLimit:2:4".into()));
    let program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// gpucr is dead, and the driver refuses more than one way back.
#[test]
fn the_watchdog_does_not_give_up() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let refusals: Vec<String> =
        (1..=5).map(|call| format!("cuCheckpointProcessRestore:{call}:2")).collect();
    let (kill, refusals) = (("GPUCR_FAULT", "kill:criu"), refusals.join(","));
    let output = dump_with(&lab, &program, &[kill, ("SOFTCUDA_FAULT", &refusals)])?;
    ensure!(!output.status.success(), "{}", show(&output));
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A refusal that passes, of gpucr's own driver or of the program's: the way back is tried once more.
#[test]
fn a_resume_that_fails_once_is_done_again() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let of_gpucr = ["cuCheckpointProcessRestore:1:2", "cuCheckpointProcessUnlock:1:999"];
    let of_program = ["cuMemImportFromShareableHandle:1:2"];
    let faults = of_gpucr.map(|fault| (fault, "")).into_iter();
    for (own, programs) in faults.chain(of_program.map(|fault| ("", fault))) {
        let lab = Lab::new();
        let mut program = lab.at_work_with("sgd", &ARGS, &[("SOFTCUDA_FAULT", programs)])?;
        let mut dump = lab.gpucr();
        dump.args(["dump", "--leave-running", "--json", "-o", "image"]);
        dump.args(["--pid", &program.pid.to_string()]).env("SOFTCUDA_FAULT", own);
        let output = finish(&mut dump)?;
        let way = || format!("{own}{programs}: {}", show(&output));
        ensure!(output.status.success(), "{}", way());
        program.result().with_context(way)?;
        ensure!(program.series() == expected, "{}: differs:\n{}", way(), program.output());
    }
    Ok(())
}

#[test]
fn a_driver_that_refuses_its_checkpoint_rolls_the_dump_back() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for fault in ["cuCheckpointProcessLock:1:600", "cuCheckpointProcessCheckpoint:1:999"] {
        let lab = Lab::new();
        let program = lab.at_work("sgd", &ARGS)?;
        let output = dump_with(&lab, &program, &[("SOFTCUDA_FAULT", fault)])?;
        ensure!(output.status.code() == Some(1), "{fault}: {}", show(&output));
        goes_on(&lab, program, &expected).with_context(|| fault.to_owned())?;
    }
    Ok(())
}

#[test]
fn a_program_that_dies_during_its_dump_is_reported_as_ended() -> Result<()> {
    for phase in ["preflight", "attach", "gate", "validate", "copy", "detach", "criu"] {
        let lab = Lab::new();
        let mut program = lab.at_work("sgd", &ARGS)?;
        let dump = PausedDump::start(&lab, &program, &[], &format!("hold:{phase}"))?;
        program.kill();
        let message = dump.fails()?;
        ensure!(message.contains("ended"), "{phase}: {message}");
        lab.holds_only(&["log", "dump.log", "dump.json", "go"])?;
    }
    Ok(())
}

#[test]
fn a_kernel_that_runs_too_long_makes_the_gate_give_up() -> Result<()> {
    let args = ["--size", "medium", "--steps", "20"];
    let plain = Lab::new();
    let mut uninterrupted = plain.start("stencil", &args)?;
    uninterrupted.result()?;
    let lab = Lab::new();
    let slow: Vec<String> = (3..7).map(|kernel| format!("kernel:{kernel}:slow=2000")).collect();
    let slow = [("SOFTCUDA_FAULT", slow.join(","))];
    let slow = slow.each_ref().map(|(name, value)| (*name, value.as_str()));
    let mut program = lab.start_with("stencil", &args, &slow)?;
    program.wait_for("step ")?;
    let pid = program.pid.to_string();
    // A dump may come just between two kernels.
    let mut output = None;
    for number in 0..8 {
        let image = format!("image-{number}");
        let mut command = lab.gpucr();
        command.args(["dump", "--leave-running", "--timeout", "1ms", "--pid", &pid, "-o", &image]);
        let ended = finish(&mut command)?;
        if !ended.status.success() {
            output = Some(ended);
            break;
        }
        std::fs::remove_dir_all(lab.path(&image))?;
    }
    let output = output.context("no dump has met a kernel")?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    ensure!(String::from_utf8_lossy(&output.stderr).contains("rolled back"), "{}", show(&output));
    lab.holds_only(&["log"])?;
    program.result()?;
    ensure!(program.series() == uninterrupted.series(), "differs:\n{}", program.output());
    Ok(())
}

/// One kernel never ends, and the program waits for it within a call.
#[test]
fn a_kernel_that_does_not_end_in_time_is_named_with_its_process() -> Result<()> {
    let lab = Lab::new();
    let hang = [("SOFTCUDA_FAULT", "kernel:3:hang")];
    let mut program = lab.start_with("stencil", &["--steps", "20"], &hang)?;
    program.wait_for("step ")?;
    let pid = program.pid.to_string();
    let arguments = ["dump", "--leave-running", "--timeout", "300ms", "--pid", &pid, "-o", "image"];
    let output = loop {
        let output = lab.run(arguments)?;
        if !output.status.success() {
            break output;
        }
        // The program had not come to it yet.
        std::fs::remove_dir_all(lab.path("image"))?;
    };
    let said = show(&output);
    ensure!(output.status.code() == Some(1) && said.contains("rolled back"), "{said}");
    ensure!(said.contains(&format!("process {pid}: ")), "{said}");
    ensure!(said.contains("`heat_step`"), "{said}");
    program.kill();
    Ok(())
}

#[test]
fn an_interrupted_dump_rolls_back() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work("sgd", &ARGS)?;
    let dump = PausedDump::start(&lab, &program, &[], "hold:detach")?;
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(dump.pid() as i32, libc::SIGINT) };
    let message = dump.fails()?;
    // If that takes long, gpucr does not wait for it.
    let settled = ["rolled back", "The watchdog settles the rest"];
    ensure!(settled.iter().any(|words| message.contains(words)), "{message}");
    for file in ["dump.log", "dump.json", "go"] {
        std::fs::remove_file(lab.path(file))?;
    }
    goes_on(&lab, program, &expected)
}

/// In the last phase everything is in place: without gpucr the gates open by themselves.
#[test]
fn a_restore_killed_in_its_last_phase_is_complete() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    let mut command = lab.gpucr();
    command.arg("restore").arg(&image).env("GPUCR_FAULT", "fail:resume");
    let output = finish(&mut command)?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    let mut command = lab.gpucr();
    command.arg("restore").arg(&image).env("GPUCR_FAULT", "kill:resume");
    let output = finish(&mut command)?;
    ensure!(!output.status.success(), "{}", show(&output));
    program.let_go()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A restore that fails because somebody else took the pid leaves that process alone.
#[test]
fn a_restore_that_loses_a_race_for_the_pid_harms_nobody() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    let slow = paused_restore(&lab, &["--detach"], "extract")?;
    let other = Squatter::process(program.pid as i32)?;
    std::fs::write(lab.path("go on"), "")?;
    let output = slow.wait_with_output()?;
    refused(&output, 1, &["in use", "Nothing was changed"])?;
    ensure!(!has_ended(program.pid), "it was ended by a restore that is not its own");
    drop(other);
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == undisturbed("sgd", &ARGS[..2])?, "{}", program.output());
    Ok(())
}

/// The host side of a program runs while its memory is brought back, and may come to its end.
#[test]
fn a_program_that_ends_while_it_is_restored_has_ended_and_nothing_has_failed() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    let pid = dumped.program.pid;
    for phase in ["driver", "attach", "resume"] {
        let restore = paused_restore(&lab, &[], phase)?;
        let process = rustix::process::Pid::from_raw(pid as i32).context("a pid")?;
        rustix::process::kill_process(process, rustix::process::Signal::TERM)?;
        until("it has ended", || has_ended(pid))?;
        std::fs::write(lab.path("go on"), "")?;
        let output = restore.wait_with_output()?;
        ensure!(output.status.code() == Some(128 + libc::SIGTERM), "{phase}: {}", show(&output));
        ensure!(!exists(pid), "{phase}: it is still there");
        std::fs::remove_file(lab.path("go on"))?;
        lab.holds_only(&["log", "image"])?;
    }
    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    dumped.came_out_right(&lab)
}

fn has_ended(pid: u32) -> bool {
    // A zombie has.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.map_or(true, |stat| stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z')))
}

/// A restore in the background that waits in a phase until there is a file `go on`.
fn paused_restore(lab: &Lab, args: &[&str], phase: &str) -> Result<Started> {
    let mut command = lab.gpucr();
    command.arg("restore").args(args).arg("image").env("GPUCR_LOG", "debug");
    command.env("GPUCR_FAULT", format!("hold:{phase}"));
    command.env("GPUCR_FAULT_FILE", lab.path("go on"));
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = Started::spawn(&mut command)?;
    let mut log = std::io::BufReader::new(child.stderr.take().context("piped")?);
    let mut line = String::new();
    let entered = format!("begins phase=\"{phase}\"");
    while !line.contains(&entered) {
        line.clear();
        ensure!(std::io::BufRead::read_line(&mut log, &mut line)? > 0, "it ended early");
    }
    child.stderr = Some(log.into_inner());
    Ok(child)
}

#[test]
fn two_restores_of_one_image_take_turns() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    let first = paused_restore(&lab, &["--detach"], "extract")?;
    let output = lab.run(["restore", "image"])?;
    refused(&output, 1, &["another gpucr is at work", "Nothing was changed"])?;
    std::fs::write(lab.path("go on"), "")?;
    let output = first.wait_with_output()?;
    ensure!(output.status.success(), "{}", show(&output));
    program.let_go()?;
    until("its end", || program.series().last().is_some_and(|line| line.starts_with("result ")))?;
    ensure!(program.series() == undisturbed("sgd", &ARGS[..2])?, "{}", program.output());
    Ok(())
}

/// A CUDA process that ends during the dump of its tree: no image may come of that.
#[test]
fn a_cuda_child_that_dies_before_the_freeze_rolls_the_dump_back() -> Result<()> {
    ["detach", "criu"].iter().try_for_each(|phase| a_cuda_child_dies_in(phase))
}

fn a_cuda_child_dies_in(phase: &str) -> Result<()> {
    let lab = Lab::new();
    // With steps it stops short of its end, which may come before that of a slow dump.
    let mut program = lab.at_work("family", &["--step-delay-ms", "30", "--steps", "250"])?;
    let child = program.wait_for("child pid=")?;
    let child: i32 = child.trim_start_matches("child pid=").trim().parse()?;
    let dump = PausedDump::start(&lab, &program, &[], &format!("hold:{phase}"))?;
    // SAFETY: sends a signal to a process of this test's own program.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let message = dump.fails()?;
    ensure!(message.contains("rolled back"), "{phase}: {message}");
    let named = format!("process {child} changed while it was being dumped: it has ended");
    ensure!(message.contains(&named), "{phase}: {message}");
    ensure!(!lab.path("image").exists() && program.is_running(), "{message}");
    Ok(())
}

/// Two dumps of one program at once: one makes an image, the other changes nothing.
#[test]
fn a_second_dump_beside_a_first_is_refused() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("sgd", &ARGS)?;
    let first = PausedDump::start(&lab, &program, &["-R"], "hold:criu")?;
    let mut second = lab.gpucr();
    let second = finish(second.args(["dump", "--pid", &program.pid.to_string(), "-o", "other"]))?;
    ensure!(second.status.code() == Some(1), "{}", show(&second));
    let message = String::from_utf8_lossy(&second.stderr).into_owned();
    ensure!(message.contains("another gpucr") && message.contains("Nothing"), "{message}");
    first.finish()?;
    ensure!(lab.path("image").is_dir() && !lab.path("other").exists());
    let mut program = program;
    program.result()?;
    Ok(())
}
