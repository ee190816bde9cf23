use std::collections::HashSet;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::*;
use crate::engine::error::Error;
use crate::engine::migrate::link::{Link, LinkError};
use crate::engine::migrate::message::{Frame, Message};
use crate::store::{ChunkId, Encoding, Entry};

const LONG: Duration = Duration::from_secs(60);

fn link(socket: UnixStream, silence: Duration) -> Arc<Link> {
    let reader = socket.try_clone().unwrap().into();
    Arc::new(Link::new(reader, socket.into(), silence, Arc::default()).unwrap())
}

fn links(silence: Duration) -> [Arc<Link>; 2] {
    let (a, b) = UnixStream::pair().unwrap();
    [link(a, silence), link(b, silence)]
}

/// Bytes that are told apart, and their frame.
fn chunk(number: u32) -> (ChunkId, Vec<u8>) {
    let bytes = number.to_le_bytes().repeat(1 + number as usize % 5000);
    let entry = Entry {
        id: ChunkId::of(&bytes),
        encoding: Encoding::Constant(0),
        pack: 0,
        offset: 0,
        stored_len: bytes.len() as u32,
        plain_len: bytes.len() as u32,
        check: 0,
    };
    (entry.id, Frame::of_chunk(&entry, &bytes))
}

/// What has come through a door.
#[derive(Default)]
struct Came {
    ids: Mutex<HashSet<ChunkId>>,
    failures: Mutex<Vec<String>>,
    is_over: AtomicBool,
}

impl Came {
    fn wait(&self, what: &str, holds: impl Fn() -> bool) {
        let until = Instant::now() + LONG;
        while !holds() {
            assert!(Instant::now() < until, "{what}: {:?}", self.failures.lock());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// A destination on this machine, while `source` is at work. Gives what has come.
fn with_door(count: u32, silence: Duration, source: impl FnOnce(&Arc<Link>, Way, &Came)) -> Came {
    let came = Came::default();
    let [here, there] = links(silence);
    let door = Door::open("127.0.0.1:0".parse().unwrap(), count).unwrap();
    let way = door.way().unwrap();
    let take = |entry: Entry, stored: Vec<u8>| {
        assert_eq!(ChunkId::of(&stored), entry.id);
        assert!(came.ids.lock().insert(entry.id), "twice");
        Ok(())
    };
    let fail = |error: Error| came.failures.lock().push(error.to_string());
    std::thread::scope(|scope| {
        scope.spawn(|| door.let_in(&there, &came.is_over, &take, &fail));
        // Whatever becomes of the source, the threads of the door end.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            source(&here, way, &came);
        }));
        came.is_over.store(true, Ordering::Release);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
    came
}

fn wanted(count: u32) -> Wanted {
    Wanted { count, host: "127.0.0.1".into() }
}

#[test]
fn what_is_given_to_streams_arrives_once_whoever_else_comes() {
    let expected: HashSet<ChunkId> = (0..500).map(|number| chunk(number).0).collect();
    let came = with_door(3, LONG, |link, way, came| {
        let port = way.port;
        let knock = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        // Some say nothing, some nonsense, and some have keys but no token.
        let silent: Vec<TcpStream> = (0..3).map(|_| knock()).collect();
        (0..3).for_each(|_| knock().write_all(&[7; 5000]).unwrap());
        let strange = Way { port, token: [1; 32], key: way.key.clone() };
        let short = Duration::from_millis(300);
        let [hasty, _other] = links(short);
        let refused = Streams::connect(&hasty, &wanted(1), &strange);
        assert!(matches!(refused, Err(LinkError::NoStream(..))));
        let streams = Streams::connect(link, &wanted(3), &way).unwrap();
        for number in 0..500 {
            streams.give(chunk(number).1).unwrap();
        }
        assert_eq!(streams.given(), 500);
        came.wait("all come", || came.ids.lock().len() == 500);
        drop(silent);
        assert!(came.failures.lock().is_empty(), "{:?}", came.failures.lock());
        came.is_over.store(true, Ordering::Release);
    });
    assert_eq!(*came.ids.lock(), expected);
    assert!(came.failures.lock().is_empty(), "{:?}", came.failures.lock());
}

#[test]
fn the_source_speaks_with_one_key_alone() {
    with_door(1, Duration::from_millis(500), |link, way, came| {
        let mut key = way.key.clone();
        *key.last_mut().unwrap() ^= 1;
        for key in [key, Vec::new()] {
            let other = Way { port: way.port, token: way.token, key };
            let refused = Streams::connect(link, &wanted(1), &other);
            let Err(LinkError::NoStream(_, why)) = refused else { panic!("another key") };
            assert!(why.contains("TLS"), "{why}");
        }
        assert!(came.failures.lock().is_empty(), "that is nothing to the destination");
    });
}

#[test]
fn more_than_there_are_to_be_are_sent_away() {
    with_door(1, Duration::from_millis(500), |link, way, came| {
        let streams = Streams::connect(link, &wanted(1), &way).unwrap();
        assert!(Streams::connect(link, &wanted(1), &way).is_err());
        streams.give(chunk(1).1).unwrap();
        came.wait("the first goes on", || came.ids.lock().len() == 1);
        came.is_over.store(true, Ordering::Release);
    });
}

/// Passes on what goes to a port, and back, until so many bytes have gone there. Gives its own port.
fn relay(port: u16, most: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((from, _)) = listener.accept() {
            let to = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let (mut back_from, mut back_to) = (to.try_clone().unwrap(), from.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = io::copy(&mut back_from, &mut back_to);
            });
            std::thread::spawn(move || {
                let _ = io::copy(&mut (&from).take(most as u64), &mut &to);
                let _ = from.shutdown(Shutdown::Both);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
    });
    own
}

#[test]
fn a_stream_that_is_lost_is_noticed_on_both_sides() {
    let came = with_door(2, LONG, |link, way, came| {
        let port = relay(way.port, 200_000);
        let streams = Streams::connect(link, &wanted(2), &Way { port, ..way }).unwrap();
        let until = Instant::now() + LONG;
        let mut number = 0;
        let lost = loop {
            assert!(Instant::now() < until);
            number += 1;
            match streams.give(chunk(number).1) {
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        let LinkError::Stream(lost) = lost else { panic!("{lost}") };
        assert!(matches!(*lost, LinkError::Closed), "{lost}");
        assert!(streams.has_failed());
        came.wait("it is told there", || !came.failures.lock().is_empty());
    });
    let failures = came.failures.lock();
    assert!(failures[0].contains("a stream was lost"), "{failures:?}");
}

#[test]
fn nothing_but_chunks_comes_on_a_stream() {
    let came = with_door(1, LONG, |link, way, came| {
        let streams = Streams::connect(link, &wanted(1), &way).unwrap();
        streams.give(Frame::of_message(&Message::Commit {}).unwrap()).unwrap();
        came.wait("it is refused", || !came.failures.lock().is_empty());
    });
    assert!(came.failures.lock()[0].contains("`commit` came where it makes no sense"));
    let came = with_door(1, LONG, |link, way, came| {
        let streams = Streams::connect(link, &wanted(1), &way).unwrap();
        streams.give(u32::MAX.to_le_bytes().to_vec()).unwrap();
        came.wait("it is refused", || !came.failures.lock().is_empty());
    });
    assert!(came.failures.lock()[0].contains("a frame is too long"));
}

#[test]
fn a_frame_that_does_not_come_to_its_end_is_not_waited_for() {
    let came = with_door(1, Duration::from_millis(500), |link, way, came| {
        let streams = Streams::connect(link, &wanted(1), &way).unwrap();
        let (_, frame) = chunk(9);
        streams.give(frame[..frame.len() - 1].to_vec()).unwrap();
        came.wait("it is given up", || !came.failures.lock().is_empty());
    });
    assert!(came.failures.lock()[0].contains("silent"), "{:?}", came.failures.lock());
}

#[test]
fn who_comes_in_numbers_is_sent_away_and_the_streams_come_all_the_same() {
    with_door(2, LONG, |link, way, came| {
        let crowd: Vec<TcpStream> =
            (0..200).map(|_| TcpStream::connect(("127.0.0.1", way.port)).unwrap()).collect();
        // As many as may wait do so until their time is over; then there is room again.
        let streams = Streams::connect(link, &wanted(2), &way).unwrap();
        streams.give(chunk(3).1).unwrap();
        came.wait("it comes", || came.ids.lock().len() == 1);
        drop(crowd);
        came.is_over.store(true, Ordering::Release);
    });
}

#[test]
fn so_many_streams_are_let_in_as_are_wanted_and_permitted() {
    let at = Some("127.0.0.1:0".parse().unwrap());
    let mut reasons = Vec::new();
    assert!(Door::for_offer(0, at, &mut reasons).unwrap().is_none());
    assert!(Door::for_offer(2, at, &mut reasons).unwrap().is_some());
    assert!(reasons.is_empty());
    assert!(Door::for_offer(2, None, &mut reasons).unwrap().is_none());
    assert!(reasons[0].contains("--streams-at"), "{reasons:?}");
    let nowhere = Some("192.0.2.1:1".parse().unwrap());
    assert!(Door::for_offer(2, nowhere, &mut reasons).unwrap().is_none());
    assert_eq!(reasons.len(), 2);
    assert!(Door::for_offer(MOST + 1, at, &mut reasons).is_err());
}
