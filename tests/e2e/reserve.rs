//! Another process takes all device memory that is free while a program stands still for its dump. What the
//! program's contexts had is kept for it meanwhile: a driver that finds too little for a restore restores that
//! process never again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{
    Lab, PausedDump, PausedRestore, Program, SmallDisk, binary, child_named, finish, kill, show,
    undisturbed,
};

const STEPS: [&str; 2] = ["--steps", "60"];

/// A device whose memory all processes share. Each context of the program takes a part of it; those of gpucr
/// nothing, so that its death makes no room.
struct Device {
    lab: Lab,
    memory: PathBuf,
    _disk: SmallDisk,
}

impl Device {
    fn new() -> Result<Self> {
        let mut lab = Lab::new();
        let memory = lab.path("memory");
        let disk = SmallDisk::mount(memory.clone(), 512 << 10)?;
        for (name, value) in [("SOFTCUDA_CONTEXT_MEMORY", "96M"), ("SOFTCUDA_RESTORE", "once")] {
            lab.environment.push((name.into(), value.into()));
        }
        let dir = memory.to_str().context("it has a name in UTF-8")?.to_owned();
        lab.environment.push(("SOFTCUDA_MEMORY_DIR".into(), dir));
        Ok(Self { lab, memory, _disk: disk })
    }

    /// A dump that is held up where the driver has the program checkpointed.
    fn dump(
        &self,
        program: &Program,
        args: &[&str],
        faults: &str,
        fault: &str,
    ) -> Result<PausedDump> {
        let dir = self.memory.to_str().context("it has a name in UTF-8")?;
        let environment = [("SOFTCUDA_MEMORY_DIR", dir), ("SOFTCUDA_FAULT", fault)];
        let faults = ["hold:criu", faults].join(",");
        PausedDump::start_with(&self.lab, program, args, &environment, faults.trim_end_matches(','))
    }

    /// Dumps a program that is to go on. A neighbour takes all memory while the driver has it checkpointed, and
    /// `meanwhile` is done; the program comes to its end as if nothing had been.
    fn goes_on_beside_a_neighbour(
        &self,
        program: Program,
        expected: &[String],
        meanwhile: impl FnOnce(&PausedDump) -> Result<()>,
    ) -> Result<()> {
        let dump = self.dump(&program, &["--leave-running"], "", "")?;
        let neighbour = self.take_all()?;
        ensure!(neighbour.has_any(), "there was something to take");
        meanwhile(&dump)?;
        let output = dump.end()?;
        ensure!(output.status.success(), "{}", show(&output));
        came_to_its_end(program, expected)
    }

    /// What another process does that wants all.
    fn take_all(&self) -> Result<Neighbour> {
        Neighbour::in_dir(&self.memory)
    }
}

/// Has device memory as long as it lives.
struct Neighbour(Vec<File>);

impl Neighbour {
    fn in_dir(dir: &Path) -> Result<Self> {
        let mut taken = Vec::new();
        let mut size = 64 << 20;
        while size >= 2 << 20 {
            let file = tempfile::tempfile_in(dir)?;
            match rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, size) {
                Ok(()) => taken.push(file),
                Err(rustix::io::Errno::NOSPC) => size /= 2,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self(taken))
    }

    fn has_any(&self) -> bool {
        !self.0.is_empty()
    }
}

/// The program that was to go on is done, as if nothing had been.
fn came_to_its_end(mut program: Program, expected: &[String]) -> Result<()> {
    program.result()?;
    ensure!(program.series() == expected, "it differs:\n{}", program.output());
    Ok(())
}

#[test]
fn a_neighbour_that_takes_all_memory_meanwhile_does_not_keep_a_program_from_going_on() -> Result<()>
{
    let expected = undisturbed("sgd", &STEPS)?;
    let ways: [(&[&str], &str); 4] = [
        (&["--leave-running"], ""),
        (&["--leave-running", "--protocol", "stop"], ""),
        (&[], "fail:store"),
        (&["--protocol", "stop"], "fail:criu"),
    ];
    for (args, faults) in ways {
        let device = Device::new()?;
        let program = device.lab.at_work("sgd", &STEPS)?;
        let dump = device.dump(&program, args, faults, "")?;
        let neighbour = device.take_all()?;
        ensure!(neighbour.has_any(), "there was something to take");
        let output = dump.end()?;
        let said = show(&output);
        ensure!(output.status.success() == faults.is_empty(), "{args:?} {faults}: {said}");
        ensure!(faults.is_empty() || said.contains("rolled back"), "{args:?} {faults}: {said}");
        came_to_its_end(program, &expected)
            .with_context(|| format!("{args:?} {faults}: {said}"))?;
    }
    Ok(())
}

/// Between the load of the memory and the driver's restore of the contexts.
#[test]
fn a_neighbour_that_takes_all_memory_during_a_restore_comes_too_late() -> Result<()> {
    let expected = undisturbed("sgd", &STEPS)?;
    for args in [&[][..], &["--on-demand"], &["--share"]] {
        let device = Device::new()?;
        let lab = &device.lab;
        let mut program = lab.at_work("sgd", &STEPS)?;
        let memory = device.memory.to_str().context("it has a name in UTF-8")?;
        let mut dump = lab.gpucr();
        dump.args(["dump", "-o", "image", "--pid", &program.pid.to_string()]);
        let output = finish(dump.env("SOFTCUDA_MEMORY_DIR", memory))?;
        ensure!(output.status.success(), "{}", show(&output));
        program.wait()?;
        program.let_go()?;
        let environment = [("SOFTCUDA_MEMORY_DIR", memory)];
        let entered = "phase=\"driver\"";
        let restore = PausedRestore::start(lab, args, &environment, "hold:driver", entered)?;
        let neighbour = device.take_all()?;
        ensure!(neighbour.has_any(), "there was something to take");
        let output = restore.end()?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
        ensure!(program.series() == expected, "{args:?}: differs:\n{}", program.output());
    }
    Ok(())
}

#[test]
fn the_watchdog_has_the_memory_too_when_gpucr_is_killed() -> Result<()> {
    let expected = undisturbed("sgd", &STEPS)?;
    let device = Device::new()?;
    let program = device.lab.at_work("sgd", &STEPS)?;
    let dump = device.dump(&program, &[], "", "")?;
    let neighbour = device.take_all()?;
    kill(dump.pid())?;
    came_to_its_end(program, &expected)?;
    drop(neighbour);
    Ok(())
}

/// Each process of a tree gets back what was kept for it.
#[test]
fn what_is_kept_for_one_process_of_a_tree_is_not_the_others() -> Result<()> {
    let expected = undisturbed("family", &["--steps", "100"])?;
    let device = Device::new()?;
    let program = device.lab.at_work("family", &["--steps", "100"])?;
    device.goes_on_beside_a_neighbour(program, &expected, |_| Ok(()))
}

/// It is suspended. What it holds would be missing, so gpucr ends it.
#[test]
fn a_watchdog_that_gives_nothing_back_is_done_without() -> Result<()> {
    let expected = undisturbed("sgd", &STEPS)?;
    let device = Device::new()?;
    let program = device.lab.at_work("sgd", &STEPS)?;
    device.goes_on_beside_a_neighbour(program, &expected, |dump| {
        let watchdog = child_named(dump.pid(), "gpucr-watchdog")?;
        let watchdog = rustix::process::Pid::from_raw(watchdog as i32).context("a pid")?;
        Ok(rustix::process::kill_process(watchdog, rustix::process::Signal::STOP)?)
    })
}

/// Without the shim all memory of the program is free for others meanwhile.
#[test]
fn a_program_without_the_shim_gets_its_memory_back() -> Result<()> {
    let expected = undisturbed("sgd", &STEPS)?;
    let device = Device::new()?;
    std::fs::copy(binary("libsoftcuda.so"), device.lab.path("libcuda.so.1"))?;
    let mut command = Command::new(binary("workload"));
    command.arg("sgd").args(STEPS).args(["--step-delay-ms", "20"]);
    command.env("LD_LIBRARY_PATH", device.lab.path(""));
    let mut program = device.lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    device.goes_on_beside_a_neighbour(program, &expected, |_| Ok(()))
}

/// The driver gives gpucr nothing to keep. The dump says so and goes on: the memory may be there all the same.
#[test]
fn a_dump_that_can_keep_no_memory_says_so_and_goes_on() -> Result<()> {
    let expected = undisturbed("sgd", &STEPS)?;
    let device = Device::new()?;
    let program = device.lab.at_work("sgd", &STEPS)?;
    let refusals: Vec<String> = (1..9).map(|call| format!("cuMemCreate:{call}:2")).collect();
    let args = ["--leave-running", "--protocol", "stop"];
    let dump = device.dump(&program, &args, "", &refusals.join(","))?;
    let output = dump.end()?;
    let said = show(&output);
    ensure!(output.status.success() && said.contains("memory can be reserved for it"), "{said}");
    came_to_its_end(program, &expected)
}
