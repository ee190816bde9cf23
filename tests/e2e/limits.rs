//! Memory that there is not is found to be missing before anything is made of an image.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use gpucr_tests::{Lab, binary, finish, refused, warm};

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
        let dir = parent.join(format!("gpucr-test-{}", std::process::id()));
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

#[test]
fn the_limit_of_a_control_group_is_kept_before_anything_is_made() -> Result<()> {
    let group = match Group::new(64 << 20) {
        Ok(group) => group,
        Err(error) if std::env::var_os("CI").is_none() => {
            eprintln!("skipped: no control group can be made: {error}");
            return Ok(());
        }
        Err(error) => bail!("no control group can be made: {error}"),
    };
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
