//! A process that is held by a descriptor: whatever becomes of its pid, it is the same one.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A process. It may have ended.
#[derive(Debug)]
pub struct HeldProcess {
    pid: u32,
    process: OwnedFd,
}

impl HeldProcess {
    /// The process that has this pid now.
    ///
    /// # Errors
    /// `NotFound` if there is none; or this process has no descriptors left.
    pub(super) fn open(pid: u32) -> io::Result<Self> {
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        match pidfd_open(raw, PidfdFlags::empty()) {
            Err(Errno::SRCH) => Err(io::ErrorKind::NotFound.into()),
            opened => Ok(Self { pid, process: opened? }),
        }
    }

    /// Its pid, as long as it has not ended.
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether it has ended.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn has_ended(&self) -> io::Result<bool> {
        self.ends_within(Duration::ZERO)
    }

    /// Whether it ends in so much time, or has ended.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn ends_within(&self, limit: Duration) -> io::Result<bool> {
        let mut polled = [PollFd::new(&self.process, PollFlags::IN)];
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        Ok(rustix::io::retry_on_intr(|| poll(&mut polled, Some(&limit)))? > 0)
    }

    /// Stops it, and says whether that was needed: not if a signal has stopped it before, and not if it has ended.
    ///
    /// # Errors
    /// This user may not.
    pub fn stop(&self) -> io::Result<bool> {
        let is_stopped = || {
            let stat = procfs::process::Process::new(self.pid as i32).and_then(|it| it.stat());
            stat.is_ok_and(|stat| matches!(stat.state, 'T' | 't'))
        };
        if self.has_ended()? || is_stopped() {
            return Ok(false);
        }
        match pidfd_send_signal(&self.process, Signal::STOP) {
            Err(Errno::SRCH) => Ok(false),
            sent => Ok(sent.map(|()| true)?),
        }
    }

    /// Lets it go on.
    ///
    /// # Errors
    /// This user may not.
    pub fn go_on(&self) -> io::Result<()> {
        match pidfd_send_signal(&self.process, Signal::CONT) {
            Err(Errno::SRCH) => Ok(()),
            sent => Ok(sent?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(pid: u32) -> Option<char> {
        let stat = procfs::process::Process::new(pid as i32).and_then(|it| it.stat());
        stat.ok().map(|stat| stat.state)
    }

    fn comes_to(pid: u32, wanted: impl Fn(char) -> bool) {
        while !state(pid).is_some_and(&wanted) {
            std::thread::yield_now();
        }
    }

    #[test]
    fn one_that_was_stopped_before_is_left_so() {
        let mut child = std::process::Command::new("sleep").arg("600").spawn().expect("it starts");
        let held = HeldProcess::open(child.id()).expect("it is there");
        assert!(held.stop().expect("it can be stopped"));
        comes_to(child.id(), |state| state == 'T');
        assert!(!held.stop().expect("nothing is to be done"));
        held.go_on().expect("it can go on");
        comes_to(child.id(), |state| state != 'T');
        assert!(!held.has_ended().expect("told"));
        child.kill().expect("killed");
        while !held.has_ended().expect("told") {
            std::thread::yield_now();
        }
        child.wait().expect("it ends");
        assert!(!held.stop().expect("it has ended") && held.go_on().is_ok());
        assert!(HeldProcess::open(0).is_err());
    }
}
