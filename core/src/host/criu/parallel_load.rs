//! The memory of restored processes, brought in on several threads.
//!
//! CRIU reads the memory of a process on one thread, and a page of it at a time becomes the process's: 1.6 GB/s
//! were measured, which is most of what CRIU's part of a restore takes. It can also leave private memory to
//! somebody else, who brings it in when it is touched (`criu lazy-pages`). Here it is not that late. All of it
//! is loaded as soon as there is a place for it, on several threads, before any process runs; so nothing of
//! a program ever waits for its memory.
//!
//! The conversation is that of CRIU's `uffd.c`. CRIU connects to a socket of a given name in its work directory.
//! Each process that is being made sends its pid (32 bits; negative if it is dead already) and then a
//! userfaultfd(2), along with one byte; a little later it registers its private memory with that, mapping by
//! mapping. When the processes go on CRIU sends one number more, so the connection is to be kept until then.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use procfs::Current;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd};
use rustix::io::Errno;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use super::pages::{self, Extent};
use crate::base::mapping::Mapping;

/// The name of the socket that CRIU connects to.
const SOCKET: &str = "lazy-pages.socket";
/// What CRIU sends when the processes go on.
const GOES_ON: i32 = 0x5253_5446;
/// Most threads for one process: the kernel's work for each page is done with locks of the process.
const THREADS: usize = 8;
/// Bytes that a thread takes at a time.
const PIECE: u64 = 1 << 20;
/// The time between two checks whether a mapping is in its place.
const POLL: Duration = Duration::from_micros(200);
/// The time between two checks whether gpucr was asked to end.
const LOOK_UP: Duration = Duration::from_millis(20);
/// How long CRIU may take from the first byte of a message to the last.
const PATIENCE: Duration = Duration::from_secs(10);
const PAGE: u64 = 4096;

/// `struct uffdio_copy` of linux/userfaultfd.h.
#[repr(C)]
struct Copy {
    to: u64,
    from: u64,
    len: u64,
    mode: u64,
    /// Bytes that were copied, or the error.
    copied: i64,
}

/// `struct uffdio_zeropage`.
#[repr(C)]
struct Zeros {
    to: u64,
    len: u64,
    mode: u64,
    zeroed: i64,
}

/// `UFFDIO`.
const GROUP: u8 = 0xaa;
const COPY: rustix::ioctl::Opcode = opcode::read_write::<Copy>(GROUP, 3);
const ZEROS: rustix::ioctl::Opcode = opcode::read_write::<Zeros>(GROUP, 4);
/// Bytes of a `struct uffd_msg`: the kind is the first, and 16 bytes further on is the address of a fault.
const MESSAGE: usize = 32;
/// `UFFD_EVENT_PAGEFAULT`.
const FAULT: u8 = 0x12;

/// The private memory of the processes of an image.
pub(super) struct LoadPlan(HashMap<i32, Memory>);

/// The private memory of one process.
struct Memory {
    /// The extents, in order of their addresses.
    pieces: Vec<Extent>,
    pages: Mapping,
}

impl LoadPlan {
    /// Looks at CRIU's files. `None` if something about them is not known here, or the kernel gives no
    /// userfaultfd, or CRIU had better do it:
    ///
    /// - Of processes that were forked, and have the same mappings, it finds the pages that are still the same, and
    ///   they go on sharing them.
    /// - Asked for lazy pages it maps all private memory as if it were to be written, which the kernel refuses, or
    ///   counts, where it counts what is promised.
    ///
    /// # Errors
    /// The files cannot be read.
    pub(super) fn of(images: BorrowedFd<'_>) -> io::Result<Option<Self>> {
        // SAFETY: a new descriptor, and nothing is registered with it.
        let uffd = unsafe { rustix::mm::userfaultfd(rustix::mm::UserfaultfdFlags::CLOEXEC) };
        if uffd.is_err() {
            return Ok(None);
        }
        let Some(most) = most_charged()? else { return Ok(None) };
        let (mut processes, mut mappings) = (HashMap::new(), HashSet::new());
        for pid in pages::processes(images)? {
            match pages::mark(images, pid) {
                // A warm image, in which it was done.
                Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {}
                marked => marked?,
            }
            let Some(found) = pages::private(images, pid)? else { return Ok(None) };
            let is_forked = !found.mappings.into_iter().all(|mapping| mappings.insert(mapping));
            if is_forked || found.charged > most {
                tracing::debug!(pid, is_forked, charged = found.charged, "memory is left to CRIU");
                return Ok(None);
            }
            let pieces = found.extents.iter().flat_map(cut).collect();
            // SAFETY: the files of an image that is being restored are nobody else's, or of a file system that
            // cannot be written.
            let pages = unsafe { Mapping::new(&found.pages) }?;
            processes.insert(pid, Memory { pieces, pages });
        }
        Ok((!processes.is_empty()).then_some(Self(processes)))
    }
}

/// The most bytes of one mapping that the kernel lets a process promise itself to write. `None` if it looks at what
/// all mappings have promised. CUDA's driver reserves more than 100 GiB of addresses in one mapping.
fn most_charged() -> io::Result<Option<u64>> {
    Ok(match std::fs::read_to_string("/proc/sys/vm/overcommit_memory")?.trim() {
        "0" => Some(procfs::Meminfo::current().map_err(io::Error::other)?.mem_total),
        "1" => Some(u64::MAX),
        _ => None,
    })
}

/// Cuts an extent into pieces.
fn cut(extent: &Extent) -> impl Iterator<Item = Extent> {
    let &Extent { to, at, len } = extent;
    (0..len).step_by(PIECE as usize).map(move |done| Extent {
        to: to + done,
        at: at + done,
        len: PIECE.min(len - done),
    })
}

/// How far CRIU is.
#[derive(Default)]
struct Stage {
    /// All memory is in its place.
    is_complete: AtomicBool,
    /// The memory is not wanted any more, or loading it has failed.
    is_over: AtomicBool,
}

/// The connection with CRIU, which is to be kept until it has ended, and whether all memory is there.
type Served = (Option<UnixStream>, io::Result<()>);

/// Memory that is being loaded. Ends when it is dropped.
pub(super) struct ParallelLoad {
    stage: Arc<Stage>,
    wake: OwnedFd,
    thread: Option<JoinHandle<Served>>,
    /// The other end is gone when the thread is about to end.
    is_served: Receiver<()>,
    /// CRIU's connection, once the thread has ended.
    connection: Option<UnixStream>,
}

impl ParallelLoad {
    /// Begins to listen in `work`, CRIU's work directory.
    pub(super) fn start(plan: LoadPlan, work: BorrowedFd<'_>) -> io::Result<Self> {
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
        let wake = eventfd(0, EventfdFlags::CLOEXEC)?;
        let stage = Arc::<Stage>::default();
        let (told, woken) = (stage.clone(), wake.try_clone()?);
        let (serving, is_served) = mpsc::channel();
        let serve = move || {
            let _serving: Sender<()> = serving;
            Serving { plan, stage: &told, wake: woken }.run(&socket)
        };
        let thread = std::thread::Builder::new().name("gpucr-load".into()).spawn(serve)?;
        Ok(Self { stage, wake, thread: Some(thread), is_served, connection: None })
    }

    /// Waits until all memory is there, now that every process is complete but for that. To be called once; this is
    /// to be kept until CRIU has ended.
    ///
    /// # Errors
    /// The memory is not there: the processes must not run. `Interrupted` if `stop` was set before it was.
    pub(super) fn finish(&mut self, stop: Option<&AtomicBool>) -> io::Result<()> {
        self.stage.is_complete.store(true, Ordering::SeqCst);
        wake(&self.wake);
        while self.is_served.recv_timeout(LOOK_UP) == Err(RecvTimeoutError::Timeout) {
            if stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                self.stage.is_over.store(true, Ordering::SeqCst);
                let _ = self.end();
                return Err(io::ErrorKind::Interrupted.into());
            }
        }
        self.end()
    }

    fn end(&mut self) -> io::Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        wake(&self.wake);
        let panicked = |_| (None, Err(io::Error::other("a thread of it has panicked")));
        let (connection, result) = thread.join().unwrap_or_else(panicked);
        self.connection = connection;
        result
    }
}

fn wake(eventfd: &OwnedFd) {
    // Its count is far from its end, which is the one thing that could go wrong.
    let _ = rustix::io::write(eventfd, &1u64.to_ne_bytes());
}

impl Drop for ParallelLoad {
    fn drop(&mut self) {
        self.stage.is_over.store(true, Ordering::SeqCst);
        let _ = self.end();
    }
}

/// The thread that speaks with CRIU.
struct Serving<'a> {
    plan: LoadPlan,
    stage: &'a Stage,
    wake: OwnedFd,
}

/// A process whose memory is being loaded.
struct Process<'a> {
    uffd: OwnedFd,
    memory: &'a Memory,
    next: AtomicUsize,
}

impl Serving<'_> {
    fn run(&self, listener: &OwnedFd) -> Served {
        let mut connection = None;
        let loaded = std::thread::scope(|scope| {
            let (mut processes, mut threads) = (HashMap::new(), Vec::new());
            let mut result = self.talk(listener, &mut connection, &mut processes, &mut |process| {
                // Each of several processes gets some threads.
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                for _ in 0..((cores / 2).min(THREADS) / self.plan.0.len()).max(1) {
                    let process = process.clone();
                    let load = move || {
                        let loaded = process.load(self.stage);
                        if loaded.is_err() {
                            self.give_up();
                        }
                        loaded
                    };
                    threads.push(std::thread::Builder::new().spawn_scoped(scope, load)?);
                }
                Ok(())
            });
            if result.is_err() {
                self.give_up();
            }
            for thread in threads {
                let loaded = thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")));
                result = result.and(loaded);
            }
            let missing = self.plan.0.keys().find(|pid| !processes.contains_key(pid));
            result.and(missing.map_or(Ok(()), |pid| Err(strange(*pid))))
            // With the descriptors, which end here, it ends that processes wait for memory, whatever has failed.
        });
        (connection, loaded)
    }

    fn give_up(&self) {
        self.stage.is_over.store(true, Ordering::SeqCst);
        wake(&self.wake);
    }

    /// Speaks with CRIU until this is woken and all that was said has been heard. Each process is given to `begin`.
    fn talk<'b>(
        &'b self,
        listener: &OwnedFd,
        connection: &mut Option<UnixStream>,
        processes: &mut HashMap<i32, Arc<Process<'b>>>,
        begin: &mut dyn FnMut(&Arc<Process<'b>>) -> io::Result<()>,
    ) -> io::Result<()> {
        loop {
            let talks = connection.as_ref().map_or(listener.as_fd(), AsFd::as_fd);
            let mut polled = vec![
                PollFd::from_borrowed_fd(talks, PollFlags::IN),
                PollFd::new(&self.wake, PollFlags::IN),
            ];
            let order: Vec<Arc<Process<'b>>> = processes.values().cloned().collect();
            polled.extend(order.iter().map(|p| PollFd::new(&p.uffd, PollFlags::IN)));
            rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, None))?;
            let is_ready: Vec<bool> = polled.iter().map(|fd| !fd.revents().is_empty()).collect();
            drop(polled);
            for (process, _) in order.iter().zip(&is_ready[2..]).filter(|(_, ready)| **ready) {
                process.answer_fault()?;
            }
            match (&mut *connection, is_ready[0]) {
                _ if self.stage.is_over.load(Ordering::SeqCst) => return Ok(()),
                (none @ None, true) => {
                    let accept = || rustix::net::accept_with(listener, SocketFlags::CLOEXEC);
                    let accepted = UnixStream::from(rustix::io::retry_on_intr(accept)?);
                    accepted.set_read_timeout(Some(PATIENCE))?;
                    *none = Some(accepted);
                }
                (Some(connection), true) => {
                    let Some((pid, uffd)) = receive(connection)? else { continue };
                    let memory = self.plan.0.get(&pid).ok_or_else(|| strange(pid))?;
                    let process = Arc::new(Process { uffd, memory, next: AtomicUsize::new(0) });
                    begin(&process)?;
                    processes.insert(pid, process);
                }
                (_, false) if is_ready[1] => return Ok(()),
                (_, false) => {}
            }
        }
    }
}

fn strange(pid: i32) -> io::Error {
    io::Error::other(format!("CRIU and its files do not agree on process {pid}"))
}

/// The next process, unless it is dead, or it is all over.
fn receive(connection: &mut UnixStream) -> io::Result<Option<(i32, OwnedFd)>> {
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
    Ok(Some((pid, fd.ok_or_else(|| strange(pid))?)))
}

impl Process<'_> {
    /// Loads piece by piece, while other threads do the same.
    fn load(&self, stage: &Stage) -> io::Result<()> {
        while let Some(piece) = self.memory.pieces.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            let mut done = 0;
            while done < piece.len {
                if stage.is_over.load(Ordering::Relaxed) {
                    return Ok(());
                }
                // Before the try: what is not in its place then never will be.
                let is_complete = stage.is_complete.load(Ordering::SeqCst);
                match self.copy(piece, done) {
                    // The kernel is at the mappings just now.
                    Ok(0) => std::thread::sleep(POLL),
                    Ok(copied) => done += copied,
                    Err(Errno::NOENT) if !is_complete => std::thread::sleep(POLL),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// Copies a piece from its byte `done` on. Gives the bytes that were copied.
    fn copy(&self, piece: &Extent, done: u64) -> Result<u64, Errno> {
        let from = self.memory.pages.address() as u64 + piece.at + done;
        let (to, len) = (piece.to + done, piece.len - done);
        let mut copy = Copy { to, from, len, mode: 0, copied: 0 };
        // SAFETY: the structure that the call takes. The bytes are read by the kernel, from a mapping that has
        // them, and written to memory of another process that has none there yet.
        let result = unsafe { ioctl(&self.uffd, Updater::<COPY, Copy>::new(&mut copy)) };
        match (result, u64::try_from(copy.copied)) {
            (Ok(()), Ok(copied)) => Ok(copied),
            // The copy was made in part, or not at all because the process is changing its mappings.
            (Err(Errno::AGAIN), copied) => Ok(copied.unwrap_or(0)),
            (Err(error), _) => Err(error),
            (Ok(()), Err(_)) => Err(Errno::IO),
        }
    }

    /// A fault where there is memory to be loaded ends when that is there. Elsewhere the process would have
    /// zeros.
    fn answer_fault(&self) -> io::Result<()> {
        let mut message = [0; MESSAGE];
        match rustix::io::read(&self.uffd, &mut message) {
            Ok(MESSAGE) => {}
            Ok(_) | Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        if message[0] != FAULT {
            return Ok(());
        }
        let address = u64::from_ne_bytes(std::array::from_fn(|i| message[16 + i]));
        let pieces = &self.memory.pieces;
        let after = pieces.partition_point(|piece| piece.to <= address);
        if after > 0 && address < pieces[after - 1].to + pieces[after - 1].len {
            return Ok(());
        }
        let mut zeros = Zeros { to: address / PAGE * PAGE, len: PAGE, mode: 0, zeroed: 0 };
        // SAFETY: the structure that the call takes; a page of another process that waits for it.
        match unsafe { ioctl(&self.uffd, Updater::<ZEROS, Zeros>::new(&mut zeros)) } {
            // Another thread was faster, or the process is changing its mappings and will ask again.
            Ok(()) | Err(Errno::EXIST | Errno::AGAIN | Errno::NOENT | Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pages::made;
    use super::*;
    use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags};
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

    /// `struct uffdio_api` and `struct uffdio_register`.
    #[repr(C)]
    struct Api([u64; 3]);
    #[repr(C)]
    struct Register([u64; 4]);

    const API: rustix::ioctl::Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
    const REGISTER: rustix::ioctl::Opcode = opcode::read_write::<Register>(GROUP, 0);
    /// Pages of the memory that is loaded.
    const PAGES: usize = 700;

    /// New private memory of this process, which is never given back.
    fn memory() -> u64 {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        let len = PAGES * PAGE as usize;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags) };
        address.unwrap() as u64
    }

    fn uffd() -> OwnedFd {
        let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
        // SAFETY: nothing is registered with it yet.
        let uffd = unsafe { rustix::mm::userfaultfd(flags) }.unwrap();
        let mut api = Api([GROUP.into(), 0, 0]);
        // SAFETY: the structure that the call takes.
        unsafe { ioctl(&uffd, Updater::<API, Api>::new(&mut api)) }.unwrap();
        uffd
    }

    fn register(uffd: &OwnedFd, address: u64) {
        let mut register = Register([address, PAGES as u64 * PAGE, 1, 0]);
        // SAFETY: the structure that the call takes; memory that nothing refers to yet.
        unsafe { ioctl(uffd, Updater::<REGISTER, Register>::new(&mut register)) }.unwrap();
    }

    fn page(number: usize) -> Vec<u8> {
        vec![(number % 251 + 1) as u8; PAGE as usize]
    }

    /// Files of a process whose memory at `address` has all pages but every hundredth, in two mappings.
    fn image(address: u64) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let (middle, end) = (address + 350 * PAGE, address + PAGES as u64 * PAGE);
        let parts: Vec<(u64, Vec<u8>)> = (0..PAGES / 100)
            .map(|part| {
                let pages = part * 100 + 1..(part + 1) * 100;
                let address = address + pages.start as u64 * PAGE;
                (address, pages.flat_map(page).collect())
            })
            .collect();
        let runs: Vec<_> = parts.iter().map(|(at, bytes)| (*at, true, &bytes[..])).collect();
        made::write(dir.path(), &[(address, middle), (middle, end)], &runs);
        dir
    }

    fn open(path: &std::path::Path) -> OwnedFd {
        std::fs::File::open(path).unwrap().into()
    }

    /// Begins, and says what CRIU says of process 42.
    fn begin(dir: &std::path::Path, uffd: &OwnedFd) -> (ParallelLoad, UnixStream) {
        let dir_fd = open(dir);
        let plan = LoadPlan::of(dir_fd.as_fd()).unwrap().expect("what it needs");
        let loading = ParallelLoad::start(plan, dir_fd.as_fd()).unwrap();
        let mut criu = UnixStream::connect(dir.join(SOCKET)).unwrap();
        std::io::Write::write_all(&mut criu, &(-7i32).to_ne_bytes()).unwrap();
        std::io::Write::write_all(&mut criu, &42i32.to_ne_bytes()).unwrap();
        let fds = [uffd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let byte = [io::IoSlice::new(&[0])];
        rustix::net::sendmsg(&criu, &byte, &mut control, SendFlags::empty()).unwrap();
        (loading, criu)
    }

    #[test]
    fn memory_is_there_when_it_has_finished() {
        let address = memory();
        let (dir, uffd) = (image(address), uffd());
        let (mut loading, _criu) = begin(dir.path(), &uffd);
        std::thread::sleep(Duration::from_millis(5));
        register(&uffd, address);
        drop(uffd);
        // SAFETY: mapped memory of that length, which only the kernel writes.
        let read = |number: usize| unsafe {
            let at = address as usize + number * PAGE as usize;
            std::slice::from_raw_parts(at as *const u8, PAGE as usize)
        };
        // A read that comes too early waits, also where there is nothing.
        assert!(read(1) == page(1) && read(200).iter().all(|byte| *byte == 0));
        loading.finish(None).unwrap();
        for number in 0..PAGES {
            let expected = if number % 100 == 0 { vec![0; PAGE as usize] } else { page(number) };
            assert!(read(number) == expected, "page {number}");
        }
    }

    #[test]
    fn memory_without_a_place_is_an_error() {
        let address = memory();
        let (dir, uffd) = (image(address), uffd());
        let (mut loading, _criu) = begin(dir.path(), &uffd);
        assert_eq!(loading.finish(None).unwrap_err().raw_os_error(), Some(libc::ENOENT));
        // A process that is missing is an error too.
        let dir = image(address);
        let work = open(dir.path());
        let plan = LoadPlan::of(work.as_fd()).unwrap().unwrap();
        let mut loading = ParallelLoad::start(plan, work.as_fd()).unwrap();
        let _criu = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
        let error = loading.finish(None).unwrap_err();
        assert!(error.to_string().contains("process 42"), "{error}");
    }

    #[test]
    fn forked_processes_are_left_to_criu() {
        let dir = image(1 << 40);
        let plan = || LoadPlan::of(open(dir.path()).as_fd()).unwrap();
        assert!(plan().is_some());
        for name in ["mm", "pagemap"] {
            let file = |pid| dir.path().join(format!("{name}-{pid}.img"));
            std::fs::copy(file(42), file(43)).unwrap();
        }
        assert!(plan().is_none());
    }

    #[test]
    fn it_can_be_given_up() {
        let address = memory();
        let (dir, uffd) = (image(address), uffd());
        let (loading, criu) = begin(dir.path(), &uffd);
        drop(loading);
        drop(criu);
        let dir = image(address);
        let work = open(dir.path());
        drop(
            ParallelLoad::start(LoadPlan::of(work.as_fd()).unwrap().unwrap(), work.as_fd())
                .unwrap(),
        );
    }
}
