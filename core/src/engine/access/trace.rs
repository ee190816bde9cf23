//! What `gpucr trace` does: watch a program for a while, and tell what its launches read and write.

use std::time::Instant;

use super::check::check;
pub use super::check::{Checked, MadeTwice};
use super::report::Seen;
pub use super::report::{Pointed, Process, Report, Row, Set, Word};
pub use super::session::Options;
use super::session::Session;
pub use super::twice::Repeated;
use crate::engine::error::Error;

/// Watches the CUDA processes of a tree for a while. They run on all the time.
///
/// # Errors
/// The tree has no process under gpucr, or another gpucr is at work on one. A process that ends
/// meanwhile is no error.
pub fn trace(options: &Options) -> Result<Report, Error> {
    let mut session = Session::attach(options)?;
    if options.check && session.cuda_processes.len() > 1 {
        return Err(Error::SeveralProcesses {
            pid: options.pid,
            count: session.cuda_processes.len(),
        });
    }
    if options.observe || options.check {
        session.open_memory();
    }
    for agent in session.cuda_processes.iter_mut().filter_map(|program| program.agent.as_mut()) {
        agent.record(true)?;
    }
    tracing::debug!(processes = session.cuda_processes.len(), "recording");
    let since = Instant::now();
    // A check is of one process.
    let findings = if options.check {
        Some(check(&mut session, options)?)
    } else {
        session.watch(options);
        None
    };
    let seconds = since.elapsed().as_secs_f64();
    let observed = session.memory.is_some();
    let pairs = session.cuda_processes.iter().zip(&session.watched);
    let report = |(program, watched)| {
        let findings = findings.as_ref();
        Seen { watched, findings }.report(program, observed)
    };
    Ok(Report { seconds, processes: pairs.map(report).collect() })
}
