//! Three processes in a ring, whose kernels wait for each other: none of them ends before all have launched theirs. One
//! launches a number of them at once, and the others theirs one by one, some time later.

use std::io::{BufRead as _, BufReader, Lines, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::cuda::{Lookup, lookup};
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, read_at};
use crate::ipc::{Opened, offer, parsed};
use crate::numbers::{Sequence, filled, mix, mixer_round};
use crate::report::Run;

const MEET: &str = include_str!("kernels/meet.ptx");
const MIXER: &str = include_str!("kernels/mixer.ptx");
/// Where a process finds its number and the seed.
const ENV: &str = "WORKLOAD_AHEAD";
/// If this is set the first process launches nothing before the others have, and the pace allows the end of the step.
const LATE: &str = "WORKLOAD_LATE";
/// If this is set the first process is ahead in some steps: it launches half of what it has to, says so, and launches the
/// rest when the pace allows the end of the step, before the others know of anything.
const HALFWAY: &str = "WORKLOAD_HALFWAY";
/// Those steps.
const HALFWAY_STEPS: std::ops::Range<u32> = 60..70;
/// How many processes there are.
const RANKS: u32 = 3;
/// Words of the memory in which a process meets the others.
const BOX: usize = 64;
/// Words that each process changes besides.
const WORDS: u32 = 1 << 13;
/// So many meetings are launched at once at most.
const LEAD: u32 = 6;
/// A pause before a launch is shorter than this, in milliseconds.
const PAUSE: u32 = 10;

/// What a process has of its own.
struct Rank {
    gpu: Gpu,
    meet: Kernel,
    round: Kernel,
    _modules: [Module; 2],
    own: Buffer,
    words: Buffer,
    next: Option<Opened>,
    /// Meetings that it has launched.
    launched: u32,
    pauses: Sequence,
}

fn first_value(seed: u32, rank: u32) -> u32 {
    mix(seed ^ rank)
}

impl Rank {
    fn new(rank: u32, seed: u32) -> Result<Self> {
        let gpu = Gpu::open_at(rank)?;
        let modules = [Module::load(MEET)?, Module::load(MIXER)?];
        let mut words = [0u32; BOX];
        words[1] = first_value(seed, rank);
        let (meet, round) = (modules[0].kernel("meet")?, modules[1].kernel("mixer_round")?);
        let own = Buffer::holding(&words)?;
        let words = Buffer::holding(&filled(WORDS as usize, rank))?;
        let pauses = Sequence::new(seed.wrapping_add(rank));
        let (_modules, next, launched) = (modules, None, 0);
        Ok(Self { gpu, meet, round, _modules, own, words, next, launched, pauses })
    }

    /// Launches so many meetings, with a pause before each or at once.
    fn launch(&mut self, meetings: u32, pauses: bool) -> Result<()> {
        let next = self.next.as_ref().context("the next one is known")?.address;
        for _ in 0..meetings {
            if pauses {
                let pause = self.pauses.below(PAUSE);
                thread::sleep(Duration::from_millis(pause.into()));
            }
            self.launched += 1;
            self.meet.run(Shape::covering(1), args![&self.own, next, self.launched])?;
            self.round.run(Shape::covering(WORDS), args![&self.words, WORDS, self.launched])?;
        }
        Ok(())
    }

    /// What has come of all meetings so far.
    fn value(&self) -> Result<u32> {
        self.gpu.synchronize()?;
        Ok(read_at(self.own.address() + 4, 1)?[0])
    }

    /// The hash of the words that it has changed besides.
    fn hash(&self) -> Result<blake3::Hash> {
        let words: Vec<u32> = self.words.read()?;
        Ok(blake3::hash(crate::gpu::bytes_of(&words)))
    }
}

/// Another process, as the first one talks to it.
struct Other {
    child: Child,
    tell: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Other {
    fn start(rank: u32, seed: u32) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("ahead").env(ENV, format!("{rank} {seed}"));
        if lookup() == Lookup::GetProcAddress {
            command.arg("--get-proc-address");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let tell = child.stdin.take().context("the pipe is there")?;
        let lines = BufReader::new(child.stdout.take().context("the pipe is there")?).lines();
        Ok(Self { child, tell, lines })
    }

    fn hear(&mut self) -> Result<String> {
        self.lines.next().context("another process has ended")?.context("a line")
    }
}

/// Runs the workload.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    if let Ok(who) = std::env::var(ENV) {
        let (rank, seed) = who.split_once(' ').context("a number and a seed")?;
        return other(rank.parse()?, seed.parse()?);
    }
    let steps = run.plan(100, 400, 1000);
    let mut rank = Rank::new(0, run.seed)?;
    let others = (1..RANKS).map(|number| Other::start(number, run.seed));
    let mut others: Vec<Other> = others.collect::<Result<_>>()?;
    let mut handles = others.iter_mut().map(Other::hear).collect::<Result<Vec<_>>>()?;
    rank.next = Some(Opened::open(parsed(&handles[0])?)?);
    handles.push(offer(rank.own.address())?);
    for (other, next) in others.iter_mut().zip(&handles[1..]) {
        writeln!(other.tell, "{next}")?;
        ensure!(other.hear()? == "met", "it opens the next one's memory");
        run.line(format_args!("child pid={}", other.child.id()))?;
    }
    run.ready()?;
    let is_halfway = std::env::var_os(HALFWAY).is_some();
    let is_late = std::env::var_os(LATE).is_some();
    let mut decide = Sequence::new(run.seed);
    let mut values: Vec<u32> = (0..RANKS).map(|rank| first_value(run.seed, rank)).collect();
    let mut meetings = 0;
    for step in 0..steps {
        let lead = 1 + decide.below(LEAD);
        // Somebody is ahead: this process, or one of the others.
        let leader = decide.below(RANKS).max(u32::from(is_late));
        let is_halfway = is_halfway && HALFWAY_STEPS.contains(&step);
        let leader = if is_halfway { 0 } else { leader };
        if is_halfway {
            rank.launch(lead.div_ceil(2), false)?;
            run.line(format_args!("halfway {}", step + 1))?;
            run.last(step);
            rank.launch(lead / 2, false)?;
        } else if leader == 0 {
            rank.launch(lead, false)?;
        }
        for (number, other) in (1..).zip(&mut others) {
            writeln!(other.tell, "{lead} {}", u8::from(leader != number))?;
        }
        let launched = |others: &mut [Other]| {
            others.iter_mut().try_for_each(|other| {
                ensure!(other.hear()? == "launched", "no launch");
                Ok(())
            })
        };
        if is_late && leader != 0 {
            launched(&mut others)?;
            run.line(format_args!("behind {}", step + 1))?;
            run.last(step);
            rank.launch(lead, false)?;
        } else {
            if leader != 0 {
                rank.launch(lead, true)?;
            }
            launched(&mut others)?;
        }
        let mut seen = vec![rank.value()?];
        for other in &mut others {
            seen.push(u32::from_str_radix(&other.hear()?, 16)?);
        }
        for _ in 0..lead {
            meetings += 1;
            let before = values.clone();
            for (number, value) in values.iter_mut().enumerate() {
                let previous = before[(number + before.len() - 1) % before.len()];
                *value = mix(value.wrapping_add(meetings)) ^ previous;
            }
        }
        ensure!(seen == values, "step {step}: {seen:08x?} instead of {values:08x?}");
        run.step(step, format_args!("{lead} {:08x}", seen[1]))?;
    }
    let wanted = |number| {
        let mut words = filled(WORDS as usize, number);
        (1..=meetings).for_each(|meeting| mixer_round(&mut words, meeting));
        blake3::hash(crate::gpu::bytes_of(&words))
    };
    ensure!(rank.hash()? == wanted(0), "the words of the first process are wrong");
    for (number, Other { mut child, tell, mut lines }) in (1..).zip(others) {
        drop(tell);
        let last = lines.next().context("it says its hash")??;
        ensure!(last == wanted(number).to_string(), "the words of process {number} are wrong");
        ensure!(child.wait()?.success(), "process {number} failed");
    }
    run.absorb(&values);
    run.finish()
}

/// Another process: launches what it is told to.
fn other(rank: u32, seed: u32) -> Result<()> {
    let mut rank = Rank::new(rank, seed)?;
    println!("{}", offer(rank.own.address())?);
    let mut lines = std::io::stdin().lines();
    let next = lines.next().context("the next one's handle")??;
    rank.next = Some(Opened::open(parsed(next.trim())?)?);
    println!("met");
    for line in lines {
        let line = line?;
        let (meetings, pauses) = line.trim().split_once(' ').context("two numbers")?;
        rank.launch(meetings.parse()?, pauses == "1")?;
        println!("launched");
        println!("{:08x}", rank.value()?);
    }
    println!("{}", rank.hash()?);
    Ok(())
}
