//! The first process of a container is held up while the program there is ended: it may wait for that, and all processes
//! there end with it. The gpucr inside asks for it, and tells where it writes, since the watchdog would end with it too.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpucr_core::Progress;
use gpucr_core::dump::{Options, Target};
use gpucr_core::namespace::HeldProcess;
use gpucr_core::phase::Phase;
use rustix::process::{Pid, Signal, kill_process};

use crate::commands::note;
use crate::inherited;

/// How long the command outside may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest path that is told.
const LONGEST: usize = libc::PATH_MAX as usize;

/// Of what is asked: to stop the process, or to note where an image is written.
const STOP: u8 = b's';
const WRITING: u8 = b'w';
/// Of what is answered: it was stopped for this, or nothing was to be done.
const STOPPED: u8 = b'y';
const NOTHING: u8 = b'n';

/// What was asked of the command outside.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// Where the image was to be, and the pid of the gpucr that was making it, as that sees it.
    pub(super) writing: Option<(PathBuf, u32)>,
}

/// Outside: does what is asked until nobody is left who could ask, and lets the process go on then.
pub(super) fn attend(asking: &UnixStream, process: &HeldProcess) -> Asked {
    let (mut asked, mut is_held) = (Asked::default(), false);
    while matches!(answer(asking, process, &mut asked, &mut is_held), Ok(true)) {}
    if is_held && let Err(error) = process.go_on() {
        note!("gpucr: the first process of the container stays stopped: {error}");
    }
    asked
}

/// Does one thing that is asked; nothing if nobody is left.
fn answer(
    mut asking: &UnixStream,
    process: &HeldProcess,
    asked: &mut Asked,
    is_held: &mut bool,
) -> io::Result<bool> {
    let mut kind = [0];
    if asking.read(&mut kind)? == 0 {
        return Ok(false);
    }
    match kind[0] {
        STOP => {
            // One that has ended needs none, and one that was stopped before stays so.
            let stopped = process.stop()?;
            *is_held |= stopped;
            asking.write_all(&[if stopped { STOPPED } else { NOTHING }])?;
        }
        WRITING => asked.writing = Some(read_writing(asking)?),
        _ => return Err(io::ErrorKind::InvalidData.into()),
    }
    Ok(true)
}

/// Where an image is written, and by whom.
fn read_writing(mut asking: &UnixStream) -> io::Result<(PathBuf, u32)> {
    let (mut pid, mut len) = ([0; 4], [0; 4]);
    asking.read_exact(&mut pid)?;
    asking.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut path = vec![0; len];
    asking.read_exact(&mut path)?;
    Ok((OsString::from_vec(path).into(), u32::from_le_bytes(pid)))
}

/// Inside: the way to the command outside.
pub(crate) struct Outside(UnixStream);

impl Outside {
    /// Takes the descriptor over that was given for this.
    ///
    /// # Errors
    /// It is none.
    pub(crate) fn take(number: i32) -> io::Result<Self> {
        let socket = inherited::take(number).map(UnixStream::from)?;
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(Self(socket))
    }

    /// Tells where the image of a dump is about to be written, and shows progress as before. If the dump ends the program,
    /// the first process of the namespace is held up when it is about to do so.
    pub(crate) fn following(
        &self,
        options: &Options,
        progress: Arc<dyn Progress>,
    ) -> Arc<dyn Progress> {
        if let Target::Image(destination) = &options.target {
            self.writing(&destination.path());
        }
        if options.leave_running {
            return progress;
        }
        match self.0.try_clone() {
            Ok(socket) => Arc::new(HoldingFirst { socket, progress }),
            Err(error) => {
                not_held(&error);
                progress
            }
        }
    }

    fn writing(&self, target: &Path) {
        let told = std::path::absolute(target).and_then(|path| {
            let path = path.as_os_str().as_bytes();
            let (pid, len) = (std::process::id().to_le_bytes(), (path.len() as u32).to_le_bytes());
            (&self.0).write_all(&[&[WRITING], &pid[..], &len, path].concat())
        });
        if let Err(error) = told {
            tracing::debug!(%error, "the command outside is gone");
        }
    }
}

struct HoldingFirst {
    socket: UnixStream,
    progress: Arc<dyn Progress>,
}

impl HoldingFirst {
    fn hold(&self) -> io::Result<()> {
        let mut socket = &self.socket;
        let mut answer = [0];
        socket.write_all(&[STOP])?;
        socket.read_exact(&mut answer)?;
        if answer[0] != STOPPED {
            return Ok(());
        }
        // If the command outside dies nobody else lets it go on.
        let ended = self.socket.try_clone()?;
        ended.set_read_timeout(None)?;
        std::thread::Builder::new().spawn(move || {
            let _ = (&ended).read(&mut [0]);
            kill_process(Pid::INIT, Signal::CONT)
        })?;
        Ok(())
    }
}

fn not_held(error: &io::Error) {
    note!("gpucr: this command may end with the container, though the image is complete: {error}");
}

impl Progress for HoldingFirst {
    fn phase(&self, name: &'static str, bytes: Option<u64>) {
        if name == Phase::Commit.name()
            && let Err(error) = self.hold()
        {
            not_held(&error);
        }
        self.progress.phase(name, bytes);
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_it_writes_is_told() {
        let (mut ours, theirs) = UnixStream::pair().expect("a pair");
        let outside = Outside(theirs);
        outside.writing(Path::new("/tmp/a b"));
        let mut kind = [0];
        ours.read_exact(&mut kind).expect("something is told");
        assert_eq!(kind[0], WRITING);
        let told = read_writing(&ours).expect("it is whole");
        assert_eq!(told, ("/tmp/a b".into(), std::process::id()));
    }

    #[test]
    fn what_makes_no_sense_is_not_believed() {
        for bytes in [&b"\x01\0\0\0\xff\xff\xff\xff"[..], b"\x01\0\0\0\x05\0\0\0/a", b""] {
            let (ours, mut theirs) = UnixStream::pair().expect("a pair");
            theirs.write_all(bytes).expect("written");
            drop(theirs);
            assert!(read_writing(&ours).is_err(), "{bytes:?}");
        }
    }
}
