//! A program that a `gpucr run` watches over is about to be ended by a dump: that gpucr must not take its end for a
//! failure, and restore it.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use super::network;
use super::tree::{ancestors, environment, identity};
use gpucr_wire::Connection;
use gpucr_wire::supervisor::{
    ENV_SUPERVISOR, LONGEST, SupervisorReply, SupervisorRequest, is_supervisor,
    supervisor_socket_of,
};

/// How long it may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Among so many ancestors of the program it is looked for: its parent, or that of the restore which is its parent.
const NEAR: usize = 4;

/// Whoever watches over the program knows of the dump. Dropped before anything was [said](Self::say) it tells that the
/// program was not ended.
pub(crate) struct Farewell(Option<Connection>);

impl Farewell {
    /// Tells it, if somebody watches over the program with this root.
    ///
    /// # Errors
    /// It does not answer.
    pub(crate) fn begin(root: u32) -> io::Result<Self> {
        // One that has ended is found out by others.
        let Some((namespace, pid)) = identity(root) else { return Ok(Self(None)) };
        let word = SupervisorRequest::Ending { namespace, pid };
        for (name, listener) in names(root) {
            let deadline = Some(Instant::now() + PATIENCE);
            let connected = network::visit(root, || Connection::connect(&name, deadline, None));
            let mut connection = match connected {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => continue,
                // The program has ended, which others find out.
                Err(error) if error.kind() == ErrorKind::NotFound => break,
                connected => connected?,
            };
            let peer = connection.peer()?;
            let own = rustix::process::geteuid().as_raw();
            if peer.uid != 0 && peer.uid != own || listener.is_some_and(|pid| peer.pid != pid) {
                tracing::warn!(peer.pid, name, "another process listens in place of a gpucr run");
                continue;
            }
            connection.send(&word)?;
            if let SupervisorReply::Refused { why, .. } = connection.receive_at_most(LONGEST)? {
                tracing::info!(why, "a gpucr run watches over another program");
                continue;
            }
            return Ok(Self(Some(connection)));
        }
        Ok(Self(None))
    }

    /// Says whether the dump has ended the program.
    pub(crate) fn say(mut self, is_ended: bool) {
        self.tell(is_ended);
    }

    fn tell(&mut self, is_ended: bool) {
        let Some(mut connection) = self.0.take() else { return };
        connection.set_deadline(Some(Instant::now() + PATIENCE));
        let word = match is_ended {
            true => SupervisorRequest::Ended {},
            false => SupervisorRequest::NotEnded {},
        };
        if let Err(error) = connection.send(&word) {
            tracing::warn!(%error, "the gpucr run that watches over the program could not be told what happened to it");
        }
    }
}

impl Drop for Farewell {
    fn drop(&mut self) {
        self.tell(false);
    }
}

/// The names by which somebody may listen who watches over the program, with his pid where that is known. A program can
/// have written over its environment.
fn names(root: u32) -> Vec<(String, Option<u32>)> {
    let of = |pid: u32| {
        let (namespace, inner) = identity(pid)?;
        Some((supervisor_socket_of(namespace, inner), Some(pid)))
    };
    // Anybody may take the name that another process would have: only those that are a gpucr are asked by it.
    let near = ancestors(root).skip(1).take(NEAR).filter(|pid| is_gpucr(*pid)).filter_map(of);
    let noted = environment(root, ENV_SUPERVISOR).filter(|name| is_supervisor(name));
    near.chain(noted.map(|name| (name, None))).collect()
}

/// Whether a process executes a program of the name that this one has.
fn is_gpucr(pid: u32) -> bool {
    let name = |path: &str| {
        let exe = std::fs::read_link(path).ok()?;
        let name = exe.file_name()?.to_string_lossy().into_owned();
        // The file was replaced by an upgrade.
        Some(name.trim_end_matches(" (deleted)").to_owned())
    };
    let own = name("/proc/self/exe");
    own.is_some() && name(&format!("/proc/{pid}/exe")) == own
}
