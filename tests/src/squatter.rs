//! Processes with a pid that a test chooses.

use anyhow::{Context, Result, ensure};

/// A process that was given a pid of the test's choice; ended when this is dropped. The kernel's count of pids is left
/// as it is, so that no other process gets a pid near this one, which may be that of a thread of a dumped program.
#[derive(Debug)]
pub struct Squatter {
    /// What [`libc::kill`] is given: its pid, or its group with a minus sign.
    target: i32,
}

impl Squatter {
    /// A process with the pid `pid`.
    ///
    /// # Errors
    /// Somebody has the pid, or the caller may not choose one.
    pub fn process(pid: i32) -> Result<Self> {
        Self::start(pid, || {
            loop {
                // SAFETY: it only waits for signals.
                unsafe { libc::pause() };
            }
        })?;
        Ok(Self { target: pid })
    }

    /// A process group `pid` whose leader has ended: no process has that pid, and yet the kernel gives it
    /// to nobody.
    ///
    /// # Errors
    /// As [`Squatter::process`].
    pub fn group(pid: i32) -> Result<Self> {
        Self::start(pid, || {
            // SAFETY: system calls alone, in a process that shares no memory.
            unsafe {
                libc::setpgid(0, 0);
                match clone_with(0) {
                    0 => loop {
                        libc::pause();
                    },
                    child => libc::_exit(i32::from(child < 0)),
                }
            }
        })?;
        let mut status = 0;
        // SAFETY: it waits for the child that was just made.
        ensure!(unsafe { libc::waitpid(pid, &raw mut status, 0) } == pid && status == 0);
        Ok(Self { target: -pid })
    }

    /// Starts a process that never comes back from `run`.
    fn start(pid: i32, run: impl FnOnce()) -> Result<()> {
        // SAFETY: the child makes system calls only.
        match unsafe { clone_with(pid) } {
            0 => {
                run();
                std::process::abort()
            }
            -1 => Err(std::io::Error::last_os_error()).context("a process with a chosen pid"),
            _ => Ok(()),
        }
    }
}

impl Drop for Squatter {
    fn drop(&mut self) {
        // SAFETY: plain system calls; the target is what this object made.
        unsafe {
            libc::kill(self.target, libc::SIGKILL);
            libc::waitpid(self.target, std::ptr::null_mut(), 0);
        }
    }
}

/// A fork that gets the pid `pid`, or any for 0.
///
/// # Safety
/// The child may make system calls only.
unsafe fn clone_with(pid: i32) -> i64 {
    // SAFETY: all zero is a valid value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.exit_signal = libc::SIGCHLD as u64;
    if pid != 0 {
        (args.set_tid, args.set_tid_size) = (&raw const pid as u64, 1);
    }
    // SAFETY: without flags it is a fork; the arguments live through the call.
    unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) }
}
