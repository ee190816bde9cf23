//! Warm images whose holders have the devices open: they load device memory for restores, and whatever fails
//! there, a restore does by itself.

use anyhow::{Context, Result, ensure};
use gpucr_tests::warm::{Holder, json, kept, warm, warm_with};
use gpucr_tests::{Dumped, Lab, finish, show, until};
use serde_json::Value;

/// A program that was dumped in the middle of its work.
struct Setting {
    lab: Lab,
    dumped: Dumped,
}

impl Setting {
    fn of(name: &str) -> Result<Self> {
        let lab = Lab::new();
        let dumped = Dumped::in_the_middle(&lab, name, &[])?;
        Ok(Self { lab, dumped })
    }

    /// Keeps the image warm; calls of the driver fail in the holder as `fault` says.
    fn warm(&self, fault: &str) -> Result<(Holder, Value)> {
        warm_with(&self.lab, &["image"], &[("SOFTCUDA_FAULT", fault)])
    }

    /// Restores the image from memory; the program must come to its end as if nothing had been. Says whether
    /// the holder has loaded the device memory.
    fn is_loaded_by_holder(&self, args: &[&str]) -> Result<bool> {
        self.is_loaded_by_holder_with(args, &[])
    }

    fn is_loaded_by_holder_with(&self, args: &[&str], env: &[(&str, &str)]) -> Result<bool> {
        let mut command = self.lab.gpucr();
        command.envs(env.iter().copied());
        let output = finish(command.args(["restore", "--json", "image"]).args(args))?;
        ensure!(output.status.success(), "{}\n{}", show(&output), self.dumped.program.output());
        self.dumped.came_out_right(&self.lab)?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let by_holder = report["by_holder"].as_bool().context("it says who loaded")?;
        // If the holder has failed when there was room, the programs run by then and load by themselves.
        let is_outside = report["copied"] == "outside";
        let is_inside = report["copied"] == "inside" && !by_holder;
        ensure!(report["warm"] == true && (is_outside || is_inside), "{report}");
        Ok(by_holder)
    }

    fn is_pinned(&self, holder: &Holder) -> Result<bool> {
        let kept = kept(&self.lab, &holder.id)?.context("it is listed")?;
        kept["pinned"].as_bool().context("it says whether it is pinned")
    }
}

#[test]
fn in_namespaces_and_with_shared_memory_too() -> Result<()> {
    let setting = Setting::of("model")?;
    let holder = warm(&setting.lab, "image")?;
    for args in [&[][..], &["--new-pids"], &["--share"], &["--new-pids", "--share"]] {
        ensure!(setting.is_loaded_by_holder(args)?, "{args:?}");
    }
    ensure!(setting.is_pinned(&holder)?);
    let table = setting.lab.run(["warm", "--list"])?;
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    ensure!(table.contains("PINNED") && table.contains(" yes "), "{table}");
    Ok(())
}

#[test]
fn on_another_device_a_restore_loads_by_itself() -> Result<()> {
    let devices = ("SOFTCUDA_DEVICES", "2");
    let mut lab = Lab::new();
    lab.environment.push((devices.0.into(), devices.1.into()));
    let dumped = Dumped::with(&lab, "sgd", &[], &[devices])?;
    let setting = Setting { lab, dumped };
    let (_holder, report) = warm_with(&setting.lab, &["image"], &[devices])?;
    ensure!(report["pinned"] == true, "{report}");
    for map in ["0=1", "0=0"] {
        let loaded = setting.is_loaded_by_holder_with(&["--device-map", map], &[devices])?;
        ensure!(!loaded, "{map}");
    }
    ensure!(setting.is_loaded_by_holder_with(&[], &[devices])?);
    Ok(())
}

#[test]
fn where_devices_cannot_be_opened_a_restore_loads_by_itself() -> Result<()> {
    let setting = Setting::of("sgd")?;
    for (fault, why) in [
        ("cuInit:1:100", "NO_DEVICE"),
        ("cuCtxCreate_v2:1:2", "OUT_OF_MEMORY"),
        ("cuMemHostRegister_v2:1:801", "NOT_SUPPORTED"),
    ] {
        let (holder, report) = setting.warm(fault)?;
        let said = report["unpinned"].as_str().context("it says why")?;
        ensure!(report["pinned"] == false && said.contains(why), "{fault}: {report}");
        ensure!(!setting.is_loaded_by_holder(&[])?, "{fault}");
        ensure!(!setting.is_pinned(&holder)?, "{fault}");
        json(&setting.lab, &["warm", "--drop", "--json", "image"])?;
    }
    // A device for one process at a time is the program's.
    let exclusive = [("SOFTCUDA_COMPUTE_MODE", "exclusive")];
    let (_holder, report) = warm_with(&setting.lab, &["image"], &exclusive)?;
    let said = report["unpinned"].as_str().context("it says why")?;
    ensure!(said.contains("compute mode"), "{report}");
    ensure!(!setting.is_loaded_by_holder(&[])?);
    Ok(())
}

#[test]
fn a_load_that_fails_is_done_by_the_restore() -> Result<()> {
    let setting = Setting::of("sgd")?;
    for fault in [
        "cuMemcpyHtoDAsync_v2:1:1",
        "cuStreamSynchronize:1:700",
        "cuMemExportToShareableHandle:1:1",
    ] {
        let (holder, report) = setting.warm(fault)?;
        ensure!(report["pinned"] == true, "{fault}: {report}");
        ensure!(!setting.is_loaded_by_holder(&[])?, "{fault}");
        // Its context may be of no use any more.
        ensure!(!setting.is_pinned(&holder)?, "{fault}");
        json(&setting.lab, &["warm", "--drop", "--json", "image"])?;
        holder.wait_for_end()?;
    }
    Ok(())
}

#[test]
fn a_device_that_is_short_of_memory_is_given_back() -> Result<()> {
    // Eight allocations of 4 MiB, and a block for small ones: two MiB are left, less than a sixteenth.
    let setting = Setting::of("model")?;
    let memory = [("SOFTCUDA_MEMORY", "36M")];
    let (holder, report) = warm_with(&setting.lab, &["image"], &memory)?;
    ensure!(report["pinned"] == true, "{report}");
    ensure!(setting.is_loaded_by_holder(&[])?, "there is just enough");
    ensure!(!setting.is_pinned(&holder)?, "it is still pinned");
    ensure!(!setting.is_loaded_by_holder(&[])?, "it was loaded by a holder without a device");
    drop(holder);

    let setting = Setting::of("sgd")?;
    let (holder, report) = setting.warm("cuMemCreate:1:2")?;
    ensure!(report["pinned"] == true, "{report}");
    ensure!(!setting.is_loaded_by_holder(&[])?, "there was no room");
    ensure!(!setting.is_pinned(&holder)?, "it is still pinned");
    Ok(())
}

/// A restore that waits in a phase until it is let go. It has the copy.
struct PausedRestore<'a> {
    setting: &'a Setting,
    restore: std::thread::JoinHandle<Result<std::process::Output>>,
}

impl<'a> PausedRestore<'a> {
    fn start(setting: &'a Setting, holder: &Holder, phase: &str) -> Result<Self> {
        let go = setting.lab.path("go");
        let _ = std::fs::remove_file(&go);
        let mut command = setting.lab.gpucr();
        command.args(["restore", "--json", "image"]);
        command.env("GPUCR_FAULT", format!("hold:{phase}")).env("GPUCR_FAULT_FILE", &go);
        let restore = std::thread::spawn(move || finish(&mut command));
        until(
            "the restore takes the copy",
            || matches!(kept(&setting.lab, &holder.id), Ok(Some(kept)) if kept["restores"] == 1),
        )?;
        Ok(Self { setting, restore })
    }

    /// Lets it go on to its end, which must be the right one. Gives the report.
    fn finish(self) -> Result<Value> {
        std::fs::write(self.setting.lab.path("go"), "")?;
        let output = self.restore.join().expect("it does not panic")?;
        ensure!(output.status.success(), "{}", show(&output));
        self.setting.dumped.came_out_right(&self.setting.lab)?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }
}

#[test]
fn a_restore_outlives_the_holder() -> Result<()> {
    let setting = Setting::of("sgd")?;
    for phase in ["load", "extract", "criu", "driver"] {
        let holder = warm(&setting.lab, "image")?;
        let held = PausedRestore::start(&setting, &holder, phase)?;
        holder.signal(libc::SIGKILL);
        holder.wait_for_end()?;
        held.finish().context(phase)?;
    }
    Ok(())
}

/// Stopped between the copy and the load.
#[test]
fn a_stopped_holder_is_not_waited_for_without_end() -> Result<()> {
    let setting = Setting::of("sgd")?;
    let holder = warm(&setting.lab, "image")?;
    let held = PausedRestore::start(&setting, &holder, "load")?;
    holder.signal(libc::SIGSTOP);
    let report = held.finish()?;
    ensure!(report["warm"] == true && report["by_holder"] == false, "{report}");
    Ok(())
}
