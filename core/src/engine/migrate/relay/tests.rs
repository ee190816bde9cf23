//! Both sides of a relay, and what may be between them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use proptest::prelude::*;
use rustix::pipe::{PipeFlags, pipe_with};

use super::ends::Ends;
use super::flow::{Giver, Taker, WINDOW};
use super::kept::Kept;
use super::serve::relay;
use super::*;
use crate::engine::migrate::link::{Link, LinkError, Pulse};
use crate::engine::migrate::message::MAX_PART;
use crate::engine::migrate::message::Message;
use crate::engine::restore::stdio::Found;

const LONG: Duration = Duration::from_secs(60);

fn link(socket: UnixStream, silence: Duration) -> Link {
    let reader = socket.try_clone().unwrap().into();
    Link::new(reader, socket.into(), silence, Arc::default()).unwrap()
}

/// A pipe: what is the program's, or somebody's outside, and what is the relay's. The relay's end does not wait.
fn pipe(number: usize, is_program: bool) -> (File, OwnedFd) {
    let (reading, writing) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let reads = (number == 0) == is_program;
    let (own, relayed) = if reads { (reading, writing) } else { (writing, reading) };
    rustix::io::ioctl_fionbio(&relayed, true).unwrap();
    (own.into(), relayed)
}

/// The destination, as a program sees it: its streams, and where it is said how it ends.
struct There {
    streams: [Option<File>; 3],
    events: Option<File>,
    control: UnixStream,
    folder: tempfile::TempDir,
    relay: JoinHandle<()>,
}

fn there(link: Option<Link>) -> There {
    let (mut streams, mut far) = ([None, None, None], [None, None, None, None]);
    for number in 0..3 {
        let (own, relayed) = pipe(number, true);
        (streams[number], far[number]) = (Some(own), Some(relayed));
    }
    let (events, said) = pipe_with(PipeFlags::CLOEXEC).unwrap();
    let (control, theirs) = UnixStream::pair().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_owned();
    let relay = std::thread::spawn(move || relay(link, far, events.into(), Some(&path), &theirs));
    There { streams, events: Some(said.into()), control, folder, relay }
}

impl There {
    /// The program ends in this way; its streams are closed.
    fn end(mut self, how: &str) -> tempfile::TempDir {
        self.streams = [None, None, None];
        let mut events = self.events.take().unwrap();
        writeln!(events, "{{\"event\": \"phase\"}}\n{{\"event\": \"ended\"{how}}}").unwrap();
        drop(events);
        self.relay.join().unwrap();
        self.folder
    }

    fn kept(folder: &tempfile::TempDir, name: &str) -> String {
        std::fs::read_to_string(folder.path().join(name)).unwrap_or_default()
    }
}

/// The source: the streams as who is outside of the program has them, and how it ends.
struct Here {
    streams: [Option<File>; 3],
    ended: JoinHandle<Result<ProgramEnd, LinkError>>,
}

fn here(link: Link) -> Here {
    let (mut streams, mut ends) = ([None, None, None], [None, None, None, None]);
    for number in 0..3 {
        let (own, relayed) = pipe(number, false);
        (streams[number], ends[number]) = (Some(own), Some(relayed));
    }
    let link = Arc::new(link);
    let pulse = Pulse::start(link.clone());
    let found = Found { pipes: [Some(1), Some(2), Some(3)], terminal: None };
    let relaying = Relaying::new(link, Ends::of(found, ends), pulse);
    Here { streams, ended: std::thread::spawn(move || relaying.run()) }
}

/// Both sides, connected.
fn both() -> (Here, There) {
    let (a, b) = UnixStream::pair().unwrap();
    (here(link(a, LONG)), there(Some(link(b, LONG))))
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|number| (number * number / 7) as u8).collect()
}

fn read_all(stream: &mut Option<File>) -> JoinHandle<Vec<u8>> {
    let mut stream = stream.take().unwrap();
    std::thread::spawn(move || {
        let mut all = Vec::new();
        stream.read_to_end(&mut all).unwrap();
        all
    })
}

#[test]
fn what_goes_in_comes_out_in_both_directions_and_so_does_the_end() {
    let (mut here, mut there) = both();
    let sent = bytes(3 * WINDOW + 17);
    let said = read_all(&mut here.streams[1]);
    let errors = read_all(&mut here.streams[2]);
    let heard = read_all(&mut there.streams[0]);
    let mut input = here.streams[0].take().unwrap();
    let to_write = sent.clone();
    let writing = std::thread::spawn(move || input.write_all(&to_write).unwrap());
    there.streams[1].as_mut().unwrap().write_all(&sent).unwrap();
    there.streams[2].as_mut().unwrap().write_all(b"error").unwrap();
    writing.join().unwrap();
    assert!(heard.join().unwrap() == sent, "its input ends where it does here");
    let folder = there.end(", \"exit_code\": 7");
    assert!(said.join().unwrap() == sent);
    assert_eq!(errors.join().unwrap(), b"error");
    assert!(matches!(here.ended.join().unwrap(), Ok(ProgramEnd::Code(7))));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "nothing has to be kept");
}

#[test]
fn how_a_program_ends_is_told() {
    let cases = [(", \"signal\": 9", ProgramEnd::Signal(9)), (", \"x\": 1", ProgramEnd::Unknown)];
    for (how, end) in cases {
        let (here, there) = both();
        there.end(how);
        assert_eq!(here.ended.join().unwrap().unwrap(), end);
    }
}

/// A pipe has 64 KiB; what is on its way is bounded on both sides besides.
#[test]
fn a_reader_who_does_not_read_holds_the_program_up() {
    let (mut here, mut there) = both();
    let mut output = there.streams[1].take().unwrap();
    rustix::io::ioctl_fionbio(&output, true).unwrap();
    let (part, mut written, mut idle) = (vec![1; 4096], 0, 0);
    while idle < 30 {
        match output.write(&part) {
            Ok(len) => (written, idle) = (written + len, 0),
            Err(_) => {
                idle += 1;
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
    assert!(written <= 2 * WINDOW, "{written} bytes are on their way");
    drop(output);
    let read = read_all(&mut here.streams[1]);
    there.end("");
    assert_eq!(read.join().unwrap().len(), written);
}

#[test]
fn a_reader_who_is_gone_is_gone_for_the_program_too() {
    let (mut here, mut there) = both();
    here.streams[1] = None;
    let mut output = there.streams[1].take().unwrap();
    let error = loop {
        if let Err(error) = output.write(b"more") {
            break error;
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    there.streams[0] = None;
    let mut input = here.streams[0].take().unwrap();
    let error = loop {
        if let Err(error) = input.write(b"more") {
            break error;
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe);
    there.end(", \"exit_code\": 0");
    assert!(matches!(here.ended.join().unwrap(), Ok(ProgramEnd::Code(0))));
}

/// Nobody reads at the source, so nothing was confirmed when the link is cut.
#[test]
fn what_was_not_confirmed_is_kept_when_the_link_is_lost_and_so_is_what_follows() {
    let (a, b) = UnixStream::pair().unwrap();
    let mut there = there(Some(link(b, LONG)));
    let output = there.streams[1].as_mut().unwrap();
    output.write_all(b"before ").unwrap();
    let a = link(a, LONG);
    let came = loop {
        match a.receive_message().unwrap() {
            Message::Alive {} => {}
            Message::Bytes { stream: 1, bytes } => break bytes,
            other => panic!("{}", other.name()),
        }
    };
    a.send(&Message::Taken { stream: 1, bytes: 2 }).unwrap();
    drop(a);
    let mut said = [0];
    there.control.read_exact(&mut said).unwrap();
    output.write_all(b"after").unwrap();
    let folder = there.end(", \"signal\": 15");
    assert_eq!(came, b"before ");
    assert_eq!(There::kept(&folder, "stdout"), "fore after", "two bytes were confirmed");
    assert_eq!(There::kept(&folder, "stderr"), "");
    assert_eq!(There::kept(&folder, "end"), "{\"signal\":15}\n");
}

#[test]
fn without_a_link_all_is_kept() {
    let mut there = there(None);
    there.streams[2].as_mut().unwrap().write_all(b"error").unwrap();
    let folder = there.end(", \"exit_code\": 3");
    assert_eq!(There::kept(&folder, "stderr"), "error");
    assert_eq!(There::kept(&folder, "end"), "{\"exit_code\":3}\n");
}

/// What is kept is bounded: the last of it, and the part before that.
#[test]
fn the_last_of_what_comes_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut kept = Kept::new(Some(folder.path()), "stdout").with_most(4);
    for part in ["0123", "4567", "89"] {
        kept.write(part.as_bytes());
    }
    assert_eq!(There::kept(&folder, "stdout"), "89");
    assert_eq!(There::kept(&folder, "stdout.old"), "4567");
}

/// What a destination may not say.
#[test]
fn a_source_takes_nothing_that_makes_no_sense() {
    let part = |stream, len| Message::Bytes { stream, bytes: vec![0; len] };
    let ended = |is_known, signal, code| Message::Ended { is_known, signal, code };
    let closed = |stream| Message::Closed { stream };
    let cases = [
        vec![part(0, 1)],
        vec![part(3, 1)],
        vec![part(1, 0)],
        vec![part(1, MAX_PART + 1)],
        vec![closed(1), part(1, 1)],
        vec![closed(1), closed(1)],
        vec![closed(3)],
        vec![closed(0), closed(0)],
        vec![Message::Taken { stream: 0, bytes: 1 }],
        vec![Message::Taken { stream: 1, bytes: 1 }],
        vec![ended(true, 0, 0)],
        vec![closed(1), closed(2), ended(true, 0, 256)],
        vec![closed(1), closed(2), ended(true, 128, 0)],
        vec![closed(1), closed(2), ended(true, 9, 9)],
        vec![closed(1), closed(2), ended(false, 0, 1)],
        vec![Message::Heard {}],
        vec![Message::Commit {}],
        // Nobody reads, so nothing is confirmed.
        vec![part(1, MAX_PART); 2 * WINDOW / MAX_PART],
    ];
    for case in cases {
        let (a, b) = UnixStream::pair().unwrap();
        let here = here(link(a, LONG));
        let b = link(b, LONG);
        // It may have had enough before all was said.
        let said = case.iter().try_for_each(|message| b.send(message));
        let told = format!("{:?}", case.iter().map(Message::name).collect::<Vec<_>>());
        let ended = here.ended.join().unwrap();
        assert!(matches!(ended, Err(LinkError::Protocol(_))), "{told}: {ended:?} {said:?}");
    }
}

/// What a source may not say: the program goes on, and what it writes is kept.
#[test]
fn a_destination_takes_nothing_that_makes_no_sense() {
    let part = |stream, len| Message::Bytes { stream, bytes: vec![0; len] };
    let closed = |stream| Message::Closed { stream };
    let taken = |stream, bytes| Message::Taken { stream, bytes };
    let cases = [
        vec![part(1, 1)],
        vec![part(0, 0)],
        vec![part(0, MAX_PART); 2 * WINDOW / MAX_PART],
        vec![closed(0), part(0, 1)],
        vec![closed(0), closed(0)],
        vec![closed(1), closed(1)],
        vec![closed(7)],
        vec![taken(1, 1)],
        vec![taken(2, 0)],
        vec![taken(0, 1)],
        vec![Message::Heard {}],
        vec![Message::Ended { is_known: true, signal: 0, code: 0 }],
    ];
    for case in cases {
        let (a, b) = UnixStream::pair().unwrap();
        let mut there = there(Some(link(b, LONG)));
        let a = link(a, LONG);
        let _ = case.iter().try_for_each(|message| a.send(message));
        let mut said = [0];
        there.control.read_exact(&mut said).unwrap();
        let told = format!("{:?}", case.iter().map(Message::name).collect::<Vec<_>>());
        there.streams[2].as_mut().unwrap().write_all(b"on").expect(&told);
        let folder = there.end(", \"exit_code\": 0");
        assert_eq!(There::kept(&folder, "stderr"), "on", "{told}");
    }
}

#[test]
fn a_side_that_says_nothing_is_lost() {
    let short = Duration::from_millis(200);
    let (a, _b) = UnixStream::pair().unwrap();
    assert!(matches!(here(link(a, short)).ended.join().unwrap(), Err(LinkError::Silent(_))));
    let (_a, b) = UnixStream::pair().unwrap();
    let mut there = there(Some(link(b, short)));
    let mut said = [0];
    there.control.read_exact(&mut said).unwrap();
    there.streams[1].as_mut().unwrap().write_all(b"on").unwrap();
    assert_eq!(There::kept(&there.end(""), "stdout"), "on");
}

proptest! {
    /// However the other side mixes what it says of a stream, no more is taken than may be on its way.
    #[test]
    fn no_more_is_owed_than_may_be_on_its_way(
        steps in proptest::collection::vec((0..4u8, 0..2 * MAX_PART as u32), 0..60)
    ) {
        let (giver, taker) = (Giver::new(1), Taker::new(1));
        let mut came = 0;
        for (kind, count) in steps {
            let count = count as usize;
            let _ = match kind {
                0 | 1 => taker.take(&vec![0; count]).inspect(|()| came += count),
                2 => taker.close(),
                _ => giver.confirm(count as u32),
            };
            prop_assert!(came <= WINDOW);
            prop_assert!(!giver.has_ended());
        }
    }
}
