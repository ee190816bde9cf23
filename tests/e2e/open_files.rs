//! Limits of open files that are too low for the blocks of a program: that is found before anything is done, and
//! said with what to do. What works all the same the workload `many-blocks` shows in `workloads.rs` and others.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, binary, finish, refused};

/// Runs gpucr by a shell, without the right to raise hard limits, after `first`.
fn limited(lab: &Lab, first: &str, args: &[&str]) -> Result<Output> {
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_resource", "sh", "-c"]);
    command.arg(format!("{first} && exec \"$0\" \"$@\"")).arg(binary("gpucr"));
    finish(command.args(args).current_dir(lab.path("")))
}

#[test]
fn a_dump_that_has_too_few_descriptors_is_refused_and_says_what_it_needs() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("many-blocks", &["--steps", "100"])?;
    let pid = program.pid.to_string();
    let dump = ["dump", "--pid", &pid, "-o", "image"];
    let output = limited(&lab, "ulimit -n 90", &dump)?;
    refused(&output, 1, &["100 blocks", "this gpucr is 90", "ulimit -n ", "Nothing was changed"])?;
    // The program's own hard limit, lowered when it has its memory already.
    let lower = format!("prlimit --pid {pid} --nofile=64:64");
    let output = limited(&lab, &lower, &dump)?;
    let said = ["100 blocks", &format!("process {pid} is 64"), "prlimit", "Nothing was changed"];
    refused(&output, 1, &said)?;
    program.wait_for_progress()?;
    lab.holds_only(&["log"])?;
    program.result()?;
    Ok(())
}

#[test]
fn a_restore_that_has_too_few_descriptors_is_refused_and_says_what_it_needs() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("many-blocks", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    let output = limited(&lab, "ulimit -n 90", &["restore", "image"])?;
    refused(&output, 1, &["100 blocks", "this gpucr is 90", "ulimit -n "])?;
    // A soft limit is raised.
    let output = limited(&lab, "ulimit -Sn 90", &["restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", gpucr_tests::show(&output));
    program.let_go()?;
    program.wait_for("result ").map(drop)
}
