//! Limits of open files: each block of device memory costs a descriptor, in the program while it is handed over and
//! in gpucr for as long as it works on it.

use gpucr_wire::open_files::Raised;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, setrlimit};

/// A limit of open files is lower than the blocks of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{blocks} blocks of device memory take as many descriptors, and the limit of open files of {} is {limit}",
    if *own { "this gpucr".to_owned() } else { format!("process {pid}") }
)]
pub struct TooFewDescriptors {
    /// The process.
    pub pid: u32,
    /// Whether that is this process.
    pub own: bool,
    /// Blocks of the program.
    pub blocks: u64,
    /// The limit.
    pub limit: u64,
}

/// Descriptors that a process which hands blocks over needs for other things.
const OTHERS: u64 = 64;
/// What there should be besides the descriptors of blocks: those under way, the driver's own, files of the image.
const AMPLE: u64 = 1024;

/// The kernel is asked ahead for a table of so many descriptors.
const TABLE: i32 = 4096;

/// Raises the limit of this process as far as it goes for any user, and gets room for descriptors. For commands that work
/// on programs, not for one that becomes a program. To be called while there is one thread.
pub fn raise_open_files() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // If that is refused, a program with very many blocks meets the old limit with an error.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    // If there are several threads, the one that needs a larger table waits for all processors, some hundredths of a
    // second (expand_fdtable() of fs/file.c). Where this is refused, that is how it is.
    if let Ok(any) = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC) {
        let _ = rustix::io::fcntl_dupfd_cloexec(&any, TABLE - 1);
    }
}

/// Sees to it that this process, and what it starts from now on, can hold so many blocks.
///
/// # Errors
/// [`TooFewDescriptors`]: its limit is too low, and it may not raise it.
pub(crate) fn make_room_for(blocks: u64) -> Result<(), TooFewDescriptors> {
    // A driver may have one more of each.
    let ample = blocks.saturating_mul(2).saturating_add(AMPLE);
    let before = getrlimit(Resource::Nofile);
    let limit = before.current.unwrap_or(u64::MAX);
    let raised = Rlimit { current: Some(ample), maximum: before.maximum.max(Some(ample)) };
    if limit >= ample
        || setrlimit(Resource::Nofile, raised).is_ok()
        || limit >= blocks.saturating_add(OTHERS)
    {
        return Ok(());
    }
    Err(TooFewDescriptors { pid: std::process::id(), own: true, blocks, limit })
}

/// Lets the agent in a process make or take so many more descriptors of blocks, as long as what is returned lives: the
/// program's hard limit is raised, up to which the agent may go. `None` if that is high enough.
///
/// # Errors
/// [`TooFewDescriptors`]: it is too low, and this process may not raise it.
pub(crate) fn lend_room(pid: u32, blocks: u64) -> Result<Option<Raised>, TooFewDescriptors> {
    let Some((before, open)) = look(pid) else {
        // The process has ended, and others find that out.
        return Ok(None);
    };
    let soft = before.current.unwrap_or(u64::MAX);
    // The agent keeps its descriptors above what the program may have itself; a driver may have one more of each.
    let above = soft.max(open.last().map_or(0, |highest| highest + 1));
    let ample = above.saturating_add(blocks.saturating_mul(2)).saturating_add(AMPLE);
    let hard = before.maximum.unwrap_or(u64::MAX);
    if hard >= ample {
        return Ok(None);
    }
    let raised = Rlimit { current: before.current, maximum: Some(ample) };
    match Raised::new(Pid::from_raw(pid as i32), before, raised) {
        Ok(raised) => Ok(Some(raised)),
        // Blocks that came back from a dump have theirs already.
        Err(_) if blocks.max(open.len() as u64).saturating_add(OTHERS) <= hard => Ok(None),
        Err(_) => Err(TooFewDescriptors { pid, own: false, blocks, limit: hard }),
    }
}

/// Whether CRIU will be told the limits of a process: those of another user's it asks for with `prlimit(2)`, which the
/// kernel answers to who has `CAP_SYS_RESOURCE`. One that has ended is left to others.
pub(crate) fn can_be_read(pid: u32) -> bool {
    // SAFETY: no new limit is given, and none is asked for: the kernel only checks whether it may be.
    let asked = unsafe {
        libc::prlimit(pid as i32, libc::RLIMIT_CPU, std::ptr::null(), std::ptr::null_mut())
    };
    asked == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::EPERM)
}

/// The limit of a process, and its descriptors in order.
fn look(pid: u32) -> Option<(Rlimit, Vec<u64>)> {
    use procfs::process::{LimitValue, Process};
    let limit = Process::new(pid as i32).and_then(|process| process.limits()).ok()?.max_open_files;
    let value = |limit| match limit {
        LimitValue::Value(value) => Some(value),
        LimitValue::Unlimited => None,
    };
    let before = Rlimit { current: value(limit.soft_limit), maximum: value(limit.hard_limit) };
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let mut open: Vec<u64> =
        open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    open.sort_unstable();
    Some((before, open))
}
