//! What is done to the programs to stop them: their gates are closed, their memory is taken from them, and the driver
//! is left with what it can save itself.

use gpucr_wire::Block;

use super::halt::{Halted, halt_all};
use super::preflight;
use super::report::{LetThrough, Target};
use super::task::Task;
use crate::base::faults::fault;
use crate::cuda::Reserver;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::device_state::DeviceStates;
use crate::engine::error::Error;
use crate::engine::hook;
use crate::engine::interrupted::Interrupted;
use crate::engine::memory::{Bulk, joined};
use crate::engine::multicast;
use crate::engine::opened;
use crate::host::process::AgentError;

/// Runs what the user wants to be run before the program is stopped.
///
/// # Errors
/// [`Error::Hook`]; or the dump is to end.
pub(super) fn announce(task: &Task<'_>) -> Result<(), Error> {
    let options = task.options;
    let Some(command) = &options.before_stop else { return Ok(()) };
    let image = match &options.target {
        Target::Image(destination) => Some(destination.path()),
        Target::Peer(_) => None,
    };
    hook::run(command, image.as_deref(), options.pid, &options.stop)
}

/// Where that is asked for, waits until each program has come back from a call by which it waits for the device, and has
/// its gate begin to close behind it. One that makes no such call in time is stopped where it is.
pub(super) fn meet(task: &mut Task<'_>) -> Result<(), Error> {
    let Some(limit) = task.options.at_sync else { return Ok(()) };
    let programs = task.made.cuda_processes.iter_mut();
    let agents: Vec<_> = programs.filter_map(|program| program.agent.as_mut()).collect();
    let met: Vec<Result<bool, AgentError>> = std::thread::scope(|scope| {
        let meeting =
            agents.into_iter().map(|agent| scope.spawn(move || agent.wait_for_sync(limit)));
        let meeting: Vec<_> = meeting.collect();
        meeting.into_iter().map(joined).collect()
    });
    let mut all = !met.is_empty();
    for met in met {
        match met {
            Ok(met) => all &= met,
            // It may have ended: that is found out when the gates are closed.
            Err(AgentError::Broken { .. }) => all = false,
            Err(error) => return Err(error.into()),
        }
    }
    task.account.at_sync = Some(all);
    Ok(())
}

/// Closes all gates at the same time: programs that wait for each other on the device drain only together, and some of
/// them only when others have launched [more](super::halt). What they use does not change from here on.
pub(super) fn close_gates(task: &mut Task<'_>, mut memory: Option<&mut Bulk>) -> Result<(), Error> {
    let programs = task.made.cuda_processes.iter_mut();
    let (pids, agents): (Vec<u32>, Vec<_>) =
        programs.filter_map(|program| Some((program.process.pid, program.agent.as_mut()?))).unzip();
    let Halted { results, launches } = halt_all(agents, task.options.timeout);
    let counts = pids.into_iter().zip(launches).map(|(pid, launches)| LetThrough { pid, launches });
    task.account.let_through = counts.collect();
    if task.account.let_through.iter().all(|one| one.launches == 0) {
        task.account.let_through.clear();
    }
    for closed in results {
        match closed {
            Err(AgentError::Broken { pid, .. })
                if task.forget_ended(pid, memory.as_deref_mut()) => {}
            closed => closed?,
        }
    }
    task.account.interrupted.clear();
    let programs = task.made.cuda_processes.iter_mut();
    let told: Vec<_> = programs
        .filter_map(|program| Some((program.process.pid, program.agent.as_mut()?.interrupted())))
        .collect();
    for (pid, told) in told {
        match told {
            Ok(told) => {
                let told = told.into_iter().map(|told| Interrupted::new(pid, told));
                task.account.interrupted.extend(told);
            }
            Err(AgentError::Broken { .. }) if task.forget_ended(pid, memory.as_deref_mut()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // Each program may have begun since it was asked first to use what the driver cannot checkpoint, and lose it
    // and itself.
    let drivers = &task.drivers;
    task.made
        .cuda_processes
        .iter_mut()
        .try_for_each(|program| preflight::look_again(program, drivers))?;
    opened::check(&task.made.cuda_processes)?;
    multicast::check(&task.made.cuda_processes)
}

/// Asks every program for its blocks, and takes a file descriptor of each that is new.
pub(super) fn export(task: &mut Task<'_>) -> Result<Vec<Vec<Block>>, Error> {
    let all: Vec<Vec<Block>> =
        task.made.cuda_processes.iter_mut().map(CudaProcess::export).collect::<Result<_, _>>()?;
    task.account.bulk_bytes = all.iter().flatten().map(|block| block.size).sum();
    Ok(all)
}

/// Gives the watchdog a descriptor of every block too: the program is about to lose its own.
pub(super) fn adopt(task: &mut Task<'_>) -> Result<(), Error> {
    let made = &mut task.made;
    made.cuda_processes
        .iter()
        .try_for_each(|program| made.watchdog.adopt(program))
        .map_err(Error::Watchdog)
}

/// Maps these blocks in gpucr and lets go of all others. Where there is no room the programs
/// copy from inside.
pub(super) fn follow(
    cuda_processes: &[CudaProcess],
    memory: &mut Option<Bulk>,
    blocks: &[Vec<Block>],
) -> Result<(), Error> {
    if let Some(bulk) = memory
        && !bulk.follow(cuda_processes, blocks)?
    {
        *memory = None;
    }
    Ok(())
}

/// Takes the bulk memory away from every program that still has it. Keeps for it what its stacks give back.
pub(super) fn detach(cuda_processes: &mut [CudaProcess], reserver: &Reserver) -> Result<(), Error> {
    part(cuda_processes)?;
    for program in cuda_processes {
        // An earlier attempt may have left its list.
        program.freed.clear();
        let Some(agent) = program.agent.take() else { continue };
        let free = reserver.free();
        if let Err((agent, error)) = agent.detach() {
            program.agent = agent.map(|agent| *agent);
            return Err(error.into());
        }
        program.keep(reserver.take_since(&free));
        fault("detached")?;
    }
    Ok(())
}

/// Has every program that has multicast objects, and is not detached yet, keep its gate closed even if gpucr dies: once
/// one of them has undone its part of an object, kernels of the others would fail.
fn part(cuda_processes: &mut [CudaProcess]) -> Result<(), Error> {
    let having = cuda_processes.iter_mut().filter(|program| !program.team.objects.is_empty());
    for agent in having.filter_map(|program| program.agent.as_mut()) {
        agent.part()?;
        fault("parted")?;
    }
    Ok(())
}

/// Lets the driver move what is left into host memory: first all locks, which can fail
/// without harm, then all checkpoints.
pub(super) fn checkpoint(task: &mut Task<'_>) -> Result<(), Error> {
    let device_state = task.drivers.device_state(&task.plan.driver)?;
    for program in &task.made.cuda_processes {
        let pid = program.process.pid;
        device_state
            .lock(pid, task.options.timeout)
            .map_err(|source| Error::Process { pid, source })?;
    }
    for program in &mut task.made.cuda_processes {
        let pid = program.process.pid;
        let free = task.reserver.free();
        device_state.checkpoint(pid).map_err(|source| Error::Process { pid, source })?;
        program.keep(task.reserver.take_since(&free));
        if let Err(error) = task.made.watchdog.reserve(program) {
            tracing::warn!(%error, "the watchdog has died");
        }
    }
    Ok(())
}
