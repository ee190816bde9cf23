//! The agent: the thread through which a checkpointer talks to the program.
//!
//! It starts after the first successful `cuInit` and sleeps until somebody connects. It serves
//! one connection at a time, of the same user or of root.
//!
//! | state    | gate   | memory   | when the connection ends                        |
//! |----------|--------|----------|-------------------------------------------------|
//! | Open     | open   | in place | stays                                           |
//! | Closed   | closed | in place | the gate is opened: the checkpointer has died   |
//! | Closing  | shut   | in place | the same                                        |
//! | Detached | closed | away     | stays: who has the file descriptors comes back  |
//!
//! A program that was restored before its memory is there is Open with blocks that are awaited. If the
//! connection ends before they are there it becomes Detached again.

use std::io;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use gpucr_wire::{AGENT_THREAD, Connection};

use crate::log::log;
use crate::watch::faults::Why;
use crate::watch::{faults, supervisor};

mod blocks;
mod descriptors;
mod drain;
mod gating;
mod launches;
mod multicast;
pub(crate) mod peers;
mod rest;
mod serve;
pub(crate) mod sharing;
mod signals;
mod socket;
mod staging;
mod state;
mod tracking;
mod transfer;
mod waiting;

use socket::Served;
use state::Agent;

static STARTED: AtomicBool = AtomicBool::new(false);

/// Starts the agent, once in a process. Without one the program runs all the same, and cannot be
/// dumped.
pub(crate) fn start() {
    if STARTED.swap(true, Ordering::SeqCst) {
        return;
    }
    if supervisor::is_there() {
        faults::watch(Why::Supervisor, true);
    }
    let listener = match socket::listen() {
        Ok(listener) => listener,
        Err(error) => {
            log!("cannot listen, so nobody can dump this program: {error}");
            return;
        }
    };
    // A new thread has its maker's signal mask: no signal of the program's may land in this one.
    let blocked = signals::block_all();
    let thread = thread::Builder::new().name(AGENT_THREAD.into()).spawn(move || run(&listener));
    drop(blocked);
    if let Err(error) = thread {
        socket::unlisten();
        log!("cannot start the agent: {error}");
    }
}

/// Whether there is one.
pub(crate) fn is_there() -> bool {
    STARTED.load(Ordering::SeqCst)
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { socket::reset() };
    STARTED.store(false, Ordering::SeqCst);
    descriptors::reset();
    tracking::reset();
}

fn run(listener: &UnixListener) {
    drain::tolerate_captures();
    let mut agent = Agent::new();
    let mut has_table = false;
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                let connection = Connection::new(socket);
                // Before anything else: anybody on the host may connect, again and again.
                if !socket::is_trusted(&connection) {
                    continue;
                }
                let served = Served::new(&connection);
                // Now, since a program that is stopped would wait for it later. Not each time: the limit that is raised for
                // a moment is the program's.
                if !std::mem::replace(&mut has_table, true) {
                    descriptors::make_table(listener);
                }
                // A mistake in here must not take the program along.
                if catch_unwind(AssertUnwindSafe(|| serve::serve(&mut agent, connection))).is_err()
                {
                    log!("the agent failed");
                }
                drop(served);
                agent.connection_ended();
                if std::mem::take(&mut agent.is_left_alone) {
                    signals::wait_to_be_woken();
                    // It may have been restored meanwhile.
                    has_table = false;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log!("cannot accept: {error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}
