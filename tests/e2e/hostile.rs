//! Programs that mean harm, and neighbours that take names: whatever they do, gpucr ends soon, says why, and
//! changes nothing. And whatever it waits for, a signal ends it.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Dumped, Lab, Pace, Program, binary, exists, finish, refused, show, until};
use gpucr_wire::{
    Connection, Counts, GateState, Hello, PROTOCOL_VERSION, Reply, Request, agent_socket,
    own_pid_namespace, pid_namespace,
};

/// A user who is not root.
const NOBODY: u32 = 65534;
/// What says to a helper process how to be hostile.
const MODE: &str = "HOSTILE_MODE";
/// What takes longer has not ended soon, on however busy a machine.
const SOON: Duration = Duration::from_secs(20);
/// Arguments of a program that does not end before it is told to.
const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];

/// Runs a function on a thread that is not root's any more.
fn as_nobody<T: Send>(what: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: plain numbers. The bare call changes this thread alone, which ends with it.
            let changed = unsafe { libc::syscall(libc::SYS_setresuid, NOBODY, NOBODY, NOBODY) };
            assert_eq!(changed, 0);
            what()
        });
        thread.join().expect("the thread ends well")
    })
}

/// Run as a process of its own by the tests below: a program of another user with an agent that means harm.
#[test]
#[ignore = "a helper process of other tests"]
fn agent() -> Result<()> {
    let mode = std::env::var(MODE)?;
    // SAFETY: plain numbers.
    ensure!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) } == 0, "setresuid");
    let name = agent_socket(own_pid_namespace()?, std::process::id());
    let listener = Connection::listen(&name)?;
    if mode == "full" {
        rustix::net::listen(&listener, 0)?;
        let waiting: Vec<_> = std::iter::from_fn(|| {
            let soon = Instant::now() + Duration::from_millis(100);
            Connection::connect(&name, Some(soon), None).ok()
        })
        .collect();
        println!("{} wait", waiting.len());
    }
    println!("listening");
    loop {
        if mode == "full" {
            std::thread::park();
        }
        let (socket, _) = listener.accept()?;
        // A client that has had enough of it goes away.
        let _ = be_hostile(&mode, socket);
    }
}

fn be_hostile(mode: &str, socket: UnixStream) -> Result<()> {
    let mut raw = socket.try_clone()?;
    let mut connection = Connection::new(socket);
    loop {
        let request: Request = connection.receive()?;
        println!("asked");
        let reply = match (mode, request) {
            ("silent", _) => {
                std::thread::sleep(Duration::from_secs(3600));
                continue;
            }
            ("drips", _) => {
                raw.write_all(&60_000u32.to_le_bytes())?;
                loop {
                    raw.write_all(&[0])?;
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            (_, Request::Hello { .. }) => Reply::Hello { hello: hello() },
            ("silent later", _) => {
                std::thread::sleep(Duration::from_secs(3600));
                continue;
            }
            ("devices", _) => {
                let counts = Counts { devices: vec![[0; 16]; 4_000_000], ..Counts::default() };
                Reply::Counts { counts }
            }
            ("bytes", _) => {
                Reply::Counts { counts: Counts { bulk_bytes: 1 << 62, ..Counts::default() } }
            }
            ("sums", _) => {
                let bytes = u64::MAX;
                let counts = Counts { pool_bytes: bytes, pinned_bytes: bytes, ..Counts::default() };
                Reply::Counts { counts }
            }
            (mode, request) => anyhow::bail!("{mode}: {request:?}"),
        };
        connection.send(&reply)?;
    }
}

fn hello() -> Hello {
    Hello {
        protocol: PROTOCOL_VERSION,
        pid: std::process::id(),
        shim: String::new(),
        driver: String::new(),
        driver_version: 0,
        gate: GateState::Open {},
    }
}

/// Starts that program.
fn hostile(lab: &Lab, mode: &str, log: &str) -> Result<Program> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--ignored", "--exact", "agent", "--nocapture"]).env(MODE, mode);
    let mut program = lab.spawn(command, log)?;
    // The harness prints before the helper does, on the same line.
    until("it listens", || program.output().contains("listening") || !program.is_running())?;
    ensure!(program.is_running(), "{}", program.output());
    Ok(program)
}

fn dump(lab: &Lab, program: &Program) -> Result<Output> {
    lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])
}

#[test]
fn an_agent_that_does_not_answer_is_given_up() -> Result<()> {
    let lab = Lab::new();
    let modes = ["silent", "drips", "full", "silent later"];
    let programs =
        modes.iter().map(|mode| hostile(&lab, mode, mode)).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let dumps: Vec<_> =
            programs[..3].iter().map(|program| scope.spawn(|| dump(&lab, program))).collect();
        for (mode, dump) in modes.iter().zip(dumps) {
            let output = dump.join().expect("no panic").context(*mode)?;
            refused(&output, 1, &["does not answer", "Nothing was changed"]).context(*mode)?;
        }
        Ok(())
    })
}

#[test]
fn an_agent_that_says_what_cannot_be_is_not_believed() -> Result<()> {
    let lab = Lab::new();
    for (mode, said) in
        [("devices", "frame is too long"), ("bytes", "cannot be true"), ("sums", "cannot be true")]
    {
        let program = hostile(&lab, mode, mode)?;
        refused(&dump(&lab, &program)?, 1, &[said, "Nothing was changed"]).context(mode)?;
        let output = lab.run(["ps", "--json", "--timeout", "20s"])?;
        ensure!(output.status.success(), "{}", show(&output));
        ensure!(state(&output, program.pid)? == "silent", "{}", show(&output));
    }
    Ok(())
}

/// The state of a program in what `gpucr ps --json` prints.
fn state(output: &Output, pid: u32) -> Result<String> {
    let rows: Vec<serde_json::Value> = serde_json::from_slice(&output.stdout)?;
    let row = rows.iter().find(|row| row["pid"] == pid).with_context(|| show(output))?;
    Ok(row["state"].as_str().context("it has a state")?.to_owned())
}

#[test]
fn ps_waits_for_nobody_and_says_who_is_silent() -> Result<()> {
    let lab = Lab::new();
    let honest = lab.at_work("sgd", &ARGS)?;
    let modes = ["silent", "drips", "full", "silent later"];
    let each = (0..100).map(|number| {
        let mode = modes[number % modes.len()];
        hostile(&lab, mode, &format!("log-{number}"))
    });
    let hostile = each.collect::<Result<Vec<_>>>()?;
    let since = Instant::now();
    let mut output = lab.run(["ps", "--json"])?;
    let took = since.elapsed();
    ensure!(output.status.success() && took < SOON, "{took:?}: {}", show(&output));
    // Where others keep the machine busy, the usual time may not be enough to find all of them.
    if String::from_utf8_lossy(&output.stderr).contains("give a longer --timeout") {
        output = lab.run(["ps", "--json", "--timeout", "30s"])?;
    }
    ensure!(state(&output, honest.pid)? == "running", "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    for program in &hostile {
        ensure!(state(&output, program.pid)? == "silent", "{}", show(&output));
        let line = format!("process {} did not answer", program.pid);
        ensure!(said.contains(&line), "{}", show(&output));
    }
    println!("ps took {took:?}");
    Ok(())
}

/// A library directory as `gpucr run` makes one, in the lab, and a program that runs with it.
fn with_own_shim(lab: &Lab) -> Result<(Program, PathBuf)> {
    let shim = std::fs::read(binary("libgpucr_intercept.so"))?;
    let dir = lab.path(format!("gpucr-shim-{}", &blake3::hash(&shim).to_hex()[..16]));
    std::fs::create_dir(&dir)?;
    let path = dir.join("libcuda.so.1");
    std::fs::write(&path, shim)?;
    std::os::unix::fs::symlink("libcuda.so.1", dir.join("libcuda.so"))?;
    let mut command = Command::new(binary("workload"));
    command.args(["sgd", "--step-delay-ms", "20"]).env("LD_LIBRARY_PATH", &dir);
    command.env("GPUCR_DRIVER", binary("libsoftcuda.so"));
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    Ok((program, path))
}

#[test]
fn a_shim_that_is_no_file_is_not_read() -> Result<()> {
    let lab = Lab::new();
    let (program, path) = with_own_shim(&lab)?;
    std::fs::remove_file(&path)?;
    let fifo = Command::new("mkfifo").arg(&path).status()?;
    ensure!(fifo.success(), "mkfifo");
    refused(&dump(&lab, &program)?, 1, &["is not a shim", "Nothing was changed"])?;
    std::fs::remove_file(&path)?;
    std::os::unix::fs::symlink("/dev/zero", &path)?;
    refused(&dump(&lab, &program)?, 1, &["is not a shim", "Nothing was changed"])
}

#[test]
fn files_that_are_none_are_not_read() -> Result<()> {
    let lab = Lab::new();
    ensure!(Command::new("mkfifo").arg(lab.path("fifo")).status()?.success(), "mkfifo");
    for file in ["fifo", "/dev/zero"] {
        let import = lab.run(["import", file, "-o", "image"])?;
        let command = format!("gpucr import - -o image < {file}");
        refused(&import, 1, &["not a regular file", "Nothing was changed", &command])?;
        let report = lab.run(["report", file, "-o", "page.html"])?;
        refused(&report, 1, &["not a regular file", "Nothing was written"])?;
    }
    lab.holds_only(&["fifo"])
}

/// A gpucr that was started, with what it says in a file.
struct Started {
    child: Child,
    log: PathBuf,
}

impl Started {
    fn new(lab: &Lab, command: &mut Command) -> Result<Self> {
        let log = lab.path("said");
        command.stderr(File::create(&log)?).env("NO_COLOR", "1");
        Ok(Self { child: command.spawn()?, log })
    }

    fn said(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Sends a signal, after which it has to end soon with one clear error.
    fn ends_by(mut self, signal: i32, words: &[&str]) -> Result<()> {
        // SAFETY: the child has not been waited for.
        unsafe { libc::kill(self.child.id() as i32, signal) };
        let since = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait()? {
                break status;
            }
            if since.elapsed() > SOON {
                self.child.kill()?;
                self.child.wait()?;
                anyhow::bail!("it does not end: {}", self.said());
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        println!("ended {:?} after the signal", since.elapsed());
        let said = self.said();
        let flat =
            said.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
        ensure!(status.code() == Some(1), "{status}: {said}");
        for word in words {
            ensure!(flat.contains(word), "no `{word}` in: {said}");
        }
        std::fs::remove_file(&self.log)?;
        Ok(())
    }
}

#[test]
fn a_signal_ends_the_wait_for_an_agent() -> Result<()> {
    let lab = Lab::new();
    for (number, (mode, signal)) in
        [("silent", libc::SIGINT), ("drips", libc::SIGTERM), ("silent later", libc::SIGHUP)]
            .into_iter()
            .enumerate()
    {
        for (command, words) in [
            (["dump", "-o", "image", "--pid"], ["interrupted", "Nothing was changed"]),
            (["trace", "--for", "60s", "--pid"], ["interrupted", ""]),
        ] {
            if (mode, command[0]) == ("silent later", "trace") {
                // It asks for nothing that this one does not answer.
                continue;
            }
            let program = hostile(&lab, mode, &format!("{number}-{}", command[0]))?;
            let mut gpucr = lab.gpucr();
            gpucr.args(command).arg(program.pid.to_string());
            let started = Started::new(&lab, &mut gpucr)?;
            until("it waits", || program.output().contains("asked"))?;
            started.ends_by(signal, &words).with_context(|| format!("{command:?} {mode}"))?;
        }
    }
    Ok(())
}

/// Where CRIU is.
fn real_criu(lab: &Lab) -> Result<String> {
    let output = lab.run(["check", "--json"])?;
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let rows = summary["requirements"].as_array().context("rows")?;
    let row = rows.iter().find(|row| row["name"] == "CRIU").context("there is a row for CRIU")?;
    let found = row["found"].as_str().context("found")?;
    Ok(found.split_once(" at ").context("it says where")?.1.to_owned())
}

/// A CRIU that answers as often as this says, and after that never; then its pid is in `criu-pid`.
fn silent_criu(lab: &Lab, answers: u32) -> Result<PathBuf> {
    let (real, dir) = (real_criu(lab)?, lab.path(""));
    let script = format!(
        "#!/bin/sh\ncd {dir} || exit 1\n\
         [ $(ls criu-calls* | wc -l) -lt {answers} ] && touch criu-calls-$$ && exec {real} \"$@\"\n\
         echo $$ > criu-pid.new && mv criu-pid.new criu-pid && exec sleep 3600\n",
        dir = dir.display(),
    );
    let path = lab.path("criu");
    std::fs::write(&path, script)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

/// Checks that CRIU has come to its end, and removes what is left of it.
fn is_gone(lab: &Lab) -> Result<()> {
    let pid: u32 = std::fs::read_to_string(lab.path("criu-pid"))?.trim().parse()?;
    until("CRIU has ended", || !exists(pid))?;
    for entry in std::fs::read_dir(lab.path(""))? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("criu")) {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// Starts gpucr with that CRIU, and waits until it has come to a phase in which CRIU does not answer.
fn waiting_for_criu(lab: &Lab, args: &[&str], answers: u32, phase: &str) -> Result<Started> {
    let criu = silent_criu(lab, answers)?;
    let mut command = lab.gpucr();
    command.args(args).env("GPUCR_CRIU", criu).env("GPUCR_LOG", "gpucr_core=debug");
    let started = Started::new(lab, &mut command)?;
    let entered = format!("phase=\"{phase}\"");
    until("it waits for CRIU", || {
        lab.path("criu-pid").exists() && started.said().contains(&entered)
    })?;
    Ok(started)
}

#[test]
fn a_signal_ends_the_wait_for_criu() -> Result<()> {
    let lab = Lab::new();
    let dumped = Dumped::in_the_middle(&lab, "sgd", &["--steps", "100"])?;
    let restore = |answers, phase| waiting_for_criu(&lab, &["restore", "image"], answers, phase);
    restore(0, "preflight")?.ends_by(libc::SIGTERM, &["interrupted", "Nothing was changed"])?;
    is_gone(&lab)?;
    restore(1, "criu")?.ends_by(libc::SIGINT, &["interrupted", "The image is as it was"])?;
    is_gone(&lab)?;
    let output = lab.run(["restore", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    dumped.came_out_right(&lab)?;
    lab.holds_only(&["image", "log"])?;

    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let pid = program.pid.to_string();
    let args = ["dump", "-o", "image", "--pid", &pid];
    let dump = |answers, phase| waiting_for_criu(&lab, &args, answers, phase);
    dump(0, "preflight")?.ends_by(libc::SIGHUP, &["interrupted", "Nothing was changed"])?;
    is_gone(&lab)?;
    dump(1, "criu")?.ends_by(libc::SIGINT, &["interrupted", "the program keeps running"])?;
    is_gone(&lab)?;
    lab.holds_only(&["log"])?;
    program.wait_for_progress()?;
    program.result()?;
    Ok(())
}

#[test]
fn a_signal_ends_the_wait_for_a_pipe() -> Result<()> {
    let lab = Lab::new();
    let mut import = lab.gpucr();
    import.args(["import", "-", "-o", "image"]).stdin(Stdio::piped());
    let started = Started::new(&lab, &mut import)?;
    until("it reads", || {
        let names = std::fs::read_dir(lab.path("")).into_iter().flatten().flatten();
        names.into_iter().any(|entry| entry.file_name().to_string_lossy().contains(".partial"))
    })?;
    started.ends_by(libc::SIGTERM, &["interrupted", "There is no image"])?;
    lab.holds_only(&[])?;

    let dumped = Dumped::in_the_middle(&lab, "sgd", &["--steps", "100"])?;
    let mut export = lab.gpucr();
    export.args(["export", "image", "-"]).stdout(Stdio::piped());
    let mut started = Started::new(&lab, &mut export)?;
    let pipe = started.child.stdout.take().context("piped")?;
    until("the pipe is full", || rustix::io::ioctl_fionread(&pipe).is_ok_and(|len| len > 0))?;
    started.ends_by(libc::SIGHUP, &["interrupted", "only a part"])?;
    lab.holds_only(&["image", "log"])?;
    drop(dumped);
    Ok(())
}

#[test]
fn a_signal_ends_the_wait_for_a_kernel() -> Result<()> {
    let lab = Lab::new();
    // Its kernel takes far longer than this test.
    let mut program = lab.start("long-loops", &["--size", "large", "--steps", "4"])?;
    program.wait_for("launched 1")?;
    let mut dump = lab.gpucr();
    dump.args(["dump", "--timeout", "1h", "--protocol", "stop", "-o", "image"]);
    dump.args(["--pid", &program.pid.to_string()]).env("GPUCR_LOG", "gpucr_core=debug");
    let started = Started::new(&lab, &mut dump)?;
    until("it waits", || started.said().contains("phase=\"gate\""))?;
    ensure!(!started.said().contains("all gates are shut"), "{}", started.said());
    started.ends_by(libc::SIGINT, &["interrupted", "the program keeps running"])?;
    let output = lab.run(["ps", "--json", "--timeout", "20s"])?;
    ensure!(state(&output, program.pid)? == "running", "{}", show(&output));
    lab.holds_only(&["log"])
}

/// Names that others of the host may want.
fn taken(namespace: u64, pid: u32) -> Result<Vec<UnixListener>> {
    ["gpucr-agent", "gpucr-lock"]
        .iter()
        .map(|name| Ok(Connection::listen(&format!("{name}-{namespace}-{pid}"))?))
        .collect()
}

#[test]
fn who_takes_the_names_of_locks_and_agents_is_passed_over() -> Result<()> {
    let lab = Lab::new();
    // Before the program is there, whose pid is known.
    let mut command = Command::new("sh");
    let go = lab.path("go");
    let wait = format!("while [ ! -e {} ]; do sleep 0.02; done; exec \"$@\"", go.display());
    command.args(["-c", &wait, "sh"]).arg(binary("gpucr")).args(["run", "--device", "soft", "--"]);
    let pace = Pace::new()?;
    pace.allow(20)?;
    command.arg(binary("workload")).arg("sgd").args(ARGS).args(["--pace", pace.file()]);
    let mut program = lab.spawn(command, "log")?;
    let namespace = pid_namespace(program.pid)?;
    let strangers = as_nobody(|| taken(namespace, program.pid))?;
    std::fs::write(&go, "")?;
    program.wait_for("step ")?;
    let output = lab.run(["ps", "--json", "--timeout", "20s"])?;
    ensure!(state(&output, program.pid)? == "running", "{}", show(&output));
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running"])?;
    program.goes_on_by(&pace, 20)?;
    for stranger in &strangers {
        stranger.set_nonblocking(true)?;
        ensure!(stranger.accept().is_err(), "somebody has spoken to a stranger");
    }
    // Restored it is at the same place.
    let last = lab.path("last");
    lab.dump(&program, &last, &[])?;
    pace.allow(20)?;
    let program = lab.restore(&last, program)?;
    lab.dump(&program, &lab.path("again"), &["--leave-running"])?;
    Ok(())
}

#[test]
fn strangers_who_flood_an_agent_do_not_fail_a_dump() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let name = agent_socket(pid_namespace(program.pid)?, program.pid);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                as_nobody(|| {
                    let mut held = Vec::new();
                    while !over.load(Ordering::Relaxed) {
                        // Some stay, and say something; all have gone soon.
                        let soon = Instant::now() + Duration::from_millis(1);
                        if let Ok(mut connection) = Connection::connect(&name, Some(soon), None) {
                            let _ = connection.send(&Request::Hello { protocol: 1 });
                            held.push(connection);
                        }
                        if held.len() > 20 {
                            held.clear();
                        }
                    }
                });
            });
        }
        let dumps = (0..10).try_for_each(|number| {
            let image = lab.path(format!("image-{number}"));
            lab.dump(&program, &image, &["--leave-running"]).map(drop)
        });
        over.store(true, Ordering::Relaxed);
        dumps
    })?;
    program.wait_for_progress()
}

#[test]
fn numbers_that_are_no_pids_are_wrong_usage() -> Result<()> {
    let lab = Lab::new();
    for pid in ["0", "-1", "2147483648", "4294967295", "4294967296", "99999999999999999999"] {
        for command in [["dump", "-o", "image"], ["trace", "--for", "1s"].map(|a| a)] {
            let output = lab.run([command[0], "--pid", pid, command[1], "image"])?;
            ensure!(output.status.code() == Some(2), "{pid}: {}", show(&output));
        }
    }
    lab.holds_only(&[])
}

/// What a lock leaves behind is looked for where locks are.
#[test]
fn a_dump_that_was_killed_keeps_nobody_from_the_next() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &ARGS)?;
    let mut command = lab.gpucr();
    command.args(["dump", "--pid", &program.pid.to_string(), "-o", "killed"]);
    let killed = finish(command.env("GPUCR_FAULT", "kill:gate"))?;
    ensure!(!killed.status.success(), "{}", show(&killed));
    let lock = format!("{}-{}", pid_namespace(program.pid)?, program.pid);
    let lock = Path::new("/run/gpucr/locks").join(lock);
    ensure!(lock.exists(), "the one who was killed has left its lock");
    let mode = lock.parent().context("it has one")?.metadata()?.permissions().mode();
    ensure!(mode & 0o777 == 0o700, "{mode:o}");
    lab.dump(&program, &lab.path("image"), &["--leave-running"])?;
    ensure!(!lock.exists(), "a lock is left");
    program.wait_for_progress()
}
