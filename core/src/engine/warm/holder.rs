//! The holder of a warm image: a process that has the descriptor of the copy, and hands it to restores. If the
//! image's devices are there it has them open too, and loads device memory for restores ([`Loader`]).
//!
//! The holder listens on an abstract socket that is named by the image's identity (see [`crate::base::names`]), so
//! there is one for each image in a network namespace.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Stream, wire_enum, wire_struct};
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags};

use super::copy::VERSION;
use super::loader::{Loader, Told};
use crate::base::helper;
use crate::base::names::{self, Name};
use crate::base::progress::Progress;
use crate::base::stop::Stop;
use crate::engine::error::Error;

/// The hidden subcommand of `gpucr` that is a holder.
pub const SUBCOMMAND: &str = "warm-holder";
/// What the name of a holder's socket begins with; the identity in hexadecimal digits follows.
const PREFIX: &str = "gpucr-warm-";
/// How long a holder attends to a client, unless that wants memory loaded.
const ATTENTION: Duration = Duration::from_secs(1);
/// How long a client waits for a holder, which may be serving others. A restore then does without.
const PATIENCE: Duration = Duration::from_secs(3);
/// How long a client waits where memory is loaded, or pinned memory given back: up to 20 ms for each GiB were measured.
const LONG_PATIENCE: Duration = Duration::from_secs(10);
/// How often a holder in the foreground checks whether it is to end.
const POLL: Duration = Duration::from_millis(200);

wire_struct! {
    /// What a holder says about itself.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub struct Described {
        /// Absolute path of the image when it was made warm.
        pub image: String,
        /// The image's identity, in hexadecimal digits.
        pub id: String,
        /// Bytes of memory that the copy takes.
        pub bytes: u64,
        /// When it was complete, seconds since 1970 UTC.
        pub since: u64,
        /// Restores that it was handed to.
        pub restores: u64,
        /// Whether the copy is pinned, and the holder loads device memory.
        pub pinned: bool,
        /// Why the copy is not pinned, if it was to be.
        pub unpinned: String,
    }
}

wire_enum! {
    /// From a client to a holder, or from `gpucr warm` to the one that it starts.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum ToHolder {
        /// What do you hold?
        0 => Describe {},
        /// Hand the copy over, if it is of this version.
        1 => Take { version: u32 },
        /// Let the copy go, and end.
        2 => Drop {},
        /// The first word to a new holder, and whether it is to open the devices. The root of the copy and the
        /// socket with the name follow as descriptors.
        3 => Hold { described: Described, pin: bool },
        /// Load these blocks, given by their places among all of the image.
        4 => Load { blocks: Vec<u64> },
    }
}

wire_enum! {
    /// From a holder.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub enum FromHolder {
        /// To `Describe`, and to `Hold` when it listens.
        0 => Holds { described: Described },
        /// To `Take`; the root of the copy follows as a descriptor.
        1 => Taken {},
        /// To `Take`, if the copy is of this other version.
        2 => OtherVersion { version: u32 },
        /// To `Drop`: the name is free, and the holder has let go of the memory.
        3 => Dropped {},
        /// To `Load`, any number of times: so many bytes more are loaded.
        4 => Loading { bytes: u64 },
        /// To `Load`, at last: descriptors of that many blocks follow.
        5 => Loaded { blocks: u64 },
        /// To `Load`: it was not done, for this reason.
        6 => NotLoaded { why: String },
        /// To `Load`, at most once: the devices have room for the blocks, and for a program's contexts besides.
        7 => Room {},
    }
}

impl Stream for ToHolder {}
impl Stream for FromHolder {}

fn name(id: &str) -> String {
    format!("{PREFIX}{id}")
}

/// Takes the name of the holder of the image with this identity; `None` if another process has it.
pub(super) fn take_name(id: &str) -> io::Result<Option<Name>> {
    Name::take(&name(id))
}

/// A copy with its name, to be kept by this process or another.
pub struct Holder {
    name: Name,
    root: OwnedFd,
    described: Described,
    /// Empty while it does not load device memory.
    loader: Arc<Mutex<Option<Arc<Loader>>>>,
}

impl Holder {
    pub(super) fn new(name: Name, root: OwnedFd, described: Described) -> Self {
        Self { name, root, described, loader: Arc::default() }
    }

    /// Starts a process that holds the copy, and opens the devices if it is to `pin` it. Returns what it says
    /// of itself, and its pid, when it serves; this process has let go then.
    ///
    /// # Errors
    ///
    /// The process cannot be made, or died before it served. Nothing is left then.
    pub(super) fn in_background(self, pin: bool) -> io::Result<(Described, u32)> {
        let (mut connection, mut child) = helper::start("gpucr-warm", SUBCOMMAND)?;
        let hand_over = || {
            connection.send(&ToHolder::Hold { described: self.described, pin })?;
            connection.send_fds(&[self.root.as_fd(), self.name.as_fd()])?;
            match connection.receive()? {
                FromHolder::Holds { described } => Ok(described),
                other => Err(unexpected(&other)),
            }
        };
        match hand_over() {
            Ok(described) => Ok((described, child.id())),
            Err(error) => {
                // A holder that does not get its first word ends by itself.
                drop(connection);
                let _ = child.kill();
                let _ = child.wait();
                Err(error)
            }
        }
    }

    /// Opens the devices of the image, to load device memory for restores. If that cannot be it does without,
    /// and [says](Self::described) why.
    pub(super) fn open_devices(&mut self) {
        let open = || -> Result<Loader, Error> {
            let Described { image, id, .. } = &self.described;
            let failed = |source| Error::Io { what: "cannot share the copy".into(), source };
            let root = self.root.try_clone().map_err(failed)?;
            Loader::open(Path::new(image), id, root)
        };
        match open() {
            Ok(loader) => {
                *self.loader.lock() = Some(Arc::new(loader));
                self.described.pinned = true;
            }
            Err(error) => self.described.unpinned = error.to_string(),
        }
    }

    /// What the holder says of itself.
    pub(super) fn described(&self) -> &Described {
        &self.described
    }

    /// Opens the name for clients.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.name.listen()?;
        // The memory is not this process's own, and yet its end is what frees it: where memory runs
        // out, a copy is the first thing to be given up.
        let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
        Ok(())
    }

    /// Serves until a client says that the copy is to be dropped, or `stop` is set.
    ///
    /// # Errors
    /// The name's socket cannot be asked for clients, which is asked only with a `stop`. The copy is freed, as on
    /// return. What goes wrong with one client is only logged.
    pub fn serve(mut self, stop: Option<&AtomicBool>) -> io::Result<()> {
        while !stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            if stop.is_some() && !self.is_called_within(POLL)? {
                continue;
            }
            let client = match self.name.accept() {
                Ok(client) => client,
                // The client has gone again, or descriptors are short for the moment.
                Err(error) => {
                    tracing::warn!(%error, "a client was not served");
                    std::thread::sleep(POLL);
                    continue;
                }
            };
            match self.answer(client) {
                Ok(Some(client)) => return self.drop_for(client),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "a client went away"),
            }
        }
        Ok(())
    }

    fn is_called_within(&self, time: Duration) -> io::Result<bool> {
        let mut poll = [PollFd::new(&self.name, PollFlags::IN)];
        let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: i64::from(time.subsec_nanos()) };
        match rustix::event::poll(&mut poll, Some(&time)) {
            Err(rustix::io::Errno::INTR) => Ok(false),
            other => Ok(other? > 0),
        }
    }

    /// Answers one client; gives it back if it wants the copy dropped.
    fn answer(&mut self, mut client: Connection) -> io::Result<Option<Connection>> {
        if !names::is_trusted(client.peer()?.uid) {
            return Ok(None);
        }
        client.set_deadline(Some(Instant::now() + ATTENTION));
        match client.receive()? {
            ToHolder::Describe {} => {
                // The device may have been given back since.
                self.described.pinned = self.loader.lock().is_some();
                client.send(&FromHolder::Holds { described: self.described.clone() })?;
            }
            ToHolder::Take { version: VERSION } => {
                client.send(&FromHolder::Taken {})?;
                client.send_fds(&[self.root.as_fd()])?;
                self.described.restores += 1;
            }
            ToHolder::Take { .. } => client.send(&FromHolder::OtherVersion { version: VERSION })?,
            ToHolder::Drop {} => return Ok(Some(client)),
            ToHolder::Load { blocks } => {
                // Other clients are to get an answer meanwhile.
                let slot = self.loader.clone();
                let load = move || {
                    // The load takes as long as there is memory to load.
                    client.set_deadline(None);
                    if let Err(error) = load_for(client, &blocks, &slot) {
                        tracing::warn!(%error, "a restore does without the holder");
                    }
                };
                std::thread::Builder::new().spawn(load)?;
            }
            ToHolder::Hold { .. } => {}
        }
        Ok(None)
    }

    /// Frees name and memory, then tells the client. A load that is under way keeps the memory until it ends,
    /// or this process does.
    fn drop_for(self, mut client: Connection) -> io::Result<()> {
        drop((self.name, self.root));
        *self.loader.lock() = None;
        // The client may have gone; what it wanted is done.
        let _ = client.send(&FromHolder::Dropped {});
        Ok(())
    }
}

/// Loads blocks for a client. `slot` is emptied where a device is short of memory, or has failed.
fn load_for(
    mut client: Connection,
    blocks: &[u64],
    slot: &Mutex<Option<Arc<Loader>>>,
) -> io::Result<()> {
    let loader = slot.lock().clone();
    let Some(loader) = loader else {
        return client.send(&FromHolder::NotLoaded { why: "it has no device open".into() });
    };
    let wanted: Vec<usize> = blocks.iter().map(|place| *place as usize).collect();
    let told = Mutex::new(&mut client);
    let loaded = loader.load(&wanted, &|told_of| {
        let word = match told_of {
            Told::Room => FromHolder::Room {},
            Told::Loaded(bytes) => FromHolder::Loading { bytes },
        };
        told.lock().send(&word)
    });
    let is_over = match &loaded {
        Ok((_, is_short)) => *is_short,
        // There is no room, or the context is of no use any more.
        Err(error) => matches!(error, Error::Driver(_)),
    };
    if is_over {
        *slot.lock() = None;
    }
    // If it is to be given back, that has to be done before the restore goes on, and takes a while.
    let _ = client.send(&FromHolder::Loading { bytes: 0 });
    drop(loader);
    match loaded {
        Ok((fds, _)) => {
            client.send(&FromHolder::Loaded { blocks: fds.len() as u64 })?;
            client.send_fds(&fds)
        }
        Err(error) => client.send(&FromHolder::NotLoaded { why: error.to_string() }),
    }
}

/// A holder in the background: what `gpucr warm-holder` runs.
///
/// # Errors
/// The process that started this does not hand over a copy with its name, or this process cannot leave its directory or
/// open the name for clients. The copy is freed then.
pub fn main() -> io::Result<()> {
    let mut parent = helper::connection();
    let ToHolder::Hold { described, pin } = parent.receive()? else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let mut fds = parent.receive_fds(2)?.into_iter();
    let (Some(root), Some(socket)) = (fds.next(), fds.next()) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    // No directory is to be kept from being unmounted.
    std::env::set_current_dir("/")?;
    let mut holder = Holder::new(socket.into(), root, described);
    if pin {
        holder.open_devices();
    }
    holder.listen()?;
    let described = holder.described().clone();
    // The process that started this may have died meanwhile; the copy is complete all the same.
    let _ = parent.send(&FromHolder::Holds { described });
    drop(parent);
    holder.serve(None)
}

/// A connection to the holder of an image.
pub(super) struct Client {
    connection: Connection,
    /// The holder's pid; 0 if it lives in a pid namespace that cannot be seen from here.
    pub(super) pid: u32,
    /// Its user.
    pub(super) uid: u32,
}

impl Client {
    /// Connects to the holder of the image with this identity. `None` if there is none that serves.
    pub(super) fn connect(id: &str) -> io::Result<Option<Self>> {
        let connected = names::connect(&name(id), PATIENCE)?;
        Ok(connected.map(|(connection, peer)| Self { connection, pid: peer.pid, uid: peer.uid }))
    }

    /// Whether it is a holder whose word counts.
    pub(super) fn is_trusted(&self) -> bool {
        names::is_trusted(self.uid)
    }

    /// Asks what it holds.
    pub(super) fn describe(&mut self) -> io::Result<Described> {
        self.connection.send(&ToHolder::Describe {})?;
        match self.connection.receive()? {
            FromHolder::Holds { described } => Ok(described),
            other => Err(unexpected(&other)),
        }
    }

    /// Takes the root of the copy.
    pub(super) fn take(&mut self) -> io::Result<OwnedFd> {
        self.connection.send(&ToHolder::Take { version: VERSION })?;
        match self.connection.receive()? {
            FromHolder::Taken {} => {
                let root = self.connection.receive_fds(1)?.pop();
                root.ok_or(io::ErrorKind::UnexpectedEof.into())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Has blocks, given by their places among all of the image, loaded into new device memory. Gives
    /// descriptors of it. Calls `room` once if there is room for the blocks, and for a program's contexts besides.
    ///
    /// # Errors
    ///
    /// The load was not done; `stop` was set.
    pub(super) fn load(
        &mut self,
        blocks: &[usize],
        stop: &Stop,
        progress: &dyn Progress,
        room: &dyn Fn(),
    ) -> io::Result<Vec<OwnedFd>> {
        let blocks: Vec<u64> = blocks.iter().map(|place| *place as u64).collect();
        self.connection.set_stop(Some(stop.asked().clone()));
        self.connection.set_deadline(Some(Instant::now() + LONG_PATIENCE));
        self.connection.send(&ToHolder::Load { blocks })?;
        loop {
            if stop.is_set() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            // Each word shows that the holder is still loading.
            self.connection.set_deadline(Some(Instant::now() + LONG_PATIENCE));
            match self.connection.receive()? {
                FromHolder::Room {} => room(),
                FromHolder::Loading { bytes } => progress.advance(bytes),
                FromHolder::Loaded { blocks } => {
                    return self.connection.receive_fds(blocks as usize);
                }
                FromHolder::NotLoaded { why } => return Err(io::Error::other(why)),
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// Has the copy dropped. On return the holder has let go of it.
    pub(super) fn drop_copy(&mut self) -> io::Result<()> {
        self.connection.set_deadline(Some(Instant::now() + LONG_PATIENCE));
        self.connection.send(&ToHolder::Drop {})?;
        match self.connection.receive()? {
            FromHolder::Dropped {} => Ok(()),
            other => Err(unexpected(&other)),
        }
    }
}

fn unexpected(answer: &FromHolder) -> io::Error {
    let what = match answer {
        FromHolder::OtherVersion { version } => {
            format!("it is of version {version} and this gpucr of version {VERSION}")
        }
        other => format!("it answered {other:?}"),
    };
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The identities of which this network namespace has a holder, or a process that claims to be one.
pub(super) fn names() -> io::Result<Vec<String>> {
    let table = std::fs::read_to_string("/proc/thread-self/net/unix")?;
    let name = |line: &str| -> Option<String> {
        let id = line.split(' ').next_back()?.strip_prefix('@')?.strip_prefix(PREFIX)?;
        let is_identity = id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_identity.then(|| id.to_owned())
    };
    let mut names: Vec<String> = table.lines().filter_map(name).collect();
    names.sort_unstable();
    names.dedup();
    Ok(names)
}
