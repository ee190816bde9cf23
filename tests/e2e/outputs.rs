//! Where gpucr writes: to terminals, which obey what they are sent, and to files that the user names, for which
//! others may have laid links.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, SmallDisk, binary, finish, refused, show, undisturbed};
use serde_json::Value;

/// Sets the title, clears the screen by a control character of one code, turns the text round, and begins a new
/// line that looks like gpucr's own.
const EVIL: &str = "w\x1b]0;owned\x07\u{9b}2J\u{202e}\nNothing was changed.";
/// A user that is not root.
const STRANGER: u32 = 65534;

/// What a terminal might obey.
fn is_special(c: char) -> bool {
    (c.is_control() && c != '\n') || c == '\u{202e}'
}

/// Nothing in this output is obeyed, and no line of it was made by the name.
fn is_harmless(output: &Output) -> Result<()> {
    for bytes in [&output.stdout, &output.stderr] {
        let text = std::str::from_utf8(bytes)?;
        let owned = text.lines().any(|line| line.starts_with("Nothing was changed."));
        ensure!(!text.contains(is_special) && !owned, "{text:?}");
    }
    Ok(())
}

/// A program whose file and arguments have an evil name, at work.
fn evil_program(lab: &Lab) -> Result<(PathBuf, Program)> {
    let file = lab.path(EVIL);
    std::fs::copy(binary("workload"), &file)?;
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--"]).arg(&file);
    // It is still at work when all has been asked, and is ended then.
    command.args(["sgd", "--step-delay-ms", "20", "--steps", "10000"]);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("step ")?;
    Ok((file, program))
}

#[test]
fn names_of_others_are_shown_and_not_obeyed() -> Result<()> {
    let lab = Lab::new();
    let (file, mut program) = evil_program(&lab)?;
    let pid = program.pid.to_string();
    let folder = lab.path(format!("parent-{EVIL}"));
    std::fs::create_dir(&folder)?;
    let parent = folder.join("image");
    lab.dump(&program, &parent, &["--leave-running"])?;
    let dumps: [&[&str]; 2] =
        [&["--store", "store", "--name", "one"], &["-o", "image", "--parent"]];
    for (number, to) in dumps.iter().enumerate() {
        let mut command = lab.gpucr();
        command.args(["dump", "--leave-running", "--pid", &pid]).args(*to);
        let output = finish(command.args((number == 1).then_some(&parent)))?;
        ensure!(output.status.success(), "{}", show(&output));
        is_harmless(&output)?;
    }
    let commands: [&[&str]; 8] = [
        &["ps"],
        &["ps", "--json"],
        &["trace", "--pid", &pid, "--for", "100ms"],
        &["ls", "store"],
        &["inspect", "--all", "image"],
        &["inspect", "--all", "--json", "image"],
        &["diff", "--all", "image", "store/images/one"],
        &["verify", "image"],
    ];
    for command in commands {
        let output = lab.run(command)?;
        ensure!(output.status.success(), "{command:?}: {}", show(&output));
        is_harmless(&output).with_context(|| format!("{command:?}"))?;
    }
    let rows: Value =
        serde_json::from_slice(&lab.run(["ps", "--json", "--timeout", "20s"])?.stdout)?;
    let rows = rows.as_array().context("rows")?;
    let row = rows.iter().find(|row| row["pid"] == program.pid).context("it is listed")?;
    ensure!(
        row["command"][0] == file.to_str().context("UTF-8")?,
        "as JSON it is what it was: {row}"
    );

    // In errors and in the log too.
    program.kill();
    lab.rewind(&program, &lab.path("image"))?;
    std::fs::remove_file(&file)?;
    let output = lab.run(["restore", "image"])?;
    is_harmless(&output)?;
    refused(&output, 1, &["CRIU could not", r"w\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}"])?;
    let output = lab.run(["inspect", &format!("none-{EVIL}")])?;
    is_harmless(&output)?;
    refused(&output, 1, &[r"none-w\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\nNothing was changed."])?;
    std::fs::rename(&folder, lab.path("elsewhere"))?;
    let output = finish(lab.gpucr().args(["restore", "image"]).env("GPUCR_LOG", "debug"))?;
    is_harmless(&output)?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("no parent at ") && said.contains(r"\u{1b}]0;owned"), "{said}");
    Ok(())
}

/// Runs gpucr with a standard output that takes nothing, or that nobody reads.
fn run_into(lab: &Lab, output: impl Into<Stdio>, args: &[&str]) -> Result<(Option<i32>, String)> {
    let mut command = lab.gpucr();
    let mut child = command.args(args).stdout(output).stderr(Stdio::piped()).spawn()?;
    let mut said = String::new();
    child.stderr.take().context("a pipe")?.read_to_string(&mut said)?;
    Ok((child.wait()?.code(), said))
}

#[test]
fn what_cannot_be_written_is_an_error() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "200"])?;
    let pid = program.pid.to_string();
    lab.dump(&program, &lab.path("image"), &["--leave-running", "--timeline", "dump.json"])?;
    let to_store = ["dump", "--leave-running", "--pid", &pid, "--store", "store"];
    ensure!(lab.run(to_store)?.status.success());
    let dump = ["dump", "--leave-running", "--pid", &pid, "-o"];
    // Of those with two words of their own the first lists, the second is JSON.
    let commands: Vec<Vec<&str>> = [
        &["--help"][..],
        &["--version"],
        &["help", "dump"],
        &["completions", "bash"],
        &["check"],
        &["check", "--json"],
        &["ps"],
        &["ps", "--json"],
        &["trace", "--for", "100ms", "--pid", &pid],
        &["inspect", "image"],
        &["inspect", "--json", "image"],
        &["verify", "image"],
        &["diff", "image", "image"],
        &["ls", "store"],
        &["gc", "store"],
        &["report", "dump.json", "-o", "-"],
        &["warm", "--list", "--json"],
        &["export", "image", "-"],
    ]
    .iter()
    .map(|command| command.to_vec())
    .chain([[&dump[..], &["one"]].concat(), [&dump[..], &["two", "--json"]].concat()])
    .collect();
    let full = || File::options().write(true).open("/dev/full");
    for command in &commands {
        let (code, said) = run_into(&lab, full()?, command)?;
        let is_said = said.contains("cannot write") && said.contains("No space left");
        ensure!(code == Some(1) && is_said, "{command:?}: {code:?}, {said}");
    }
    ensure!(lab.run(["verify", "two"])?.status.success(), "all but the words was done");
    for made in ["one", "two"] {
        std::fs::remove_dir_all(lab.path(made))?;
    }
    for command in commands.iter().filter(|command| command[0] != "export") {
        let (reading, writing) = std::io::pipe()?;
        drop(reading);
        let (code, mut said) = run_into(&lab, writing, command)?;
        if command[0] == "ps" {
            // There are other programs on the host.
            said = said.lines().filter(|line| !line.contains("did not answer")).collect();
        }
        ensure!(code == Some(0) && said.is_empty(), "{command:?}: {code:?}, {said}");
    }

    // A file of its own that cannot be written to its end.
    let events = [&dump[..], &["three", "--events", "/dev/full"]].concat();
    let output = lab.run(events)?;
    ensure!(output.status.code() == Some(1), "{}", show(&output));
    ensure!(String::from_utf8_lossy(&output.stderr).contains("--events"), "{}", show(&output));
    ensure!(lab.run(["verify", "three"])?.status.success(), "all but the words was done");
    program.wait_for_progress()
}

/// A directory of everybody's, with a link in it that a stranger has laid to a file of root's.
fn trap(lab: &Lab) -> Result<PathBuf> {
    let dir = lab.path("everybody");
    std::fs::create_dir(&dir)?;
    std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o777))?;
    std::fs::write(lab.path("precious"), "data")?;
    std::fs::create_dir(lab.path("private"))?;
    for (name, target) in [("link", "precious"), ("dir", "private")] {
        symlink(lab.path(target), dir.join(name))?;
        std::os::unix::fs::lchown(dir.join(name), Some(STRANGER), Some(STRANGER))?;
    }
    Ok(dir)
}

#[test]
fn links_of_strangers_are_not_followed() -> Result<()> {
    let lab = Lab::new();
    let dir = trap(&lab)?;
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    let pid = program.pid.to_string();
    let image = lab.path("image");
    lab.dump(&program, &image, &["--leave-running", "--timeline", "dump.json"])?;
    program.kill();
    let commands: [&[&str]; 5] = [
        &["dump", "--pid", &pid, "-o", "other", "--timeline"],
        &["dump", "--pid", &pid, "-o", "other", "--events"],
        &["restore", "image", "--detach", "--events"],
        &["restore", "image", "--detach", "--ready-file"],
        &["report", "dump.json", "-o"],
    ];
    for command in commands {
        for name in ["link", "dir/file"] {
            let file = dir.join(name);
            let output = finish(lab.gpucr().args(command).arg(&file))?;
            refused(&output, 1, &["is a link that another user (uid 65534) has made"])
                .with_context(|| format!("{command:?} {name}"))?;
        }
    }
    ensure!(std::fs::read(lab.path("precious"))? == b"data");
    ensure!(lab.path("private").read_dir()?.next().is_none(), "nothing was put there");
    let left: Vec<_> = dir.read_dir()?.collect::<Result<_, _>>()?;
    ensure!(left.len() == 2, "only the links are left: {left:?}");

    // Nor is anything added to a file of root's that was given another name.
    std::fs::hard_link(lab.path("precious"), dir.join("name"))?;
    let output = lab.run(["restore", "image/packs", "--events", "everybody/name"])?;
    refused(&output, 1, &["more than one name"])?;
    ensure!(std::fs::read(lab.path("precious"))? == b"data");
    let page = lab.run(["report", "dump.json", "-o", "everybody/name"])?;
    ensure!(page.status.success(), "{}", show(&page));
    ensure!(std::fs::read(lab.path("precious"))? == b"data", "the name alone has another file");

    // One's own links are.
    symlink("private/page", lab.path("own"))?;
    ensure!(lab.run(["report", "dump.json", "-o", "own"])?.status.success());
    ensure!(std::fs::read_to_string(lab.path("private/page"))?.starts_with("<!DOCTYPE html>"));
    Ok(())
}

#[test]
fn a_file_appears_whole_or_not_at_all() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.at_work("sgd", &["--steps", "100"])?;
    lab.dump(&program, &lab.path("image"), &["--timeline", "dump.json"])?;
    program.wait()?;
    let disk = lab.path("disk");
    let _disk = SmallDisk::mount(disk.clone(), 4)?;
    std::fs::write(disk.join("page"), "an older page")?;
    std::fs::set_permissions(disk.join("page"), PermissionsExt::from_mode(0o600))?;
    let report = |to: &Path| finish(lab.gpucr().args(["report", "dump.json", "-o"]).arg(to));
    refused(&report(&disk.join("page"))?, 1, &["No space left"])?;
    ensure!(std::fs::read(disk.join("page"))? == b"an older page");
    refused(&report(&disk.join("other"))?, 1, &["No space left"])?;
    let names = || disk.read_dir()?.map(|entry| Ok(entry?.file_name())).collect::<Result<Vec<_>>>();
    ensure!(names()? == ["page"], "left behind: {:?}", names()?);

    // What is no file is written as it is, and stays.
    for (to, code) in [("/dev/null", 0), ("/dev/full", 1), ("/dev/stdout", 0)] {
        let output = report(Path::new(to))?;
        ensure!(output.status.code() == Some(code), "{to}: {}", show(&output));
        let is_page = output.stdout.starts_with(b"<!DOCTYPE html>");
        ensure!(is_page == (to == "/dev/stdout"), "{to}: {}", show(&output));
        ensure!(!Path::new(to).symlink_metadata()?.is_file(), "{to} was replaced");
    }
    Ok(())
}

#[test]
fn a_quiet_command_says_nothing_of_what_it_has_done() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("sgd", &["--steps", "40"])?;
    let pid = program.pid.to_string();
    let said = |args: &[&str]| -> Result<Output> {
        let output = lab.run(args)?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
        Ok(output)
    };
    for quiet in [&["-q", "dump"], &["dump", "--quiet"]] {
        let args = [&quiet[..], &["--pid", &pid, "--leave-running", "--store", "store"]].concat();
        let output = said(&args)?;
        ensure!(output.stdout.is_empty() && output.stderr.is_empty(), "{}", show(&output));
    }
    ensure!(!said(&["dump", "-R", "--pid", &pid, "--store", "store"])?.stdout.is_empty());
    // JSON was asked for, and so was a list.
    let output = said(&["-q", "dump", "-R", "--json", "--pid", &pid, "--store", "store"])?;
    serde_json::from_slice::<Value>(&output.stdout)?;
    ensure!(!said(&["-q", "ls", "store"])?.stdout.is_empty());
    ensure!(said(&["-q", "gc", "store"])?.stdout.is_empty());
    let output = lab.run(["-q", "verify", "nowhere"])?;
    ensure!(!output.status.success() && !output.stderr.is_empty(), "{}", show(&output));
    Ok(())
}

/// A program that a script has started behind its back has the terminal as its standard error alone.
#[test]
fn a_program_comes_back_to_the_terminal_where_only_its_errors_go_there() -> Result<()> {
    let (lab, pace) = (Lab::new(), Pace::new()?);
    let expected = undisturbed("sgd", &["--steps", "60"])?;
    pace.allow(8)?;
    let gpucr = lab.gpucr();
    let script = format!(
        "stty cols 81 rows 25 -echo < /dev/tty\n\
         G={}\n$G run --device soft -- {} sgd --steps 60 --pace {pace} > train.log &\n\
         until grep -q '^step 6 ' train.log; do sleep 0.02; done\n\
         $G dump --pid $! -o image || exit\n\
         printf '%100s' . >> {pace}\n\
         stty cols 132 rows 40 echo < /dev/tty\n\
         setsid -w sh -c \"$G restore image\" < /dev/null > refused 2>&1 && exit 1\n\
         GPUCR_FAULT=fail:resume $G restore image < /dev/null 2> failed && exit 1\n\
         stty size < /dev/tty > size-of-failed; stty -a < /dev/tty > modes-of-failed\n\
         $G restore image < /dev/null; status=$?\n\
         stty size < /dev/tty > size; stty -a < /dev/tty > modes\n\
         exit $status\n",
        gpucr.get_program().display(),
        binary("workload").display(),
        pace = pace.file(),
    );
    std::fs::write(lab.path("go.sh"), script)?;
    let mut command = std::process::Command::new("script");
    command.args(["-qec", "sh go.sh", "/dev/null"]).current_dir(lab.path("."));
    command.envs(gpucr.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = finish(command.stdin(Stdio::null()))?;
    let log = std::fs::read_to_string(lab.path("train.log"))?;
    ensure!(output.status.success(), "{}\n{log}", show(&output));
    let result = expected.last().context("it has a result")?;
    ensure!(log.lines().last() == Some(result.as_str()), "{log}\n{}", show(&output));
    // In a session without a terminal it is refused, and here its terminal is as it was before.
    let file = |name| std::fs::read_to_string(lab.path(name));
    ensure!(file("refused")?.contains("script -qec"), "{}", file("refused")?);
    for (size, modes) in [("size-of-failed", "modes-of-failed"), ("size", "modes")] {
        ensure!(file(size)?.trim() == "40 132", "{size}: {}", file(size)?);
        ensure!(file(modes)?.contains(" echo "), "{modes}: {}", file(modes)?);
    }
    Ok(())
}
