//! Groups of processes that share device memory: each is dumped several times at random moments, restored in a random
//! way, and must end as if nobody had touched it.
//!
//!     GPUCR_RANDOM_DUMPS=200 cargo nextest run -p gpucr-tests -E 'binary(random_groups)' --run-ignored all --no-capture
//!     GPUCR_RANDOM_SEED=17 cargo nextest run …        # from this seed on; a failure names its seed
//!     GPUCR_RANDOM_GROUPS=ring,ahead cargo nextest run …        # of these alone

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{GROUPS, Lab, Pace, Program, Random, at_random, finish, show, undisturbed};

/// Dumps of each group.
const DUMPS: u64 = 4;
/// Steps of a group, few enough that each is printed, and those that it makes before its last dump at most.
const STEPS: [&str; 2] = ["--steps", "99"];
const BEFORE_THE_END: usize = 90;
/// How often a group is dumped of which a process ends meanwhile, until that works.
const TRIES: u32 = 5;

/// One dump with a random protocol, at a random moment.
fn dump(
    lab: &Lab,
    (name, program): (&str, &Program),
    image: &str,
    last: bool,
    random: &mut Random,
) -> Result<()> {
    std::thread::sleep(Duration::from_millis(random.below(250)));
    let protocols = if last { ["stop", "recopy", "cow"] } else { ["stop", "recopy", "recopy"] };
    let protocol = protocols[random.below(3) as usize];
    let mut tries = 0;
    let output = loop {
        let mut command = lab.gpucr();
        command.args(["dump", "--json", "--pid", &program.pid.to_string(), "-o", image]);
        command.args(["--protocol", protocol]);
        if last {
            command.arg("--leave-running");
        }
        let output = finish(&mut command)?;
        tries += 1;
        // A rank may end during the dump, or have ended while the others have memory of it open: then they run on, and
        // can be dumped soon.
        let said = show(&output);
        let all_go_on =
            said.contains("Nothing was changed") || said.contains("program keeps running");
        if output.status.success() || name != "survivors" || !all_go_on || tries == TRIES {
            break output;
        }
        std::thread::sleep(Duration::from_millis(200));
    };
    ensure!(output.status.success(), "{protocol}: {}\n{}", show(&output), program.output());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(report["protocol"] == protocol, "{report}");
    Ok(())
}

fn restore(lab: &Lab, image: &str, old: Program, random: &mut Random) -> Result<Program> {
    let ways = [&[][..], &["--on-demand"], &["--share"]];
    let way = ways[random.below(3) as usize];
    let restored = lab.restore_as(&lab.path(image), old, way, &[]);
    restored.with_context(|| format!("{image} {way:?}"))
}

/// The groups that are drawn.
fn groups() -> Vec<String> {
    match std::env::var("GPUCR_RANDOM_GROUPS") {
        Ok(names) => names.split(',').map(str::to_owned).collect(),
        Err(_) => GROUPS.map(str::to_owned).into(),
    }
}

/// Dumps the group of a seed [`DUMPS`] times. Restored from each dump it goes on to the next; after the last one both
/// it and the image end well.
fn dumped_and_restored(seed: u64) -> Result<()> {
    let mut random = Random(seed);
    let groups = groups();
    let name = groups[random.below(groups.len() as u64) as usize].as_str();
    let seed_text = seed.to_string();
    let ends_at = random.below(BEFORE_THE_END as u64).to_string();
    // Other workloads do not look at when a rank ends.
    let args = [&STEPS[..], &["--seed", &seed_text, "--ends-at", &ends_at]].concat();
    let expected = undisturbed(name, &args)?;
    let lab = Lab::of(name);
    let pace = Pace::new()?;
    pace.allow(BEFORE_THE_END)?;
    let args = [&args[..], &["--step-delay-ms", "10", "--pace", pace.file()]].concat();
    let mut program = lab.start(name, &args)?;
    program.wait_for("ready")?;
    for number in 1..DUMPS {
        let image = format!("image-{number}");
        dump(&lab, (name, &program), &image, false, &mut random)
            .with_context(|| name.to_owned())?;
        // A restored program must print something to show that it lives.
        pace.allow(1)?;
        program = restore(&lab, &image, program, &mut random).with_context(|| name.to_owned())?;
    }
    dump(&lab, (name, &program), "last", true, &mut random).with_context(|| name.to_owned())?;
    pace.allow_all()?;
    program.result()?;
    ensure!(
        program.series() == expected,
        "{name} ran on to {:#?}\nnot {expected:#?}",
        program.series()
    );
    lab.rewind(&program, &lab.path("last"))?;
    program = restore(&lab, "last", program, &mut random).with_context(|| name.to_owned())?;
    program.result()?;
    let series = program.series();
    ensure!(series == expected, "{name} restored: {series:#?}\nnot {expected:#?}");
    Ok(())
}

#[test]
#[ignore = "for as long as somebody wants: GPUCR_RANDOM_DUMPS"]
fn groups_end_as_if_nobody_had_touched_them() -> Result<()> {
    let filter = "-E 'binary(random_groups)' --run-ignored all";
    at_random(20, DUMPS, filter, |seed| dumped_and_restored(seed).map(|()| 0)).map(|_| ())
}
