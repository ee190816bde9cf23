//! The agent: the thread through which a checkpointer talks to the program.
//!
//! It starts after the first successful `cuInit` and sleeps until somebody connects. It serves
//! one connection at a time, of the same user or of root.
//!
//! | state    | gate   | memory   | when the connection ends                        |
//! |----------|--------|----------|-------------------------------------------------|
//! | Open     | open   | in place | stays                                           |
//! | Closed   | closed | in place | the gate is opened: the checkpointer has died   |
//! | Detached | closed | away     | stays: who has the file descriptors comes back  |
//!
//! A program that was restored before its memory is there is Open with blocks that are awaited. If the
//! connection ends before they are there it becomes Detached again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpucr_wire::table::Range;
use gpucr_wire::{
    AGENT_QUEUE, AGENT_THREAD, Connection, Counts, GateState, Hello, PROTOCOL_VERSION, Reply,
    Request, Table,
};

use crate::abi::{library, real};
use crate::limit::Limit;
use crate::log::log;
use crate::state::memory::{self, Failure};
use crate::state::{contexts, gate, images, recent};
use crate::watch::{faults, guard};
use crate::{ungated, usage, watch};

mod descriptors;
mod drain;
pub(crate) mod sharing;
mod signals;
mod staging;
mod transfer;

use descriptors::Room;
use sharing::Sharing;
use staging::Staging;
use transfer::Transfer;

/// How long it may take until shared memory has become the program's own, where the request has no limit.
const LIMIT: Duration = Duration::from_secs(10);

static STARTED: AtomicBool = AtomicBool::new(false);
/// The sockets, for the child of a fork to close; -1 is none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);
static CONNECTION: AtomicI32 = AtomicI32::new(-1);

/// Starts the agent, once in a process. Without one the program runs all the same, and cannot be
/// dumped.
pub(crate) fn start() {
    if STARTED.swap(true, Ordering::SeqCst) {
        return;
    }
    let listener = match listen() {
        Ok(listener) => listener,
        Err(error) => {
            log!("cannot listen, so nobody can dump this program: {error}");
            return;
        }
    };
    LISTENER.store(listener.as_raw_fd(), Ordering::SeqCst);
    // A new thread has its maker's signal mask: no signal of the program's may land in this one.
    let blocked = signals::block_all();
    let thread = thread::Builder::new().name(AGENT_THREAD.into()).spawn(move || run(&listener));
    drop(blocked);
    if let Err(error) = thread {
        LISTENER.store(-1, Ordering::SeqCst);
        log!("cannot start the agent: {error}");
    }
}

/// Listens on the agent's name, or on another one if somebody on the host has taken that.
fn listen() -> io::Result<UnixListener> {
    // Without /proc nobody finds it either.
    let namespace = gpucr_wire::own_pid_namespace().unwrap_or_default();
    let pid = std::process::id();
    let name = gpucr_wire::agent_socket(namespace, pid);
    let listener = match Connection::listen(&name) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let aside = gpucr_wire::agent_socket_aside(namespace, pid)?;
            log!("somebody else listens on {name}; this agent listens on {aside}");
            Connection::listen(&aside)
        }
        done => done,
    }?;
    rustix::net::listen(&listener, AGENT_QUEUE)?;
    Ok(listener)
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    for socket in [&LISTENER, &CONNECTION] {
        let fd = socket.swap(-1, Ordering::SeqCst);
        if fd >= 0 {
            // SAFETY: its owner is a thread that this process does not have.
            unsafe { libc::close(fd) };
        }
    }
    STARTED.store(false, Ordering::SeqCst);
    descriptors::reset();
}

fn run(listener: &UnixListener) {
    drain::tolerate_captures();
    let mut agent = Agent::new();
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                let connection = Connection::new(socket);
                // Before anything else: anybody on the host may connect, again and again.
                if !is_trusted(&connection) {
                    continue;
                }
                CONNECTION.store(connection.as_fd().as_raw_fd(), Ordering::SeqCst);
                // A mistake in here must not take the program along.
                if catch_unwind(AssertUnwindSafe(|| agent.serve(connection))).is_err() {
                    log!("the agent failed");
                }
                CONNECTION.store(-1, Ordering::SeqCst);
                agent.connection_ended();
                if std::mem::take(&mut agent.is_left_alone) {
                    signals::wait_to_be_woken();
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

/// What the agent knows from one request to the next.
struct Agent {
    state: GateState,
    driver_version: i32,
    transfer: Transfer,
    staging: Option<Staging>,
    /// Whether blocks are awaited, or were until all came, and nobody has looked yet whether the device has
    /// missed one.
    awaiting: bool,
    /// While memory may be shared with other instances.
    sharing: Option<Sharing>,
    /// What it held when it was detached: the driver may be frozen since, and cannot be asked.
    devices: Vec<[u8; 16]>,
    /// Whether nobody is accepted before it is woken.
    is_left_alone: bool,
}

/// What to do after a request.
enum Next {
    Reply(Reply),
    /// The reply has been sent.
    Sent,
    /// Send it, and close the connection.
    Last(Reply),
}

impl Agent {
    fn new() -> Self {
        Self {
            state: GateState::Open {},
            driver_version: real::version(),
            transfer: Transfer::default(),
            staging: None,
            awaiting: false,
            sharing: None,
            devices: Vec::new(),
            is_left_alone: false,
        }
    }

    fn serve(&mut self, mut connection: Connection) {
        let mut greeted = false;
        loop {
            let request = match connection.receive() {
                Ok(request) => request,
                Err(error) => return log!("the connection ends: {error}"),
            };
            log!("request {request:?}");
            let next = match request {
                Request::Hello { protocol } if protocol == PROTOCOL_VERSION => {
                    greeted = true;
                    answer_to_the_name();
                    Ok(Next::Reply(Reply::Hello { hello: self.hello() }))
                }
                // The checkpointer sees the other version and says so.
                Request::Hello { .. } => Ok(Next::Last(Reply::Hello { hello: self.hello() })),
                _ if !greeted => {
                    Ok(Next::Last(failed(Failure::other("the first request must be Hello"))))
                }
                request => self.handle(request, &mut connection),
            };
            let (reply, last) = match next {
                Ok(Next::Reply(reply)) => (reply, false),
                Ok(Next::Last(reply)) => (reply, true),
                Ok(Next::Sent) => continue,
                Err(failure) => {
                    log!("failed: {} (error {})", failure.message, failure.code);
                    (failed(failure), false)
                }
            };
            if let Err(error) = connection.send(&reply) {
                return log!("cannot reply: {error}");
            }
            if last {
                return;
            }
        }
    }

    fn connection_ended(&mut self) {
        if self.awaiting && !memory::lock().all_attached() {
            // What is missing comes no more. Those who wait for it go on waiting.
            gate::shut();
            self.state = GateState::Detached {};
            return;
        }
        self.stop_awaiting();
        watch::stop();
        guard::end_saving();
        self.staging = None;
        self.transfer.forget_exports();
        if self.state == (GateState::Closed {}) {
            self.open();
        }
    }

    /// Nothing is awaited any more.
    fn stop_awaiting(&mut self) {
        if std::mem::take(&mut self.awaiting) {
            faults::watch(false);
        }
    }

    /// Gives all shared memory a memory of its own: a checkpointer is about to look at it.
    ///
    /// # Errors
    /// Some of it is shared still, and the program runs on.
    fn end_sharing(&mut self, limit: Limit<'_>) -> Result<(), Failure> {
        if let Some(sharing) = &self.sharing {
            sharing.give_up(limit)?;
        }
        if let Some(sharing) = self.sharing.take() {
            sharing.end();
            faults::watch(false);
        }
        Ok(())
    }

    fn open(&mut self) {
        self.transfer.forget_exports();
        memory::lock().lend_at(guard::addresses().into_iter());
        self.state = GateState::Open {};
        gate::open();
    }

    fn hello(&self) -> Hello {
        let path = |path: Option<&std::path::Path>| {
            path.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default()
        };
        Hello {
            protocol: PROTOCOL_VERSION,
            pid: std::process::id(),
            shim: path(library::own_file()),
            driver: path(library::library().map(|library| library.path.as_path())),
            driver_version: self.driver_version,
            gate: self.state,
        }
    }

    fn handle(&mut self, request: Request, connection: &mut Connection) -> Result<Next, Failure> {
        let done = Next::Reply(Reply::Done {});
        match request {
            Request::Hello { .. } => unreachable!("served by serve()"),
            Request::Counts {} => Ok(Next::Reply(Reply::Counts { counts: self.counts() })),
            Request::CloseGate { timeout_ms } => {
                self.expect(GateState::Open {})?;
                if self.awaiting && !memory::lock().all_attached() {
                    return Err(Failure::other("not possible now: blocks are awaited"));
                }
                let limit = Duration::from_millis(timeout_ms);
                let asked = Limit::new(later(Instant::now(), limit), connection.as_fd());
                self.end_sharing(asked)?;
                self.close_by(Instant::now(), limit, connection, |limit| gate::close(*limit))?;
                Ok(done)
            }
            Request::Step { wait_ms, timeout_ms } => {
                self.expect(GateState::Closed {})?;
                self.state = GateState::Open {};
                let end = later(Instant::now(), Duration::from_millis(wait_ms));
                let limit = Duration::from_millis(timeout_ms);
                self.close_by(end, limit, connection, |limit| {
                    gate::step(Limit::new(end, connection.as_fd()), *limit)
                })?;
                Ok(done)
            }
            Request::Export { known } => {
                if self.state != (GateState::Open {}) {
                    self.expect(GateState::Closed {})?;
                }
                self.end_sharing(Limit::new(Instant::now() + LIMIT, connection.as_fd()))?;
                self.transfer.export(connection, known, self.state)?;
                Ok(Next::Sent)
            }
            Request::Stage { len } => {
                // Announced, so it is taken off the connection even if it cannot be used.
                let fds = connection
                    .receive_fds(1)
                    .map_err(|error| Failure::other(format!("no staging memory: {error}")))?;
                self.staging = None;
                self.staging = Some(Staging::map(&fds[0], len)?);
                Ok(done)
            }
            Request::CopyOut { block, offset, len } => {
                self.expect(GateState::Closed {})?;
                let to = staged(&self.staging, len)?;
                transfer::copy_out(block, offset, len, to)?;
                Ok(done)
            }
            Request::CopyIn { block, offset, len } => {
                self.expect(GateState::Detached {})?;
                let from = staged(&self.staging, len)?;
                transfer::copy_in(block, offset, len, from)?;
                Ok(done)
            }
            Request::Detach {} => {
                self.expect(GateState::Closed {})?;
                self.devices = devices();
                if let Err(failure) = self.transfer.detach() {
                    // Where even the way back failed, the gate must not open.
                    if !memory::lock().all_attached() {
                        self.state = GateState::Detached {};
                    }
                    return Err(failure);
                }
                self.staging = None;
                self.state = GateState::Detached {};
                self.is_left_alone = true;
                signals::forget_to_be_woken();
                Ok(Next::Last(Reply::Done {}))
            }
            Request::Reattach { blocks } => {
                // Received before anything is checked: they are on their way.
                let fds = transfer::receive(connection, &blocks)?;
                self.expect(GateState::Detached {})?;
                self.transfer.reattach(fds)?;
                self.state = GateState::Closed {};
                Ok(done)
            }
            Request::Record { on } => {
                if on {
                    watch::start()
                } else {
                    watch::stop()
                }
                Ok(done)
            }
            Request::Accesses {} if watch::is_on() => {
                Ok(Next::Reply(Reply::Accesses { accesses: watch::take() }))
            }
            Request::Accesses {} => Err(Failure::other("nothing is recorded")),
            Request::Image { id, limit } => {
                let room = Room::make();
                let (fd, bytes) = images::open(id, limit)?;
                let sent = connection.send(&Reply::Image { bytes });
                let sent = sent.and_then(|()| connection.send_fds(&[room.park(fd)]));
                // There is nobody to tell: the next receive says that the connection is broken.
                sent.unwrap_or_else(|error| log!("cannot send an image: {error}"));
                Ok(Next::Sent)
            }
            Request::Guard { ranges, habits, distrusted } => {
                let fds = connection
                    .receive_fds(1)
                    .map_err(|error| Failure::other(format!("no chunk table: {error}")))?;
                self.expect(GateState::Closed {})?;
                let table = Table::open(&fds[0], ranges)
                    .map_err(|error| Failure::other(format!("no chunk table: {error}")))?;
                guard::install(table, habits, distrusted);
                Ok(done)
            }
            Request::Await { blocks } => {
                let fds = connection
                    .receive_fds(1)
                    .map_err(|error| Failure::other(format!("no table: {error}")))?;
                self.expect(GateState::Detached {})?;
                let places = memory::lock().awaited(&blocks)?;
                let table = Table::open(&fds[0], vec![Range::WHOLE; blocks.len()])
                    .map_err(|error| Failure::other(format!("no table: {error}")))?;
                guard::install_awaited(table, places);
                faults::watch(true);
                self.awaiting = true;
                Ok(done)
            }
            Request::Attach { blocks } => {
                let fds = transfer::receive(connection, &blocks)?;
                if !self.awaiting {
                    return Err(Failure::other("no blocks are awaited"));
                }
                self.transfer.attach(fds)?;
                Ok(done)
            }
            Request::Share { blocks, habits } => {
                let fds = connection
                    .receive_fds(1)
                    .map_err(|error| Failure::other(format!("no table: {error}")))?;
                self.expect(GateState::Detached {})?;
                let table = Table::open(&fds[0], vec![Range::WHOLE; blocks.len()])
                    .map_err(|error| Failure::other(format!("no table: {error}")))?;
                self.sharing = Some(Sharing::begin(table, blocks, habits)?);
                faults::watch(true);
                Ok(done)
            }
            Request::OpenGate {} => {
                if self.state == (GateState::Detached {}) {
                    if self.awaiting {
                        self.transfer.restore_stacks()?;
                    } else {
                        self.transfer.finish_copy_in()?;
                    }
                    self.state = GateState::Closed {};
                }
                // An open gate is fine: whoever brings a program back asks for it in any case.
                if self.state == (GateState::Closed {}) {
                    self.open();
                }
                Ok(done)
            }
        }
    }

    fn expect(&self, state: GateState) -> Result<(), Failure> {
        if self.state == state {
            return Ok(());
        }
        Err(Failure::other(format!(
            "not possible now: the program is {:?}, and would have to be {state:?}",
            self.state
        )))
    }

    fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        usage::fill(&mut counts);
        memory::lock().fill(&mut counts);
        counts.ungated = ungated::reasons();
        counts.launches = gate::launches();
        counts.devices =
            if self.state == (GateState::Detached {}) { self.devices.clone() } else { devices() };
        counts
    }

    /// Closes the gate in some way, for which there is a time from `start` on, and drains: as long as whoever
    /// has asked for it is there.
    fn close_by(
        &mut self,
        start: Instant,
        time: Duration,
        connection: &Connection,
        close: impl FnOnce(&Limit<'_>) -> Result<(), gate::NotClosed>,
    ) -> Result<(), Failure> {
        let limit = Limit::new(later(start, time), connection.as_fd());
        let closed = close(&limit).map_err(|why| {
            Failure::other(format!("the gate could not be closed within {time:?}: {why}"))
        });
        closed.and_then(|()| ungated::check()).and_then(|()| drain::drain(limit)).map_err(
            |mut failure| {
                // Handles are looked up while the program goes on: that calls the driver.
                let launched = recent::look();
                gate::open();
                if limit.is_over() {
                    failure.message += &launched.unfinished();
                }
                failure
            },
        )?;
        // That of the last dump. It must be gone when CRIU comes.
        guard::free();
        self.stop_awaiting();
        self.state = GateState::Closed {};
        Ok(())
    }
}

/// Whether the other end is of root or of this process's own user.
fn is_trusted(connection: &Connection) -> bool {
    let own = rustix::process::geteuid().as_raw();
    match connection.peer() {
        Ok(peer) if peer.uid == own || peer.uid == 0 => return true,
        Ok(peer) => log!("user {} is refused", peer.uid),
        Err(error) => log!("cannot tell who connects: {error}"),
    }
    false
}

/// Makes this process the one that listens, as who connects sees it. After a restore that is the gpucr
/// that made the socket.
fn answer_to_the_name() {
    // SAFETY: the listener is never closed while the agent runs.
    let listener = unsafe { BorrowedFd::borrow_raw(LISTENER.load(Ordering::SeqCst)) };
    if let Err(error) = rustix::net::listen(listener, AGENT_QUEUE) {
        log!("cannot listen: {error}");
    }
}

/// A limit beyond what the clock can count is none.
fn later(start: Instant, time: Duration) -> Instant {
    start.checked_add(time).unwrap_or(start + Duration::from_secs(1 << 30))
}

fn failed(failure: Failure) -> Reply {
    Reply::Failed { code: failure.code as i32, message: failure.message }
}

fn staged(staging: &Option<Staging>, len: u64) -> Result<*mut std::ffi::c_void, Failure> {
    match staging {
        Some(staging) => staging.room(len),
        // Nothing to copy needs nowhere to copy to: it makes a block that is not written.
        None if len == 0 => Ok(std::ptr::null_mut()),
        None => Err(Failure::other("there is no staging memory yet")),
    }
}

/// The devices on which the program has contexts.
fn devices() -> Vec<[u8; 16]> {
    let mut devices: Vec<i32> = contexts::all().into_iter().map(|(_, device)| device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.into_iter().map(real::uuid).collect()
}
