//! Launches that `gpucr trace` calls idempotent are: the software driver runs each kernel a second time, and tells
//! whether that changes anything.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{ADVERSARIES, Lab, Pace, Started, each_workload, show, until};
use serde_json::Value;

/// Steps that are watched. The program begins with one, and ends with one more.
const STEPS: usize = 12;

/// How often a kernel was run twice, and how often that changed something.
#[derive(Debug, Default, Clone, Copy)]
struct Truth {
    same: u64,
    differs: u64,
}

/// What the driver has noted from this byte of its file on.
fn noted(file: &Path, from: usize) -> Result<BTreeMap<String, Truth>> {
    let mut kernels: BTreeMap<String, Truth> = BTreeMap::new();
    let notes = if file.exists() { std::fs::read_to_string(file)? } else { String::new() };
    for line in notes[from..].lines() {
        let (kernel, what) = line.split_once(' ').context("two words")?;
        let truth = kernels.entry(kernel.to_owned()).or_default();
        match what {
            "same" => truth.same += 1,
            "differs" => truth.differs += 1,
            // It writes memory of the host, of which the driver finds out nothing.
            _ => {}
        }
    }
    Ok(kernels)
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or(0)
}

/// Compares what is said of a workload's kernels with what the driver finds out.
fn judged_rightly(name: &str) -> Result<()> {
    let lab = Lab::new();
    let pace = Pace::new()?;
    pace.allow(1)?;
    let (notes, log) = (lab.path("twice"), lab.path("trace.log"));
    let steps = (STEPS + 2).to_string();
    let args = ["--steps", &steps, "--pace", pace.file()];
    let twice = notes.to_str().context("a path in UTF-8")?;
    let mut program = lab.start_with(name, &args, &[("SOFTCUDA_TWICE", twice)])?;
    program.wait_for("step ")?;
    let written = || std::fs::metadata(&notes).map_or(0, |notes| notes.len() as usize);
    // What runs until it is heard that the trace records may be in the trace or not.
    let before = written();
    let mut command = lab.gpucr();
    command.args(["trace", "--json", "--no-observe", "--for", "1h"]);
    command.args(["--pid", &program.pid.to_string()]);
    command.env("GPUCR_LOG", "gpucr_core=debug").env("NO_COLOR", "1");
    command.stdout(Stdio::piped()).stderr(std::fs::File::create(&log)?);
    let trace = Started::spawn(&mut command)?;
    let said = || std::fs::read_to_string(&log).unwrap_or_default();
    until("the trace records", || said().contains("recording")).with_context(said)?;
    let from = written();
    for _ in 0..STEPS {
        program.goes_on_by(&pace, 1)?;
    }
    let id = rustix::process::Pid::from_child(&trace);
    rustix::process::kill_process(id, rustix::process::Signal::INT)?;
    let output = trace.wait_with_output()?;
    ensure!(output.status.success(), "{}{}", show(&output), said());
    let report: Value = serde_json::from_slice(&output.stdout)?;
    pace.allow_all()?;
    program.result()?;

    let truth = noted(&notes, before)?;
    let (mut launches, mut yes, mut missed) = (0, 0, 0);
    for row in report["processes"][0]["kernels"].as_array().context("kernels")? {
        let classes = row["repeated"].as_array().context("classes")?;
        let of = |wanted: bool| -> u64 {
            let fit = classes.iter().filter(|c| (c["idempotent"] == true) == wanted);
            fit.map(|class| number(&class["launches"])).sum()
        };
        let (is_so, others) = (of(true), of(false));
        ensure!(is_so + others == number(&row["launches"]), "{row:#}");
        let kernel = row["name"].as_str().context("a name")?;
        let found = truth.get(kernel).copied().unwrap_or_default();
        let whole = found.same + found.differs;
        // Launches of both kinds cannot be told apart: as many may have changed something as are not said to be
        // idempotent. The driver has seen more than is in the trace: the last step, and the beginning.
        let may_differ =
            if others == 0 { 0 } else { others + whole.saturating_sub(is_so + others) };
        let wrong = if is_so == 0 { 0 } else { found.differs.saturating_sub(may_differ) };
        ensure!(wrong == 0, "{name}: {found:?} {row:#}");
        let whole = whole.max(1);
        (launches, yes) = (launches + is_so + others, yes + is_so);
        // Of kernels with launches of both kinds: those that are not said to be so, as far as they are.
        missed += ((is_so + others) * found.same / whole).saturating_sub(is_so);
    }
    ensure!(launches == 0 || !truth.is_empty(), "{report:#}");
    ensure!(launches > 0 || noted(&notes, from)?.is_empty(), "{truth:?} {report:#}");
    // A wrong one has failed the test.
    println!("| {name} | {launches} | {yes} | 0 | {missed} |");
    Ok(())
}

each_workload!(judged_rightly);

#[test]
fn adversaries() -> Result<()> {
    ADVERSARIES.iter().try_for_each(|name| judged_rightly(name).with_context(|| *name))
}
