//! Outputs of a program that were pipes go to files at the destination, if these are named there or at the source.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::process::Output;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, Side, Sides};
use gpucr_tests::{Lab, Pipes, Program, binary, exists, refused, show, undisturbed, until};
use serde_json::{Value, json};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";

/// What a command has told a person, on one line.
fn told(output: &Output) -> String {
    let told = String::from_utf8_lossy(&output.stderr);
    told.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The program runs as this process, and its output is in this file: with what was read before it is what it would have
/// been.
fn goes_on_in(
    lab: &Lab,
    mut program: Program,
    pipes: Pipes,
    (pid, file): (u32, &str),
    expected: &[String],
) -> Result<()> {
    pipes.end()?;
    let before = program.output();
    program.goes_on_as(pid, lab.path(file));
    program.let_go()?;
    program.wait_for("result ")?;
    until("it is gone", || !exists(pid))?;
    std::fs::write(lab.path("log"), before + &program.output())?;
    program.goes_on_as(pid, lab.path("log"));
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

fn new_pid(source: &Value) -> Result<u32> {
    let pid = source["new_pid"].as_u64().with_context(|| source.to_string())?;
    Ok(u32::try_from(pid)?)
}

#[test]
fn the_output_of_a_program_that_comes_goes_where_it_is_wanted() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for is_apart in [false, true] {
        let lab = Lab::new();
        let pair = |program: &Program| match is_apart {
            true => Pair::apart(&lab, program),
            false => Pair::new(&lab, program),
        };
        let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
        for (option, unread) in [(&[][..], json!(["stdout"])), (&["--stdout", "out"], json!(null))]
        {
            let mut pair = pair(&program)?;
            pair.source.arg("--dry-run");
            pair.destination.args(option);
            let dry = pair.run(&mut program)?;
            ensure!(dry.reports()?.0["unread"] == unread, "{}", dry.show());
            let is_said = told(&dry.source).contains("`gpucr receive --stdout FILE`");
            ensure!(is_said == option.is_empty(), "{}", dry.show());
        }
        ensure!(!lab.path("out").exists(), "nothing is changed");
        std::fs::write(lab.path("out"), "before\n")?;
        let mut pair = pair(&program)?;
        pair.destination.args(["--stdout", "out"]);
        let sides = pair.run(&mut program)?;
        let (source, destination) = sides.reports()?;
        ensure!(source["unread"].is_null() && destination["unread"].is_null(), "{}", sides.show());
        ensure!(!sides.show().contains("/dev/null"), "{}", sides.show());
        goes_on_in(&lab, program, pipes, (new_pid(&source)?, "out"), &expected)?;
        ensure!(std::fs::read_to_string(lab.path("out"))?.starts_with("before\n"), "it is added");
    }
    Ok(())
}

#[test]
fn both_sides_say_what_nobody_reads_and_which_options_there_are() -> Result<()> {
    let lab = Lab::new();
    let (mut program, _pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let sides = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, destination) = sides.reports()?;
    ensure!(source["unread"] == json!(["stdout"]), "{source}");
    ensure!(destination["unread"] == json!(["stdout"]), "{destination}");
    let (here, there) = (told(&sides.source), told(&sides.destination));
    ensure!(here.contains("with --relay"), "{here}");
    ensure!(here.contains("with `gpucr receive --stdout FILE` a file there gets it"), "{here}");
    ensure!(there.contains("to keep it, receive with --stdout FILE."), "{there}");
    program.let_go()?;
    until("it comes to its end", || !exists(program.pid))
}

#[test]
fn what_cannot_go_to_a_file_is_refused_before_anything_is_changed() -> Result<()> {
    let lab = Lab::new();
    let (mut program, _pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    std::os::unix::fs::symlink("/etc/hostname", lab.path("link"))?;
    std::os::unix::fs::lchown(lab.path("link"), Some(65534), None)?;
    for (source, destination, words) in [
        (&[][..], ["--stderr", "err"], &["stderr was not a pipe but ", "/errors"][..]),
        (&["--dry-run"], ["--stderr", "err"], &["stderr was not a pipe"]),
        (&["--relay"], ["--stdout", "out"], &["relayed (--relay)", "--stdout"]),
    ] {
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.args(source);
        pair.destination.args(destination);
        let Pair { mut source, mut destination, sockets } = pair;
        let (source, destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
        drop(sockets);
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        refused(&sides.source, 1, words).with_context(|| sides.show())?;
        refused(&sides.destination, 1, words).with_context(|| sides.show())?;
    }
    let receive = ["receive", "--from", "unix:socket", "--stdout"];
    refused(&lab.run([&receive[..], &["link"]].concat())?, 1, &["--stdout", "another user"])?;
    refused(&lab.run([&receive[..], &["none/out"]].concat())?, 1, &["--stdout", "No such file"])?;
    let pid = program.pid.to_string();
    let migrate = ["migrate", "--pid", &pid, "--to", "unix:socket", "--stdout", "out"];
    refused(&lab.run(migrate)?, 2, &["for the other side", "gpucr receive"])?;
    refused(&lab.run([&migrate[..], &["--relay"]].concat())?, 2, &["--relay"])?;
    program.wait_for_progress()?;
    ensure!(!lab.path("out").exists() && !lab.path("err").exists(), "no file was made");
    Ok(())
}

/// The name of the migration that the source says is to be resumed.
fn id_of(sides: &Sides) -> Result<String> {
    let told = told(&sides.source);
    let id = told.split("--resume").nth(1).with_context(|| sides.show())?;
    Ok(id.chars().filter(char::is_ascii_hexdigit).take(32).collect())
}

#[test]
fn a_program_that_comes_later_has_its_output_go_there_or_elsewhere() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for (named, with_resume, file) in [
        (&["--stdout", "first"][..], &[][..], "first"),
        (&["--stdout", "first"], &["--stdout", "second"], "second"),
        (&[], &["--stdout", "second"], "second"),
    ] {
        let lab = Lab::new();
        let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
        let mut pair = Pair::new(&lab, &program)?;
        pair.destination.args(named).env("GPUCR_FAULT", "kill:handover");
        let sides = pair.run(&mut program)?;
        let id = id_of(&sides)?;
        let refused_first = lab.run(["receive", "--resume", &id, "--stderr", "err"])?;
        refused(&refused_first, 1, &["stderr was not a pipe", "Nothing was changed"])?;
        // From elsewhere: what was noted holds there too.
        let resume = ["receive", "--resume", &id];
        let mut command = lab.gpucr();
        command.args(resume).args(with_resume);
        if with_resume.is_empty() {
            command.current_dir("/");
        }
        let resumed = Side::start(&mut command)?.end()?;
        ensure!(resumed.status.success(), "{}", show(&resumed));
        ensure!(!told(&resumed).contains("/dev/null"), "{}", show(&resumed));
        let pid = program.pid;
        goes_on_in(&lab, program, pipes, (pid, file), &expected)?;
        let forgotten = lab.run(["migrate", "--forget", &id])?;
        ensure!(forgotten.status.success(), "{}", show(&forgotten));
    }
    Ok(())
}

#[test]
fn a_program_whose_streams_were_to_be_relayed_is_not_resumed_into_files() -> Result<()> {
    let lab = Lab::new();
    let (mut program, _pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--relay");
    pair.destination.env("GPUCR_FAULT", "kill:handover");
    let id = id_of(&pair.run(&mut program)?)?;
    let resumed = lab.run(["receive", "--resume", &id, "--stdout", "out"])?;
    refused(&resumed, 1, &["relayed (--relay)", "Nothing was changed"])?;
    ensure!(!lab.path("out").exists(), "no file was made");
    let resumed = lab.run(["receive", "--resume", &id, "--json"]);
    program.let_go()?;
    ensure!(resumed?.status.success());
    until("it comes to its end", || !exists(program.pid))?;
    let kept = format!("/var/lib/gpucr/migrations/{id}.output");
    until("how it ended is kept", || std::path::Path::new(&kept).join("end").exists())?;
    std::fs::remove_dir_all(kept)?;
    let forgotten = lab.run(["migrate", "--forget", &id])?;
    ensure!(forgotten.status.success(), "{}", show(&forgotten));
    Ok(())
}

/// What stands in for ssh runs the command on this machine.
#[test]
fn with_ssh_the_source_names_the_files() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let ssh = lab.path("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n")?;
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755))?;
    let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let migrate = |option: &[&str]| -> Result<Side> {
        let mut command = lab.gpucr();
        let to = format!("ssh://root@elsewhere{}", lab.path("store").display());
        command.args(["migrate", "--json", "--pid", &program.pid.to_string(), "--to", &to]);
        command.arg("--ssh").arg(&ssh).arg("--remote-gpucr").arg(binary("gpucr")).args(option);
        Side::start(&mut command)
    };
    let dry = migrate(&["--dry-run"])?.end()?;
    let said = told(&dry);
    ensure!(said.contains("with --stdout FILE a file there gets it"), "{}", show(&dry));
    ensure!(!said.contains("gpucr receive"), "{}", show(&dry));
    let file = "it's out";
    let mut source = migrate(&["--stdout", file])?;
    until("it has gone", || !program.is_running() || !source.is_at_work())?;
    let source = source.end()?;
    ensure!(source.status.success() && !told(&source).contains("/dev/null"), "{}", show(&source));
    let pid = new_pid(&serde_json::from_slice(&source.stdout)?)?;
    goes_on_in(&lab, program, pipes, (pid, file), &expected)
}

/// It has a process that reads its terminal and keeps nothing; the file gets what is for it all the same.
#[test]
fn a_program_with_a_terminal_has_its_pipe_go_to_a_file() -> Result<()> {
    let lab = Lab::new();
    let shell = "echo begin >&2; \"$0\" \"$@\"; echo all >&2";
    let args = [&[WORKLOAD], &ARGS[..]].concat();
    let (reading, errors) = std::io::pipe()?;
    let (mut program, _terminal) = lab.shell_at_terminal(shell, &args, errors.into())?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.destination.args(["--stderr", "errors"]);
    let sides = pair.run(&mut program)?;
    let (source, _) = sides.reports()?;
    ensure!(source["unread"] == json!(["terminal"]), "{}", sides.show());
    program.let_go()?;
    until("it comes to its end", || !exists(program.pid))?;
    ensure!(std::fs::read_to_string(lab.path("errors"))? == "all\n");
    let here = std::io::read_to_string(File::from(std::os::fd::OwnedFd::from(reading)))?;
    ensure!(here == "begin\n", "{here}");
    Ok(())
}
