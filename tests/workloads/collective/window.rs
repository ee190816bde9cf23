//! Memory of each rank that all others have too.

use std::os::fd::OwnedFd;

use anyhow::Result;

use super::bootstrap::Bootstrap;
use super::options::Sharing;
use crate::gpu::{Buffer, Gpu, read_at, write_at};
use crate::handles::{Mapped, export};
use crate::ipc::{Opened, offer, parsed};

/// Exported memory is whole granules of this.
const GRANULE: usize = 2 << 20;

/// A rank's own.
pub(super) enum Window {
    Buffer(Buffer),
    Mapped(Mapped),
}

/// That of a member, also this rank itself.
pub(super) enum Peer {
    Own,
    Opened(Opened),
    Mapped(Mapped),
}

impl Peer {
    pub(super) fn address(&self, own: &Window) -> u64 {
        match self {
            Self::Own => own.address(),
            Self::Opened(opened) => opened.address,
            Self::Mapped(mapped) => mapped.address,
        }
    }
}

impl Window {
    /// So many bytes, all zero.
    pub(super) fn new(gpu: &Gpu, sharing: Sharing, bytes: usize) -> Result<Self> {
        let window = match sharing {
            Sharing::Ipc => Self::Buffer(Buffer::new(bytes)?),
            Sharing::Handles => Self::Mapped(Mapped::create(gpu, bytes.next_multiple_of(GRANULE))?),
        };
        write_at(window.address(), &vec![0u8; bytes])?;
        Ok(window)
    }

    pub(super) fn address(&self) -> u64 {
        match self {
            Self::Buffer(buffer) => buffer.address(),
            Self::Mapped(mapped) => mapped.address,
        }
    }

    /// A word of it.
    pub(super) fn word(&self, index: usize) -> Result<u32> {
        Ok(read_at(self.address() + 4 * index as u64, 1)?[0])
    }

    /// The windows of all members, which all call this.
    pub(super) fn exchange(
        &self,
        gpu: &Gpu,
        bootstrap: &mut Bootstrap,
        members: &[u32],
    ) -> Result<Vec<Peer>> {
        let rank = bootstrap.rank();
        match self {
            Self::Buffer(buffer) => {
                let handle = offer(buffer.address())?;
                let all = bootstrap.all_gather(members, handle.as_bytes())?;
                let open = |(member, handle): (&u32, Vec<u8>)| {
                    if *member == rank {
                        return Ok(Peer::Own);
                    }
                    Ok(Peer::Opened(Opened::open(parsed(&String::from_utf8(handle)?)?)?))
                };
                members.iter().zip(all).map(open).collect()
            }
            Self::Mapped(mapped) => {
                let all = bootstrap.all_gather_descriptors(members, export(mapped.handle)?)?;
                let open = |(member, descriptor): (&u32, OwnedFd)| {
                    if *member == rank {
                        return Ok(Peer::Own);
                    }
                    Ok(Peer::Mapped(Mapped::import(gpu, &descriptor, mapped.bytes)?))
                };
                members.iter().zip(all).map(open).collect()
            }
        }
    }
}
