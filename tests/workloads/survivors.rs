//! Ranks of which one ends early, without a word to the others: their operations with it end with an error, and they begin
//! the step again without it.

use std::process::ExitStatus;

use anyhow::{Context as _, Result};

use crate::args;
use crate::collective::{Communicator, Lost, Member, Program, Step};
use crate::cuda::{STREAM_NON_BLOCKING, check, driver};
use crate::gpu::{Buffer, Kernel, Module, Shape, Stream};
use crate::numbers::{filled, mix, mixer_round, mixer_sum};

const MIXER: &str = include_str!("kernels/mixer.ptx");
/// The status with which the last rank ends.
const STATUS: i32 = 7;
const WORDS: u32 = 1 << 10;

/// What a rank has.
pub(crate) struct Survivors {
    /// None for a moment, while the old one is given up for a new one.
    communicator: Option<Communicator>,
    stream: Stream,
    round: Kernel,
    _module: Module,
    /// What holds since the last step, and what a step works on.
    state: Buffer,
    work: Buffer,
    last_rank: u32,
    /// Parts of all steps so far, on the device and on the host.
    number: u32,
    repeated: u32,
    host: Vec<u32>,
}

/// What a rank mixes its words with.
fn tag(seed: u32, rank: u32, number: u32) -> u32 {
    mix(mix(seed ^ rank).wrapping_add(number))
}

impl Survivors {
    fn copy(&self, to: &Buffer, from: &Buffer) -> Result<()> {
        let (to, from, bytes) = (to.address(), from.address(), from.bytes());
        // SAFETY: takes no host pointers; the driver checks the addresses.
        let code = unsafe { (driver().cuMemcpyDtoDAsync)(to, from, bytes, self.stream.0) };
        check("cuMemcpyDtoDAsync", code)
    }

    /// A step from what holds since the last one, or the error that a rank has ended.
    fn try_step(&mut self, member: &Member, step: &Step) -> Result<()> {
        self.copy(&self.work, &self.state)?;
        let communicator = self.communicator.as_mut().context("it is there")?;
        communicator.set_ahead(step.is_ahead);
        for part in 0..step.parts {
            let tag = tag(member.seed, member.bootstrap.rank(), self.number + part);
            let arguments = args![&self.work, WORDS, tag];
            self.round.run_on(&self.stream, Shape::covering(WORDS), arguments)?;
            let work = self.work.address();
            communicator.all_reduce(&self.stream, work, work, WORDS)?;
        }
        communicator.wait(&self.stream)?;
        self.copy(&self.state, &self.work)?;
        self.stream.synchronize()?;
        self.number += step.parts;
        Ok(())
    }

    fn go_on_without(&mut self, member: &mut Member, lost: &Lost) -> Result<()> {
        member.members.retain(|rank| !lost.has(*rank));
        let old = self.communicator.take().context("it is there")?;
        self.communicator = Some(old.without(&member.gpu, &mut member.bootstrap, lost)?);
        Ok(())
    }
}

fn say(words: &[u32], ranks: usize) -> String {
    format!("{:016x} {ranks} ranks", mixer_sum(words))
}

impl Program for Survivors {
    const NAME: &'static str = "survivors";
    const RANKS: u32 = 4;

    fn new(member: &mut Member) -> Result<Self> {
        let communicator = member.communicator(WORDS)?;
        let last_rank = communicator.size() - 1;
        let module = Module::load(MIXER)?;
        let host = filled(WORDS as usize, member.seed);
        Ok(Self {
            communicator: Some(communicator),
            stream: Stream::new(STREAM_NON_BLOCKING)?,
            round: module.kernel("mixer_round")?,
            _module: module,
            state: Buffer::holding(&host)?,
            work: Buffer::holding(&host)?,
            last_rank,
            number: 0,
            repeated: 0,
            host,
        })
    }

    fn step(&mut self, member: &mut Member, step: &Step) -> Result<String> {
        let rank = member.bootstrap.rank();
        if step.number == member.ends_at && rank == self.last_rank {
            std::process::exit(STATUS);
        }
        if let Err(error) = self.try_step(member, step) {
            let lost = error.downcast::<Lost>()?;
            if rank == 0 {
                eprintln!("rank 0: {lost}");
            }
            self.go_on_without(member, &lost)?;
            self.try_step(member, step)?;
        }
        Ok(say(&self.state.read()?, member.members.len()))
    }

    fn repeat(&mut self, member: &Member, step: &Step) -> Result<String> {
        for _ in 0..step.parts {
            let mut sums = vec![0u32; WORDS as usize];
            for rank in &member.members {
                let mut words = self.host.clone();
                mixer_round(&mut words, tag(member.seed, *rank, self.repeated));
                sums.iter_mut().zip(words).for_each(|(sum, word)| *sum = sum.wrapping_add(word));
            }
            self.host = sums;
            self.repeated += 1;
        }
        Ok(say(&self.host, member.members.len()))
    }

    fn last(&self) -> Result<Vec<u32>> {
        self.state.read()
    }

    fn ended_well(&self, rank: u32, status: ExitStatus) -> bool {
        let is_early = rank == self.last_rank
            && self.communicator.as_ref().is_some_and(|left| left.size() == rank);
        if is_early { status.code() == Some(STATUS) } else { status.success() }
    }
}
