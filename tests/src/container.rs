//! Containers: programs with a root directory, mounts, pids and a network of their own.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::thread::CapabilitySet;

use crate::command::{binary, finish, show, until};
use crate::lab::Lab;
use crate::network::own_network;
use crate::started::Started;

/// Where the programs are in a container's tree.
const PROGRAMS: &str = "opt";
/// Directories that every tree has.
const DIRECTORIES: [&str; 8] = ["dev", "opt", "old", "proc", "srv", "tmp", "usr", "var/lib"];
/// The devices that programs need: their names and minor numbers.
const DEVICES: [(&str, u32); 4] = [("null", 3), ("zero", 5), ("random", 8), ("urandom", 9)];

/// Where a tree has its libraries from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Libraries {
    /// They are copies.
    Copied,
    /// The host's `/usr` is mounted there.
    Mounted,
}

/// A root file tree for a container, with gpucr and the workloads in `/opt`.
#[derive(Debug, Clone)]
pub struct RootTree {
    /// Where it is.
    pub path: PathBuf,
    libraries: Libraries,
    /// Whether what is mounted from outside follows what is mounted there.
    is_slave: bool,
}

impl RootTree {
    /// Makes it.
    ///
    /// # Errors
    /// A file is not there, or cannot be copied.
    pub fn new(lab: &Lab, name: &str, libraries: Libraries) -> Result<Self> {
        let path = lab.path(name);
        for dir in DIRECTORIES {
            std::fs::create_dir_all(path.join(dir))?;
        }
        let programs = ["gpucr", "workload", "libgpucr_intercept.so", "libsoftcuda.so"].map(binary);
        for program in &programs {
            let name = program.file_name().context("it has a name")?;
            std::fs::copy(program, path.join(PROGRAMS).join(name))?;
        }
        match libraries {
            Libraries::Copied => programs.iter().try_for_each(|it| copy_libraries(it, &path))?,
            Libraries::Mounted => {
                for name in ["lib", "lib64"] {
                    let target = std::fs::read_link(Path::new("/").join(name));
                    symlink(
                        target.context("the host has all libraries in /usr")?,
                        path.join(name),
                    )?;
                }
            }
        }
        Ok(Self { path, libraries, is_slave: false })
    }

    /// The same with mounts that are slaves of those outside, as container runtimes make them where those are shared.
    #[must_use]
    pub fn with_slaves(self) -> Self {
        Self { is_slave: true, ..self }
    }

    /// A copy of it, and of all that a program has made there.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn copy(&self, lab: &Lab, name: &str) -> Result<Self> {
        let path = lab.path(name);
        let copied = finish(Command::new("cp").arg("-a").arg(&self.path).arg(&path))?;
        ensure!(copied.status.success(), "{}", show(&copied));
        Ok(Self { path, ..*self })
    }

    /// A path in it as it is from outside.
    pub fn join(&self, path: &str) -> PathBuf {
        self.path.join(path.trim_start_matches('/'))
    }

    /// What the workload has written to `/srv/log`.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.join("srv/log")).unwrap_or_default()
    }

    /// The lines there that belong to the computation.
    pub fn series(&self) -> Vec<String> {
        let wanted = |line: &&str| line.starts_with("step ") || line.starts_with("result ");
        self.log().lines().filter(wanted).map(str::to_owned).collect()
    }

    /// Lets the workload that was started here make so many steps in all.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn allow(&self, steps: usize) -> Result<()> {
        Ok(std::fs::write(self.join("srv/pace"), vec![b'.'; steps])?)
    }

    /// Has a command run as the first process of a new container with this root; its program and arguments are those that the
    /// container sees.
    ///
    /// # Errors
    /// The path of the tree cannot be told to the kernel.
    pub fn enter(&self, command: &mut Command) -> Result<()> {
        let root = CString::new(self.path.as_os_str().as_bytes())?;
        let how = (self.libraries == Libraries::Mounted, self.is_slave);
        // SAFETY: it makes system calls alone, with constants and a string that lives as long as the closure.
        unsafe { command.pre_exec(move || become_container(&root, how)) };
        Ok(())
    }

    /// Starts a workload under gpucr in a new container, up to some step, with a log and a pace in `/srv`.
    ///
    /// # Errors
    /// It does not start, or does not come so far.
    pub fn start(&self, args: &[&str], steps: usize) -> Result<InContainer> {
        self.start_without(&[], args, steps)
    }

    /// The same below a first process that lives on when the program has ended.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_below_another(&self, args: &[&str], steps: usize) -> Result<InContainer> {
        let script = "setsid \"$@\"; while :; do sleep 0.1; done";
        self.start_as(&["/usr/bin/sh", "-c", script, "sh"], || Ok(()), args, steps)
    }

    /// The same with a file open (descriptor 5) that lies in the container's own `/tmp`, and has the text `kept`.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_own_file(&self, args: &[&str], steps: usize) -> Result<InContainer> {
        let script = "echo kept > /tmp/own; exec \"$@\" 5< /tmp/own";
        self.start_as(&["/usr/bin/sh", "-c", script, "sh"], || Ok(()), args, steps)
    }

    /// The same where nothing may have these capabilities.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_without(
        &self,
        capabilities: &'static [i32],
        args: &[&str],
        steps: usize,
    ) -> Result<InContainer> {
        self.start_as(&[], || drop_from_bound(capabilities), args, steps)
    }

    /// The same where the first process and all others keep one capability that they cannot get any more.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_keeping(
        &self,
        kept: i32,
        capabilities: &'static [i32],
        args: &[&str],
        steps: usize,
    ) -> Result<InContainer> {
        let prepare = move || {
            let mut sets = rustix::thread::capabilities(None)?;
            sets.inheritable = CapabilitySet::from_bits_retain(1 << kept);
            rustix::thread::set_capabilities(None, sets)?;
            drop_from_bound(capabilities)
        };
        self.start_as(&[], prepare, args, steps)
    }

    fn start_as(
        &self,
        first: &[&str],
        prepare: impl FnMut() -> io::Result<()> + Send + Sync + 'static,
        args: &[&str],
        steps: usize,
    ) -> Result<InContainer> {
        self.allow(steps)?;
        let run = ["/opt/gpucr", "run", "--device", "soft", "--", "/opt/workload"];
        let whole = [first, &run, args, &["--log", "/srv/log", "--pace", "/srv/pace"]].concat();
        let mut command = Command::new(whole[0]);
        command.args(&whole[1..]);
        // SAFETY: whatever is given makes system calls alone.
        unsafe { command.pre_exec(prepare) };
        command.env_clear().stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        self.enter(&mut command)?;
        let mut first = Started::spawn(&mut command)?;
        let has_ended = || self.log().contains("step ") || !matches!(first.try_wait(), Ok(None));
        until("it is at work", has_ended).with_context(|| self.log())?;
        ensure!(self.log().contains("step "), "it has ended: {:?} {}", first.wait(), self.log());
        // What waits outside, the first process of the container, and the program.
        let inner = only_child(first.id())?;
        let pid = only_child(inner)?;
        Ok(InContainer { first, inner, pid })
    }
}

/// A program in a container. All of it ends with this.
#[derive(Debug)]
pub struct InContainer {
    /// What waits for the first process of the container.
    pub first: Started,
    /// The pid of that one outside.
    pub inner: u32,
    /// The program's pid outside.
    pub pid: u32,
}

/// What is executed then does not have these.
fn drop_from_bound(capabilities: &[i32]) -> io::Result<()> {
    // SAFETY: a system call without pointers.
    let drop = |it: &i32| check(unsafe { libc::prctl(libc::PR_CAPBSET_DROP, *it, 0, 0, 0) });
    capabilities.iter().try_for_each(|it| drop(it).map(|_| ()))
}

/// The child of a process, which has one or is about to.
///
/// # Errors
/// It does not get one.
pub fn only_child(pid: u32) -> Result<u32> {
    let mut child = None;
    until("it has a child", || {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        child = children.ok().and_then(|all| all.split_whitespace().next()?.parse().ok());
        child.is_some()
    })?;
    child.context("a child")
}

/// Copies what a program is linked with to where it is looked for.
fn copy_libraries(program: &Path, root: &Path) -> Result<()> {
    let listed = finish(Command::new("ldd").arg(program))?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let paths = listed.split_whitespace().filter(|word| word.starts_with('/'));
    for path in paths {
        let to = root.join(path.trim_start_matches('/'));
        if !to.exists() {
            std::fs::create_dir_all(to.parent().context("it is in a directory")?)?;
            std::fs::copy(path, to)?;
        }
    }
    Ok(())
}

/// Makes a container around the calling process, which has just been forked, and goes on as its first process; what was
/// called waits outside, and ends as that does.
fn become_container(root: &CString, (mounts_usr, is_slave): (bool, bool)) -> io::Result<()> {
    own_network()?;
    // SAFETY: system calls; all strings end with a null byte and outlive the calls.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC))?;
        match check(libc::fork())? {
            0 => check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?,
            child => wait_outside(child),
        };
        // What the test was started with from outside CRIU cannot name.
        check(libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32))?;
        let mount = |from: &std::ffi::CStr, to: &std::ffi::CStr, kind: &std::ffi::CStr, flags| {
            let none = std::ptr::null();
            check(libc::mount(from.as_ptr(), to.as_ptr(), kind.as_ptr(), flags, none))
        };
        mount(c"none", c"/", c"", libc::MS_REC | libc::MS_PRIVATE)?;
        mount(root, root, c"", libc::MS_BIND)?;
        check(libc::chdir(root.as_ptr()))?;
        if mounts_usr {
            mount(c"/usr", c"usr", c"", libc::MS_BIND)?;
        }
        if is_slave {
            // What waits outside keeps those that these are slaves of.
            mount(c"none", c"/", c"", libc::MS_REC | libc::MS_SHARED)?;
            check(libc::unshare(libc::CLONE_NEWNS))?;
            mount(c"none", c"/", c"", libc::MS_REC | libc::MS_SLAVE)?;
            check(libc::chdir(root.as_ptr()))?;
        }
        mount(c"proc", c"proc", c"proc", 0)?;
        mount(c"tmpfs", c"tmp", c"tmpfs", 0)?;
        mount(c"tmpfs", c"dev", c"tmpfs", 0)?;
        check(libc::chdir(c"dev".as_ptr()))?;
        for (name, minor) in DEVICES {
            let mut path = [0_u8; 16];
            path[..name.len()].copy_from_slice(name.as_bytes());
            let mode = libc::S_IFCHR | 0o666;
            check(libc::mknod(path.as_ptr().cast(), mode, libc::makedev(1, minor)))?;
        }
        check(libc::mkdir(c"shm".as_ptr(), 0o777))?;
        check(libc::chdir(root.as_ptr()))?;
        check(libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c"old".as_ptr()) as i32)?;
        check(libc::umount2(c"/old".as_ptr(), libc::MNT_DETACH))?;
        check(libc::chdir(c"/".as_ptr()))?;
    }
    Ok(())
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Waits for a child, and ends as it does.
fn wait_outside(child: i32) -> ! {
    // SAFETY: system calls; nothing else runs in this process. Whoever has spawned it waits for the end of a pipe, of which
    // this has a copy.
    unsafe {
        libc::close_range(3, u32::MAX, 0);
        for stream in 0..2 {
            libc::close(stream);
        }
        let mut status = 0;
        while libc::waitpid(child, &raw mut status, 0) < 0 {}
        let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 255 };
        libc::_exit(code)
    }
}
