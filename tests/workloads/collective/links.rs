//! Links between two ranks: messages over a socket.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

/// The largest message.
const LARGEST: usize = 1 << 20;
/// How long all ranks may take to connect.
const PATIENCE: Duration = Duration::from_secs(120);

/// A connection to another rank.
pub(super) struct Link(File);

impl From<OwnedFd> for Link {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Link {
    pub(super) fn send(&mut self, message: &[u8]) -> Result<()> {
        let mut bytes = (message.len() as u32).to_le_bytes().to_vec();
        bytes.extend(message);
        self.0.write_all(&bytes).context("another rank has ended")
    }

    pub(super) fn receive(&mut self) -> Result<Vec<u8>> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).context("another rank has ended")?;
        let length = u32::from_le_bytes(length) as usize;
        ensure!(length <= LARGEST, "a message of {length} bytes");
        let mut message = vec![0; length];
        self.0.read_exact(&mut message).context("another rank has ended")?;
        Ok(message)
    }

    /// Connects to the first rank and says who this is, and what for.
    pub(super) fn connect(port: u16, rank: u32, purpose: u8) -> Result<Self> {
        let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        stream.set_nodelay(true)?;
        let mut link = Self::from(OwnedFd::from(stream));
        link.send(&[rank as u8, purpose])?;
        Ok(link)
    }

    /// The two ends of a new one.
    pub(super) fn pair() -> Result<(Self, OwnedFd)> {
        let (here, there) = UnixStream::pair()?;
        Ok((OwnedFd::from(here).into(), there.into()))
    }
}

/// Accepts so many connections, and gives each with its rank and its purpose.
pub(super) fn accept(listener: &TcpListener, count: u32) -> Result<Vec<(u32, u8, Link)>> {
    let deadline = Instant::now() + PATIENCE;
    listener.set_nonblocking(true)?;
    let mut links = Vec::new();
    while links.len() < count as usize {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                let mut link = Link::from(OwnedFd::from(stream));
                let hello = link.receive()?;
                let [rank, purpose] = hello[..] else { anyhow::bail!("no rank says so") };
                links.push((rank.into(), purpose, link));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                ensure!(Instant::now() < deadline, "not all ranks have connected");
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(links)
}
