//! Whether instances have written memory that they share.
//!
//! Such a write is an error of the device, which the shim notes in a table that it has in common with gpucr.

use std::os::fd::OwnedFd;
use std::time::Duration;

use gpucr_wire::Table;
use gpucr_wire::access::KernelSummary;
use gpucr_wire::table::Range;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{PidfdFlags, pidfd_open};

use crate::engine::cuda_process::CudaProcess;
use crate::engine::error::Error;
use crate::engine::sharing::{self, Member};
use crate::host::process::tree::raw_pid;

use super::processes::{unless_ended, was_killed};

/// How often it is checked whether a program has written what it shares; and how long such a program waits at
/// most before it is ended.
const POLL: Duration = Duration::from_millis(250);

/// Sees whether instances have written memory that they share. While it lives further instances find that
/// memory.
#[derive(Debug)]
pub struct Watch {
    member: Member,
    tables: Vec<Watched>,
}

#[derive(Debug)]
struct Watched {
    pid: u32,
    blocks: usize,
    table: Table,
    file: OwnedFd,
}

impl Watch {
    /// Watches over nothing yet. `member` is the connection with the holder of the memory.
    pub(super) fn new(member: Member) -> Self {
        Self { member, tables: Vec::new() }
    }

    /// Tells the agent of a program, which is detached, that the blocks with these `ids` of the memory that it is about
    /// to get are shared, and watches over them from then on.
    ///
    /// # Errors
    /// The agent does not answer as it should; there is no memory for a table.
    pub(super) fn add(
        &mut self,
        program: &mut CudaProcess,
        ids: Vec<u64>,
        summaries: Vec<KernelSummary>,
    ) -> Result<(), Error> {
        let Some(agent) = program.agent.as_mut().filter(|_| !ids.is_empty()) else { return Ok(()) };
        let io = |source| Error::Io { what: "cannot share a table".into(), source };
        let (table, file) = Table::create(vec![Range::WHOLE; ids.len()]).map_err(io)?;
        (0..ids.len()).for_each(|range| table.chunks(range).pend(0));
        let watched = Watched { pid: program.process.pid, blocks: ids.len(), table, file };
        let told = agent.share(ids, summaries, &watched.file);
        if unless_ended(&program.process, told)?.is_some() {
            // From here on the program's faults are told to this process.
            watched.table.header().look();
            self.tables.push(watched);
        }
        Ok(())
    }

    /// Why the program cannot go on, if it has written what it shares. To be asked a few times a second: if
    /// this process does not ask, the program gets the error itself.
    pub fn look(&self) -> Option<Error> {
        // All tables are asked, since each shows its program that it is watched.
        let faults: Vec<_> = self.tables.iter().map(|w| (w.pid, w.table.header().look())).collect();
        let wrote =
            |(pid, code): (u32, Option<u32>)| Some(Error::WroteShared { pid, code: code? as i32 });
        faults.into_iter().find_map(wrote)
    }

    /// Polls until the program cannot go on; says why.
    pub fn until_fault(&self) -> Error {
        loop {
            if let Some(error) = self.look() {
                return error;
            }
            std::thread::sleep(POLL);
        }
    }

    /// Gives the memory up, after the program was ended.
    pub(super) fn leave(self) {
        self.member.leave();
    }

    /// Polls until process `pid` has ended, or the program cannot go on; says why. A process that was killed has
    /// ended, whatever it had written.
    pub fn until_end(&self, pid: u32) -> Option<Error> {
        let pid = raw_pid(pid)?;
        // Without a descriptor of the process its end is polled for.
        let process = pidfd_open(pid, PidfdFlags::empty()).ok();
        loop {
            if let Some(error) = self.look() {
                return Some(error);
            }
            let Some(process) = &process else {
                std::thread::sleep(POLL);
                rustix::process::test_kill_process(pid).ok()?;
                continue;
            };
            let time = rustix::time::Timespec { tv_sec: 0, tv_nsec: POLL.subsec_nanos().into() };
            let mut poll = [PollFd::new(process, PollFlags::IN)];
            if matches!(rustix::event::poll(&mut poll, Some(&time)), Ok(ready) if ready > 0) {
                // The process may have ended because of the fault.
                return self.look().filter(|_| !was_killed(pid));
            }
        }
    }

    /// What this process, when it becomes another program, has to tell that one for
    /// [`from_arguments`](Self::from_arguments). The descriptors stay open then.
    ///
    /// # Errors
    /// None that the kernel documents.
    pub fn into_arguments(self) -> std::io::Result<Vec<String>> {
        let Self { member, tables } = self;
        let mut arguments = vec![sharing::keep(&member)?.to_string()];
        for Watched { pid, blocks, file, .. } in &tables {
            arguments.push(format!("{pid}:{blocks}:{}", sharing::keep(file)?));
        }
        std::mem::forget((member, tables));
        Ok(arguments)
    }

    /// Goes on with what [`into_arguments`](Self::into_arguments) has given.
    ///
    /// # Errors
    /// The arguments are not of this form.
    ///
    /// # Safety
    /// The descriptors that it names belong to nobody else.
    pub unsafe fn from_arguments(arguments: &[String]) -> std::io::Result<Self> {
        let invalid = || std::io::Error::from(std::io::ErrorKind::InvalidInput);
        let number = |text: &str| text.parse::<u32>().map_err(|_| invalid());
        let fd = |text: &str| -> std::io::Result<OwnedFd> {
            let fd = number(text)? as i32;
            // SAFETY: the caller guarantees that the descriptor belongs to nobody else.
            let fd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
            rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
            Ok(fd)
        };
        let (member, tables) = arguments.split_first().ok_or_else(invalid)?;
        let table = |text: &String| {
            let parts: Vec<&str> = text.split(':').collect();
            let &[pid, blocks, file] = &parts[..] else { return Err(invalid()) };
            let (pid, blocks, file) = (number(pid)?, number(blocks)? as usize, fd(file)?);
            let table = Table::open(&file, vec![Range::WHOLE; blocks])?;
            Ok(Watched { pid, blocks, table, file })
        };
        let tables = tables.iter().map(table).collect::<Result<_, _>>()?;
        Ok(Self { member: fd(member)?.into(), tables })
    }
}
