//! Processes that share device memory: dumped and restored together they share it again.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{
    DEVICES, Dumped, GROUPS, Lab, MULTICAST, Pace, PausedDump, Piped, Program, Random, child_named,
    each_group, finish, refused, show, undisturbed, until,
};

const ARGS: [&str; 2] = ["--steps", "80"];
/// Of workloads whose steps take longer.
const FEWER: [&str; 2] = ["--steps", "40"];
/// The phases of a dump, but for the first, in which nothing has been done yet.
const DUMP_PHASES: [&str; 8] =
    ["attach", "gate", "export", "validate", "copy", "detach", "checkpoint", "criu"];

fn args(name: &str) -> [&'static str; 2] {
    if matches!(name, "tensor-parallel" | "data-parallel") { FEWER } else { ARGS }
}

/// Restored in every way, also where blocks would come one by one or be shared with other instances: then all
/// memory comes before the processes run.
fn in_every_way(name: &str) -> Result<()> {
    let lab = Lab::of(name);
    let dumped = Dumped::at_work(&lab, name, &args(name))?;
    for args in [&[][..], &["--new-pids"], &["--on-demand"], &["--share"]] {
        let mut command = lab.gpucr();
        let output = finish(command.arg("restore").args(args).arg("image"))?;
        ensure!(output.status.success(), "{name} {args:?}: {}", show(&output));
        dumped.came_out_right(&lab).with_context(|| format!("{name} {args:?}"))?;
    }
    Ok(())
}

each_group!(a_group_is_restored_in_every_way by in_every_way);

/// An image tells who has memory of whom open.
#[test]
fn an_image_says_who_shares_what() -> Result<()> {
    let lab = Lab::of("ring");
    let dumped = Dumped::at_work(&lab, "ring", &ARGS)?;
    let output = lab.run(["inspect", "--json", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let first = dumped.program.pid;
    let second = said["processes"][1]["pid"].as_u64().context("a second process")?;
    let said = said["opened"].as_array().context("a list")?;
    let has = |pid: u64, owner: u64| said.iter().any(|it| it["pid"] == pid && it["owner"] == owner);
    ensure!(has(first.into(), second) && has(second, first.into()), "{said:?}");
    let people = lab.run(["inspect", "image"])?;
    let line = format!("shared     process {second} has 1 block of process {first} open, 4.00 MiB");
    ensure!(String::from_utf8_lossy(&people.stdout).contains(&line), "{}", show(&people));
    Ok(())
}

/// Two instances at once, each with memory of its own.
fn twice_at_once(name: &str) -> Result<()> {
    let lab = Lab::of(name);
    let piped = Piped::at_work(&lab, name, &args(name))?;
    let outs = ["first", "second"];
    let restores: Vec<_> = outs.iter().map(|out| piped.restore(&lab, &[], out)).collect();
    piped.pace.allow(20)?;
    for out in outs {
        until("it goes on", || std::fs::metadata(lab.path(out)).is_ok_and(|out| out.len() > 0))?;
    }
    piped.pace.allow_all()?;
    for (out, restore) in outs.iter().zip(restores) {
        let status = restore?.wait()?;
        ensure!(status.success(), "{name} {out}: {status}");
        piped.came_out_right(&lab, out)?;
    }
    Ok(())
}

each_group!(a_group_is_restored_twice_at_once by twice_at_once);

/// It is dumped again after it has gone on, after a restore, and after a failure; the program that ran on ends well too.
fn again_and_again(name: &str) -> Result<()> {
    let expected = undisturbed(name, &args(name))?;
    let lab = Lab::of(name);
    let mut program = lab.at_work(name, &args(name))?;
    for (number, protocol) in ["cow", "recopy", "stop", "cow"].iter().enumerate() {
        let image = lab.path(format!("running-{number}"));
        let report = lab.dump(&program, &image, &["-R", "--protocol", protocol])?;
        ensure!(report["protocol"] == *protocol && report["left_running"] == true, "{report}");
        program.wait_for_progress()?;
    }
    for number in 0..2 {
        let image = lab.path(format!("image-{number}"));
        lab.dump(&program, &image, &[])?;
        program = lab.restore(&image, program)?;
    }
    program.result()?;
    ensure!(program.series() == expected, "{name} differs:\n{}", program.output());
    lab.rewind(&program, &lab.path("running-3"))?;
    let mut restored = lab.restore(&lab.path("running-3"), program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{name} differs:\n{}", restored.output());
    Ok(())
}

each_group!(a_group_is_dumped_again_and_again by again_and_again);

/// Kernels of several processes wait for each other, and one process is ahead by some launches: the others are let
/// launch theirs behind shut gates, whenever the dump comes. What was let through is in the report.
#[test]
fn who_is_behind_is_let_launch_until_all_stand_still() -> Result<()> {
    is_let_launch("ahead", 12)
}

/// The same of collective operations on two streams of each process.
#[test]
fn ranks_that_are_behind_are_let_launch_until_all_stand_still() -> Result<()> {
    is_let_launch("data-parallel", 6)
}

fn is_let_launch(name: &str, dumps: u64) -> Result<()> {
    const STEPS: [&str; 2] = ["--steps", "4000"];
    const MOST_DUMPS: u64 = 30;
    let lab = Lab::new();
    let mut program = lab.at_work(name, &STEPS)?;
    let mut random = Random(27);
    let mut let_through = 0;
    for number in 0..MOST_DUMPS {
        // Whether somebody is behind when a dump comes is chance.
        if number >= dumps && let_through > 0 {
            break;
        }
        std::thread::sleep(Duration::from_millis(random.below(60)));
        let image = lab.path("image");
        // Half of them while it runs on, half of them from a restore.
        let running = number % 2 == 0;
        let args: &[&str] = if running { &["-R", "--protocol", "stop"] } else { &[] };
        let report =
            lab.dump(&program, &image, args).with_context(|| format!("{name}, dump {number}"))?;
        for process in report["let_through"].as_array().context("a list")? {
            let pid = process["pid"].as_u64().context("of a process")?;
            ensure!(pid >= u64::from(program.pid), "{report}");
            let_through += process["launches"].as_u64().context("with a number")?;
        }
        if !running {
            program = lab.restore(&image, program)?;
        }
        program.wait_for_progress()?;
        std::fs::remove_dir_all(&image)?;
    }
    ensure!(let_through > 0, "nobody was ever behind");
    ensure!(!program.output().contains("error:"), "{}", program.output());
    Ok(())
}

/// A process has to launch more before it tells the others to launch what its kernels wait for: it is let through too,
/// although its device is busy.
#[test]
fn who_is_ahead_is_let_launch_where_nobody_else_can() -> Result<()> {
    let expected = undisturbed("ahead", &ARGS)?;
    let lab = Lab::new();
    let mut program = lab.at_work_with("ahead", &ARGS, &[("WORKLOAD_HALFWAY", "1")])?;
    let mut is_through = false;
    for step in 61..=70 {
        program.wait_for(&format!("halfway {step}"))?;
        let args = ["-R", "--protocol", "stop", "--timeout", "30"];
        let dump = PausedDump::start(&lab, &program, &args, "hold:gate")?;
        // It goes on to the launches behind which it is ahead when the gates are shut, not before.
        dump.on_until("all gates are shut")?;
        program.allow(1)?;
        let output = dump.end()?;
        ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
        let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let processes = report["let_through"].as_array().context("a list")?;
        let first = processes.iter().find(|process| process["pid"] == program.pid);
        is_through |= first.is_some_and(|first| first["launches"].as_u64() > Some(0));
        if is_through {
            break;
        }
        std::fs::remove_dir_all(lab.path("image"))?;
    }
    ensure!(is_through, "no dump came while it was ahead");
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// What never comes to an end is no reason to stand still: all gates open again, and the failure says who was busy.
#[test]
fn where_nobody_comes_to_an_end_all_go_on() -> Result<()> {
    let expected = undisturbed("ahead", &ARGS)?;
    let lab = Lab::new();
    // The first process is allowed no launch that the others wait for, and does not come to a gate.
    let mut program = lab.at_work_with("ahead", &ARGS, &[("WORKLOAD_LATE", "1")])?;
    program.wait_for("behind 61")?;
    let pid = program.pid.to_string();
    for protocol in ["stop", "recopy"] {
        let args = ["-o", "image", "--timeout", "2", "--protocol", protocol, "--pid", &pid];
        let output = lab.run(["dump"].iter().chain(&args))?;
        refused(&output, 1, &["still busy", "at the time limit", "keeps running"])?;
    }
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

fn goes_on(mut program: Program, lab: &Lab, expected: &[String]) -> Result<()> {
    program.wait_for_progress()?;
    let image = lab.path("second");
    let mut dumped = None;
    until("a second dump is let begin", || {
        let dump = lab.dump(&program, &image, &["--protocol", "stop"]);
        // A watchdog that was left behind may still be bringing back the other processes.
        let is_early = |error: &anyhow::Error| error.to_string().contains("is detached from its");
        let is_too_early = dump.as_ref().err().is_some_and(is_early);
        dumped = Some(dump);
        !is_too_early
    })?;
    dumped.context("it was begun")?.context("a second dump")?;
    let mut program = lab.restore(&image, program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// Each process on a device of its own, and one process on all of them; they go on on other devices, all of them moved
/// around, and are dumped there again.
fn moved(name: &str) -> Result<()> {
    const COUNT: (&str, &str) = ("SOFTCUDA_DEVICES", "3");
    let mut lab = Lab::of(name);
    lab.environment.push((COUNT.0.into(), COUNT.1.into()));
    let dump = |program: &Program, image: &str| -> Result<()> {
        let pid = program.pid.to_string();
        let mut command = lab.gpucr();
        command.args(["dump", "--pid", &pid, "-o", image]).env(COUNT.0, COUNT.1);
        let output = finish(&mut command)?;
        ensure!(output.status.success(), "{name}: {}\n{}", show(&output), program.output());
        Ok(())
    };
    let mut program = lab.start(name, &args(name))?;
    program.result()?;
    let expected = program.series();
    program = lab.at_work(name, &args(name))?;
    // By number, of those that are in use.
    let has_two = matches!(name, "ring" | "handles" | "lent" | "host-blocks" | "signals");
    let all = if has_two { "0=1,1=2" } else { "0=1,1=2,2=0" };
    for (image, map) in [("first", all), ("second", "0=1,1=0"), ("third", "")] {
        dump(&program, image)?;
        let args: &[&str] = if map.is_empty() { &[] } else { &["--device-map", map] };
        let restored = lab.restore_as(&lab.path(image), program, args, &[COUNT]);
        program = restored.with_context(|| format!("{name} by {map}"))?;
    }
    program.result()?;
    ensure!(program.series() == expected, "{name} differs:\n{}", program.output());
    Ok(())
}

each_group!(all_move_to_other_devices by moved);

/// One process on all of them.
#[test]
fn one_process_moves_to_other_devices() -> Result<()> {
    DEVICES.iter().try_for_each(|name| moved(name))
}

/// The same of every group as of those below, which have what differs: legacy handles, multicast objects, collective
/// operations.
///
///     cargo nextest run --workspace -E 'test(every_group_goes_on)' --run-ignored only --no-capture
#[test]
#[ignore = "a quarter of an hour"]
fn every_group_goes_on_after_a_failure_in_any_phase() -> Result<()> {
    for name in GROUPS {
        for how in ["fail", "kill"] {
            in_any_phase(name, how)?;
            println!("{name}: {how} in {} phases", DUMP_PHASES.len());
        }
    }
    Ok(())
}

/// Whoever fails or dies, and when: the processes go on and share their memory.
mod a_failure_in_any_phase_leaves_the_group_running {
    use super::{MULTICAST, Result, in_any_phase};

    #[test]
    fn ring_fail() -> Result<()> {
        in_any_phase("ring", "fail")
    }

    #[test]
    fn ring_kill() -> Result<()> {
        in_any_phase("ring", "kill")
    }

    #[test]
    fn multicast_fail() -> Result<()> {
        in_any_phase(MULTICAST, "fail")
    }

    #[test]
    fn multicast_kill() -> Result<()> {
        in_any_phase(MULTICAST, "kill")
    }

    #[test]
    fn data_parallel_fail() -> Result<()> {
        in_any_phase("data-parallel", "fail")
    }

    #[test]
    fn data_parallel_kill() -> Result<()> {
        in_any_phase("data-parallel", "kill")
    }
}

fn in_any_phase(name: &str, how: &str) -> Result<()> {
    let expected = undisturbed(name, &args(name))?;
    DUMP_PHASES
        .iter()
        .try_for_each(|phase| fails_and_goes_on(name, &format!("{how}:{phase}"), &expected))
}

/// The moments at which some processes have left their multicast objects or their memory, and others not yet.
#[test]
fn a_failure_between_two_processes_leaves_the_group_running() -> Result<()> {
    let expected = undisturbed(MULTICAST, &ARGS)?;
    for moment in ["parted", "detached"] {
        for fault in [format!("fail:{moment}"), format!("kill:{moment}")] {
            fails_and_goes_on(MULTICAST, &fault, &expected)?;
        }
    }
    Ok(())
}

fn fails_and_goes_on(name: &str, fault: &str, expected: &[String]) -> Result<()> {
    let lab = Lab::of(name);
    let program = lab.at_work(name, &args(name))?;
    let mut command = lab.gpucr();
    command.args(["dump", "--pid", &program.pid.to_string(), "-o", "image"]);
    let output = finish(command.env("GPUCR_FAULT", fault))?;
    ensure!(!output.status.success(), "{name} {fault}: {}", show(&output));
    let went_on = goes_on(program, &lab, expected);
    went_on.with_context(|| format!("{name} {fault}: {}", show(&output)))
}

/// A process waits until another one adds its device to their multicast object, within a call of the driver: it is dumped
/// meanwhile, and goes on to wait.
#[test]
fn who_waits_for_a_device_of_a_multicast_object_is_dumped() -> Result<()> {
    let expected = undisturbed(MULTICAST, &ARGS)?;
    let lab = Lab::of(MULTICAST);
    let late = lab.path("late");
    let late = late.to_str().context("a name")?;
    let mut program = lab.start_with(MULTICAST, &ARGS, &[("WORKLOAD_LATE", late)])?;
    program.wait_for("binding")?;
    lab.dump(&program, &lab.path("running"), &["-R", "--protocol", "stop"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    std::fs::write(late, "")?;
    let restored = lab.run(["restore", "image"])?;
    ensure!(restored.status.success(), "{}\n{}", show(&restored), program.output());
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// The launcher of a job is dumped, and with it all that it has started: ranks in sessions of their own, whose output it
/// passes on.
#[test]
fn the_ranks_of_a_launcher_come_along() -> Result<()> {
    const RANKS: usize = 3;
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(20)?;
    let script = "for rank in 0 1 2; do setsid \"$0\" sgd --seed $rank \"$@\" | sed -u \"s/^/$rank: /\" & done; wait";
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--", "sh", "-c", script]);
    command.arg(gpucr_tests::binary("workload")).args(ARGS).args(["--pace", pace.file()]);
    let mut program = lab.spawn(command, "log")?;
    (0..RANKS).try_for_each(|rank| program.wait_for(&format!("{rank}: step ")).map(drop))?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    pace.allow_all()?;
    let restored = lab.run(["restore", "image"])?;
    ensure!(restored.status.success(), "{}\n{}", show(&restored), program.output());
    for rank in 0..RANKS {
        let seed = rank.to_string();
        let expected = undisturbed("sgd", &[&ARGS[..], &["--seed", &seed]].concat())?;
        let output = program.output();
        let own = output.lines().filter_map(|line| line.strip_prefix(&format!("{rank}: ")));
        let own: Vec<&str> =
            own.filter(|line| line.starts_with("step ") || line.starts_with("result ")).collect();
        ensure!(own == expected, "rank {rank} differs:\n{output}");
    }
    Ok(())
}

/// One of two that share memory cannot be dumped alone: the other would go on with memory that is not the same.
#[test]
fn who_shares_with_a_process_outside_is_refused() -> Result<()> {
    ["ring", MULTICAST].into_iter().try_for_each(one_alone_is_refused)
}

fn one_alone_is_refused(name: &str) -> Result<()> {
    let expected = undisturbed(name, &ARGS)?;
    let lab = Lab::of(name);
    let mut program = lab.at_work(name, &ARGS)?;
    let child = child_named(program.pid, "workload")?;
    let output = lab.run(["dump", "--pid", &child.to_string(), "-o", "image"])?;
    let words =
        ["shares device memory with", "outside of its tree", "Nothing was changed", "--pid"];
    refused(&output, 1, &words)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// As many ranks and devices as a machine has, found by TCP and shared by exported handles: all of them go on on other
/// devices.
#[test]
fn eight_ranks_move_around_eight_devices() -> Result<()> {
    const RANKS: [&str; 8] =
        ["--steps", "12", "--ranks", "8", "--wire", "tcp", "--sharing", "handles"];
    const COUNT: (&str, &str) = ("SOFTCUDA_DEVICES", "8");
    const ALL: &str = "0=3,1=4,2=5,3=6,4=7,5=0,6=1,7=2";
    let name = "tensor-parallel";
    let mut lab = Lab::of(name);
    lab.environment.push((COUNT.0.into(), COUNT.1.into()));
    let mut program = lab.start(name, &RANKS)?;
    program.result()?;
    let expected = program.series();
    program = lab.at_work(name, &RANKS)?;
    let pid = program.pid.to_string();
    let mut command = lab.gpucr();
    command.args(["dump", "--json", "--pid", &pid, "-o", "image"]).env(COUNT.0, COUNT.1);
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
    let map = ["--device-map", ALL];
    program = lab.restore_as(&lab.path("image"), program, &map, &[COUNT])?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A rank ends without a word, and the others go on without it: they are dumped as before, and restored in every way.
#[test]
fn who_goes_on_without_a_rank_is_dumped() -> Result<()> {
    const EARLY: [&str; 4] = ["--steps", "40", "--ends-at", "4"];
    let name = "survivors";
    let expected = undisturbed(name, &EARLY)?;
    ensure!(expected[4].ends_with(" 3 ranks"), "all go on: {expected:?}");
    let lab = Lab::of(name);
    let mut program = lab.at_work(name, &EARLY)?;
    program.wait_for("step 6 ")?;
    ensure!(program.output().contains("rank 3 has ended"), "{}", program.output());
    let image = lab.path("running");
    lab.dump(&program, &image, &["-R"])?;
    program.wait_for_progress()?;
    for (number, way) in [&[][..], &["--on-demand"]].iter().enumerate() {
        let image = lab.path(format!("image-{number}"));
        lab.dump(&program, &image, &[])?;
        program = lab.restore_as(&image, program, way, &[])?;
    }
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "the one that ran on:\n{}", restored.output());
    Ok(())
}
