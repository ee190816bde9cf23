//! Programs that do what makes a dump hard: it works, or is refused for what it is.

use std::process::Command;

use anyhow::{Result, ensure};
use gpucr_tests::{Lab, Pace, PausedDump, binary, finish, refused, show, undisturbed, until};

#[test]
fn what_cannot_be_dumped_is_refused_as_long_as_it_lives_whenever_it_begins() -> Result<()> {
    const FUNCTION: &str = "cuMemPoolExportToShareableHandle";
    let expected = undisturbed("sharer", &[])?;
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(10)?;
    let private = [("SOFTCUDA_VMM", "private")];
    let mut program = lab.start_with("sharer", &["--pace", pace.file()], &private)?;
    program.wait_for("step 10 alone")?;
    // It begins after the dump has asked, and before the program is stopped.
    let dump = PausedDump::start(&lab, &program, &["--protocol", "recopy"], "hold:gate")?;
    pace.allow(20)?;
    program.wait_for("step 30 shared")?;
    let said = dump.fails()?;
    ensure!(said.contains(FUNCTION) && said.contains("rolled back"), "{said}");
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &[FUNCTION, "Nothing was changed"])?;
    pace.allow(20)?;
    program.wait_for("step 50 alone")?;
    lab.dump(&program, &lab.path("image"), &[])?;
    pace.allow_all()?;
    let mut program = lab.restore(&lab.path("image"), program)?;
    program.result()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

/// As MPI and NCCL have them open between hosts. It is refused before anything is stopped.
#[test]
fn a_program_with_an_rdma_device_is_refused_by_its_name() -> Result<()> {
    let lab = Lab::new();
    let device = lab.path("infiniband/uverbs0");
    std::fs::create_dir(lab.path("infiniband"))?;
    // A device of another kind under such a name: hosts without an adapter have no driver behind the real ones.
    let mut command = Command::new("mknod");
    let made = finish(command.arg(&device).args(["c", "1", "3"]))?;
    ensure!(made.status.success(), "{}", show(&made));
    let pace = Pace::new()?;
    pace.allow(10)?;
    let mut command = lab.gpucr();
    command.args([
        "run",
        "--device",
        "soft",
        "--",
        "bash",
        "-c",
        r#"exec 7<"$1"; exec "${@:2}""#,
        "bash",
    ]);
    command.arg(&device).arg(binary("workload")).args([
        "sgd",
        "--steps",
        "20",
        "--pace",
        pace.file(),
    ]);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &["the RDMA device", "infiniband/uverbs0", "Nothing was changed"])?;
    pace.allow_all()?;
    program.result().map(drop)
}

#[test]
fn a_program_without_its_main_thread_is_refused_and_comes_back_from_a_dump() -> Result<()> {
    let expected = undisturbed("headless", &[])?;
    // The thread ends before the program is stopped, and while it stands still.
    for (phase, words) in [("gate", "main thread"), ("criu", "CRIU")] {
        let lab = Lab::new();
        let pace = Pace::new()?;
        pace.allow(10)?;
        let mut program = lab.start("headless", &["--pace", pace.file()])?;
        program.wait_for("step 10 ")?;
        let dump =
            PausedDump::start(&lab, &program, &["--protocol", "recopy"], &format!("hold:{phase}"))?;
        pace.allow(30)?;
        until("the main thread ends", || is_headless(program.pid))?;
        let said = dump.fails()?;
        ensure!(said.contains(words) && said.contains("rolled back"), "{phase}: {said}");
        program.wait_for("step 30 ")?;
        let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
        refused(&output, 1, &["main thread", "Nothing was changed"])?;
        let listed = lab.run(["ps", "--timeout", "20s"])?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let row = format!("{} ", program.pid);
        ensure!(listed.lines().any(|line| line.trim_start().starts_with(&row)), "{listed}");
        pace.allow_all()?;
        program.result()?;
        ensure!(program.series() == expected, "{phase}: differs:\n{}", program.output());
    }
    Ok(())
}

fn is_headless(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'))
}
