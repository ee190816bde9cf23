//! Restores on demand: the program goes on before its memory is there, and comes out the same, whatever it
//! touches and whichever process dies.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Dumped, Lab, MAY_FALL_BACK, Started, exists, finish, refused, show, until};
use serde_json::Value;

const ON_DEMAND: [&str; 3] = ["restore", "--on-demand", "--json"];
/// All phases of a restore on demand.
const PHASES: [&str; 8] =
    ["preflight", "load", "extract", "criu", "driver", "attach", "resume", "stream"];
/// Nothing is loaded but what a call of the program waits for.
const ONLY_WANTED: (&str, &str) = ("GPUCR_FAULT", "skip:unwanted");

/// Runs a command whose perf_event_open(2), number 298 on x86-64, fails with EPERM by a filter of seccomp(2).
const WITHOUT_PERF_EVENTS: &str = r#"
import ctypes, os, struct, sys
code = [(0x20, 0, 0, 0), (0x15, 0, 1, 298), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(code)))
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
assert ctypes.CDLL(None).prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter, 0, 0) == 0
os.execv(sys.argv[1], sys.argv[1:])
"#;

/// Restores the image on demand and waits for the program's end; gives the report.
fn restored(lab: &Lab, args: &[&str], environment: &[(&str, &str)]) -> Result<Value> {
    let mut command = lab.gpucr();
    command.args(ON_DEMAND).args(args).arg("image").envs(environment.iter().copied());
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["exit_code"] == 0 && report["on_demand"].is_object(), "{report}");
    Ok(report)
}

/// Restores a workload twice: with all memory loaded while it runs, and with only what it waits for.
fn on_demand(name: &str) -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, name, &[])?;
    for environment in [&[][..], &[ONLY_WANTED]] {
        let report = restored(&lab, &[], environment)?;
        let fallen_back = !report["on_demand"]["fallen_back"].is_null();
        ensure!(!fallen_back || MAY_FALL_BACK.contains(&name), "{name}: {report}");
        dumped.came_out_right(&lab)?;
    }
    Ok(())
}

gpucr_tests::each_workload!(on_demand);

/// Without tracepoints nobody knows which memory a program gives up before it has come.
#[test]
fn where_the_kernel_does_not_tell_of_calls_host_memory_is_loaded_before() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    let report = restored(&lab, &[], &[])?;
    ensure!(report["on_demand"]["host_bytes"].as_u64() > Some(0), "{report}");
    dumped.came_out_right(&lab)?;
    let without = |args: &[&str]| {
        let gpucr = lab.gpucr();
        let mut command = Command::new("python3");
        command.args(["-c", WITHOUT_PERF_EVENTS]).arg(gpucr.get_program()).args(args);
        command.current_dir(lab.path("")).stdin(Stdio::null());
        command.envs(gpucr.get_envs().filter_map(|(name, value)| Some((name, value?))));
        finish(&mut command)
    };
    let said = show(&without(&["check"])?);
    ensure!(said.contains("host memory is loaded before a program runs"), "{said}");
    let output = without(&[&ON_DEMAND[..], &["image"]].concat())?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["on_demand"]["host_bytes"] == 0, "{report}");
    dumped.came_out_right(&lab)
}

/// Host memory that a program moves, hides, locks, gives up, shares with children and lets the device write, before it is
/// there.
#[test]
fn host_memory_comes_when_it_is_touched() -> Result<()> {
    let mut came = 0;
    for seed in 1..4 {
        let lab = Lab::new();
        let args = ["--seed", &seed.to_string(), "--steps", "60"];
        // Otherwise guards could be the reason for another restore: see below.
        let environment = [("WORKLOAD_TOUCHES_BEFORE_GUARD", "1")];
        let dumped = Dumped::with(&lab, "host-memory-alone", &args, &environment)?;
        for environment in [&[][..], &[ONLY_WANTED]] {
            let report = restored(&lab, &[], environment)?;
            let on_demand = &report["on_demand"];
            // A child that was made before memory moved may have another idea of it. Where the dump has found a child
            // the memory of both is brought by CRIU.
            if on_demand["fallen_back"].is_null() && on_demand["host_bytes"] != 0 {
                ensure!(on_demand["host_faults"].as_u64() > Some(0), "{report}");
                came += 1;
            }
            dumped.came_out_right(&lab)?;
        }
    }
    ensure!(came > 0, "none came on demand");
    Ok(())
}

/// Host memory that cannot be brought any more from the moment that the processes run, when the agents may wait for it and
/// gpucr for them; or since shortly before.
#[test]
fn it_is_restored_again_if_its_memory_fails_before_the_agents_have_answered() -> Result<()> {
    let faults = ["fail:untold", "fail:untold-early"];
    let mut fell_back = [0; 2];
    for seed in 1..4 {
        let lab = Lab::new();
        let args = ["--seed", &seed.to_string(), "--steps", "60"];
        let dumped = Dumped::with(&lab, "host-memory-alone", &args, &[])?;
        for (fault, count) in faults.iter().zip(&mut fell_back) {
            let report = restored(&lab, &[], &[("GPUCR_FAULT", fault)])?;
            *count += u32::from(!report["on_demand"]["fallen_back"].is_null());
            dumped.came_out_right(&lab)?;
        }
    }
    ensure!(!fell_back.contains(&0), "no memory has failed: {fell_back:?}");
    Ok(())
}

/// Guards that a program makes of memory before it is there, and removes, whether or not it is restored again for that.
#[test]
fn guards_are_not_lost_when_their_memory_comes() -> Result<()> {
    for seed in 4..8 {
        let lab = Lab::new();
        let args = ["--seed", &seed.to_string(), "--steps", "60"];
        let dumped = Dumped::with(&lab, "host-memory-alone", &args, &[])?;
        for environment in [&[][..], &[ONLY_WANTED]] {
            restored(&lab, &[], environment)?;
            dumped.came_out_right(&lab)?;
        }
    }
    Ok(())
}

/// With only what they wait for, programs that follow pointers which lie in memory touch what is not there.
fn adversary(name: &str) -> Result<bool> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, name, &["--steps", "20"])?;
    let report = restored(&lab, &[], &[ONLY_WANTED])?;
    dumped.came_out_right(&lab)?;
    Ok(!report["on_demand"]["fallen_back"].is_null())
}

#[test]
fn pointers_in_memory_are_noticed_and_the_full_restore_follows() -> Result<()> {
    for name in ["halves", "permuted"] {
        ensure!(adversary(name)?, "{name} has missed nothing");
    }
    Ok(())
}

#[test]
fn no_adversary_comes_out_wrong() -> Result<()> {
    for name in gpucr_tests::ADVERSARIES {
        adversary(name)?;
    }
    Ok(())
}

#[test]
fn in_a_pid_namespace_too() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "permuted", &["--steps", "20"])?;
    for (environment, falls_back) in [(&[][..], false), (&[ONLY_WANTED], true)] {
        let events = format!("events-{falls_back}");
        let report = restored(&lab, &["--new-pids", "--events", &events], environment)?;
        let fallen_back = !report["on_demand"]["fallen_back"].is_null();
        let events = lab.events(&events)?;
        let again = events.iter().filter(|event| event["event"] == "again").count();
        ensure!(again == usize::from(fallen_back), "{events:?}");
        // Memory that is loaded while it runs may come too late as well.
        ensure!(fallen_back || !falls_back, "{report}");
        dumped.came_out_right(&lab)?;
    }
    Ok(())
}

#[test]
fn in_the_background() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "halves", &["--steps", "20"])?;
    for environment in [&[][..], &[ONLY_WANTED]] {
        let mut command = lab.gpucr();
        command.args(["restore", "--on-demand", "--detach", "image"]);
        let output = finish(command.envs(environment.iter().copied()))?;
        ensure!(output.status.success(), "{}", show(&output));
        ensure!(String::from_utf8_lossy(&output.stdout).trim() == dumped.program.pid.to_string());
        // Until init has waited for it its pid is taken.
        until("it ends", || !exists(dumped.program.pid))?;
        dumped.came_out_right(&lab)?;
    }
    Ok(())
}

#[test]
fn a_restore_that_fails_or_is_killed_leaves_no_program_behind() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &[])?;
    for phase in PHASES {
        for fault in ["kill", "fail"].map(|fault| format!("{fault}:{phase}")) {
            let mut command = lab.gpucr();
            let output = finish(command.args(ON_DEMAND).arg("image").env("GPUCR_FAULT", &fault))?;
            ensure!(!output.status.success(), "{fault}: {}", show(&output));
            // If gpucr is killed the watchdog ends the program.
            until("no process is left", || !exists(dumped.program.pid)).context(fault)?;
        }
    }
    restored(&lab, &[], &[])?;
    dumped.came_out_right(&lab)
}

/// What the program gets while its memory is loaded is no reason to restore it again.
#[test]
fn a_signal_is_the_programs() -> Result<()> {
    let lab = Lab::new();
    let Dumped { program, .. } = &Dumped::in_the_middle(&lab, "sgd", &[])?;
    let mut command = lab.gpucr();
    command.args(ON_DEMAND).args(["--ready-file", "ready", "image"]).envs([ONLY_WANTED]);
    command.env("GPUCR_FAULT", "hold:stream").env("GPUCR_FAULT_FILE", lab.path("go on"));
    let child = Started::spawn(command.stdout(Stdio::piped()).stderr(Stdio::piped()))?;
    until("it goes on", || lab.path("ready").exists())?;
    let before = program.output();
    std::thread::sleep(Duration::from_millis(100));
    ensure!(program.output() == before, "it went on without its memory:\n{}", program.output());
    // SAFETY: sends a signal to the child, which has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let stat = || std::fs::read_to_string(format!("/proc/{}/stat", program.pid));
    until("the program gets the signal", || stat().is_ok_and(|stat| stat.contains(") Z ")))?;
    std::fs::write(lab.path("go on"), "")?;
    let output = child.wait_with_output()?;
    ensure!(output.status.code() == Some(128 + libc::SIGTERM), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["on_demand"]["fallen_back"].is_null() && report["signal"] == 15, "{report}");
    Ok(())
}

/// Damages a pack at the first of some places where device memory lies and nothing else: CRIU's files are read before
/// anything is restored.
fn damage_device_memory(lab: &Lab, pack: &Path) -> Result<bool> {
    let whole = std::fs::read(pack)?;
    for sixteenth in 1..16 {
        if damage_there(lab, pack, &whole, whole.len() * sixteenth / 16)? {
            return Ok(true);
        }
    }
    std::fs::write(pack, whole)?;
    Ok(false)
}

/// Makes a pack what it was as a `whole`, but for some bytes at a place. Whether only device memory is damaged by that.
fn damage_there(lab: &Lab, pack: &Path, whole: &[u8], place: usize) -> Result<bool> {
    let mut bytes = whole.to_vec();
    bytes[place..].iter_mut().take(64).for_each(|byte| *byte ^= 0x55);
    std::fs::write(pack, bytes)?;
    let report: Value = serde_json::from_slice(&lab.run(["verify", "--json", "image"])?.stdout)?;
    let name = pack.file_name().and_then(std::ffi::OsStr::to_str).context("a name")?;
    let all = report["damage"].as_array().context("damage")?;
    let here = |damage: &&Value| damage["file"].as_str().is_some_and(|file| file.ends_with(name));
    let owners: Vec<&Value> =
        all.iter().filter(here).flat_map(|damage| damage["owners"].as_array()).flatten().collect();
    Ok(!owners.is_empty() && owners.iter().all(|owner| owner["kind"] == "block"))
}

#[test]
fn a_damaged_chunk_ends_the_program() -> Result<()> {
    let lab = Lab::new();
    let Dumped { program, .. } = &Dumped::in_the_middle(&lab, "halves", &["--steps", "20"])?;
    let mut damaged = 0;
    for pack in std::fs::read_dir(lab.path("image/packs"))? {
        damaged += usize::from(damage_device_memory(&lab, &pack?.path())?);
    }
    ensure!(damaged > 0, "no pack has device memory alone where it was damaged");
    let output = finish(lab.gpucr().args(ON_DEMAND).arg("image"))?;
    refused(&output, 1, &["damaged"])?;
    ensure!(!exists(program.pid), "it is still there: {}", show(&output));
    Ok(())
}
