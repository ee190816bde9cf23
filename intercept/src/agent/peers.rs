//! The thread that hands memory of this program to others that open its IPC handles.
//!
//! It is not the agent's: that serves a checkpointer, which closes the gates of all processes of a tree, and one of
//! them may be within a call that opens a handle. It starts with the first handle that the program asks for, and
//! needs no gate: it hands out a descriptor and does no work on a device.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use gpucr_wire::Connection;
use gpucr_wire::peers::{Identity, PeerReply, PeerRequest, peers_socket};

use super::{signals, socket};
use crate::abi::real;
use crate::log::log;
use crate::resettable::Resettable;
use crate::state::events::{self, Handed};
use crate::state::memory::vmm::Driver;
use crate::state::memory::{self, Offer};
use crate::state::peers;

/// How long one who asks may take; others wait meanwhile.
const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes of the longest request.
const LONGEST: u32 = 64;

/// Whether the thread has been started.
static STARTED: Resettable<Mutex<bool>> = Resettable::new(Mutex::new(false));
/// The socket, for the child of a fork to close; -1 is none.
static LISTENER: AtomicI32 = AtomicI32::new(-1);

/// Starts the thread, once in a process.
///
/// # Errors
/// The name is taken, or there is no thread: nobody can open memory of this program.
pub(crate) fn start() -> io::Result<()> {
    let mut started = STARTED.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if *started {
        return Ok(());
    }
    let namespace = gpucr_wire::own_pid_namespace()?;
    let listener = Connection::listen(&peers_socket(namespace, std::process::id()))?;
    LISTENER.store(listener.as_raw_fd(), Ordering::SeqCst);
    let blocked = signals::block_all();
    let thread = thread::Builder::new().name("gpucr-peers".into()).spawn(move || run(&listener));
    drop(blocked);
    *started = thread.inspect_err(|_| LISTENER.store(-1, Ordering::SeqCst)).is_ok();
    if *started { Ok(()) } else { Err(io::ErrorKind::OutOfMemory.into()) }
}

fn run(listener: &UnixListener) {
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                let mut connection = Connection::new(socket);
                connection.set_deadline(Some(Instant::now() + PATIENCE));
                if !socket::is_trusted(&connection) {
                    continue;
                }
                let served = catch_unwind(AssertUnwindSafe(|| serve(&mut connection)));
                match served {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => log!("one who opens memory was not served: {error}"),
                    Err(_) => log!("serving one who opens memory failed"),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log!("cannot accept: {error}");
                thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Serves one request.
fn serve(connection: &mut Connection) -> io::Result<()> {
    let request = connection.receive_at_most(LONGEST)?;
    log!("a peer asks: {request:?}");
    let is_own = |owner| peers::identity() == Some(owner);
    match request {
        PeerRequest::Open { owner, allocation, address, opener } => {
            let offer = if is_own(owner) {
                memory::lock().offer(&Driver, allocation, address, real::uuid)
            } else {
                Offer::Gone
            };
            hand_over(connection, offer, opener, |piece| (piece.block, PeerReply::Opened { piece }))
        }
        PeerRequest::OpenOfPool { owner, pool, allocation, address, opener } => {
            let offer = if is_own(owner) {
                memory::lock().offer_of_pool(&Driver, pool, allocation, address, real::uuid)
            } else {
                Offer::Gone
            };
            hand_over(connection, offer, opener, |piece| (piece.block, PeerReply::Opened { piece }))
        }
        PeerRequest::Import { owner, block, opener } => {
            let object = memory::lock().hand_out_object(&Driver, block);
            if let Some(offer) = object.filter(|_| is_own(owner)) {
                return hand_over(connection, offer, opener, |team| {
                    (block, PeerReply::Object { team })
                });
            }
            let offer = if is_own(owner) {
                memory::lock().hand_out(&Driver, block, real::uuid)
            } else {
                Offer::Gone
            };
            hand_over(connection, offer, opener, |whole| {
                (block, PeerReply::Imported { block: whole })
            })
        }
        PeerRequest::Event { owner, event, opener } => {
            let handed = if is_own(owner) { events::hand_out(event) } else { None };
            let Some(Handed { arena, cell, base, fd }) = handed else {
                return connection.send(&PeerReply::Gone {});
            };
            peers::opened(opener, connection.peer()?.pid, events::peer_name(event));
            connection.send(&PeerReply::Event { arena, cell, base })?;
            connection.send_fds(&[fd])
        }
        PeerRequest::Pool { owner, pool } => {
            let device = if is_own(owner) { memory::lock().shareable_pool(pool) } else { None };
            connection.send(&match device.map(real::uuid) {
                Some(device) => PeerReply::Pool { device },
                None => PeerReply::Gone {},
            })
        }
        PeerRequest::Close { owner, block, opener } => {
            if is_own(owner) {
                peers::closed(opener, block);
                memory::lock().tidy_objects(&Driver);
            }
            connection.send(&PeerReply::Done {})
        }
        PeerRequest::Added { owner, object, device, adder } => {
            let device = real::device_of(device);
            if is_own(owner) {
                memory::lock().device_added_by(object, adder, device);
            }
            connection.send(&PeerReply::Done {})
        }
        PeerRequest::Team { owner, object } => {
            let known = is_own(owner).then(|| memory::lock().is_team_complete(object)).flatten();
            connection.send(&match known {
                Some(is_complete) => PeerReply::Team { is_complete },
                None => PeerReply::Gone {},
            })
        }
    }
}

/// Gives an opener what is offered to it, if it is there. `told` makes of it the block's name and the reply.
fn hand_over<T>(
    connection: &mut Connection,
    offer: Offer<T>,
    opener: Identity,
    told: impl FnOnce(T) -> (u64, PeerReply),
) -> io::Result<()> {
    match offer {
        Offer::Here(what, fd) => {
            let (block, reply) = told(what);
            // Before it has it: a dump that begins now has to know.
            peers::opened(opener, connection.peer()?.pid, block);
            connection.send(&reply)?;
            connection.send_fds(&[fd])
        }
        Offer::Busy => connection.send(&PeerReply::Busy {}),
        Offer::Gone => connection.send(&PeerReply::Gone {}),
    }
}

/// Makes everything as in a new process, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { STARTED.reset(Mutex::new(false)) };
    let fd = LISTENER.swap(-1, Ordering::SeqCst);
    if fd >= 0 {
        // SAFETY: its owner is a thread that this process does not have.
        unsafe { libc::close(fd) };
    }
}
