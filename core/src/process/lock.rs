//! One gpucr at a time for each process.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::tree::ProcessInfo;

/// Held by the gpucr that works on a process; let go of on drop, and by the kernel if gpucr dies.
#[derive(Debug)]
pub struct Lock {
    /// An abstract socket that nobody connects to: its name can be had once, needs no file, and
    /// vanishes with its owner.
    _name: UnixListener,
}

impl Lock {
    /// Takes the lock of a process; `None` if another gpucr has it.
    pub fn take(process: &ProcessInfo) -> std::io::Result<Option<Self>> {
        let ProcessInfo { pid_namespace, inner_pid, .. } = process;
        let name = format!("gpucr-lock-{pid_namespace}-{inner_pid}");
        let address = SocketAddr::from_abstract_name(name)?;
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
        let process = ProcessInfo::read(std::process::id()).expect("it is this one");
        let lock = Lock::take(&process).expect("taken").expect("free");
        assert!(Lock::take(&process).expect("asked").is_none());
        drop(lock);
        assert!(Lock::take(&process).expect("taken").is_some());
    }
}
