//! Memory that there is not is found to be missing before anything is made of an image.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use gpucr_tests::migration::{FD, Pair, connect};
use gpucr_tests::{Lab, SmallDisk, binary, finish, refused, undisturbed, warm};

/// A control group with a limit of memory, and none of it swapped out. Removed on drop.
struct Group(PathBuf);

impl Group {
    /// Makes one in that of this process, with version 1, or below the root, with version 2.
    fn new(bytes: u64) -> Result<Self> {
        let groups = std::fs::read_to_string("/proc/self/cgroup")?;
        let of_version_1 = groups.lines().find_map(|line| line.split_once(":memory:"));
        let (parent, limits) = match of_version_1 {
            Some((_, path)) => (
                Path::new("/sys/fs/cgroup/memory").join(path.trim_start_matches('/')),
                ["memory.limit_in_bytes", "memory.memsw.limit_in_bytes"],
            ),
            None => {
                let root = PathBuf::from("/sys/fs/cgroup");
                std::fs::write(root.join("cgroup.subtree_control"), "+memory")?;
                (root, ["memory.max", "memory.swap.max"])
            }
        };
        let dir = parent.join(format!("gpucr-test-{}-{bytes}", std::process::id()));
        std::fs::create_dir(&dir)?;
        let group = Self(dir);
        let swap = if of_version_1.is_some() { bytes } else { 0 };
        for (name, bytes) in limits.iter().zip([bytes, swap]) {
            // Not every kernel counts what is swapped out.
            if group.0.join(name).exists() {
                std::fs::write(group.0.join(name), bytes.to_string())?;
            }
        }
        Ok(group)
    }

    /// A gpucr that runs in the group.
    fn gpucr(&self, lab: &Lab) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo $$ > \"$0/cgroup.procs\" && exec \"$@\""]).arg(&self.0);
        command.arg(binary("gpucr")).current_dir(lab.path("."));
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// A group with so little memory; `None` where none can be made and the test is to be passed over.
fn group(bytes: u64) -> Result<Option<Group>> {
    match Group::new(bytes) {
        Ok(group) => Ok(Some(group)),
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: no control group can be made: {error}");
            Ok(None)
        }
        Err(error) => bail!("no control group can be made: {error}"),
    }
}

#[test]
fn the_limit_of_a_control_group_is_kept_before_anything_is_made() -> Result<()> {
    let Some(group) = group(64 << 20)? else { return Ok(()) };
    let lab = Lab::new();
    // With each step fewer of its blocks differ, and memory holds equal ones once: 90 MiB when it has come to its
    // pace's end.
    let mut program = lab.at_work("many-blocks", &["--steps", "100"])?;
    let report = lab.dump(&program, &lab.path("image"), &["--compress", "none"])?;
    ensure!(report["bulk_bytes"].as_u64().context("bytes")? >= 180 << 20, "{report}");
    program.wait()?;
    let before = program.output();
    for command in [
        &["restore", "image"][..],
        &["restore", "--new-pids", "image"],
        &["warm", "image"],
        &["warm", "image", "--memory-limit", "100G"],
    ] {
        let output = finish(group.gpucr(&lab).args(command))?;
        refused(&output, 1, &["there is room for"]).with_context(|| format!("{command:?}"))?;
    }
    ensure!(program.output() == before, "nothing of it has run");
    ensure!(warm::json(&lab, &["warm", "--list", "--json"])?["silent"] == serde_json::json!([]));
    // Outside of the group there is room.
    let mut program = lab.restore(&lab.path("image"), program)?;
    program.wait_for_progress()?;
    program.kill();
    Ok(())
}

/// What the destination lacks is told at the offer: all of it, with what there is, and nothing has been changed.
#[test]
fn a_program_that_does_not_fit_at_the_destination_is_not_stopped() -> Result<()> {
    const ARGS: [&str; 2] = ["--steps", "100"];
    let expected = undisturbed("many-blocks", &ARGS)?;
    let Some(group) = group(65 << 20)? else { return Ok(()) };
    let lab = Lab::new();
    // 180 MiB of device memory, which on the software driver is memory of the host's.
    let mut program = lab.at_work("many-blocks", &ARGS)?;
    let _disk = SmallDisk::mount(lab.path("store"), 32 << 10)?;
    let disk = format!("MiB are free in {}", lab.path("store").display());
    let memory = "of the host's memory, and there is room for";
    let cases: [(&[&str], &[&str], &[&str]); 3] = [
        (&["--dry-run"], &[memory, &disk], &[]),
        (&[], &[memory, &disk], &[]),
        (&["--tight-disk"], &[memory], &[&disk]),
    ];
    for (options, told, untold) in cases {
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.args(options);
        pair.destination = group.gpucr(&lab);
        pair.destination.args(["receive", "--json", "--store", "store", "--fd", &FD.to_string()]);
        connect(&mut pair.destination, &pair.sockets[1]);
        let sides = pair.run(&mut program)?;
        for side in [&sides.source, &sides.destination] {
            refused(side, 1, told).with_context(|| format!("{options:?}: {}", sides.show()))?;
            let said = flat(&side.stderr);
            let not_told = untold.iter().all(|words| !said.contains(&flat(words.as_bytes())));
            ensure!(not_told, "{options:?}: {}", sides.show());
        }
        ensure!(program.is_running(), "{options:?}: {}", sides.show());
    }
    // Outside of the group there is room, and not on the disk.
    let sides = Pair::new(&lab, &program)?.run(&mut program)?;
    refused(&sides.source, 1, &[&disk, "--tight-disk"]).with_context(|| sides.show())?;
    ensure!(!flat(&sides.source.stderr).contains(memory), "{}", sides.show());
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// What was said, in one line.
fn flat(said: &[u8]) -> String {
    let text = String::from_utf8_lossy(said).replace(['│', '\n'], " ");
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
