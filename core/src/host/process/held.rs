//! What processes hold that CRIU saves only if it is told to, or not at all: looked up beforehand, as far as `/proc` and
//! the kernel tell it.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::net::SocketType;

use super::network;
use super::tree::{Tree, directory};

/// Deleted files of more bytes CRIU does not save.
const LARGEST_DELETED: u64 = u32::MAX as u64;
/// The major numbers of devices that CRIU or the driver's checkpoint takes care of: memory, terminals, NVIDIA's.
const KNOWN_DEVICES: [u32; 7] = [1, 4, 5, 136, 137, 138, 195];

/// The major number of `/dev/null` and its like: `MEM_MAJOR` of Linux' `include/uapi/linux/major.h`.
const MEMORY_MAJOR: u32 = 1;

/// How a stream of Unix sockets is called.
const STREAM: &str = "a connection of Unix sockets";
/// How a device of a network adapter with RDMA is called.
const RDMA: &str = "the RDMA device";
/// Their major number: `IB_DEV_MAJOR` of Linux' `drivers/infiniband/core`.
const RDMA_MAJOR: u32 = 231;

/// How a segment of System V shared memory is called in `/proc/PID/maps`, before its key.
const SEGMENT: &str = "/SYSV";
/// And here.
pub const SYSTEM_V: &str = "System V shared memory";

/// How a file is called that was opened where its process does not see it, behind its path.
pub const OPENED_OUTSIDE: &str = "open from a mount that it does not see";

/// What an io_uring is called.
pub const IO_URING: &str = "an io_uring";
const IO_URING_LINK: &str = "anon_inode:[io_uring]";
/// What CRIU saves of no process, as `/proc` calls it, and how it is called here. Of what `/proc` calls `anon_inode:…`
/// CRIU 4.2 saves eventfd, epoll, inotify, fanotify, signalfd, timerfd, pidfd and, if it was built so, maps of BPF
/// (`dump_one_file` in its `criu/files.c`). What is in neither list is left to CRIU: the driver's checkpoint may close
/// it.
const UNSAVED: [(&str, &str); 4] = [
    (IO_URING_LINK, IO_URING),
    ("anon_inode:[perf_event]", "a perf event"),
    ("anon_inode:[userfaultfd]", "a userfaultfd"),
    ("anon_inode:bpf-prog", "a BPF program"),
];

/// Something that keeps CRIU from saving a process as things are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The process.
    pub pid: u32,
    /// What it has.
    pub what: String,
    /// The options that have CRIU save it, each by itself; none if there is none.
    pub options: &'static [&'static str],
    /// Whether it is, or leads to, what nobody can bring back: the other end of a stream of Unix sockets, what a network
    /// adapter knows of the process, or what CRIU saves of none.
    pub is_lost: bool,
}

/// What these processes hold, and how many of them have a TCP socket.
#[derive(Debug, Default)]
pub struct Holdings {
    /// What CRIU has to be told of, or cannot save.
    pub held: Vec<Held>,
    /// The processes that have TCP sockets of any kind.
    pub tcp: Vec<u32>,
    /// A process that has its terminal open as `/dev/tty`, where none of the tree has it open by its own name: only by
    /// that would CRIU know which it is.
    pub unnamed_terminal: Option<u32>,
}

/// What the processes of a tree hold.
pub fn of(tree: &Tree) -> Holdings {
    let mut all = Holdings::default();
    let open: Vec<(u32, Vec<Open>)> = tree.pids().into_iter().map(|p| (p, open(p))).collect();
    let inner: BTreeSet<u32> = open.iter().flat_map(|(_, open)| open).filter_map(socket).collect();
    let mut said = BTreeSet::new();
    let who = |is_it: fn(&Path) -> bool| {
        open.iter().find(|(_, open)| open.iter().any(|one| is_it(&one.target))).map(|(pid, _)| *pid)
    };
    // CRIU saves segments with the whole IPC namespace, if the tree has one that is not CRIU's own.
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/ipc")).ok();
    let saves_segments =
        namespace(&directory(tree.root().pid)) != namespace(Path::new("/proc/self"));
    let named = who(|path| path.starts_with("/dev/pts") || path == Path::new("/dev/console"));
    all.unnamed_terminal = who(|path| path == Path::new("/dev/tty")).filter(|_| named.is_none());
    for (pid, open) in &open {
        let own: BTreeSet<u32> = open.iter().filter_map(socket).collect();
        let mut add = |what: String, options| {
            // Once, though relatives have the same thing open. What has no name of its own is another one in each.
            let is_unsaved = UNSAVED.iter().any(|(_, name)| what == *name);
            if said.insert((what.clone(), is_unsaved.then_some(*pid))) {
                let is_lost = what.starts_with(STREAM) || what.starts_with(RDMA);
                let is_lost = is_lost || what.starts_with(SYSTEM_V) || is_unsaved;
                let is_lost = is_lost || what.contains(OPENED_OUTSIDE);
                all.held.push(Held { pid: *pid, what, options, is_lost });
            }
        };
        if has_tcp(*pid, &own) {
            all.tcp.push(*pid);
        }
        for socket in network::unix_sockets(*pid).unwrap_or_default() {
            let is_outside = own.contains(&socket.inode)
                && socket.peer.is_some_and(|peer| peer != 0 && !inner.contains(&peer));
            if !is_outside {
                continue;
            }
            match socket.kind {
                SocketType::DGRAM => add(
                    format!(
                        "a datagram socket (inode {}) that is connected to a process outside",
                        socket.inode
                    ),
                    &["--ext-unix-sk"],
                ),
                _ => add(format!("{STREAM} (inode {}) to a process outside", socket.inode), &[]),
            }
        }
        let seen = mounts_seen(*pid);
        for one in open {
            of_file(one, &mut add);
            if seen.as_ref().is_some_and(|seen| is_outside(one, seen)) {
                let (path, number) = (one.target.display(), one.number());
                add(format!("{path} {OPENED_OUTSIDE} (descriptor {number})"), &[]);
            }
        }
        for mapped in mapped(*pid, saves_segments) {
            add(mapped, &[]);
        }
    }
    all
}

/// What is mapped that is not saved, though no descriptor of it may be open.
fn mapped(pid: u32, saves_segments: bool) -> Vec<String> {
    let maps = std::fs::read_to_string(directory(pid).join("maps")).unwrap_or_default();
    // Behind address, permissions, offset, device and inode.
    let names = maps.lines().filter_map(|line| line.split_ascii_whitespace().nth(5));
    names
        .filter_map(|name| match name.strip_prefix(SEGMENT) {
            Some(key) => (!saves_segments).then(|| format!("{SYSTEM_V} with the key 0x{key}")),
            None => (name == IO_URING_LINK).then(|| IO_URING.to_owned()),
        })
        .collect()
}

/// The mounts of which CRIU knows when it saves the files of a process, by number: those in its mount namespace, or
/// those that CRIU sees itself if that is its own too.
fn mounts_seen(pid: u32) -> Option<BTreeSet<u64>> {
    let of = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let (own, process) = (Path::new("/proc/self"), directory(pid));
    let is_shared = of(own) == of(&process);
    let process = if is_shared { own } else { process.as_path() };
    let told = std::fs::read_to_string(process.join("mountinfo"));
    let number = |line: &str| line.split_ascii_whitespace().next()?.parse().ok();
    Some(told.ok()?.lines().filter_map(number).collect())
}

/// Whether a file was opened elsewhere, such as the standard input of `podman exec -d`: the host's `/dev/null`.
/// Terminals are not meant: CRIU takes those from anywhere.
fn is_outside(open: &Open, seen: &BTreeSet<u64>) -> bool {
    let Ok(meta) = std::fs::metadata(&open.link) else { return false };
    let kind = meta.file_type();
    let is_memory = || rustix::fs::major(meta.rdev()) == MEMORY_MAJOR;
    let is_saved = kind.is_file() || kind.is_dir() || kind.is_fifo();
    // The kernel's own files, such as a memfd, are on mounts that nobody sees. They have no name.
    let is_named = open.target.is_absolute() && meta.nlink() > 0;
    is_named
        && (is_saved || kind.is_char_device() && is_memory())
        && open.mount.is_some_and(|mount| !seen.contains(&mount))
}

/// A descriptor.
struct Open {
    link: PathBuf,
    target: PathBuf,
    is_locked: bool,
    /// The number of the mount by which it was opened.
    mount: Option<u64>,
}

impl Open {
    /// The number of the descriptor.
    fn number(&self) -> Cow<'_, str> {
        self.link.file_name().unwrap_or_default().to_string_lossy()
    }
}

fn open(pid: u32) -> Vec<Open> {
    let all = std::fs::read_dir(directory(pid).join("fd")).into_iter().flatten().flatten();
    all.filter_map(|entry| {
        let link = entry.path();
        let info = directory(pid).join("fdinfo").join(entry.file_name());
        let info = std::fs::read_to_string(info).unwrap_or_default();
        let is_locked = info.lines().any(|line| line.starts_with("lock:"));
        let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        Some(Open { target: std::fs::read_link(&link).ok()?, link, is_locked, mount })
    })
    .collect()
}

fn socket(open: &Open) -> Option<u32> {
    open.target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn of_file(open: &Open, add: &mut dyn FnMut(String, &'static [&'static str])) {
    let path = open.target.display();
    if open.is_locked {
        add(format!("a lock on {path}"), &["--file-locks"]);
    }
    if let Some((_, name)) = UNSAVED.iter().find(|(link, _)| open.target.as_os_str() == *link) {
        add((*name).to_owned(), &[]);
    }
    let Ok(meta) = std::fs::metadata(&open.link) else { return };
    let name = open.target.to_string_lossy().into_owned();
    let is_deleted = name.ends_with(" (deleted)") && meta.nlink() == 0;
    if is_deleted && meta.is_file() && meta.len() > LARGEST_DELETED {
        add(format!("the file {path} of {} bytes", meta.len()), &[]);
    }
    let major = rustix::fs::major(meta.rdev());
    let is_nvidia =
        Path::new(&name).file_name().is_some_and(|n| n.to_string_lossy().starts_with("nvidia"));
    let is_char_device = meta.file_type().is_char_device();
    // Some drivers' have other numbers, such as that for the connection manager; all are in a directory of this name.
    let is_below = |name: &str| open.target.parent().is_some_and(|above| above.ends_with(name));
    if is_char_device && (major == RDMA_MAJOR || is_below("infiniband")) {
        add(format!("{RDMA} {path}"), &[]);
    } else if is_char_device && !KNOWN_DEVICES.contains(&major) && !is_nvidia {
        add(format!("the device {path}"), &[]);
    }
    if meta.file_type().is_block_device() {
        add(format!("the device {path}"), &[]);
    }
}

/// Whether a process has a TCP socket, in whatever state.
fn has_tcp(pid: u32, own: &BTreeSet<u32>) -> bool {
    ["net/tcp", "net/tcp6"].iter().any(|table| {
        let rows = std::fs::read_to_string(directory(pid).join(table)).unwrap_or_default();
        let inodes = rows.lines().skip(1).filter_map(|row| row.split_whitespace().nth(9));
        inodes.filter_map(|inode| inode.parse().ok()).any(|inode: u32| own.contains(&inode))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener, TcpStream};
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::os::unix::net::{UnixDatagram, UnixStream};

    /// What a child has that was given these descriptors.
    fn held_by_a_child(shell: &str) -> Vec<Held> {
        let mut child = std::process::Command::new("bash")
            .args(["-c", &format!("{shell}; echo ready; read x")])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("it starts");
        let out = child.stdout.take().expect("piped");
        std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut String::new())
            .expect("a line");
        let held = of(&Tree::read(child.id()).expect("it lives")).held;
        child.kill().and_then(|()| child.wait()).expect("killed");
        held
    }

    #[test]
    fn sockets_of_the_process_itself_lead_nowhere() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("bound");
        let port = listener.local_addr().expect("bound").port();
        // This process and a thread of its own see the sockets whose other ends are here too as inner ones.
        let (_a, _b) = UnixStream::pair().expect("a pair");
        let _tcp = TcpStream::connect(("127.0.0.1", port)).expect("connected");
        let own = of(&Tree::read(std::process::id()).expect("it lives"));
        assert!(own.tcp.contains(&std::process::id()));
        assert!(!own.held.iter().any(|h| h.what.contains("Unix sockets")), "{:?}", own.held);
    }

    #[test]
    fn files_that_are_deleted_locked_or_devices_are_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = |name: &str| dir.path().join(name).display().to_string();
        let held = held_by_a_child(&format!(
            "exec 6>{0}; flock 6; exec 7>{1}; rm {1}; truncate -s 5G /proc/self/fd/7; exec 8>{2}; rm {2}; \
             exec 9</dev/null",
            path("locked"),
            path("large"),
            path("small"),
        ));
        let has = |what: &str, options: &[&str]| {
            held.iter().any(|h| h.what.contains(what) && h.options == options)
        };
        assert!(has("locked", &["--file-locks"]), "{held:?}");
        assert!(has("large", &[]) && !held.iter().any(|h| h.what.contains("small")), "{held:?}");
        assert!(!held.iter().any(|h| h.what.contains("device")), "{held:?}");
    }

    #[test]
    fn what_was_opened_by_a_mount_that_is_not_seen_is_found() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let _null = std::fs::File::open("/dev/null").expect("opened");
        let _memfd = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).expect("made");
        let own = std::process::id();
        let seen = mounts_seen(own).expect("told");
        let all = open(own);
        let found = |seen: &BTreeSet<u64>| -> Vec<PathBuf> {
            let outside = all.iter().filter(|one| is_outside(one, seen));
            outside.map(|one| one.target.clone()).collect()
        };
        let has = |path: &Path| found(&BTreeSet::new()).iter().any(|target| target == path);
        assert!(has(file.path()) && has(Path::new("/dev/null")), "{:?}", found(&BTreeSet::new()));
        let is_memfd = |path: &PathBuf| path.to_string_lossy().starts_with("/memfd:");
        assert!(!found(&BTreeSet::new()).iter().any(is_memfd));
        // What this test inherited may be from anywhere.
        assert!(!found(&seen).iter().any(|target| target == file.path()));
    }

    #[test]
    fn what_criu_saves_of_no_process_is_found() {
        let found = || of(&Tree::read(std::process::id()).expect("it lives")).held;
        let has = |held: &[Held], what: &str| held.iter().any(|h| h.what == what && h.is_lost);
        // SAFETY: a plain number.
        let _saved = made(unsafe { libc::syscall(libc::SYS_eventfd2, 0, libc::O_CLOEXEC) });
        let before = found();
        assert!(!UNSAVED.iter().any(|(_, name)| has(&before, name)), "{before:?}");
        // SAFETY: a plain number, which has it serve faults of user mode alone.
        let uffd = made(unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1) });
        let mut parameters = [0_u32; 30];
        // SAFETY: the kernel reads and writes parameters of this size (`struct io_uring_params`).
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        let ring = made(ring);
        let held = found();
        assert_eq!(has(&held, "a userfaultfd"), uffd.is_some(), "{held:?}");
        assert_eq!(has(&held, IO_URING), ring.is_some(), "{held:?}");
        let Some(ring) = ring.filter(|_| uffd.is_some()) else {
            crate::skip::skip("no userfaultfd or io_uring here");
            return;
        };
        // Mapped alone: IORING_OFF_SQ_RING is 0.
        const PAGE: usize = 4096;
        let (access, flags) = (libc::PROT_READ, libc::MAP_SHARED);
        let fd = std::os::fd::AsRawFd::as_raw_fd(&ring);
        // SAFETY: a new mapping, wherever the kernel puts it.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), PAGE, access, flags, fd, 0) };
        assert_ne!(mapped, libc::MAP_FAILED);
        drop(ring);
        assert!(has(&found(), IO_URING), "{:?}", found());
        // SAFETY: nobody uses it.
        assert_eq!(unsafe { libc::munmap(mapped, PAGE) }, 0);
        assert!(!has(&found(), IO_URING), "{:?}", found());
    }

    #[test]
    fn segments_are_found_unless_the_namespace_is_saved() {
        // SAFETY: a new segment of one page, which goes when it is detached.
        let segment = unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 4096, libc::IPC_CREAT | 0o600);
            assert!(id >= 0, "{}", std::io::Error::last_os_error());
            let segment = libc::shmat(id, std::ptr::null(), 0);
            assert_eq!(libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()), 0);
            segment
        };
        let own = std::process::id();
        assert_eq!(mapped(own, false), ["System V shared memory with the key 0x00000000"]);
        assert!(mapped(own, true).is_empty());
        let held = of(&Tree::read(own).expect("it lives")).held;
        assert!(held.iter().any(|h| h.what.starts_with(SYSTEM_V) && h.is_lost), "{held:?}");
        // SAFETY: attached above, and not used.
        assert_eq!(unsafe { libc::shmdt(segment) }, 0);
    }

    /// What the kernel has made, if it has.
    fn made(fd: i64) -> Option<OwnedFd> {
        // SAFETY: it is new, and nobody else knows it.
        (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
    }

    #[test]
    fn datagram_sockets_that_lead_outside_are_found() {
        let dir = tempfile::tempdir().expect("a folder");
        let server = UnixDatagram::bind(dir.path().join("server")).expect("bound");
        let client = UnixDatagram::unbound().expect("a socket");
        client.connect(dir.path().join("server")).expect("connected");
        let pid = std::process::id();
        let sockets = network::unix_sockets(pid).expect("the kernel tells");
        let inode = |socket: &UnixDatagram| std::os::fd::AsRawFd::as_raw_fd(socket);
        let link = std::fs::read_link(format!("/proc/self/fd/{}", inode(&client))).expect("open");
        let row =
            sockets.iter().find(|s| link.to_string_lossy() == format!("socket:[{}]", s.inode));
        let link = std::fs::read_link(format!("/proc/self/fd/{}", inode(&server))).expect("open");
        let peer = row.and_then(|row| row.peer).expect("it is connected");
        assert_eq!(link.to_string_lossy(), format!("socket:[{peer}]"));
    }
}
