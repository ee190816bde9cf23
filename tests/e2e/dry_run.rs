//! `--dry-run`: everything that is in the way of a dump or a restore is named at once, each with what to do, and what is
//! said is true.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, binary, finish, show};
use serde_json::Value;

/// What is in the way, and whether anything is.
fn blockers(lab: &Lab, args: &[&str]) -> Result<(bool, Vec<(String, String)>)> {
    let output = finish(lab.gpucr().args(args).args(["--dry-run", "--json"]))?;
    let said: Value = serde_json::from_slice(&output.stdout).with_context(|| show(&output))?;
    let possible = said["possible"] == true;
    ensure!(output.status.code() == Some(i32::from(!possible)), "{}", show(&output));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let all = said["blockers"].as_array().context("a list")?;
    let all = all.iter().map(|b| (text(&b["what"]), text(&b["remedy"]))).collect();
    Ok((possible, all))
}

/// Whether one of them has these words, and this remedy.
fn has(all: &[(String, String)], what: &str, remedy: &str) -> bool {
    all.iter().any(|(w, r)| w.contains(what) && r.contains(remedy))
}

/// A workload that a shell has given descriptors.
fn at_work(lab: &Lab, descriptors: &str) -> Result<Program> {
    let mut command = Command::new("bash");
    command.current_dir(lab.path("")).arg("-c").arg(format!(
        "{descriptors}; exec {} run --device soft -- {} sgd --steps 100000 --step-delay-ms 5",
        binary("gpucr").display(),
        binary("workload").display()
    ));
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    Ok(program)
}

#[test]
fn a_dump_is_told_of_all_that_is_in_its_way() -> Result<()> {
    let lab = Lab::new();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    let mut program =
        at_work(&lab, &format!("exec 5<>/dev/tcp/127.0.0.1/{port}; exec 6>lock; flock 6"))?;
    let pid = program.pid.to_string();
    std::fs::create_dir(lab.path("image"))?;
    std::fs::write(lab.path("image/file"), "")?;
    let dump = ["dump", "--pid", &pid, "-o", "image"];
    let (possible, all) = blockers(&lab, &dump)?;
    ensure!(!possible && all.len() == 3, "{all:#?}");
    ensure!(has(&all, "has a TCP connection from", "--tcp-close"), "{all:#?}");
    ensure!(has(&all, "a lock on", "--file-locks"), "{all:#?}");
    ensure!(has(&all, "the directory is not empty", "give another name"), "{all:#?}");
    program.wait_for_progress()?;
    // With what it names nothing is in the way, and that is true.
    let options = ["--tcp-close", "--file-locks"];
    let dump = [&["dump", "--pid", &pid, "-o", "good"][..], &options].concat();
    ensure!(blockers(&lab, &dump)? == (true, Vec::new()), "{:?}", blockers(&lab, &dump)?);
    let output = lab.run(&dump)?;
    ensure!(output.status.success(), "{}", show(&output));
    program.wait()?;
    let text = finish(lab.gpucr().args(["dump", "--dry-run", "--pid", &pid]))?;
    ensure!(text.status.code() == Some(1), "{}", show(&text));
    ensure!(
        String::from_utf8_lossy(&text.stdout).starts_with("one thing would prevent"),
        "{}",
        show(&text)
    );
    Ok(())
}

/// What has no path and CRIU cannot save, of which its own errors say little.
#[test]
fn what_criu_saves_of_no_process_is_named_before_it_is_stopped() -> Result<()> {
    let lab = Lab::new();
    let mut parameters = [0_u32; 30];
    // SAFETY: the kernel reads and writes parameters of this size (`struct io_uring_params`).
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
    if ring < 0 {
        gpucr_tests::skip("no io_uring here");
        return Ok(());
    }
    // SAFETY: plain numbers. The program gets the copy, as a child of this process.
    ensure!(unsafe { libc::dup(ring as i32) } >= 0);
    let mut program = at_work(&lab, "true")?;
    let pid = program.pid.to_string();
    let (possible, all) = blockers(&lab, &["dump", "--pid", &pid])?;
    ensure!(!possible && all.len() == 1, "{all:#?}");
    ensure!(has(&all, "has an io_uring", "kernel.io_uring_disabled=2"), "{all:#?}");
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    let words = ["has an io_uring", "kernel.io_uring_disabled=2", "Nothing was changed"];
    gpucr_tests::refused(&output, 1, &words)?;
    program.wait_for_progress()?;
    program.kill();
    Ok(())
}

/// Only its own name, which CRIU asks for, says which terminal `/dev/tty` is.
#[test]
fn a_terminal_that_is_open_as_dev_tty_is_named() -> Result<()> {
    let lab = Lab::new();
    let program = |name: &str| -> Result<Program> {
        let shell = format!(
            "exec 5>/dev/tty 6<>{name} 0</dev/null >log 2>&1; exec {} run --device soft -- {} sgd --steps 100000 \
             --step-delay-ms 5",
            binary("gpucr").display(),
            binary("workload").display()
        );
        let mut command = Command::new("script");
        command.args(["-qec", &format!("exec bash -c '{shell}'"), "/dev/null"]);
        command.current_dir(lab.path(""));
        let mut outer = lab.spawn(command, "outer")?;
        let mut pid = 0;
        let found = || {
            let log = std::fs::read_to_string(lab.path("log")).unwrap_or_default();
            pid = log
                .lines()
                .find_map(|line| line.strip_prefix("ready pid=")?.parse().ok())
                .unwrap_or(0);
            pid != 0 && log.contains("step ")
        };
        gpucr_tests::until("it is at work", found)?;
        outer.pid = pid;
        Ok(outer)
    };
    let mut alone = program("/dev/null")?;
    let pid = alone.pid.to_string();
    let (_, all) = blockers(&lab, &["dump", "--pid", &pid])?;
    ensure!(has(&all, "open as /dev/tty", "setsid gpucr run"), "{all:#?}");
    let output = lab.run(["dump", "--pid", &pid, "-o", "image"])?;
    gpucr_tests::refused(&output, 1, &["CRIU could not", "setsid gpucr run"])?;
    alone.kill();
    std::fs::remove_file(lab.path("log"))?;
    // What it is told is no more than is true.
    let mut named = program("$(tty)")?;
    let pid = named.pid.to_string();
    let (_, all) = blockers(&lab, &["dump", "--pid", &pid])?;
    ensure!(!has(&all, "open as /dev/tty", ""), "{all:#?}");
    let output = lab.run(["dump", "--pid", &pid, "--shell-job", "-o", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    named.kill();
    Ok(())
}

#[test]
fn a_restore_is_told_of_all_that_is_in_its_way() -> Result<()> {
    let lab = Lab::new();
    let mut program = at_work(&lab, "echo data > data; exec 5<data")?;
    lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
    std::fs::write(lab.path("data"), "other data")?;
    // A pack is damaged in its middle.
    let packs = std::fs::read_dir(lab.path("image/packs"))?.next().context("a pack")??.path();
    let mut bytes = std::fs::read(&packs)?;
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x55;
    std::fs::write(&packs, &bytes)?;
    let (possible, all) = blockers(&lab, &["restore", "image", "--stdout", "out"])?;
    ensure!(!possible && has(&all, "data has 10 bytes now", "put the file back"), "{all:#?}");
    ensure!(
        has(&all, "is in use", "--new-pids") && has(&all, "is damaged in", "gpucr verify"),
        "{all:#?}"
    );
    ensure!(has(&all, "stdout was not a pipe", "leave the option out"), "{all:#?}");
    ensure!(!lab.path("out").exists(), "it was made");
    program.wait_for_progress()?;

    bytes[middle] ^= 0x55;
    std::fs::write(&packs, &bytes)?;
    std::fs::write(lab.path("data"), "data\n")?;
    let restore = ["restore", "image", "--new-pids"];
    ensure!(blockers(&lab, &restore)? == (true, Vec::new()), "{:?}", blockers(&lab, &restore)?);
    program.kill();
    let (possible, all) = blockers(&lab, &["restore", "image"])?;
    ensure!(possible, "{all:#?}");
    let text = finish(lab.gpucr().args(["restore", "--dry-run", "image"]))?;
    ensure!(
        String::from_utf8_lossy(&text.stdout).starts_with("nothing known would prevent"),
        "{}",
        show(&text)
    );
    Ok(())
}

/// The session of a shell, with its terminal, does not come along. A program that leads its own gets that of the restore.
#[test]
fn who_leads_no_session_gets_no_terminal_in_a_pid_namespace() -> Result<()> {
    const ARGS: [&str; 4] = ["--steps", "60", "--step-delay-ms", "20"];
    for leads in [true, false] {
        let lab = Lab::new();
        let (mut program, _terminal) = if leads {
            lab.at_work_at_terminal("sgd", &ARGS)?
        } else {
            let null = std::fs::File::options().write(true).open("/dev/null")?;
            let args = [&["sgd"][..], &ARGS].concat();
            lab.shell_at_terminal("\"$0\" \"$@\"; true", &args, null.into())?
        };
        let root = program.pid;
        let output = program.output();
        let pid = output.lines().find_map(|line| line.strip_prefix("ready pid="));
        program.pid = pid.context("its pid")?.trim().parse()?;
        ensure!((program.pid == root) == leads);
        lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
        let (possible, all) = blockers(&lab, &["restore", "image", "--new-pids"])?;
        ensure!(!possible && has(&all, "had a terminal", "script -qec"), "{all:#?}");
        program.let_go()?;
        for option in ["--dry-run", ""] {
            let gpucr = lab.gpucr();
            let command =
                format!("{} restore --new-pids {option} image", gpucr.get_program().display());
            let mut terminal = Command::new("script");
            terminal.args(["-qec", &command, "/dev/null"]).current_dir(lab.path(""));
            terminal.envs(gpucr.get_envs().filter_map(|(name, value)| Some((name, value?))));
            let output = finish(terminal.stdin(Stdio::null()))?;
            ensure!(output.status.success() == leads, "{option}: {}", show(&output));
        }
        program.pid = root;
    }
    Ok(())
}

#[test]
fn what_is_no_image_is_told_too() -> Result<()> {
    let lab = Lab::new();
    let (possible, all) = blockers(&lab, &["restore", "none"])?;
    ensure!(!possible && all.len() == 1 && has(&all, "none", ""), "{all:#?}");
    Ok(())
}

#[test]
fn a_pid_is_in_use_until_its_process_was_waited_for() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "1000"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    let words = format!("has ended, but its parent, process {}", std::process::id());
    let (possible, all) = blockers(&lab, &["restore", "image"])?;
    ensure!(!possible && all.len() == 1 && has(&all, &words, "--new-pids"), "{all:#?}");
    program.wait()?;
    let (possible, all) = blockers(&lab, &["restore", "image"])?;
    ensure!(possible, "{all:#?}");
    Ok(())
}

/// What cannot be used of the command line is no reason to tell of nothing else.
#[test]
fn what_the_command_line_names_is_among_it() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("full"))?;
    std::fs::write(lab.path("full/file"), "")?;
    let own = std::process::id().to_string();
    let dump = ["dump", "--pid", &own, "--sign", "no-key", "--store", "full"];
    let (possible, all) = blockers(&lab, &dump)?;
    ensure!(!possible && all.len() == 3, "{all:#?}");
    ensure!(has(&all, "cannot read no-key", "") && has(&all, "descendant of", ""), "{all:#?}");
    ensure!(has(&all, "full is not a gpucr store", ""), "{all:#?}");
    // A store can be made there, and in a directory that is not there.
    for store in ["new", "full/new"] {
        let (_, all) = blockers(&lab, &["dump", "--pid", &own, "--store", store])?;
        ensure!(all.len() == 1 && has(&all, "descendant of", ""), "{all:#?}");
        ensure!(!lab.path(store).exists());
    }
    let (_, all) = blockers(&lab, &["dump", "--pid", &own, "--store", "none/new"])?;
    ensure!(all.len() == 2 && has(&all, "none", ""), "{all:#?}");
    let files = ["--netns", "no-net", "--root", "no-root", "--stdout", "none/out"];
    let restore = [&["restore", "-d", "full", "--trusted-key", "no-key"][..], &files].concat();
    let (possible, all) = blockers(&lab, &restore)?;
    ensure!(!possible && all.len() == 5, "{all:#?}");
    ensure!(has(&all, "no-net", "ip netns add") && has(&all, "no-root", ""), "{all:#?}");
    ensure!(has(&all, "--stdout", "") && has(&all, "no-key", ""), "{all:#?}");
    ensure!(has(&all, "full is not a gpucr image", ""), "{all:#?}");
    Ok(())
}
