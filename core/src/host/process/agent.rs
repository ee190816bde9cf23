//! The checkpointer's side of the conversation with an agent.
//!
//! The agent is a part of the program, and the program may be hostile. So each exchange has to be over by a
//! deadline, and is over as soon as somebody asks gpucr to end; answers are bounded, and what they say is looked
//! at before anybody counts with it ([`super::answers`]).

mod objects;

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use gpucr_wire::access::KernelSummary;
use gpucr_wire::message::Interrupted;
use gpucr_wire::open_files::Raised;
use gpucr_wire::table::Range;
use gpucr_wire::{
    Accesses, Block, BlockKind, Connection, Counts, GateState, Hello, PROTOCOL_VERSION, Reply,
    Request, Rest,
};

use super::tree::ProcessInfo;
use super::{answers, network, sockets};
use crate::base::limits;

/// How long an agent may take for an answer that needs no waiting in the program.
const ANSWER: Duration = Duration::from_secs(60);

/// How long the agent may take to shut the gate when a thread has come back to it.
const MEETING: Duration = Duration::from_secs(10);

/// Why an agent did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The process has no agent: it was not started under `gpucr run`, or uses no CUDA yet.
    #[error("process {pid} has no agent")]
    Absent {
        /// The process.
        pid: u32,
    },
    /// The connection broke: the process has ended or refuses this user.
    #[error("the agent of process {pid} does not answer: {cause}")]
    Broken {
        /// The process.
        pid: u32,
        /// Why.
        cause: io::Error,
    },
    /// Agent and gpucr speak different versions.
    #[error(
        "the agent of process {pid} speaks version {found} of the protocol, this gpucr speaks \
         version {PROTOCOL_VERSION}"
    )]
    Version {
        /// The process.
        pid: u32,
        /// The agent's version.
        found: u32,
    },
    /// The agent tried and failed.
    #[error("process {pid}: {message}{}", code_suffix(*.code))]
    Failed {
        /// The process.
        pid: u32,
        /// The driver's code, or 0.
        code: i32,
        /// What failed.
        message: String,
    },
    /// The agent answered something else than what was asked.
    #[error("the agent of process {pid} gave an answer that does not fit the question")]
    Unexpected {
        /// The process.
        pid: u32,
    },
    /// What the agent says of its program cannot be so.
    #[error("the agent of process {pid} gave an answer that cannot be true: {what}")]
    Absurd {
        /// The process.
        pid: u32,
        /// What of it.
        what: &'static str,
    },
    /// gpucr was asked to end.
    #[error("interrupted")]
    Interrupted,
}

fn code_suffix(code: i32) -> String {
    if code == 0 { String::new() } else { format!(" (driver error {code})") }
}

/// All blocks of a process, and the descriptors of some of them by id.
pub type Exported = (Vec<Block>, Vec<(u64, OwnedFd)>);

/// Memory that is saved while the program runs, and what is known of the kernels that may write it.
#[derive(Debug)]
pub struct Guard {
    /// The device memory.
    pub ranges: Vec<Range>,
    /// What is known of kernels.
    pub summaries: Vec<KernelSummary>,
    /// Names of kernels that may write anywhere.
    pub distrusted: Vec<String>,
    /// The chunk table of these ranges.
    pub table: OwnedFd,
}

/// A connection to the agent of one process. While it is open the agent serves nobody else;
/// dropping it opens the gate, unless the program is detached.
#[derive(Debug)]
pub struct Agent {
    pid: u32,
    connection: Connection,
    hello: Hello,
    in_step: bool,
    /// By when everything has to be done that it is asked for.
    end: Option<Instant>,
}

impl Agent {
    /// Whether an agent listens in `process`.
    pub fn listens(process: &ProcessInfo) -> bool {
        sockets::agent(process).is_some()
    }

    /// Connects to the agent of `process` and exchanges versions. `limit` bounds that, since a frozen process
    /// answers only when it thaws; `stop` ends this and whatever it is asked for later.
    ///
    /// # Errors
    /// [`AgentError::Absent`] if no agent listens, or somebody else in its place; [`AgentError::Version`] if it speaks
    /// another version; [`AgentError::Broken`] if it does not answer in time; or gpucr was asked to end.
    pub fn connect(
        process: &ProcessInfo,
        limit: Duration,
        stop: Option<&Arc<AtomicBool>>,
    ) -> Result<Self, AgentError> {
        gpucr_wire::wake_agent(process.pid);
        Self::meet(process, None, process.pid, limit, stop)
    }

    /// Connects to an agent that is known to listen on this name.
    pub(super) fn connect_to(
        process: &ProcessInfo,
        name: String,
        limit: Duration,
    ) -> Result<Self, AgentError> {
        Self::meet(process, Some(name), process.pid, limit, None)
    }

    /// Connects to the agent of a process that was restored just now, with the socket that this gpucr
    /// has [made](super::sockets) for it.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub fn connect_restored(
        process: &ProcessInfo,
        limit: Duration,
        stop: Option<&Arc<AtomicBool>>,
    ) -> Result<Self, AgentError> {
        gpucr_wire::wake_agent(process.pid);
        Self::meet(process, None, std::process::id(), limit, stop)
    }

    /// Connects to a socket that process `listener` has made.
    fn meet(
        process: &ProcessInfo,
        name: Option<String>,
        listener: u32,
        limit: Duration,
        stop: Option<&Arc<AtomicBool>>,
    ) -> Result<Self, AgentError> {
        let pid = process.pid;
        let broken = |cause: io::Error| match cause.kind() {
            io::ErrorKind::ConnectionRefused => AgentError::Absent { pid },
            io::ErrorKind::Interrupted => AgentError::Interrupted,
            _ => AgentError::Broken { pid, cause },
        };
        let deadline = Instant::now().checked_add(limit);
        let name = name.or_else(|| sockets::agent(process)).ok_or(AgentError::Absent { pid })?;
        // Abstract sockets belong to a network namespace.
        let connect = || Connection::connect(&name, deadline, stop.cloned());
        let connection = network::visit(pid, connect).map_err(broken)?;
        // A pid of 0 means that the peer is in a namespace that has no name for it here.
        let peer = connection.peer().map_err(broken)?;
        if peer.pid != listener && peer.pid != 0 {
            tracing::warn!(pid, other = peer.pid, "another process listens in place of the agent");
            return Err(AgentError::Absent { pid });
        }
        let mut agent = Self {
            pid,
            connection,
            hello: Hello {
                protocol: 0,
                pid: 0,
                shim: String::new(),
                driver: String::new(),
                driver_version: 0,
                gate: GateState::Open {},
            },
            in_step: true,
            end: deadline,
        };
        let hello = agent.ask(&Request::Hello { protocol: PROTOCOL_VERSION })?;
        let Reply::Hello { hello } = hello else { return Err(AgentError::Unexpected { pid }) };
        if hello.protocol != PROTOCOL_VERSION {
            return Err(AgentError::Version { pid, found: hello.protocol });
        }
        agent.hello = hello;
        agent.end = None;
        Ok(agent)
    }

    /// What ends early whatever it is asked for from now on.
    pub fn set_stop(&mut self, stop: Option<Arc<AtomicBool>>) {
        self.connection.set_stop(stop);
    }

    /// By when everything has to be done that it is asked for from now on; without, each request has its own
    /// time.
    pub fn set_end(&mut self, end: Option<Instant>) {
        self.end = end;
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// What the agent said of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Makes a failure of the connection the agent's, which is out of step from then on.
    fn checked<T>(&mut self, result: io::Result<T>) -> Result<T, AgentError> {
        result.map_err(|cause| {
            self.in_step = false;
            match cause.kind() {
                io::ErrorKind::Interrupted => AgentError::Interrupted,
                _ => AgentError::Broken { pid: self.pid, cause },
            }
        })
    }

    /// Begins an exchange with a request; all of it has to be over in `limit`.
    fn begin(&mut self, request: &Request, limit: Duration) -> Result<(), AgentError> {
        let own = Instant::now().checked_add(limit);
        let end = [own, self.end].into_iter().flatten().min();
        self.connection.set_deadline(end);
        let sent = self.connection.send(request);
        self.checked(sent)
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, AgentError> {
        self.begin(request, ANSWER)?;
        self.answer(request)
    }

    fn answer(&mut self, request: &Request) -> Result<Reply, AgentError> {
        let received = self.connection.receive_at_most(request.longest_reply());
        match self.checked(received)? {
            Reply::Failed { code, message } => {
                let message = answers::shortened(message);
                Err(AgentError::Failed { pid: self.pid, code, message })
            }
            reply => Ok(reply),
        }
    }

    /// Takes an answer for what it says only if that can be so.
    fn plausible(&mut self, checked: Result<(), &'static str>) -> Result<(), AgentError> {
        checked.map_err(|what| {
            // Descriptors of it may be on their way.
            self.in_step = false;
            AgentError::Absurd { pid: self.pid, what }
        })
    }

    fn done(&self, reply: Reply) -> Result<(), AgentError> {
        match reply {
            Reply::Done {} => Ok(()),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    fn carry_out(&mut self, request: &Request) -> Result<(), AgentError> {
        let reply = self.ask(request)?;
        self.done(reply)
    }

    /// What the program holds.
    ///
    /// # Errors
    /// The agent does not answer in time, what it says cannot be so, or gpucr was asked to end.
    pub fn counts(&mut self) -> Result<Counts, AgentError> {
        let Reply::Counts { counts } = self.ask(&Request::Counts {})? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        self.plausible(answers::counts(&counts))?;
        Ok(counts)
    }

    /// Closes the gate and drains all streams. After a failure the gate is open; after one of the connection as
    /// soon as the agent sees its end.
    ///
    /// # Errors
    /// The gate is not open, the program does not come to rest in `limit`, the agent does not answer in time, or gpucr
    /// was asked to end.
    pub fn close_gate(&mut self, limit: Duration) -> Result<(), AgentError> {
        let request = Request::CloseGate { timeout_ms: limit.as_millis() as u64 };
        self.begin(&request, limit.saturating_add(ANSWER))?;
        let reply = self.answer(&request)?;
        self.done(reply)
    }

    /// Shuts the gate, or goes on waiting, for `wait` at most, until the program stands still behind it. How far it is
    /// then; the gate stays shut. After a failure it is open; after one of the connection as soon as the agent sees its
    /// end. `limit` is for what has to be done before the gate is shut.
    ///
    /// # Errors
    /// The gate is not open, a context is broken, the agent does not answer in time, or gpucr was asked to end.
    pub fn halt(&mut self, wait: Duration, limit: Duration) -> Result<Rest, AgentError> {
        let (wait_ms, timeout_ms) = (wait.as_millis() as u64, limit.as_millis() as u64);
        // Blocks that have begun have half of the time. Those that are not done then may be waiting for others, which go
        // on in the other half.
        let interrupt_ms = timeout_ms / 2;
        let request = Request::Halt { wait_ms, timeout_ms, interrupt_ms };
        self.begin(&request, wait.saturating_add(limit).saturating_add(ANSWER))?;
        match self.answer(&request)? {
            Reply::Rest { rest } => Ok(rest),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// The launches of a program behind its closed gate that were interrupted by [`halt`](Self::halt).
    ///
    /// # Errors
    /// The gate is not closed, the agent does not answer in time or tells nonsense, or gpucr was asked to end.
    pub fn interrupted(&mut self) -> Result<Vec<Interrupted>, AgentError> {
        let Reply::Interrupted { launches } = self.ask(&Request::Interrupted {})? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        self.plausible(answers::interrupted(&launches))?;
        Ok(launches)
    }

    /// Whether a kernel of the program would die if another process came to its devices now: the driver has restored it
    /// once, and a kernel takes longer than `wait`, or may. The gate may be shut for so long.
    ///
    /// # Errors
    /// The agent does not answer in time, or cannot shut the gate, which is open then; or gpucr was asked to end.
    pub fn is_fragile(&mut self, wait: Duration) -> Result<bool, AgentError> {
        let request = Request::Fragile { wait_ms: wait.as_millis() as u64 };
        self.begin(&request, wait.saturating_add(ANSWER))?;
        match self.answer(&request)? {
            Reply::Fragile { fragile } => Ok(fragile),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// Tells the program that it was restored.
    ///
    /// # Errors
    /// The agent does not answer in time.
    pub fn tell_restored(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::Restored {})
    }

    /// Waits until a thread of the program comes back from a call by which it waits for the device, and has the gate
    /// begin to close before that goes on: [`halt`](Self::halt) does the rest. Whether one has come back in `wait`.
    ///
    /// # Errors
    /// As with `halt`.
    pub fn wait_for_sync(&mut self, wait: Duration) -> Result<bool, AgentError> {
        let request = Request::Meet { wait_ms: wait.as_millis() as u64 };
        self.begin(&request, wait.saturating_add(MEETING).saturating_add(ANSWER))?;
        match self.answer(&request)? {
            Reply::Met { met } => Ok(met),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// Lets calls pass the gate that is shut by [`halt`](Self::halt), up to the next launch on an idle device,
    /// or on any with `busy_too`, waiting `wait` for one. Whether one came. Where the program stands then only `halt` tells.
    ///
    /// # Errors
    /// As with `halt`; and nothing can be launched now.
    pub fn pass(&mut self, busy_too: bool, wait: Duration) -> Result<bool, AgentError> {
        let request = Request::Pass { wait_ms: wait.as_millis() as u64, busy_too };
        self.begin(&request, wait.saturating_add(ANSWER))?;
        match self.answer(&request)? {
            Reply::Passed { launched } => Ok(launched),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// Lets calls pass the closed gate up to the next launch, waiting `wait` for one, and closes it
    /// again.
    ///
    /// # Errors
    /// The errors of [`close_gate`](Self::close_gate), but that the gate has to be closed.
    pub fn step(&mut self, wait: Duration, limit: Duration, keep: bool) -> Result<(), AgentError> {
        let (wait_ms, timeout_ms) = (wait.as_millis() as u64, limit.as_millis() as u64);
        let request = Request::Step { wait_ms, timeout_ms, keep };
        self.begin(&request, wait.saturating_add(limit).saturating_add(ANSWER))?;
        let reply = self.answer(&request)?;
        self.done(reply)
    }

    /// Makes the launch once more that the last step has kept. Whether one was kept that can be.
    ///
    /// # Errors
    /// The driver refuses it, or it lasts longer than the limit.
    pub fn again(&mut self, limit: Duration) -> Result<bool, AgentError> {
        let request = Request::Again { timeout_ms: limit.as_millis() as u64 };
        self.begin(&request, limit.saturating_add(ANSWER))?;
        let reply = self.answer(&request)?;
        match reply {
            Reply::Again { launched } => Ok(launched),
            reply => self.done(reply).and(Err(AgentError::Unexpected { pid: self.pid })),
        }
    }

    /// Every block, and of those that are not `known` their id and a file descriptor. While the
    /// gate is open the program goes on making and giving back blocks.
    ///
    /// # Errors
    /// The agent cannot make descriptors or does not answer in time, what it says cannot be so, this process has no
    /// room for them, or gpucr was asked to end.
    pub fn export(&mut self, known: Vec<u64>) -> Result<Exported, AgentError> {
        let held: HashSet<u64> = known.iter().copied().collect();
        let blocks = self.counts()?.blocks;
        let _room = self.room(blocks);
        let Reply::Blocks { blocks } = self.ask(&Request::Export { known })? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        self.plausible(answers::blocks(&blocks))?;
        // Of a block that is opened its owner has a descriptor.
        let own = blocks.iter().filter(|block| !matches!(block.kind, BlockKind::Opened { .. }));
        let new: Vec<u64> = own.map(|block| block.id).filter(|id| !held.contains(id)).collect();
        let received = self.connection.receive_fds(new.len());
        let fds = self.checked(received)?;
        Ok((blocks, new.into_iter().zip(fds).collect()))
    }

    /// Room for descriptors of so many blocks in the program. Without it the agent does what it can.
    fn room(&self, blocks: u64) -> Option<Raised> {
        limits::lend_room(self.pid, blocks).unwrap_or_else(|error| {
            tracing::warn!(pid = self.pid, %error, "no room");
            None
        })
    }

    /// Gives the agent the memory through which [`Agent::copy_out`] and [`Agent::copy_in`] pass
    /// bytes.
    ///
    /// # Errors
    /// The agent cannot map the memory or does not answer in time, or gpucr was asked to end.
    pub fn stage(&mut self, memory: impl AsFd, len: u64) -> Result<(), AgentError> {
        self.hand_over(&Request::Stage { len }, &[memory.as_fd()])
    }

    /// Copies from a block into the staging memory.
    ///
    /// # Errors
    /// There is no such block or staging memory, the driver fails, the agent does not answer in time, or gpucr was
    /// asked to end. The staging memory may have a part of the bytes.
    pub fn copy_out(&mut self, block: u64, offset: u64, len: u64) -> Result<(), AgentError> {
        self.carry_out(&Request::CopyOut { block, offset, len })
    }

    /// Copies from the staging memory into a block, which is made if it is not there.
    ///
    /// # Errors
    /// The block cannot be made, the driver fails, the agent does not answer in time, or gpucr was asked to end. The
    /// block may have a part of the bytes.
    pub fn copy_in(&mut self, block: u64, offset: u64, len: u64) -> Result<(), AgentError> {
        self.carry_out(&Request::CopyIn { block, offset, len })
    }

    /// Takes the bulk memory away from the program, which ends the connection. Where the agent
    /// says that it failed, the program still has its memory and the connection is given back;
    /// after any other failure it is unknown what was done, and a new connection tells.
    ///
    /// # Errors
    /// [`AgentError::Failed`] with the connection, or another error without.
    pub fn detach(mut self) -> Result<(), (Option<Box<Self>>, AgentError)> {
        match self.carry_out(&Request::Detach {}) {
            Ok(()) => Ok(()),
            Err(error @ AgentError::Failed { .. }) => Err((Some(Box::new(self)), error)),
            Err(error) => Err((None, error)),
        }
    }

    /// Whether requests and answers are still in step: after a broken exchange a late answer
    /// would be taken for that of the next request.
    pub fn is_in_step(&self) -> bool {
        self.in_step
    }

    /// Gives the bulk memory back. After a failure the program is still detached.
    ///
    /// # Errors
    /// The agent cannot take the memory or does not answer in time, or gpucr was asked to end.
    pub fn reattach(&mut self, blocks: &[(u64, OwnedFd)]) -> Result<(), AgentError> {
        let _room = self.room(blocks.len() as u64);
        let ids = blocks.iter().map(|(id, _)| *id).collect();
        let fds: Vec<_> = blocks.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.hand_over(&Request::Reattach { blocks: ids }, &fds)
    }

    /// Lets the program, which is detached, go on before these blocks are there: whatever may touch one waits
    /// for its chunk in the table, which has a range for each.
    ///
    /// # Errors
    /// The agent cannot take the table or does not answer in time, or gpucr was asked to end.
    pub fn await_blocks(&mut self, blocks: Vec<u64>, table: OwnedFd) -> Result<(), AgentError> {
        self.hand_over(&Request::Await { blocks }, &[table.as_fd()])
    }

    /// Gives awaited blocks their memory. After a failure some of them have it.
    ///
    /// # Errors
    /// The agent cannot take the memory or does not answer in time, or gpucr was asked to end.
    pub fn attach(&mut self, blocks: &[(u64, OwnedFd)]) -> Result<(), AgentError> {
        let _room = self.room(blocks.len() as u64);
        let ids = blocks.iter().map(|(id, _)| *id).collect();
        let fds: Vec<_> = blocks.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.hand_over(&Request::Attach { blocks: ids }, &fds)
    }

    /// The memory that these blocks of the program, which is detached, get next is shared with other instances.
    /// What may write one waits until the agent has given it memory of its own. It outlives the connection.
    ///
    /// # Errors
    /// The agent cannot take the table or does not answer in time, or gpucr was asked to end.
    pub fn share(
        &mut self,
        blocks: Vec<u64>,
        summaries: Vec<KernelSummary>,
        table: impl AsFd,
    ) -> Result<(), AgentError> {
        self.hand_over(&Request::Share { blocks, summaries }, &[table.as_fd()])
    }

    /// Carries out a request that descriptors follow.
    fn hand_over(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), AgentError> {
        self.begin(request, ANSWER)?;
        let sent = self.connection.send_fds(fds);
        self.checked(sent)?;
        let reply = self.answer(request)?;
        self.done(reply)
    }

    /// Begins to record what launches may read and write, or ends it. It ends with the connection
    /// too.
    ///
    /// # Errors
    /// The agent does not answer in time, or gpucr was asked to end. It may record or not.
    pub fn record(&mut self, on: bool) -> Result<(), AgentError> {
        self.carry_out(&Request::Record { on })
    }

    /// What was launched since recording began or this was last asked.
    ///
    /// # Errors
    /// Nothing is recorded, the agent does not answer in time, what it says cannot be so, or gpucr was asked to end.
    /// What was launched so far may be lost.
    pub fn accesses(&mut self) -> Result<Accesses, AgentError> {
        let Reply::Accesses { accesses } = self.ask(&Request::Accesses {})? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        self.plausible(answers::accesses(&accesses))?;
        Ok(accesses)
    }

    /// What a module was loaded from. Where that is not to be had any more, or has more than `limit`
    /// bytes, the error is [`AgentError::Failed`].
    ///
    /// # Errors
    /// Besides [`AgentError::Failed`]: what the agent hands over is no regular file or too short, it does not answer in
    /// time, or gpucr was asked to end.
    pub fn image(&mut self, id: u64, limit: u64) -> Result<Vec<u8>, AgentError> {
        let Reply::Image { bytes } = self.ask(&Request::Image { id, limit })? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        let received = self.connection.receive_fds(1);
        let file = File::from(self.checked(received)?.remove(0));
        let failed = |error| AgentError::Failed {
            pid: self.pid,
            code: 0,
            message: format!("image {id} cannot be read: {error}"),
        };
        // A device, or a file that can be made longer than it is, may have no end.
        let found = file.metadata().map_err(failed)?;
        if bytes > limit || !found.is_file() || found.len() < bytes {
            return Err(AgentError::Unexpected { pid: self.pid });
        }
        let mut image = vec![0; bytes as usize];
        file.read_exact_at(&mut image, 0).map_err(failed)?;
        Ok(image)
    }

    /// Hands a chunk table over: when the gate opens, what may write a chunk waits until it is saved.
    /// The guard ends with the connection.
    ///
    /// # Errors
    /// The agent cannot take the table or does not answer in time, or gpucr was asked to end.
    pub fn guard(&mut self, guard: &Guard) -> Result<(), AgentError> {
        let Guard { ranges, summaries, distrusted, table } = guard;
        let (ranges, summaries) = (ranges.clone(), summaries.clone());
        let request = Request::Guard { ranges, summaries, distrusted: distrusted.clone() };
        self.hand_over(&request, &[table.as_fd()])
    }

    /// Has the process make a userfaultfd. From then on the agent remembers what
    /// devices may write of the host's memory ([`pinned`](Self::pinned)).
    ///
    /// # Errors
    /// [`AgentError::Failed`] if the process cannot make one; [`AgentError::Unexpected`] if what comes is none. An
    /// agent of before this request ends the connection, which is [`AgentError::Broken`]. Or it does not answer in time, or
    /// gpucr was asked to end.
    pub fn track(&mut self) -> Result<OwnedFd, AgentError> {
        self.carry_out(&Request::Track {})?;
        let received = self.connection.receive_fds(1);
        let fd = self.checked(received)?.remove(0);
        // The program may be hostile, and requests to other descriptors mean other things.
        let link = rustix::fs::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new());
        if link.is_ok_and(|link| link.to_bytes() == b"anon_inode:[userfaultfd]") {
            Ok(fd)
        } else {
            Err(AgentError::Unexpected { pid: self.pid })
        }
    }

    /// Addresses and bytes of host memory that devices may have written since [`track`](Self::track).
    ///
    /// # Errors
    /// Nothing is tracked, the agent does not answer in time, or gpucr was asked to end.
    pub fn pinned(&mut self) -> Result<Vec<Range>, AgentError> {
        match self.ask(&Request::Pinned {})? {
            Reply::Ranges { ranges } => Ok(ranges),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// Lets the program run.
    ///
    /// # Errors
    /// The memory of a detached program cannot be used, and it stays detached; the agent does not answer in time; or
    /// gpucr was asked to end. The gate of a program that is not detached opens all the same with the end of the
    /// connection.
    pub fn open_gate(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::OpenGate {})
    }
}
