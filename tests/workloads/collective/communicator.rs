//! Ranks that take part in operations together.

use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::args;
use crate::gpu::{Buffer, Gpu, Kernel, Module, Shape, Stream};
use crate::numbers::Sequence;

use super::bootstrap::Bootstrap;
use super::lost::{self, Lost};
use super::options::Sharing;
use super::window::{Peer, Window};

const PTX: &str = include_str!("../kernels/collective.ptx");
/// Blocks of an operation, each with a part of its own, as NCCL's channels.
const BLOCKS: u32 = 2;
const THREADS: u32 = 64;
/// Words of a window before its data.
const HEAD: usize = 64;
/// The word that says who was lost.
const STATUS: usize = 63;
/// A pause before an operation is shorter than this, in milliseconds.
const PAUSE: u32 = 10;

/// What an operation does with what the ranks give.
#[derive(Clone, Copy)]
enum Kind {
    Sum,
    Gather,
    /// From the member of this index.
    Broadcast(u32),
}

impl Kind {
    /// As in `kernels/collective.cu`.
    fn number(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Gather => 1,
            Self::Broadcast(root) => 2 + root,
        }
    }
}

/// Ranks that take part in operations together. All of them ask for the same operations in the same order, each on one
/// stream.
pub(crate) struct Communicator {
    /// The ranks, in order.
    members: Vec<u32>,
    /// The index of this one.
    index: u32,
    sharing: Sharing,
    capacity: u32,
    kernel: Kernel,
    _module: Module,
    /// Where each member's window is, for the kernels. It goes before them.
    table: Buffer,
    _peers: Vec<Peer>,
    window: Window,
    number: u32,
    pauses: Sequence,
    is_ahead: bool,
}

impl Communicator {
    /// Has these ranks share windows in which `capacity` words of each have room. All of them call it.
    pub(crate) fn new(
        gpu: &Gpu,
        bootstrap: &mut Bootstrap,
        members: Vec<u32>,
        sharing: Sharing,
        capacity: u32,
    ) -> Result<Self> {
        let rank = bootstrap.rank();
        let index = members.iter().position(|member| *member == rank).context("it takes part")?;
        let words = HEAD + 2 * members.len() * capacity as usize;
        let window = Window::new(gpu, sharing, 4 * words)?;
        let peers = window.exchange(gpu, bootstrap, &members)?;
        let table: Vec<u64> = peers.iter().map(|peer| peer.address(&window)).collect();
        let table = Buffer::holding(&table)?;
        let module = Module::load(PTX)?;
        let kernel = module.kernel("collective")?;
        let pauses = Sequence::new(rank);
        // Nobody writes to a window before it is all there.
        bootstrap.barrier(&members)?;
        Ok(Self {
            members,
            index: index as u32,
            sharing,
            capacity,
            kernel,
            _module: module,
            table,
            _peers: peers,
            window,
            number: 0,
            pauses,
            is_ahead: false,
        })
    }

    /// How many ranks take part.
    pub(crate) fn size(&self) -> u32 {
        self.members.len() as u32
    }

    /// Whether this rank is the first of them.
    pub(crate) fn is_first(&self) -> bool {
        self.index == 0
    }

    /// The ranks that take part.
    pub(crate) fn members(&self) -> &[u32] {
        &self.members
    }

    /// Whether this rank launches what it has to at once from now on, or with a pause before each operation.
    pub(crate) fn set_ahead(&mut self, is_ahead: bool) {
        self.is_ahead = is_ahead;
    }

    fn launch(
        &mut self,
        stream: &Stream,
        from: u64,
        to: u64,
        words: u32,
        kind: Kind,
    ) -> Result<()> {
        ensure!(words <= self.capacity, "a window has room for {} words", self.capacity);
        if !self.is_ahead {
            thread::sleep(Duration::from_millis(self.pauses.below(PAUSE).into()));
        }
        self.number += 1;
        let members = self.members.iter().fold(0u32, |mask, member| mask | 1 << member);
        let arguments = args![
            &self.table,
            lost::word()?,
            members,
            self.index,
            self.size(),
            self.capacity,
            from,
            to,
            words,
            self.number,
            kind.number()
        ];
        self.kernel.run_on(stream, Shape::of(BLOCKS, THREADS), arguments)
    }

    /// Adds up the words of all members; the sums may go where the words are.
    pub(crate) fn all_reduce(
        &mut self,
        stream: &Stream,
        from: u64,
        to: u64,
        words: u32,
    ) -> Result<()> {
        self.launch(stream, from, to, words, Kind::Sum)
    }

    /// Puts the words of all members one after the other.
    pub(crate) fn all_gather(
        &mut self,
        stream: &Stream,
        from: u64,
        to: u64,
        words: u32,
    ) -> Result<()> {
        self.launch(stream, from, to, words, Kind::Gather)
    }

    /// Gives all members the words of one of them.
    pub(crate) fn broadcast(
        &mut self,
        stream: &Stream,
        root: u32,
        words: (u64, u32),
    ) -> Result<()> {
        self.launch(stream, words.0, words.0, words.1, Kind::Broadcast(root))
    }

    /// Waits for the operations on a stream.
    ///
    /// # Errors
    /// [`Lost`] if they ended because a member has ended.
    pub(crate) fn wait(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        match self.window.word(STATUS)? {
            0 => Ok(()),
            lost => Err(Lost(lost).into()),
        }
    }

    /// A communicator of those that are left. All of them call it after the same operation.
    pub(crate) fn without(self, gpu: &Gpu, bootstrap: &mut Bootstrap, lost: &Lost) -> Result<Self> {
        let Self { members, sharing, capacity, table, _peers: peers, window, is_ahead, .. } = self;
        let left: Vec<u32> = members.into_iter().filter(|member| !lost.has(*member)).collect();
        drop((table, peers));
        // Only now nobody has this window open.
        bootstrap.barrier(&left)?;
        drop(window);
        let mut new = Self::new(gpu, bootstrap, left, sharing, capacity)?;
        new.is_ahead = is_ahead;
        Ok(new)
    }
}
