//! One gpucr at a time for each process.
//!
//! A lock is a file in a directory that is this user's alone, so nobody else can take it; it is held with
//! flock(2), so the kernel lets go of it when gpucr dies. The file is removed with the lock; of a gpucr that was
//! killed the next one removes it. A gpucr that makes, takes or removes such a file has the lock of their directory
//! meanwhile: so nobody holds a file that another one has removed.
//!
//! The watchdog of a dump has the descriptors too, so that after gpucr's death nobody begins with a program that does not
//! run again yet. The file has gpucr's pid and the inode of its pid namespace: if that process has ended while the lock is
//! held, the lock comes free by itself. Of a gpucr in another namespace nobody can tell that.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, Dir, FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use super::tree::ProcessInfo;
use crate::base::runtime_dir;

/// Where they are, below [`runtime_dir`].
const DIR: &str = "locks";
/// How long another gpucr may have the directory for itself: it needs it for a moment.
const PATIENCE: Duration = Duration::from_secs(2);
/// More than the digits of an inode and a pid.
const HOLDER: usize = 40;
/// How long a watchdog is waited for.
const WATCHDOG: Duration = Duration::from_secs(60);
/// The time between two looks whether it has ended.
const AGAIN: Duration = Duration::from_millis(20);

/// Held by the gpucr that works on a process; let go of on drop, and by the kernel if gpucr dies.
#[derive(Debug)]
pub struct Lock {
    name: String,
    file: OwnedFd,
    dir: OwnedFd,
}

impl Lock {
    /// Takes the lock of a process; `None` if another gpucr of this user has it. If it is the watchdog of one that has
    /// died, which lets the program run again, that is waited for, for at most a minute or until `stop` says so.
    ///
    /// # Errors
    /// There is no place for locks that only this user can write to.
    pub fn take(process: &ProcessInfo, stop: Option<&AtomicBool>) -> io::Result<Option<Self>> {
        static SWEPT: Once = Once::new();
        let dir = runtime_dir::open(DIR)?;
        SWEPT.call_once(|| sweep(&dir));
        let end = Instant::now() + WATCHDOG;
        loop {
            match Self::take_in(dir.try_clone()?, name(process))? {
                Asked::Taken(lock) => return Ok(Some(lock)),
                Asked::ComesFree
                    if Instant::now() < end
                        && !stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) =>
                {
                    std::thread::sleep(AGAIN);
                }
                Asked::ComesFree | Asked::Held => return Ok(None),
            }
        }
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

    fn take_in(dir: OwnedFd, name: String) -> io::Result<Asked> {
        let alone = Alone::on(&dir)?;
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&dir, &name, flags, Mode::RUSR | Mode::WUSR)?;
        if !try_lock(&file)? {
            let has_ended = holder(&file)?.is_some_and(|pid| !is_running(pid));
            return Ok(if has_ended { Asked::ComesFree } else { Asked::Held });
        }
        // What one has left that was killed.
        rustix::fs::ftruncate(&file, 0)?;
        let own = format!("{} {}", own_namespace()?, std::process::id());
        rustix::io::pwrite(&file, own.as_bytes(), 0)?;
        drop(alone);
        Ok(Asked::Taken(Self { name, file, dir }))
    }
}

/// What has come of asking for a lock.
enum Asked {
    Taken(Lock),
    /// Another gpucr has it.
    Held,
    /// One that has died had it. Its watchdog has it until the program runs again.
    ComesFree,
}

impl AsFd for Lock {
    /// Whoever has a copy of this descriptor keeps the lock held after gpucr's death.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// The pid of who has taken the lock of this file; `None` if that is in another pid namespace.
fn holder(file: &OwnedFd) -> io::Result<Option<u32>> {
    let mut said = [0; HOLDER];
    let length = rustix::io::pread(file, &mut said, 0)?;
    let said = std::str::from_utf8(&said[..length]).ok().and_then(|said| said.split_once(' '));
    let own = own_namespace()?.to_string();
    Ok(said.filter(|(namespace, _)| *namespace == own).and_then(|(_, pid)| pid.parse().ok()))
}

/// The inode of this process's pid namespace.
fn own_namespace() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

fn is_running(pid: u32) -> bool {
    ProcessInfo::read(pid).is_ok_and(|process| !process.is_ending())
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

    impl Lock {
        /// Gives it up as the kernel does when gpucr is killed.
        fn lose(self) {
            let mut lock = std::mem::ManuallyDrop::new(self);
            let nothing = || OwnedFd::from(std::fs::File::open("/dev/null").expect("it is there"));
            drop(std::mem::replace(&mut lock.file, nothing()));
        }
    }

    fn take(dir: &tempfile::TempDir, name: &str) -> Option<Lock> {
        match Lock::take_in(opened(dir), name.into()).expect("asked") {
            Asked::Taken(lock) => Some(lock),
            Asked::Held => None,
            Asked::ComesFree => panic!("no watchdog has it"),
        }
    }

    #[test]
    fn a_lock_is_had_once() {
        let process = ProcessInfo::read(std::process::id()).expect("it is this one");
        assert!(!Lock::is_taken(&process));
        let lock = Lock::take(&process, None).expect("taken").expect("free");
        assert!(Lock::is_taken(&process));
        assert!(Lock::take(&process, None).expect("asked").is_none());
        drop(lock);
        assert!(Lock::take(&process, None).expect("taken").is_some());
    }

    #[test]
    fn a_lock_leaves_no_file_and_who_was_killed_leaves_one_for_the_next() {
        let scratch = tempfile::tempdir().expect("a directory");
        let first = take(&scratch, "1-1").expect("free");
        let second = take(&scratch, "1-2").expect("free");
        drop(second);
        assert_eq!(files(&scratch), 1);
        // A file without a lock, as the kernel leaves it after a death.
        std::fs::write(scratch.path().join("1-3"), "").expect("written");
        sweep(&opened(&scratch));
        assert_eq!(files(&scratch), 1, "one is held, and one is not");
        assert!(take(&scratch, "1-1").is_none());
        drop(first);
        assert_eq!(files(&scratch), 0);
    }

    /// A gpucr that is killed leaves a watchdog with copies of its descriptors.
    #[test]
    fn a_watchdog_holds_a_lock_until_it_ends_and_its_successor_knows_that() {
        let scratch = tempfile::tempdir().expect("a directory");
        let ask = || Lock::take_in(opened(&scratch), "1-1".into()).expect("asked");
        let lock = take(&scratch, "1-1").expect("free");
        let copy = lock.as_fd().try_clone_to_owned().expect("a copy");
        assert!(matches!(ask(), Asked::Held));
        lock.lose();
        let mut ended = std::process::Command::new("true").spawn().expect("started");
        let pid = ended.id();
        ended.wait().expect("it ends");
        let taken_in = |namespace: u64| {
            let holder = format!("{namespace} {pid}");
            std::fs::write(scratch.path().join("1-1"), holder).expect("written");
        };
        let own = own_namespace().expect("there is one");
        taken_in(own + 1);
        assert!(matches!(ask(), Asked::Held), "that pid is another one's there");
        taken_in(own);
        assert!(matches!(ask(), Asked::ComesFree), "the watchdog has it");
        drop(copy);
        let Asked::Taken(lock) = ask() else { panic!("nobody has it") };
        assert!(matches!(ask(), Asked::Held), "this one is no watchdog's");
        drop(lock);
        assert_eq!(files(&scratch), 0);
    }

    /// What is let go of is free, whoever has copies.
    #[test]
    fn a_copy_does_not_outlive_the_end_of_the_work() {
        let scratch = tempfile::tempdir().expect("a directory");
        let lock = take(&scratch, "1-1").expect("free");
        let _copy = lock.as_fd().try_clone_to_owned().expect("a copy");
        drop(lock);
        assert!(take(&scratch, "1-1").is_some());
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
                        let Some(lock) = take(&scratch, "1-1") else { continue };
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
