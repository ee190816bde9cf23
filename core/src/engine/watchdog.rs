//! The watchdog: a small process that holds a program's memory while the program is detached from
//! it, and that finishes the roll-back by itself if gpucr dies.
//!
//! gpucr starts it before it closes any gate and tells it what it holds. The watchdog waits for the
//! end of the conversation. If that comes with a last word (`Done`), everything was settled; if it
//! comes without, gpucr has died, and the watchdog brings the program back to running with the same
//! code that gpucr uses (`cuda_process.rs`), or ends what was half restored.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Stream, wire_enum};
use parking_lot::Mutex;

use crate::base::faults::fault;
use crate::base::helper;
use crate::cuda::{Drivers, HostDriver};
use crate::engine::cuda_process::{CudaProcess, HasCopies, resume_all};
use crate::engine::migrate::record::{Record, State};
use crate::host::criu::{self, Keep};
use crate::host::process::{Lock, ProcessInfo, kill_trees};
use crate::host::shield::shield;
use crate::image::{self, library};

/// The hidden subcommand of `gpucr` that is the watchdog.
pub const SUBCOMMAND: &str = "watchdog";
/// How long CRIU may be at work after gpucr's death.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the watchdog may take to close descriptors.
const ANSWER: Duration = Duration::from_secs(10);
/// The time between two looks whether those have ended who are to be ended.
const LOOK_UP: Duration = Duration::from_millis(20);
/// The longest pause between two tries to bring a program back.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

wire_enum! {
    /// From gpucr to the watchdog.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToWatchdog {
        /// A process that a dump is about to stop. Followed by the descriptors of its blocks.
        0 => Adopt {
            /// The process.
            pid: u32,
            /// The driver library that serves it, for which gpucr vouches.
            driver: String,
            /// Whether it has an agent.
            agent: bool,
            /// Ids of its blocks.
            blocks: Vec<u64>,
        },
        /// gpucr is about to write an image. What there is of it is removed if gpucr dies.
        1 => Writing {
            /// Where the image will be, absolute.
            target: String,
            /// gpucr's pid.
            pid: u32,
        },
        /// CRIU is about to make these processes, whose pids are free; they are killed if gpucr
        /// dies.
        2 => Restoring {
            /// Their pids.
            pids: Vec<u32>,
        },
        /// Everything is settled.
        3 => Done {},
        /// Followed by the reading end of a pipe whose writing end gpucr and CRIU hold.
        4 => AtWork {},
        /// The adopted processes run again, with memory of their own; the image is not complete.
        5 => Resumed {},
        /// An adopted process is checkpointed. Followed by the descriptors of device memory that is kept for it.
        6 => Reserve {
            /// The process.
            pid: u32,
            /// How many descriptors.
            count: u32,
        },
        /// What is kept for a process is about to be needed: close its descriptors and say so.
        7 => GiveBack {
            /// The process.
            pid: u32,
        },
        /// The program goes to another host. If gpucr dies, it depends on what it has noted in this file whether the
        /// program goes on here.
        8 => Migrating {
            /// The file, absolute.
            record: String,
        },
        /// Followed by the userfaultfd of a process that CRIU has made, or of a child of it, whose memory is not all there.
        9 => Memory {},
        /// Followed by the descriptors of the locks of the processes that gpucr is at work on. They stay held until the
        /// watchdog ends.
        10 => Locks {
            /// How many.
            count: u32,
        },
    }
}

wire_enum! {
    /// From the watchdog to gpucr.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromWatchdog {
        /// To `GiveBack`: they are closed.
        0 => GivenBack {},
    }
}

impl Stream for ToWatchdog {}
impl Stream for FromWatchdog {}

/// gpucr's end of the conversation.
pub struct Watchdog {
    connection: Arc<Mutex<Connection>>,
    child: Child,
}

impl Watchdog {
    /// Starts the watchdog.
    ///
    /// # Errors
    /// The process cannot be made.
    pub fn start() -> io::Result<Self> {
        let (connection, child) = helper::start("gpucr-watchdog", SUBCOMMAND)?;
        Ok(Self { connection: Arc::new(Mutex::new(connection)), child })
    }

    /// Hands over copies of the locks, so that nobody else begins with the program before it runs again after gpucr's
    /// death.
    ///
    /// # Errors
    /// The watchdog has died.
    pub(super) fn locks(&mut self, locks: &[Lock]) -> io::Result<()> {
        let mut connection = self.connection.lock();
        connection.send(&ToWatchdog::Locks { count: locks.len() as u32 })?;
        connection.send_fds(locks)
    }

    /// Tells what a process would lose if gpucr died now.
    ///
    /// # Errors
    /// The watchdog has died.
    pub fn adopt(&mut self, program: &CudaProcess) -> io::Result<()> {
        let mut connection = self.connection.lock();
        connection.send(&ToWatchdog::Adopt {
            pid: program.process.pid,
            driver: program.driver.path().to_string_lossy().into_owned(),
            agent: program.has_agent,
            blocks: program.blocks.iter().map(|(id, _)| *id).collect(),
        })?;
        let fds: Vec<&OwnedFd> = program.blocks.iter().map(|(_, fd)| fd).collect();
        connection.send_fds(&fds)
    }

    /// Hands over copies of what is kept for a process while the driver has it checkpointed.
    ///
    /// # Errors
    /// The watchdog has died.
    pub(crate) fn reserve(&mut self, program: &CudaProcess) -> io::Result<()> {
        if program.reserve.is_empty() {
            return Ok(());
        }
        let count = program.reserve.len() as u32;
        let mut connection = self.connection.lock();
        connection.send(&ToWatchdog::Reserve { pid: program.process.pid, count })?;
        connection.send_fds(&program.reserve)
    }

    /// Tells where an image is about to be written.
    ///
    /// # Errors
    /// The watchdog has died, or there is no working directory.
    pub fn writing(&mut self, target: &Path) -> io::Result<()> {
        let target = std::path::absolute(target)?.to_string_lossy().into_owned();
        self.connection.lock().send(&ToWatchdog::Writing { target, pid: std::process::id() })
    }

    /// Tells where it is noted whether the program was handed over to another host.
    ///
    /// # Errors
    /// The watchdog has died.
    pub(super) fn migrating(&mut self, record: &Path) -> io::Result<()> {
        let record = record.to_string_lossy().into_owned();
        self.connection.lock().send(&ToWatchdog::Migrating { record })
    }

    /// A descriptor for CRIU to inherit: by it the watchdog sees whether CRIU is still at work after
    /// gpucr's death.
    ///
    /// # Errors
    /// The watchdog has died, or there is no descriptor left.
    pub fn at_work(&mut self) -> io::Result<OwnedFd> {
        let (reading, writing) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let mut connection = self.connection.lock();
        connection.send(&ToWatchdog::AtWork {})?;
        connection.send_fds(&[reading])?;
        drop(connection);
        Ok(writing)
    }

    /// Tells which processes CRIU is about to make.
    ///
    /// # Errors
    /// The watchdog has died.
    pub fn restoring(&mut self, pids: &[u32]) -> io::Result<()> {
        self.connection.lock().send(&ToWatchdog::Restoring { pids: pids.to_vec() })
    }

    /// What hands it the userfaultfds of processes whose memory is not all there. They stay open in the watchdog until
    /// it is [`done`](Self::done), or has ended these processes after gpucr's death.
    pub(super) fn keeper(&self) -> Keep {
        let connection = self.connection.clone();
        Arc::new(move |uffd: BorrowedFd<'_>| {
            let mut connection = connection.lock();
            connection.send(&ToWatchdog::Memory {})?;
            connection.send_fds(&[uffd])
        })
    }

    /// The adopted processes run again: the watchdog lets go of their memory.
    ///
    /// # Errors
    /// The watchdog has died.
    pub fn resumed(&mut self) -> io::Result<()> {
        self.connection.lock().send(&ToWatchdog::Resumed {})
    }

    /// Everything is settled: the watchdog ends, and with it its hold on the memory.
    pub fn done(mut self) {
        // A watchdog that is gone already has nothing left to do either.
        let _ = self.connection.lock().send(&ToWatchdog::Done {});
        let _ = self.child.wait();
    }
}

impl HasCopies for Watchdog {
    /// A watchdog that does not answer is ended: the memory is needed now, and gpucr does its work without it.
    fn give_back(&mut self, pid: u32) {
        let mut connection = self.connection.lock();
        connection.set_deadline(Some(Instant::now() + ANSWER));
        let asked = connection.send(&ToWatchdog::GiveBack { pid });
        let answer = asked.and_then(|()| connection.receive::<FromWatchdog>());
        connection.set_deadline(None);
        drop(connection);
        if let Err(error) = answer {
            tracing::warn!(%error, pid, "the watchdog does not give back memory, and is ended");
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// The watchdog itself: what `gpucr watchdog` runs.
///
/// # Errors
/// None: what it cannot do it tries again, for as long as a process lives that needs it.
pub fn main() -> io::Result<()> {
    // It holds memory of programs, and may be where others have the same user.
    if let Err(error) = shield() {
        tracing::debug!(%error, "others may see what is open here");
    }
    let mut connection = helper::connection();
    let (mut cuda_processes, mut unfinished, mut restoring) = (Vec::new(), None, Vec::new());
    let (mut at_work, mut migrating, mut memory) = (None, None, Vec::new());
    // Held until the end.
    let mut _locks = Vec::new();
    loop {
        match connection.receive() {
            Ok(ToWatchdog::Adopt { pid, driver, agent, blocks }) => {
                let Ok(fds) = connection.receive_fds(blocks.len()) else { break };
                let Ok(process) = ProcessInfo::read(pid) else { continue };
                let driver = Path::new(&driver);
                let Ok(driver) = HostDriver::vouched(driver, library::kind(driver)) else { break };
                let mut program = CudaProcess::new(process, Arc::new(driver), agent);
                program.blocks = blocks.into_iter().zip(fds).collect();
                cuda_processes.push(program);
            }
            Ok(ToWatchdog::Writing { target, pid }) => unfinished = Some((target, pid)),
            Ok(ToWatchdog::AtWork {}) => {
                let Ok(mut fds) = connection.receive_fds(1) else { break };
                at_work = fds.pop();
            }
            Ok(ToWatchdog::Restoring { pids }) => restoring = pids,
            Ok(ToWatchdog::Resumed {}) => cuda_processes.clear(),
            Ok(ToWatchdog::Reserve { pid, count }) => {
                let Ok(fds) = connection.receive_fds(count as usize) else { break };
                if let Some(program) =
                    cuda_processes.iter_mut().find(|program| program.process.pid == pid)
                {
                    program.reserve = fds;
                }
            }
            Ok(ToWatchdog::GiveBack { pid }) => {
                let of_pid = cuda_processes.iter_mut().filter(|program| program.process.pid == pid);
                of_pid.for_each(|program| program.reserve.clear());
                if connection.send(&FromWatchdog::GivenBack {}).is_err() {
                    break;
                }
            }
            Ok(ToWatchdog::Memory {}) => {
                let Ok(fds) = connection.receive_fds(1) else { break };
                memory.retain(criu::is_alive);
                memory.extend(fds);
            }
            Ok(ToWatchdog::Locks { count }) => {
                let Ok(fds) = connection.receive_fds(count as usize) else { break };
                _locks = fds;
            }
            Ok(ToWatchdog::Migrating { record }) => migrating = Some(record),
            Ok(ToWatchdog::Done {}) => return Ok(()),
            Err(_) => break,
        }
    }
    let _ = fault("left-alone");
    if let Some(at_work) = at_work {
        kill_restored(&restoring, &at_work, memory);
    }
    if migrating.is_some_and(|record| settle(Path::new(&record)) == Belongs::Elsewhere) {
        return Ok(());
    }
    bring_back(cuda_processes);
    // Last: CRIU may be writing there until it lets go of the program.
    if let Some((target, pid)) = unfinished {
        image::remove_unfinished(Path::new(&target), pid);
    }
    Ok(())
}

/// Where a program belongs that was to go to another host.
#[derive(PartialEq, Eq)]
enum Belongs {
    Here,
    Elsewhere,
}

/// Ends the program if it was handed over, and lets it run again if not. As long as nobody can tell, it stays stopped.
fn settle(record: &Path) -> Belongs {
    let record = loop {
        match Record::read_from(record) {
            // Nothing was noted, so nothing was decided or stopped.
            Ok(None) => return Belongs::Here,
            Ok(Some(record)) => break record,
            Err(_) => std::thread::sleep(LONGEST_PAUSE),
        }
    };
    let left = || record.left().into_iter().filter_map(|pid| ProcessInfo::read(pid).ok());
    match record.state {
        State::HandedOver => {
            // CRIU may just be letting go of them.
            while left().inspect(ProcessInfo::kill).count() > 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
            Belongs::Elsewhere
        }
        _ => {
            left().for_each(|process| process.go_on());
            let _ = record.remove();
            Belongs::Here
        }
    }
}

fn bring_back(mut cuda_processes: Vec<CudaProcess>) {
    let drivers = Drivers::default();
    let mut pause = Duration::from_millis(50);
    loop {
        cuda_processes.retain(|program| !program.process.has_ended());
        // CRIU notices by itself that gpucr is gone and lets the program go.
        if !cuda_processes.iter().any(|program| is_traced(program.process.pid)) {
            let failed: Vec<u32> =
                resume_all(&mut cuda_processes, &drivers, None::<&mut Watchdog>, None)
                    .into_iter()
                    .map(|(pid, _)| pid)
                    .collect();
            cuda_processes.retain(|program| failed.contains(&program.process.pid));
        }
        // With the watchdog the memory of a detached program would go: it stays as long as such a
        // program lives.
        if cuda_processes.is_empty() {
            return;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn is_traced(pid: u32) -> bool {
    procfs::process::Process::new(pid as i32)
        .and_then(|process| process.status())
        .is_ok_and(|status| status.tracerpid != 0)
}

/// Ends the processes that CRIU has made, once it is through or has given up, after gpucr has died
/// in a restore. Only processes younger than this watchdog are meant: the pids were free when it
/// started.
///
/// What lacks `memory` is stopped where it touches that, as long as its descriptors are open: they are kept until all who
/// have that memory have ended.
fn kill_restored(pids: &[u32], at_work: &OwnedFd, mut memory: Vec<OwnedFd>) {
    // The end of the pipe: no process has the writing end open any more.
    let mut poll = [rustix::event::PollFd::new(at_work, rustix::event::PollFlags::IN)];
    let patience = rustix::time::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let _ = rustix::event::poll(&mut poll, Some(&patience));
    let start = |pid: u32| {
        let process = procfs::process::Process::new(pid as i32).ok()?;
        process.stat().ok().map(|stat| stat.starttime)
    };
    let Some(own) = start(std::process::id()) else { return };
    // Found once: later their pids may be those of strangers.
    let is_made = |pid: &u32| start(*pid).is_some_and(|time| time >= own);
    let made = pids.iter().filter_map(|pid| ProcessInfo::read(*pid).ok().filter(|_| is_made(pid)));
    let made: Vec<ProcessInfo> = made.collect();
    loop {
        kill_trees(made.iter());
        memory.retain(criu::is_alive);
        if memory.is_empty() {
            return;
        }
        std::thread::sleep(LOOK_UP);
    }
}

#[cfg(test)]
mod tests;
