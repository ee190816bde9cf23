//! Files that programs write, and that are not as they were when the program is restored: logs above all.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use gpucr_tests::warm::json;
use gpucr_tests::{Lab, Program, binary, finish, refused, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "60", "--step-delay-ms", "1"];
/// What a shell says into the log of a program of its that was killed.
const KILLED: &str = "./job.sh: line 3:  4242 Killed                  gpucr run -- ./train\n";

/// A program that was dumped into `image`, and ended by that; when it is restored it goes on to its end. `append` says
/// how its log was opened.
fn dumped(lab: &Lab, append: bool, args: &[&str]) -> Result<Program> {
    let mut program = match append {
        false => lab.at_work("sgd", &ARGS)?,
        true => lab.at_work_appending("sgd", &ARGS)?,
    };
    lab.dump(&program, &lab.path("image"), args)?;
    program.wait()?;
    program.let_go()?;
    Ok(program)
}

fn add(log: &Path, text: &str) -> Result<()> {
    Ok(File::options().append(true).open(log)?.write_all(text.as_bytes())?)
}

/// Restores it to its end, with success.
fn restored(lab: &Lab, args: &[&str]) -> Result<Output> {
    let output = finish(lab.gpucr().args(["restore", "image"]).args(args))?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(output)
}

/// That the program's lines are all there, each once.
fn is_complete(program: &Program) -> Result<()> {
    let (series, expected) = (program.series(), undisturbed("sgd", &ARGS)?);
    ensure!(series == expected, "{series:#?}");
    Ok(())
}

#[test]
fn a_log_that_has_grown_is_gone_on_with_at_its_end() -> Result<()> {
    for append in [false, true] {
        let lab = Lab::new();
        let program = dumped(&lab, append, &[])?;
        let then = program.output();
        add(&lab.path("log"), KILLED)?;
        // Strictly, nothing may have changed.
        let output = lab.run(["restore", "image", "--files", "strict"])?;
        refused(&output, 1, &["bytes now and had", "--files keep", "Nothing was changed"])?;
        let said = restored(&lab, &[])?;
        let said = String::from_utf8_lossy(&said.stderr);
        ensure!(said.contains("the program appends to it"), "{said}");
        ensure!(program.output().starts_with(&(then + KILLED)), "{}", program.output());
        is_complete(&program)?;

        // And once more, when the whole run is in the log, as after a dump of a program that ran on.
        let before = program.output();
        let pid = json(&lab, &["restore", "image", "--json"])?;
        ensure!(pid["files"][0]["done"] == "continued", "{pid}");
        let after = program.output();
        let more = after.strip_prefix(&before).context("what was there stays")?;
        ensure!(more.lines().any(|line| line.starts_with("result ")), "{more}");
    }
    Ok(())
}

#[test]
fn a_log_that_was_moved_away_is_begun_anew() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &[])?;
    let old = program.series();
    std::fs::rename(lab.path("log"), lab.path("log.1"))?;
    refused(&lab.run(["restore", "image"])?, 1, &["does not exist", "touch ", "--files rewind"])?;
    File::create(lab.path("log"))?;
    restored(&lab, &[])?;
    let series = [old, program.series()].concat();
    ensure!(series == undisturbed("sgd", &ARGS)?, "{series:#?}");
    ensure!(!program.output().contains('\0'), "no hole");
    Ok(())
}

#[test]
fn a_warm_image_goes_on_with_a_log_too() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &[])?;
    let _warm = gpucr_tests::warm::warm(&lab, "image")?;
    for round in 0..2 {
        add(&lab.path("log"), KILLED)?;
        let report = json(&lab, &["restore", "image", "--json"])?;
        ensure!(report["warm"] == true && report["files"][0]["done"] == "continued", "{report}");
        ensure!(program.output().matches("result ").count() == round + 1, "{}", program.output());
    }
    Ok(())
}

#[test]
fn a_rewound_log_is_what_it_was() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &[])?;
    let then = program.output();
    let restore = |done: &str| -> Result<()> {
        let report = json(&lab, &["restore", "image", "--files", "rewind", "--json"])?;
        let found = report["files"][0]["done"].as_str().unwrap_or("nothing");
        ensure!(found == done, "{report}");
        ensure!(program.output().starts_with(&then), "{}", program.output());
        is_complete(&program)
    };
    add(&lab.path("log"), KILLED)?;
    restore("cut-back")?;
    std::fs::write(lab.path("log"), "something else")?;
    restore("put-back")?;
    std::fs::write(lab.path("log"), vec![b'x'; then.len()])?;
    restore("put-back")?;
    std::fs::remove_file(lab.path("log"))?;
    restore("put-back")?;
    std::fs::write(lab.path("log"), &then)?;
    restore("nothing")
}

#[test]
fn a_log_of_which_there_is_no_copy_is_cut_only_if_it_is_the_same() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &["--save-files", "0"])?;
    let then = program.output();
    // The log has less than the tail that is kept in any case.
    ensure!(then.len() < 4096, "{then}");
    let log = lab.path("log");
    let long = "-".repeat(5000);
    std::fs::write(&log, format!("{then}{long}"))?;
    restored(&lab, &["--files", "rewind"])?;
    is_complete(&program)?;

    // One that is longer than that.
    let mut program = lab.at_work_after("sgd", &ARGS, &long)?;
    lab.dump(&program, &lab.path("second"), &["--save-files", "100"])?;
    program.wait()?;
    program.let_go()?;
    let then = program.output();
    std::fs::write(&log, "y".repeat(then.len() + 10))?;
    let restore = ["restore", "second", "--files", "rewind"];
    refused(&lab.run(restore)?, 1, &["log has", "Nothing was changed"])?;
    std::fs::write(&log, "y".repeat(then.len()))?;
    refused(&lab.run(restore)?, 1, &["has changed since the program was dumped", "--save-files"])?;
    ensure!(program.output().starts_with("yyy"), "nothing was cut");
    std::fs::write(&log, format!("{then}more"))?;
    let output = lab.run(restore)?;
    ensure!(output.status.success(), "{}", show(&output));
    is_complete(&program)
}

#[test]
fn what_others_have_put_in_the_place_of_a_log_is_left_alone() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &[])?;
    let (log, other) = (lab.path("log"), lab.path("other"));
    std::fs::write(&other, program.output() + "precious")?;
    std::fs::remove_file(&log)?;
    std::os::unix::fs::symlink(&other, &log)?;
    let restore = ["restore", "image", "--files", "rewind"];
    refused(&lab.run(restore)?, 1, &["cannot read", "log", "Nothing was changed"])?;
    std::fs::remove_file(&log)?;
    std::fs::rename(&other, &log)?;
    std::os::unix::fs::chown(&log, Some(65534), None)?;
    refused(&lab.run(restore)?, 1, &["belongs to another user", "Nothing was changed"])?;
    ensure!(program.output().ends_with("precious"));
    Ok(())
}

/// Whoever owns a directory on the way to a log could have another file written to by a link in its place.
#[test]
fn a_log_to_which_a_link_leads_is_left_alone() -> Result<()> {
    let lab = Lab::new();
    let program = dumped(&lab, false, &[])?;
    let log = lab.path("log");
    let directory = log.parent().context("it is in a directory")?.to_owned();
    let moved = directory.with_extension("moved");
    std::fs::rename(&directory, &moved)?;
    std::os::unix::fs::symlink(&moved, &directory)?;
    let refusals = || -> Result<()> {
        add(&log, KILLED)?;
        let then = program.output();
        let output = lab.run(["restore", "image"])?;
        refused(&output, 1, &["has changed since the program was dumped", "Nothing was changed"])?;
        let rewind = ["restore", "image", "--files", "rewind"];
        refused(&lab.run(rewind)?, 1, &["cannot read", "Nothing was changed"])?;
        ensure!(program.output() == then, "{}", program.output());
        std::fs::remove_file(&log)?;
        refused(&lab.run(rewind)?, 1, &["cannot make", "log"])?;
        ensure!(!log.exists(), "it was made");
        Ok(())
    };
    let done = refusals();
    std::fs::remove_file(&directory)?;
    std::fs::rename(&moved, &directory)?;
    done
}

/// A program in the background, which is killed when this is dropped.
struct Background(u32);

impl Drop for Background {
    fn drop(&mut self) {
        // SAFETY: sends a signal to the program that this test has restored.
        unsafe { libc::kill(self.0 as i32, libc::SIGKILL) };
        let state = || std::fs::read_to_string(format!("/proc/{}/stat", self.0));
        let _ = until("it has ended", || state().map_or(true, |stat| stat.contains(") Z ")));
    }
}

/// A program that was dumped while it wrote into pipes: one for both streams, or one for each.
fn piped(lab: &Lab, streams: &str) -> Result<()> {
    let mut command = Command::new("bash");
    command.current_dir(lab.path("")).arg("-c").arg(format!(
        "{} run --device soft -- {} sgd --steps 100000 --step-delay-ms 5 {streams} cat > /dev/null & jobs -p; wait",
        binary("gpucr").display(),
        binary("workload").display()
    ));
    let mut job = lab.spawn(command, "job")?;
    let pid = job.wait_for("")?;
    until("it is at work", || {
        let dump = lab.run(["dump", "--pid", pid.trim(), "-o", "image"]);
        dump.is_ok_and(|dump| dump.status.success())
    })?;
    job.kill();
    Ok(())
}

/// Restores it in the background, sees that it does its work, and ends it. Gives what was said.
fn detached(lab: &Lab, args: &[&str], file: Option<&str>) -> Result<String> {
    let output = finish(lab.gpucr().args(["restore", "--detach", "image"]).args(args))?;
    ensure!(output.status.success(), "{}", show(&output));
    let pid: u32 = String::from_utf8(output.stdout)?.trim().parse()?;
    let program = Background(pid);
    if let Some(file) = file {
        let read = || std::fs::read_to_string(lab.path(file)).unwrap_or_default();
        until("its output is in the file", || read().contains("step "))?;
    }
    drop(program);
    Ok(String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" "))
}

#[test]
fn the_output_of_a_program_in_a_pipe_goes_where_it_is_wanted() -> Result<()> {
    let lab = Lab::new();
    piped(&lab, "2>/dev/null |")?;
    let said = detached(&lab, &[], None)?;
    ensure!(
        said.contains("The program's stdout was a pipe") && said.contains("--stdout FILE"),
        "{said}"
    );
    std::fs::write(lab.path("out"), "before\n")?;
    let said = detached(&lab, &["--stdout", "out"], Some("out"))?;
    ensure!(!said.contains("/dev/null"), "{said}");
    ensure!(std::fs::read_to_string(lab.path("out"))?.starts_with("before\n"), "it is added");
    let said = detached(&lab, &["--stdout", "new", "--new-pids"], Some("new"))?;
    ensure!(!said.contains("/dev/null"), "{said}");
    // It has one pipe, and its standard error goes to where it went.
    let output = lab.run(["restore", "-d", "image", "--stderr", "err"])?;
    refused(&output, 1, &["stderr was not a pipe but /dev/null", "Nothing was changed"])?;
    std::os::unix::fs::symlink("/etc/hostname", lab.path("link"))?;
    std::os::unix::fs::lchown(lab.path("link"), Some(65534), None)?;
    let output = lab.run(["restore", "-d", "image", "--stdout", "link"])?;
    refused(&output, 1, &["--stdout", "another user"])?;
    Ok(())
}

#[test]
fn one_pipe_for_both_streams_is_one_file() -> Result<()> {
    let lab = Lab::new();
    piped(&lab, "2>&1 |")?;
    let said = detached(&lab, &[], None)?;
    ensure!(said.contains("stdout and stderr were pipes"), "{said}");
    let said = detached(&lab, &["--stderr", "both"], Some("both"))?;
    ensure!(!said.contains("/dev/null"), "{said}");
    Ok(())
}

#[test]
fn the_whole_log_of_a_failure_of_criu_is_kept() -> Result<()> {
    let lab = Lab::new();
    // A lock, of which CRIU has to be told.
    let mut command = Command::new("bash");
    command.current_dir(lab.path("")).arg("-c").arg(format!(
        "exec 6>lock; flock 6; exec {} run --device soft -- {} sgd --steps 100000 --step-delay-ms 5",
        binary("gpucr").display(),
        binary("workload").display()
    ));
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    let output = lab.run(["dump", "--pid", &program.pid.to_string(), "-o", "image"])?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(said.contains("--file-locks"), "{said}");
    let path = said.split("CRIU's whole log: ").nth(1).context("its path is told")?;
    let path = path.lines().next().unwrap_or_default().trim();
    let log = std::fs::read_to_string(path)?;
    ensure!(log.contains("Error (") && log.lines().count() > 20, "the whole log: {log}");
    // Other tests may keep some too.
    let listed = json(&lab, &["logs", "--json"])?;
    ensure!(listed.as_array().is_some_and(|logs| !logs.is_empty() && logs.len() <= 20), "{listed}");
    ensure!(!lab.run(["logs", "--last"])?.stdout.is_empty());
    program.wait_for_progress()
}
