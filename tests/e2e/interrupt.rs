//! Kernels that are interrupted by a dump, and go on from there.

use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, finish, show, undisturbed};
use serde_json::Value;

/// A kernel of many blocks, of which each comes to its end once it has begun.
const NAME: &str = "long-blocks";
/// A kernel of few blocks that loop.
const LOOPS: &str = "long-loops";
/// A kernel of few blocks whose threads meet again and again.
const BARRIERS: &str = "long-barriers";

/// A kernel of very many blocks that loop for a short time.
const ROUNDS: &str = "long-rounds";

/// A kernel of few blocks that loop, and keep something in memory of their threads.
const AGAIN: &str = "long-again";
/// The same, which writes where it reads.
const IN_PLACE: &str = "long-in-place";

/// Starts the workload so that its kernel can be interrupted, and waits until that is launched.
fn start(lab: &Lab, args: &[&str]) -> Result<Program> {
    start_with(lab, NAME, args, &[])
}

fn start_with(
    lab: &Lab,
    name: &str,
    args: &[&str],
    environment: &[(&str, &str)],
) -> Result<Program> {
    let mut command = lab.gpucr();
    let level = match name {
        LOOPS => "loop",
        BARRIERS => "barrier",
        AGAIN | IN_PLACE => "abort",
        _ => "block",
    };
    command.args(["run", "--device", "soft", "--interruptible", "no_such,long_*"]);
    command.args(["--interrupt-level", level, "--"]);
    command.arg(gpucr_tests::binary("workload")).arg(name).args(args);
    command.envs(environment.iter().copied());
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("launched 1")?;
    Ok(program)
}

/// Starts the workload so that kernels can be interrupted that take long, and waits until one has.
fn start_auto(lab: &Lab, name: &str, level: &str, args: &[&str]) -> Result<Program> {
    let mut command = lab.gpucr();
    command.args(["run", "--device", "soft", "--interruptible=auto", "--interrupt-level", level]);
    command.arg("--").arg(gpucr_tests::binary("workload")).arg(name).args(args);
    let mut program = lab.spawn(command, "log")?;
    program.wait_for("launched 2")?;
    Ok(program)
}

/// A dump fails because of the kernel, and says why that cannot be interrupted.
fn is_not_interrupted(lab: &Lab, program: &Program, why: &str) -> Result<()> {
    let mut command = lab.gpucr();
    command.args(["dump", "-o", "image", "--timeout", "1s", "--pid", &program.pid.to_string()]);
    let output = finish(command.arg("--json"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        // On a busy machine it may take so long until its gate is closed.
        ensure!(program.output().contains("step 1"), "{}", program.output());
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["interrupted"] == serde_json::json!([]), "{report}");
        return Ok(());
    }
    let said = said.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
    ensure!(said.contains("`long_blocks`") && said.contains(why), "{}", show(&output));
    Ok(())
}

fn dump(lab: &Lab, program: &Program, image: &str, args: &[&str]) -> Result<Value> {
    let mut command = lab.gpucr();
    // Its blocks that have begun may take long on a busy machine.
    command.args(["dump", "--json", "--timeout", "120s", "-o", image]);
    command.args(["--pid", &program.pid.to_string()]).args(args);
    command.envs(lab.environment.iter().map(|(name, value)| (name, value)));
    let output = finish(&mut command)?;
    ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Whether a scenario was followed to its end in which a kernel is interrupted. Where another thread is in a call of the
/// driver for long, as on a busy machine, the kernel itself is launched, which cannot be interrupted: then it is tried again.
fn sometime(scenario: impl Fn() -> Result<bool>) -> Result<()> {
    for _ in 0..5 {
        if scenario()? {
            return Ok(());
        }
    }
    anyhow::bail!("nothing was ever interrupted")
}

/// What the report says of the one launch that was interrupted; `None` if none was.
fn interrupted(report: &Value) -> Result<Option<&Value>> {
    match &report["interrupted"].as_array().context("a list")?[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        all => anyhow::bail!("{all:?}"),
    }
}

/// How many blocks were done and how many there are, of the one launch that was interrupted; `None` if none was.
fn done(report: &Value, program: &Program) -> Result<Option<(u64, u64)>> {
    let Some(one) = interrupted(report)? else { return Ok(None) };
    ensure!(one["kernel"] == "long_blocks" && one["level"] == "block", "{one}");
    ensure!(one["pid"] == program.pid, "{one}");
    let number = |name: &str| one[name].as_u64().context("a number");
    let (done, blocks) = (number("done")?, number("blocks")?);
    ensure!(done < blocks, "it came to its end");
    Ok(Some((done, blocks)))
}

fn ends_well(mut program: Program, expected: &[String]) -> Result<()> {
    program.result()?;
    ensure!(program.series() == expected, "{:#?} is not {expected:#?}", program.series());
    Ok(())
}

#[test]
fn a_kernel_is_dumped_and_restored_twice_before_it_ends() -> Result<()> {
    // It has twice as many blocks.
    let args = ["--size", "medium"];
    let expected = undisturbed(NAME, &args)?;
    sometime(|| {
        let lab = Lab::new();
        let program = start(&lab, &args)?;
        let report = dump(&lab, &program, "first", &[])?;
        let Some(first) = done(&report, &program)? else { return Ok(false) };
        let inspected = lab.run(["inspect", "first"])?;
        let said = String::from_utf8(inspected.stdout)?;
        ensure!(said.contains(&format!("{} of {} blocks done", first.0, first.1)), "{said}");
        let program = lab.restore(&lab.path("first"), program)?;
        let report = dump(&lab, &program, "second", &[])?;
        let Some(second) = done(&report, &program)? else { return Ok(false) };
        ensure!(first.0 <= second.0 && first.1 == second.1, "{first:?} {second:?}");
        let program = lab.restore(&lab.path("second"), program)?;
        ends_well(program, &expected)?;
        Ok(true)
    })
}

#[test]
fn a_kernel_that_took_long_is_interrupted_the_next_time() -> Result<()> {
    is_interrupted_the_next_time(NAME, "block", "block")
}

#[test]
fn a_kernel_that_took_long_in_many_rounds_is_interrupted_between_them() -> Result<()> {
    is_interrupted_the_next_time(ROUNDS, "loop", "block")
}

#[test]
fn a_kernel_whose_blocks_took_long_is_interrupted_inside_of_them() -> Result<()> {
    is_interrupted_the_next_time(LOOPS, "loop", "loop")
}

/// With `auto`, and where `asked` says, a kernel of the workload is interrupted at the level of this name.
fn is_interrupted_the_next_time(workload: &str, asked: &str, level: &str) -> Result<()> {
    let expected = undisturbed(workload, &STEPS)?;
    sometime(|| {
        let (lab, pace) = (Lab::new(), paced()?);
        let args = [&STEPS[..], &["--pace", pace.file()]].concat();
        let program = start_auto(&lab, workload, asked, &args)?;
        let report = dump(&lab, &program, "image", &[])?;
        // On a busy machine short blocks may have taken long.
        let was_interrupted = match interrupted(&report)? {
            None => false,
            Some(one) => {
                ensure!(one["kernel"] == workload.replace('-', "_"), "{one}");
                ensure!(one["done"].as_u64() < one["blocks"].as_u64(), "it came to its end");
                one["level"] == level
            }
        };
        pace.allow_all()?;
        let program = lab.restore(&lab.path("image"), program)?;
        ends_well(program, &expected)?;
        Ok(was_interrupted)
    })
}

/// Its few blocks have all begun, and none of them is waited for.
#[test]
fn a_kernel_is_dumped_and_restored_twice_in_its_loops() -> Result<()> {
    is_dumped_inside_of_its_blocks(LOOPS, "long_loops", "loop", "in loops")
}

/// The same of blocks that have shared memory.
#[test]
fn a_kernel_is_dumped_and_restored_twice_at_barriers() -> Result<()> {
    is_dumped_inside_of_its_blocks(BARRIERS, "long_barriers", "barrier", "at barriers")
}

fn is_dumped_inside_of_its_blocks(
    workload: &str,
    kernel: &str,
    level: &str,
    place: &str,
) -> Result<()> {
    let args = ["--size", "medium"];
    let expected = undisturbed(workload, &args)?;
    sometime(|| {
        let lab = Lab::new();
        let mut program = start_with(&lab, workload, &args, &[])?;
        for image in ["first", "second"] {
            let report = dump(&lab, &program, image, &[])?;
            let Some(one) = interrupted(&report)? else { return Ok(false) };
            ensure!(one["kernel"] == kernel && one["level"] == level, "{one}");
            ensure!(one["done"] == 0 && one["blocks"].as_u64() > Some(0), "{one}");
            let said = String::from_utf8(lab.run(["inspect", image])?.stdout)?;
            ensure!(said.contains(&format!("interrupted {place}: kernel {kernel}")), "{said}");
            program = lab.restore(&lab.path(image), program)?;
        }
        ends_well(program, &expected)?;
        Ok(true)
    })
}

/// Its few blocks are begun again after each dump.
#[test]
fn a_kernel_is_aborted_twice_and_comes_to_its_end() -> Result<()> {
    let args = ["--size", "medium"];
    let expected = undisturbed(AGAIN, &args)?;
    sometime(|| {
        let lab = Lab::new();
        let mut program = start_with(&lab, AGAIN, &args, &[])?;
        for image in ["first", "second"] {
            let report = dump(&lab, &program, image, &[])?;
            let Some(one) = interrupted(&report)? else { return Ok(false) };
            ensure!(one["kernel"] == "long_again" && one["level"] == "abort", "{one}");
            let number = |name: &str| one[name].as_u64().context("a number");
            let (blocks, aborted) = (number("blocks")?, number("aborted")?);
            ensure!(number("done")? == 0 && aborted > 0 && aborted <= blocks, "{one}");
            let said = String::from_utf8(lab.run(["inspect", image])?.stdout)?;
            let expected = format!("0 of {blocks} blocks done, {aborted} run again");
            ensure!(said.contains("interrupted by abort: kernel long_again"), "{said}");
            ensure!(said.contains(&expected), "{said}");
            program = lab.restore(&lab.path(image), program)?;
        }
        ends_well(program, &expected)?;
        Ok(true)
    })
}

/// Who dumps it again and again lets it come to its end.
#[test]
fn a_kernel_that_was_aborted_in_vain_comes_to_its_end() -> Result<()> {
    let expected = undisturbed(AGAIN, &[])?;
    sometime(|| {
        let lab = Lab::new();
        let program = start_with(&lab, AGAIN, &[], &[])?;
        let mut aborted = 0;
        for number in 0..5 {
            let report = dump(&lab, &program, &format!("image-{number}"), &["-R"])?;
            match interrupted(&report)? {
                Some(one) => {
                    ensure!(one["level"] == "abort", "{one}");
                    aborted += 1;
                }
                None => break,
            }
        }
        ensure!(aborted <= 3, "it was aborted {aborted} times");
        ends_well(program, &expected)?;
        Ok(aborted > 0)
    })
}

/// Doing it twice is another thing: what has begun comes to its end.
#[test]
fn a_kernel_that_writes_where_it_reads_is_not_aborted() -> Result<()> {
    let expected = undisturbed(IN_PLACE, &[])?;
    let lab = Lab::new();
    let program = start_with(&lab, IN_PLACE, &[], &[])?;
    let mut command = lab.gpucr();
    command.args(["dump", "-o", "image", "--timeout", "1s", "--pid", &program.pid.to_string()]);
    let output = finish(command.arg("--json"))?;
    if output.status.success() {
        // It may have come to its end on a busy machine.
        let report: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(report["interrupted"] == serde_json::json!([]), "{report}");
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.split_whitespace().filter(|word| *word != "│").collect::<Vec<_>>().join(" ");
    let why = "it cannot be begun again: reads and writes one allocation";
    ensure!(said.contains("`long_in_place`") && said.contains(why), "{}", show(&output));
    ends_well(program, &expected)
}

#[test]
fn the_program_goes_on_when_it_is_left_running() -> Result<()> {
    for protocol in ["stop", "cow"] {
        let expected = undisturbed(NAME, &["--seed", "2"])?;
        sometime(|| {
            let lab = Lab::new();
            let program = start(&lab, &["--seed", "2"])?;
            let report = dump(&lab, &program, "image", &["-R", "--protocol", protocol])?;
            let was_interrupted = done(&report, &program)?.is_some();
            ends_well(program, &expected)?;
            Ok(was_interrupted)
        })?;
    }
    Ok(())
}

#[test]
fn the_program_goes_on_after_a_dump_that_failed_or_died() -> Result<()> {
    let expected = undisturbed(NAME, &[])?;
    for fault in ["fail:criu", "fail:commit", "kill:export", "kill:criu"] {
        let lab = Lab::new();
        let program = start(&lab, &[])?;
        let mut command = lab.gpucr();
        command.args(["dump", "-o", "image", "--timeout", "120s"]);
        command.args(["--pid", &program.pid.to_string()]).env("GPUCR_FAULT", fault);
        let output = finish(command.stdout(Stdio::piped()))?;
        ensure!(!output.status.success(), "{fault}: {}", show(&output));
        ends_well(program, &expected).context(fault)?;
    }
    Ok(())
}

#[test]
fn it_goes_on_where_memory_comes_later() -> Result<()> {
    let expected = undisturbed(NAME, &[])?;
    sometime(|| {
        let lab = Lab::new();
        let program = start(&lab, &[])?;
        let was_interrupted = done(&dump(&lab, &program, "image", &[])?, &program)?.is_some();
        let program = lab.restore_as(&lab.path("image"), program, &["--on-demand"], &[])?;
        ends_well(program, &expected)?;
        Ok(was_interrupted)
    })
}

#[test]
fn nothing_is_interrupted_where_it_was_not_asked_for() -> Result<()> {
    let lab = Lab::new();
    let mut program = lab.start(NAME, &[])?;
    program.wait_for("launched 1")?;
    is_not_interrupted(&lab, &program, "it was not started with `gpucr run --interruptible`")
}

/// Fat binaries have text too. It is rewritten if it is what runs.
#[test]
fn a_kernel_of_a_fat_binary_is_interrupted_where_its_text_runs() -> Result<()> {
    let expected = undisturbed(NAME, &[])?;
    for machine_code in ["", "75,90"] {
        sometime(|| {
            let lab = Lab::new();
            let environment = [("WORKLOAD_FAT_BINARY", machine_code)];
            let program = start_with(&lab, NAME, &[], &environment)?;
            let report = dump(&lab, &program, "image", &[])?;
            let was_interrupted = done(&report, &program)?.is_some();
            let program = lab.restore(&lab.path("image"), program)?;
            ends_well(program, &expected)?;
            Ok(was_interrupted)
        })
        .context(machine_code)?;
    }
    let lab = Lab::new();
    let program = start_with(&lab, NAME, &[], &[("WORKLOAD_FAT_BINARY", "90,80")])?;
    is_not_interrupted(
        &lab,
        &program,
        "its module has machine code for the device, which is what runs",
    )
}

/// A lab in whose programs a kernel dies as with driver 580: once the driver has restored its process, when another one
/// comes to the device.
fn fragile_lab() -> Result<Lab> {
    let mut lab = Lab::new();
    let file = lab.path("contexts");
    let file = file.to_str().context("a path")?;
    lab.environment.push(("SOFTCUDA_SWITCH".into(), format!("50@{file}")));
    Ok(lab)
}

/// Steps of a program that ends only when its pace allows it, however slow the machine.
const STEPS: [&str; 2] = ["--steps", "3"];

fn paced() -> Result<Pace> {
    let pace = Pace::new()?;
    pace.allow(2)?;
    Ok(pace)
}

/// gpucr comes to the device of such a program only when that stands still.
#[test]
fn a_kernel_of_a_restored_program_is_interrupted_before_gpucr_comes_to_the_device() -> Result<()> {
    let expected = undisturbed(NAME, &STEPS)?;
    sometime(|| {
        let (lab, pace) = (fragile_lab()?, paced()?);
        let program = start(&lab, &[&STEPS[..], &["--pace", pace.file()]].concat())?;
        let mut was_interrupted = false;
        // The driver restores a program that runs on, too.
        for (number, protocol) in ["cow", "recopy", "stop"].iter().enumerate() {
            let image = format!("running-{number}");
            let report = dump(&lab, &program, &image, &["-R", "--protocol", protocol])?;
            ensure!(number == 0 || report["protocol"] == "stop", "{report}");
            was_interrupted |= number > 0 && done(&report, &program)?.is_some();
        }
        dump(&lab, &program, "ended", &[])?;
        pace.allow_all()?;
        let [(name, value)] = &lab.environment[..] else { anyhow::bail!("one variable") };
        let program = lab.restore_as(&lab.path("ended"), program, &[], &[(name, value)])?;
        ends_well(program, &expected)?;
        Ok(was_interrupted)
    })
}

/// A kernel that cannot be interrupted comes to its end first.
#[test]
fn a_kernel_of_a_restored_program_ends_before_gpucr_comes_to_the_device() -> Result<()> {
    let expected = undisturbed(NAME, &STEPS)?;
    let (lab, pace) = (fragile_lab()?, paced()?);
    let mut program = lab.start(NAME, &[&STEPS[..], &["--pace", pace.file()]].concat())?;
    program.wait_for("launched 1")?;
    dump(&lab, &program, "first", &["-R", "--protocol", "stop"])?;
    program.wait_for("launched 2")?;
    dump(&lab, &program, "second", &["-R"])?;
    pace.allow_all()?;
    ends_well(program, &expected)
}
