//! Restores that share device memory: each instance comes out as if it were alone, whatever it writes.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Dumped, Lab, Piped, Started, exists, finish, show, until};
use serde_json::Value;

const SHARE: [&str; 2] = ["--share", "--json"];
/// All phases of a restore.
const PHASES: [&str; 7] = ["preflight", "load", "extract", "criu", "driver", "attach", "resume"];
/// Enough steps that a dump sees some of them.
const AT_WORK: [&str; 2] = ["--steps", "200"];

/// The report of a restore that has ended well.
fn report(child: Started) -> Result<Value> {
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["exit_code"] == 0 && report["shared"].is_object(), "{report}");
    Ok(report)
}

fn begin(lab: &Lab, args: &[&str], environment: &[(&str, &str)]) -> Result<Started> {
    let mut command = lab.gpucr();
    command.arg("restore").args(SHARE).args(args).arg("image").envs(environment.iter().copied());
    Ok(Started::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?)
}

/// Where it is written down that an instance of an image has written what it shared.
fn note(report: &Value) -> Result<PathBuf> {
    Ok(Path::new("/run/gpucr/unshared").join(report["id"].as_str().context("an identity")?))
}

/// Lets the image be shared again.
fn forget(report: &Value) -> Result<()> {
    let fallen_back = !report["shared"]["fallen_back"].is_null();
    let note = note(report)?;
    ensure!(note.exists() == fallen_back, "{report}");
    if fallen_back { Ok(std::fs::remove_file(note)?) } else { Ok(()) }
}

/// Workloads that write through pointers which lie in memory, when nobody has seen what they launch.
const MAY_FALL_BACK: [&str; 3] = ["scatter", "indirect", "small-allocs"];

/// Nothing was launched while it was dumped: all its memory has stayed unchanged, and nobody knows what writes it.
fn shared(name: &str) -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, name, &[])?;
    for args in [&[][..], &["--new-pids"]] {
        let report = report(begin(&lab, args, &[])?)?;
        let fallen_back = !report["shared"]["fallen_back"].is_null();
        ensure!(!fallen_back || MAY_FALL_BACK.contains(&name), "{name}: {report}");
        forget(&report)?;
        dumped.came_out_right(&lab)?;
    }
    Ok(())
}

gpucr_tests::each_workload!(shared);

#[test]
fn no_adversary_comes_out_wrong() -> Result<()> {
    for name in gpucr_tests::ADVERSARIES {
        let lab = Lab::new();
        let dumped = Dumped::in_the_middle(&lab, name, &["--steps", "20"])?;
        for args in [&[][..], &["--new-pids"]] {
            forget(&report(begin(&lab, args, &[])?)?)?;
            dumped.came_out_right(&lab).with_context(|| format!("{name} {args:?}"))?;
        }
    }
    Ok(())
}

/// A program that prints to a pipe, dumped while it worked; and instances of it.
struct Instances {
    lab: Lab,
    piped: Piped,
    running: Vec<Started>,
}

impl Instances {
    fn of(name: &str) -> Result<Self> {
        let lab = Lab::new();
        let piped = Piped::at_work(&lab, name, &AT_WORK)?;
        Ok(Self { lab, piped, running: Vec::new() })
    }

    fn out(number: usize) -> String {
        format!("out-{number}")
    }

    /// Begins another one, and waits until it goes on. Its report goes to a file of its own.
    fn add(&mut self) -> Result<u32> {
        let number = self.running.len();
        let (events, ready) = (format!("events-{number}"), format!("ready-{number}"));
        let args = ["--share", "--events", &events, "--ready-file", &ready];
        self.running.push(self.piped.restore(&self.lab, &args, &Self::out(number))?);
        until("it goes on", || self.lab.path(&ready).exists())?;
        let pid = std::fs::read_to_string(self.lab.path(&ready))?;
        Ok(pid.trim().parse()?)
    }

    /// What an event says.
    fn event(&self, number: usize, event: &str) -> Result<Option<Value>> {
        let lines = std::fs::read_to_string(self.lab.path(format!("events-{number}")))?;
        let lines = lines.lines().map(serde_json::from_str::<Value>);
        let lines: Vec<Value> = lines.collect::<Result<_, _>>()?;
        Ok(lines.into_iter().rfind(|line| line["event"] == event))
    }

    /// What an instance has shared when it went on.
    fn shared(&self, number: usize) -> Result<Value> {
        until("it says so", || self.event(number, "restored").is_ok_and(|event| event.is_some()))?;
        Ok(self.event(number, "restored")?.context("said")?["shared"].clone())
    }

    /// Lets all come to their ends.
    fn end(&mut self) -> Result<()> {
        self.piped.pace.allow_all()?;
        for (number, child) in self.running.iter_mut().enumerate() {
            let status = child.wait()?;
            ensure!(status.success(), "instance {number}: {status}");
            self.piped.came_out_right(&self.lab, &Self::out(number))?;
        }
        Ok(())
    }
}

/// Most of this workload's memory is never written, and some of it only later.
#[test]
fn instances_share_what_none_of_them_writes() -> Result<()> {
    let mut instances = Instances::of("model")?;
    for number in 0..3 {
        instances.add()?;
        let shared = instances.shared(number)?;
        ensure!(shared["bytes"].as_u64() >= Some(24 << 20), "instance {number}: {shared}");
        ensure!(shared["joined"] == (number > 0), "instance {number}: {shared}");
    }
    instances.end()?;
    for number in 0..3 {
        ensure!(instances.event(number, "again")?.is_none(), "instance {number} has fallen back");
    }
    Ok(())
}

/// The first may end before the others, and memory lives as long as one of them.
#[test]
fn memory_lives_as_long_as_an_instance() -> Result<()> {
    let mut instances = Instances::of("model")?;
    let first = instances.add()?;
    let holder = holder_of(&instances.running[0])?;
    instances.add()?;
    instances.running[0].kill()?;
    instances.running[0].wait()?;
    // SAFETY: sends a signal; the pid is one that this test has restored.
    unsafe { libc::kill(first as i32, libc::SIGKILL) };
    until("the first is gone", || !exists(first))?;
    instances.add()?;
    ensure!(instances.shared(2)?["joined"] == true, "{}", instances.shared(2)?);
    instances.piped.pace.allow_all()?;
    for number in [1, 2] {
        ensure!(instances.running[number].wait()?.success());
        instances.piped.came_out_right(&instances.lab, &Instances::out(number))?;
    }
    until("the holder ends", || !exists(holder))
}

/// The process that holds the memory: the first instance's command has started it.
fn holder_of(command: &Started) -> Result<u32> {
    let pid = command.id();
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"))?;
    let is_holder = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline"));
        line.is_ok_and(|line| line.starts_with(b"gpucr-sharing\0"))
    };
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.find(is_holder).context("a holder")
}

/// It writes what is there already: nobody could know, and the device says so.
#[test]
fn a_write_that_nobody_foresaw_is_noticed_and_the_full_restore_follows() -> Result<()> {
    let mut instances = Instances::of("stamp")?;
    for _ in 0..2 {
        instances.add()?;
    }
    instances.end()?;
    ensure!(instances.event(0, "again")?.is_some(), "the first has written and shares still");
    // The second does so too, unless the first had written before the second was there: then it knows from the note.
    let knew = instances.shared(1)?["bytes"] == 0;
    ensure!(knew || instances.event(1, "again")?.is_some(), "the second shares still");
    let said = instances.event(0, "restored")?.context("it was restored")?;
    Ok(std::fs::remove_file(note(&said)?)?)
}

/// The next instance goes on without another try, until somebody removes what says so.
#[test]
fn an_image_whose_memory_was_written_is_shared_no_more() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::at_work(&lab, "stamp", &AT_WORK)?;
    piped.pace.allow_all()?;
    // Whether it was restored again, and what the last restore says.
    let run = |args: &[&str]| -> Result<(bool, Value)> {
        let mut command = lab.gpucr();
        command.args(["restore", "--share", "--events", "events"]).args(args).arg("image");
        command.stdout(std::fs::File::create(lab.path("out"))?);
        ensure!(command.status()?.success(), "{args:?}");
        piped.came_out_right(&lab, "out")?;
        let lines = std::fs::read_to_string(lab.path("events"))?;
        std::fs::remove_file(lab.path("events"))?;
        let lines = lines.lines().map(serde_json::from_str::<Value>);
        let mut lines: Vec<Value> = lines.collect::<Result<_, _>>()?;
        let again = lines.iter().any(|line| line["event"] == "again");
        lines.retain(|line| line["event"] == "restored");
        Ok((again, lines.pop().context("it was restored")?))
    };
    for args in [&[][..], &["--new-pids"]] {
        let (again, first) = run(args)?;
        ensure!(again && note(&first)?.exists(), "{args:?}: {first}");
        let (again, second) = run(args)?;
        ensure!(!again && second["shared"]["bytes"] == 0, "{args:?}: {second}");
        std::fs::remove_file(note(&first)?)?;
    }
    Ok(())
}

/// A dump of an instance, which shares memory with another, is like any other.
#[test]
fn an_instance_can_be_dumped() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::at_work(&lab, "model", &["--steps", "600"])?;
    for args in [&["-R", "--protocol", "cow"][..], &["-R", "--protocol", "stop"], &["-R"]] {
        dumped.pace.hold_at(450)?;
        let child = begin(&lab, &["--ready-file", "ready"], &[])?;
        until("it goes on", || lab.path("ready").exists())?;
        std::thread::sleep(Duration::from_millis(100));
        let pid = dumped.program.pid.to_string();
        let output = lab.run([&["dump", "--pid", &pid, "-o", "second"], args].concat())?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
        dumped.pace.allow_all()?;
        report(child)?;
        let series = dumped.program.series();
        ensure!(series == dumped.expected, "{args:?}: {series:#?}");
        // And the image of the instance goes on where that was.
        lab.rewind(&dumped.program, &lab.path("second"))?;
        let output = finish(lab.gpucr().args(["restore", "second"]))?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
        dumped.came_out_right(&lab)?;
        std::fs::remove_dir_all(lab.path("second"))?;
        std::fs::remove_file(lab.path("ready"))?;
    }
    Ok(())
}

#[test]
fn a_restore_that_fails_or_is_killed_leaves_no_program_behind() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "model", &["--steps", "20"])?;
    for phase in PHASES {
        for fault in ["fail", "kill"].map(|fault| format!("{fault}:{phase}")) {
            let child = begin(&lab, &[], &[("GPUCR_FAULT", &fault)])?;
            let output = child.wait_with_output()?;
            ensure!(!output.status.success(), "{fault}: {}", show(&output));
            if phase == "resume" && fault.starts_with("kill") {
                // The gates open by themselves: it runs, and comes to its end.
                until("it ends", || !exists(dumped.program.pid))?;
                dumped.came_out_right(&lab)?;
            }
            until("no process is left", || !exists(dumped.program.pid)).context(fault)?;
        }
    }
    report(begin(&lab, &[], &[])?)?;
    dumped.came_out_right(&lab)
}

/// Nobody is there to restore it again: the program gets the error itself, and does not hang.
#[test]
fn a_program_whose_gpucr_was_killed_does_not_hang() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::at_work(&lab, "halves", &["--steps", "400"])?;
    let mut child = begin(&lab, &["--ready-file", "ready"], &[("GPUCR_FAULT", "hold:never")])?;
    until("it goes on", || lab.path("ready").exists())?;
    child.kill()?;
    child.wait()?;
    until("it ends", || !exists(dumped.program.pid))
}

/// With nobody outside its namespace either.
#[test]
fn nor_does_it_in_a_pid_namespace() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::at_work(&lab, "halves", &["--steps", "400"])?;
    let ready = lab.path("ready");
    let mut child = begin(&lab, &["--new-pids", "--ready-file", "ready"], &[])?;
    until("it goes on", || ready.exists())?;
    let pid: u32 = std::fs::read_to_string(&ready)?.trim().parse()?;
    child.kill()?;
    child.wait()?;
    until("it ends", || !exists(pid))?;
    // By itself, with the error; restored again before the command was killed; or ended, to be restored by a command
    // that was killed just then. Whatever it has printed is right, and the image as it was.
    let printed = dumped.program.series();
    ensure!(dumped.expected.starts_with(&printed), "{}", dumped.program.output());
    lab.rewind(&dumped.program, &lab.path("image"))?;
    let report = report(begin(&lab, &[], &[])?)?;
    // Either of the two may have written it.
    let _ = std::fs::remove_file(note(&report)?);
    dumped.came_out_right(&lab)
}

/// The device has no room for copies: a dump fails, and what writes leads to the full restore.
#[test]
fn without_room_for_copies_a_dump_fails_and_a_write_is_noticed() -> Result<()> {
    let lab = Lab::new();
    // Eight allocations of 4 MiB, and a block for small ones.
    let memory = [("SOFTCUDA_MEMORY", "36M")];
    let dumped = Dumped::with(&lab, "model", &["--steps", "600"], &memory)?;
    let child = begin(&lab, &["--ready-file", "ready"], &[])?;
    until("it goes on", || lab.path("ready").exists())?;
    let pid = dumped.program.pid.to_string();
    let output = lab.run(["dump", "--pid", &pid, "-o", "second", "-R"])?;
    ensure!(!output.status.success(), "{}", show(&output));
    let report = report(child)?;
    ensure!(!report["shared"]["fallen_back"].is_null(), "{report}");
    forget(&report)?;
    dumped.came_out_right(&lab)
}
