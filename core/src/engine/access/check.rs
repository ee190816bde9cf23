//! How far access sets can be trusted: a program is stopped after each launch, and what changed in
//! device memory is compared with what the launch was thought to write.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use gpucr_wire::access::Allocation;
use serde::Serialize;

use super::session::{LARGEST_IMAGE, Options, Session, hash_pass};
use super::twice::{repeated, together};
use super::{Blamed, Kernels, Tally, Written, written};
use crate::engine::error::Error;
use crate::engine::memory::{Bulk, Compared};
use crate::host::process::AgentError;

/// How long is waited for a launch.
const WAIT: Duration = Duration::from_millis(200);
/// `CUDA_ERROR_DEINITIALIZED`: the program is at its end, and its driver has ended already.
const DEINITIALIZED: i32 = 4;
/// How long a launch may take.
const LIMIT: Duration = Duration::from_secs(60);

/// How launches, one by one, compare with what was thought of them just before. The measure is the
/// chunk of device memory, of 2 MiB.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Checked {
    /// So many launches, each with the copies and fills before it. A graph is one.
    pub launches: u64,
    /// Just the chunks changed that were thought to.
    pub exact: u64,
    /// Fewer chunks changed than were thought to, and no others.
    pub too_much: u64,
    /// Chunks changed that were thought not to.
    pub wrong: u64,
    /// Chunks that were thought to change, and did, and did without being thought to; added up over all
    /// launches.
    pub chunks: Compared,
}

impl Checked {
    fn add(&mut self, chunks: Compared) {
        self.launches += 1;
        if chunks.missed > 0 {
            self.wrong += 1;
        } else if chunks.changed < chunks.expected {
            self.too_much += 1;
        } else {
            self.exact += 1;
        }
        self.chunks.expected += chunks.expected;
        self.chunks.changed += chunks.changed;
        self.chunks.missed += chunks.missed;
    }
}

/// How launches that are said to be idempotent turned out when they were made a second time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MadeTwice {
    /// So many launches were made twice.
    pub launches: u64,
    /// After so many of them device memory was another one than after the first time.
    pub differed: u64,
    /// So many could not be made once more: they have attributes, or were captured.
    pub skipped: u64,
}

/// What the check of one process has found.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) all: Checked,
    /// How launches of single kernels compare, by the agent's ids of kernels.
    pub(super) kernels: BTreeMap<u64, Checked>,
    /// Of kernels with launches that are said to be idempotent.
    pub(super) twice: BTreeMap<u64, MadeTwice>,
}

/// Lets the one process of a session make its launches one by one for the time that was asked for.
/// Afterwards it runs on, after an error too. A process that ends meanwhile is no error.
///
/// # Errors
/// A launch lasts too long, or gpucr cannot map the memory.
pub(super) fn check(session: &mut Session, options: &Options) -> Result<Findings, Error> {
    let agent = session.cuda_processes[0].agent.as_mut().expect("connected");
    agent.close_gate(LIMIT)?;
    // From here on a failure opens the gate, as does the end of the connection.
    let _ = agent.accesses()?;
    let mut findings = Findings::default();
    let since = Instant::now();
    session.with_memory(hash_pass);
    if session.memory.is_none() {
        return Err(Error::NotObserved { pid: options.pid });
    }
    while !options.stop.is_set() && session.is_alive() && since.elapsed() < options.time {
        let Some(agent) = session.cuda_processes[0].agent.as_mut() else { break };
        let kernels = &mut session.watched[0].kernels;
        let stepped = agent
            .step(WAIT, LIMIT, options.twice)
            .and_then(|()| agent.accesses())
            .and_then(|accesses| {
                kernels.learn(agent, &accesses.kernels, LARGEST_IMAGE, Instant::now() + LIMIT)?;
                Ok(accesses)
            });
        let accesses = match stepped {
            Ok(accesses) => accesses,
            Err(error) => {
                gone(session, error)?;
                break;
            }
        };
        let mut step = Tally::default();
        step.add(accesses.clone());
        session.with_memory(hash_pass);
        let Some(bulk) = &session.memory else {
            return Err(Error::NotObserved { pid: options.pid });
        };
        if step.has_launched() && is_single(&step) {
            let chunks = compare(bulk, kernels_of(session), &step);
            findings.all.add(chunks);
            let mut launched = step.kernels.values();
            if let (Some(kernel), None) = (launched.next(), launched.next())
                && kernel.in_graphs == 0
            {
                findings.kernels.entry(kernel.id).or_default().add(chunks);
            }
        }
        if step.has_launched() {
            let changed = |a: &Allocation| bulk.has_changed(0, a.address, a.size);
            let kernels = &mut session.watched[0].kernels;
            kernels.observe(step.kernels.values(), step.allocations.values(), changed);
        }
        session.watched[0].tally.add(accesses);
        if options.twice {
            make_twice(session, &step, &mut findings)?;
        }
    }
    if let Some(agent) = session.cuda_processes[0].agent.as_mut() {
        agent.open_gate()?;
    }
    Ok(findings)
}

/// What an agent has failed at: the program is gone, and the check ends with what there is.
///
/// # Errors
/// It is not gone, but the gate is open again: a launch took too long, or a context is broken.
fn gone(session: &mut Session, error: AgentError) -> Result<(), Error> {
    match error {
        error @ AgentError::Failed { code, .. } if code != DEINITIALIZED => Err(error.into()),
        error => {
            tracing::debug!(%error, "the program is gone, and the check ends");
            session.cuda_processes[0].agent = None;
            Ok(())
        }
    }
}

/// Makes the launch of a step once more if it is said to be idempotent, and looks what that has changed. Which bytes
/// are hashed is all device memory of the program, as before.
fn make_twice(session: &mut Session, step: &Tally, findings: &mut Findings) -> Result<(), Error> {
    let mut launched = step.kernels.values();
    let (Some(kernel), None) = (launched.next(), launched.next()) else { return Ok(()) };
    let all = repeated(kernel, kernels_of(session));
    if !is_single(step) || kernel.in_graphs > 0 || together(&all).0 != Some(true) {
        return Ok(());
    }
    let Some(agent) = session.cuda_processes[0].agent.as_mut() else { return Ok(()) };
    let made = match agent.again(LIMIT) {
        Ok(made) => made,
        Err(error) => return gone(session, error),
    };
    let twice = findings.twice.entry(kernel.id).or_default();
    if !made {
        twice.skipped += 1;
        return Ok(());
    }
    session.with_memory(hash_pass);
    let Some(bulk) = &session.memory else {
        return Err(Error::NotObserved { pid: session.cuda_processes[0].process.pid });
    };
    twice.launches += 1;
    twice.differed += u64::from(bulk.compare(0, []).missed > 0);
    Ok(())
}

/// Whether it was one launch. Capturing a graph is many that do nothing.
fn is_single(step: &Tally) -> bool {
    let direct =
        step.kernels.values().map(|kernel| kernel.launches.saturating_sub(kernel.in_graphs));
    let direct = direct.fold(0, u64::saturating_add);
    let in_graphs = step.kernels.values().any(|kernel| kernel.in_graphs > 0);
    let others = [u64::from(in_graphs), step.unknown_graphs, step.unseen];
    others.into_iter().fold(direct, u64::saturating_add) == 1
}

fn kernels_of(session: &Session) -> &Kernels {
    &session.watched[0].kernels
}

/// What was thought to change in a step, and what did.
fn compare(bulk: &Bulk, kernels: &Kernels, step: &Tally) -> Compared {
    if step.has_unknown() {
        return bulk.compare(0, [(0, u64::MAX)]);
    }
    bulk.compare(
        0,
        written(kernels, step, Blamed::Writers).map(|(_, Written { low, end, .. })| (low, end)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launch_is_of_one_kind() {
        let mut checked = Checked::default();
        for (expected, changed, missed) in [(2, 2, 0), (0, 0, 0), (3, 1, 0), (1, 1, 1), (4, 0, 2)] {
            checked.add(Compared { expected, changed, missed });
        }
        let chunks = Compared { expected: 10, changed: 4, missed: 3 };
        assert_eq!(checked, Checked { launches: 5, exact: 2, too_much: 1, wrong: 2, chunks });
    }
}
