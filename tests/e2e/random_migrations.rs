//! Migrations over a link that is slow at random, and of which something is lost at a random moment, or a side is killed:
//! never do two programs run, never none, and whatever runs ends as if nobody had touched it. The destination has a network
//! and pids of its own or not; a log goes along to it or not, and the source keeps an image or not.
//!
//!     GPUCR_RANDOM_DUMPS=500 cargo nextest run -p gpucr-tests -E 'binary(random_migrations)' --no-capture
//!     GPUCR_RANDOM_SEED=17 cargo nextest run …        # from this seed on; a failure names its seed
//!
//! What loses and delays packets below TCP is `benches/host/migrate.py --netem`: to those above it that is a link which
//! stands still now and then, as here.

use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migrated::{Elsewhere, End, end_of, is_so_there};
use gpucr_tests::migration::{Pair, Side, Sides, put_elsewhere};
use gpucr_tests::relay::{CHUNK, Loss, OnLink, OnStreams, PIECE, Plan, Relay};
use gpucr_tests::{Lab, Program, Random, at_random, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
/// What the source sends: hello, offer, which chunks are lacking, manifest, commit, layout, contents, and others.
const OF_SOURCE: [u64; 9] = [0, 1, 4, 6, 8, 13, 14, CHUNK, PIECE];
/// What the destination sends: hello, accept, which chunks it lacks, prepared, running, and signs of life.
const OF_DESTINATION: [u64; 6] = [0, 2, 5, 7, 9, 12];
/// Of these there are many.
const MANY: [u64; 3] = [4, 5, CHUNK];
/// Streams, where there are any.
const STREAMS: u64 = 3;
/// The destination says about as much on a stream.
const LITTLE: u64 = 600;

/// Where a program has its log that goes along.
const ELSEWHERE: Elsewhere = Elsewhere { folder: "data", there: "there" };

fn draw_loss(random: &mut Random) -> Loss {
    match random.below(6) {
        0 => Loss::Cut,
        1 => Loss::Silence,
        2 => Loss::HalfOpen,
        3 => Loss::Stall(random.below(1500)),
        4 => Loss::KillSource(random.below(300)),
        _ => Loss::KillDestination(random.below(300)),
    }
}

fn draw_link(random: &mut Random) -> OnLink {
    let (loss, of_source) = (draw_loss(random), random.below(2) == 0);
    let kinds = if of_source { &OF_SOURCE[..] } else { &OF_DESTINATION };
    let kind = kinds[random.below(kinds.len() as u64) as usize];
    let number = if MANY.contains(&kind) { random.below(8) } else { 0 };
    OnLink { loss, of_source, kind, number, after: random.below(1001) }
}

fn draw_streams(random: &mut Random) -> OnStreams {
    let (loss, of_source) = (draw_loss(random), random.below(8) > 0);
    // As often in the first bytes as among many.
    let most = if of_source { 1 << random.below(24) } else { LITTLE };
    let (is_all, number) = (random.below(3) == 0, random.below(STREAMS) as usize);
    OnStreams { loss, is_all, number: Some(number), of_source, after: random.below(most) }
}

/// What is drawn besides, from numbers of its own.
#[derive(Debug, Clone, Copy)]
struct Besides {
    /// The program has its log in a folder that is empty at the destination, and the log goes along.
    copies: bool,
    /// The source keeps an image until the program runs.
    keeps: bool,
}

impl Besides {
    fn draw(seed: u64) -> Self {
        let mut random = Random(!seed);
        Self { copies: random.below(2) == 0, keeps: random.below(2) == 0 }
    }

    fn start(self, lab: &Lab, workload: &str) -> Result<Program> {
        if !self.copies {
            return lab.at_work(workload, &ARGS);
        }
        std::fs::create_dir(lab.path(ELSEWHERE.folder))?;
        lab.at_work_with_files("", "data/log", workload, &ARGS)
    }

    fn prepare(self, lab: &Lab, pair: &mut Pair) -> Result<()> {
        if self.copies {
            pair.source.args(["--files", "copy"]);
            let Elsewhere { folder, there } = ELSEWHERE;
            put_elsewhere(lab, &mut pair.destination, folder, there)?;
            pair.destination.arg("--files-below").arg(lab.path(folder));
        }
        if self.keeps {
            pair.source.args(["--safety-image", "safe"]);
        }
        Ok(())
    }

    fn elsewhere(self) -> Option<Elsewhere> {
        self.copies.then_some(ELSEWHERE)
    }

    /// The image that the source keeps is there as long as it may be needed, and whole if it is.
    fn is_kept(self, lab: &Lab, sides: &Sides, end: End) -> Result<()> {
        let (safe, source) = (lab.path("safe"), sides.source.status);
        let is_whole = || {
            let verified = lab.run(["verify", "safe"]);
            verified.is_ok_and(|verified| verified.status.success())
        };
        if source.signal() == Some(libc::SIGKILL) {
            // Its watchdog removes what is not complete.
            until("what there is of an image is whole", || !safe.exists() || is_whole())?;
            // It may have been killed while it removed the image: the rest has a name that no image has.
            let names = std::fs::read_dir(lab.path(""))?;
            let names = names.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
            let names = names.collect::<Result<Vec<String>>>()?;
            let rest = names.iter().filter(|name| name.starts_with(".safe.removed-"));
            let allowed = ["data", "log", "safe", "store", "there"].into_iter();
            let allowed: Vec<&str> = allowed.chain(rest.map(String::as_str)).collect();
            return lab.holds_only(&allowed);
        }
        let is_here = matches!(end, End::Stays | End::StaysWithImage | End::StaysEitherWay);
        let is_needed = self.keeps && !is_here && !source.success();
        ensure!(safe.exists() == is_needed, "the image that the source keeps: {}", !is_needed);
        ensure!(!is_needed || is_whole(), "it is whole");
        Ok(())
    }
}

/// Migrates the program of a seed. Gives 1 if what was planned has happened.
fn migrated(seed: u64) -> Result<u64> {
    let mut random = Random(seed);
    let workload = ["sgd", "adam", "launcher", "threads"][random.below(4) as usize];
    let (is_apart, has_streams) = (random.below(2) == 0, random.below(2) == 0);
    let (pause, swallows) = ([300, 3000, 20_000][random.below(3) as usize], random.below(2) == 0);
    let mut plan = Plan { pause, swallows, ..Plan::default() };
    // A network of its own has no way to this one.
    let has_streams = has_streams && !is_apart;
    match has_streams && random.below(2) == 0 {
        true => plan.streams = Some(draw_streams(&mut random)),
        false => plan.link = Some(draw_link(&mut random)),
    }
    let expected = undisturbed(workload, &ARGS[..2])?;
    let lab = Lab::new();
    let besides = Besides::draw(seed);
    let mut program = besides.start(&lab, workload)?;
    std::thread::sleep(Duration::from_millis(random.below(300)));
    let mut pair = match is_apart {
        true => Pair::apart(&lab, &program)?,
        false => Pair::new(&lab, &program)?,
    };
    besides.prepare(&lab, &mut pair)?;
    pair.source.args(["--silence", "3s"]);
    pair.destination.args(["--silence", "3s"]);
    if has_streams {
        pair.source.args(["--streams", &STREAMS.to_string(), "--streams-to", "127.0.0.1"]);
        pair.destination.args(["--streams-at", "127.0.0.1:0"]);
    }
    let mut relay = Relay::between(&mut pair, plan, &mut random)?;
    let Pair { mut source, mut destination, sockets } = pair;
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop(sockets);
    relay.started(source.pid(), destination.pid());
    until("both sides end", || {
        program.is_running();
        !source.is_at_work() & !destination.is_at_work()
    })?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    let has_happened = relay.has_happened();
    drop(relay);
    let how = format!("{workload}, {plan:?}, apart {is_apart}, {besides:?}");
    let told = || format!("{how}: {}", sides.show());
    let end = end_of(&lab, &mut program).with_context(told)?;
    let both = sides.source.status.success() && sides.destination.status.success();
    ensure!(!both || end == End::Goes, "{end:?}: {}", told());
    // A side of a very slow machine may be silent too.
    let is_silent = sides.show().contains("was silent");
    ensure!(both || has_happened || is_silent, "nothing was lost: {}", told());
    let told = || format!("{end:?}: {}", told());
    besides.is_kept(&lab, &sides, end).with_context(told)?;
    is_so_there(&lab, besides.elsewhere(), program, end, &expected).with_context(told)?;
    if std::env::var_os("GPUCR_RANDOM_TELL").is_some() {
        eprintln!("{seed}: {end:?} {has_happened} {how}");
    }
    Ok(u64::from(has_happened))
}

#[test]
fn a_migration_of_which_anything_is_lost_leaves_one_program() -> Result<()> {
    let lost = at_random(6, 1, "-E 'binary(random_migrations)'", migrated)?;
    println!("something was lost, stood still, or was killed in {lost} of them");
    Ok(())
}
