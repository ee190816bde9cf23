//! The program from its start, or a restore, to its end.

use std::ffi::OsString;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use gpucr_core::image::Manifest;
use gpucr_core::namespace;
use rustix::process::{Pid, WaitId, WaitIdOptions};

use super::events::EventPipe;
use crate::commands::restore::{End, Held, hold_back};
use crate::failure::{CliError, NOT_FOUND, NOT_RUNNABLE};
use crate::signals::SignalPlan;

/// Why the program does not run.
pub(super) fn cannot_run(command: &Command, error: &std::io::Error) -> CliError {
    let code = if error.kind() == std::io::ErrorKind::NotFound { NOT_FOUND } else { NOT_RUNNABLE };
    CliError::new(code, format!("cannot run {}: {error}", command.get_program().display()))
}

/// The program: a child of this process, or of the restore that stands in for it.
pub(super) struct Life {
    child: Child,
    began: Instant,
    /// What the restore says, if there is one.
    restore: Option<Told>,
}

/// How it has come to its end.
#[derive(Clone, Copy)]
pub(super) enum Ending {
    /// The program has ended.
    Program(End),
    /// It was not restored. The restore has said why.
    NotRestored,
    /// The restore that stood in for this process has ended, and the process lives.
    Left(u32),
}

impl Life {
    /// Starts the program. It gets the signals from now on.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(command: &mut Command, signals: &SignalPlan) -> io::Result<Self> {
        Ok(Self::of(command.spawn()?, None, signals))
    }

    /// Restores it. The restore ends with it, and is told signals.
    ///
    /// # Errors
    /// The restore cannot be started.
    pub(super) fn restore(
        image: &Path,
        args: &[OsString],
        signals: &SignalPlan,
    ) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg("restore").args(args).arg(image);
        let (events, theirs) = EventPipe::of(&mut command)?;
        let (held, waits) = hold_back(&mut command)?;
        // If that cannot be read the restore fails, and says why.
        let manifest = Manifest::read(image).ok();
        let root = manifest.as_ref().and_then(|it| Some(it.processes.first()?.pid));
        if std::process::id() == 1 {
            let last = manifest.as_ref().map(namespace::last_pid_for).transpose()?;
            // Nobody else runs here yet but this process, and what it starts has to keep clear of the program's pids.
            if let Err(error) = last.map_or(Ok(()), namespace::begin_after) {
                tracing::warn!(%error, "a pid of the program may be in use");
            }
        }
        let child = command.spawn()?;
        drop((theirs, waits));
        Ok(Self::of(child, Some(Told::new(events, held, root)), signals))
    }

    /// The root of the program as soon as there is one. One that is restored waits until it is [let run](Self::let_run).
    pub(super) fn root(&mut self) -> Option<u32> {
        let Some(told) = &mut self.restore else { return Some(self.child.id()) };
        let is_there = told.held.as_mut().is_some_and(Held::are_there);
        told.root.filter(|_| is_there)
    }

    /// Lets a program run that was restored.
    pub(super) fn let_run(&mut self) {
        if let Some(held) = self.restore.as_mut().and_then(|told| told.held.take()) {
            // Where that fails, the restore has, and says so.
            let _ = held.let_run();
        }
    }

    fn of(child: Child, restore: Option<Told>, signals: &SignalPlan) -> Self {
        let pid = child.id();
        signals.pass_to(pid);
        let stand_in = signals.clone();
        std::thread::spawn(move || stand_in.stand_in(pid));
        Self { child, began: Instant::now(), restore }
    }

    /// Since when it has been.
    pub(super) fn age(&self) -> Duration {
        self.began.elapsed()
    }

    /// The child of this process.
    pub(super) fn child(&self) -> u32 {
        self.child.id()
    }

    /// The root of the program, while it runs.
    pub(super) fn program(&mut self) -> Option<u32> {
        match &mut self.restore {
            None => Some(self.child.id()),
            Some(told) => {
                told.listen();
                told.running
            }
        }
    }

    /// How it has ended, if it has. Signals are this process's own then.
    ///
    /// # Errors
    /// It cannot be waited for.
    pub(super) fn end(&mut self, signals: &SignalPlan) -> io::Result<Option<Ending>> {
        let pid = Pid::from_raw(self.child.id() as i32).ok_or(ErrorKind::NotFound)?;
        // First only its end, while its pid is still its own: until then signals are passed on.
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        if rustix::io::retry_on_intr(|| rustix::process::waitid(WaitId::Pid(pid), ended))?.is_none()
        {
            return Ok(None);
        }
        signals.keep();
        let status = self.child.wait()?;
        let Some(told) = &mut self.restore else {
            return Ok(Some(Ending::Program(status.into())));
        };
        // It has said all of it before its end.
        told.listen();
        Ok(Some(match (told.ended, told.running) {
            (Some(end), _) => Ending::Program(end),
            (None, Some(pid)) if !told.has_failed => Ending::Left(pid),
            _ => Ending::NotRestored,
        }))
    }
}

/// What a restore has said by its events.
struct Told {
    events: EventPipe,
    /// It waits before the program runs, until this process knows that.
    held: Option<Held>,
    /// The program's root as the image has it.
    root: Option<u32>,
    running: Option<u32>,
    ended: Option<End>,
    has_failed: bool,
}

impl Told {
    fn new(events: EventPipe, held: Held, root: Option<u32>) -> Self {
        Self { events, held: Some(held), root, running: None, ended: None, has_failed: false }
    }

    /// Takes up what it has said since.
    fn listen(&mut self) {
        for event in self.events.listen() {
            match event["event"].as_str() {
                Some("running") => {
                    self.running = event["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok());
                }
                Some("ended") => self.ended = serde_json::from_value(event).ok(),
                Some("failed") => self.has_failed = true,
                _ => {}
            }
        }
    }
}
