//! The checkpointer's side of the conversation with an agent.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use gpucr_wire::access::Habits;
use gpucr_wire::table::Range;
use gpucr_wire::{
    Accesses, Block, Connection, Counts, GateState, Hello, PROTOCOL_VERSION, Reply, Request,
    agent_socket,
};

use super::sockets;
use super::tree::ProcessInfo;

/// How long an agent may take for an answer that needs no waiting in the program.
const ANSWER: Duration = Duration::from_secs(60);

/// Why an agent did not do what it was asked for.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The process has no agent: it was not started under `gpucr run`, or uses no CUDA yet.
    #[error("process {pid} has no agent")]
    Absent {
        /// The process.
        pid: u32,
    },
    /// Somebody else listens on the agent's name.
    #[error("the agent's socket of process {pid} belongs to process {other}")]
    Impostor {
        /// The process.
        pid: u32,
        /// Who listens.
        other: u32,
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
}

fn code_suffix(code: i32) -> String {
    if code == 0 { String::new() } else { format!(" (driver error {code})") }
}

/// All blocks of a process, and the descriptors of some of them by id.
pub type Exported = (Vec<Block>, Vec<(u64, OwnedFd)>);

/// Memory that is saved while the program runs, and what is known of those who may write it.
#[derive(Debug)]
pub struct Guard {
    /// The device memory.
    pub ranges: Vec<Range>,
    /// What is known of kernels.
    pub habits: Vec<Habits>,
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
}

impl Agent {
    /// Whether an agent listens in `process`.
    pub fn listens(process: &ProcessInfo) -> bool {
        sockets::has_agent(process)
    }

    /// Connects to the agent of `process` and exchanges versions. `limit` bounds the wait for its
    /// first answer, which a frozen process gives only when it thaws.
    pub fn connect(process: &ProcessInfo, limit: Duration) -> Result<Self, AgentError> {
        Self::meet(process, process.pid, limit)
    }

    /// The same, for a process that was restored just now, with the socket that this gpucr has
    /// [made](super::sockets) for it.
    pub fn connect_restored(process: &ProcessInfo, limit: Duration) -> Result<Self, AgentError> {
        Self::meet(process, std::process::id(), limit)
    }

    /// Connects to a socket that process `listener` has made.
    fn meet(process: &ProcessInfo, listener: u32, limit: Duration) -> Result<Self, AgentError> {
        let pid = process.pid;
        let broken = |cause| AgentError::Broken { pid, cause };
        let connection = open(process).map_err(|cause| match cause.kind() {
            io::ErrorKind::ConnectionRefused => AgentError::Absent { pid },
            _ => AgentError::Broken { pid, cause },
        })?;
        // A pid of 0 means that the peer is in a namespace that has no name for it here.
        let peer = connection.peer().map_err(broken)?;
        if peer.pid != listener && peer.pid != 0 {
            return Err(AgentError::Impostor { pid, other: peer.pid });
        }
        connection.set_read_timeout(Some(limit)).map_err(broken)?;
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
        };
        let hello = agent.ask(&Request::Hello { protocol: PROTOCOL_VERSION })?;
        let Reply::Hello { hello } = hello else { return Err(AgentError::Unexpected { pid }) };
        if hello.protocol != PROTOCOL_VERSION {
            return Err(AgentError::Version { pid, found: hello.protocol });
        }
        agent.hello = hello;
        agent.connection.set_read_timeout(Some(ANSWER)).map_err(broken)?;
        Ok(agent)
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
            AgentError::Broken { pid: self.pid, cause }
        })
    }

    fn ask(&mut self, request: &Request) -> Result<Reply, AgentError> {
        let sent = self.connection.send(request);
        self.checked(sent)?;
        self.answer()
    }

    fn answer(&mut self) -> Result<Reply, AgentError> {
        let received = self.connection.receive();
        match self.checked(received)? {
            Reply::Failed { code, message } => {
                Err(AgentError::Failed { pid: self.pid, code, message })
            }
            reply => Ok(reply),
        }
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
    pub fn counts(&mut self) -> Result<Counts, AgentError> {
        match self.ask(&Request::Counts {})? {
            Reply::Counts { counts } => Ok(counts),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// Closes the gate and drains all streams. After a failure the gate is open.
    pub fn close_gate(&mut self, limit: Duration) -> Result<(), AgentError> {
        let set = self.connection.set_read_timeout(Some(limit + ANSWER));
        self.checked(set)?;
        let result = self.carry_out(&Request::CloseGate { timeout_ms: limit.as_millis() as u64 });
        let set = self.connection.set_read_timeout(Some(ANSWER));
        self.checked(set)?;
        result
    }

    /// Lets calls pass the closed gate up to the next launch, waiting `wait` for one, and closes it
    /// again.
    pub fn step(&mut self, wait: Duration, limit: Duration) -> Result<(), AgentError> {
        let set = self.connection.set_read_timeout(Some(wait + limit + ANSWER));
        self.checked(set)?;
        let (wait_ms, timeout_ms) = (wait.as_millis() as u64, limit.as_millis() as u64);
        let result = self.carry_out(&Request::Step { wait_ms, timeout_ms });
        let set = self.connection.set_read_timeout(Some(ANSWER));
        self.checked(set)?;
        result
    }

    /// Every block, and of those that are not `known` their id and a file descriptor. While the
    /// gate is open the program goes on making and giving back blocks.
    pub fn export(&mut self, known: Vec<u64>) -> Result<Exported, AgentError> {
        let held: HashSet<u64> = known.iter().copied().collect();
        let Reply::Blocks { blocks } = self.ask(&Request::Export { known })? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        let new: Vec<u64> =
            blocks.iter().map(|block| block.id).filter(|id| !held.contains(id)).collect();
        let received = self.connection.receive_fds(new.len());
        let fds = self.checked(received)?;
        Ok((blocks, new.into_iter().zip(fds).collect()))
    }

    /// Gives the agent the memory through which [`Agent::copy_out`] and [`Agent::copy_in`] pass
    /// bytes.
    pub fn stage(&mut self, memory: impl AsFd, len: u64) -> Result<(), AgentError> {
        self.hand_over(&Request::Stage { len }, &[memory.as_fd()])
    }

    /// Copies from a block into the staging memory.
    pub fn copy_out(&mut self, block: u64, offset: u64, len: u64) -> Result<(), AgentError> {
        self.carry_out(&Request::CopyOut { block, offset, len })
    }

    /// Copies from the staging memory into a block, which is made if it is not there.
    pub fn copy_in(&mut self, block: u64, offset: u64, len: u64) -> Result<(), AgentError> {
        self.carry_out(&Request::CopyIn { block, offset, len })
    }

    /// Takes the bulk memory away from the program, which ends the connection. Where the agent
    /// says that it failed, the program has its memory still and the connection is given back;
    /// after any other failure it is unknown what was done, and a new connection tells.
    pub fn detach(mut self) -> Result<(), (Option<Self>, AgentError)> {
        match self.carry_out(&Request::Detach {}) {
            Ok(()) => Ok(()),
            Err(error @ AgentError::Failed { .. }) => Err((Some(self), error)),
            Err(error) => Err((None, error)),
        }
    }

    /// Whether requests and answers are still in step: after a broken exchange a late answer
    /// would be taken for that of the next request.
    pub fn is_in_step(&self) -> bool {
        self.in_step
    }

    /// Gives the bulk memory back. After a failure the program is detached still.
    pub fn reattach(&mut self, blocks: &[(u64, OwnedFd)]) -> Result<(), AgentError> {
        let ids = blocks.iter().map(|(id, _)| *id).collect();
        let fds: Vec<_> = blocks.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.hand_over(&Request::Reattach { blocks: ids }, &fds)
    }

    /// Lets the program, which is detached, go on before these blocks are there: whatever may touch one waits
    /// for its chunk in the table, which has a range for each.
    pub fn await_blocks(&mut self, blocks: Vec<u64>, table: OwnedFd) -> Result<(), AgentError> {
        self.hand_over(&Request::Await { blocks }, &[table.as_fd()])
    }

    /// Gives awaited blocks their memory. After a failure some of them have it.
    pub fn attach(&mut self, blocks: &[(u64, OwnedFd)]) -> Result<(), AgentError> {
        let ids = blocks.iter().map(|(id, _)| *id).collect();
        let fds: Vec<_> = blocks.iter().map(|(_, fd)| fd.as_fd()).collect();
        self.hand_over(&Request::Attach { blocks: ids }, &fds)
    }

    /// The memory that these blocks of the program, which is detached, get next is shared with other instances.
    /// What may write one waits until the agent has given it memory of its own. It outlives the connection.
    pub fn share(
        &mut self,
        blocks: Vec<u64>,
        habits: Vec<Habits>,
        table: impl AsFd,
    ) -> Result<(), AgentError> {
        self.hand_over(&Request::Share { blocks, habits }, &[table.as_fd()])
    }

    /// Carries out a request that descriptors follow.
    fn hand_over(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(), AgentError> {
        let sent = self.connection.send(request);
        self.checked(sent)?;
        let sent = self.connection.send_fds(fds);
        self.checked(sent)?;
        let reply = self.answer()?;
        self.done(reply)
    }

    /// Begins to record what launches may read and write, or ends it. It ends with the connection
    /// too.
    pub fn record(&mut self, on: bool) -> Result<(), AgentError> {
        self.carry_out(&Request::Record { on })
    }

    /// What was launched since recording began or this was last asked.
    pub fn accesses(&mut self) -> Result<Accesses, AgentError> {
        match self.ask(&Request::Accesses {})? {
            Reply::Accesses { accesses } => Ok(accesses),
            _ => Err(AgentError::Unexpected { pid: self.pid }),
        }
    }

    /// What a module was loaded from. Where that is not to be had any more, or has more than `limit`
    /// bytes, the error is [`AgentError::Failed`].
    pub fn image(&mut self, id: u64, limit: u64) -> Result<Vec<u8>, AgentError> {
        let Reply::Image { bytes } = self.ask(&Request::Image { id, limit })? else {
            return Err(AgentError::Unexpected { pid: self.pid });
        };
        let received = self.connection.receive_fds(1);
        let file = File::from(self.checked(received)?.remove(0));
        if bytes > limit {
            return Err(AgentError::Unexpected { pid: self.pid });
        }
        let mut image = vec![0; bytes as usize];
        file.read_exact_at(&mut image, 0).map_err(|error| AgentError::Failed {
            pid: self.pid,
            code: 0,
            message: format!("image {id} cannot be read: {error}"),
        })?;
        Ok(image)
    }

    /// Hands a chunk table over: when the gate opens, what may write a chunk waits until it is saved.
    /// That ends with the connection.
    pub fn guard(&mut self, guard: &Guard) -> Result<(), AgentError> {
        let Guard { ranges, habits, distrusted, table } = guard;
        let (ranges, habits) = (ranges.clone(), habits.clone());
        let request = Request::Guard { ranges, habits, distrusted: distrusted.clone() };
        self.hand_over(&request, &[table.as_fd()])
    }

    /// Lets the program run.
    pub fn open_gate(&mut self) -> Result<(), AgentError> {
        self.carry_out(&Request::OpenGate {})
    }
}

fn name(process: &ProcessInfo) -> String {
    agent_socket(process.pid_namespace, process.inner_pid)
}

/// Connects to the agent's socket, in the process's network namespace.
fn open(process: &ProcessInfo) -> io::Result<Connection> {
    let name = name(process);
    let theirs = format!("/proc/{}/ns/net", process.pid);
    if std::fs::read_link(&theirs).ok() == std::fs::read_link("/proc/self/ns/net").ok() {
        return Connection::connect(&name);
    }
    // Abstract sockets belong to a network namespace. A thread of its own visits that one; the
    // socket stays usable after the thread has gone.
    let namespace = std::fs::File::open(theirs)?;
    let visitor = std::thread::spawn(move || {
        rustix::thread::move_into_link_name_space(
            namespace.as_fd(),
            Some(rustix::thread::LinkNameSpaceType::Network),
        )?;
        Connection::connect(&name)
    });
    visitor.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
