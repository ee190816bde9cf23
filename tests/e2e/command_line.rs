//! What the commands say and refuse.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Started, binary, finish, refused, show, until};
use gpucr_wire::{
    Connection, GateState, Hello, Reply, Request, agent_socket, own_pid_namespace, pid_namespace,
};

#[test]
fn a_missing_pid() -> Result<()> {
    let lab = Lab::new();
    let output = lab.run(["dump", "--pid", "4194000", "-o", "image"])?;
    refused(&output, 1, &["no process 4194000", "Nothing was changed"])?;
    ensure!(!lab.path("image").exists());
    Ok(())
}

#[test]
fn two_sockets_that_are_one() -> Result<()> {
    let lab = Lab::new();
    for (hold, loaded, words) in [("9", "9", "descriptor of its own"), ("2", "9", "2 is not in")] {
        let args = ["restore", "--hold", hold, "--loaded", loaded, "image"];
        let output = lab.run(args)?;
        let code = if hold == loaded { 1 } else { 2 };
        ensure!(output.status.code() == Some(code), "{}", show(&output));
        ensure!(String::from_utf8_lossy(&output.stderr).contains(words), "{}", show(&output));
    }
    Ok(())
}

#[test]
fn a_process_of_another_user() -> Result<()> {
    let lab = Lab::new();
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(binary("gpucr"));
    let output = finish(command.args(["trace", "--pid", "1"]).current_dir(lab.path(".")))?;
    refused(&output, 1, &["process 1 belongs to another user", "as root"])
}

#[test]
fn a_pid_without_cuda() -> Result<()> {
    let lab = Lab::new();
    let mut sleep = std::process::Command::new("sleep");
    sleep.arg("60");
    let mut program = lab.spawn(sleep, "log")?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &["nor any of its descendants uses CUDA", "Nothing was changed"])?;
    ensure!(program.is_running() && !lab.path("image").exists());
    Ok(())
}

#[test]
fn an_output_that_is_not_empty() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("image"))?;
    std::fs::write(lab.path("image/precious"), "data")?;
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &["image", "Nothing was changed"])?;
    ensure!(std::fs::read_to_string(lab.path("image/precious"))? == "data");
    program.wait_for_progress()
}

#[test]
fn what_is_no_image_is_refused() -> Result<()> {
    let lab = Lab::new();
    std::fs::create_dir(lab.path("folder"))?;
    std::fs::write(lab.path("file"), "text")?;
    for (path, command) in
        [("folder", "restore"), ("file", "restore"), ("none", "restore"), ("folder", "inspect")]
    {
        let output = lab.run([command, path])?;
        refused(&output, 1, &[path]).with_context(|| format!("{command} {path}"))?;
    }
    Ok(())
}

#[test]
fn a_truncated_manifest_and_a_pid_in_use() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running"])?;
    let mode = std::fs::metadata(&image)?.permissions().mode() & 0o777;
    ensure!(mode == 0o700, "an image is private to its owner: {mode:o}");

    let output = lab.run(["restore", "image"])?;
    refused(&output, 1, &[&format!("pid {}", program.pid), "in use"])?;
    ensure!(program.is_running());

    program.kill();
    let manifest = image.join("manifest");
    let whole = std::fs::read(&manifest)?;
    for len in [0, 1, 11, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&manifest, &whole[..len])?;
        refused(&lab.run(["restore", "image"])?, 1, &["manifest"])
            .with_context(|| format!("cut to {len} bytes"))?;
    }
    Ok(())
}

#[test]
fn a_file_of_the_program_that_is_gone_or_changed() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    let path = lab.path("log");
    let log = std::fs::read(&path)?;
    let cases: [(Option<&[u8]>, &[&str]); 3] = [
        (Some(&[&log[..], b"more"].concat()), &["bytes now and had", "--files keep"]),
        (Some(&log[..10]), &["has 10 bytes now and had", "put the file back"]),
        (None, &["does not exist", "put the file back"]),
    ];
    for (contents, says) in cases {
        match contents {
            Some(contents) => std::fs::write(&path, contents)?,
            None => std::fs::remove_file(&path)?,
        }
        let output = lab.run(["restore", "image", "--files", "strict"])?;
        refused(&output, 1, says)?;
        refused(&output, 1, &["Nothing was changed"])?;
    }
    Ok(())
}

#[test]
fn a_protocol_for_programs_that_run_on() -> Result<()> {
    let lab = Lab::new();
    let output = lab.run(["dump", "--pid", "1", "--protocol", "cow"])?;
    refused(&output, 2, &["--leave-running"])
}

#[test]
fn ps_and_inspect_tell_what_there_is() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("small-allocs", &["--steps", "100"])?;
    let listed: serde_json::Value =
        serde_json::from_slice(&lab.run(["ps", "--json", "--timeout", "20s"])?.stdout)?;
    let rows = listed.as_array().context("an array")?;
    let row = rows.iter().find(|row| row["pid"] == program.pid).context("the program is listed")?;
    ensure!(row["state"] == "running", "{row}");
    let allocations = row["allocations"].as_u64().context("a number")?;
    ensure!(allocations >= 10_000, "{row}");
    // 10,000 allocations of 1 KiB share physical blocks.
    let bulk = row["bulk_bytes"].as_u64().context("a number")?;
    ensure!((10_000 << 10..64 << 20).contains(&bulk), "{row}");

    let image = lab.path("image");
    let report = lab.dump(&program, &image, &[])?;
    for key in ["image", "pid", "protocol", "bulk_bytes", "stored_bytes", "stopped_ms", "total_ms"]
    {
        ensure!(!report[key].is_null(), "{key} is missing in {report}");
    }
    ensure!(report["protocol"] == "recopy" && report["copied"] == "outside", "{report}");
    let phases = report["phases"].as_array().context("phases")?;
    ensure!(phases.iter().all(|p| p["name"].is_string() && p["ms"].is_number()), "{report}");

    let output = lab.run(["inspect", "--json", "image"])?;
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(summary["bulk_bytes"] == report["bulk_bytes"] && summary["id"] == report["id"]);
    ensure!(summary["processes"][0]["under_gpucr"] == true, "{summary}");
    let people = lab.run(["inspect", "image"])?;
    ensure!(String::from_utf8_lossy(&people.stdout).contains("under gpucr"), "{}", show(&people));
    Ok(())
}

#[test]
fn a_restore_passes_on_signals_and_the_exit_status() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    let pid = program.pid;
    program.wait()?;
    let mut restore =
        Started::spawn(lab.gpucr().args(["restore", "--ready-file", "ready", "image"]))?;
    let appeared = || Path::new(&format!("/proc/{pid}")).exists();
    until("it goes on", || lab.path("ready").exists())?;
    // SAFETY: the child has not been waited for.
    unsafe { libc::kill(restore.id() as i32, libc::SIGTERM) };
    let status = restore.wait()?;
    ensure!(status.code() == Some(128 + libc::SIGTERM), "{status}");
    ensure!(!appeared(), "the program is gone");
    Ok(())
}

#[test]
fn a_detached_restore_prints_the_pid() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let image = lab.path("image");
    lab.dump(&program, &image, &[])?;
    program.wait()?;
    // It is what the command is to print, and no summary.
    let output = lab.run(["-q", "restore", "--detach", "image"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let printed = String::from_utf8(output.stdout)?;
    ensure!(printed.trim() == program.pid.to_string(), "{printed}");
    program.let_go()?;
    program.wait_for("result ")?;
    Ok(())
}

#[test]
fn check_has_a_line_for_each_requirement() -> Result<()> {
    let lab = Lab::new();
    let output = lab.run(["check", "--json"])?;
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(summary["ready"] == true && output.status.success(), "{}", show(&output));
    let mut without = lab.gpucr();
    let output = finish(without.args(["check", "--json"]).env("GPUCR_CRIU", "/nonexistent"))?;
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(summary["ready"] == false && output.status.code() == Some(3), "{}", show(&output));
    let rows = summary["requirements"].as_array().context("rows")?;
    ensure!(rows.iter().all(|row| row["met"] != false || row["mend"].is_string()), "{summary}");
    Ok(())
}

/// Runs a script of a shell on a terminal of its own.
fn at_a_terminal(lab: &Lab, script: &str) -> Result<std::process::Output> {
    std::fs::write(lab.path("go.sh"), script)?;
    let mut command = std::process::Command::new("script");
    command.args(["-qec", "sh go.sh", "/dev/null"]).current_dir(lab.path("."));
    let gpucr = lab.gpucr();
    command.envs(gpucr.get_envs().filter_map(|(name, value)| Some((name, value?))));
    command.env("G", gpucr.get_program()).env("W", binary("workload"));
    finish(command.stdin(std::process::Stdio::null()))
}

#[test]
fn lines_are_folded_on_a_terminal_alone() -> Result<()> {
    /// The column at which what was found begins.
    const FOUND: usize = 26;
    let lab = Lab::new();
    let output = at_a_terminal(&lab, "stty cols 60; GPUCR_CRIU=/nonexistent $G check\n")?;
    let said = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let plain = said.replace("\x1b[32m", "").replace("\x1b[33m", "").replace("\x1b[1;31m", "");
    let plain = plain.replace("\x1b[0m", "");
    ensure!(plain.lines().count() > 15, "{plain}");
    for line in plain.lines() {
        // A path may be longer.
        let text: String = line.chars().skip(FOUND).collect();
        let is_one_word = !text.trim_start_matches("-> ").contains(' ');
        ensure!(line.chars().count() <= 60 || is_one_word, "{line:?} in\n{plain}");
    }
    let goes_on = |line: &str| line.starts_with(&" ".repeat(FOUND)) && !line.contains("-> ");
    ensure!(plain.lines().any(goes_on), "{plain}");
    let mut piped = lab.gpucr();
    let output = finish(piped.arg("check").env("GPUCR_CRIU", "/nonexistent"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(!said.lines().any(goes_on), "{said}");
    Ok(())
}

#[test]
fn a_dry_run_of_a_restore_misses_a_terminal() -> Result<()> {
    let lab = Lab::new();
    let script = "$G run --device soft -- $W sgd --steps 1000000 > log &\n\
                  until grep -q '^step' log; do sleep 0.02; done\n\
                  $G dump --pid $! -o 'an image' || exit\n\
                  $G restore --dry-run 'an image' || exit\n\
                  ! $G restore --dry-run --new-pids 'an image'\n";
    let output = at_a_terminal(&lab, script)?;
    ensure!(output.status.success(), "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains("with --new-pids it would have none"), "{}", show(&output));
    // In a session without one.
    let mut command = std::process::Command::new("setsid");
    command.arg("-w").arg(binary("gpucr")).args(["restore", "--dry-run", "--json", "an image"]);
    command.current_dir(lab.path(".")).stdin(std::process::Stdio::null());
    let output = finish(&mut command)?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(said["possible"] == false, "{said}");
    let remedy = said["blockers"][0]["remedy"].as_str().context("a remedy")?;
    let command = r"script -qec 'gpucr restore '\''an image'\''' /dev/null";
    ensure!(said["blockers"][1].is_null() && remedy.contains(command), "{said}");
    Ok(())
}

#[test]
fn a_store_is_named_by_its_place_or_an_option() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("sgd", &["--steps", "100"])?;
    let pid = program.pid.to_string();
    for name in ["a", "b"] {
        let dump = ["dump", "--pid", &pid, "--leave-running", "--store", "store", "--name", name];
        let output = lab.run(dump)?;
        ensure!(output.status.success(), "{}", show(&output));
    }
    let json = |args: &[&str]| -> Result<serde_json::Value> {
        let output = lab.run(args)?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
        Ok(serde_json::from_slice(&output.stdout)?)
    };
    let listed = json(&["ls", "--json", "--store", "store"])?;
    ensure!(listed == json(&["ls", "--json", "store"])?, "{listed}");
    refused(&lab.run(["ls", "store", "--store", "store"])?, 2, &["--store"])?;
    // Through a pipe a command is whole.
    let words = listed["images"][0]["command"].as_array().context("a command")?;
    let words: Vec<&str> = words.iter().filter_map(serde_json::Value::as_str).collect();
    let output = lab.run(["ls", "store"])?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(said.contains(&words.join(" ")), "{said}");
    // An image says where its store is without a detour by itself.
    let store = lab.path("store").canonicalize()?;
    let inspected = json(&["inspect", "--json", "store/images/a"])?;
    ensure!(inspected["store"] == store.display().to_string(), "{}", inspected["store"]);
    json(&["forget", "--json", "--store", "store", "--keep-last", "1"])?;
    json(&["gc", "--json", "--store", "store"])?;
    let left = json(&["ls", "--json", "--store", "store"])?;
    ensure!(left["images"].as_array().map(Vec::len) == Some(1), "{left}");
    Ok(())
}

/// Run as a process of its own by the test below: an agent of another version.
#[test]
#[ignore = "a helper process of another test"]
fn fake_agent() -> Result<()> {
    let pid = std::process::id();
    let listener = Connection::listen(&agent_socket(own_pid_namespace()?, pid))?;
    println!("listening");
    // The `gpucr ps` of another test may come first.
    loop {
        let (socket, _) = listener.accept()?;
        let mut connection = Connection::new(socket);
        let Ok(Request::Hello { .. }) = connection.receive() else { continue };
        let hello = Hello {
            protocol: 999,
            pid,
            shim: String::new(),
            driver: String::new(),
            driver_version: 0,
            gate: GateState::Open {},
        };
        let _ = connection.send(&Reply::Hello { hello });
        let _ = connection.receive::<Request>();
    }
}

#[test]
fn an_agent_of_another_version_is_refused_by_name() -> Result<()> {
    let lab = Lab::new();
    let mut fake = std::process::Command::new(std::env::current_exe()?);
    fake.args(["--ignored", "--exact", "fake_agent", "--nocapture"]);
    let mut program = lab.spawn(fake, "log")?;
    // The harness prints before the helper does, on the same line.
    while !program.output().contains("listening") && program.is_running() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    refused(&output, 1, &["version 999", "Nothing was changed"])
}

#[test]
fn an_agent_obeys_no_other_user() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let name = agent_socket(pid_namespace(program.pid)?, program.pid);
    let stranger = std::thread::spawn(move || -> Result<Option<Reply>> {
        // SAFETY: the raw system call changes the user of this thread only.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, 65534, 65534, 65534) };
        ensure!(changed == 0, "setresuid");
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let mut connection = Connection::connect(&name, Some(deadline), None)?;
        let asked = connection.send(&Request::Hello { protocol: gpucr_wire::PROTOCOL_VERSION });
        Ok(asked.and_then(|()| connection.receive::<Reply>()).ok())
    });
    let reply = stranger.join().expect("no panic")?;
    ensure!(!matches!(reply, Some(Reply::Hello { .. })), "a stranger was answered: {reply:?}");
    program.wait_for_progress()
}
