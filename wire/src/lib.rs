//! What the shim inside a program and the checkpointer outside it share: the names of their
//! meeting point, the control messages, and how messages and file descriptors travel.
//!
//! The program's side of a connection is the *agent*, one thread of the shim. It listens on an
//! abstract Unix socket ([`agent_socket`]), which needs no file and vanishes with the process.
//! One connection at a time is served; each message is one frame (see [`transport`]), each
//! request is answered by exactly one reply, and file descriptors follow as frames of their own.
//!
//! `docs/protocol.md` describes the conversation of a dump and of a restore.

pub mod access;
pub mod chunks;
pub mod codec;
pub mod message;
pub mod open_files;
pub mod peers;
pub mod reach;
pub mod sharing;
pub mod supervisor;
pub mod table;
pub mod transport;
pub mod twice;

pub use access::Accesses;
pub use codec::Stream;
pub use message::{
    Adder, Block, BlockKind, Counts, GateState, Hello, MulticastObject, Opener, Reply, Request,
    Rest,
};
pub use sharing::{ProcessSharing, SHARING_VERSION, Sharing};
pub use table::{CHUNK_SIZE, Table};
pub use transport::{Connection, Peer};

/// Version of the messages below. A peer with another version is refused by name, because a
/// restored program carries the shim that it was started with.
pub const PROTOCOL_VERSION: u32 = 10;

/// Environment variable that names the real driver library which the shim loads, an absolute path.
pub const ENV_DRIVER: &str = "GPUCR_DRIVER";

/// Environment variable with the kernels that may be interrupted: names with `*` and `?`, or [`AUTO`], separated by commas.
pub const ENV_INTERRUPTIBLE: &str = "GPUCR_INTERRUPTIBLE";

/// In place of a name: kernels that take long.
pub const AUTO: &str = "auto";

/// Environment variable that says where these are interrupted: [`AT_BARRIERS`], [`IN_LOOPS`], [`ABORTED`], or else between
/// two of their blocks.
pub const ENV_INTERRUPT_LEVEL: &str = "GPUCR_INTERRUPT_LEVEL";

/// They are interrupted at barriers of their blocks, where that is possible.
pub const AT_BARRIERS: &str = "barrier";

/// They are interrupted in their loops or at barriers, where that is possible.
pub const IN_LOOPS: &str = "loop";

/// The same; and where it is not, launches of which doing them twice is the same as doing them once are aborted and begun
/// again.
pub const ABORTED: &str = "abort";

/// What the names of agents' sockets begin with.
pub const AGENT: &str = "gpucr-agent";

/// Name of the agent's thread.
pub const AGENT_THREAD: &str = "gpucr-agent";

/// The signal to that thread which [wakes](wake_agent) an agent. All signals are blocked there, so it meets no handler;
/// and nobody but root and the program's own user may send it.
pub const WAKE: i32 = libc::SIGURG;

/// Has the agent of a process accept connections though it has detached the program: until then it accepts nobody, so
/// that no stranger is connected to the program while CRIU looks at it.
pub fn wake_agent(pid: u32) {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten();
    for task in tasks.flatten() {
        let name = std::fs::read_to_string(task.path().join("comm"));
        let thread = task.file_name().to_str().and_then(|thread| thread.parse::<i32>().ok());
        if let (true, Some(thread)) =
            (name.is_ok_and(|name| name.trim_end() == AGENT_THREAD), thread)
        {
            // SAFETY: plain numbers.
            unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, WAKE) };
        }
    }
}

/// What an agent tells the kernel about its queue: beyond these, one may wait there. While CRIU looks at the program
/// gpucr takes that place itself, since a stranger in the queue who has given up makes CRIU fail.
pub const AGENT_QUEUE: i32 = 0;

/// Name (without the leading NUL) of the abstract socket of the agent in process `pid`.
///
/// The pid is the one that the process sees itself, in the pid namespace of that number (see
/// [`pid_namespace`]); the socket belongs to its network namespace, which others with the same pid may
/// share.
pub fn agent_socket(namespace: u64, pid: u32) -> String {
    format!("{AGENT}-{namespace}-{pid}")
}

/// A name for the agent's socket where another process has the usual one, which any process on the host may take.
/// Nobody can take this one beforehand.
///
/// # Errors
/// The kernel has no random numbers.
pub fn agent_socket_aside(namespace: u64, pid: u32) -> std::io::Result<String> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!("{AGENT}-{:016x}-{namespace}-{pid}", u64::from_ne_bytes(random)))
}

/// The number of the pid namespace in which a process lives: an inode, good as long as the namespace lives.
///
/// # Errors
/// There is no such process, or it belongs to somebody else.
pub fn pid_namespace(pid: u32) -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata(format!("/proc/{pid}/ns/pid"))?.ino())
}

/// The number of this process's own pid namespace.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own_pid_namespace() -> std::io::Result<u64> {
    use std::os::unix::fs::MetadataExt;
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}
