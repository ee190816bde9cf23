//! Whole logs of CRIU's failures, which are kept for a while: the error lines that are shown do not always tell why.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, Dir, Mode, OFlags};

use crate::base::runtime_dir;

/// Where they are, below [`runtime_dir`].
const DIR: &str = "logs";
/// So many are kept.
const MOST: usize = 10;
/// Most bytes of one.
const MOST_BYTES: u64 = 16 << 20;

/// Keeps a log, and removes the oldest ones. Gives the path of what is kept. Nothing depends on it.
pub(super) fn keep(dir: BorrowedFd<'_>, name: &str) -> Option<PathBuf> {
    let keep = || -> io::Result<PathBuf> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut log = File::from(rustix::fs::openat(dir, name, flags, Mode::empty())?);
        let logs = runtime_dir::open(DIR)?;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis());
        let kept = format!("{time:013}-{}-{name}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut file = File::from(rustix::fs::openat(&logs, &kept, flags, mode)?);
        // What went wrong is at the end.
        let len = log.metadata()?.len();
        log.seek(SeekFrom::Start(len.saturating_sub(MOST_BYTES)))?;
        if let Err(error) = io::copy(&mut log.take(MOST_BYTES), &mut file) {
            let _ = rustix::fs::unlinkat(&logs, kept.as_str(), AtFlags::empty());
            return Err(error);
        }
        // Names begin with the milliseconds since 1970.
        let mut names = names(&logs)?;
        names.sort_unstable();
        for old in names.iter().rev().skip(MOST) {
            let _ = rustix::fs::unlinkat(&logs, old.as_str(), AtFlags::empty());
        }
        Ok(runtime_dir::path_of(DIR).join(kept))
    };
    keep().inspect_err(|error| tracing::debug!(%error, "CRIU's log is not kept")).ok()
}

/// The logs that are kept, the newest first, each with its bytes.
///
/// # Errors
/// There is no place for logs that only this user can write to.
pub fn kept_logs() -> io::Result<Vec<(PathBuf, u64)>> {
    let logs = runtime_dir::open(DIR)?;
    let mut names = names(&logs)?;
    names.sort_unstable_by(|a, b| b.cmp(a));
    let size = |name: &String| {
        let stat = rustix::fs::statat(&logs, name.as_str(), AtFlags::SYMLINK_NOFOLLOW);
        stat.map_or(0, |stat| stat.st_size as u64)
    };
    let place = runtime_dir::path_of(DIR);
    Ok(names.iter().map(|name| (place.join(name), size(name))).collect())
}

fn names(dir: &OwnedFd) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(dir.as_fd())? {
        let entry = entry?;
        let name: &CStr = entry.file_name();
        names.extend(name.to_str().ok().filter(|name| name.ends_with(".log")).map(str::to_owned));
    }
    Ok(names)
}
