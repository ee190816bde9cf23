//! Who could take over a gpucr that comes into a pid namespace.
//!
//! gpucr is root of the host. The kernel lets nobody trace it without all the capabilities that it has, unless with
//! `CAP_SYS_PTRACE`. Whoever has that, or may get it by what it executes, and is not root of the host in all but name
//! (`CAP_SYS_ADMIN`), must not be there. Capabilities are the threads', so each of them is looked at.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::refusal::EntryError;
use crate::host::ns::{Id, Namespace};

/// Of capabilities(7).
const SYS_PTRACE: u64 = 1 << 19;
const SYS_ADMIN: u64 = 1 << 21;

/// How often all of them are looked at, until two looks in a row have found the same: `/proc` is not read at one moment, and
/// who forks meanwhile might be seen in neither place.
const LOOKS: u32 = 40;
const BETWEEN: Duration = Duration::from_millis(25);

/// Threads, by their ids and the times of their starts.
type Seen = BTreeSet<(u32, u64)>;

/// Refuses a pid namespace, that of process `pid`, in which or below which somebody could trace gpucr.
///
/// # Errors
/// Somebody could, or it cannot be told.
pub(super) fn refuse(pid: u32, namespace: &Namespace) -> Result<(), EntryError> {
    let mut before = look(pid, namespace)?;
    for _ in 1..LOOKS {
        let now = look(pid, namespace)?;
        if now == before {
            return Ok(());
        }
        before = now;
        std::thread::sleep(BETWEEN);
    }
    Err(EntryError::Restless { pid })
}

/// Looks at each thread there once.
fn look(pid: u32, namespace: &Namespace) -> Result<Seen, EntryError> {
    let unknown = |by, source| EntryError::Unknown { pid, by, source };
    let mut place = Place::new(namespace).map_err(|source| unknown(pid, source))?;
    let mut seen = Seen::new();
    for by in numbers("/proc".into()).map_err(|source| unknown(pid, source))? {
        let known = match place.has(by) {
            Err(_) if has_ended(by, by) => continue,
            known => known.map_err(|source| unknown(by, source))?,
        };
        if !known {
            continue;
        }
        let threads = match numbers(format!("/proc/{by}/task").into()) {
            Err(_) if has_ended(by, by) => continue,
            threads => threads.map_err(|source| unknown(by, source))?,
        };
        for thread in threads {
            match look_at(by, thread) {
                Ok(None) => {}
                Ok(Some((capabilities, _))) if capabilities.may_trace() => {
                    return Err(EntryError::MayTrace { pid, by });
                }
                Ok(Some((_, start))) => drop(seen.insert((thread, start))),
                Err(_) if has_ended(by, thread) => {}
                Err(source) => return Err(unknown(by, source)),
            }
        }
    }
    Ok(seen)
}

/// A pid namespace with all below it: in these may be a `/proc` that shows the processes of this one.
struct Place {
    namespace: Id,
    own: Id,
    users: Id,
    known: HashMap<Id, bool>,
}

impl Place {
    fn new(namespace: &Namespace) -> io::Result<Self> {
        Ok(Self {
            namespace: namespace.id()?,
            own: Namespace::own("pid")?.id()?,
            users: Namespace::own("user")?.id()?,
            known: HashMap::new(),
        })
    }

    /// Whether a process is there, and in the user namespace of this one: in another it has no capability over gpucr.
    fn has(&mut self, pid: u32) -> io::Result<bool> {
        // Of one that has its only pid here the rest may be hidden, if it has capabilities that this process has not.
        if has_one_pid(&std::fs::read(format!("/proc/{pid}/status"))?)? {
            return Ok(false);
        }
        let namespace = Namespace::of(pid, "pid")?;
        let id = namespace.id()?;
        let is_there = match self.known.get(&id) {
            Some(known) => *known,
            None => {
                let is_there = self.is_below(namespace)?;
                self.known.insert(id, is_there);
                is_there
            }
        };
        Ok(is_there && Namespace::of(pid, "user")?.id()? == self.users)
    }

    fn is_below(&self, namespace: Namespace) -> io::Result<bool> {
        let mut at = Some(namespace);
        while let Some(namespace) = at {
            match namespace.id()? {
                id if id == self.namespace => return Ok(true),
                id if id == self.own => return Ok(false),
                _ => at = namespace.parent()?,
            }
        }
        Ok(false)
    }
}

/// Whether a process is in the pid namespace of this `/proc` itself, by what the kernel says in `status`.
fn has_one_pid(status: &[u8]) -> io::Result<bool> {
    let pids = line(status, "NSpid:").ok_or(io::ErrorKind::InvalidData)?;
    Ok(pids.split_whitespace().count() == 1)
}

/// What a line of `status` says. The name of the process, in one of them, may have any bytes but the end of a line.
fn line<'s>(status: &'s [u8], name: &str) -> Option<&'s str> {
    let mut lines = status.split(|byte| *byte == b'\n');
    let value = lines.find_map(|line| line.strip_prefix(name.as_bytes()))?;
    std::str::from_utf8(value).ok()
}

/// The numbers that are names in a directory of `/proc`.
fn numbers(dir: PathBuf) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir)? {
        found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(found)
}

/// What a thread may do, and when it was started; none if it runs no more.
fn look_at(pid: u32, thread: u32) -> io::Result<Option<(Capabilities, u64)>> {
    let of = |file: &str| std::fs::read(format!("/proc/{pid}/task/{thread}/{file}"));
    let (state, start) = state(&of("stat")?)?;
    let capabilities = Capabilities::read(&of("status")?)?;
    Ok(Some((capabilities, start)).filter(|_| !has_stopped_for_good(state)))
}

/// The state of a thread and the time of its start, from what the kernel says in `stat`. Its name may have any bytes.
fn state(stat: &[u8]) -> io::Result<(u8, u64)> {
    let end = stat.iter().rposition(|byte| *byte == b')').ok_or(io::ErrorKind::InvalidData)?;
    let rest = std::str::from_utf8(&stat[end + 1..]).map_err(io::Error::other)?;
    let mut fields = rest.split_whitespace();
    let state = fields.next().and_then(|state| state.bytes().next());
    // The first one here is the third in proc_pid_stat(5), and this the 22nd.
    let start = fields.nth(18).and_then(|start| start.parse().ok());
    state.zip(start).ok_or(io::ErrorKind::InvalidData.into())
}

fn has_stopped_for_good(state: u8) -> bool {
    matches!(state, b'Z' | b'X' | b'x')
}

/// Whether a thread is not there any more: what is asked about it then is missing in many ways.
fn has_ended(pid: u32, thread: u32) -> bool {
    match std::fs::read(format!("/proc/{pid}/task/{thread}/stat")) {
        Ok(stat) => state(&stat).is_ok_and(|(state, _)| has_stopped_for_good(state)),
        Err(error) => {
            error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
        }
    }
}

/// The sets of capabilities(7) that a thread has.
#[derive(Debug, Clone, Copy, Default)]
struct Capabilities {
    inheritable: u64,
    permitted: u64,
    effective: u64,
    bounding: u64,
    ambient: u64,
}

impl Capabilities {
    /// From what the kernel says in `status`.
    fn read(status: &[u8]) -> io::Result<Self> {
        let set = |name: &str| {
            let value = line(status, name);
            let value = value.and_then(|value| u64::from_str_radix(value.trim(), 16).ok());
            value.ok_or(io::Error::from(io::ErrorKind::InvalidData))
        };
        Ok(Self {
            inheritable: set("CapInh:")?,
            permitted: set("CapPrm:")?,
            effective: set("CapEff:")?,
            bounding: set("CapBnd:")?,
            ambient: set("CapAmb:")?,
        })
    }

    /// Whether a thread with these may trace a root of the host, now or after executing something, without being that itself.
    /// To whom both capabilities are left to be got by executing a file, who makes such files could as well give the other.
    fn may_trace(&self) -> bool {
        let has = self.permitted | self.effective | self.inheritable | self.ambient;
        has & SYS_PTRACE != 0 && self.permitted & SYS_ADMIN == 0
            || self.bounding & SYS_PTRACE != 0 && self.bounding & SYS_ADMIN == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may_trace(change: impl FnOnce(&mut Capabilities)) -> bool {
        let mut capabilities = Capabilities::default();
        change(&mut capabilities);
        capabilities.may_trace()
    }

    #[test]
    fn every_set_is_looked_at() {
        assert!(!may_trace(|_| {}));
        assert!(may_trace(|it| it.bounding = SYS_PTRACE));
        assert!(may_trace(|it| it.permitted = SYS_PTRACE));
        assert!(may_trace(|it| it.inheritable = SYS_PTRACE));
        assert!(may_trace(|it| it.ambient = SYS_PTRACE));
        // What it might get is not what it has.
        assert!(may_trace(|it| (it.permitted, it.bounding) = (SYS_PTRACE, SYS_PTRACE | SYS_ADMIN)));
        // Root of the host, and who may become that as every user of a host may.
        assert!(!may_trace(|it| (it.permitted, it.bounding) = (SYS_PTRACE | SYS_ADMIN, u64::MAX)));
        assert!(!may_trace(|it| it.bounding = SYS_PTRACE | SYS_ADMIN));
    }

    #[test]
    fn a_name_hides_nothing() {
        let name = b"Name:\tCapPrm: 0\xff\\nCapBnd:\t0\n";
        let sets = b"CapInh:\t0\nCapPrm:\t1\nCapEff:\t2\nCapBnd:\t80000\nCapAmb:\t0\n";
        let capabilities = Capabilities::read(&[&name[..], sets].concat()).expect("all are there");
        assert_eq!((capabilities.permitted, capabilities.bounding), (1, SYS_PTRACE));
        Capabilities::read(&sets[..sets.len() - 10]).expect_err("one is missing");
        let stat = b"7 (a) Z 1\xff) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 9 9";
        assert_eq!(state(stat).expect("it is whole"), (b'S', 4711));
    }

    #[test]
    fn a_thread_that_has_ended_is_none() {
        let own = std::process::id();
        let (_, start) = look_at(own, own).expect("it can be read").expect("it runs");
        let status = procfs::process::Process::myself().and_then(|it| it.stat()).expect("it runs");
        assert_eq!(start, status.starttime);
        assert!(!has_ended(own, own));
        let mut child = std::process::Command::new("true").spawn().expect("it starts");
        // Of one that was not waited for the kernel still tells.
        while !has_ended(child.id(), child.id()) {
            std::thread::yield_now();
        }
        assert!(look_at(child.id(), child.id()).expect("it can be read").is_none());
        child.wait().expect("it ends");
        assert!(has_ended(child.id(), child.id()));
    }
}
