//! What the agents of all programs on this host say, asked all at once.
//!
//! Any of these programs may be hostile: none is waited for longer than the others, and what takes too long is
//! left behind.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use gpucr_wire::{AGENT, Counts, GateState};

use super::network::{self, Row};
use super::{Agent, AgentError, Lock, ProcessInfo, sockets};

/// Agents that are asked; more are seen.
const MOST: usize = 1 << 10;
/// Bytes for the stack of a thread that asks one process.
const STACK: usize = 256 << 10;

/// A process with an agent.
#[derive(Debug)]
pub struct Seen {
    /// The process.
    pub pid: u32,
    /// Its command line.
    pub command: Vec<String>,
    /// What its agent says.
    pub said: Said,
}

/// What an agent says.
#[derive(Debug)]
pub enum Said {
    /// Where the program stands, and what it holds.
    Holds(GateState, Box<Counts>),
    /// Nothing, since another gpucr is at work on the program.
    Busy,
    /// Nothing that could be used, for this reason.
    Nothing(String),
}

/// All programs that were found.
#[derive(Debug)]
pub struct Survey {
    /// In order of the pids.
    pub seen: Vec<Seen>,
    /// Whether there was time to look at all processes.
    pub is_complete: bool,
}

/// What is heard of a process.
enum Heard {
    Of(u32, Vec<String>),
    Says(u32, Said),
    /// The process has ended, or listens no more.
    Gone(u32),
}

/// Asks all agents that this user may ask, and comes back after `limit` at the latest.
///
/// # Errors
/// `/proc` cannot be read.
pub fn survey(limit: Duration) -> io::Result<Survey> {
    let end = Instant::now() + limit;
    // A little earlier, so that who takes too long is heard of in time.
    let answer_by = end - limit / 8;
    let entries = std::fs::read_dir("/proc")?;
    let (tell, hear) = mpsc::channel();
    // Left alone if the kernel does not answer: what is printed does not wait for it.
    std::thread::spawn(move || look(entries, &tell, answer_by));
    let (mut seen, mut is_complete) = (HashMap::new(), false);
    loop {
        match hear.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(Heard::Of(pid, command)) => {
                let said = Said::Nothing("it took too long".into());
                seen.insert(pid, Seen { pid, command, said });
            }
            Ok(Heard::Says(pid, said)) => {
                seen.entry(pid).and_modify(|one| one.said = said);
            }
            Ok(Heard::Gone(pid)) => drop(seen.remove(&pid)),
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                is_complete = true;
                break;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => break,
        }
    }
    let mut seen: Vec<Seen> = seen.into_values().collect();
    seen.sort_by_key(|one| one.pid);
    Ok(Survey { seen, is_complete })
}

/// Looks at all processes, and has those asked that may have an agent.
fn look(entries: std::fs::ReadDir, tell: &Sender<Heard>, answer_by: Instant) {
    let mut agents: HashMap<PathBuf, Vec<Row>> = HashMap::new();
    let mut asked = 0;
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Processes come and go, and those of other users cannot be read.
        let Ok(network) = std::fs::read_link(network::namespace(pid)) else { continue };
        let rows = agents.entry(network).or_insert_with(|| {
            let mut rows = network::listeners(pid).unwrap_or_default();
            rows.retain(|row| row.name.starts_with(AGENT.as_bytes()));
            rows
        });
        if rows.is_empty() {
            continue;
        }
        let Ok(process) = ProcessInfo::read_without_libraries(pid) else { continue };
        let named = sockets::agents_named(&process, rows);
        if named.is_empty() {
            continue;
        }
        let heard = tell.clone();
        let ask = move || ask(&process, &named, asked < MOST, &heard, answer_by);
        if let Err(error) = std::thread::Builder::new().stack_size(STACK).spawn(ask) {
            tracing::warn!(%error, pid, "it was not asked");
        }
        asked += 1;
    }
}

/// Asks the agent of a process for which these sockets are named, if one of them is its own.
fn ask(
    process: &ProcessInfo,
    named: &[Row],
    wanted: bool,
    tell: &Sender<Heard>,
    answer_by: Instant,
) {
    let Some(name) = sockets::agent_among(process, named) else { return };
    // The receiver is gone when all time is over.
    let _ = tell.send(Heard::Of(process.pid, process.command.clone()));
    if !wanted {
        let why = format!("more than {MOST} agents are not asked");
        let _ = tell.send(Heard::Says(process.pid, Said::Nothing(why)));
        return;
    }
    let ask = || -> Result<Said, AgentError> {
        let left = answer_by.saturating_duration_since(Instant::now());
        if !Lock::is_taken(process) {
            // The gpucr that has detached the program, if any, is gone.
            gpucr_wire::wake_agent(process.pid);
        }
        let mut agent = Agent::connect_to(process, name, left)?;
        agent.set_end(Some(answer_by));
        let counts = agent.counts()?;
        Ok(Said::Holds(agent.hello().gate, Box::new(counts)))
    };
    let heard = match ask() {
        Ok(said) => Heard::Says(process.pid, said),
        Err(AgentError::Absent { pid }) => Heard::Gone(pid),
        Err(_) if process.has_ended() => Heard::Gone(process.pid),
        Err(AgentError::Broken { .. }) if Lock::is_taken(process) => {
            Heard::Says(process.pid, Said::Busy)
        }
        Err(error) => Heard::Says(process.pid, Said::Nothing(error.to_string())),
    };
    let _ = tell.send(heard);
}
