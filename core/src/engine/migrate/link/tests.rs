//! Frames over a link that is slow, cut or silent.

use super::*;
use std::io::Write;
use std::os::unix::net::UnixStream;

fn link(socket: UnixStream, silence: Duration) -> Link {
    let reader = socket.try_clone().unwrap().into();
    Link::new(reader, socket.into(), silence, Arc::default()).unwrap()
}

/// Any message.
fn accept() -> Message {
    Message::Accept { there: Vec::new(), port: 0, token: [0; 32], key: Vec::new(), outputs: 0 }
}

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(60);

#[test]
fn what_happens_here_ends_the_wait_for_a_frame() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, LONG));
    let looks = AtomicU64::new(0);
    let happens = || looks.fetch_add(1, Ordering::Relaxed) == 2;
    assert!(a.receive_unless(&happens).unwrap().is_none(), "nothing had come");
    b.send(&Message::Alive {}).unwrap();
    assert!(a.receive_unless(&|| true).unwrap().is_none());
    b.send(&accept()).unwrap();
    let frame = a.receive_unless(&|| false).unwrap();
    assert_eq!(frame, Some(Frame::Message(accept())));
    let (a, _b) = UnixStream::pair().unwrap();
    assert!(matches!(link(a, SHORT).receive_unless(&|| false), Err(LinkError::Silent(_))));
}

#[test]
fn what_is_long_arrives_with_its_message() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, LONG));
    let bytes: Vec<u8> = (0..3 * MAX_PIECE + 5).map(|i| i as u8).collect();
    let expected = bytes.clone();
    let sending = std::thread::spawn(move || {
        a.send_long(&bytes).unwrap();
        a.send(&Message::Alive {}).unwrap();
        a.send(&accept()).unwrap();
        a
    });
    assert_eq!(b.receive_long(1 << 30).unwrap(), (expected, accept()));
    drop(sending.join().unwrap());
    assert!(matches!(b.receive(), Err(LinkError::Closed)));
}

/// Small frames, which go out together, and large ones, in their order.
#[test]
fn frames_come_whatever_is_read_ahead() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, LONG));
    let sizes = [1, STEP, 5, TOGETHER, 7, TOGETHER + 1, 9].repeat(20);
    let pieces: Vec<Vec<u8>> = sizes.iter().map(|size| vec![*size as u8; *size]).collect();
    let frames = pieces.iter().map(|piece| Frame::of_piece(piece)).collect::<Vec<_>>();
    let sending = std::thread::spawn(move || {
        a.write_all(&frames).unwrap();
        a.send(&accept()).unwrap();
        a.write_all(&frames).unwrap();
        a
    });
    for reads_ahead in [true, false] {
        b.read_ahead(reads_ahead);
        for piece in &pieces {
            assert_eq!(b.receive().unwrap(), Frame::Piece(piece.clone()));
        }
        if reads_ahead {
            assert_eq!(b.receive_message().unwrap(), accept());
        }
    }
    drop(sending.join().unwrap());
    assert!(matches!(b.receive(), Err(LinkError::Closed)));
}

#[test]
fn who_is_no_gpucr_is_told_apart_from_one_that_is_late() {
    let greet = |said: &[u8], ends: bool| {
        let (mut a, b) = UnixStream::pair().unwrap();
        let b = link(b, SHORT);
        a.write_all(said).unwrap();
        let _open = (!ends).then_some(a);
        b.receive_greeting(SHORT * 2)
    };
    assert!(matches!(greet(b"", true), Err(LinkError::Mute)));
    assert!(matches!(greet(b"", false), Err(LinkError::Silent(_))));
    let error = greet(b"Welcome to the machine\x1b\n", true).unwrap_err();
    assert!(error.to_string().ends_with(r"it said `Welcome to the machine\u{1b}`"), "{error}");
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, SHORT));
    let greeting = std::thread::spawn(move || b.receive_greeting(LONG));
    std::thread::sleep(SHORT * 2);
    a.send(&accept()).unwrap();
    assert_eq!(greeting.join().unwrap().unwrap(), accept());
}

#[test]
fn what_is_longer_than_it_may_be_is_refused() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, LONG));
    a.send_long(&[1; 100]).unwrap();
    assert!(matches!(b.receive_long(99), Err(LinkError::Protocol(_))));
    let (mut a, b) = UnixStream::pair().unwrap();
    let b = link(b, LONG);
    a.write_all(&u32::MAX.to_le_bytes()).unwrap();
    assert!(matches!(b.receive(), Err(LinkError::Protocol(_))), "no memory is taken for it");
}

#[test]
fn nobody_waits_for_one_that_is_silent_or_drips() {
    let (mut a, b) = UnixStream::pair().unwrap();
    let b = link(b, SHORT);
    assert!(matches!(b.receive(), Err(LinkError::Silent(_))));
    let over = Arc::new(AtomicBool::default());
    let until = over.clone();
    let dripping = std::thread::spawn(move || {
        a.write_all(&(1u32 << 20).to_le_bytes()).unwrap();
        while !until.load(Ordering::Relaxed) && a.write_all(&[0]).is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(matches!(b.receive(), Err(LinkError::Silent(_))));
    over.store(true, Ordering::Relaxed);
    dripping.join().unwrap();
}

#[test]
fn what_is_limited_takes_its_time_and_ends_early_all_the_same() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (link(a, LONG), link(b, LONG));
    a.set_bandwidth(10 << 20);
    let begun = Instant::now();
    let receiving = std::thread::spawn(move || while b.receive().is_ok() {});
    a.send_long(&vec![1; 4 << 20]).unwrap();
    assert!(begun.elapsed() > Duration::from_millis(380), "{:?}", begun.elapsed());
    a.limit(Some(SHORT));
    let sent = a.send_long(&vec![1; 64 << 20]);
    assert!(matches!(sent, Err(LinkError::TooLong(_))));
    drop(a);
    receiving.join().unwrap();
}

#[test]
fn who_takes_nothing_is_given_up_and_so_is_what_takes_too_long() {
    let (a, _b) = UnixStream::pair().unwrap();
    let a = link(a, SHORT);
    assert!(matches!(a.send_long(&vec![0; 64 << 20]), Err(LinkError::Silent(_))));
    let (a, _b) = UnixStream::pair().unwrap();
    let a = link(a, LONG);
    a.limit(Some(SHORT));
    assert!(matches!(a.receive(), Err(LinkError::TooLong(_))));
    a.limit(None);
    a.stop.store(true, Ordering::Relaxed);
    assert!(matches!(a.receive(), Err(LinkError::Interrupted)));
}

#[test]
fn signs_of_life_are_given_while_there_is_nothing_to_say() {
    let (a, b) = UnixStream::pair().unwrap();
    let (a, b) = (Arc::new(link(a, LONG / 100)), link(b, LONG));
    let pulse = Pulse::start(a.clone());
    let mut beat = vec![0; Frame::of_message(&Message::Alive {}).unwrap().len()];
    b.read(&mut b.reader.lock(), &mut beat, Instant::now()).unwrap();
    drop(pulse);
    a.send(&accept()).unwrap();
    assert_eq!(b.receive_message().unwrap(), accept());
}
