//! Programs of several ranks: the first process starts one for each other rank, and all of them do the same.

use std::process::ExitStatus;

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum as _;

use super::bootstrap::Bootstrap;
use super::communicator::Communicator;
use super::options::{Sharing, Team};
use crate::gpu::Gpu;
use crate::numbers::Sequence;
use crate::report::Run;
use crate::second::Second;

/// Where another rank finds what it is.
const ENV: &str = "WORKLOAD_RANK";
/// Parts of a step in which nobody waits for the device, at most.
const PARTS: u32 = 2;
/// What the first rank says instead of the number of a step.
const END: u32 = u32::MAX;

/// A rank.
pub(crate) struct Member {
    pub(crate) gpu: Gpu,
    pub(crate) bootstrap: Bootstrap,
    /// All ranks that are left.
    pub(crate) members: Vec<u32>,
    pub(crate) seed: u32,
    /// In which step a rank ends early, if one does.
    pub(crate) ends_at: u32,
    sharing: Sharing,
    decide: Sequence,
}

impl Member {
    fn new(
        bootstrap: Bootstrap,
        ranks: u32,
        seed: u32,
        ends_at: u32,
        sharing: Sharing,
    ) -> Result<Self> {
        let gpu = Gpu::open_at(bootstrap.rank())?;
        let (members, decide) = ((0..ranks).collect(), Sequence::new(seed));
        Ok(Self { gpu, bootstrap, members, seed, ends_at, sharing, decide })
    }

    /// A communicator of all.
    pub(crate) fn communicator(&mut self, capacity: u32) -> Result<Communicator> {
        let members = self.members.clone();
        Communicator::new(&self.gpu, &mut self.bootstrap, members, self.sharing, capacity)
    }

    /// How many parts the next step has, and who is ahead in it: all ranks draw the same.
    fn draw(&mut self) -> (u32, u32) {
        let leader = self.decide.below(self.members.len() as u32);
        (1 + self.decide.below(PARTS), self.members[leader as usize])
    }

    fn answers(&mut self, said: &str) -> Result<Vec<Vec<u8>>> {
        self.bootstrap.all_gather(&self.members, said.as_bytes())
    }
}

/// A step, as all ranks know it.
pub(crate) struct Step {
    /// Counted from 0.
    pub(crate) number: u32,
    /// Parts in which nobody waits for the device.
    pub(crate) parts: u32,
    /// Whether this rank launches everything at once, and the others later.
    pub(crate) is_ahead: bool,
}

/// What each rank does.
pub(crate) trait Program: Sized {
    /// The workload's.
    const NAME: &'static str;
    /// How many there are if nobody says.
    const RANKS: u32;

    /// Makes what a rank has.
    fn new(member: &mut Member) -> Result<Self>;

    /// Makes a step: what all ranks must say of it alike.
    fn step(&mut self, member: &mut Member, step: &Step) -> Result<String>;

    /// Repeats a step on the host, of all ranks, and says the same. The first rank alone does it.
    fn repeat(&mut self, member: &Member, step: &Step) -> Result<String>;

    /// The final state.
    fn last(&self) -> Result<Vec<u32>>;

    /// Whether it is right how a rank ended.
    fn ended_well(&self, _rank: u32, status: ExitStatus) -> bool {
        status.success()
    }
}

fn name_of(value: impl clap::ValueEnum) -> Result<String> {
    Ok(value.to_possible_value().context("a name")?.get_name().to_owned())
}

/// Runs a workload of several ranks, in each of them.
pub(crate) fn run<P: Program>(run: &mut Run) -> Result<()> {
    if let Ok(given) = std::env::var(ENV) {
        return another::<P>(&given);
    }
    let steps = run.plan(100, 400, 1000);
    let Team { ranks, sharing, wire, ends_at } = run.team;
    let ends_at = ends_at.unwrap_or(steps / 10 * 9);
    let ranks = ranks.unwrap_or(P::RANKS);
    let mut others = Vec::new();
    let start = |rank: u32, link: &str| -> Result<()> {
        let given = format!("{rank} {ranks} {} {ends_at} {} {link}", run.seed, name_of(sharing)?);
        others.push(Second::start(P::NAME, ENV, &given)?);
        Ok(())
    };
    let bootstrap = Bootstrap::lead(ranks, wire, start)?;
    let mut member = Member::new(bootstrap, ranks, run.seed, ends_at, sharing)?;
    let mut program = P::new(&mut member)?;
    member.bootstrap.barrier(&member.members)?;
    others.iter().try_for_each(|other| run.line(format_args!("child pid={}", other.pid())))?;
    run.ready()?;
    for number in 0..steps {
        let (step, said) =
            step(&mut member, &mut program, number)?.context("the first rank says when")?;
        let all = member.answers(&said)?;
        ensure!(all.iter().all(|other| *other == said.as_bytes()), "step {number}: ranks differ");
        let expected = program.repeat(&member, &step)?;
        ensure!(said == expected, "step {number}: {said} instead of {expected}");
        run.step(number, &said)?;
    }
    step(&mut member, &mut program, END)?;
    for (rank, other) in (1..).zip(others) {
        let status = other.status()?;
        ensure!(program.ended_well(rank, status), "rank {rank} ended with {status}");
    }
    run.absorb(&program.last()?);
    run.finish()
}

/// Makes the step that the first rank says; none after the last.
fn step<P: Program>(
    member: &mut Member,
    program: &mut P,
    number: u32,
) -> Result<Option<(Step, String)>> {
    let said = member.answers(&number.to_string())?;
    let number: u32 = std::str::from_utf8(&said[0])?.parse()?;
    if number == END {
        return Ok(None);
    }
    let (parts, leader) = member.draw();
    let step = Step { number, parts, is_ahead: leader == member.bootstrap.rank() };
    let said = program.step(member, &step)?;
    Ok(Some((step, said)))
}

/// Another rank: makes the steps that the first one says.
fn another<P: Program>(given: &str) -> Result<()> {
    let words: Vec<&str> = given.splitn(6, ' ').collect();
    let [rank, ranks, seed, ends_at, sharing, link] = words[..] else { bail!("what this rank is") };
    let sharing = Sharing::from_str(sharing, false).map_err(anyhow::Error::msg)?;
    let bootstrap = Bootstrap::join(rank.parse()?, link)?;
    let mut member =
        Member::new(bootstrap, ranks.parse()?, seed.parse()?, ends_at.parse()?, sharing)?;
    let mut program = P::new(&mut member)?;
    member.bootstrap.barrier(&member.members)?;
    while let Some((_, said)) = step(&mut member, &mut program, 0)? {
        member.answers(&said)?;
    }
    Ok(())
}
