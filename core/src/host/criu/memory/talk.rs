//! The conversation with CRIU about the memory of processes.
//!
//! It is that of CRIU's `uffd.c`. CRIU connects to a socket of a given name in its work directory.
//! Each process that is being made sends its pid (32 bits; negative if it is dead already) and then a
//! userfaultfd(2), along with one byte; a little later it registers its private memory with that, mapping by
//! mapping. When the processes go on CRIU sends one number more, so the connection is to be kept until then.

use std::collections::HashSet;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use super::eager::{Process, threads};
use super::follow::Advice;
use super::on_demand::OnDemandMemory;
use super::plan::{Memory, Plan};
use super::server::{Keep, Late, OnDemandError};
use super::stage::Stage;
use super::uffd::Uffd;
use crate::base::faults::is_asked;

/// The name of the socket that CRIU connects to.
pub(super) const SOCKET: &str = "lazy-pages.socket";
/// What CRIU sends when the processes go on.
const GOES_ON: i32 = 0x5253_5446;
/// The time between two checks whether gpucr was asked to end.
const LOOK_UP: Duration = Duration::from_millis(20);
/// How long CRIU may take from the first byte of a message to the last.
const PATIENCE: Duration = Duration::from_secs(10);

/// The connection with CRIU, which is to be kept until that has ended; and the memory that comes on demand, if any does.
type Served = (Option<UnixStream>, Result<Option<OnDemandMemory>, OnDemandError>);

/// Memory that is being loaded. Ends when it is dropped.
pub(crate) struct Loading {
    stage: Arc<Stage>,
    wake: OwnedFd,
    thread: Option<JoinHandle<Served>>,
    /// The other end is gone when the thread is about to end.
    is_served: Receiver<()>,
    /// CRIU's connection, once the thread has ended.
    connection: Option<UnixStream>,
}

impl Loading {
    /// Begins to listen in `work`, CRIU's work directory. All memory comes before the processes run, or on demand, if
    /// there is somebody to `keep` descriptors. It does not come on demand either if the kernel does not tell of guards
    /// that are made of it meanwhile.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub(crate) fn start(
        plan: Arc<Plan>,
        work: BorrowedFd<'_>,
        keep: Option<Keep>,
    ) -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let raw = std::os::fd::AsRawFd::as_raw_fd(&work);
        let address = SocketAddrUnix::new(format!("/proc/self/fd/{raw}/{SOCKET}"))?;
        // A socket of an earlier try may be left.
        match rustix::fs::unlinkat(work, SOCKET, rustix::fs::AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, 1)?;
        let late = keep.and_then(|keep| match Advice::listen() {
            Ok(advice) => Some(Late { keep, advice: Arc::new(advice) }),
            Err(error) => {
                tracing::warn!(%error, "host memory is loaded before the program runs: the kernel does not tell of guards");
                None
            }
        });
        let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stage = Arc::<Stage>::default();
        let (told, woken) = (stage.clone(), wake.try_clone()?);
        let (serving, is_served) = mpsc::channel();
        let serve = move || {
            let _serving: Sender<()> = serving;
            let mut talk = Talk { plan: &plan, stage: &told, wake: woken, connection: None };
            let result = match late {
                Some(late) => talk.begin_on_demand(late, &socket).map(Some),
                None => talk.load(&socket).map(|()| None).map_err(Into::into),
            };
            (talk.connection, result)
        };
        let thread = std::thread::Builder::new().name("gpucr-load".into()).spawn(serve)?;
        Ok(Self { stage, wake, thread: Some(thread), is_served, connection: None })
    }

    /// To be called once, when every process is complete but for its memory; this is to be kept until CRIU has ended.
    /// Waits until all memory is there; or, on demand, gives what brings it from now on.
    ///
    /// # Errors
    /// The memory is not there: the processes must not run. `Interrupted` if `stop` was set before it was.
    pub(crate) fn finish(
        &mut self,
        stop: Option<&AtomicBool>,
    ) -> Result<Option<OnDemandMemory>, OnDemandError> {
        self.stage.complete();
        wake(&self.wake);
        while self.is_served.recv_timeout(LOOK_UP) == Err(RecvTimeoutError::Timeout) {
            if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                self.stage.end();
                let _ = self.end();
                return Err(OnDemandError::Io(io::ErrorKind::Interrupted.into()));
            }
        }
        self.end()
    }

    fn end(&mut self) -> Result<Option<OnDemandMemory>, OnDemandError> {
        let Some(thread) = self.thread.take() else { return Ok(None) };
        wake(&self.wake);
        let panicked = |_| (None, Err(io::Error::other("a thread of it has panicked").into()));
        let (connection, result) = thread.join().unwrap_or_else(panicked);
        self.connection = connection;
        result
    }
}

fn wake(eventfd: &OwnedFd) {
    // Its count is far from its end, which is the one thing that could go wrong.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

impl Drop for Loading {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.stage.end();
            let _ = self.end();
        }
    }
}

/// The thread that speaks with CRIU.
struct Talk<'a> {
    plan: &'a Plan,
    stage: &'a Arc<Stage>,
    wake: OwnedFd,
    connection: Option<UnixStream>,
}

/// Begins to bring the memory of a process. Gives the process if its faults are to be answered by the one who speaks
/// with CRIU.
type Begin<'b> = dyn FnMut(i32, &Arc<Memory>, Uffd) -> io::Result<Option<Arc<Process>>> + 'b;

impl Talk<'_> {
    /// Loads all memory.
    fn load(&mut self, listener: &OwnedFd) -> io::Result<()> {
        let (count, stage) = (self.plan.processes().len(), self.stage);
        let give_up = GiveUp { stage, wake: self.wake.try_clone()? };
        std::thread::scope(|scope| {
            let mut loading = Vec::new();
            let mut result = self.hear(listener, &mut |_, memory, uffd| {
                let process = Arc::new(Process::new(uffd, memory.clone()));
                // Each of several processes gets some threads.
                for _ in 0..threads(count) {
                    let (process, give_up) = (process.clone(), &give_up);
                    let load = move || process.load(stage).inspect_err(|_| give_up.now());
                    loading.push(std::thread::Builder::new().spawn_scoped(scope, load)?);
                }
                Ok(Some(process))
            });
            if result.is_err() {
                give_up.now();
            }
            for thread in loading {
                let loaded = thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")));
                result = result.and(loaded);
            }
            // With the descriptors, which end here, it ends that processes wait for memory, whatever has failed.
            result
        })
    }

    /// Begins to bring memory that is touched.
    fn begin_on_demand(
        &mut self,
        late: Late,
        listener: &OwnedFd,
    ) -> Result<OnDemandMemory, OnDemandError> {
        let memory = OnDemandMemory::new(self.stage.clone(), self.wake.try_clone()?, late);
        self.hear(listener, &mut |pid, of_process, uffd| {
            memory.begin(pid, of_process.clone(), uffd).map(|()| None)
        })?;
        if is_asked("fail", "untold-early") {
            return Err(OnDemandError::Untold);
        }
        // What has failed until now has had no program that could see it.
        memory.check().map(|()| memory)
    }

    /// Speaks with CRIU until this is woken and all that was said has been heard.
    ///
    /// # Errors
    /// CRIU does not keep to the conversation, or says nothing of a process.
    fn hear(&mut self, listener: &OwnedFd, begin: &mut Begin<'_>) -> io::Result<()> {
        let (mut processes, mut heard) = (Vec::<Arc<Process>>::new(), HashSet::new());
        loop {
            let talks = self.connection.as_ref().map_or(listener.as_fd(), AsFd::as_fd);
            let mut polled = vec![
                PollFd::from_borrowed_fd(talks, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            polled.extend(processes.iter().map(|p| PollFd::new(&p.uffd, PollFlags::IN)));
            rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None))?;
            let is_ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(polled);
            for (process, _) in processes.iter().zip(&is_ready[2..]).filter(|(_, ready)| **ready) {
                process.answer_fault()?;
            }
            match (&mut self.connection, is_ready[0]) {
                _ if self.stage.is_over() => return Ok(()),
                (none @ None, true) => {
                    let accept = || rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
                    let accepted = UnixStream::from(rustix::io::retry_on_intr(accept)?);
                    accepted.set_read_timeout(Some(PATIENCE))?;
                    *none = Some(accepted);
                }
                (Some(connection), true) => {
                    let Some((pid, uffd)) = receive(connection)? else { continue };
                    let memory = self.plan.processes().get(&pid).ok_or_else(|| strange(pid))?;
                    processes.extend(begin(pid, memory, uffd)?);
                    heard.insert(pid);
                }
                (_, false) if is_ready[1] => {
                    let missing = self.plan.processes().keys().find(|pid| !heard.contains(pid));
                    return missing.map_or(Ok(()), |pid| Err(strange(*pid)));
                }
                (_, false) => {}
            }
        }
    }
}

/// What ends the conversation, and all that is being loaded.
struct GiveUp<'a> {
    stage: &'a Stage,
    wake: OwnedFd,
}

impl GiveUp<'_> {
    fn now(&self) {
        self.stage.end();
        wake(&self.wake);
    }
}

fn strange(pid: i32) -> io::Error {
    io::Error::other(format!("CRIU and its files do not agree on process {pid}"))
}

/// The next process, unless it is dead, or it is all over.
fn receive(connection: &mut UnixStream) -> io::Result<Option<(i32, Uffd)>> {
    let mut pid = [0; 4];
    connection.read_exact(&mut pid)?;
    let pid = i32::from_ne_bytes(pid);
    if pid <= 0 || pid == GOES_ON {
        return Ok(None);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [io::IoSliceMut::new(&mut byte)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(&*connection, &mut into, &mut control, flags)
    })?;
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok(Some((pid, Uffd::new(fd.ok_or_else(|| strange(pid))?))))
}
