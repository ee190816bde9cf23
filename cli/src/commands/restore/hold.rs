//! What a restore has to do with the gpucr that has started it, and what `--hold FD`, `--loaded FD` and `--stand-by FD` are
//! about.
//!
//! `gpucr restore --hold FD`: a restore that waits, before the program runs, for the gpucr that has started it. They
//! talk through a pair of sockets: a byte says that the processes are there, and one that they may run. The end of the
//! connection means that they may not. With `--tell-holder` a restore that fails says there why, and nowhere else: that
//! is another byte, and the reason after it.

//!
//! `gpucr restore --stand-by FD`: a restore that is started before its image is complete, and gets at hand what it needs of
//! this host. Through a socket it is told which driver that is, and then that the image is there. At the end of the
//! connection it ends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::RestoreArgs;
use crate::inherited;
use gpucr_core::Failure;
#[cfg(doc)]
use gpucr_core::restore::LoadedMemory;
use gpucr_core::restore::{AtHand, Given, MayRun};

/// How often whoever waits looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);
/// The processes are there; to that: they may run.
const READY: u8 = 1;
/// The restore has failed: why follows, up to the end of the connection.
const FAILED: u8 = 2;
/// More of a reason is not heard.
const LONGEST: u64 = 64 << 10;

/// The end of whoever has started the restore.
pub(crate) struct Held(UnixStream);

/// Has a restore, which is to be started now, wait before the program runs. The second socket is the restore's, and has
/// to be open until that has started.
///
/// # Errors
/// There are no descriptors left.
pub(crate) fn hold_back(command: &mut Command) -> io::Result<(Held, UnixStream)> {
    let (ours, theirs) = connect(command, "--hold")?;
    Ok((Held(ours), theirs))
}

/// Has a restore take its device memory from a socket, into which that is to be [sent](LoadedMemory::send). The second
/// socket is the restore's, and has to be open until that has started.
///
/// # Errors
/// There are no descriptors left.
pub(crate) fn hand_memory(command: &mut Command) -> io::Result<(UnixStream, UnixStream)> {
    connect(command, "--loaded")
}

/// Has a restore, which is to be started now, stand by with the driver library that has this hash. The second socket is the
/// restore's, and has to be open until that has started. Through the first it is [told to go on](go_on).
///
/// # Errors
/// There are no descriptors left.
pub(crate) fn stand_by(
    command: &mut Command,
    driver: &[u8; 32],
) -> io::Result<(UnixStream, UnixStream)> {
    let (mut ours, theirs) = connect(command, "--stand-by")?;
    ours.write_all(driver)?;
    Ok((ours, theirs))
}

/// Tells a restore that stands by that its image is there.
///
/// # Errors
/// It has ended.
pub(crate) fn go_on(mut restore: &UnixStream) -> io::Result<()> {
    restore.write_all(&[READY])
}

/// What a restore that stands by does until its image is there. `None` if there will be none.
///
/// # Errors
/// It is no descriptor of such a connection.
pub(super) fn wait_for_image(fd: i32) -> io::Result<Option<AtHand>> {
    let mut socket = UnixStream::from(inherited::take(fd)?);
    let (mut driver, mut said) = ([0; 32], [0]);
    socket.read_exact(&mut driver)?;
    let at_hand = AtHand::with_driver(&driver);
    let come = socket.read(&mut said)?;
    Ok((come > 0 && said == [READY]).then_some(at_hand))
}

/// Gives a command one end of a pair of sockets, the second, and names it with this option.
fn connect(command: &mut Command, option: &str) -> io::Result<(UnixStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    command.args([option, &theirs.as_raw_fd().to_string()]);
    inherited::let_through(command, &[&theirs]);
    Ok((ours, theirs))
}

impl Held {
    /// Waits until the processes are there.
    ///
    /// # Errors
    /// The restore has failed: why, if it says so here.
    pub(crate) fn wait(&mut self) -> Result<(), Option<String>> {
        let mut said = [0];
        match self.0.read_exact(&mut said) {
            Ok(()) if said == [READY] => Ok(()),
            Ok(()) if said == [FAILED] => {
                let mut why = Vec::new();
                // What has come of it is better than nothing.
                let _ = (&self.0).take(LONGEST).read_to_end(&mut why);
                Err(Some(String::from_utf8_lossy(&why).into_owned()))
            }
            _ => Err(None),
        }
    }

    /// Whether they are there by now. The end of the restore is no error here.
    pub(crate) fn are_there(&mut self) -> bool {
        let mut said = [0];
        let looked = self.0.set_nonblocking(true).and_then(|()| self.0.read_exact(&mut said));
        looked.is_ok() && said == [READY]
    }

    /// Lets them run.
    ///
    /// # Errors
    /// The restore has failed.
    pub(crate) fn let_run(mut self) -> io::Result<()> {
        self.0.write_all(&[READY])
    }
}

/// Takes the memory that comes through this descriptor.
///
/// # Errors
/// It is no descriptor.
pub(super) fn take_memory(fd: i32) -> io::Result<Given> {
    Ok(Given::through(UnixStream::from(inherited::take(fd)?)))
}

/// By whom a restore is held back, as that sees it.
pub(super) struct HeldBy {
    socket: UnixStream,
    /// Whether it is told of a failure, which nobody else is told of then.
    is_told: bool,
}

impl HeldBy {
    /// Takes over the descriptor of the connection, if there is one.
    ///
    /// # Errors
    /// It is no descriptor.
    pub(super) fn of(args: &RestoreArgs) -> io::Result<Option<Self>> {
        let Some(fd) = args.hold else { return Ok(None) };
        let socket = UnixStream::from(inherited::take(fd)?);
        Ok(Some(Self { socket, is_told: args.tell_holder }))
    }

    /// What the restore asks before the program runs.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub(super) fn may_run(&self) -> io::Result<MayRun> {
        let socket = self.socket.try_clone()?;
        socket.set_read_timeout(Some(LOOK))?;
        Ok(MayRun(Arc::new(move |stop| wait(&socket, stop))))
    }

    /// Says why the restore has failed. Whether that is all that is to be said of it.
    pub(super) fn hears(&self, failure: &Failure) -> bool {
        let why = [&[FAILED], failure.to_string().as_bytes()].concat();
        self.is_told && (&self.socket).write_all(&why).is_ok()
    }
}

fn wait(mut socket: &UnixStream, stop: &AtomicBool) -> Result<(), String> {
    const GONE: &str = "whoever asked for it has given up";
    socket.write_all(&[READY]).map_err(|_| GONE)?;
    loop {
        match socket.read(&mut [0]) {
            Ok(1) => return Ok(()),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            _ => return Err(GONE.to_owned()),
        }
        if stop.load(Ordering::Relaxed) {
            return Err("interrupted".to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use gpucr_core::Left;
    use gpucr_core::phase::Phase;

    use super::*;

    fn failure() -> Failure {
        let error = gpucr_core::Error::NotBack { why: "no file".into() };
        Failure { phase: Phase::Criu, error: Box::new(error), left: Left::NotRestored }
    }

    #[test]
    fn whoever_holds_it_back_hears_what_it_comes_to() {
        let pair = |is_told| {
            let (ours, socket) = UnixStream::pair().unwrap();
            (Held(ours), HeldBy { socket, is_told })
        };
        let (mut held, by) = pair(true);
        assert!(by.hears(&failure()));
        drop(by);
        let heard = held.wait().unwrap_err().unwrap();
        assert!(heard.contains("no file"), "{heard}");
        let (mut held, by) = pair(true);
        assert!(by.hears(&failure()) && !held.are_there());
        let (mut held, by) = pair(false);
        assert!(!by.hears(&failure()), "it is told otherwise");
        drop(by);
        assert_eq!(held.wait(), Err(None));
        let (mut held, by) = pair(true);
        let restoring = std::thread::spawn(move || by.may_run().unwrap().0(&AtomicBool::default()));
        held.wait().unwrap();
        held.let_run().unwrap();
        restoring.join().unwrap().unwrap();
    }
}
