//! How ranks talk before they share memory, and between steps: each has links to the first one.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;

use anyhow::{Context as _, Result, bail, ensure};
use gpucr_wire::Connection;
use rustix::io::{FdFlags, fcntl_setfd};

use super::links::{Link, accept};
use super::lost;
use super::options::Wire;

/// What a link is for.
const TALK: u8 = 0;
const WATCH: u8 = 1;

/// The links of a rank: the first one's to all others, and another one's to the first.
pub(crate) struct Bootstrap {
    rank: u32,
    links: BTreeMap<u32, Link>,
    /// Over these go descriptors.
    posts: BTreeMap<u32, Connection>,
}

/// A socket that a child inherits: both ends, until it has.
struct Inherited(OwnedFd);

impl Inherited {
    fn new(there: OwnedFd) -> Result<Self> {
        fcntl_setfd(&there, FdFlags::empty())?;
        Ok(Self(there))
    }
}

/// # Safety
/// The process has inherited this descriptor, and nobody else uses it.
unsafe fn inherited(number: &str) -> Result<OwnedFd> {
    let number: i32 = number.parse()?;
    ensure!(number > 2, "descriptor {number}");
    // SAFETY: as the caller says.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl_setfd(&fd, FdFlags::CLOEXEC)?;
    Ok(fd)
}

impl Bootstrap {
    /// The first rank's. `start` starts another rank, with a text by which that [joins](Self::join).
    pub(super) fn lead(
        ranks: u32,
        wire: Wire,
        mut start: impl FnMut(u32, &str) -> Result<()>,
    ) -> Result<Self> {
        let mut own = Self { rank: 0, links: BTreeMap::new(), posts: BTreeMap::new() };
        let mut watched = Vec::new();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        for rank in 1..ranks {
            let (here, there) = UnixStream::pair()?;
            own.posts.insert(rank, Connection::new(here));
            let post = Inherited::new(there.into())?;
            let number = post.0.as_raw_fd();
            if wire == Wire::Tcp {
                let port = listener.local_addr()?.port();
                start(rank, &format!("tcp {port} {port} {number}"))?;
                continue;
            }
            let (talk, talk_there) = Link::pair()?;
            let (watch, watch_there) = Link::pair()?;
            own.links.insert(rank, talk);
            watched.push((rank, watch));
            let (talk, watch) = (Inherited::new(talk_there)?, Inherited::new(watch_there)?);
            start(rank, &format!("unix {} {} {number}", talk.0.as_raw_fd(), watch.0.as_raw_fd()))?;
        }
        if wire == Wire::Tcp {
            for (rank, purpose, link) in accept(&listener, 2 * (ranks - 1))? {
                match purpose {
                    TALK => drop(own.links.insert(rank, link)),
                    _ => watched.push((rank, link)),
                }
            }
        }
        lost::watch(watched)?;
        Ok(own)
    }

    /// Another rank's.
    pub(super) fn join(rank: u32, given: &str) -> Result<Self> {
        let words: Vec<&str> = given.split(' ').collect();
        let [wire, talk, watch, post] = words[..] else { bail!("a wire and three numbers") };
        let (talk, watch) = if wire == "tcp" {
            let port = talk.parse()?;
            (Link::connect(port, rank, TALK)?, Link::connect(port, rank, WATCH)?)
        } else {
            // SAFETY: the first rank leaves both to this process, which comes here once.
            unsafe { (inherited(talk)?.into(), inherited(watch)?.into()) }
        };
        // SAFETY: as for the links.
        let post = Connection::new(UnixStream::from(unsafe { inherited(post)? }));
        lost::watch(vec![(0, watch)])?;
        let (links, posts) = (BTreeMap::from([(0, talk)]), BTreeMap::from([(0, post)]));
        Ok(Self { rank, links, posts })
    }

    /// This rank.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    fn link(&mut self, rank: u32) -> Result<&mut Link> {
        self.links.get_mut(&rank).context("a link to a rank")
    }

    fn post(&mut self, rank: u32) -> Result<&mut Connection> {
        self.posts.get_mut(&rank).context("a post to a rank")
    }

    /// What each of the members says, which all call this, in their order.
    pub(crate) fn all_gather(&mut self, members: &[u32], own: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.rank != 0 {
            self.link(0)?.send(own)?;
            return members.iter().map(|_| self.link(0)?.receive()).collect();
        }
        let hear = |rank: &u32| match rank {
            0 => Ok(own.to_vec()),
            rank => self.link(*rank)?.receive().with_context(|| format!("rank {rank}")),
        };
        let all = members.iter().map(hear).collect::<Result<Vec<_>>>()?;
        for rank in members.iter().filter(|rank| **rank != 0) {
            let link = self.link(*rank)?;
            all.iter().try_for_each(|said| link.send(said))?;
        }
        Ok(all)
    }

    /// Waits until all members have come here.
    pub(crate) fn barrier(&mut self, members: &[u32]) -> Result<()> {
        self.all_gather(members, &[]).map(drop)
    }

    /// The descriptors that the members give, in their order.
    pub(super) fn all_gather_descriptors(
        &mut self,
        members: &[u32],
        own: OwnedFd,
    ) -> Result<Vec<OwnedFd>> {
        if self.rank != 0 {
            let post = self.post(0)?;
            post.send_fds(&[own])?;
            return Ok(post.receive_fds(members.len())?);
        }
        let mut all = Vec::new();
        for rank in members {
            let given = match rank {
                0 => own.try_clone()?,
                rank => self.post(*rank)?.receive_fds(1)?.remove(0),
            };
            all.push(given);
        }
        for rank in members.iter().filter(|rank| **rank != 0) {
            self.post(*rank)?.send_fds(&all)?;
        }
        Ok(all)
    }
}
