//! A restore on a host where somebody has a pid or thread id of the program.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, Squatter, finish, refused, show};

/// An image of a program with threads that was ended by the dump, and the id of one of them.
fn dumped(lab: &Lab) -> Result<(Program, i32)> {
    let mut program = lab.at_work("threads", &["--steps", "100"])?;
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/task", program.pid))? {
        let id: i32 = entry?.file_name().to_string_lossy().parse()?;
        threads.extend((id as u32 != program.pid).then_some(id));
    }
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    Ok((program, *threads.first().context("it has threads")?))
}

#[test]
fn a_thread_id_in_use_is_named_with_its_owner() -> Result<()> {
    let lab = Lab::new();
    let (program, thread) = dumped(&lab)?;
    let squatter = Squatter::process(thread)?;
    refused(
        &lab.run(["restore", "image"])?,
        1,
        &[&format!("pid {thread}"), "in use", "by a_thread_id"],
    )?;
    drop(squatter);
    lab.restore(&lab.path("image"), program)?.wait_for_progress()
}

#[test]
fn a_pid_that_only_criu_finds_in_use() -> Result<()> {
    let lab = Lab::new();
    let (program, thread) = dumped(&lab)?;
    let squatter = Squatter::group(thread)?;
    let output = finish(lab.gpucr().args(["restore", "image"]))?;
    refused(&output, 1, &["create a thread", "--new-pids"]).with_context(|| show(&output))?;

    // It passes while gpucr tries again.
    let waiting = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(squatter);
    });
    let mut program = lab.restore(&lab.path("image"), program)?;
    ensure!(waiting.is_finished(), "the restore went through while the id was taken");
    program.wait_for_progress()
}
