//! One standard stream, on the side that it comes from ([`Giver`]) and on that where it goes ([`Taker`]).
//!
//! The side that it comes from keeps what the other has not confirmed, at most [`WINDOW`] bytes, and reads no more
//! before: so a slow reader slows the writer down, as a pipe does, and what is lost with the link is still there.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::kept::Kept;
use crate::engine::migrate::link::{LOOK, Link, LinkError};
use crate::engine::migrate::message::{MAX_PART, Message};

/// Most bytes of a stream that are on their way, or wait for their reader.
pub(super) const WINDOW: usize = 1 << 18;

/// What comes from a descriptor goes to the other side.
pub(super) struct Giver {
    stream: u32,
    state: Mutex<Giving>,
    changed: Condvar,
}

#[derive(Default)]
struct Giving {
    /// What the other side may not have written yet.
    unconfirmed: VecDeque<u8>,
    /// All has come, and the other side was told so.
    has_ended: bool,
    /// Nobody reads it there.
    is_unwanted: bool,
    /// Nothing goes there any more.
    is_lost: bool,
}

impl Giver {
    pub(super) fn new(stream: u32) -> Self {
        Self { stream, state: Mutex::default(), changed: Condvar::new() }
    }

    /// The other side has written so many bytes.
    ///
    /// # Errors
    /// It has not got so many.
    pub(super) fn confirm(&self, bytes: u32) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        let bytes = bytes as usize;
        if bytes == 0 || bytes > state.unconfirmed.len() {
            return Err(senseless("it confirms what it has not got"));
        }
        state.unconfirmed.drain(..bytes);
        self.changed.notify_all();
        Ok(())
    }

    /// Nobody reads it on the other side.
    ///
    /// # Errors
    /// That was said before.
    pub(super) fn refuse(&self) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.is_unwanted, true) {
            return Err(senseless("it closes a stream twice"));
        }
        self.changed.notify_all();
        Ok(())
    }

    /// The link is lost.
    pub(super) fn lose(&self) {
        self.state.lock().is_lost = true;
        self.changed.notify_all();
    }

    /// Whether nothing more comes.
    pub(super) fn has_ended(&self) -> bool {
        let state = self.state.lock();
        state.has_ended || state.is_unwanted
    }

    /// Passes on what comes from a descriptor that does not wait. Once the link is lost it goes to `kept`, with what
    /// was not confirmed before; where there is none this ends. It ends when nobody reads it on the other side.
    pub(super) fn run(&self, from: OwnedFd, link: Option<&Link>, kept: Option<Kept>) {
        let mut part = vec![0; MAX_PART];
        while let Some(room) = self.room() {
            match read(&from, &mut part[..room.min(MAX_PART)]) {
                Ok(None) => {}
                Ok(Some(len @ 1..)) => {
                    self.state.lock().unconfirmed.extend(&part[..len]);
                    let bytes = part[..len].to_vec();
                    self.say(link, &Message::Bytes { stream: self.stream, bytes });
                }
                Ok(Some(0)) | Err(_) => {
                    self.say(link, &Message::Closed { stream: self.stream });
                    self.state.lock().has_ended = true;
                }
            }
        }
        let (unconfirmed, has_ended) = self.wait();
        let Some(mut kept) = kept.filter(|_| self.state.lock().is_lost) else { return };
        kept.write(&unconfirmed);
        // Nobody has to be told from here on.
        while !has_ended && !self.state.lock().is_unwanted {
            match read(&from, &mut part) {
                Ok(None) => {}
                Ok(Some(len @ 1..)) => kept.write(&part[..len]),
                Ok(Some(0)) | Err(_) => break,
            }
        }
    }

    /// How much may be read, which is waited for. `None` if that is over.
    fn room(&self) -> Option<usize> {
        let mut state = self.state.lock();
        loop {
            if state.has_ended || state.is_unwanted || state.is_lost {
                return None;
            }
            match WINDOW - state.unconfirmed.len() {
                0 => self.changed.wait(&mut state),
                room => return Some(room),
            }
        }
    }

    /// Waits until all was confirmed, or will not be: gives what was not, and whether all has come.
    fn wait(&self) -> (Vec<u8>, bool) {
        let mut state = self.state.lock();
        while !(state.unconfirmed.is_empty() || state.is_unwanted || state.is_lost) {
            self.changed.wait(&mut state);
        }
        (state.unconfirmed.drain(..).collect(), state.has_ended)
    }

    fn say(&self, link: Option<&Link>, message: &Message) {
        // Whoever hears the link notices too, and says so to all.
        if link.is_none_or(|link| link.send(message).is_err()) {
            self.lose();
        }
    }
}

/// What comes from the other side goes to a descriptor.
pub(super) struct Taker {
    stream: u32,
    state: Mutex<Taking>,
    changed: Condvar,
}

#[derive(Default)]
struct Taking {
    queue: VecDeque<u8>,
    /// Bytes that came and were not confirmed.
    owed: usize,
    /// All has come.
    is_closed: bool,
    /// Nobody reads it, which the other side was told.
    is_unwanted: bool,
    /// All was written, or nobody reads it.
    is_done: bool,
    /// What is left is not to be written.
    is_over: bool,
}

impl Taker {
    pub(super) fn new(stream: u32) -> Self {
        Self { stream, state: Mutex::default(), changed: Condvar::new() }
    }

    /// So much has come.
    ///
    /// # Errors
    /// It is more than was asked for, or was to come.
    pub(super) fn take(&self, bytes: &[u8]) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        let owed = state.owed + bytes.len();
        if bytes.is_empty() || bytes.len() > MAX_PART || owed > WINDOW {
            return Err(senseless("it sends more of a stream than it may"));
        }
        if state.is_closed {
            return Err(senseless("it sends more of a stream that it has closed"));
        }
        state.owed = owed;
        // The other side may not have heard yet that nobody reads it.
        if !state.is_unwanted {
            state.queue.extend(bytes);
            self.changed.notify_all();
        }
        Ok(())
    }

    /// All has come.
    ///
    /// # Errors
    /// That was said before.
    pub(super) fn close(&self) -> Result<(), LinkError> {
        let mut state = self.state.lock();
        if std::mem::replace(&mut state.is_closed, true) {
            return Err(senseless("it closes a stream twice"));
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Whether all has come, or nobody reads it.
    pub(super) fn is_closed(&self) -> bool {
        let state = self.state.lock();
        state.is_closed || state.is_unwanted
    }

    /// Whether all that came was written, or nobody reads it.
    pub(super) fn is_done(&self) -> bool {
        self.state.lock().is_done
    }

    /// What is left is not to be written.
    pub(super) fn end(&self) {
        self.state.lock().is_over = true;
        self.changed.notify_all();
    }

    /// Nobody reads it.
    pub(super) fn give_up(&self, link: Option<&Link>) {
        let mut state = self.state.lock();
        state.queue.clear();
        (state.is_unwanted, state.is_done) = (true, true);
        drop(state);
        if let Some(link) = link {
            // Whoever hears the link notices if it is lost.
            let _ = link.send(&Message::Closed { stream: self.stream });
        }
    }

    /// Writes what comes to a descriptor that does not wait, and closes that when all was written.
    pub(super) fn run(&self, to: OwnedFd, link: Option<&Link>) {
        while let Some(part) = self.next() {
            match write(&to, &part) {
                Ok(None) => {}
                Ok(Some(len)) => self.confirm(len, link),
                Err(_) => return self.give_up(link),
            }
        }
    }

    /// The next bytes that are to be written, which are waited for; `None` if there are none.
    fn next(&self) -> Option<Vec<u8>> {
        let mut state = self.state.lock();
        loop {
            if state.is_over {
                return None;
            }
            if !state.queue.is_empty() {
                return Some(state.queue.iter().take(MAX_PART).copied().collect());
            }
            if state.is_closed {
                state.is_done = true;
                return None;
            }
            self.changed.wait(&mut state);
        }
    }

    fn confirm(&self, len: usize, link: Option<&Link>) {
        let mut state = self.state.lock();
        state.queue.drain(..len);
        state.owed -= len;
        drop(state);
        if let Some(link) = link {
            let taken = Message::Taken { stream: self.stream, bytes: len as u32 };
            let _ = link.send(&taken);
        }
    }
}

/// The other side does not keep to the protocol.
pub(super) fn senseless(what: &str) -> LinkError {
    LinkError::Protocol(what.to_owned())
}

/// Waits for a moment until something can be read, and reads it. `None` if nothing can.
fn read(from: &OwnedFd, into: &mut [u8]) -> io::Result<Option<usize>> {
    wait(from, PollFlags::IN)?;
    at_once(rustix::io::read(from, into))
}

/// The same for writing.
fn write(to: &OwnedFd, bytes: &[u8]) -> io::Result<Option<usize>> {
    wait(to, PollFlags::OUT)?;
    at_once(rustix::io::write(to, bytes))
}

fn at_once(done: rustix::io::Result<usize>) -> io::Result<Option<usize>> {
    match done {
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        done => Ok(Some(done?)),
    }
}

fn wait(fd: &OwnedFd, flags: PollFlags) -> io::Result<()> {
    let time = Timespec::try_from(LOOK).expect("it is short");
    let mut poll = [PollFd::from_borrowed_fd(fd.as_fd(), flags)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut poll, Some(&time)))?;
    Ok(())
}
