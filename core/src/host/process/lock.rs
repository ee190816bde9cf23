//! One gpucr at a time for each process.
//!
//! A lock is an empty file in a directory that is this user's alone, so nobody else can take it; it is held with
//! flock(2), so the kernel lets go of it when gpucr dies. The file is removed with the lock; of a gpucr that was
//! killed the next one removes it. A gpucr that makes, takes or removes such a file has the lock of their directory
//! meanwhile: so nobody holds a file that another one has removed.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Once;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::tree::ProcessInfo;
use crate::base::runtime_dir;

/// Where they are, below [`runtime_dir`].
const DIR: &str = "locks";
/// How long another gpucr may have the directory for itself: it needs it for a moment.
const PATIENCE: Duration = Duration::from_secs(2);

/// Held by the gpucr that works on a process; let go of on drop, and by the kernel if gpucr dies.
#[derive(Debug)]
pub struct Lock {
    name: String,
    file: OwnedFd,
    dir: OwnedFd,
}

impl Lock {
    /// Takes the lock of a process; `None` if another gpucr of this user has it.
    ///
    /// # Errors
    /// There is no place for locks that only this user can write to.
    pub fn take(process: &ProcessInfo) -> io::Result<Option<Self>> {
        static SWEPT: Once = Once::new();
        let dir = runtime_dir::open(DIR)?;
        SWEPT.call_once(|| sweep(&dir));
        Self::take_in(dir, name(process))
    }

    /// Whether another gpucr of this user has it. `false` where that cannot be told.
    pub(super) fn is_taken(process: &ProcessInfo) -> bool {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let look = || -> io::Result<bool> {
            let dir = runtime_dir::open(DIR)?;
            let _alone = Alone::on(&dir)?;
            let file = rustix::fs::openat(&dir, name(process), flags, Mode::empty())?;
            Ok(!try_lock(&file)?)
        };
        look().unwrap_or(false)
    }

    fn take_in(dir: OwnedFd, name: String) -> io::Result<Option<Self>> {
        let alone = Alone::on(&dir)?;
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, &name, flags, Mode::RUSR | Mode::WUSR)?;
        if !try_lock(&file)? {
            return Ok(None);
        }
        drop(alone);
        Ok(Some(Self { name, file, dir }))
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Without the directory's lock the file stays, for the next sweep.
        if let Ok(_alone) = Alone::on(&self.dir) {
            let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
            let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
        }
    }
}

fn name(process: &ProcessInfo) -> String {
    format!("{}-{}", process.pid_namespace, process.inner_pid)
}

fn try_lock(file: impl AsFd) -> io::Result<bool> {
    let operation = FlockOperation::NonBlockingLockExclusive;
    match rustix::io::retry_on_intr(|| rustix::fs::flock(&file, operation)) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// The lock of the directory, which every call here has for a moment.
struct Alone<'a>(BorrowedFd<'a>);

impl<'a> Alone<'a> {
    fn on(dir: &'a OwnedFd) -> io::Result<Self> {
        let end = Instant::now() + PATIENCE;
        while !try_lock(dir)? {
            if Instant::now() > end {
                let what = "another gpucr does not release the directory of locks";
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(Self(dir.as_fd()))
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        let _ = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

/// Removes the files of gpucrs that were killed, as far as that can be done.
fn sweep(dir: &OwnedFd) {
    let Ok(_alone) = Alone::on(dir) else { return };
    let Ok(names) = Dir::read_from(dir) else { return };
    for entry in names.flatten() {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        // Directories, such as this one, are not opened for writing.
        let Ok(file) = rustix::fs::openat(dir, entry.file_name(), flags, Mode::empty()) else {
            continue;
        };
        if try_lock(&file).unwrap_or(false) {
            let _ = rustix::fs::unlinkat(dir, entry.file_name(), AtFlags::empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(dir: &tempfile::TempDir) -> OwnedFd {
        std::fs::File::open(dir.path()).expect("it is there").into()
    }

    fn files(dir: &tempfile::TempDir) -> usize {
        dir.path().read_dir().expect("it is there").count()
    }

    #[test]
    fn a_lock_is_had_once() {
        let process = ProcessInfo::read(std::process::id()).expect("it is this one");
        assert!(!Lock::is_taken(&process));
        let lock = Lock::take(&process).expect("taken").expect("free");
        assert!(Lock::is_taken(&process));
        assert!(Lock::take(&process).expect("asked").is_none());
        drop(lock);
        assert!(Lock::take(&process).expect("taken").is_some());
    }

    #[test]
    fn a_lock_leaves_no_file_and_who_was_killed_leaves_one_for_the_next() {
        let scratch = tempfile::tempdir().expect("a directory");
        let take = |name: &str| Lock::take_in(opened(&scratch), name.into()).expect("asked");
        let (first, second) = (take("1-1").expect("free"), take("1-2").expect("free"));
        drop(second);
        assert_eq!(files(&scratch), 1);
        // A file without a lock, as the kernel leaves it after a death.
        std::fs::write(scratch.path().join("1-3"), "").expect("written");
        sweep(&opened(&scratch));
        assert_eq!(files(&scratch), 1, "one is held, and one is not");
        assert!(take("1-1").is_none());
        drop(first);
        assert_eq!(files(&scratch), 0);
    }

    #[test]
    fn many_who_take_and_let_go_hold_it_one_at_a_time() {
        use std::sync::atomic::{AtomicU32, Ordering};
        let scratch = tempfile::tempdir().expect("a directory");
        let (holders, taken) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let lock = Lock::take_in(opened(&scratch), "1-1".into()).expect("asked");
                        let Some(lock) = lock else { continue };
                        assert_eq!(holders.fetch_add(1, Ordering::SeqCst), 0, "two have it");
                        taken.fetch_add(1, Ordering::SeqCst);
                        holders.fetch_sub(1, Ordering::SeqCst);
                        drop(lock);
                        sweep(&opened(&scratch));
                    }
                });
            }
        });
        assert!(taken.into_inner() > 0);
        assert_eq!(files(&scratch), 0);
    }
}
