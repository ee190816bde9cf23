//! Migrations: both sides of them, and what there is afterwards.

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::command::{exists, refused, show, until};
use crate::lab::Lab;
use crate::program::Program;
use crate::started::{Started, writes_to};

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

/// Gives the calling process a network of its own, whose loopback device is up: CRIU looks what it can do with that.
fn own_network() -> std::io::Result<()> {
    // SAFETY: system calls that are async-signal-safe; the request names a device, and is whole.
    let done = unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        request.ifr_name[..2].copy_from_slice(&[b'l' as libc::c_char, b'o' as libc::c_char]);
        request.ifr_ifru.ifru_flags = libc::IFF_UP as libc::c_short;
        libc::unshare(libc::CLONE_NEWNET) == 0 && {
            let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
            socket >= 0 && libc::ioctl(socket, libc::SIOCSIFFLAGS, &request) == 0
        }
    };
    if done { Ok(()) } else { Err(std::io::Error::last_os_error()) }
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

/// What there is after a migration that did not go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The program runs on at the source; nothing is left at the destination.
    Stays,
    /// The program runs on at the source; the destination has an image, and may remove it.
    StaysWithImage,
    /// The program runs on at the source; the destination may have noted it, with an image or without one.
    StaysEitherWay,
    /// The program was handed over, and the destination has not heard of it.
    GoesUnheard,
    /// The program was handed over, and the destination knows it; it does not run.
    GoesParked,
    /// The program was handed over, and the destination was killed while it restored it: it runs there or not.
    GoesPerhaps,
    /// The program runs at the destination.
    Goes,
}

/// What was noted of the migration of a program into the store of a lab, by either side.
fn records(lab: &Lab, program: &Program) -> Result<(Option<Value>, Option<Value>)> {
    let output = lab.run(["migrate", "--list", "--json"])?;
    ensure!(output.status.success(), "{}", show(&output));
    let all: Vec<Value> = serde_json::from_slice(&output.stdout)?;
    let is_source = |record: &&Value| {
        let processes = record["processes"].as_array();
        record["side"] == "source"
            && processes.is_some_and(|all| all.iter().any(|one| one[0] == program.pid))
    };
    let store = lab.path("");
    let is_destination = |record: &&Value| {
        let image = record["image"].as_str();
        record["side"] == "destination" && image.is_some_and(|i| Path::new(i).starts_with(&store))
    };
    Ok((all.iter().find(is_source).cloned(), all.iter().find(is_destination).cloned()))
}

/// Which of the ends it has come to, both sides of which have ended.
///
/// # Errors
/// It comes to none: what was noted does not fit to what runs.
pub fn end_of(lab: &Lab, program: &mut Program) -> Result<End> {
    let mut end = None;
    let settled = until("it is settled who owns the program", || {
        let Ok((source, destination)) = records(lab, program) else { return false };
        let state =
            |record: Option<Value>| record.and_then(|it| Some(it["state"].as_str()?.into()));
        let states: [Option<String>; 2] = [state(source), state(destination)];
        end = match (states[0].as_deref(), states[1].as_deref()) {
            (None, None | Some("preparing" | "prepared")) if program.is_running() => {
                Some(End::StaysEitherWay)
            }
            (None | Some("handed-over"), None) if !program.is_running() => Some(End::Goes),
            (Some("handed-over"), Some("prepared")) => Some(End::GoesUnheard),
            (Some("handed-over"), Some("taken")) => Some(End::GoesParked),
            (Some("handed-over"), Some("restoring")) => Some(End::GoesPerhaps),
            _ => None,
        };
        end.is_some()
    });
    settled.with_context(|| format!("{:?}", records(lab, program)))?;
    end.context("it is settled")
}

/// Removes what both sides have noted of it: the program was brought back in another way.
///
/// # Errors
/// A side does not let go of it.
pub fn forget(lab: &Lab, program: &Program) -> Result<()> {
    let (source, destination) = records(lab, program)?;
    for (record, args) in [(source, ["migrate", "--forget"]), (destination, ["receive", "--abort"])]
    {
        let Some(id) = record.as_ref().and_then(|record| record["id"].as_str()) else { continue };
        let output = lab.run(args.into_iter().chain([id]))?;
        ensure!(output.status.success(), "{}", show(&output));
    }
    Ok(())
}

fn images(lab: &Lab) -> usize {
    let names = std::fs::read_dir(lab.path("store/images"));
    names.map_or(0, |names| names.count())
}

/// Whether a gpucr that was started in the lab is migrating, or watching over that.
fn is_anyone_at_work(lab: &Lab) -> bool {
    let is_of_it = |process: &Path| {
        let args = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let mut args = args.split(|byte| *byte == 0).skip(1);
        let works: [&[u8]; 4] = [b"receive", b"migrate", b"restore", b"watchdog"];
        args.next().is_some_and(|first| works.contains(&first))
            && std::fs::read_link(process.join("cwd")).is_ok_and(|at| at.starts_with(lab.path("")))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.map(|entry| entry.path()).any(|process| is_of_it(&process))
}

/// Checks that it has ended so, and that the program comes to its end as if nothing had been, by the way that the
/// messages name.
///
/// # Errors
/// It is not so.
pub fn is_so(lab: &Lab, mut program: Program, end: End, expected: &[String]) -> Result<()> {
    let pid = program.pid;
    if matches!(end, End::Stays | End::StaysWithImage | End::StaysEitherWay) {
        // The watchdog may be at it still.
        until("the source owns it", || matches!(records(lab, &program), Ok((None, _))))?;
        let id = |record: &Value| record["id"].as_str().unwrap_or_default().to_owned();
        let record = if end == End::Stays { None } else { records(lab, &program)?.1 };
        ensure!(record.is_some() || end != End::StaysWithImage, "the destination has noted it");
        if let Some(record) = record {
            let id = id(&record);
            refused(&lab.run(["receive", "--resume", &id])?, 1, &["Nothing was changed"])?;
            ensure!(end != End::StaysWithImage || images(lab) == 1, "it has an image");
            let aborted = lab.run(["receive", "--abort", &id])?;
            ensure!(aborted.status.success(), "{}", show(&aborted));
        }
        ensure!(records(lab, &program)?.1.is_none(), "nothing is noted at the destination");
        until("nothing is left at the destination", || images(lab) == 0)?;
        // Device memory that was loaded there is free when all have ended who had it.
        until("nobody is at work there", || !is_anyone_at_work(lab))?;
        ensure!(program.is_running(), "it runs on:\n{}", program.output());
        program.result()?;
        ensure!(program.series() == expected, "differs:\n{}", program.output());
        return Ok(());
    }
    until("the source has none of it", || !program.is_running())?;
    let (source, destination) = records(lab, &program)?;
    if end == End::Goes {
        ensure!(destination.is_none(), "{destination:?}");
    } else if end == End::GoesPerhaps {
        let record = destination.context("the destination has noted it")?;
        let id = record["id"].as_str().context("a name")?;
        return perhaps(lab, program, id, source, expected);
    } else {
        until("nothing of it runs", || !exists(pid))?;
        let record = destination.context("the destination has noted it")?;
        let id = record["id"].as_str().context("a name")?.to_owned();
        let state = if end == End::GoesParked { "taken" } else { "prepared" };
        ensure!(record["state"] == state, "{record}");
        let mut resume = vec!["receive", "--resume", &id];
        if end == End::GoesParked {
            let aborted = lab.run(["receive", "--abort", &id])?;
            refused(&aborted, 1, &["all that there is of it"])?;
        } else {
            refused(&lab.run(&resume)?, 1, &["not known whether", "Nothing was changed"])?;
            resume.push("--handed-over");
        }
        let resumed = lab.run(&resume)?;
        ensure!(resumed.status.success(), "{}", show(&resumed));
        let has_its_pid = String::from_utf8_lossy(&resumed.stdout).trim() == pid.to_string();
        ensure!(has_its_pid || record["new_pids"] == true, "its pid");
        let again = lab.run(&resume)?;
        refused(&again, 1, &["knows no migration"])?;
    }
    forget_source(lab, source)?;
    ends_well(&mut program, expected)
}

/// The source does not need to know any more what it has noted.
fn forget_source(lab: &Lab, source: Option<Value>) -> Result<()> {
    let Some(source) = source else { return Ok(()) };
    ensure!(source["state"] == "handed-over", "{source}");
    let id = source["id"].as_str().context("a name")?;
    let forgotten = lab.run(["migrate", "--forget", id])?;
    ensure!(forgotten.status.success(), "{}", show(&forgotten));
    Ok(())
}

/// The destination was killed while it restored the program. The user sees whether that runs, and says so.
fn perhaps(
    lab: &Lab,
    mut program: Program,
    id: &str,
    source: Option<Value>,
    expected: &[String],
) -> Result<()> {
    until("nobody is at work there", || !is_anyone_at_work(lab))?;
    refused(&lab.run(["receive", "--resume", id])?, 1, &["may run", "Nothing was changed"])?;
    refused(&lab.run(["receive", "--abort", id])?, 1, &["all that there is of it"])?;
    let here = writes_to(program.pid, &program.log).then_some(program.pid);
    forget_source(lab, source)?;
    let done = match here.or_else(|| made(&program)) {
        Some(pid) => {
            program.pid = pid;
            ends_well(&mut program, expected)?;
            lab.run(["receive", "--abort", id, "--running"])?
        }
        None => {
            let resumed = lab.run(["receive", "--resume", id, "--not-running"])?;
            ends_well(&mut program, expected).with_context(|| show(&resumed))?;
            resumed
        }
    };
    ensure!(done.status.success(), "{}", show(&done));
    ensure!(records(lab, &program)?.1.is_none(), "nothing is noted any more");
    Ok(())
}
