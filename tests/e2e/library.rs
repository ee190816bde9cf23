//! Programs that save themselves, by `libgpucr.so`.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::watched::images;
use gpucr_tests::{Lab, Program, binary, finish, show, until};

/// The library, where the command is that was built with it.
fn library() -> PathBuf {
    binary("libgpucr.so")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace").to_owned()
}

/// Builds the program in C.
fn build(lab: &Lab) -> Result<PathBuf> {
    let (program, library) = (lab.path("saver"), library());
    let dir = library.parent().context("it is in a folder")?;
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-Wextra", "-Werror", "-std=gnu11"]);
    cc.arg("-I").arg(root().join("capi/include")).arg("-o").arg(&program);
    cc.arg(root().join("tests/programs/saver.c")).arg("-L").arg(dir);
    cc.arg(format!("-Wl,-rpath,{}", dir.display())).args(["-lgpucr", "-lpthread", "-ldl"]);
    let output = finish(&mut cc)?;
    ensure!(output.status.success(), "{}", show(&output));
    Ok(program)
}

/// Starts the program under `gpucr run` with these options.
fn start(lab: &Lab, options: &[&str], how: &str, environment: &[(&str, &str)]) -> Result<Program> {
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft"]).args(options).args(["--", "env", "-u", "GPUCR_LOG"]);
    command.arg(build(lab)?).arg(how).envs(environment.iter().copied());
    lab.spawn(command, "log")
}

/// What the program says to its end.
fn says(lab: &Lab, options: &[&str], how: &str, code: i32) -> Result<Vec<String>> {
    ended(&mut start(lab, options, how, &[])?, code)
}

/// What it has said when it has ended.
fn ended(run: &mut Program, code: i32) -> Result<Vec<String>> {
    let status = run.wait()?;
    let said = run.output();
    ensure!(status.code() == Some(code), "{status}: {said}");
    // What gpucr run and the restore say goes to the same file.
    let others = ["gpucr: ", " INFO ", "at the dump and has"];
    let own = |line: &&str| !others.iter().any(|words| line.contains(words));
    Ok(said.lines().filter(own).map(str::to_owned).collect())
}

const WATCHED: [&str; 4] = ["--store", "store", "--restart", "1"];

#[test]
fn a_program_saves_itself_and_learns_that_it_was_restored() -> Result<()> {
    let lab = Lab::new();
    let said = says(&lab, &WATCHED, "again", 0)?;
    let steps = |from: u32, to: u32| (from..to).map(|step| format!("step {step}"));
    let mut expected: Vec<String> = steps(0, 3).collect();
    expected.extend(["before 1", "before 2", "after dump", "checkpoint 0 "].map(str::to_owned));
    expected.extend(steps(3, 6));
    expected.extend(["after restore 1", "after restore 2", "checkpoint 1 "].map(str::to_owned));
    expected.extend(steps(3, 8));
    expected.push("end".to_owned());
    ensure!(said == expected, "{said:#?}");
    ensure!(images(&lab.path("store")) == [lab.path("store/images/step-3")]);
    Ok(())
}

#[test]
fn threads_that_save_the_program_at_the_same_time_share_an_image() -> Result<()> {
    let lab = Lab::new();
    // The dump waits until all have asked.
    let go = lab.path("go");
    let hold =
        [("GPUCR_FAULT", "hold:attach"), ("GPUCR_FAULT_FILE", go.to_str().context("UTF-8")?)];
    let mut run =
        start(&lab, &WATCHED, "threads", &[&hold[..], &[("GPUCR_LOG", "gpucr=info")]].concat())?;
    until("all have asked", || run.output().matches("an image is asked for").count() == 4)?;
    std::fs::write(&go, "")?;
    let all = ended(&mut run, 0)?.join("\n");
    let first = "before 1\nbefore 2\nafter dump\ncheckpoints 0 0 0 0\n";
    let second = "after restore 1\nafter restore 2\ncheckpoints 1 1 1 1\nstep 0\nend";
    ensure!(all == format!("{first}{second}"), "{all}");
    ensure!(images(&lab.path("store")).len() == 1);
    Ok(())
}

/// Processes of one program, which say the name of one image.
#[test]
fn processes_that_save_the_program_at_the_same_time_share_an_image() -> Result<()> {
    let lab = Lab::new();
    let go = lab.path("go");
    let hold =
        [("GPUCR_FAULT", "hold:attach"), ("GPUCR_FAULT_FILE", go.to_str().context("UTF-8")?)];
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft"]).args(WATCHED).args(["--", "env", "-u", "GPUCR_LOG"]);
    // If one of them is killed, so is the shell.
    let script = r#""$0" again & "$0" again; wait $! || kill -KILL $$"#;
    command.args(["sh", "-c", script]).arg(build(&lab)?);
    command.envs(hold).env("GPUCR_LOG", "gpucr=info");
    let mut run = lab.spawn(command, "log")?;
    until("both have asked", || run.output().matches("an image is asked for").count() == 2)?;
    std::fs::write(&go, "")?;
    let said = ended(&mut run, 0)?;
    let count = |wanted: &str| said.iter().filter(|line| *line == wanted).count();
    let counts = ["checkpoint 0 ", "step 5", "checkpoint 1 ", "step 7", "end"].map(count);
    ensure!(counts == [2, 4, 2, 2, 2], "{counts:?}: {said:#?}");
    ensure!(images(&lab.path("store")) == [lab.path("store/images/step-3")]);
    Ok(())
}

#[test]
fn in_a_capture_it_is_refused() -> Result<()> {
    let lab = Lab::new();
    let said = says(&lab, &WATCHED, "capture", 0)?;
    let refused = "checkpoint -3 this thread has a stream capture under way".to_owned();
    ensure!(said.contains(&refused) && said.contains(&"checkpoint 0".to_owned()), "{said:#?}");
    ensure!(images(&lab.path("store")).len() == 1, "{said:#?}");
    Ok(())
}

#[test]
fn a_program_names_images_and_no_paths() -> Result<()> {
    let lab = Lab::new();
    let said = says(&lab, &WATCHED, "names", 0)?;
    let codes: Vec<&str> =
        said.iter().filter_map(|line| line.strip_prefix("checkpoint ")).collect();
    let codes: Vec<&str> = codes.iter().filter_map(|rest| rest.split(' ').next()).collect();
    ensure!(codes == ["-4", "-4", "-4", "-4", "-4", "-4", "0", "-5"], "{said:#?}");
    ensure!(images(&lab.path("store")) == [lab.path("store/images/good")]);
    ensure!(!Path::new("/tmp/outside").exists() && !lab.path("store/outside").exists());
    Ok(())
}

#[test]
fn without_somebody_who_watches_it_is_an_error_that_says_so() -> Result<()> {
    let lab = Lab::new();
    let said = says(&lab, &[], "capture", 0)?;
    let refused = said.iter().find(|line| line.starts_with("checkpoint -1 "));
    ensure!(refused.is_some_and(|line| line.contains("gpucr run --store")), "{said:#?}");
    // Not even gpucr run.
    let output = finish(Command::new(lab.path("saver")).arg("early"))?;
    ensure!(String::from_utf8_lossy(&output.stdout) == "checkpoint -1\n", "{}", show(&output));
    let said = says(&lab, &WATCHED, "early", 0)?;
    ensure!(said == ["checkpoint -2"], "{said:#?}");
    // A callback saves nothing.
    let said = says(&lab, &WATCHED, "nested", 0)?;
    ensure!(
        said.contains(&"nested -9".into()) && said.contains(&"checkpoint 0 ".into()),
        "{said:#?}"
    );
    Ok(())
}

/// The wheel is installed as anybody would, without a network.
fn python(lab: &Lab) -> Result<PathBuf> {
    let run = |command: &mut Command| -> Result<String> {
        let output = finish(command)?;
        ensure!(output.status.success(), "{command:?}: {}", show(&output));
        Ok(String::from_utf8(output.stdout)?)
    };
    let script = root().join("python/build_wheel.py");
    let built = run(Command::new("python3").arg(script).arg(library()).arg(lab.path("")))?;
    let venv = lab.path("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let python = venv.join("bin/python");
    let offline = ["-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check"];
    run(Command::new(&python).args(offline).arg(built.trim()))?;
    Ok(python)
}

#[test]
fn a_training_in_python_saves_itself_and_is_restored() -> Result<()> {
    let lab = Lab::new();
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft"]).args(WATCHED).arg("--").arg(python(&lab)?);
    command.arg(root().join("tests/programs/training.py"));
    let said = ended(&mut lab.spawn(command, "log")?, 0)?;
    // What it computes does not depend on that.
    let value = |words: &mut [u32; 256], step: u32| -> u32 {
        words.iter_mut().for_each(|word| *word = word.wrapping_mul(1_664_525).wrapping_add(step));
        words.iter().fold(0, |sum, word| sum.wrapping_add(*word))
    };
    let mut words = [1; 256];
    let steps: Vec<String> =
        (0..12).map(|step| format!("step {step} {:08x}", value(&mut words, step))).collect();
    let mut expected = vec!["early NO_CUDA".to_owned()];
    expected.extend_from_slice(&steps[..6]);
    expected.extend(["before 1", "before 2", "after dump", "SAVED"].map(str::to_owned));
    expected.extend_from_slice(&steps[6..9]);
    expected.extend(["after restore 1", "after restore 2", "RESTORED"].map(str::to_owned));
    expected.extend_from_slice(&steps[6..]);
    // Callbacks come with each attempt that gets as far as to ask.
    let attempt = ["before 1", "before 2", "after dump"];
    for refused in ["TAKEN", "BAD_NAME"] {
        expected.extend(attempt.iter().chain(&[refused]).map(|line| (*line).to_owned()));
    }
    expected.push("BAD_NAME".to_owned());
    expected.extend(attempt.map(str::to_owned));
    expected.extend(["raised of a callback", "end"].map(str::to_owned));
    ensure!(said == expected, "{said:#?}\ninstead of {expected:#?}");
    Ok(())
}
