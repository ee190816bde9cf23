//! Programs whose writes nobody can foresee, dumped while their memory is copied slowly.
//!
//! Whatever is copied early is a guess; these programs make the guess wrong in every way that we
//! could think of. What the image holds must be right all the same.

use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Pace, Program, Random, Started, finish, show, undisturbed};

/// A copy of the memory of a small workload takes some tenths of a second at this rate.
const SLOW: (&str, &str) = ("SOFTCUDA_PCIE_GBPS", "0.1");

fn dump(lab: &Lab, program: &Program, image: &str, args: &[&str]) -> Result<serde_json::Value> {
    let mut command = lab.gpucr();
    command.args(["dump", "--json", "--pid", &program.pid.to_string(), "-o", image]);
    let output = finish(command.args(args).env(SLOW.0, SLOW.1))?;
    ensure!(output.status.success(), "{}\n{}", show(&output), program.output());
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Dumped with `recopy` and ended, restored, dumped again with `cow` while it runs on; the program
/// that ran on and the one restored from the second image both end well.
fn dumped_while_it_writes(name: &str) -> Result<()> {
    let expected = undisturbed(name, &["--steps", "60"])?;
    let lab = Lab::new();
    let mut random = Random(name.bytes().map(u64::from).sum());
    // It goes on by itself, but not to its end before the dumps are done.
    let pace = Pace::new()?;
    pace.allow(50)?;
    let args = ["--steps", "60", "--step-delay-ms", "10", "--pace", pace.file()];
    let mut program = lab.start(name, &args)?;
    program.wait_for("ready")?;
    std::thread::sleep(Duration::from_millis(random.below(300)));
    let report = dump(&lab, &program, "first", &["--protocol", "recopy"])?;
    ensure!(report["protocol"] == "recopy", "{report}");
    // A restored program must print something to show that it lives.
    pace.allow(1)?;
    program = lab.restore(&lab.path("first"), program)?;
    std::thread::sleep(Duration::from_millis(random.below(100)));
    let report = dump(&lab, &program, "second", &["--protocol", "cow", "-R"])?;
    ensure!(report["protocol"] == "cow", "{report}");
    pace.allow(9)?;
    program.result().context("the program that ran on")?;
    ensure!(program.series() == expected, "the program that ran on: {:#?}", program.series());
    lab.rewind(&program, &lab.path("second"))?;
    program = lab.restore(&lab.path("second"), program)?;
    program.result().context("the program from its second image")?;
    ensure!(program.series() == expected, "{:#?}\nis not {expected:#?}", program.series());
    Ok(())
}

macro_rules! adversaries {
    ($($test:ident $name:literal,)*) => {
        $(
            #[test]
            fn $test() -> Result<()> {
                dumped_while_it_writes($name)
            }
        )*
        #[test]
        fn no_adversary_is_left_out() {
            assert_eq!(gpucr_tests::ADVERSARIES, [$($name),*]);
        }
    };
}

adversaries! {
    halves "halves",
    permuted "permuted",
    shifting "shifting",
    const_cast "const-cast",
    seldom "seldom",
    two_halves "two-halves",
    remade "remade",
    long_kernel "long-kernel",
    graph_nodes "graph-nodes",
    model "model",
    stamp "stamp",
}

/// A program whose every step waits for this test, and a dump that stops between pre-copy and gate.
struct Paced {
    lab: Lab,
    pace: Pace,
    program: Program,
}

/// What a restored program came to.
struct Ended {
    result: Result<String>,
    series: Vec<String>,
    output: String,
}

const STEPS: [&str; 2] = ["--steps", "8"];

impl Paced {
    /// Starts the program.
    fn start(name: &str) -> Result<Self> {
        let lab = Lab::new();
        let pace = Pace::new()?;
        let args = [&STEPS[..], &["--pace", pace.file()]].concat();
        let mut program = lab.start(name, &args)?;
        program.wait_for("ready")?;
        Ok(Self { lab, pace, program })
    }

    /// Starts a dump with these faults and waits until the pre-copy is over. `hold` lasts until [`dumped`](Self::dumped).
    fn precopied(&self, faults: &str) -> Result<Started> {
        let log = std::fs::File::create(self.lab.path("dump.log"))?;
        let mut command = self.lab.gpucr();
        command
            .args(["dump", "--json", "--protocol", "recopy", "-o", "image"])
            .args(["--pid", &self.program.pid.to_string()])
            .env("GPUCR_LOG", "gpucr_core=debug")
            .env("NO_COLOR", "1")
            .env("GPUCR_FAULT", faults)
            .env("GPUCR_FAULT_FILE", self.lab.path("go"))
            .stdout(std::fs::File::create(self.lab.path("report"))?)
            .stderr(log.try_clone()?)
            .stdin(Stdio::null());
        let child = Started::spawn(&mut command)?;
        let deadline = Instant::now() + Duration::from_secs(60);
        let said = || std::fs::read_to_string(self.lab.path("dump.log")).unwrap_or_default();
        while !said().contains("phase=\"gate\"") {
            ensure!(Instant::now() < deadline, "no pre-copy in time: {}", said());
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(child)
    }

    /// Lets a dump go on that is held up, waits for its end and gives its report.
    fn dumped(&self, mut dump: Started) -> Result<serde_json::Value> {
        std::fs::write(self.lab.path("go"), "")?;
        let status = dump.wait()?;
        let said = std::fs::read_to_string(self.lab.path("dump.log"))?;
        ensure!(status.success(), "{status}: {said}");
        Ok(serde_json::from_slice(&std::fs::read(self.lab.path("report"))?)?)
    }

    /// Restores the image and lets the program go on to its end.
    fn restored(self) -> Result<Ended> {
        // It prints nothing, and so shows no sign of life, before it may go on.
        self.pace.allow(8)?;
        let mut program = self.lab.restore(&self.lab.path("image"), self.program)?;
        let result = program.result();
        Ok(Ended { result, series: program.series(), output: program.output() })
    }
}

/// All memory stays unchanged while it is copied, and all of it changes once before the program is
/// stopped: every guess is wrong, is found to be, and is counted.
#[test]
fn every_wrong_guess_is_found_and_counted() -> Result<()> {
    let expected = undisturbed("seldom", &STEPS)?;
    let mut paced = Paced::start("seldom")?;
    paced.pace.allow(2)?;
    paced.program.wait_for("step 3 ")?;
    let dump = paced.precopied("hold:gate")?;
    paced.pace.allow(1)?;
    paced.program.wait_for("step 4 ")?;
    let report = paced.dumped(dump)?;
    let count = |name: &str| report["validation"][name].as_u64().context("a count");
    // Eight pools of two chunks; a few small allocations share one that stays unchanged.
    ensure!(count("misspeculated")? == 16, "{report}");
    ensure!(count("recopied")? == 16, "{report}");
    ensure!((16..20).contains(&count("predicted_clean")?), "{report}");
    let ended = paced.restored()?;
    ended.result?;
    ensure!(ended.series == expected, "{:#?}\nis not {expected:#?}", ended.series);
    Ok(())
}

/// Without the check the image holds what the memory was before, and the program finds it.
#[test]
fn without_the_check_the_wrong_guess_is_in_the_image() -> Result<()> {
    let mut paced = Paced::start("seldom")?;
    paced.pace.allow(2)?;
    paced.program.wait_for("step 3 ")?;
    let dump = paced.precopied("hold:gate,skip:validate")?;
    paced.pace.allow(1)?;
    paced.program.wait_for("step 4 ")?;
    let report = paced.dumped(dump)?;
    ensure!(report["validation"].is_null(), "{report}");
    let ended = paced.restored()?;
    ensure!(ended.result.is_err(), "the program found nothing wrong: {:?}", ended.result);
    ensure!(ended.output.contains("is wrong"), "{}", ended.output);
    Ok(())
}

/// A kernel that was launched before the pre-copy and writes until after it.
#[test]
fn a_kernel_may_outlast_the_pre_copy() -> Result<()> {
    let expected = undisturbed("long-kernel", &STEPS)?;
    let mut paced = Paced::start("long-kernel")?;
    paced.pace.allow(2)?;
    paced.program.wait_for("step 2 ")?;
    // The third kernel writes from here on, or soon.
    std::thread::sleep(Duration::from_millis(50));
    let dump = paced.precopied("")?;
    // The gate is closed at once, and waits for the kernel.
    std::thread::sleep(Duration::from_millis(500));
    ensure!(!paced.program.output().contains("step 3 "), "the kernel ended before the pre-copy");
    paced.pace.allow(1)?;
    let report = paced.dumped(dump)?;
    ensure!(report["precopied_chunks"].as_u64() > Some(8), "{report}");
    let ended = paced.restored()?;
    ended.result?;
    ensure!(ended.series == expected, "{:#?}\nis not {expected:#?}", ended.series);
    Ok(())
}
