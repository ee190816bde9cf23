//! A restore on a host where somebody has a pid or thread id of the program.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, Program, finish, refused, show};

/// A process that was given a pid of the test's choice; ended when this is dropped.
struct Squatter {
    /// What [`libc::kill`] is given: its pid, or its group with a minus sign.
    target: i32,
}

impl Squatter {
    /// A process with the pid `pid`.
    fn process(pid: i32) -> Result<Self> {
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
    fn group(pid: i32) -> Result<Self> {
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

/// An image of a program with threads that was ended by the dump, and the id of one of them.
fn dumped(lab: &Lab) -> Result<(Program, i32)> {
    let mut program = lab.start("threads", &["--step-delay-ms", "20"])?;
    program.wait_for("step ")?;
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{}/task", program.pid))? {
        let id: i32 = entry?.file_name().to_string_lossy().parse()?;
        threads.extend((id as u32 != program.pid).then_some(id));
    }
    lab.dump(&program, &lab.path("image"), &[])?;
    program.wait()?;
    Ok((program, *threads.first().context("it has threads")?))
}

#[test]
fn a_thread_id_in_use_is_named_with_its_owner() -> Result<()> {
    let lab = Lab::new();
    let (program, thread) = dumped(&lab)?;
    let squatter = Squatter::process(thread)?;
    refused(
        &lab.run(["restore", "image"])?,
        1,
        &[&format!("pid {thread}"), "in use", "by a_thread_id"],
    )?;
    drop(squatter);
    lab.restore(&lab.path("image"), program)?.wait_for_progress()
}

#[test]
fn a_pid_that_only_criu_finds_in_use() -> Result<()> {
    let lab = Lab::new();
    let (program, thread) = dumped(&lab)?;
    let squatter = Squatter::group(thread)?;
    let output = finish(lab.gpucr().args(["restore", "image"]))?;
    refused(&output, 1, &["create a thread", "--new-pids"]).with_context(|| show(&output))?;

    // It passes while gpucr tries again.
    let waiting = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(1));
        drop(squatter);
    });
    let mut program = lab.restore(&lab.path("image"), program)?;
    ensure!(waiting.is_finished(), "the restore went through while the id was taken");
    program.wait_for_progress()
}
