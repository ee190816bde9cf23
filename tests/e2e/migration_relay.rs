//! A program in a pipeline goes to another gpucr, and who writes its input and reads its output sees nothing of that.

use std::path::PathBuf;
use std::process::Output;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{Pair, Side, Sides, made};
use gpucr_tests::{Lab, Pipes, Program, binary, exists, show, undisturbed, until};
use serde_json::Value;

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
const WORKLOAD: &str = "sgd";
/// A gpucr that does not know how the program has ended.
const UNKNOWN: Option<i32> = Some(255);

/// Both sides of a migration, when the program has gone.
fn gone(pair: Pair, program: &mut Program) -> Result<(Side, Side)> {
    let Pair { mut source, mut destination, sockets } = pair;
    source.arg("--relay");
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    let both = until("the program has gone", || {
        !program.is_running() || !source.is_at_work() || !destination.is_at_work()
    });
    both?;
    if !source.is_at_work() || !destination.is_at_work() {
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        anyhow::bail!("one has ended: {}", sides.show());
    }
    Ok((source, destination))
}

/// What the destination says of the program.
fn report(output: &Output) -> Result<Value> {
    serde_json::from_slice(&output.stdout).with_context(|| show(output))
}

/// Where the destination keeps what nobody reads.
fn kept(output: &Output) -> Result<PathBuf> {
    let report = report(output)?;
    let id = report["migration"].as_str().with_context(|| show(output))?;
    Ok(PathBuf::from(format!("/var/lib/gpucr/migrations/{id}.output")))
}

/// Everything that was read of the program, and no more.
fn came_out_right(program: &Program, pipes: Pipes, expected: &[String]) -> Result<()> {
    pipes.end()?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    Ok(())
}

#[test]
fn what_reads_the_output_sees_nothing_of_a_migration() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let (source, destination) = gone(Pair::new(&lab, &program)?, &mut program)?;
    ensure!(!pipes.has_ended(), "there is more to come");
    program.allow(1 << 20)?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let (source, destination) = sides.reports()?;
    ensure!(source["new_pid"] == program.pid && destination["pid"] == program.pid, "{source}");
    came_out_right(&program, pipes, &expected)?;
    ensure!(!kept(&sides.destination)?.exists(), "nothing had to be kept");
    until("it is gone", || !exists(program.pid))?;
    lab.holds_only(&["errors", "log", "store"])
}

/// It reads lines, and ends with a status of its own when there are no more and the workload has ended.
const READER: &str =
    "\"$0\" \"$@\" & while read line; do echo \"heard $line\"; done; echo all; wait; exit 7";

fn lines_with(program: &Program, prefix: &str) -> Vec<String> {
    let output = program.output();
    output.lines().filter_map(|line| line.strip_prefix(prefix)).map(str::to_owned).collect()
}

#[test]
fn what_is_written_to_the_input_comes_and_the_exit_status_comes_back() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let args = [&[WORKLOAD], &ARGS[..]].concat();
    let (mut program, mut pipes) = lab.shell_in_pipes(READER, &args)?;
    pipes.say("one\n")?;
    program.wait_for("heard one")?;
    pipes.say("two\n")?;
    let (source, destination) = gone(Pair::apart(&lab, &program)?, &mut program)?;
    pipes.say("three\nfour\n")?;
    program.let_go()?;
    program.wait_for("heard four")?;
    let sides_later = (source, destination);
    pipes.say("five\n")?;
    pipes.input = None;
    came_out_right(&program, pipes, &expected)?;
    let sides = Sides { source: sides_later.0.end()?, destination: sides_later.1.end()? };
    let codes = [sides.source.status.code(), sides.destination.status.code()];
    ensure!(codes == [Some(7), Some(0)], "{}", sides.show());
    let heard = lines_with(&program, "heard ");
    ensure!(heard == ["one", "two", "three", "four", "five"], "{heard:?}");
    program.wait_for("all").map(drop)
}

#[test]
fn a_program_goes_there_and_back_again_in_its_pipeline() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.destination.arg("--new-pids");
    let there = gone(pair, &mut program)?;
    let mut outer = None;
    until("it runs there", || {
        outer = made(&program);
        outer.is_some()
    })?;
    let outer = outer.context("it is there")?;
    let inner = std::mem::replace(&mut program.pid, outer);
    let Pair { mut source, mut destination, sockets } = Pair::new(&lab, &program)?;
    source.arg("--relay");
    // Whoever has restored it there may not be through yet.
    let back = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    until("it is gone from there", || !exists(outer))?;
    program.pid = inner;
    program.let_go()?;
    came_out_right(&program, pipes, &expected)?;
    let back = Sides { source: back.0.end()?, destination: back.1.end()? };
    back.reports()?;
    let there = Sides { source: there.0.end()?, destination: there.1.end()? };
    ensure!(there.source.status.code() == Some(128 + 9), "{}", there.show());
    ensure!(there.destination.status.success(), "{}", there.show());
    Ok(())
}

#[test]
fn a_program_whose_link_is_lost_goes_on_and_what_it_writes_is_kept() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for signal in [libc::SIGKILL, libc::SIGTERM] {
        let lab = Lab::new();
        let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
        let (source, destination) = gone(Pair::new(&lab, &program)?, &mut program)?;
        until("it is known that it runs there", || source.said().contains("new_pid"))?;
        // It makes no further step by itself, so nothing is on its way then.
        until("it stops short of its end", || program.output().contains("step 74 "))?;
        // SAFETY: sends a signal to a child that nobody has waited for.
        unsafe { libc::kill(source.pid() as i32, signal) };
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        ensure!(sides.destination.status.success(), "{}", sides.show());
        let kept = kept(&sides.destination)?;
        let told = String::from_utf8_lossy(&sides.destination.stderr).into_owned();
        ensure!(told.contains(&kept.display().to_string()), "{}", sides.show());
        if signal == libc::SIGTERM {
            ensure!(sides.source.status.code() == UNKNOWN, "{}", sides.show());
            let told = String::from_utf8_lossy(&sides.source.stderr).into_owned();
            ensure!(told.contains("continues there") && told.contains(".output"), "{told}");
        }
        pipes.end()?;
        program.let_go()?;
        let end = kept.join("end");
        until("it has ended", || std::fs::read(&end).is_ok_and(|end| end.ends_with(b"\n")))?;
        ensure!(std::fs::read_to_string(&end)?.trim() == "{\"exit_code\":0}");
        let rest = std::fs::read_to_string(kept.join("stdout"))?;
        std::fs::write(lab.path("log"), program.output() + &rest)?;
        ensure!(program.series() == expected, "differs:\n{}", program.output());
        std::fs::remove_dir_all(kept)?;
    }
    Ok(())
}

#[test]
fn a_program_that_comes_later_has_its_output_kept() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let (mut program, pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--relay");
    pair.destination.env("GPUCR_FAULT", "kill:handover");
    let sides = pair.run(&mut program)?;
    let told = String::from_utf8_lossy(&sides.source.stderr).into_owned();
    let id = told.split("--resume").nth(1).with_context(|| sides.show())?;
    let id: String = id.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    pipes.end()?;
    let resumed = lab.run(["receive", "--resume", &id])?;
    let told = String::from_utf8_lossy(&resumed.stderr).into_owned();
    let kept = PathBuf::from(format!("/var/lib/gpucr/migrations/{id}.output"));
    ensure!(resumed.status.success(), "{}", show(&resumed));
    ensure!(told.contains(&kept.display().to_string()), "{}", show(&resumed));
    program.let_go()?;
    let end = kept.join("end");
    until("it has ended", || std::fs::read(&end).is_ok_and(|end| end.ends_with(b"\n")))?;
    let rest = std::fs::read_to_string(kept.join("stdout"))?;
    std::fs::write(lab.path("log"), program.output() + &rest)?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    std::fs::remove_dir_all(kept)?;
    let forgotten = lab.run(["migrate", "--forget", &id])?;
    ensure!(forgotten.status.success(), "{}", show(&forgotten));
    Ok(())
}

/// It writes much when it is told to.
const WRITER: &str =
    "\"$0\" \"$@\" & read line; head -c 3000000 /dev/zero | tr '\\0' x; echo; wait";

#[test]
fn a_reader_who_pauses_gets_everything_all_the_same() -> Result<()> {
    let lab = Lab::new();
    let args = [&[WORKLOAD], &ARGS[..]].concat();
    let (mut program, mut pipes) = lab.shell_in_pipes(WRITER, &args)?;
    let (mut source, destination) = gone(Pair::apart(&lab, &program)?, &mut program)?;
    pipes.set_idle(true);
    pipes.say("go\n")?;
    program.let_go()?;
    std::thread::sleep(Duration::from_secs(1));
    ensure!(source.is_at_work() && !pipes.has_ended(), "it waits for the reader");
    pipes.set_idle(false);
    pipes.end()?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    sides.reports()?;
    let count = program.output().bytes().filter(|byte| *byte == b'x').count();
    ensure!(count == 3_000_000, "{count}");
    Ok(())
}

#[test]
fn what_a_program_writes_to_its_terminal_comes_out_there() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    for is_apart in [false, true] {
        let lab = Lab::new();
        let (mut program, pipes) = lab.at_work_at_terminal(WORKLOAD, &ARGS)?;
        let pair = if is_apart { Pair::apart } else { Pair::new };
        let (source, destination) = gone(pair(&lab, &program)?, &mut program)?;
        program.let_go()?;
        let sides = Sides { source: source.end()?, destination: destination.end()? };
        sides.reports()?;
        came_out_right(&program, pipes, &expected)?;
        let lines = std::fs::read_to_string(lab.path("log"))?;
        ensure!(!lines.contains("\r\r") && lines.contains("\r\n"), "as before: {lines:?}");
    }
    Ok(())
}

/// The session of a shell does not come along.
#[test]
fn a_program_in_a_shells_session_gets_no_pid_namespace_without_its_terminal() -> Result<()> {
    let lab = Lab::new();
    let null = std::fs::File::options().write(true).open("/dev/null")?;
    let shell = "\"$0\" \"$@\"; true";
    let args = [&[WORKLOAD][..], &ARGS].concat();
    let (mut program, _pipes) = lab.shell_at_terminal(shell, &args, null.into())?;
    let output = program.output();
    let pid = output.lines().find_map(|line| line.strip_prefix("ready pid=")).context("its pid")?;
    let shell = std::mem::replace(&mut program.pid, pid.trim().parse()?);
    ensure!(shell != program.pid, "{output}");
    for (args, why) in [(&["--new-pids"][..], Some("session of a shell")), (&[], None)] {
        let mut pair = Pair::new(&lab, &program)?;
        pair.source.arg("--dry-run");
        pair.destination.args(args);
        let sides = pair.run(&mut program)?;
        ensure!(sides.source.status.success() == why.is_none(), "{}", sides.show());
        let told = String::from_utf8_lossy(&sides.source.stderr);
        let told: Vec<&str> = told.split_whitespace().filter(|word| *word != "│").collect();
        ensure!(why.is_none_or(|why| told.join(" ").contains(why)), "{}", sides.show());
    }
    program.pid = shell;
    Ok(())
}

/// A terminal that nobody relays is one all the same: the program cannot do without.
#[test]
fn a_program_with_a_terminal_goes_without_a_relay_too() -> Result<()> {
    let lab = Lab::new();
    let (mut program, _pipes) = lab.at_work_at_terminal(WORKLOAD, &ARGS)?;
    let mut pair = Pair::new(&lab, &program)?;
    pair.source.arg("--dry-run");
    let dry = pair.run(&mut program)?;
    let (report, _) = dry.reports()?;
    ensure!(report["unread"] == serde_json::json!(["terminal"]), "{report}");
    let sides = Pair::new(&lab, &program)?.run(&mut program)?;
    let (source, _) = sides.reports()?;
    ensure!(source["new_pid"] == program.pid, "{source}");
    let told = String::from_utf8_lossy(&sides.source.stderr).into_owned();
    ensure!(told.contains("terminal") && told.contains("--relay"), "{}", sides.show());
    ensure!(exists(program.pid), "it runs, and is held up");
    program.let_go()?;
    until("it comes to its end", || !exists(program.pid))
}

#[test]
fn streams_are_relayed_through_a_socket_in_the_file_system() -> Result<()> {
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let args = [&[WORKLOAD], &ARGS[..]].concat();
    let (mut program, mut pipes) = lab.shell_in_pipes(READER, &args)?;
    pipes.say("one\n")?;
    program.wait_for("heard one")?;
    let (mut receive, mut migrate) = (lab.gpucr(), lab.gpucr());
    receive.args(["receive", "--json", "--store", "store", "--new-pids", "--from", "unix:socket"]);
    let mut destination = Side::start(&mut receive)?;
    let socket = lab.path("socket");
    until("it listens", || socket.exists() || !destination.is_at_work())?;
    let pid = program.pid.to_string();
    migrate.args(["migrate", "--relay", "--json", "--pid", &pid, "--to", "unix:socket"]);
    let mut source = Side::start(&mut migrate)?;
    until("it has gone", || !program.is_running() || !source.is_at_work())?;
    ensure!(source.is_at_work(), "{}", show(&source.end()?));
    ensure!(!socket.exists(), "nobody else can connect");
    pipes.say("two\n")?;
    program.let_go()?;
    program.wait_for("heard two")?;
    pipes.input = None;
    came_out_right(&program, pipes, &expected)?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let codes = [sides.source.status.code(), sides.destination.status.code()];
    ensure!(codes == [Some(7), Some(0)], "{}", sides.show());
    ensure!(lines_with(&program, "heard ") == ["one", "two"], "{}", program.output());
    program.wait_for("all").map(drop)
}

/// What stands in for ssh runs the command on this machine.
#[test]
fn streams_are_relayed_where_ssh_leads() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let expected = undisturbed(WORKLOAD, &ARGS[..2])?;
    let lab = Lab::new();
    let ssh = lab.path("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nfor last; do :; done\nexec sh -c \"$last\"\n")?;
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755))?;
    let args = [&[WORKLOAD], &ARGS[..]].concat();
    let (mut program, mut pipes) = lab.shell_in_pipes(READER, &args)?;
    let mut command = lab.gpucr();
    let to = format!("ssh://root@elsewhere{}", lab.path("store").display());
    command.args(["migrate", "--relay", "--json", "--pid", &program.pid.to_string(), "--to", &to]);
    command.arg("--ssh").arg(&ssh).arg("--remote-gpucr").arg(binary("gpucr"));
    let mut source = Side::start(&mut command)?;
    until("it has gone", || !program.is_running() || !source.is_at_work())?;
    ensure!(source.is_at_work(), "{}", show(&source.end()?));
    pipes.say("one\ntwo\n")?;
    pipes.input = None;
    program.let_go()?;
    came_out_right(&program, pipes, &expected)?;
    let output = source.end()?;
    ensure!(output.status.code() == Some(7), "{}", show(&output));
    ensure!(lines_with(&program, "heard ") == ["one", "two"], "{}", program.output());
    Ok(())
}

/// ssh ends later than gpucr, which has something to say all the same.
#[test]
fn an_interrupted_relay_says_what_holds_though_ssh_is_slow() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let lab = Lab::new();
    let ssh = lab.path("ssh");
    std::fs::write(&ssh, "#!/bin/sh\nfor last; do :; done\nsh -c \"$last\"; sleep 30\n")?;
    std::fs::set_permissions(&ssh, PermissionsExt::from_mode(0o755))?;
    let (mut program, _pipes) = lab.at_work_in_pipes(WORKLOAD, &ARGS)?;
    let mut command = lab.gpucr();
    let to = format!("ssh://root@elsewhere{}", lab.path("store").display());
    command.args(["migrate", "--relay", "--json", "--pid", &program.pid.to_string(), "--to", &to]);
    command.arg("--ssh").arg(&ssh).arg("--remote-gpucr").arg(binary("gpucr"));
    let source = Side::start(&mut command)?;
    until("it is known that it runs there", || {
        program.is_running();
        source.said().contains("new_pid")
    })?;
    // SAFETY: sends a signal to a child that nobody has waited for.
    unsafe { libc::kill(source.pid() as i32, libc::SIGINT) };
    let output = source.end()?;
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == UNKNOWN, "{}", show(&output));
    ensure!(told.contains("continues there") && told.contains(".output"), "{told}");
    ensure!(!told.contains("keeps running here"), "{told}");
    program.kill();
    Ok(())
}
