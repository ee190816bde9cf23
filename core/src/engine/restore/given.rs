//! Device memory that another gpucr has loaded, and checked, for a restore that it starts.
//!
//! It comes through a socket: what it is of, then descriptors. It lives as long as a process has one of them, so nothing
//! is left if both processes end.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpucr_wire::{Connection, Stream, wire_struct};
use parking_lot::Mutex;

use super::bulk::Reserve;
use crate::base::limits::make_room_for;

/// How long the other process may take to take them, or to give them.
const PATIENCE: Duration = Duration::from_secs(60);
/// More memory than this is kept for contexts by nobody: pieces of it, in all.
const MOST_RESERVED: u64 = 1 << 16;

wire_struct! {
    /// What comes: then the descriptors of the blocks, and those of what is kept for contexts.
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Head {
        /// Identity of the image.
        image: [u8; 32],
        /// How many blocks, which are all of the image, in its order.
        blocks: u64,
        /// How many pieces of memory are kept for the contexts of each process, which is named by its pid.
        reserve: Vec<Reserved>,
    }
}

wire_struct! {
    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Reserved {
        pid: u32,
        pieces: u64,
    }
}

impl Stream for Head {}

/// The device memory of an image, loaded and checked.
#[derive(Debug)]
pub struct LoadedMemory {
    image: [u8; 32],
    blocks: Vec<OwnedFd>,
    reserve: Reserve,
}

impl LoadedMemory {
    /// All blocks of the image with this identity, in its order.
    pub(super) fn new(image: [u8; 32], blocks: Vec<OwnedFd>, reserve: Reserve) -> Self {
        Self { image, blocks, reserve }
    }

    fn is_of(&self, image: &[u8; 32], blocks: usize) -> bool {
        self.image == *image && self.blocks.len() == blocks
    }

    /// Gives it to the process at the other end, and lets go of it here.
    ///
    /// # Errors
    /// That has ended, or does not take it.
    pub fn send(self, socket: UnixStream) -> io::Result<()> {
        let mut connection = Connection::new(socket);
        connection.set_deadline(Some(Instant::now() + PATIENCE));
        let reserve = self.reserve.iter();
        let reserve = reserve.map(|(pid, kept)| Reserved { pid: *pid, pieces: kept.len() as u64 });
        let reserve: Vec<Reserved> = reserve.collect();
        let kept = reserve.iter().filter_map(|one| self.reserve.get(&one.pid)).flatten();
        let fds: Vec<BorrowedFd<'_>> = self.blocks.iter().chain(kept).map(AsFd::as_fd).collect();
        connection.send(&Head { image: self.image, blocks: self.blocks.len() as u64, reserve })?;
        connection.send_fds(&fds)
    }
}

/// Device memory that comes from the process that has started this one. It can be taken once: a second restore of the
/// image loads the memory itself.
#[derive(Clone, Debug)]
pub struct Given(Arc<Mutex<State>>);

#[derive(Debug)]
enum State {
    /// The other process sends it as soon as it has it, or closes the connection.
    Awaited(UnixStream),
    Here(LoadedMemory),
    /// It was taken, or none comes.
    Gone,
}

impl Given {
    /// What the process at the other end sends.
    pub fn through(socket: UnixStream) -> Self {
        Self(Arc::new(Mutex::new(State::Awaited(socket))))
    }

    /// Whether it is the memory of the image with this identity and so many blocks, as far as that is known, and nobody
    /// has taken it.
    pub(super) fn is_of(&self, image: &[u8; 32], blocks: usize) -> bool {
        match &*self.0.lock() {
            State::Awaited(_) => true,
            State::Here(memory) => memory.is_of(image, blocks),
            State::Gone => false,
        }
    }

    /// Takes the memory of the image with this identity and so many blocks, if it is there. If it is awaited, it is waited
    /// for until the other process gives it or has ended.
    pub(super) fn take(&self, image: &[u8; 32], blocks: usize) -> Option<(Vec<OwnedFd>, Reserve)> {
        let mut state = self.0.lock();
        *state = match std::mem::replace(&mut *state, State::Gone) {
            State::Awaited(socket) => match receive(socket) {
                Ok(memory) => State::Here(memory),
                Err(error) => {
                    tracing::info!(%error, "no device memory comes");
                    State::Gone
                }
            },
            known => known,
        };
        match std::mem::replace(&mut *state, State::Gone) {
            State::Here(memory) if memory.is_of(image, blocks) => {
                Some((memory.blocks, memory.reserve))
            }
            other => {
                *state = other;
                None
            }
        }
    }
}

/// Takes it from the process at the other end, which may take its time to begin.
///
/// # Errors
/// That has ended, or gives something else.
fn receive(socket: UnixStream) -> io::Result<LoadedMemory> {
    let mut connection = Connection::new(socket);
    let Head { image, blocks, reserve: kept } = connection.receive()?;
    connection.set_deadline(Some(Instant::now() + PATIENCE));
    let pieces = kept.iter().try_fold(0, |sum: u64, one| sum.checked_add(one.pieces));
    let pieces = pieces.filter(|pieces| *pieces <= MOST_RESERVED);
    let pieces = pieces.ok_or(io::ErrorKind::InvalidData)?;
    let all = pieces.checked_add(blocks).ok_or(io::ErrorKind::InvalidData)?;
    make_room_for(all).map_err(io::Error::other)?;
    let mut fds = connection.receive_fds(all as usize)?.into_iter();
    let mut next = |count: u64| fds.by_ref().take(count as usize).collect::<Vec<OwnedFd>>();
    let blocks = next(blocks);
    let reserve = kept.into_iter().map(|Reserved { pid, pieces }| (pid, next(pieces))).collect();
    Ok(LoadedMemory { image, blocks, reserve })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptors(count: usize) -> Vec<OwnedFd> {
        let open = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        (0..count).map(|_| open()).collect()
    }

    #[test]
    fn what_is_sent_comes_and_can_be_taken_once() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let reserve = Reserve::from([(7, descriptors(2)), (8, Vec::new()), (9, descriptors(1))]);
        let memory = LoadedMemory::new([1; 32], descriptors(300), reserve);
        let sending = std::thread::spawn(move || memory.send(ours));
        let given = Given::through(theirs);
        assert!(given.is_of(&[2; 32], 300), "it is not known yet");
        assert!(given.take(&[2; 32], 300).is_none(), "it is another image's");
        assert!(given.take(&[1; 32], 299).is_none(), "it has other blocks");
        assert!(given.is_of(&[1; 32], 300) && !given.is_of(&[2; 32], 300));
        let (blocks, reserve) = given.take(&[1; 32], 300).unwrap();
        let mut kept: Vec<_> = reserve.iter().map(|(pid, kept)| (*pid, kept.len())).collect();
        kept.sort_unstable();
        assert_eq!((blocks.len(), kept), (300, vec![(7, 2), (8, 0), (9, 1)]));
        assert!(given.take(&[1; 32], 300).is_none(), "it is taken");
        assert!(!given.is_of(&[1; 32], 300));
        sending.join().unwrap().unwrap();
    }

    #[test]
    fn of_what_ends_early_nothing_is_taken() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let given = Given::through(theirs);
        drop(ours);
        assert!(given.take(&[0; 32], 0).is_none() && !given.is_of(&[0; 32], 0));
        let (ours, theirs) = UnixStream::pair().unwrap();
        let head = Head { image: [0; 32], blocks: 1, reserve: Vec::new() };
        Connection::new(ours).send(&head).unwrap();
        assert!(receive(theirs).is_err(), "the descriptor is missing");
        let (ours, theirs) = UnixStream::pair().unwrap();
        let reserve = vec![Reserved { pid: 1, pieces: u64::MAX }; 2];
        Connection::new(ours).send(&Head { image: [0; 32], blocks: 0, reserve }).unwrap();
        assert!(receive(theirs).is_err(), "nobody keeps so much");
    }
}
