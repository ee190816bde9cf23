//! Processes of a program that come to their end while it is dumped or restored, and helpers of gpucr's that are
//! killed: the processes that are left go on.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{
    Dumped, Lab, Pace, PausedDump, PausedRestore, Program, binary, child_named, exists, kill,
    last_step, show, undisturbed, until,
};

/// A shell with two children that use CUDA. One of them, the victim, makes no step after the dump and is to be
/// killed; the shell does not mind. The other one goes on to its end, and prints to the log.
struct Pair {
    program: Program,
    victim: u32,
    expected: Vec<String>,
    /// The pace of the survivor, and of the victim.
    pace: [Pace; 2],
}

impl Pair {
    fn at_work(lab: &Lab) -> Result<Self> {
        const SHELL: &str = r#""$0" sgd --pace "$2" > victim & "$0" sgd --pace "$1"; wait"#;
        let expected = undisturbed("sgd", &[])?;
        let pace = [Pace::new()?, Pace::new()?];
        for pace in &pace {
            pace.allow(last_step(&expected)? / 2)?;
        }
        let mut command = lab.gpucr();
        command.args(["run", "--device", "soft", "--", "sh", "-c", SHELL]).arg(binary("workload"));
        command.args([pace[0].file(), pace[1].file()]);
        let mut program = lab.spawn(command, "log")?;
        program.wait_for("step ")?;
        let said = || std::fs::read_to_string(lab.path("victim")).unwrap_or_default();
        until("the victim is at work", || said().contains("step "))?;
        let said = said();
        let pid = said.lines().find_map(|line| line.strip_prefix("ready pid="));
        let victim = pid.context("it says its pid")?.parse()?;
        Ok(Self { program, victim, expected, pace })
    }

    /// A dump has ended the program.
    fn is_dumped(&mut self) -> Result<()> {
        self.program.wait()?;
        self.program.let_go()?;
        self.pace[0].allow_all()
    }

    fn kill_victim(&self) -> Result<()> {
        kill(self.victim)?;
        until("the shell has waited for it", || !exists(self.victim))
    }

    /// The survivor has come to its end. Files are as they were at the dump afterwards.
    fn came_out_right(&self, lab: &Lab) -> Result<()> {
        let output = self.program.output();
        ensure!(self.program.series() == self.expected, "it differs:\n{output}");
        lab.rewind(&self.program, &lab.path("image"))
    }
}

/// Of a tree one process may end while its memory is copied, up to the moment at which all stand still.
#[test]
fn a_process_that_ends_before_its_tree_stands_still_is_left_out_of_the_image() -> Result<()> {
    for phase in ["precopy", "gate"] {
        let lab = Lab::new();
        let mut pair = Pair::at_work(&lab)?;
        let dump = PausedDump::start(&lab, &pair.program, &[], &format!("hold:{phase}"))?;
        pair.kill_victim()?;
        dump.finish().with_context(|| phase.to_owned())?;
        pair.is_dumped()?;
        let inspected = lab.run(["inspect", "--json", "image"])?;
        let image: serde_json::Value = serde_json::from_slice(&inspected.stdout)?;
        let processes = image["processes"].as_array().context("it lists processes")?;
        ensure!(processes.len() == 2, "{phase}: {image}");
        let output = lab.run(["restore", "image"])?;
        ensure!(output.status.success(), "{phase}: {}", show(&output));
        pair.came_out_right(&lab)?;
    }
    Ok(())
}

/// Between CRIU's last word and gpucr's first look; before it gets its memory, from outside, from inside, or when
/// it asks for it.
#[test]
fn a_process_that_ends_while_its_tree_is_restored_takes_nobody_with_it() -> Result<()> {
    let lab = Lab::new();
    let mut pair = Pair::at_work(&lab)?;
    let output = lab.run(["dump", "--pid", &pair.program.pid.to_string(), "-o", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    pair.is_dumped()?;
    let inside = [("SOFTCUDA_FAULT", "cuCtxCreate_v2:1:2")];
    type Way<'a> = (&'a str, &'a [&'a str], &'a [(&'a str, &'a str)]);
    let ways: [Way<'_>; 5] = [
        ("driver", &[], &[]),
        ("driver", &["--detach"], &[]),
        ("greeted", &[], &[]),
        ("greeted", &[], &inside),
        ("greeted", &["--on-demand"], &[]),
    ];
    for (moment, args, environment) in ways {
        let way = format!("{moment} {args:?} {environment:?}");
        let text = if moment == "driver" { "phase=\"driver\"" } else { "all agents have answered" };
        let args = [args, &["--json"]].concat();
        let restore =
            PausedRestore::start(&lab, &args, environment, &format!("hold:{moment}"), text)?;
        pair.kill_victim().with_context(|| way.clone())?;
        let output = restore.end()?;
        ensure!(output.status.success(), "{way}: {}", show(&output));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["on_demand"]["fallen_back"].is_null(), "{way}: {report}");
        if environment == inside {
            ensure!(report["copied"] == "inside", "{way}: {report}");
        }
        until("its end", || pair.program.output().contains("result "))?;
        until("nobody is left", || !exists(pair.program.pid))?;
        pair.came_out_right(&lab).with_context(|| way)?;
    }
    Ok(())
}

/// CRIU has asked whether the processes may run, and dies: nobody but gpucr knows of them then.
#[test]
fn what_criu_has_made_does_not_outlive_a_restore_that_fails_with_it() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    for faults in ["hold:host-memory,fail:host-memory", "hold:host-memory"] {
        let restore = PausedRestore::start(&lab, &[], &[], faults, "stage=\"post-restore\"")?;
        ensure!(exists(dumped.program.pid), "{faults}: CRIU has made it");
        kill(child_named(restore.pid(), "criu")?)?;
        let output = restore.end()?;
        ensure!(output.status.code() == Some(1), "{faults}: {}", show(&output));
        ensure!(!exists(dumped.program.pid), "{faults}: it is still there: {}", show(&output));
        lab.holds_only(&["log", "image"])?;
    }
    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    dumped.came_out_right(&lab)
}

/// A dump whose watchdog is killed, in each phase in which gpucr may notice.
#[test]
fn a_dump_without_its_watchdog_fails_before_the_program_is_stopped_or_not_at_all() -> Result<()> {
    let fails = [("attach", true, false), ("precopy", true, false), ("gate", true, true)];
    let goes = ["validate", "detach", "criu", "commit"].map(|phase| (phase, false, false));
    let runs_on = ["criu", "resume", "store", "commit"].map(|phase| (phase, false, true));
    for (phase, fails, runs_on) in fails.into_iter().chain(goes).chain(runs_on) {
        let way = format!("{phase} {runs_on}");
        let lab = Lab::new();
        let expected = undisturbed("sgd", &["--steps", "40"])?;
        let mut program = lab.at_work("sgd", &["--steps", "40"])?;
        let args: &[&str] = if runs_on { &["--leave-running"] } else { &[] };
        let dump = PausedDump::start(&lab, &program, args, &format!("hold:{phase}"))?;
        kill(child_named(dump.pid(), "gpucr-watchdog")?)?;
        let output = dump.end()?;
        if fails {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            ensure!(output.status.code() == Some(1), "{way}: {said}");
            ensure!(said.contains("the watchdog") && said.contains("rolled back"), "{way}: {said}");
            lab.holds_only(&["log"])?;
        } else {
            ensure!(output.status.success(), "{way}: {}", show(&output));
        }
        if !fails && !runs_on {
            program = lab.restore(&lab.path("image"), program)?;
        }
        program.result().with_context(|| way.clone())?;
        ensure!(program.series() == expected, "{way}: differs:\n{}", program.output());
        if !fails && runs_on {
            lab.rewind(&program, &lab.path("image"))?;
            let mut program = lab.restore(&lab.path("image"), program)?;
            program.result().with_context(|| way.clone())?;
            ensure!(program.series() == expected, "{way}: differs:\n{}", program.output());
        }
    }
    Ok(())
}

/// The watchdog of a restore is killed in each phase too.
#[test]
fn a_restore_without_its_watchdog_fails_before_anything_is_made_or_not_at_all() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    let held = |args: &[&str], phase: &str| {
        let text = format!("phase=\"{phase}\"");
        let restore = PausedRestore::start(&lab, args, &[], &format!("hold:{phase}"), &text)?;
        kill(child_named(restore.pid(), "gpucr-watchdog")?)?;
        restore.end()
    };
    for phase in ["load", "extract"] {
        let output = held(&[], phase)?;
        ensure!(output.status.code() == Some(1), "{phase}: {}", show(&output));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(said.contains("the watchdog") && said.contains("Nothing was changed"), "{said}");
        ensure!(!exists(dumped.program.pid), "{phase}: something is left");
    }
    for (args, phase) in [(&[][..], "driver"), (&[], "attach"), (&["--on-demand"], "stream")] {
        let output = held(args, phase)?;
        ensure!(output.status.success(), "{phase}: {}", show(&output));
        dumped.came_out_right(&lab).with_context(|| phase.to_owned())?;
    }
    Ok(())
}

/// While one of them has its memory and the others have not, none runs on.
#[test]
fn a_tree_runs_on_when_all_of_it_has_its_memory() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "family", &["--steps", "100"])?;
    let before = dumped.program.output();
    let restore =
        PausedRestore::start(&lab, &["--json"], &[], "hold:attached", "it has its memory")?;
    // A gate that is open is passed within this time, or on a busy machine a test later.
    std::thread::sleep(Duration::from_secs(1));
    ensure!(dumped.program.output() == before, "it runs:\n{}", dumped.program.output());
    let output = restore.end()?;
    ensure!(output.status.success(), "{}", show(&output));
    dumped.came_out_right(&lab)
}

/// It comes when gpucr has looked for the last time whether it was asked to end: the program gets it.
#[test]
fn a_signal_after_the_last_check_is_the_programs() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    let restore =
        PausedRestore::start(&lab, &["--json"], &[], "hold:passed", "signals are the program's")?;
    rustix::process::kill_process(
        rustix::process::Pid::from_raw(restore.pid() as i32).context("a pid")?,
        rustix::process::Signal::TERM,
    )?;
    // It has to be handled before gpucr tells whose signals are.
    until("the signal is not pending", || pending_signals(restore.pid()) == Some(0))?;
    let output = restore.end()?;
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["signal"] == 15 && output.status.code() == Some(143), "{}", show(&output));
    until("nobody is left", || !exists(dumped.program.pid))
}

/// The signals that wait for a process to handle them.
fn pending_signals(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let shared = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"))?;
    u64::from_str_radix(shared.trim(), 16).ok()
}

/// Whether a process is stopped by a signal.
fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Ctrl-Z where the program is in a session of its own: it stops with the command that stands in for it, and goes on
/// with it. Without a terminal it does not stop with the program.
#[test]
fn a_restore_in_the_foreground_is_suspended_with_its_program() -> Result<()> {
    for args in [&[][..], &["--new-pids"]] {
        let lab = Lab::new();
        let program = lab.at_work("sgd", &["--steps", "200"])?;
        lab.dump(&program, &lab.path("image"), &[])?;
        let ready = lab.path("ready");
        let restore = [args, &["--ready-file", ready.to_str().context("UTF-8")?]].concat();
        let mut program = lab.restore_as(&lab.path("image"), program, &restore, &[])?;
        until("it is ready", || ready.exists())?;
        let pid: u32 = std::fs::read_to_string(&ready)?.trim().parse()?;
        let gpucr = program.command_pid().context("it is in the foreground")?;
        // SAFETY: these send signals to processes of this test.
        let send = |pid: u32, signal| unsafe { libc::kill(pid as i32, signal) };
        for round in 0..20 {
            send(gpucr, libc::SIGTSTP);
            until("both are stopped", || is_stopped(gpucr) && is_stopped(pid))?;
            send(gpucr, libc::SIGCONT);
            until(&format!("both go on, {round}"), || !is_stopped(gpucr) && !is_stopped(pid))?;
        }
        program.wait_for_progress()?;
        if args.is_empty() {
            // Without a terminal whoever stops the program lets it go on, and need not know the command.
            send(pid, libc::SIGSTOP);
            until("it is stopped", || is_stopped(pid))?;
            send(pid, libc::SIGCONT);
        }
        program.result()?;
    }
    Ok(())
}
