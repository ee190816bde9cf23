//! Migrations over a link that is slow at random, and that is lost at a random moment: never do two programs run, never
//! none, and whatever runs ends as if nobody had touched it.
//!
//!     GPUCR_RANDOM_DUMPS=500 cargo nextest run -p gpucr-tests -E 'binary(random_migrations)' --no-capture
//!     GPUCR_RANDOM_SEED=17 cargo nextest run …        # from this seed on; a failure names its seed
//!
//! What loses and delays packets below TCP is `benches/host/migrate.py --netem`: to those above it that is a link which
//! stands still now and then, as here.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::migration::{End, Pair, Side, Sides, connect, end_of, is_so};
use gpucr_tests::{Lab, Random, at_random, undisturbed, until};

const ARGS: [&str; 4] = ["--steps", "100", "--step-delay-ms", "20"];
/// Kinds of messages have numbers below these.
const CHUNK: u64 = 256;
const PIECE: u64 = 257;
/// What the source sends: hello, offer, which chunks are lacking, manifest, commit, layout, contents, and others.
const OF_SOURCE: [u64; 9] = [0, 1, 4, 6, 8, 13, 14, CHUNK, PIECE];
/// What the destination sends: hello, accept, which chunks it lacks, prepared, running, and signs of life.
const OF_DESTINATION: [u64; 6] = [0, 2, 5, 7, 9, 12];
/// Of these there are many.
const MANY: [u64; 3] = [4, 5, CHUNK];
/// The longest pause before a frame goes on, in microseconds.
const PAUSE: u64 = 3000;

/// What becomes of a link.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Loss {
    /// It is closed.
    Cut,
    /// Nothing goes in either direction any more, and nobody is told.
    Silence,
    /// Nothing goes in this direction any more.
    HalfOpen,
    /// It stands still for a while, for less time than a side may be silent.
    Stall,
}

/// When that happens, in one direction.
#[derive(Debug, Clone, Copy)]
struct Plan {
    loss: Loss,
    /// In a frame of this kind.
    kind: u64,
    /// The how many-th.
    number: u64,
    /// After so many thousandths of it.
    after: u64,
}

impl Plan {
    fn draw(random: &mut Random, of_source: bool) -> Self {
        let losses = [Loss::Cut, Loss::Silence, Loss::HalfOpen, Loss::Stall];
        let loss = losses[random.below(4) as usize];
        let kinds = if of_source { &OF_SOURCE[..] } else { &OF_DESTINATION };
        let kind = kinds[random.below(kinds.len() as u64) as usize];
        let number = if MANY.contains(&kind) { random.below(8) } else { 0 };
        Self { loss, kind, number, after: random.below(1001) }
    }
}

/// What both directions of a link know.
struct Relay {
    /// Nothing goes on any more.
    is_silent: AtomicBool,
    sockets: [UnixStream; 2],
    /// What has happened.
    lost: Mutex<Option<Loss>>,
}

impl Relay {
    fn cut(&self) {
        for socket in &self.sockets {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// Passes on what comes from one of the sockets until there is no more.
    fn pass(&self, from: usize, plan: Option<Plan>, random: &mut Random) {
        let _ = self.pass_frames(from, plan, random);
        // Where nothing goes on, nobody hears of an end either.
        if !self.is_silent.load(Ordering::Relaxed) {
            self.cut();
        }
    }

    fn pass_frames(
        &self,
        from: usize,
        plan: Option<Plan>,
        random: &mut Random,
    ) -> std::io::Result<()> {
        let (mut from, mut to) = (&self.sockets[from], &self.sockets[1 - from]);
        let mut seen = 0;
        let mut is_half_open = false;
        loop {
            let frame = next_frame(&mut from)?;
            std::thread::sleep(Duration::from_micros(random.below(PAUSE)));
            if is_half_open || self.is_silent.load(Ordering::Relaxed) {
                continue;
            }
            let is_it = plan.is_some_and(|plan| plan.kind == kind(&frame));
            seen += u64::from(is_it);
            let Some(plan) = plan.filter(|plan| is_it && seen == plan.number + 1) else {
                to.write_all(&frame)?;
                continue;
            };
            let (before, rest) = frame.split_at(frame.len() * plan.after as usize / 1000);
            to.write_all(before)?;
            *self.lost.lock().expect("no panic") = Some(plan.loss);
            match plan.loss {
                Loss::Cut => return Ok(()),
                Loss::Silence => self.is_silent.store(true, Ordering::Relaxed),
                Loss::HalfOpen => is_half_open = true,
                Loss::Stall => {
                    std::thread::sleep(Duration::from_millis(random.below(1500)));
                    to.write_all(rest)?;
                }
            }
        }
    }
}

/// A whole frame, with its length.
fn next_frame(from: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    from.read_exact(&mut frame)?;
    let len = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]);
    frame.resize(4 + len as usize, 0);
    from.read_exact(&mut frame[4..])?;
    Ok(frame)
}

fn kind(frame: &[u8]) -> u64 {
    match frame[4] {
        0 => u64::from(frame[5]),
        1 => PIECE,
        _ => CHUNK,
    }
}

/// Has the two sides of a pair talk through a relay. One of them loses the link, as planned. The socket is the source's,
/// and has to be open until that has started.
fn through_relay(
    pair: &mut Pair,
    plan: Plan,
    of_source: bool,
    random: &mut Random,
) -> Result<(UnixStream, Arc<Relay>, Vec<JoinHandle<()>>)> {
    let (to_source, sources) = UnixStream::pair()?;
    let to_destination = UnixStream::from(pair.sockets[0].try_clone()?);
    connect(&mut pair.source, &sources);
    let relay = Arc::new(Relay {
        is_silent: AtomicBool::default(),
        sockets: [to_source, to_destination],
        lost: Mutex::default(),
    });
    let threads = [0, 1].map(|from| {
        let (relay, mut random) = (relay.clone(), Random(random.below(u64::MAX)));
        let plan = (of_source == (from == 0)).then_some(plan);
        std::thread::spawn(move || relay.pass(from, plan, &mut random))
    });
    Ok((sources, relay, threads.into()))
}

/// Migrates the program of a seed. Gives 1 if the link was lost.
fn migrated(seed: u64) -> Result<u64> {
    let mut random = Random(seed);
    let workload = ["sgd", "adam", "launcher", "threads"][random.below(4) as usize];
    let (is_apart, of_source) = (random.below(2) == 0, random.below(2) == 0);
    let plan = Plan::draw(&mut random, of_source);
    let expected = undisturbed(workload, &ARGS[..2])?;
    let lab = Lab::new();
    let mut program = lab.at_work(workload, &ARGS)?;
    std::thread::sleep(Duration::from_millis(random.below(300)));
    let mut pair = match is_apart {
        true => Pair::apart(&lab, &program)?,
        false => Pair::new(&lab, &program)?,
    };
    pair.source.args(["--silence", "3s"]);
    pair.destination.args(["--silence", "3s"]);
    if !is_apart && random.below(2) == 0 {
        pair.source.args(["--streams", "3", "--streams-to", "127.0.0.1"]);
        pair.destination.args(["--streams-at", "127.0.0.1:0"]);
    }
    let (sources, relay, threads) = through_relay(&mut pair, plan, of_source, &mut random)?;
    let Pair { mut source, mut destination, sockets } = pair;
    let (mut source, mut destination) = (Side::start(&mut source)?, Side::start(&mut destination)?);
    drop((sockets, sources));
    until("both sides end", || {
        program.is_running();
        !source.is_at_work() & !destination.is_at_work()
    })?;
    let sides = Sides { source: source.end()?, destination: destination.end()? };
    relay.cut();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let lost = *relay.lost.lock().expect("no panic");
    let told = || {
        format!(
            "{workload}, {plan:?} of the source {of_source}, apart {is_apart}: {}",
            sides.show()
        )
    };
    let end = end_of(&lab, &mut program).with_context(told)?;
    let both = sides.source.status.success() && sides.destination.status.success();
    ensure!(!both || end == End::Goes, "{end:?}: {}", told());
    // A side of a very slow machine may be silent too.
    let is_silent = sides.show().contains("was silent");
    ensure!(both || lost.is_some() || is_silent, "nothing was lost: {}", told());
    is_so(&lab, program, end, &expected).with_context(|| format!("{end:?}: {}", told()))?;
    Ok(u64::from(lost.is_some()))
}

#[test]
fn a_link_that_is_lost_at_any_moment_leaves_one_program() -> Result<()> {
    let lost = at_random(6, 1, "-E 'binary(random_migrations)'", migrated)?;
    println!("the link was lost, or stood still, in {lost} of them");
    Ok(())
}
