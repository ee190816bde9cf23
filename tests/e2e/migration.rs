//! A program goes from one gpucr to another while it runs: on one machine, over a Unix socket or through what stands in
//! for ssh. Whatever fails, one program runs or one complete image waits.

use anyhow::{Context, Result, bail, ensure};
use gpucr_tests::migrated::{End, forget, is_so};
use gpucr_tests::migration::{Pair, Side, Sides, ends_well};
use gpucr_tests::{Lab, Program, SmallDisk, exists, refused, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";

#[test]
fn a_program_goes_to_another_gpucr_and_ends_as_if_it_had_not() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let before = program.output();
    let sides = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, destination) = sides.reports()?;
    ensure!(source["new_pid"] == program.pid && destination["pid"] == program.pid, "{source}");
    ensure!(source["sent_chunks"].as_u64() > Some(0), "{source}");
    ensure!(source["there_chunks"] == 0, "nothing was there: {source}");
    ensure!(source["sent_chunks"] == destination["chunks"], "{}", sides.show());
    ensure!(source["migration"] == destination["migration"], "{}", sides.show());
    ensure!(source["dump"]["bulk_bytes"].as_u64() > Some(0), "it has device memory: {source}");
    let all = &source["dump"]["bulk_bytes"];
    ensure!(destination["ahead_bytes"] == *all, "loaded as it came: {}", sides.show());
    ensure!(program.output().starts_with(&before), "its output was not touched");
    ends_well(&mut program, &expected)?;
    let left = lab.run(["migrate", "--list", "--json"])?;
    let id = source["migration"].as_str().context("it has a name")?;
    ensure!(!String::from_utf8_lossy(&left.stdout).contains(id), "{}", show(&left));
    let images = std::fs::read_dir(lab.path("store/images"))?.count();
    ensure!(images == 0, "its image is not needed any more");
    lab.holds_only(&["log", "store"])
}

/// Migrates with faults, and checks what has come of it.
fn with_faults(cases: &[(&str, &str, End)]) -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (source, destination, end) in cases {
        let lab = Lab::new();
        let mut program = lab.at_work(WORKLOAD, &ARGS)?;
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        let sides = pair.run(&mut program)?;
        let told = || format!("{source} {destination} {end:?}: {}", sides.show());
        let both = !sides.source.status.success() && !sides.destination.status.success();
        ensure!(both || *end == End::Goes, "{}", told());
        is_so(&lab, program, *end, &expected).with_context(told)?;
    }
    Ok(())
}

#[test]
fn a_source_killed_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("kill:preflight", "", Stays),
        ("kill:offer", "", Stays),
        ("kill:attach", "", Stays),
        ("kill:precopy", "", Stays),
        ("kill:gate", "", Stays),
        ("kill:checkpoint", "", Stays),
        ("kill:store", "", Stays),
        ("kill:prepare", "", Stays),
        ("kill:decide", "", StaysWithImage),
        ("kill:suspended", "", StaysWithImage),
        ("kill:decided", "", GoesUnheard),
        ("kill:handover", "", GoesUnheard),
    ])
}

#[test]
fn a_source_that_fails_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesUnheard, Stays};
    with_faults(&[
        ("fail:offer", "", Stays),
        ("fail:precopy", "", Stays),
        ("fail:criu", "", Stays),
        ("fail:prepare", "", Stays),
        ("fail:decide", "", Stays),
        ("fail:suspended", "", Stays),
        ("fail:handover", "", GoesUnheard),
    ])
}

#[test]
fn a_destination_killed_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesParked, GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("", "kill:offer", Stays),
        ("", "kill:receive", Stays),
        ("", "kill:prepare", Stays),
        ("", "kill:completed", StaysWithImage),
        ("", "kill:loaded", StaysWithImage),
        ("", "kill:decide", GoesUnheard),
        ("", "kill:handover", GoesParked),
        // In the process that restores.
        ("", "kill:criu", GoesParked),
    ])
}

#[test]
fn a_destination_that_fails_in_any_phase_leaves_one_program() -> Result<()> {
    use End::{GoesParked, GoesUnheard, Stays};
    with_faults(&[
        ("", "fail:offer", Stays),
        ("", "fail:receive", Stays),
        ("", "fail:prepare", Stays),
        ("", "fail:completed", Stays),
        ("", "fail:loaded", Stays),
        ("", "fail:decide", GoesUnheard),
        ("", "fail:handover", GoesParked),
        ("", "fail:attach", GoesParked),
    ])
}

#[test]
fn a_link_that_is_cut_at_any_message_of_the_source_leaves_one_program() -> Result<()> {
    use End::{Goes, GoesUnheard, Stays, StaysWithImage};
    with_faults(&[
        ("cut:hello", "", Stays),
        ("cut:offer", "", Stays),
        ("cut:ask", "", Stays),
        ("cut:layout", "", Stays),
        ("cut-after:contents", "", Stays),
        ("cut:manifest", "", Stays),
        ("cut-after:manifest", "", Stays),
        ("cut:abort,fail:decide", "", StaysWithImage),
        ("cut:commit", "", GoesUnheard),
        ("cut-after:commit", "", Goes),
    ])
}

#[test]
fn a_link_that_is_cut_at_any_message_of_the_destination_leaves_one_program() -> Result<()> {
    use End::{Goes, GoesUnheard, Stays};
    with_faults(&[
        ("", "cut:hello", Stays),
        ("", "cut:accept", Stays),
        ("", "cut-after:accept", Stays),
        ("", "cut:want", Stays),
        ("", "cut:prepared", Stays),
        ("", "cut-after:prepared", GoesUnheard),
        ("", "cut:running", Goes),
    ])
}

/// The destination works on and says so, but does not come to an end.
#[test]
fn a_program_does_not_stand_still_for_longer_than_it_may() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    let go_on = lab.path("go-on");
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.args(["--max-stopped", "1s"]);
    pair.destination.env("GPUCR_FAULT", "hold:prepare").env("GPUCR_FAULT_FILE", &go_on);
    let Pair { mut source, mut destination, sockets } = pair;
    let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let source = source.end()?;
    refused(&source, 1, &["stopped for more than 1 s", "the program keeps running here"])?;
    std::fs::write(&go_on, "")?;
    let destination = destination.end()?;
    ensure!(!destination.status.success(), "{}", show(&destination));
    std::fs::remove_file(&go_on)?;
    is_so(&lab, program, End::Stays, &expected)
}

#[test]
fn what_is_in_the_way_is_told_at_once_and_nothing_is_changed() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    std::fs::create_dir_all(lab.path("store/other"))?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--dry-run");
    pair.destination.args(["--device-map", "0=77"]);
    let sides = pair.run(&mut program)?;
    for output in [&sides.source, &sides.destination] {
        let words =
            ["cannot continue at the destination", "this host's device 77", "is not a gpucr store"];
        refused(output, 1, &words).with_context(|| sides.show())?;
    }
    ensure!(program.is_running(), "it runs on");
    std::fs::remove_dir_all(lab.path("store"))?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--dry-run");
    let sides = pair.run(&mut program)?;
    let (source, _) = sides.reports()?;
    ensure!(source["new_pid"].is_null(), "{source}");
    is_so(&lab, program, End::Stays, &expected)
}

#[test]
fn a_program_goes_to_a_pid_namespace_and_back() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.destination.arg("--new-pids");
    let (source, _) = pair.run(&mut program)?.reports()?;
    let outer = source["new_pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
    let outer = outer.context("it has a pid")?;
    ensure!(outer != program.pid && !exists(program.pid), "{source}");
    let pid = std::mem::replace(&mut program.pid, outer);
    let before = program.output().len();
    program.allow(2)?;
    until("it runs there", || program.output().len() > before)?;
    let back = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, destination) = back.reports()?;
    ensure!(source["new_pid"] == pid && source["pid"] == outer, "{source}");
    // Code and libraries of the program, and whatever it has not written, were there.
    ensure!(destination["chunks"] == source["sent_chunks"], "{}", back.show());
    ensure!(source["there_chunks"].as_u64() > Some(0), "{}", back.show());
    program.pid = pid;
    ends_well(&mut program, &expected)
}

/// A reason is told as one on both sides, wherever in the conversation it comes.
#[test]
fn a_source_that_gives_up_before_its_offer_says_why() -> Result<()> {
    let lab = Lab::new();
    // It has nothing of CUDA.
    let mut command = std::process::Command::new("sleep");
    command.arg("1000");
    let mut sleeper = lab.spawn(command, "sleep.log")?;
    let sides = Pair::new(&lab, &sleeper)?.run(&mut sleeper)?;
    sleeper.kill();
    ensure!(!sides.source.status.success() && !sides.destination.status.success());
    let told = String::from_utf8_lossy(&sides.destination.stderr).into_owned();
    ensure!(told.contains("the source gave up the migration"), "{}", sides.show());
    ensure!(!sides.show().contains("makes no sense"), "{}", sides.show());
    Ok(())
}

#[test]
fn commands_run_on_both_sides_before_it_stops_and_before_it_goes_on() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let pid = program.pid;
    for (here, there) in [("false", "true"), ("true", "echo not here; false")] {
        // Its processes are made before the source hands it over.
        let mut pair = Pair::apart(&lab, &program)?;
        pair.source.args(["--exec-before-stop", here]);
        pair.destination.args(["--exec-before-resume", there]);
        let sides = pair.run(&mut program)?;
        ensure!(!sides.source.status.success() && program.is_running(), "{}", sides.show());
    }
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.args(["--exec-before-stop", "kill -0 $GPUCR_PID && echo $GPUCR_PID > here"]);
    let there = "kill -0 $GPUCR_PID && test -e $GPUCR_IMAGE && echo $GPUCR_PID > there";
    pair.destination.args(["--exec-before-resume", there]);
    let sides = pair.run(&mut program)?;
    sides.reports()?;
    for name in ["here", "there"] {
        let said = std::fs::read_to_string(lab.path(name))?;
        ensure!(said == format!("{pid}\n"), "{name}: {said}");
    }
    ends_well(&mut program, &expected)
}

/// What stands in for ssh runs the command on this machine.
#[test]
fn a_program_goes_where_ssh_leads() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let ssh = lab.path("ssh");
    std::fs::write(
        &ssh,
        "#!/bin/sh\necho \"$@\" > called\nfor last; do :; done\nexec sh -c \"$last\"\n",
    )?;
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755))?;
    let gpucr = gpucr_tests::binary("gpucr");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", gpucr.parent().context("a folder")?.display());
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let store = lab.path("store");
    let to = format!("ssh://root@elsewhere:2222{}", store.display());
    let mut command = lab.gpucr();
    command.args(["migrate", "--json", "--pid", &program.pid.to_string(), "--to", &to]);
    // Both are for a shell.
    command.arg("--ssh").arg(format!("{} -o 'Some thing'", ssh.display()));
    command.args(["--remote-gpucr", "env WHERE='over there' gpucr"]);
    command.args(["--files", "copy", "--files-below", "/a b", "--files-below", "/var/log/"]);
    let mut source = Side::start(command.env("PATH", path))?;
    until("it ends", || {
        program.is_running();
        !source.is_at_work()
    })?;
    let output = source.end()?;
    ensure!(output.status.success(), "{}", show(&output));
    let called = std::fs::read_to_string(lab.path("called"))?;
    ensure!(
        called.starts_with(
            "-o Some thing -p 2222 -- root@elsewhere env WHERE='over there' gpucr receive --stdio"
        ),
        "{called}"
    );
    ensure!(called.contains("--files-below '/a b' --files-below /var/log "), "{called}");
    ends_well(&mut program, &expected)
}

/// What stands in for ssh finds no gpucr, or a login script that says something.
#[test]
fn what_ssh_comes_upon_is_told_with_what_to_do() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work(WORKLOAD, &ARGS)?;
    for (ssh, words) in [
        ("sh -c 'exit 127'", ["ended before it said anything", "--remote-gpucr"]),
        ("echo Welcome", ["is not gpucr: it said `Welcome", "has to print nothing"]),
    ] {
        let mut command = lab.gpucr();
        command.args(["migrate", "--pid", &program.pid.to_string(), "--to", "ssh://elsewhere"]);
        let source = Side::start(command.args(["--ssh", ssh]))?.end()?;
        refused(&source, 1, &[words[0], words[1], "Nothing was changed"])?;
    }
    is_so(&lab, program, End::Stays, &expected)
}

#[test]
fn both_sides_meet_at_a_socket_of_that_name() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let at = format!("unix:{}", lab.path("socket").display());
    let mut receive = lab.gpucr();
    receive.args(["receive", "--from", &at, "-o", "image", "--keep-image"]);
    let destination = Side::start(&mut receive)?;
    until("somebody listens", || lab.path("socket").exists())?;
    let mut migrate = lab.gpucr();
    migrate.args(["migrate", "--pid", &program.pid.to_string(), "--to", &at]);
    let mut source = Side::start(&mut migrate)?;
    until("it ends", || {
        program.is_running();
        !source.is_at_work()
    })?;
    let (source, destination) = (source.end()?, destination.end()?);
    ensure!(source.status.success() && destination.status.success(), "{}", show(&source));
    let said = String::from_utf8_lossy(&source.stdout).into_owned();
    ensure!(said.contains(&format!("runs there as {}", program.pid)), "{said}");
    let verified = lab.run(["verify", "image"])?;
    ensure!(verified.status.success(), "{}", show(&verified));
    ensure!(!lab.path("socket").exists(), "nobody listens any more");
    ends_well(&mut program, &expected)
}

/// What came before a migration failed need not be sent again.
#[test]
fn what_was_sent_in_vain_is_there_for_the_next_attempt() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.env("GPUCR_FAULT", "fail:prepare");
    let sides = pair.run(&mut program)?;
    refused(&sides.destination, 1, &["gave up the migration", "nothing is left here"])?;
    let (source, _) = Pair::new(&lab, &program)?.run(&mut program)?.reports()?;
    // The libraries at least, which are the same for sure.
    ensure!(source["there_chunks"].as_u64() > Some(0), "{source}");
    ends_well(&mut program, &expected)
}

/// What is in the image that the source keeps was there for the destination, and was sent.
#[test]
fn a_safety_image_is_kept_until_the_program_runs_somewhere() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(WORKLOAD, &ARGS)?;
    let migrate = |program: &mut Program, source: &str, destination: &str| -> Result<Sides> {
        let mut pair = Pair::new(&lab, program)?;
        pair.source.args(["--safety-image", "safe"]).env("GPUCR_FAULT", source);
        pair.destination.env("GPUCR_FAULT", destination);
        pair.run(program)
    };
    // Before anybody watches over it nothing is made.
    let sides = migrate(&mut program, "kill:offer", "")?;
    ensure!(!sides.source.status.success() && program.is_running(), "{}", sides.show());
    lab.holds_only(&["log", "store"])?;
    let sides = migrate(&mut program, "fail:decide", "")?;
    refused(&sides.source, 1, &["the program keeps running here"])?;
    ensure!(!lab.path("safe").exists(), "it runs here: {}", sides.show());
    lab.holds_only(&["log", "store"])?;
    let sides = migrate(&mut program, "cut:commit", "")?;
    let words = ["does not run here any more", "There is one here too", "/safe"];
    refused(&sides.source, 1, &words).with_context(|| sides.show())?;
    let verified = lab.run(["verify", "safe"])?;
    ensure!(verified.status.success(), "{}", show(&verified));
    // The other side is lost.
    std::fs::remove_dir_all(lab.path("store"))?;
    until("the source has none of it", || !program.is_running())?;
    forget(&lab, &program)?;
    let restored = lab.run(["restore", "--detach", "safe"])?;
    ensure!(restored.status.success(), "{}", show(&restored));
    std::fs::rename(lab.path("safe"), lab.path("used"))?;
    let before = program.output().len();
    program.allow(2)?;
    until("it runs", || program.output().len() > before)?;
    // And once more, to its end.
    let (source, _) = migrate(&mut program, "", "")?.reports()?;
    ensure!(source["new_pid"] == program.pid && !lab.path("safe").exists(), "{source}");
    lab.holds_only(&["log", "store", "used"])?;
    ends_well(&mut program, &expected)
}

/// Disks that are full at ever later points.
#[test]
fn a_full_disk_at_the_destination_changes_nothing() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for kib in [64, 1024, 4096] {
        let lab = Lab::new();
        let mut program = lab.at_work(WORKLOAD, &ARGS)?;
        let disk = SmallDisk::mount(lab.path("store"), kib)?;
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.arg("--tight-disk");
        let sides = pair.run(&mut program)?;
        let told = || format!("{kib} KiB: {}", sides.show());
        refused(&sides.destination, 1, &["space"]).with_context(told)?;
        ensure!(sides.source.status.code() == Some(1), "{}", told());
        is_so(&lab, program, End::Stays, &expected).with_context(told)?;
        drop(disk);
    }
    Ok(())
}

/// Each device's memory is loaded there as it comes.
#[test]
fn a_program_with_memory_on_two_devices_goes_too() -> Result<()> {
    let mut lab = Lab::new();
    lab.environment.push((DEVICES.0.into(), DEVICES.1.into()));
    let mut alone = lab.start_with("devices", &ARGS[..2], &[DEVICES])?;
    alone.result()?;
    let expected = alone.series();
    // Chunks of one byte are written when there is nothing else to do, which on a busy machine may come too late.
    for _ in 0..5 {
        if all_memory_goes_ahead(&expected)? {
            return Ok(());
        }
    }
    bail!("something was never loaded as it came")
}

const DEVICES: (&str, &str) = ("SOFTCUDA_DEVICES", "2");

/// Sends a program with memory on two devices to another host; whether all of that was loaded before the image was complete.
fn all_memory_goes_ahead(expected: &[String]) -> Result<bool> {
    let mut lab = Lab::new();
    lab.environment.push((DEVICES.0.into(), DEVICES.1.into()));
    let mut program = lab.at_work_with("devices", &ARGS, &[DEVICES])?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.env(DEVICES.0, DEVICES.1);
    pair.destination.env(DEVICES.0, DEVICES.1);
    let sides = pair.run(&mut program)?;
    let (source, destination) = sides.reports()?;
    let [all, ahead] = [&source["dump"]["bulk_bytes"], &destination["ahead_bytes"]];
    ensure!(all.as_u64() > Some(0) && ahead.as_u64() > Some(0), "{}", sides.show());
    ends_well(&mut program, expected)?;
    Ok(ahead == all)
}
