//! Where processes of the program tell the gpucr that watches over it something.
//!
//! Anybody on the host may connect. Who is neither of the program nor of this user is sent away before anything is read,
//! and nobody is waited for longer than a second; all wait as long for a program that is being started. A gpucr that is about to end the program by a dump stays connected
//! until it knows whether it has.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use gpucr_core::process::{descends_from, has_in_tree};
use gpucr_wire::Connection;
use gpucr_wire::supervisor::{
    LONGEST, SupervisorReply, SupervisorRequest, code, supervisor_socket, supervisor_socket_of,
};

use super::tickets::Tickets;

/// How long one who has something to say may take; others wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a dump may take to say that the program is saved, after that has ended; and the program to end after that.
const LAST_WORD: Duration = Duration::from_secs(120);
/// So many dumps are followed at a time: one, and those that find it under way and give up.
const MOST_DUMPS: usize = 16;
/// How often it is looked.
const LOOK: Duration = Duration::from_millis(20);

/// What the program has said, and who it is.
struct Heard {
    watched: Mutex<Watched>,
    /// Told when that is no more [`Watched::Starts`].
    is_known: Condvar,
    /// The driver's error with which a context is broken; 0 if none is.
    broken: AtomicU32,
    dumps: Mutex<Dumps>,
    tickets: Mutex<Tickets>,
}

/// Who is listened to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Watched {
    #[default]
    Nobody,
    /// The program is being started. It runs already, maybe, and its root is not known yet.
    Starts,
    /// The program with this root.
    Program(u32),
}

/// Dumps by others which end the program.
#[derive(Default)]
struct Dumps {
    under_way: usize,
    /// What is known of the last that was not in vain, and since when.
    came_to: Option<(Farewell, Instant)>,
}

impl Dumps {
    /// The program has not ended: that nobody says what became of a dump means nothing any more.
    fn still_runs(&mut self) {
        self.came_to = self.came_to.filter(|(came_to, _)| *came_to != Farewell::Unknown);
    }
}

/// How a program has ended that was being dumped by another gpucr.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Farewell {
    /// It was saved.
    Saved,
    /// Nobody says whether it was saved.
    Unknown,
}

/// The listener, on a thread of its own for each of its names.
pub(super) struct Listener {
    /// The first is that of programs that are started.
    names: Vec<String>,
    heard: Arc<Heard>,
}

impl Listener {
    /// Begins to listen to a program whose images go to this store.
    ///
    /// # Errors
    /// There is no socket.
    pub(super) fn start(store: &Path) -> io::Result<Self> {
        let heard = Heard {
            watched: Mutex::default(),
            is_known: Condvar::new(),
            broken: AtomicU32::default(),
            dumps: Mutex::default(),
            tickets: Mutex::new(Tickets::new(store.to_owned())),
        };
        let mut listener = Self { names: Vec::new(), heard: Arc::new(heard) };
        listener.answer_to(supervisor_socket()?)?;
        let namespace = gpucr_wire::own_pid_namespace()?;
        let second = supervisor_socket_of(namespace, std::process::id());
        if let Err(error) = listener.answer_to(second) {
            tracing::warn!(%error, "somebody has the second name of this gpucr run");
        }
        Ok(listener)
    }

    /// Listens by this name too: an image may have been made under another gpucr, whose name the program has in its
    /// environment.
    ///
    /// # Errors
    /// The name is taken, or there is no thread.
    pub(super) fn answer_to(&mut self, name: String) -> io::Result<()> {
        if self.names.contains(&name) {
            return Ok(());
        }
        let (socket, hearing) = (Connection::listen(&name)?, self.heard.clone());
        std::thread::Builder::new().name("listener".into()).spawn(move || hearing.run(&socket))?;
        self.names.push(name);
        Ok(())
    }

    /// Its names; the program has one of them in its environment.
    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// A program is about to be started: who says something before [`listen_to`](Self::listen_to) is called has to wait
    /// for that.
    pub(super) fn expect_program(&self) {
        *self.heard.watched() = Watched::Starts;
    }

    /// Listens to the program with this root from now on. Whatever was said before is forgotten with `None`.
    pub(super) fn listen_to(&self, root: Option<u32>) {
        *self.heard.watched() = root.map_or(Watched::Nobody, Watched::Program);
        self.heard.is_known.notify_all();
        if root.is_none() {
            self.heard.broken.store(0, Ordering::SeqCst);
            self.heard.dumps().came_to = None;
            self.tickets().forget();
        }
    }

    /// What the program asks for.
    pub(super) fn tickets(&self) -> MutexGuard<'_, Tickets> {
        self.heard.tickets()
    }

    /// The program runs: what became of an earlier dump is settled.
    pub(super) fn still_runs(&self) {
        self.heard.dumps().still_runs();
    }

    /// Whether the program, which has ended, was ended by a dump of another gpucr. Waits until that knows it itself.
    pub(super) fn farewell(&self) -> Option<Farewell> {
        let end = Instant::now() + LAST_WORD;
        loop {
            let Dumps { under_way, came_to } = *self.heard.dumps();
            if under_way == 0 {
                // What has ended long before was another process of the program, or nothing.
                let (came_to, at) = came_to?;
                return (at.elapsed() < LAST_WORD).then_some(came_to);
            }
            if Instant::now() > end {
                return Some(Farewell::Unknown);
            }
            std::thread::sleep(LOOK);
        }
    }

    /// The driver's error with which a context of the program is broken, if one is.
    pub(super) fn broken(&self) -> Option<u32> {
        Some(self.heard.broken.load(Ordering::SeqCst)).filter(|code| *code != 0)
    }
}

impl Heard {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The root of the program, if there is one. While it is being started that is waited for, though not for ever.
    fn root(&self) -> Option<u32> {
        let starts = |watched: &mut Watched| *watched == Watched::Starts;
        let waited = self.is_known.wait_timeout_while(self.watched(), PATIENCE, starts);
        match *waited.unwrap_or_else(PoisonError::into_inner).0 {
            Watched::Program(root) => Some(root),
            Watched::Nobody | Watched::Starts => None,
        }
    }

    fn tickets(&self) -> MutexGuard<'_, Tickets> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dumps(&self) -> MutexGuard<'_, Dumps> {
        self.dumps.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(self: &Arc<Self>, socket: &UnixListener) {
        loop {
            match socket.accept() {
                Ok((client, _)) => {
                    if let Err(error) = self.serve(Connection::new(client)) {
                        tracing::debug!(%error, "somebody was not served");
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "nobody can be accepted");
                    std::thread::sleep(PATIENCE);
                }
            }
        }
    }

    /// # Errors
    /// The peer is not of the program, is too slow, or says what is not understood.
    fn serve(self: &Arc<Self>, mut connection: Connection) -> io::Result<()> {
        let (root, peer) = (self.root(), connection.peer()?);
        // Only what the peer itself takes counts.
        connection.set_deadline(Some(Instant::now() + PATIENCE));
        let is_of_program = peer.pid != 0 && root.is_some_and(|root| descends_from(peer.pid, root));
        let is_own = peer.uid == 0 || peer.uid == rustix::process::geteuid().as_raw();
        if !is_of_program && !is_own {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        match connection.receive_at_most(LONGEST)? {
            SupervisorRequest::Broken { code } if is_of_program => {
                tracing::info!(code, peer.pid, "a context is broken");
                self.broken.store(code, Ordering::SeqCst);
                connection.send(&SupervisorReply::Noted {})
            }
            SupervisorRequest::Save { name } if is_of_program => {
                let reply = self.tickets().ask_for(&name);
                tracing::info!(name, peer.pid, ?reply, "an image is asked for");
                connection.send(&reply)
            }
            SupervisorRequest::Ask { ticket } if is_of_program => {
                let reply = self.tickets().state_of(ticket);
                connection.send(&reply)
            }
            SupervisorRequest::Ending { namespace, pid } if is_own && !is_of_program => {
                if root.is_some_and(|root| has_in_tree(root, (namespace, pid))) {
                    self.follow(connection)
                } else {
                    let why = "this gpucr run watches over another program".to_owned();
                    connection.send(&SupervisorReply::Refused { code: code::NOT_WATCHED, why })
                }
            }
            _ => Err(io::ErrorKind::PermissionDenied.into()),
        }
    }

    /// Waits, on a thread of its own, for what comes of a dump that ends the program.
    ///
    /// # Errors
    /// There is no thread, or too many dumps are under way.
    fn follow(self: &Arc<Self>, mut connection: Connection) -> io::Result<()> {
        let mut dumps = self.dumps();
        if dumps.under_way >= MOST_DUMPS {
            return Err(io::ErrorKind::QuotaExceeded.into());
        }
        dumps.under_way += 1;
        drop(dumps);
        let heard = self.clone();
        let thread = std::thread::Builder::new().name("dump".into()).spawn(move || {
            let word = connection.send(&SupervisorReply::Noted {}).and_then(|()| {
                connection.set_deadline(None);
                connection.receive_at_most(LONGEST)
            });
            let mut dumps = heard.dumps();
            dumps.under_way -= 1;
            match word {
                Ok(SupervisorRequest::NotEnded {}) => dumps.still_runs(),
                Ok(SupervisorRequest::Ended {}) => {
                    dumps.came_to = Some((Farewell::Saved, Instant::now()))
                }
                _ => dumps.came_to = Some((Farewell::Unknown, Instant::now())),
            }
        });
        thread.map(drop).inspect_err(|_| self.dumps().under_way -= 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpucr_core::process::identity;

    fn say(name: &str, code: u32) -> io::Result<SupervisorReply> {
        let deadline = Some(Instant::now() + Duration::from_secs(60));
        let mut connection = Connection::connect(name, deadline, None)?;
        connection.send(&SupervisorRequest::Broken { code })?;
        connection.receive_at_most(LONGEST)
    }

    #[test]
    fn only_the_program_is_listened_to() {
        let mut listener = Listener::start(Path::new("/nowhere")).unwrap();
        assert!(say(&listener.names()[0], 700).is_err(), "there is no program");
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        listener.listen_to(Some(other.id()));
        assert!(say(&listener.names()[0], 700).is_err(), "this process is not of that program");
        assert_eq!(listener.broken(), None);
        other.kill().unwrap();
        other.wait().unwrap();
        listener.listen_to(Some(std::process::id()));
        assert_eq!(say(&listener.names()[0], 700).unwrap(), SupervisorReply::Noted {});
        assert_eq!(listener.broken(), Some(700));
        let other = supervisor_socket().unwrap();
        listener.answer_to(other.clone()).unwrap();
        assert_eq!(say(&other, 719).unwrap(), SupervisorReply::Noted {});
        assert_eq!(listener.broken(), Some(719));
        listener.listen_to(None);
        assert_eq!(listener.broken(), None);
    }

    #[test]
    fn who_speaks_while_the_program_is_being_started_waits() {
        let listener = Listener::start(Path::new("/nowhere")).unwrap();
        // It waits no longer than a second, which this thread may take on a busy machine.
        let is_heard = || {
            listener.expect_program();
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| say(&listener.names()[0], 700));
                std::thread::sleep(Duration::from_millis(50));
                listener.listen_to(Some(std::process::id()));
                waiting.join().unwrap().is_ok()
            })
        };
        assert!((0..20).any(|_| is_heard()));
        listener.expect_program();
        assert!(say(&listener.names()[0], 700).is_err(), "it is not waited for for ever");
    }

    #[test]
    fn what_another_gpucr_says_of_the_end_is_waited_for() {
        let listener = Listener::start(Path::new("/nowhere")).unwrap();
        assert_eq!(listener.farewell(), None);
        let mut program = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        listener.listen_to(Some(program.id()));
        let say = |of: u32| {
            let deadline = Some(Instant::now() + Duration::from_secs(60));
            let mut connection = Connection::connect(&listener.names()[0], deadline, None).unwrap();
            let (namespace, pid) = identity(of).unwrap();
            connection.send(&SupervisorRequest::Ending { namespace, pid }).unwrap();
            let reply: SupervisorReply = connection.receive_at_most(LONGEST).unwrap();
            (connection, reply)
        };
        let (_, reply) = say(std::process::id());
        assert!(matches!(reply, SupervisorReply::Refused { .. }), "another program: {reply:?}");
        let begin = || {
            let (connection, reply) = say(program.id());
            assert_eq!(reply, SupervisorReply::Noted {});
            connection
        };
        begin().send(&SupervisorRequest::NotEnded {}).unwrap();
        assert_eq!(listener.farewell(), None);
        let mut saved = begin();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| listener.farewell());
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waiting.is_finished());
            saved.send(&SupervisorRequest::Ended {}).unwrap();
            assert_eq!(waiting.join().unwrap(), Some(Farewell::Saved));
        });
        listener.listen_to(None);
        assert_eq!(listener.farewell(), None, "of the program before");
        listener.listen_to(Some(program.id()));
        drop(begin());
        assert_eq!(listener.farewell(), Some(Farewell::Unknown));
        listener.still_runs();
        assert_eq!(listener.farewell(), None);
        program.kill().unwrap();
        program.wait().unwrap();
    }
}
