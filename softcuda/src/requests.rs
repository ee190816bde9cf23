//! What processes ask each other for: each has a service thread (`service.rs`), which carries requests out.

use std::io::Read;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixStream};

use rustix::net::SendFlags;

use crate::status::{Code, Outcome};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Request {
    /// The id of the service thread.
    RestoreThread = 1,
    /// The state.
    State = 2,
    /// Lock; the argument is the time limit in milliseconds.
    Lock = 3,
    /// Checkpoint.
    Checkpoint = 4,
    /// Restore; the argument is a list of pairs of devices, see [`crate::placement`].
    Restore = 5,
    /// Unlock.
    Unlock = 6,
    /// Checkpoint to storage that the caller maps.
    CheckpointToStorage = 7,
    /// Restore from storage that the caller maps; the argument is as for a restore.
    RestoreFromStorage = 8,
    /// The caller has copied.
    Complete = 9,
    /// The devices of the host with memory of the process, as a bit each.
    Devices = 10,
    /// The descriptor of shared memory; the argument is the lower half of the inode number in its handle.
    SharedMemory = 11,
    /// What kind of device one of the process's is; the argument is its number on the host. 0 is none.
    Kind = 12,
}

/// So many bytes are read of an answer, which has one less: what else a process says is no answer.
const LONGEST_ANSWER: u64 = 9;

/// The name of a process, as its directory in `/proc` shows it.
///
/// # Errors
/// Those of reading the directory.
pub(crate) fn address(process: &str) -> std::io::Result<SocketAddr> {
    let namespace = std::fs::metadata(format!("{process}/ns/pid"))?.ino();
    let status = std::fs::read_to_string(format!("{process}/status"))?;
    let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let pid = pids.and_then(|pids| pids.split_ascii_whitespace().next_back());
    let pid = pid.ok_or(std::io::ErrorKind::InvalidData)?;
    SocketAddr::from_abstract_name(format!("softcuda-{namespace}-{pid}"))
}

/// Has a process (this one included) carry out a request; gives its answer.
///
/// # Errors
/// `INVALID_VALUE` when the process has no software driver or does not exist, `NOT_PERMITTED` when
/// it refuses to listen to this user, `OPERATING_SYSTEM` when it ends meanwhile, and what the
/// request itself fails with.
pub(crate) fn ask(pid: i32, request: Request, argument: u32) -> Outcome<u32> {
    let pid = u32::try_from(pid).ok().filter(|pid| *pid != 0).ok_or(Code::INVALID_VALUE)?;
    let connection = address(&format!("/proc/{pid}"))
        .and_then(|address| UnixStream::connect_addr(&address))
        .map_err(|_| Code::INVALID_VALUE)?;
    let mut message = [0; 8];
    message[..4].copy_from_slice(&(request as u32).to_le_bytes());
    message[4..].copy_from_slice(&argument.to_le_bytes());
    // The server closes its side after its answer, and the process may end right then, so that
    // only a missing answer is a failure. Reading to the end makes sure that it has closed.
    let mut answer = Vec::new();
    let _ = rustix::net::send(&connection, &message, SendFlags::NOSIGNAL);
    let _ = connection.take(LONGEST_ANSWER).read_to_end(&mut answer);
    let &[a, b, c, d, e, f, g, h] = answer.as_slice() else {
        return Err(Code::OPERATING_SYSTEM);
    };
    match u32::from_le_bytes([a, b, c, d]) {
        0 => Ok(u32::from_le_bytes([e, f, g, h])),
        code => Err(Code(code)),
    }
}
