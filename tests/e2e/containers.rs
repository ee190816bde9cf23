//! Programs in containers: pid and mount namespaces, and what is made as their first process.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use gpucr_tests::container::only_child;
use gpucr_tests::{Lab, Started, binary, finish, refused, show, until};

/// A shell as the first process of a pid namespace, as a container has it: with nothing open from outside but its standard
/// streams.
fn in_a_container(lab: &Lab, script: &str) -> std::process::Command {
    let close =
        r#"for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ $fd -le 2 ] || eval "exec $fd>&-"; done;"#;
    let mut command = std::process::Command::new("unshare");
    command
        .args(["--pid", "--fork", "--mount-proc", "bash", "-c", &format!("{close} {script}")])
        .env("GPUCR", binary("gpucr"))
        .env("WORKLOAD", binary("workload"))
        .current_dir(lab.path("."));
    command
}

/// Below some container runtimes, programs have a session that no process of the container leads.
#[test]
fn a_session_from_outside_the_container() -> Result<()> {
    let lab = Lab::new();
    // `gpucr run` gives what it starts another one; here a shell stays in the old one above it.
    let script = r#"
        sh -c '"$GPUCR" run --device soft -- "$WORKLOAD" sgd --step-delay-ms 20 > log 2>&1; true' &
        until grep -q 'step ' log; do sleep 0.1; done
        "$GPUCR" dump --pid $! -o image; status=$?
        kill -0 $! || status=99
        exit $status"#;
    let output = finish(&mut in_a_container(&lab, script))?;
    refused(&output, 1, &["session", "setsid gpucr run", "Nothing was changed"])?;
    ensure!(!lab.path("image").exists());
    Ok(())
}

/// What `gpucr run` starts in a container can be saved there, and is restored in another one.
#[test]
fn a_program_of_a_container_without_a_session() -> Result<()> {
    let lab = Lab::new();
    let script = r#"
        "$GPUCR" run --device soft -- "$WORKLOAD" sgd --steps 100 --step-delay-ms 20 > log 2>&1 < /dev/null &
        until grep -q 'step ' log; do sleep 0.1; done
        "$GPUCR" dump --pid $! -o image"#;
    let output = finish(&mut in_a_container(&lab, script))?;
    ensure!(output.status.success(), "{}", show(&output));
    let output = lab.run(["restore", "--new-pids", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let log = std::fs::read_to_string(lab.path("log"))?;
    ensure!(log.lines().any(|line| line.starts_with("result ")), "{log}");
    Ok(())
}

/// As the first process of a container `gpucr run` stays, passes signals on, and ends with the program; that is dumped from
/// outside.
#[test]
fn the_entry_point_of_a_container() -> Result<()> {
    let lab = Lab::new();
    let start = |command: &str, log: &str| -> Result<Started> {
        let script =
            format!(r#"exec "$GPUCR" run --device soft -- {command} > {log} 2>&1 < /dev/null"#);
        Ok(Started::spawn(&mut in_a_container(&lab, &script))?)
    };
    let read = |log: &str| std::fs::read_to_string(lab.path(log)).unwrap_or_default();
    let mut ended = start(r#"sh -c "exit 7""#, "log-7")?;
    ensure!(ended.wait()?.code() == Some(7), "{}", read("log-7"));
    let mut missing = start("/no/such/program", "log-none")?;
    ensure!(missing.wait()?.code() == Some(127), "{}", read("log-none"));

    let mut asked =
        start(r#"sh -c "trap 'exit 9' USR1; echo ready; while :; do sleep 0.05; done""#, "log-9")?;
    until("it has its handler", || read("log-9").contains("ready"))?;
    let first = only_child(asked.id())?;
    rustix::process::kill_process(pid(first)?, rustix::process::Signal::USR1)?;
    ensure!(asked.wait()?.code() == Some(9), "{}", read("log-9"));

    let mut program = start(r#""$WORKLOAD" sgd --steps 100 --step-delay-ms 20"#, "log")?;
    until("it is at work", || read("log").contains("step "))?;
    let outer = only_child(only_child(program.id())?)?;
    let output = lab.run(["dump", "--pid", &outer.to_string(), "-o", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(program.wait()?.code() == Some(128 + libc::SIGKILL));
    let output = lab.run(["restore", "--new-pids", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(read("log").lines().any(|line| line.starts_with("result ")), "{}", read("log"));
    Ok(())
}

fn pid(pid: u32) -> Result<rustix::process::Pid> {
    rustix::process::Pid::from_raw(pid as i32).context("a pid")
}

/// A program has gone from the root of its container to the host's, which is mounted there. gpucr would be at the root of the
/// container, and execute what that has for a loader.
#[test]
fn nothing_of_a_container_is_executed_whose_program_is_at_the_root_of_the_host() -> Result<()> {
    let lab = Lab::new();
    // The root of the mounts is a directory in memory, which has programs and their loader; the host's is below that.
    let script = r#"
        mkdir root && mount --make-rprivate / && mount -t tmpfs tmpfs root && mkdir root/host root/old
        for name in usr bin sbin lib lib64; do
            if [ -L /$name ]; then ln -s usr/$name root/$name; else mkdir root/$name && mount --bind /$name root/$name; fi
        done
        mount --rbind / root/host && cd root && pivot_root . old && exec chroot host sh -c \
            "cd \"$LAB\" && exec \"$GPUCR\" run --device soft -- \"$WORKLOAD\" sgd --step-delay-ms 20 > log 2>&1""#;
    let mut command = in_a_container(&lab, script);
    let mut program =
        Started::spawn(command.env("LAB", lab.path(".")).stdin(std::process::Stdio::null()))?;
    let log = || std::fs::read_to_string(lab.path("log")).unwrap_or_default();
    until("it is at work", || log().contains("step "))?;
    let outer = only_child(only_child(program.id())?)?;
    let output = lab.run(["dump", "--pid", &outer.to_string(), "-o", "image"])?;
    refused(&output, 1, &["root directory", "Nothing was changed"])?;
    let before = log().len();
    until("it goes on", || log().len() > before)?;
    rustix::process::kill_process(pid(outer)?, rustix::process::Signal::KILL)?;
    ensure!(program.wait()?.code() == Some(128 + libc::SIGKILL));
    Ok(())
}

/// What is open from outside of its mounts CRIU cannot name.
#[test]
fn streams_from_outside_of_the_mounts_are_refused_by_name() -> Result<()> {
    let lab = Lab::new();
    let script =
        r#"exec "$GPUCR" run --device soft -- "$WORKLOAD" sgd --step-delay-ms 20 > log 2>&1"#;
    let mut command = in_a_container(&lab, script);
    let mut program = Started::spawn(command.stdin(std::fs::File::open("/dev/null")?))?;
    until("it is at work", || {
        std::fs::read_to_string(lab.path("log")).unwrap_or_default().contains("step ")
    })?;
    let outer = only_child(only_child(program.id())?)?;
    let output = lab.run(["dump", "--pid", &outer.to_string(), "-o", "image"])?;
    let what = "/dev/null open from a mount that it does not see";
    refused(&output, 1, &[what, "opened outside of its mount namespace", "Nothing was changed"])?;
    rustix::process::kill_process(pid(outer)?, rustix::process::Signal::KILL)?;
    ensure!(program.wait()?.code() == Some(128 + libc::SIGKILL));
    Ok(())
}

/// By the mounts of a program that has changed its root with chroot(2) alone, the paths of its files cannot be told.
#[test]
fn another_root_among_the_same_mounts_is_refused_with_what_to_do() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("base"))?;
    let script = r#"
        mount -t tmpfs tmpfs base && mkdir base/upper base/work base/root
        mount -t overlay overlay -o "lowerdir=/,upperdir=base/upper,workdir=base/work" base/root
        for dir in /proc "$PWD" "${GPUCR%/*}"; do mkdir -p "base/root$dir"; mount --rbind "$dir" "base/root$dir"; done
        exec chroot base/root "$GPUCR" run --device soft -- "$WORKLOAD" sgd --step-delay-ms 20 > log 2>&1 < /dev/null"#;
    let mut program = Started::spawn(&mut in_a_container(&lab, script))?;
    let read = || std::fs::read_to_string(lab.path("log")).unwrap_or_default();
    until("it is at work", || read().contains("step ")).with_context(read)?;
    let outer = only_child(only_child(program.id())?)?;
    let output = lab.run(["dump", "--pid", &outer.to_string(), "-o", "image"])?;
    let words = ["is not that of its mounts", "installed below that root", "Nothing was changed"];
    refused(&output, 1, &words)?;
    rustix::process::kill_process(pid(outer)?, rustix::process::Signal::KILL)?;
    ensure!(program.wait()?.code() == Some(128 + libc::SIGKILL));
    Ok(())
}

/// Signals reach the program by itself, and those for gpucr are passed on, though gpucr holds them back while it starts
/// the program. What cannot be run has the exit code that it has elsewhere.
#[test]
fn a_program_with_new_pids_gets_signals() -> Result<()> {
    let lab = Lab::new();
    let run = |command: &[&str]| {
        let mut gpucr = lab.gpucr();
        gpucr.args(["run", "--device", "soft", "--new-pids", "--"]).args(command);
        gpucr
    };
    let output = run(&["grep", "SigBlk", "/proc/self/status"]).output()?;
    let held = String::from_utf8_lossy(&output.stdout);
    ensure!(held.trim_end() == "SigBlk:\t0000000000000000", "{}", show(&output));
    let mut program = Started::spawn(run(&["sleep", "1000"]).stderr(Stdio::null()))?;
    until("it is the program", || {
        let name = |pid| std::fs::read_to_string(format!("/proc/{pid}/comm")).ok();
        let sleep = only_child(program.id()).and_then(only_child).ok();
        sleep.and_then(name).is_some_and(|name| name == "sleep\n")
    })?;
    rustix::process::kill_process(pid(program.id())?, rustix::process::Signal::TERM)?;
    ensure!(program.wait()?.code() == Some(128 + libc::SIGTERM));
    for (command, code) in [("no-such-program", 127), ("/dev/null", 126)] {
        let output = run(&[command]).output()?;
        ensure!(output.status.code() == Some(code), "{}", show(&output));
        let output = lab.run(["run", "--device", "soft", "--", command])?;
        ensure!(output.status.code() == Some(code), "{}", show(&output));
    }
    Ok(())
}

/// Its pids are its own, so that it goes on whoever has them outside; and its streams are files of its own mounts.
#[test]
fn a_program_with_new_pids_is_saved_ended_and_resumed() -> Result<()> {
    let lab = Lab::new();
    let run = |options: &[&str], log: &str| -> Result<Started> {
        let mut command = lab.gpucr();
        let log = std::fs::File::options().create(true).append(true).open(lab.path(log))?;
        command.args(["run", "--device", "soft"]).args(options).arg("--").arg(binary("workload"));
        command.args(["sgd", "--steps", "200", "--step-delay-ms", "20"]);
        Ok(Started::spawn(command.stdout(log.try_clone()?).stderr(log))?)
    };
    let read = |log: &str| std::fs::read_to_string(lab.path(log)).unwrap_or_default();
    let result =
        |log: &str| read(log).lines().find(|line| line.starts_with("result ")).map(str::to_owned);
    ensure!(run(&[], "undisturbed")?.wait()?.success());
    let options = ["--new-pids", "--store", "store", "--resume", "--on-signal", "usr1=end"];
    let mut first = run(&options, "log")?;
    until("it is at work", || read("log").contains("step "))?;
    rustix::process::kill_process(pid(first.id())?, rustix::process::Signal::USR1)?;
    ensure!(first.wait()?.code() == Some(75), "{}", read("log"));
    ensure!(result("log").is_none(), "{}", read("log"));
    let mut second = run(&options, "log")?;
    ensure!(second.wait()?.success(), "{}", read("log"));
    let (undisturbed, resumed) = (result("undisturbed"), result("log"));
    ensure!(undisturbed.is_some() && undisturbed == resumed, "{}", read("log"));
    let pids = read("log").lines().filter(|line| line.starts_with("ready pid=")).count();
    ensure!(pids == 1, "it was begun once: {}", read("log"));
    Ok(())
}
