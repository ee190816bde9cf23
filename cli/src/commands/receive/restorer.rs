//! Restores of programs that have come.

use std::ffi::OsString;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use gpucr_core::migrate::{Brought, Record, RelayedEnds, Restore};
use gpucr_core::network::NetworkNamespace;
use gpucr_core::restore::{LoadedMemory, OutputFiles};

use super::relay::{Files, Relay, brought};
use crate::commands::restore::{Held, give, go_on, hand_memory, hold_back, outputs, stand_by};
use crate::inherited::let_through;
use crate::output;
use crate::signals::SignalPlan;

/// Restores programs in a process of its own, which leaves them in the background.
pub(super) struct Restorer<'s> {
    signals: &'s SignalPlan,
    /// Where the program's outputs go that were pipes.
    outputs: OutputFiles,
    /// Where the program gets its network, if that is not gpucr's.
    network: Option<NetworkNamespace>,
    /// Run in a shell before the program runs.
    hook: Option<OsString>,
    /// These files, for a restore that is to be started now.
    files: Files,
    /// Device memory for the next restore.
    memory: Option<LoadedMemory>,
    /// Where the restore that has begun awaits its device memory.
    awaits: Option<UnixStream>,
    /// A restore that has begun, and waits before the program runs.
    made: Option<(Child, Held)>,
    /// What relays the program's standard streams.
    relay: Option<Relay>,
    /// A restore that waits for its image.
    standing_by: Option<StandingBy>,
}

/// See [`Restore::stand_by`].
struct StandingBy {
    restore: Child,
    held: Held,
    /// Where it awaits its device memory.
    awaits: UnixStream,
    /// Where it is told that its image is there.
    image: UnixStream,
}

impl StandingBy {
    /// Whether none of its threads has one of these ids, which the program needs.
    fn leaves_free(&self, threads: &[u32]) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.restore.id()));
        let ids = tasks.into_iter().flatten().flatten();
        let mut ids = ids.filter_map(|task| task.file_name().to_str()?.parse().ok());
        !ids.any(|id: u32| threads.contains(&id))
    }

    /// Ends it. It has made nothing.
    fn end(mut self) {
        let _ = self.restore.kill();
        let _ = self.restore.wait();
    }
}

impl<'s> Restorer<'s> {
    pub(super) fn new(
        signals: &'s SignalPlan,
        outputs: OutputFiles,
        network: Option<NetworkNamespace>,
        hook: Option<OsString>,
    ) -> Self {
        let (files, memory, awaits) = ([None, None, None], None, None);
        let (made, relay, standing_by) = (None, None, None);
        Self { signals, outputs, network, hook, files, memory, awaits, made, relay, standing_by }
    }

    /// What relays the standard streams of the program, which runs: the link is its own from now on.
    pub(super) fn let_relay(&mut self) -> Option<Relay> {
        let relay = self.relay.take()?;
        relay.go();
        Some(relay)
    }

    /// The command, which prints what it has come to, or stays with the program and says that in events.
    fn command(&mut self, record: &Record) -> Result<Command, String> {
        let image = record.image.as_deref().ok_or("the record names no image")?;
        let mut command = Command::new("/proc/self/exe");
        command.args(["restore", "--json", "--no-warm"]);
        command.args(record.new_pids.then_some("--new-pids"));
        if !record.device_map.is_empty() {
            command.args(["--device-map", &record.device_map.join(",")]);
        }
        if let Some(network) = &self.network {
            let network = network.as_fd();
            command.args(["--network", &network.as_raw_fd().to_string()]);
            let_through(&mut command, &[&network]);
        }
        if let Some(hook) = &self.hook {
            command.arg("--exec-before-resume").arg(hook);
        }
        command.stdin(Stdio::null());
        self.begin_relay_without_link(record)?;
        self.files = self.open_outputs()?;
        match &mut self.relay {
            None => {
                give(&mut command, [0, 1, 2].map(|number| self.files[number].as_ref()));
                command.arg("--detach").stdout(Stdio::piped())
            }
            Some(relay) => {
                relay.prepare(&mut command, &self.files);
                command.stdout(Stdio::null()).stderr(Stdio::piped())
            }
        };
        command.arg(image);
        Ok(command)
    }

    /// Opens the files for its outputs, each of them once.
    fn open_outputs(&self) -> Result<Files, String> {
        let outputs = outputs::open(&self.outputs, output::append);
        let outputs = outputs.map_err(|error| error.to_string())?;
        let own = |file: &Option<Arc<File>>| -> Result<Option<OwnedFd>, String> {
            let copy = file.as_ref().map(|file| file.try_clone()).transpose();
            let copy = copy.map_err(|error| format!("a file for its output: {error}"))?;
            Ok(copy.map(OwnedFd::from))
        };
        Ok([None, own(&outputs.stdout)?, own(&outputs.stderr)?])
    }

    /// A program whose streams were to be relayed, and that comes later, has its output kept.
    fn begin_relay_without_link(&mut self, record: &Record) -> Result<(), String> {
        if let (Some(streams), None) = (record.streams, &self.relay) {
            let (id, silence) = (record.id.parse()?, std::time::Duration::ZERO);
            let ends = RelayedEnds { id, streams, link: None, silence, keeps: record.relays };
            self.relay = Some(Relay::start(ends)?);
        }
        Ok(())
    }

    /// Starts a restore, and gives it the memory that there is for it. If `awaits_memory` says so that comes later.
    fn start(&mut self, mut command: Command, awaits_memory: bool) -> Result<Child, String> {
        let memory = self.memory.take();
        if memory.is_none() && !awaits_memory {
            return self.spawn(&mut command);
        }
        let (ours, theirs) = hand_memory(&mut command).map_err(not_started)?;
        let child = self.spawn(&mut command)?;
        drop(theirs);
        self.awaits = Some(ours);
        // To send takes as long as the restore takes to begin.
        self.signals.pass_to(child.id());
        memory.into_iter().for_each(|memory| self.give(memory));
        Ok(child)
    }

    fn spawn(&mut self, command: &mut Command) -> Result<Child, String> {
        let child = command.spawn().map_err(not_started);
        self.files = [None, None, None];
        let mut child = child?;
        if let Some(relay) = &mut self.relay {
            relay.is_prepared(&mut child);
        }
        Ok(child)
    }

    /// Starts a restore that waits for its image.
    fn start_standing_by(
        &mut self,
        record: &Record,
        driver: &[u8; 32],
    ) -> Result<StandingBy, String> {
        let mut command = self.command(record)?;
        let (held, holds) = hold_back(&mut command).map_err(not_started)?;
        command.arg("--tell-holder");
        let (awaits, memory) = hand_memory(&mut command).map_err(not_started)?;
        let (image, waits) = stand_by(&mut command, driver).map_err(not_started)?;
        let restore = self.spawn(&mut command)?;
        drop((holds, memory, waits));
        Ok(StandingBy { restore, held, awaits, image })
    }

    /// Lets what stands by make the processes. `false` if nothing does, or nothing that can.
    fn begin_at_once(&mut self, record: &Record, threads: &[u32], awaits_memory: bool) -> bool {
        let Some(one) = self.standing_by.take() else { return false };
        let waits_alone = record.streams.is_none() && self.relay.is_none() && self.memory.is_none();
        if !waits_alone || !one.leaves_free(threads) || go_on(&one.image).is_err() {
            one.end();
            return false;
        }
        let StandingBy { restore, held, awaits, image: _ } = one;
        self.signals.pass_to(restore.id());
        self.awaits = awaits_memory.then_some(awaits);
        self.made = Some((restore, held));
        true
    }

    /// Waits for what it comes to.
    fn end(&mut self, mut child: Child) -> Result<Brought, String> {
        self.signals.pass_to(child.id());
        if let Some(relay) = &self.relay {
            let brought = relay.brought(&mut child);
            self.signals.keep();
            return match brought {
                Some(brought) => Ok(brought),
                None => {
                    let status = child.wait();
                    Err(status.map_or_else(not_waited, failed))
                }
            };
        }
        let output = child.wait_with_output();
        self.signals.keep();
        let output = output.map_err(not_waited)?;
        let report: Option<serde_json::Value> = serde_json::from_slice(&output.stdout).ok();
        let pid = report.as_ref().and_then(|report| report["pid"].as_u64());
        match (pid.and_then(|pid| u32::try_from(pid).ok()), report) {
            (Some(pid), Some(report)) if output.status.success() => Ok(brought(pid, &report)),
            _ => Err(failed(output.status)),
        }
    }
}

fn not_started(error: std::io::Error) -> String {
    format!("cannot start a restore: {error}")
}

fn not_waited(error: std::io::Error) -> String {
    format!("cannot wait for the restore: {error}")
}

fn failed(status: std::process::ExitStatus) -> String {
    format!("the restore ended with {status}; it has said why on the destination")
}

impl Restore for Restorer<'_> {
    fn give(&mut self, memory: LoadedMemory) {
        let Some(socket) = self.awaits.take() else { return self.memory = Some(memory) };
        // If the restore has failed it says why.
        if let Err(error) = memory.send(socket) {
            tracing::debug!(%error, "the restore does not take its memory");
        }
    }

    fn relay(&mut self, ends: RelayedEnds) -> Result<(), String> {
        self.relay = Some(Relay::start(ends)?);
        Ok(())
    }

    fn stand_by(&mut self, record: &Record, driver: &[u8; 32]) {
        // What the user has named for its output is not made before something comes.
        let has_files = self.outputs.stdout.is_some() || self.outputs.stderr.is_some();
        if has_files {
            return;
        }
        match self.start_standing_by(record, driver) {
            Ok(one) => self.standing_by = Some(one),
            Err(error) => tracing::debug!(%error, "no restore stands by"),
        }
    }

    fn begin(
        &mut self,
        record: &Record,
        threads: &[u32],
        awaits_memory: bool,
    ) -> Result<(), String> {
        if self.begin_at_once(record, threads, awaits_memory) {
            return Ok(());
        }
        let mut command = self.command(record)?;
        let (held, theirs) = hold_back(&mut command).map_err(not_started)?;
        command.arg("--tell-holder");
        let child = self.start(command, awaits_memory)?;
        drop(theirs);
        self.made = Some((child, held));
        Ok(())
    }

    fn make(&mut self) -> Result<(), String> {
        // No more memory comes.
        self.awaits = None;
        let (child, mut held) = self.made.take().ok_or("no restore has begun")?;
        self.signals.pass_to(child.id());
        let made = held.wait();
        self.signals.keep();
        if let Err(why) = made {
            drop(held);
            let ended = self.end(child).and(Err("the restore did not wait".into()));
            return why.map_or(ended, Err);
        }
        self.made = Some((child, held));
        Ok(())
    }

    fn run(&mut self, record: &Record) -> Result<Brought, String> {
        let Some((child, held)) = self.made.take() else {
            let command = self.command(record)?;
            let child = self.start(command, false)?;
            return self.end(child);
        };
        // Where that fails, the restore has, and says so.
        let _ = held.let_run();
        self.end(child)
    }

    fn give_up(&mut self) {
        (self.memory, self.awaits) = (None, None);
        self.standing_by.take().into_iter().for_each(StandingBy::end);
        if let Some((child, held)) = self.made.take() {
            drop(held);
            let _ = self.end(child);
        }
        self.relay = None;
    }
}

impl Drop for Restorer<'_> {
    fn drop(&mut self) {
        self.give_up();
    }
}
