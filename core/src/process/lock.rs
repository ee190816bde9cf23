//! One gpucr at a time for each process.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

/// Held by the gpucr that works on a process; let go of on drop, and by the kernel if gpucr dies.
#[derive(Debug)]
pub struct Lock {
    /// An abstract socket that nobody connects to: its name can be had once, needs no file, and
    /// vanishes with its owner.
    _name: UnixListener,
}

impl Lock {
    /// Takes the lock of process `pid`; `None` if another gpucr has it.
    pub fn take(pid: u32) -> std::io::Result<Option<Self>> {
        let address = SocketAddr::from_abstract_name(format!("gpucr-lock-{pid}"))?;
        match UnixListener::bind_addr(&address) {
            Ok(name) => Ok(Some(Self { _name: name })),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_had_once() {
        let pid = std::process::id();
        let lock = Lock::take(pid).expect("taken").expect("free");
        assert!(Lock::take(pid).expect("asked").is_none());
        drop(lock);
        assert!(Lock::take(pid).expect("taken").is_some());
    }
}
