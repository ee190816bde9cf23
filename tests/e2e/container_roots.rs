//! Programs in containers with a root directory of their own, dumped by a gpucr outside and restored with other roots.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::container::{InContainer, Libraries, RootTree};
use gpucr_tests::{Lab, finish, kill, refused, show, undisturbed, until};

const ARGS: [&str; 3] = ["sgd", "--steps", "8"];
/// The steps that it makes before it is dumped.
const BEFORE: usize = 4;
const ALL: usize = 1 << 20;

fn dump(lab: &Lab, program: &InContainer, args: &[&str]) -> Result<()> {
    let pid = program.pid.to_string();
    let args = [&["dump", "--pid", &pid, "-o", "image"], args].concat();
    let output = lab.run(args)?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(())
}

/// A restored program, by its pid outside. It ends with this.
struct Restored(u32);

impl Drop for Restored {
    fn drop(&mut self) {
        // It may have ended.
        let _ = kill(self.0);
    }
}

/// Restores the image with this root.
fn restore(lab: &Lab, root: &RootTree, args: &[&str]) -> Result<Restored> {
    let path = root.path.to_string_lossy();
    let args = [&["restore", "--detach", "--root", &path], args, &["image"]].concat();
    let output = lab.run(args)?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(Restored(String::from_utf8_lossy(&output.stdout).trim().parse()?))
}

/// A dry run that tells of what is in the way, in these words.
fn blocked(output: &std::process::Output, words: &[&str]) -> Result<()> {
    let said = show(output);
    ensure!(output.status.code() == Some(1), "{said}");
    words.iter().try_for_each(|word| {
        ensure!(said.contains(word), "no `{word}` in: {said}");
        Ok(())
    })
}

fn has_result(root: &RootTree) -> bool {
    root.series().iter().any(|line| line.starts_with("result "))
}

/// Device and inode of the root directory of a process.
fn root_of(pid: u32) -> Result<(u64, u64)> {
    let meta = std::fs::metadata(format!("/proc/{pid}/root/"))?;
    Ok((meta.dev(), meta.ino()))
}

#[test]
fn it_is_dumped_from_outside_and_comes_to_life_in_two_roots_at_once() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[1..])?;
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let mut program = tree.start(&ARGS, BEFORE)?;
    let pid = program.pid.to_string();
    let output = lab.run(["dump", "--dry-run", "--pid", &pid])?;
    ensure!(output.status.success(), "{}", show(&output));
    dump(&lab, &program, &["--leave-running"])?;
    ensure!(matches!(program.first.try_wait(), Ok(None)), "it was to run on");
    std::fs::remove_dir_all(lab.path("image"))?;
    dump(&lab, &program, &[])?;
    // Its first process has waited for the program.
    ensure!(program.first.wait()?.code() == Some(128 + libc::SIGKILL));

    let output = lab.run(["restore", "--new-pids", "image"])?;
    refused(
        &output,
        1,
        &["was in a container", "gpucr restore --root DIR", "Nothing was changed"],
    )?;
    let output = lab.run(["restore", "--dry-run", "image"])?;
    blocked(&output, &["was in a container", "gpucr restore --root DIR"])?;
    let path = tree.path.to_string_lossy();
    let output = lab.run(["restore", "--dry-run", "--root", &path, "image"])?;
    ensure!(output.status.success(), "{}", show(&output));

    let others = [tree.copy(&lab, "one")?, tree.copy(&lab, "other")?];
    // The image brings the shim along.
    std::fs::remove_dir_all(others[0].join("var/lib/gpucr"))?;
    let pids = [restore(&lab, &others[0], &[])?, restore(&lab, &others[1], &[])?];
    for (pid, other) in pids.iter().zip(&others) {
        let meta = std::fs::metadata(&other.path)?;
        ensure!(root_of(pid.0)? == (meta.dev(), meta.ino()), "it has another root");
        ensure!(!has_result(other));
        other.allow(ALL)?;
    }
    for other in &others {
        until("it ends", || has_result(other)).with_context(|| other.log())?;
        ensure!(other.series() == expected, "{}", other.log());
    }
    ensure!(!has_result(&tree), "nothing is written to the first tree");
    Ok(())
}

#[test]
fn what_was_mounted_from_outside_has_to_be_named() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[1..])?;
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Mounted)?;
    let program = tree.start(&ARGS, BEFORE)?;
    dump(&lab, &program, &[])?;
    drop(program);
    let path = tree.path.to_string_lossy();
    let restore_with = |args: &[&str]| {
        lab.run([&["restore", "--dry-run", "--root", &path], args, &["image"]].concat())
    };
    // What is there instead is not what the program has mapped.
    blocked(&restore_with(&[])?, &["/usr/lib"])?;
    let output = restore_with(&["--mount", "/opt=/opt", "--mount", "/usr=/usr"])?;
    blocked(&output, &["nothing from outside was mounted at /opt"])?;
    let output = restore_with(&["--mount", "/usr=/no/such/directory"])?;
    blocked(&output, &["/no/such/directory"])?;
    let output = restore_with(&["--mount", "/usr=/dev/null"])?;
    blocked(&output, &["mounted at /usr", "it was a directory", "--mount /usr=PATH"])?;
    let output = restore_with(&["--mount", "/usr=/proc/self/root/usr"])?;
    blocked(&output, &["leads through /proc"])?;
    let output = lab.run(["restore", "--root", "/proc/self/cwd", "image"])?;
    refused(&output, 1, &["/proc/self/cwd leads through /proc", "podman mount"])?;
    let output = restore_with(&["--mount", "/usr=/usr"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let output = lab.run(["inspect", "image"])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(said.contains("--root DIR") && said.contains("--mount /usr=PATH"), "{said}");

    let _restored = restore(&lab, &tree, &["--mount", "/usr=/usr", "--on-demand"])?;
    tree.allow(ALL)?;
    until("it ends", || has_result(&tree)).with_context(|| tree.log())?;
    ensure!(tree.series() == expected, "{}", tree.log());
    Ok(())
}

/// CRIU saves the file systems that are the container's own.
#[test]
fn a_file_that_is_open_in_a_file_system_of_the_containers_own_comes_along() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[1..])?;
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Mounted)?;
    let program = tree.start_with_own_file(&ARGS, BEFORE)?;
    dump(&lab, &program, &[])?;
    drop(program);
    ensure!(!tree.join("/tmp/own").exists(), "it is in the container's own file system");
    // A place on which nothing can be mounted is told of before CRIU is asked.
    std::fs::remove_dir(tree.join("/usr"))?;
    let path = tree.path.to_string_lossy();
    let args = ["restore", "--dry-run", "--root", &path, "--mount", "/usr=/usr", "image"];
    blocked(&lab.run(args)?, &["mounted at /usr", "does not exist", "mkdir -p DIR/usr"])?;
    std::fs::create_dir(tree.join("/usr"))?;
    let output = lab.run(args)?;
    ensure!(output.status.success(), "{}", show(&output));
    let restored = restore(&lab, &tree, &["--mount", "/usr=/usr"])?;
    let kept = std::fs::read_to_string(format!("/proc/{}/fd/5", restored.0))?;
    ensure!(kept == "kept\n", "{kept}");
    tree.allow(ALL)?;
    until("it ends", || has_result(&tree)).with_context(|| tree.log())?;
    ensure!(tree.series() == expected, "{}", tree.log());
    Ok(())
}

/// Container runtimes make such where the mounts of the host are shared; those of this host may be private.
#[test]
fn slaves_of_mounts_outside_become_slaves_again() -> Result<()> {
    let expected = undisturbed("sgd", &ARGS[1..])?;
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Mounted)?.with_slaves();
    let program = tree.start(&ARGS, BEFORE)?;
    let slaves = |pid: u32| -> Result<usize> {
        let mounts = std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?;
        Ok(mounts.lines().filter(|line| line.contains(" master:")).count())
    };
    ensure!(slaves(program.pid)? == 2, "its root and /usr");
    dump(&lab, &program, &[])?;
    drop(program);
    let restored = restore(&lab, &tree, &["--mount", "/usr=/usr"])?;
    ensure!(slaves(restored.0)? == 2, "its root and /usr");
    tree.allow(ALL)?;
    until("it ends", || has_result(&tree)).with_context(|| tree.log())?;
    ensure!(tree.series() == expected, "{}", tree.log());
    Ok(())
}

/// An image of it would be one that no restore accepts.
#[test]
fn mounts_that_a_restore_could_not_make_are_refused() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Mounted)?;
    let program = tree.start(&ARGS, BEFORE)?;
    let pid = program.pid.to_string();
    for name in ["a", "b"] {
        std::fs::create_dir(tree.join(&format!("srv/{name}")))?;
    }
    let inside = |args: &[&str]| -> Result<()> {
        let done = finish(Command::new("nsenter").args(["--target", &pid, "--mount"]).args(args))?;
        ensure!(done.status.success(), "{}", show(&done));
        Ok(())
    };
    let bind = ["/usr/bin/mount", "--no-mtab", "--bind", "/srv/a", "/srv/b"];
    let dry_run = || lab.run(["dump", "--dry-run", "--pid", &pid]);
    inside(&bind)?;
    let output = dry_run()?;
    ensure!(output.status.success(), "{}", show(&output));
    inside(&bind)?;
    blocked(&dry_run()?, &["/srv/b", "hidden by another mount"])?;
    inside(&["/usr/bin/umount", "--no-mtab", "/srv/b"])?;
    std::fs::remove_dir(tree.join("srv/a"))?;
    blocked(&dry_run()?, &["/srv/b", "removed or replaced outside"])?;
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    refused(&output, 1, &["/srv/b", "removed or replaced outside", "Nothing was changed"])?;
    inside(&["/usr/bin/umount", "--no-mtab", "/srv/b"])?;
    dump(&lab, &program, &[])
}

/// Of capabilities(7).
const CAP_SYS_PTRACE: i32 = 19;
const CAP_SYS_ADMIN: i32 = 21;

#[test]
fn where_gpucr_could_be_traced_it_does_not_go() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let mut program = tree.start_without(&[CAP_SYS_ADMIN], &ARGS, BEFORE)?;
    let pid = program.pid.to_string();
    for more in [&["--dry-run"][..], &["-o", "image"]] {
        let output = lab.run([&["dump", "--pid", &pid], more].concat())?;
        refused(&output, 1, &["CAP_SYS_PTRACE", "--cap-drop SYS_PTRACE"])?;
    }
    ensure!(matches!(program.first.try_wait(), Ok(None)), "it was to run on");
    drop(program);
    let expected = undisturbed("sgd", &ARGS[1..])?;
    let tree = RootTree::new(&lab, "tree-2", Libraries::Copied)?;
    let program = tree.start_without(&[CAP_SYS_ADMIN, CAP_SYS_PTRACE], &ARGS, BEFORE)?;
    dump(&lab, &program, &[])?;
    drop(program);
    let _restored = restore(&lab, &tree, &[])?;
    tree.allow(ALL)?;
    until("it ends", || has_result(&tree)).with_context(|| tree.log())?;
    ensure!(tree.series() == expected, "{}", tree.log());
    Ok(())
}

/// A container that means to have gpucr read, write or execute something of the host.
#[test]
fn nothing_of_the_host_is_touched_for_a_container() -> Result<()> {
    let lab = Lab::new();
    let tree = RootTree::new(&lab, "tree", Libraries::Copied)?;
    let program = tree.start(&ARGS, BEFORE)?;
    // Files that it has open or mapped are links to the host's, or pipes; the kernel still has them under these names.
    let secret = lab.path("secret");
    std::fs::write(&secret, "secret")?;
    let libraries = tree.join("var/lib/gpucr");
    let shim = find(&libraries, "gpucr-shim-")?;
    std::fs::remove_file(shim.join("libcuda.so.1"))?;
    symlink(&secret, shim.join("libcuda.so.1"))?;
    let output = lab.run(["dump", "--dry-run", "--pid", &program.pid.to_string()])?;
    ensure!(output.status.code().is_some(), "{}", show(&output));
    // CRIU may refuse what has lost its name, and then the program runs on.
    let pid = program.pid.to_string();
    let output = lab.run(["dump", "--leave-running", "--pid", &pid, "-o", "image"])?;
    ensure!(output.status.code().is_some_and(|code| code < 2), "{}", show(&output));
    std::fs::remove_file(shim.join("libcuda.so.1"))?;
    if lab.path("image").exists() {
        std::fs::remove_dir_all(lab.path("image"))?;
    }
    drop(program);

    let tree = RootTree::new(&lab, "tree-2", Libraries::Copied)?;
    let program = tree.start(&ARGS, BEFORE)?;
    dump(&lab, &program, &[])?;
    drop(program);
    let libraries = tree.join("var/lib/gpucr");
    let refuse = |words: &[&str]| -> Result<()> {
        let path = tree.path.to_string_lossy();
        refused(&lab.run(["restore", "--root", &path, "image"])?, 1, words)
    };
    // The directory of libraries leads outside: nothing is put there.
    let outside = lab.path("outside");
    std::fs::create_dir(&outside)?;
    std::fs::rename(&libraries, tree.join("var/lib/aside"))?;
    symlink(&outside, &libraries)?;
    refuse(&["/var/lib/gpucr"])?;
    ensure!(std::fs::read_dir(&outside)?.next().is_none(), "something was put outside");
    std::fs::remove_file(&libraries)?;
    std::fs::rename(tree.join("var/lib/aside"), &libraries)?;
    // What the program executes leads to a file of the host of the same length, or is a pipe that nobody writes to.
    let executed = tree.join("opt/workload");
    let len = std::fs::metadata(&executed)?.len();
    File::options().write(true).open(&secret)?.set_len(len)?;
    let before = std::fs::read(&secret)?;
    std::fs::rename(&executed, tree.join("opt/aside"))?;
    symlink(&secret, &executed)?;
    refuse(&["/opt/workload", "does not exist"])?;
    std::fs::remove_file(&executed)?;
    let made = finish(Command::new("mkfifo").arg(&executed))?;
    ensure!(made.status.success(), "{}", show(&made));
    refuse(&["/opt/workload"])?;
    ensure!(std::fs::read(&secret)? == before, "a file of the host was written");
    lab_is_clean(&outside)
}

fn lab_is_clean(outside: &Path) -> Result<()> {
    ensure!(std::fs::read_dir(outside)?.next().is_none(), "something was put outside");
    Ok(())
}

fn find(dir: &Path, prefix: &str) -> Result<std::path::PathBuf> {
    let names = std::fs::read_dir(dir)?.collect::<std::io::Result<Vec<_>>>()?;
    let found = names.iter().find(|it| it.file_name().to_string_lossy().starts_with(prefix));
    Ok(found.context("it is there")?.path())
}
