//! The memory that instances of one image share: `gpucr restore --share`.
//!
//! The first instance on a device has it loaded like all other memory. A process without CUDA, the holder,
//! then keeps descriptors of it under a name that is made of the image and the devices, and hands them to
//! the restores of further instances. Each instance stays connected with the holder; when the last is gone
//! the holder ends, and with it the memory. A restore that finds neither a holder nor a process that is about
//! to start one is the first again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Stream, wire_enum};
use rustix::event::{PollFd, PollFlags};

use crate::base::names::{self, Name};
use crate::base::stop::Stop;
use crate::base::{helper, limits};

/// The hidden subcommand of `gpucr` that is a holder.
pub const SUBCOMMAND: &str = "sharing-holder";
/// What the name of a holder's socket begins with.
const PREFIX: &str = "gpucr-sharing-";
/// Version of the conversation.
const VERSION: u32 = 1;
/// How long one side waits for what the other has to say.
const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is tried again, while another restore is about to keep the memory.
const AGAIN: Duration = Duration::from_millis(2);

wire_enum! {
    /// From a restore to a holder.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(crate) enum ToHolder {
        /// The first word to a new holder. The socket with the name and so many blocks follow as descriptors.
        0 => Hold { blocks: u64 },
        /// May I share it?
        1 => Join { version: u32 },
    }
}

wire_enum! {
    /// From a holder.
    #[derive(Debug, Clone, PartialEq, Eq)]
    pub(crate) enum FromHolder {
        /// To `Hold`: others find it now.
        0 => Holds {},
        /// To `Join`: so many blocks follow as descriptors.
        1 => Blocks { blocks: u64 },
        /// To `Join`: it speaks this other version.
        2 => OtherVersion { version: u32 },
    }
}

impl Stream for ToHolder {}
impl Stream for FromHolder {}

/// A process that can become a holder. It ends when no process is connected with it.
///
/// The process is started ahead, outside of the pid namespace of any instance, since it may have to outlive the first.
#[derive(Debug, Clone)]
pub struct Holder(Arc<OwnedFd>);

impl Holder {
    /// Starts it.
    ///
    /// # Errors
    /// The process cannot be made. Nothing is left then.
    pub fn start() -> io::Result<Self> {
        let (connection, _) = helper::start("gpucr-sharing", SUBCOMMAND)?;
        Ok(OwnedFd::from(connection).into())
    }
}

impl From<OwnedFd> for Holder {
    /// The connection with a holder that another process has started.
    fn from(connection: OwnedFd) -> Self {
        Self(Arc::new(connection))
    }
}

impl AsFd for Holder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// A connection with a holder: while it is open the memory is kept, and further instances find it.
#[derive(Debug)]
pub struct Member(OwnedFd);

impl From<OwnedFd> for Member {
    fn from(connection: OwnedFd) -> Self {
        Self(connection)
    }
}

impl AsFd for Member {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Member {
    /// Ends the membership, also where this connection is open a second time, and waits until the holder has
    /// taken note.
    pub(crate) fn leave(self) {
        let socket = UnixStream::from(self.0);
        let left = socket.shutdown(std::net::Shutdown::Write);
        let left = left.and_then(|()| socket.set_read_timeout(Some(PATIENCE)));
        // The holder closes its end.
        let left = left.and_then(|()| io::Read::read(&mut &socket, &mut [0]));
        if let Err(error) = left {
            tracing::warn!(%error, "the holder of shared memory does not release it");
        }
    }
}

/// What a restore finds.
pub(crate) enum Found {
    /// Nothing: it is the first, and has the name now.
    Nothing(Name),
    /// The memory, block by block.
    Memory(Member, Vec<OwnedFd>),
}

/// Finds the memory that is kept under this name. If another restore is about to keep it, waits until it does or
/// gives up.
///
/// # Errors
/// The process that has the name does not answer as a holder does; `stop` was set.
pub(crate) fn find(name: &str, stop: &Stop) -> io::Result<Found> {
    let name = format!("{PREFIX}{name}");
    loop {
        if let Some((mut connection, peer)) = names::connect(&name, PATIENCE)? {
            connection.set_stop(Some(stop.asked().clone()));
            if !names::is_trusted(peer.uid) {
                let what = format!("user {} has the name {name}", peer.uid);
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, what));
            }
            match join(connection) {
                // The holder has ended since, with its last instance.
                Err(error) if is_gone(&error) => {}
                joined => return joined,
            }
        } else if let Some(name) = Name::take(&name)? {
            return Ok(Found::Nothing(name));
        }
        if stop.is_set() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        std::thread::sleep(AGAIN);
    }
}

fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

fn join(mut connection: Connection) -> io::Result<Found> {
    connection.send(&ToHolder::Join { version: VERSION })?;
    match connection.receive()? {
        FromHolder::Blocks { blocks } => {
            let blocks = connection.receive_fds(blocks as usize)?;
            Ok(Found::Memory(Member(connection.into()), blocks))
        }
        other => Err(unexpected(&other)),
    }
}

fn unexpected(answer: &FromHolder) -> io::Error {
    let what = match answer {
        FromHolder::OtherVersion { version } => {
            format!("the holder is of version {version} and this gpucr of version {VERSION}")
        }
        other => format!("the holder answered {other:?}"),
    };
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Makes memory known under a name that was taken for it, and says whether others find it. If that failed they
/// may find it all the same: the memory has to be treated as shared.
///
/// # Errors
/// There is no descriptor left for a connection. No restore finds the memory.
pub(crate) fn hold(
    holder: &Holder,
    name: Name,
    blocks: &[OwnedFd],
) -> io::Result<(Member, io::Result<()>)> {
    let connection = holder.0.try_clone()?;
    let mut connection = Connection::new(UnixStream::from(connection));
    let mut hand_over = || {
        connection.set_deadline(Some(Instant::now() + PATIENCE));
        connection.send(&ToHolder::Hold { blocks: blocks.len() as u64 })?;
        connection.send_fds(&[name.as_fd()])?;
        connection.send_fds(blocks)?;
        match connection.receive()? {
            FromHolder::Holds {} => Ok(()),
            other => Err(unexpected(&other)),
        }
    };
    let held = hand_over();
    Ok((Member(connection.into()), held))
}

/// What `gpucr sharing-holder` runs: until no process is connected any more.
///
/// # Errors
/// The process was not started by gpucr.
pub fn main() -> io::Result<()> {
    limits::raise_open_files();
    // No directory is to be kept from being unmounted.
    std::env::set_current_dir("/")?;
    let mut first = helper::connection();
    let blocks = match first.receive() {
        Ok(ToHolder::Hold { blocks }) => blocks,
        Ok(ToHolder::Join { .. }) => return Err(io::ErrorKind::InvalidData.into()),
        // Another instance was first.
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    let name = first.receive_fds(1)?.pop().ok_or(io::ErrorKind::UnexpectedEof)?;
    let name = Name::from(name);
    let blocks = first.receive_fds(blocks as usize)?;
    name.listen()?;
    first.send(&FromHolder::Holds {})?;
    serve(&name, &blocks, vec![first.into()])
}

/// Hands the blocks to every client, as long as there are members.
fn serve(name: &Name, blocks: &[OwnedFd], mut members: Vec<OwnedFd>) -> io::Result<()> {
    while !members.is_empty() {
        let mut poll = vec![PollFd::new(name, PollFlags::IN)];
        // A member says nothing any more: it can only go.
        poll.extend(members.iter().map(|member| PollFd::new(member, PollFlags::IN)));
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, None))?;
        let ready: Vec<bool> = poll.iter().map(|fd| !fd.revents().is_empty()).collect();
        drop(poll);
        let mut is_here = ready[1..].iter().map(|gone| !gone);
        members.retain(|_| is_here.next().unwrap_or(true));
        if ready[0] {
            match name.accept().and_then(|client| answer(client, blocks)) {
                Ok(member) => members.extend(member),
                Err(error) => tracing::warn!(%error, "a client was not served"),
            }
        }
    }
    Ok(())
}

/// Answers one client, which is a member from then on.
fn answer(mut client: Connection, blocks: &[OwnedFd]) -> io::Result<Option<OwnedFd>> {
    if !names::is_trusted(client.peer()?.uid) {
        return Ok(None);
    }
    client.set_deadline(Some(Instant::now() + PATIENCE));
    match client.receive()? {
        ToHolder::Join { version: VERSION } => {
            client.send(&FromHolder::Blocks { blocks: blocks.len() as u64 })?;
            client.send_fds(blocks)?;
            Ok(Some(client.into()))
        }
        ToHolder::Join { .. } => {
            client.send(&FromHolder::OtherVersion { version: VERSION })?;
            Ok(None)
        }
        ToHolder::Hold { .. } => Ok(None),
    }
}

/// Takes [`keep`] back: the descriptor is closed in what this process becomes.
///
/// # Errors
/// None for a descriptor that is open.
pub fn unkeep(fd: impl AsFd) -> io::Result<()> {
    Ok(rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?)
}

/// Lets a descriptor live on in what this process becomes.
///
/// # Errors
/// None for a descriptor that is open.
pub fn keep(fd: impl AsFd) -> io::Result<i32> {
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::empty())?;
    Ok(fd.as_fd().as_raw_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn fd() -> OwnedFd {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        rustix::fs::memfd_create("block", flags).expect("a memfd")
    }

    fn same(a: &OwnedFd, b: &OwnedFd) -> bool {
        let inode = |fd| rustix::fs::fstat(fd).expect("open").st_ino;
        inode(a) == inode(b)
    }

    /// A holder that is a thread; it must end for the test to end.
    fn held(name: Name, blocks: &[OwnedFd]) -> (Member, std::thread::JoinHandle<io::Result<()>>) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        let blocks: Vec<OwnedFd> = blocks.iter().map(|fd| fd.try_clone().expect("open")).collect();
        name.listen().expect("it is ours");
        let thread = std::thread::spawn(move || serve(&name, &blocks, vec![theirs.into()]));
        (Member(ours.into()), thread)
    }

    #[test]
    fn it_is_held_until_the_last_is_gone() {
        let name = format!("test-{}", std::process::id());
        let stop = Stop::new(Arc::default());
        let Ok(Found::Nothing(taken)) = find(&name, &stop) else { panic!("nobody has it") };
        let blocks: Vec<OwnedFd> = (0..3).map(|_| fd()).collect();
        // A restore that comes in the meantime waits for the first.
        let (of_second, late) = (name.clone(), stop.clone());
        let second = std::thread::spawn(move || find(&of_second, &late));
        std::thread::sleep(Duration::from_millis(50));
        assert!(!second.is_finished());
        let (first, holder) = held(taken, &blocks);
        let Ok(Found::Memory(second, found)) = second.join().expect("joined") else {
            panic!("the first holds it")
        };
        assert!(blocks.iter().zip(&found).all(|(a, b)| same(a, b)) && found.len() == 3);
        first.leave();
        let Ok(Found::Memory(third, _)) = find(&name, &stop) else { panic!("the second lives") };
        drop(second);
        assert!(!holder.is_finished());
        drop(third);
        holder.join().expect("joined").expect("served");
        assert!(matches!(find(&name, &stop), Ok(Found::Nothing(_))), "nobody has it again");
    }

    #[test]
    fn who_gives_up_is_followed_by_the_next_and_waiting_can_be_ended() {
        let name = format!("test-given-up-{}", std::process::id());
        let asked = Arc::new(AtomicBool::default());
        let stop = Stop::new(asked.clone());
        let Ok(Found::Nothing(taken)) = find(&name, &stop) else { panic!("nobody has it") };
        let (of_second, late) = (name.clone(), stop.clone());
        let second = std::thread::spawn(move || find(&of_second, &late));
        drop(taken);
        let Ok(Found::Nothing(taken)) = second.join().expect("joined") else {
            panic!("the second is first")
        };
        asked.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(find(&name, &stop).is_err());
        drop(taken);
    }
}
