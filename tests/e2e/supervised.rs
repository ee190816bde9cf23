//! Programs that `gpucr run` watches over: saved again and again, restored when they fail, and left alone when they end.

use anyhow::{Context, Result, ensure};
use gpucr_tests::watched::{STEPS, Watched, images, signal};
use gpucr_tests::{Lab, exists, kill, last_step, show, undisturbed, until};

/// How many kernels the workload runs.
fn kernels(lab: &Lab) -> Result<usize> {
    // Each leaves a line.
    let lines = lab.path("kernels");
    let path = lines.to_str().context("UTF-8")?;
    lab.start_with("sgd", &STEPS, &[("SOFTCUDA_TWICE", path)])?.result()?;
    Ok(std::fs::read_to_string(&lines)?.lines().count())
}

#[test]
fn a_program_that_is_killed_is_restored_and_goes_on() -> Result<()> {
    let lab = Lab::new();
    let mut watched =
        Watched::held(&lab, &["--every", "1s", "--keep", "2", "--restart", "3"], &[])?;
    watched.wait_for_images(1)?;
    for _ in 0..2 {
        let before = watched.run.series().len();
        watched.pace.allow(4)?;
        until("it makes steps", || watched.run.series().len() > before)?;
        kill(watched.pid()?)?;
        let restored = || watched.run.series().len() > before + 1;
        until(&format!("it makes steps again: {}", watched.run.output()), restored)?;
    }
    watched.comes_out_right()?;
    ensure!(watched.images().len() <= 3, "too many are left: {:?}", watched.images());
    until("nobody is left", || !exists(watched.run.pid))
}

#[test]
fn a_program_whose_device_has_failed_is_restored() -> Result<()> {
    let lab = Lab::new();
    let once = lab.path("once");
    let fault = format!("kernel:{}:700@{}", kernels(&lab)? * 3 / 4, once.display());
    let options = ["--every", "1s", "--restart", "1"];
    let mut watched = Watched::held(&lab, &options, &[("SOFTCUDA_FAULT", &fault)])?;
    watched.wait_for_images(1)?;
    std::fs::write(&once, "")?;
    watched.comes_out_right()?;
    ensure!(!once.exists(), "the device has not failed");
    let output = watched.run.output();
    let why = "it ended with exit status 1 after the driver's error 700. Restoring it from";
    ensure!(output.contains(why), "{output}");
    Ok(())
}

#[test]
fn a_program_that_fails_again_and_again_is_given_up() -> Result<()> {
    let lab = Lab::new();
    let fault = format!("kernel:{}:719", kernels(&lab)? * 3 / 4);
    let mut watched = Watched::held(&lab, &["--restart", "2"], &[("SOFTCUDA_FAULT", &fault)])?;
    let pid = watched.pid()?.to_string();
    // Saved by somebody else, who ends it: that is no failure.
    let output = lab.run(["dump", "--pid", &pid, "--store", "store", "--name", "half"])?;
    ensure!(output.status.success(), "{}", show(&output));
    ensure!(watched.run.wait()?.code() == Some(137), "{}", watched.run.output());
    let said = watched.run.output();
    ensure!(said.contains("saved and ended by another gpucr"), "{said}");

    watched.pace.allow_all()?;
    let mut command = lab.gpucr();
    command.args(["run", "--store", "store", "--resume", "--restart", "2", "--", "false"]);
    let mut again = lab.spawn(command, "again")?;
    let status = again.wait()?;
    let said = again.output();
    ensure!(status.code() == Some(1), "{status}: {said}");
    let flat = said.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
    for words in [
        "resuming from the image store/images/half",
        "attempt 1 of 2",
        "attempt 2 of 2",
        "keeps failing: 3 times without a new image",
        "exit status 1 after the driver's error 719",
        "gpucr restore store/images/half",
    ] {
        ensure!(flat.contains(words), "no `{words}` in:\n{said}");
    }
    ensure!(!flat.contains("attempt 3"), "{said}");
    // It is as it was.
    ensure!(images(&watched.store).len() == 1, "{said}");
    let verified = lab.run(["verify", "store/images/half"])?;
    ensure!(verified.status.success(), "{}", show(&verified));
    Ok(())
}

#[test]
fn a_program_that_ends_by_itself_is_not_restored() -> Result<()> {
    for (script, code) in [("exit 0", 0), ("exit 3", 3), ("kill -TERM $$", 143)] {
        let lab = Lab::new();
        let options = ["run", "--device", "soft", "--store", "store", "--restart", "2"];
        let output = lab.run([&options[..], &["--", "sh", "-c", script]].concat())?;
        ensure!(output.status.code() == Some(code), "{script}: {}", show(&output));
        ensure!(output.stderr.is_empty(), "{script}: {}", show(&output));
    }
    // One that fails before there is an image.
    let lab = Lab::new();
    let options = ["run", "--device", "soft", "--store", "store", "--restart", "2"];
    let output = lab.run([&options[..], &["--", "sh", "-c", "kill -SEGV $$"]].concat())?;
    ensure!(output.status.code() == Some(139), "{}", show(&output));
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(said.contains("SIGSEGV") && said.contains("no image yet"), "{said}");
    Ok(())
}

#[test]
fn who_is_asked_to_end_ends_all() -> Result<()> {
    for (asked, code) in [(libc::SIGINT, 130), (libc::SIGTERM, 143)] {
        let lab = Lab::new();
        let mut watched = Watched::held(&lab, &["--every", "1s", "--restart", "3"], &[])?;
        watched.wait_for_images(1)?;
        let pid = watched.pid()?;
        match asked {
            // As a terminal does it: to all of the group, the program and a dump under way included.
            libc::SIGINT => {
                // SAFETY: sends a signal to processes of this test.
                let result = unsafe { libc::kill(-(watched.run.pid as i32), asked) };
                ensure!(result == 0, "{}", std::io::Error::last_os_error());
            }
            _ => signal(watched.run.pid, asked)?,
        }
        let status = watched.run.wait()?;
        let output = watched.run.output();
        ensure!(status.code() == Some(code), "{asked}: {status}: {output}");
        ensure!(!output.contains("restored"), "{asked}: {output}");
        until("the program is gone", || !exists(pid))?;
    }
    Ok(())
}

#[test]
fn signals_reach_the_program_in_each_of_its_lives() -> Result<()> {
    let lab = Lab::new();
    let mut watched = Watched::held(&lab, &["--every", "1s", "--restart", "1"], &[])?;
    watched.wait_for_images(1)?;
    kill(watched.pid()?)?;
    watched.waits_for_restore()?;
    let goes_on = "what it prints after the restore";
    let before = watched.run.series().len();
    watched.pace.allow(4)?;
    until(goes_on, || watched.run.series().len() > before)?;
    signal(watched.run.pid, libc::SIGTERM)?;
    let status = watched.ends()?;
    ensure!(status.code() == Some(143), "{status}: {}", watched.run.output());
    Ok(())
}

#[test]
fn what_a_program_leaves_behind_is_not_in_the_way_of_its_restore() -> Result<()> {
    let lab = Lab::new();
    let options = ["--every", "1s", "--restart", "1"];
    // One is of the tree that is saved. The other has left it, and has nothing of gpucr's in its environment.
    let script = r#"sleep 1000 & echo $! > child; (env -i setsid sleep 2000 & echo $! > far); exec "$0" "$@""#;
    let mut watched = Watched::of(&lab, &["sh", "-c", script], &options, &[])?;
    watched.wait_for_images(1)?;
    let child: u32 = std::fs::read_to_string(lab.path("child"))?.trim().parse()?;
    let began = || std::fs::read_to_string(format!("/proc/{child}/stat")).ok();
    let before = began().context("it runs")?;
    let far: u32 = std::fs::read_to_string(lab.path("far"))?.trim().parse()?;
    ensure!(exists(far), "it runs");
    kill(watched.pid()?)?;
    watched.waits_for_restore()?;
    until("what has left the tree is gone", || !exists(far))?;
    // A process that has that pid now is another one.
    until("the child is restored", || began().is_some_and(|now| now != before))?;
    watched.comes_out_right()?;
    kill(child)
}

/// The process that stands in for a program that was restored.
fn stand_in(watched: &Watched) -> Result<u32> {
    let run = watched.run.pid;
    let children = std::fs::read_to_string(format!("/proc/{run}/task/{run}/children"))?;
    let is_restore = |pid: &u32| {
        let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.contains("\0restore\0")
    };
    let mut children = children.split_whitespace().filter_map(|pid| pid.parse().ok());
    children.find(is_restore).context("a restore stands in for the program")
}

#[test]
fn a_program_nobody_stands_in_for_any_more_runs_on() -> Result<()> {
    let lab = Lab::new();
    let mut watched = Watched::held(&lab, &["--every", "1s", "--restart", "1"], &[])?;
    watched.wait_for_images(1)?;
    let workload = watched.pid()?;
    kill(workload)?;
    watched.waits_for_restore()?;
    let before = watched.run.series().len();
    watched.pace.allow(2)?;
    until("it runs again", || watched.run.series().len() > before)?;
    kill(stand_in(&watched)?)?;
    let status = watched.run.wait()?;
    let said = watched.run.output();
    ensure!(status.code() == Some(1), "{status}: {said}");
    ensure!(said.contains("keeps running, and nobody watches over it"), "{said}");
    ensure!(exists(workload), "it has ended: {said}");
    watched.pace.allow_all()?;
    until("it comes to its end", || watched.run.output().contains("result "))?;
    until("it has ended", || !exists(workload))
}

#[test]
fn a_restored_program_that_another_gpucr_ends_is_not_restored_again() -> Result<()> {
    let lab = Lab::new();
    let mut watched = Watched::held(&lab, &["--every", "1s", "--restart", "3"], &[])?;
    watched.wait_for_images(1)?;
    let workload = watched.pid()?;
    kill(workload)?;
    watched.waits_for_restore()?;
    // While one of its own dumps is under way, others are refused.
    let pid = workload.to_string();
    let mut said = String::new();
    until("it is dumped", || match lab.run(["dump", "--pid", &pid, "-o", "image"]) {
        Ok(output) => {
            said = show(&output);
            output.status.success()
        }
        Err(_) => false,
    })
    .with_context(|| said.clone())?;
    let status = watched.run.wait()?;
    let said = watched.run.output();
    ensure!(status.code() == Some(137), "{status}: {said}");
    ensure!(said.contains("saved and ended by another gpucr"), "{said}");
    ensure!(said.matches("the program has failed").count() == 1, "{said}");
    until("nobody is left", || !exists(workload))
}

#[test]
fn a_damaged_image_is_passed_over() -> Result<()> {
    let lab = Lab::new();
    let mut watched = Watched::held(&lab, &["--restart", "2"], &[])?;
    let pid = watched.pid()?;
    let dump = |name: &str, more: &[&str]| -> Result<()> {
        let pid = pid.to_string();
        let line = ["dump", "--pid", &pid, "--store", "store", "--name", name];
        let output = lab.run([&line[..], more].concat())?;
        ensure!(output.status.success(), "{}", show(&output));
        Ok(())
    };
    dump("half", &[])?;
    watched.run.wait()?;
    // From that image another gpucr run goes on, and makes one itself.
    let mut command = lab.gpucr();
    let options = ["--resume", "--on-signal", "usr2=now", "--restart", "2"];
    command.args(["run", "--store", "store"]).args(options).args(["--", "false"]);
    let mut again = lab.spawn(command, "again")?;
    again.wait_for("gpucr: resuming")?;
    until("it runs again", || exists(pid))?;
    signal(again.pid, libc::SIGUSR2)?;
    until("a second image", || images(&watched.store).len() > 1)?;
    let newest = images(&watched.store).into_iter().find(|image| !image.ends_with("half"));
    let newest = newest.context("it is not the first")?;
    signal(again.pid, libc::SIGSTOP)?;
    std::fs::write(newest.join("manifest"), "damaged")?;
    kill(pid)?;
    signal(again.pid, libc::SIGCONT)?;
    watched.pace.allow_all()?;
    let status = again.wait()?;
    let said = again.output();
    ensure!(status.success(), "{status}: {said}");
    ensure!(said.contains("skipped"), "{said}");
    let output = watched.run.output();
    ensure!(output.contains(watched.expected.last().context("a result")?), "{output}");
    Ok(())
}

#[test]
fn what_is_asked_for_is_looked_at_before_the_program_is_started() -> Result<()> {
    let lab = Lab::new();
    let wrong: [(&[&str], &str); 3] = [
        (&["--store", "s", "--dump-arg=--nonsense"], "--dump-arg"),
        (&["--store", "s", "--restore-arg=--detach"], "cannot be used here"),
        (&["--every", "1m"], "no store is named"),
    ];
    for (options, words) in wrong {
        let line = [&["run", "--device", "soft"], options, &["--", "touch", "started"]].concat();
        let output = gpucr_tests::finish(lab.gpucr().args(line).env_remove("GPUCR_STORE"))?;
        ensure!(output.status.code() == Some(2), "{options:?}: {}", show(&output));
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(said.contains(words), "{options:?}: {said}");
        ensure!(!lab.path("started").exists(), "{options:?}");
    }
    let line = ["run", "--device", "soft", "--store", "not/there", "--", "touch", "started"];
    let output = lab.run(line)?;
    ensure!(output.status.code() == Some(1) && !lab.path("started").exists(), "{}", show(&output));
    let line = ["run", "--device", "soft", "--store", "s", "--", "./nothing-there"];
    ensure!(lab.run(line)?.status.code() == Some(127));
    ensure!(last_step(&undisturbed("sgd", &STEPS)?)? == 40, "as these tests take it");
    Ok(())
}
