//! What is in the way of a dump: all of it at once, and nothing is changed.

use super::describe::option_names;
use super::preflight::{Inspected, container_of, inspect, network_of, outer_connections};
use super::report::{Options, Target};
use crate::base::limits;
use crate::cuda::Drivers;
use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::locks;
use crate::engine::opened;
use crate::engine::sharers::Sharers;
use crate::host::criu::Criu;
use crate::host::process::Tree;
use crate::host::process::held::{self, Held, Holdings};

/// Everything that is known to keep a program from being dumped as things are. What only driver and CRIU can tell, when
/// the program stands still, is not among it.
pub fn blockers(options: &Options) -> Vec<Error> {
    let mut found: Vec<Error> = Vec::new();
    if !rustix::process::geteuid().is_root() {
        found.push(Error::NotRoot);
    }
    if let Target::Image(destination) = &options.target
        && let Err(error) = destination.check()
    {
        found.push(error.into());
    }
    let tree = match Tree::read(options.pid) {
        Ok(tree) => tree,
        Err(error) => {
            found.push(error.into());
            return found;
        }
    };
    if tree.pids().contains(&std::process::id()) {
        found.push(Error::OwnTree { pid: options.pid });
        return found;
    }
    for process in &tree.processes {
        if process.session == 0 {
            found.push(Error::OuterSession { pid: process.pid });
        }
        if process.is_headless {
            found.push(Error::Headless { pid: process.pid });
        }
    }
    if !options.criu.tcp_established && !options.criu.tcp_close {
        match outer_connections(&tree) {
            Ok(outer) => found.extend(outer),
            Err(error) => found.push(error),
        }
    }
    found.extend(container_of(&tree, options).err());
    found.extend(network_of(tree.root()).err());
    // Before there are connections of gpucr's own.
    let holdings = held::of(&tree);
    match Criu::find(Some(&options.stop)) {
        Ok(criu) => found.extend(of_criu(options, &criu, holdings)),
        Err(error) => found.push(error.into()),
    }
    of_processes(options, tree, &mut found);
    found
}

/// What CRIU does not save with these options.
fn of_criu<'a>(
    options: &'a Options,
    criu: &Criu,
    holdings: Holdings,
) -> impl Iterator<Item = Error> + 'a {
    let terminal = holdings.unnamed_terminal.map(|pid| Error::UnnamedTerminal { pid });
    let old = holdings.tcp.first().filter(|_| !criu.dumps_tcp_sockets());
    let version = criu.version();
    let old = old.map(|pid| Error::Held {
        pid: *pid,
        what: format!(
            "a TCP socket, which CRIU {version} cannot save on this kernel (CRIU 4.2 can)"
        ),
        options: &[],
    });
    let given = option_names(&options.criu, options.shell_job);
    let is_new = move |held: &Held| !held.options.iter().any(|o| given.iter().any(|g| g == o));
    let held = holdings.held.into_iter().filter(is_new);
    old.into_iter().chain(terminal).chain(held.map(|Held { pid, what, options, .. }| Error::Held {
        pid,
        what,
        options,
    }))
}

/// What the processes and their agents tell.
fn of_processes(options: &Options, tree: Tree, found: &mut Vec<Error>) {
    let drivers = Drivers::default();
    let before = found.len();
    let (mut cuda_processes, mut blocks) = (Vec::new(), 0);
    for process in tree.processes {
        match locks::take(&process, Some(&options.stop)) {
            Ok(_lock) => {}
            Err(error) => {
                let is_busy = matches!(error, Error::Busy { .. });
                found.push(error);
                if is_busy {
                    continue;
                }
            }
        }
        // A dump hears it from CRIU.
        if !limits::can_be_read(process.pid) {
            found.push(Error::OtherUser { pid: process.pid });
        }
        match inspect(&process, &drivers, options) {
            Ok(Some(Inspected { cuda, driver, agent, .. })) => {
                blocks += cuda.counts.blocks;
                let sharers = Sharers::of(&cuda.counts);
                let program = CudaProcess::new(process, driver, agent.is_some());
                cuda_processes.push(CudaProcess { agent, sharers, ..program });
            }
            Ok(None) => {}
            Err(error) => found.push(error),
        }
    }
    if let Err(error) = opened::check(&cuda_processes) {
        found.push(error);
    }
    if let Err(error) = limits::make_room_for(blocks) {
        found.push(error.into());
    }
    if cuda_processes.is_empty() && found.len() == before {
        found.push(Error::NoCuda { pid: options.pid });
    }
}
