//! Migrations: both sides of them. What there is afterwards is in `migrated.rs`.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::{exists, show, until};
use crate::lab::Lab;
use crate::network::own_network;
use crate::program::Program;
use crate::started::Started;

/// The descriptor on which a side finds the other.
pub const FD: i32 = 50;

/// Gives a command its end of the connection, as [`FD`]; the last one that it is given counts. The socket has to be
/// open when the command starts.
pub fn connect(command: &mut Command, socket: &impl AsRawFd) {
    let fd = socket.as_raw_fd();
    // SAFETY: dup2 is async-signal-safe; the copy is not closed by exec.
    unsafe {
        command.pre_exec(move || match libc::dup2(fd, FD) {
            FD => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        });
    }
}

/// What both sides have said.
#[derive(Debug)]
pub struct Sides {
    /// `gpucr migrate`.
    pub source: Output,
    /// `gpucr receive`.
    pub destination: Output,
}

impl Sides {
    /// Both as a person would see them.
    pub fn show(&self) -> String {
        format!("source: {}\ndestination: {}", show(&self.source), show(&self.destination))
    }

    /// The reports of both.
    ///
    /// # Errors
    /// One of them has failed.
    pub fn reports(&self) -> Result<(Value, Value)> {
        let reports = [&self.source, &self.destination].map(|output| {
            ensure!(output.status.success(), "{}", self.show());
            serde_json::from_slice(&output.stdout).with_context(|| self.show())
        });
        let [source, destination] = reports;
        Ok((source?, destination?))
    }
}

/// A command that is at work, and what it says.
#[derive(Debug)]
pub struct Side {
    child: Started,
    out: std::fs::File,
    err: std::fs::File,
}

impl Side {
    /// Starts it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(command: &mut Command) -> Result<Self> {
        let (out, err) = (tempfile::tempfile()?, tempfile::tempfile()?);
        let child = Started::spawn(command.stdout(out.try_clone()?).stderr(err.try_clone()?))?;
        Ok(Self { child, out, err })
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether it has not ended.
    pub fn is_at_work(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// What it has written to its standard output so far.
    pub fn said(&self) -> String {
        use std::os::unix::fs::FileExt;
        let mut said = vec![0; 1 << 16];
        let len = self.out.read_at(&mut said, 0).unwrap_or_default();
        String::from_utf8_lossy(&said[..len]).into_owned()
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// It takes too long.
    pub fn end(mut self) -> Result<Output> {
        use std::io::{Read, Seek};
        until("a side of the migration ends", || !self.is_at_work())?;
        let status = self.child.wait()?;
        let [mut stdout, mut stderr] = [Vec::new(), Vec::new()];
        for (file, bytes) in [(&mut self.out, &mut stdout), (&mut self.err, &mut stderr)] {
            file.rewind()?;
            file.read_to_end(bytes)?;
        }
        Ok(Output { status, stdout, stderr })
    }
}

/// Both commands, connected by a pair of sockets.
#[derive(Debug)]
pub struct Pair {
    /// `gpucr migrate`.
    pub source: Command,
    /// `gpucr receive`, into the store `store` of the lab.
    pub destination: Command,
    /// The end of the source, and that of the destination.
    pub sockets: [OwnedFd; 2],
}

impl Pair {
    /// Both sides of a migration of this program.
    ///
    /// # Errors
    /// There is no pair of sockets.
    pub fn new(lab: &Lab, program: &Program) -> Result<Self> {
        let (a, b) = UnixStream::pair()?;
        let sockets = [OwnedFd::from(a), OwnedFd::from(b)];
        let (mut source, mut destination) = (lab.gpucr(), lab.gpucr());
        source.args(["migrate", "--json", "--pid", &program.pid.to_string()]);
        destination.args(["receive", "--json", "--store", "store"]);
        for (command, socket) in [&mut source, &mut destination].into_iter().zip(&sockets) {
            command.args(["--fd", &FD.to_string()]);
            connect(command, socket);
        }
        Ok(Self { source, destination, sockets })
    }

    /// The same, with a destination that has a network and pids of its own, as another host has.
    ///
    /// # Errors
    /// There is no pair of sockets.
    pub fn apart(lab: &Lab, program: &Program) -> Result<Self> {
        let mut pair = Self::new(lab, program)?;
        pair.destination.arg("--new-pids");
        // SAFETY: it makes system calls alone.
        unsafe {
            pair.destination.pre_exec(own_network);
        }
        Ok(pair)
    }

    /// The same, where the destination has another folder, `there`, in the place of this one of the lab. Both are made.
    ///
    /// # Errors
    /// There is no pair of sockets, or a folder cannot be made.
    pub fn elsewhere(lab: &Lab, program: &Program, folder: &str, there: &str) -> Result<Self> {
        let mut pair = Self::apart(lab, program)?;
        put_elsewhere(lab, &mut pair.destination, folder, there)?;
        Ok(pair)
    }

    /// The destination as another host is: in a pid namespace that is there before gpucr is, with mounts and a network of its
    /// own. It stays when gpucr has ended, since the program lives in it, and waits for that.
    pub fn destination_in_namespaces(&self) -> Command {
        const INIT: &str = "mount -t proc proc /proc && \"$@\"; while :; do sleep 1; done";
        let inner = &self.destination;
        let mut command = Command::new("unshare");
        command.args(["--pid", "--mount", "--fork", "--kill-child", "sh", "-c", INIT, "sh"]);
        command.arg(inner.get_program()).args(inner.get_args());
        command.current_dir(inner.get_current_dir().unwrap_or(".".as_ref()));
        for (name, value) in inner.get_envs() {
            value.map(|value| command.env(name, value));
        }
        connect(&mut command, &self.sockets[1]);
        // SAFETY: it makes system calls alone.
        unsafe {
            command.pre_exec(own_network);
        }
        command
    }

    /// Lets both sides come to their end. The program is reaped when it ends, as its parent would do.
    ///
    /// # Errors
    /// One of them cannot be started, or takes too long.
    pub fn run(self, program: &mut Program) -> Result<Sides> {
        let Self { mut source, mut destination, sockets } = self;
        let (mut source, mut destination) =
            (Side::start(&mut source)?, Side::start(&mut destination)?);
        drop(sockets);
        until("both sides end", || {
            program.is_running();
            !source.is_at_work() & !destination.is_at_work()
        })?;
        Ok(Sides { source: source.end()?, destination: destination.end()? })
    }
}

/// The program, which is no child of the test any more, comes to its end as if nothing had been.
///
/// # Errors
/// It does not, or takes too long.
pub fn ends_well(program: &mut Program, expected: &[String]) -> Result<()> {
    program.let_go()?;
    program.wait_for("result ")?;
    ensure!(program.series() == expected, "differs:\n{}", program.output());
    let pid = program.pid;
    until("it is gone", || !exists(pid))
}

/// Has a command find another folder of the lab, `there`, in the place of this one. Both are made.
///
/// # Errors
/// A folder cannot be made.
pub fn put_elsewhere(lab: &Lab, command: &mut Command, folder: &str, there: &str) -> Result<()> {
    let path = |name: &str| -> Result<CString> {
        let path = lab.path(name);
        std::fs::create_dir_all(&path)?;
        Ok(CString::new(path.into_os_string().into_encoded_bytes())?)
    };
    let (here, there) = (path(folder)?, path(there)?);
    // SAFETY: it makes system calls alone.
    unsafe {
        command.pre_exec(move || other_folder(&here, &there));
    }
    Ok(())
}

/// Gives the calling process mounts of its own, where one folder has what is in another.
fn other_folder(folder: &CStr, has: &CStr) -> std::io::Result<()> {
    // SAFETY: system calls that are async-signal-safe, with strings that are whole.
    let done = unsafe {
        let (none, root) = (std::ptr::null(), c"/".as_ptr());
        let private = libc::MS_REC | libc::MS_PRIVATE;
        libc::unshare(libc::CLONE_NEWNS) == 0
            && libc::mount(none, root, none, private, none.cast()) == 0
            && libc::mount(has.as_ptr(), folder.as_ptr(), none, libc::MS_BIND, none.cast()) == 0
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The pid, as it is seen here, of the process that has the pid of the program in a pid namespace within this one.
pub fn made(program: &Program) -> Option<u32> {
    let entries = std::fs::read_dir("/proc").ok()?;
    entries.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
        let pids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
        let pids: Vec<&str> = pids.split_whitespace().collect();
        (pids.len() > 1 && pids.last()? == &program.pid.to_string()).then_some(pid)
    })
}
