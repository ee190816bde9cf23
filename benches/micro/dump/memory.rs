//! How much memory the processes of a dump use, seen from outside.
//!
//! On the software driver, device memory is shared host memory, which gpucr maps to copy it. On a
//! GPU that is no host memory, so shared pages are not counted as gpucr's own.

use std::path::PathBuf;
use std::time::Duration;

/// How often to look.
pub(crate) const EVERY: Duration = Duration::from_millis(5);

/// The most that was seen, in bytes.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Peak {
    /// Private and file pages of gpucr and its watchdog together.
    pub(crate) own: u64,
    /// `VmHWM` of gpucr: the kernel's own peak, shared pages included.
    pub(crate) high: u64,
    /// The largest process of CRIU.
    pub(crate) criu: u64,
}

impl Peak {
    /// Looks at process `pid` and its descendants as they are now.
    pub(crate) fn look(&mut self, pid: u32) {
        let mut own = 0;
        if let Some(status) = Status::of(pid) {
            own += status.own;
            self.high = self.high.max(status.high);
        }
        let mut next = children(pid);
        while let Some(pid) = next.pop() {
            next.extend(children(pid));
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            // A child that has not yet become another program shares gpucr's memory: not counted.
            let mut words = line.split(|&byte| byte == 0);
            let name = words.next().map(|name| name.rsplit(|&b| b == b'/').next().unwrap_or(name));
            let Some(status) = Status::of(pid) else { continue };
            if name == Some(b"criu") {
                self.criu = self.criu.max(status.own);
            } else if words.next() == Some(b"watchdog") {
                own += status.own;
            }
        }
        self.own = self.own.max(own);
    }
}

struct Status {
    own: u64,
    high: u64,
}

impl Status {
    /// `None` when the process is gone.
    fn of(pid: u32) -> Option<Self> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            let kib: u64 = line.trim_matches([':', ' ', '\t']).split(' ').next()?.parse().ok()?;
            Some(kib << 10)
        };
        Some(Self { own: field("RssAnon")? + field("RssFile")?, high: field("VmHWM")? })
    }
}

/// The children of all threads of a process.
fn children(pid: u32) -> Vec<u32> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    let lists = tasks.into_iter().flatten().flatten().map(|task| task.path().join("children"));
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    lists
        .map(read)
        .flat_map(|list| list.split(' ').flat_map(str::parse).collect::<Vec<u32>>())
        .collect()
}
