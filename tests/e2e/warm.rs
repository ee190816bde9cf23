//! Images that are kept in host memory: restored from there they come out the same, and whatever dies,
//! is dropped or damaged, a restore goes on or reads the image from disk.

use std::fs::File;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::warm::{Holder, json, kept, warm, warm_with};
use gpucr_tests::{
    Dumped, Lab, Piped, Program, Started, binary, finish, refused, show, undisturbed, until,
};
use gpucr_wire::Connection;
use serde_json::Value;

const ARGS: [&str; 4] = ["--steps", "60", "--step-delay-ms", "10"];
/// A user who is not root.
const NOBODY: u32 = 65534;

/// The name of the socket of the holder of the lab's image.
fn socket_name(lab: &Lab) -> Result<String> {
    let summary = json(lab, &["inspect", "--json", "image"])?;
    Ok(format!("gpucr-warm-{}", summary["id"].as_str().context("an identity")?))
}

/// Waits until somebody has the name of a socket.
fn wait_for_socket(name: &str) -> Result<()> {
    let names = || std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    until(&format!("somebody has {name}"), || names().contains(name))
}

fn dump(lab: &Lab, program: &mut Program, args: &[&str]) -> Result<Value> {
    let pid = program.pid.to_string();
    let report = json(lab, &[&["dump", "--json", "--pid", &pid], args].concat())?;
    program.wait()?;
    // From here on it goes on to its end whenever it is restored.
    program.let_go()?;
    Ok(report)
}

/// A program that was dumped to `image` and has ended.
fn dumped(lab: &Lab) -> Result<Program> {
    let mut program = lab.at_work("sgd", &ARGS)?;
    dump(lab, &mut program, &["-o", "image"])?;
    Ok(program)
}

/// A restore in the foreground.
fn restore(lab: &Lab, args: &[&str], image: &str) -> Command {
    let mut command = lab.gpucr();
    command.args(["restore", "--json"]).args(args).arg(image);
    command
}

/// Restores the image, lets the program come to its end, and says whether memory was taken from a holder.
fn restored(
    lab: &Lab,
    args: &[&str],
    image: &str,
    program: &Program,
    expected: &[String],
) -> Result<bool> {
    let report = reported(lab, args, image, program, expected)?;
    report["warm"].as_bool().context("it says whether it was warm")
}

/// Restores the image, lets the program come to its end, and gives the report.
fn reported(
    lab: &Lab,
    args: &[&str],
    image: &str,
    program: &Program,
    expected: &[String],
) -> Result<Value> {
    let output = finish(&mut restore(lab, args, image))?;
    ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["exit_code"] == 0, "{report}");
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    // Its output is as it was at the dump, for the next restore.
    lab.rewind(program, &lab.path(image))?;
    Ok(report)
}

/// Dumps a workload in its middle and restores it from memory.
fn from_memory(name: &str) -> Result<()> {
    let lab = Lab::new();
    let Dumped { program, expected, .. } = &Dumped::in_the_middle(&lab, name, &[])?;
    let holder = warm(&lab, "image")?;
    let report = reported(&lab, &[], "image", program, expected)?;
    ensure!(report["warm"] == true && report["by_holder"] == true, "{name}: {report}");
    let kept = kept(&lab, &holder.id)?.context("it is listed")?;
    ensure!(kept["restores"] == 1 && kept["pid"] == holder.pid, "{kept}");
    Ok(())
}

gpucr_tests::each_workload!(from_memory);

#[test]
fn kept_restored_twice_and_dropped() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let holder = warm(&lab, "image")?;
    let again = json(&lab, &["warm", "--json", "image"])?;
    ensure!(again["already"] == true && again["pid"] == holder.pid, "{again}");
    for _ in 0..2 {
        ensure!(restored(&lab, &[], "image", &program, &expected)?, "it was not warm");
    }
    ensure!(!restored(&lab, &["--no-warm"], "image", &program, &expected)?, "it was warm");

    let listed = kept(&lab, &holder.id)?.context("it is listed")?;
    ensure!(listed["restores"] == 2 && listed["image"] == text(&lab.path("image"))?, "{listed}");
    let table = lab.run(["warm", "--list"])?;
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    let line = table.lines().find(|line| line.contains(&holder.id[..16])).context(table.clone())?;
    ensure!(line.contains(&holder.pid.to_string()) && line.ends_with("/image"), "{table}");

    let dropped = json(&lab, &["warm", "--drop", "--json", "image"])?;
    ensure!(dropped[0]["id"] == *holder.id, "{dropped}");
    ensure!(!holder.is_listed(&lab)?);
    holder.wait_for_end()?;
    refused(&lab.run(["warm", "--drop", "image"])?, 1, &["not kept warm", "--list"])?;
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "it was warm after the drop");
    Ok(())
}

fn text(path: &Path) -> Result<String> {
    Ok(path.canonicalize()?.to_str().context("UTF-8")?.to_owned())
}

/// What is warm needs no more of the image than its manifest, be it damaged or gone.
#[test]
fn what_is_on_disk_may_be_gone_but_for_the_manifest() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let holder = warm(&lab, "image")?;
    std::fs::remove_dir_all(lab.path("image/packs"))?;
    std::fs::remove_file(lab.path("image/index"))?;
    ensure!(restored_without_rewind(&lab, &program, &expected)?, "it was not warm");
    let output = lab.run(["restore", "--no-warm", "image"])?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    // Without the directory it can still be dropped, by what it was called or is.
    std::fs::remove_dir_all(lab.path("image"))?;
    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    json(&lab, &["warm", "--drop", "--json", &holder.id[..12]])?;
    holder.wait_for_end()
}

/// `rewind` asks `gpucr inspect`, which reads the index.
fn restored_without_rewind(lab: &Lab, program: &Program, expected: &[String]) -> Result<bool> {
    let output = finish(&mut restore(lab, &[], "image"))?;
    ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    report["warm"].as_bool().context("it says whether it was warm")
}

#[test]
fn images_of_a_store_and_incremental_ones() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    lab.dump(&program, &lab.path("first"), &["--leave-running"])?;
    program.wait_for_progress()?;
    let pid = program.pid.to_string();
    json(&lab, &["dump", "--json", "-R", "--pid", &pid, "-o", "second", "--parent", "first"])?;
    dump(&lab, &mut program, &["--store", "store", "--name", "it"])?;

    let stored = warm(&lab, "store/images/it")?;
    // No lock is held: a gc has no reason to wait.
    json(&lab, &["gc", "--json", "--wait", "0s", "store"])?;
    ensure!(restored(&lab, &[], "store/images/it", &program, &expected)?, "it was not warm");

    let incremental = warm(&lab, "second")?;
    ensure!(incremental.id != stored.id);
    lab.rewind(&program, &lab.path("second"))?;
    std::fs::rename(lab.path("first"), lab.path("away"))?;
    let output = finish(&mut restore(&lab, &[], "second"))?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A restore that waits in a phase until it is let go.
struct PausedRestore {
    child: Started,
}

impl PausedRestore {
    fn start(lab: &Lab, phase: &str) -> Result<Self> {
        let path = |kind| lab.path(format!("held.{kind}"));
        let _ = std::fs::remove_file(path("go"));
        let mut command = restore(lab, &[], "image");
        command.env("GPUCR_FAULT", format!("hold:{phase}")).env("GPUCR_FAULT_FILE", path("go"));
        command.stdout(File::create(path("json"))?).stderr(File::create(path("err"))?);
        Ok(Self { child: Started::spawn(&mut command)? })
    }

    /// Lets it go on to its end. It must have been warm, and the program must end well.
    fn finish(mut self, lab: &Lab, program: &Program, expected: &[String]) -> Result<()> {
        let read = |kind| std::fs::read_to_string(lab.path(format!("held.{kind}")));
        std::fs::write(lab.path("held.go"), "")?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{status} {}", read("err")?);
        let report: Value = serde_json::from_str(&read("json")?)?;
        ensure!(report["warm"] == true, "{report}");
        ensure!(program.series() == expected, "differs:\n{}", program.output());
        lab.rewind(program, &lab.path("image"))
    }
}

fn wait_until_handed_over(lab: &Lab, holder: &Holder, restores: u64) -> Result<()> {
    let handed_over = || matches!(kept(lab, &holder.id), Ok(Some(k)) if k["restores"] == restores);
    until("the restore takes the copy", handed_over)
}

#[test]
fn a_restore_outlives_the_holder_and_a_drop() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    for phase in ["load", "extract", "criu"] {
        let holder = warm(&lab, "image")?;
        let held = PausedRestore::start(&lab, phase)?;
        wait_until_handed_over(&lab, &holder, 1)?;
        if phase == "extract" {
            json(&lab, &["warm", "--drop", "--json", "image"])?;
        } else {
            holder.signal(libc::SIGKILL);
        }
        holder.wait_for_end()?;
        held.finish(&lab, &program, &expected).context(phase)?;
    }
    Ok(())
}

/// A device that admits no second context: the program copies by itself, from memory too.
#[test]
fn memory_is_loaded_from_inside() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let (_holder, report) = warm_with(&lab, &["--unpinned", "image"], &[])?;
    ensure!(report["pinned"] == false && report["unpinned"].is_null(), "{report}");
    let mut command = restore(&lab, &[], "image");
    let output = finish(command.env("SOFTCUDA_FAULT", "cuCtxCreate_v2:1:2"))?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["warm"] == true && report["copied"] == "inside", "{report}");
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// A restore whose holder stands still when it has made room, and what the restore has told. It is let go on when the
/// restore has told of a phase of this name.
fn held_up_until(phase: &str, args: &[&str]) -> Result<(Value, Vec<Value>)> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let go_on = lab.path("go-on");
    let file = go_on.to_str().context("a path")?;
    let fault = [("GPUCR_FAULT", "hold:holder"), ("GPUCR_FAULT_FILE", file)];
    let (_holder, _) = warm_with(&lab, &["image"], &fault)?;
    let mut command = restore(&lab, &[&["--events", "events"], args].concat(), "image");
    let started = Started::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    let is_told = |event: &Value| event["phase"] == phase;
    until(phase, || lab.events("events").is_ok_and(|told| told.iter().any(is_told)))?;
    std::fs::write(&go_on, "")?;
    let output = started.wait_with_output()?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok((serde_json::from_slice(&output.stdout)?, lab.events("events")?))
}

#[test]
fn contexts_are_restored_while_the_holder_loads() -> Result<()> {
    let (report, told) = held_up_until("attach", &[])?;
    ensure!(report["by_holder"] == true && report["copied"] == "outside", "{report} {told:?}");
    Ok(())
}

/// What is called before the processes run finds the memory loaded.
#[test]
fn whoever_is_called_before_the_processes_run_is_called_when_all_is_loaded() -> Result<()> {
    let (report, told) = held_up_until("criu", &["--exec-before-resume", "test -e go-on"])?;
    ensure!(report["by_holder"] == true, "{report} {told:?}");
    Ok(())
}

/// The processes run then, and have their contexts: they load by themselves.
#[test]
fn a_holder_that_fails_when_it_has_made_room_is_done_without() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    for fault in ["fail:holder", "kill:holder"] {
        let lab = Lab::new();
        let program = dumped(&lab)?;
        let (_holder, _) = warm_with(&lab, &["image"], &[("GPUCR_FAULT", fault)])?;
        let report = reported(&lab, &[], "image", &program, &expected).context(fault)?;
        ensure!(report["by_holder"] == false && report["copied"] == "inside", "{report}");
    }
    Ok(())
}

#[test]
fn an_interrupt_ends_the_reading() -> Result<()> {
    let lab = Lab::new();
    let _program = dumped(&lab)?;
    let mut command = lab.gpucr();
    command.args(["warm", "image"]).env("GPUCR_FAULT", "hold:load");
    command.env("GPUCR_FAULT_FILE", lab.path("go")).stdout(Stdio::null());
    let mut child = Started::spawn(command.stderr(File::create(lab.path("warm.err"))?))?;
    let name = socket_name(&lab)?;
    wait_for_socket(&name)?;
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(lab.path("go"), "")?;
    let status = child.wait()?;
    let said = std::fs::read_to_string(lab.path("warm.err"))?;
    ensure!(status.code() == Some(1) && said.contains("interrupted"), "{status} {said}");
    ensure!(!std::fs::read_to_string("/proc/net/unix")?.contains(&name), "a holder is left");
    Ok(())
}

#[test]
fn a_holder_that_is_dead_or_stuck_is_done_without() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let holder = warm(&lab, "image")?;
    holder.signal(libc::SIGSTOP);
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "a stopped holder answered");
    let output = lab.run(["warm", "image"])?;
    refused(&output, 1, &["does not answer", &format!("kill {}", holder.pid)])?;
    holder.signal(libc::SIGKILL);
    holder.wait_for_end()?;
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "a dead holder answered");
    ensure!(!holder.is_listed(&lab)?);
    // And its name is free.
    let _second = warm(&lab, "image")?;
    ensure!(restored(&lab, &[], "image", &program, &expected)?, "it was not warm");
    Ok(())
}

/// Runs a function on a thread that is not root's any more.
fn as_nobody<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: plain numbers. The bare call changes this thread alone, which ends with it.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(changed, 0);
            what()
        });
        thread.join().expect("the thread ends well")
    })
}

#[test]
fn a_holder_serves_nobody_but_root() -> Result<()> {
    let lab = Lab::new();
    let _program = dumped(&lab)?;
    let holder = warm(&lab, "image")?;
    let name = socket_name(&lab)?;
    // The tag of each word to a holder, and the version for `Take`.
    let words: [&[u8]; 3] = [&[0], &[1, 1, 0, 0, 0], &[2]];
    for word in words {
        let answer = as_nobody(|| -> Result<Vec<u8>> {
            let address = SocketAddr::from_abstract_name(&name)?;
            let mut socket = UnixStream::connect_addr(&address)?;
            let frame = [&(word.len() as u32).to_le_bytes()[..], word].concat();
            // The connection may be closed by now.
            let _ = socket.write_all(&frame);
            let mut answer = Vec::new();
            let _ = socket.read_to_end(&mut answer);
            Ok(answer)
        })?;
        ensure!(answer.is_empty(), "{answer:?} to {word:?}");
    }
    let listed = kept(&lab, &holder.id)?.context("it is there still")?;
    ensure!(listed["restores"] == 0, "{listed}");

    let mut command = Command::new("setpriv");
    command.args(["--reuid", &NOBODY.to_string(), "--clear-groups"]);
    command.arg(binary("gpucr")).args(["warm", "--drop", "--all"]).stdin(Stdio::null());
    refused(&finish(&mut command)?, 3, &["root"])?;
    ensure!(holder.is_listed(&lab)?);
    Ok(())
}

#[test]
fn a_holder_of_somebody_else_is_not_trusted() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let name = socket_name(&lab)?;
    let impostor = as_nobody(|| Connection::listen(&name))?;
    impostor.set_nonblocking(true)?;
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "it was taken from an impostor");
    let (mut call, _) = impostor.accept().context("the restore looked for a holder")?;
    let mut said = Vec::new();
    call.read_to_end(&mut said)?;
    ensure!(said.is_empty(), "the restore said {said:?}");
    refused(&lab.run(["warm", "image"])?, 1, &["of user 65534", "not trusted", "Nothing was"])?;
    refused(&lab.run(["warm", "--drop", "image"])?, 1, &["not kept warm"])
}

#[test]
fn what_needs_too_much_memory_is_refused() -> Result<()> {
    let lab = Lab::new();
    let _program = dumped(&lab)?;
    let output = lab.run(["warm", "--memory-limit", "1MiB", "image"])?;
    refused(&output, 1, &["takes", "MiB of memory", "limit is 1 MiB", "higher --memory-limit"])?;
    for wrong in
        [&["warm"][..], &["warm", "--all"], &["warm", "--list", "image"], &["warm", "--drop"]]
    {
        let output = lab.run(wrong)?;
        ensure!(output.status.code() == Some(2), "{wrong:?}: {}", show(&output));
    }
    let report = json(&lab, &["warm", "--json", "--memory-limit", "1GiB", "image"])?;
    let pid = report["pid"].as_u64().context("a pid")? as u32;
    let _holder = Holder { pid, id: String::new() };
    let limit = report["bytes"].as_u64().context("bytes")?;
    ensure!(limit < 1 << 30, "{report}");
    Ok(())
}

#[test]
fn warming_that_fails_or_is_killed_leaves_nothing() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let name = socket_name(&lab)?;
    for phase in ["preflight", "load", "extract", "hold"] {
        for fault in ["fail", "kill"] {
            let mut command = lab.gpucr();
            command.args(["warm", "image"]).env("GPUCR_FAULT", format!("{fault}:{phase}"));
            let output = finish(&mut command)?;
            ensure!(!output.status.success(), "{fault}:{phase}: {}", show(&output));
            if fault == "fail" {
                let said = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(said.contains("Nothing was changed"), "{said}");
            }
            let sockets = std::fs::read_to_string("/proc/net/unix")?;
            ensure!(!sockets.contains(&name), "{fault}:{phase} has left a holder");
        }
    }
    let _holder = warm(&lab, "image")?;
    ensure!(restored(&lab, &[], "image", &program, &expected)?, "it was not warm");
    Ok(())
}

/// A command that finds an image being read neither waits nor reads it a second time.
#[test]
fn one_at_a_time_makes_an_image_warm() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let mut command = lab.gpucr();
    command.args(["warm", "--json", "image"]).env("GPUCR_FAULT", "hold:load,hold:extract");
    command.env("GPUCR_FAULT_FILE", lab.path("go")).stdout(File::create(lab.path("first.json"))?);
    let mut first = Started::spawn(&mut command)?;
    wait_for_socket(&socket_name(&lab)?)?;
    let output = lab.run(["warm", "image"])?;
    refused(&output, 1, &["another gpucr", "wait for it", "Nothing was changed"])?;
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "it was warm before its time");
    std::fs::write(lab.path("go"), "")?;
    ensure!(first.wait()?.success());
    let report: Value = serde_json::from_str(&std::fs::read_to_string(lab.path("first.json"))?)?;
    let pid = report["pid"].as_u64().context("a pid")? as u32;
    let _holder = Holder { pid, id: String::new() };
    ensure!(restored(&lab, &[], "image", &program, &expected)?, "it was not warm");
    Ok(())
}

#[test]
fn a_damaged_chunk_is_named_and_nothing_is_kept() -> Result<()> {
    let lab = Lab::new();
    let _program = dumped(&lab)?;
    let entries = std::fs::read_dir(lab.path("image/packs"))?;
    let packs = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    for pack in packs {
        let file = File::options().read(true).write(true).open(pack)?;
        let middle = file.metadata()?.len() / 2;
        let mut byte = [0];
        file.read_exact_at(&mut byte, middle)?;
        file.write_all_at(&[byte[0] ^ 1], middle)?;
    }
    let report = lab.run(["verify", "--json", "image"])?;
    let report: Value = serde_json::from_slice(&report.stdout)?;
    let damage = report["damage"].as_array().context("damage")?;
    let output = lab.run(["warm", "image"])?;
    refused(&output, 1, &["is damaged", "it belongs to", "gpucr verify", "Nothing was changed"])?;
    let said: String = String::from_utf8_lossy(&output.stderr).split_whitespace().collect();
    let names =
        |damage: &Value| damage["chunk"].as_str().is_some_and(|id| said.contains(&id[..32]));
    ensure!(damage.iter().any(names), "{said}\n{report}");
    ensure!(kept(&lab, report["id"].as_str().context("an identity")?)?.is_none());
    Ok(())
}

#[test]
fn in_the_foreground_for_a_service_manager() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[..2])?;
    let lab = Lab::new();
    let program = dumped(&lab)?;
    let manager = UnixDatagram::bind(lab.path("notify"))?;
    manager.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut command = lab.gpucr();
    command.args(["warm", "--foreground", "--json", "image"]);
    command.env("NOTIFY_SOCKET", lab.path("notify")).stdout(File::create(lab.path("said"))?);
    let mut service = Started::spawn(&mut command)?;
    let mut word = [0; 64];
    let len = manager.recv(&mut word)?;
    ensure!(word.starts_with(b"READY=1") && len == 7, "{word:?}");
    let report: Value = serde_json::from_str(&std::fs::read_to_string(lab.path("said"))?)?;
    let id = report["id"].as_str().context("an identity")?.to_owned();
    let holder = Holder { pid: service.id(), id };
    ensure!(report["pid"] == holder.pid, "{report}");
    ensure!(restored(&lab, &[], "image", &program, &expected)?, "it was not warm");
    holder.signal(libc::SIGTERM);
    ensure!(service.wait()?.success());
    ensure!(!holder.is_listed(&lab)?);
    std::mem::forget(holder);
    ensure!(!restored(&lab, &[], "image", &program, &expected)?, "it was warm");
    Ok(())
}

/// In pid namespaces of their own, two restores of one copy run at the same time.
#[test]
fn two_programs_at_once_from_one_copy() -> Result<()> {
    let lab = Lab::new();
    let piped = Piped::in_the_middle(&lab, "sgd", &ARGS[..2])?;
    let holder = warm(&lab, "image")?;
    std::fs::remove_dir_all(lab.path("image/packs"))?;
    std::fs::remove_file(lab.path("image/index"))?;
    let outs = ["out-0", "out-1"];
    let restores = outs.map(|out| piped.restore(&lab, &[], out));
    // Both are at work before any may end.
    piped.pace.allow(20)?;
    let at_work = |out: &str| std::fs::metadata(lab.path(out)).is_ok_and(|file| file.len() > 0);
    until("they go on", || outs.iter().all(|out| at_work(out)))?;
    piped.pace.allow_all()?;
    for (restore, out) in restores.into_iter().zip(outs) {
        ensure!(restore?.wait()?.success());
        piped.came_out_right(&lab, out)?;
    }
    ensure!(kept(&lab, &holder.id)?.context("it is listed")?["restores"] == 2);
    Ok(())
}
