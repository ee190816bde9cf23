//! Copying while the program runs.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, PausedDump, Program, finish, show, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "400", "--step-delay-ms", "10"];

#[test]
fn what_changed_after_it_was_copied_is_found_and_copied_again() -> Result<()> {
    let expected = undisturbed("scatter", &ARGS[..2])?;
    let lab = Lab::new();
    let program = lab.at_work("scatter", &ARGS)?;
    let dump = PausedDump::start(&lab, &program, &["--protocol", "recopy"], "hold:gate")?;
    let_it_write(&program)?;
    let report = dump.finish()?;
    ensure!(report["protocol"] == "recopy", "{report}");
    let count = |name: &str| report["validation"][name].as_u64().context("a count");
    let (chunks, misspeculated) = (count("chunks")?, count("misspeculated")?);
    ensure!(report["precopied_chunks"].as_u64() > Some(chunks / 4), "{report}");
    // A word has changed in one chunk after the other since they were copied.
    ensure!(misspeculated > 0 && count("recopied")? >= misspeculated, "{report}");
    ensure!(count("recopied")? < chunks, "{report}");
    // Its launches hide where they write: the place is known, nobody is suspected.
    let places = report["validation"]["misspeculations"].as_array().context("a list")?;
    ensure!(!places.is_empty() && places.len() as u64 <= misspeculated, "{report}");
    for place in places {
        ensure!(place["pid"].as_u64().is_some() && place["size"].as_u64() > Some(0), "{report}");
        ensure!(place["suspects"] == serde_json::json!([]), "{report}");
    }
    let mut restored = lab.restore(&lab.path("image"), program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{:#?}\nis not {expected:#?}", restored.series());
    Ok(())
}

/// Waits until the program has written to 20 of its 32 chunks or so.
fn let_it_write(program: &Program) -> Result<()> {
    let before = steps(program);
    // It may have come to where its pace holds it up. It prints every eighth of its steps.
    program.allow(6 * 8)?;
    until("it makes steps", || steps(program) >= before + 4)
}

/// A program that writes where its arguments point: what it does while it is copied is laid at the
/// door of the kernel that did it.
#[test]
fn a_kernel_that_writes_what_was_copied_is_named() -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(2)?;
    let mut program = lab.start("stencil", &["--steps", "60", "--pace", pace.file()])?;
    program.wait_for("step 3 ")?;
    // Its memory stays unchanged while it is copied, and makes a step before it is stopped.
    let dump = PausedDump::start(&lab, &program, &["-R", "--protocol", "recopy"], "hold:gate")?;
    pace.allow(1)?;
    program.wait_for("step 4 ")?;
    let report = dump.finish()?;
    let places = report["validation"]["misspeculations"].as_array().context("a list")?;
    let suspected =
        |place: &serde_json::Value| place["suspects"] == serde_json::json!(["heat_step"]);
    ensure!(places.iter().any(suspected), "{report:#}");
    ensure!(program.is_running(), "{}", program.output());
    Ok(())
}

#[test]
fn without_the_check_the_image_is_wrong() -> Result<()> {
    let lab = Lab::new();
    let program = lab.at_work("scatter", &ARGS)?;
    let faults = "hold:gate,skip:validate";
    let dump = PausedDump::start(&lab, &program, &["--protocol", "recopy"], faults)?;
    let_it_write(&program)?;
    dump.finish()?;
    let mut restored = lab.restore(&lab.path("image"), program)?;
    let result = restored.result();
    ensure!(result.is_err(), "the program found nothing wrong: {result:?}");
    ensure!(restored.output().contains("is wrong"), "{}", restored.output());
    Ok(())
}

fn steps(program: &Program) -> usize {
    program.output().lines().filter(|line| line.starts_with("step ")).count()
}

/// How many of its steps the program makes between the begins of two phases of a dump that leaves it running, and copies
/// slowly between them.
fn steps_during_the_copy(protocol: &str, first: &str, last: &str) -> Result<usize> {
    let lab = Lab::new();
    // About fifty of its steps are printed, so one line for each step needs few steps.
    let pace = Pace::new()?;
    pace.allow(5)?;
    let args = ["--steps", "50", "--step-delay-ms", "100", "--pace", pace.file()];
    let mut program = lab.start("scatter", &args)?;
    program.wait_for("step ")?;
    let args = ["-R", "--protocol", protocol, "--compress", "none"];
    let slow = [("SOFTCUDA_PCIE_GBPS", "0.04")];
    let faults = format!("hold:{first},hold:{last}");
    let dump = PausedDump::start_with(&lab, &program, &args, &slow, &faults)?;
    let before = steps(&program);
    pace.allow(44)?;
    // What is copied in between takes about a second, whatever the machine.
    dump.on_to(last)?;
    let made = steps(&program) - before;
    let report = dump.finish()?;
    ensure!(report["protocol"] == protocol, "{report}");
    pace.allow_all()?;
    program.result()?;
    Ok(made)
}

#[test]
fn the_program_goes_on_while_it_is_copied() -> Result<()> {
    // A step takes 100 ms and a bit. `cargo xtask bench` measures how many there are.
    let made = steps_during_the_copy("recopy", "precopy", "gate")?;
    ensure!(made > 2, "{made} steps while it ran");
    // At `export` its gate is closed, and what it had launched has come to its end; it may not have said so yet.
    let made = steps_during_the_copy("stop", "export", "resume")?;
    ensure!(made <= 1, "{made} steps while it stood still");
    Ok(())
}

/// The program and its image both end well, with room for all shadows, for some, and for none.
#[test]
fn a_program_goes_on_while_its_shadows_are_saved() -> Result<()> {
    let expected = undisturbed("scatter", &ARGS[..2])?;
    for room in [None, Some("12MiB"), Some("0")] {
        // On a busy machine the program may have come to where it waits before its gate is shut, and write nothing.
        let mut tries = (0..5).map(|_| shadowed(room, &expected));
        let found = tries.find(|shadowed| !matches!(shadowed, Ok(0)) || room == Some("0"));
        let shadowed = found.context("no dump found what was written")??;
        let right = match room {
            None => shadowed >= 2 << 20,
            Some("0") => shadowed == 0,
            Some(_) => (2 << 20..=12 << 20).contains(&shadowed),
        };
        ensure!(right, "room {room:?}: {shadowed}");
    }
    Ok(())
}

/// Dumps the program with so much room for shadows, and says how many bytes of them there were.
fn shadowed(room: Option<&str>, expected: &[String]) -> Result<u64> {
    let lab = Lab::new();
    let mut program = lab.at_work("scatter", &ARGS)?;
    let image = lab.path("image");
    let mut args = vec!["--leave-running", "--protocol", "cow"];
    args.extend(room.into_iter().flat_map(|size| ["--shadow-memory", size]));
    let report = lab.dump(&program, &image, &args)?;
    ensure!(report["protocol"] == "cow" && report["left_running"] == true, "{report}");
    program.result()?;
    ensure!(program.series() == expected, "the program that ran on differs");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "room {room:?}: {:#?}", restored.series());
    report["shadowed_bytes"].as_u64().context("bytes")
}

/// What is left to be saved is gpucr's by then.
#[test]
fn a_program_may_end_before_its_image_is_complete() -> Result<()> {
    let expected = undisturbed("scatter", &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work("scatter", &ARGS)?;
    let dump = PausedDump::start(&lab, &program, &["-R", "--protocol", "cow"], "hold:store")?;
    program.result()?;
    ensure!(program.series() == expected, "the program that ran on differs");
    dump.finish()?;
    let image = lab.path("image");
    lab.rewind(&program, &image)?;
    let mut restored = lab.restore(&image, program)?;
    restored.result()?;
    ensure!(restored.series() == expected, "{:#?}", restored.series());
    Ok(())
}

/// After the program has gone on, what fails costs the image and nothing else.
#[test]
fn a_failure_beside_the_running_program_leaves_it_alone() -> Result<()> {
    let expected = undisturbed("scatter", &ARGS[..2])?;
    for fault in
        ["fail:shadow", "fail:resume", "fail:store", "kill:store", "fail:commit", "kill:commit"]
    {
        let lab = Lab::new();
        let mut program = lab.at_work("scatter", &ARGS)?;
        let mut command = lab.gpucr();
        command
            .args([
                "dump",
                "-R",
                "--pid",
                &program.pid.to_string(),
                "--protocol",
                "cow",
                "-o",
                "image",
            ])
            .env("GPUCR_FAULT", fault);
        let output = finish(&mut command)?;
        // A failure on the way back is no reason not to go it.
        ensure!(output.status.success() == (fault == "fail:resume"), "{fault}: {}", show(&output));
        program.result()?;
        ensure!(program.series() == expected, "{fault}: the program differs");
        lab.holds_only(&["log", "image"])?;
        ensure!(lab.path("image").exists() == (fault == "fail:resume"), "{fault}");
    }
    Ok(())
}

/// Memory that is given back and made anew during the pre-copy.
#[test]
fn memory_may_come_and_go() -> Result<()> {
    let lab = Lab::new();
    let mut undisturbed = lab.start("realloc", &["--steps", "300"])?;
    undisturbed.result()?;
    let expected = undisturbed.series();
    for round in 0..3 {
        let lab = Lab::new();
        let program = lab.at_work("realloc", &["--steps", "300", "--step-delay-ms", "5"])?;
        std::thread::sleep(Duration::from_millis(200 * round));
        let mut command = lab.gpucr();
        command
            .args(["dump", "--json", "--pid", &program.pid.to_string(), "-o", "image"])
            .env("SOFTCUDA_PCIE_GBPS", "0.05");
        let output = finish(&mut command)?;
        ensure!(output.status.success(), "{}", show(&output));
        let mut restored = lab.restore(&lab.path("image"), program)?;
        restored.result()?;
        ensure!(restored.series() == expected, "round {round}: {:#?}", restored.series());
    }
    Ok(())
}
