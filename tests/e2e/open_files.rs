//! Limits of open files that are too low for the blocks of a program: that is found before anything is done, and
//! said with what to do. What works all the same the workload `many-blocks` shows in `workloads.rs` and others.
//! And TCP sockets, which programs of any kind have.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, binary, finish, refused, show, undisturbed};

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
    ensure!(output.status.success(), "{}", show(&output));
    program.let_go()?;
    program.wait_for("result ").map(drop)
}

/// Lets a command inherit a copy of this descriptor.
fn inherit(command: &mut Command, socket: OwnedFd) {
    // SAFETY: dup is async-signal-safe; the descriptor lives as long as the closure that has it.
    unsafe {
        command.pre_exec(move || {
            std::mem::forget(rustix::io::dup(&socket)?);
            Ok(())
        });
    }
}

#[test]
fn a_program_with_a_tcp_socket_comes_back_with_it() -> Result<()> {
    let lab = Lab::new();
    let expected = undisturbed("sgd", &["--steps", "8"])?;
    let (listener, pace) = (TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?, Pace::new()?);
    pace.allow(4)?;
    let address = listener.local_addr()?;
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(binary("workload"));
    command.args(["sgd", "--steps", "8", "--pace", pace.file()]);
    inherit(&mut command, listener.into());
    // With the command our own copy of the socket goes.
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    ensure!(TcpStream::connect(address).is_err(), "somebody else has the socket");
    let output = lab.run(["restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    // Nobody accepts it; that it is taken shows who listens.
    TcpStream::connect(address).context("the restored program listens")?;
    program.let_go()?;
    pace.allow_all()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "{}", program.output());
    Ok(())
}
