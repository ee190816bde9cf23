//! A relay between both sides of a migration: what they say goes through it late, and at a moment that a test chooses
//! something is lost, or a side is killed.
//!
//! The link goes through it frame by frame, the streams byte by byte: the destination's port for them is another one
//! in what the source hears.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Result;

use crate::migration::{Pair, connect};
use crate::random::Random;

/// Kinds of messages have numbers below these, which are those of chunks and pieces.
pub const CHUNK: u64 = 256;
/// The same of pieces.
pub const PIECE: u64 = 257;
/// The message that says where streams go.
const ACCEPT: u64 = 2;
/// How often it is looked whether it is over.
const LOOK: Duration = Duration::from_millis(5);
/// Most bytes of a stream that go on at a time.
const PART: usize = 1 << 16;

/// What becomes of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// It is closed.
    Cut,
    /// Nothing goes in either direction any more, and nobody is told.
    Silence,
    /// Nothing goes in this direction any more.
    HalfOpen,
    /// It stands still for so many milliseconds.
    Stall(u64),
    /// The source is killed so many milliseconds later.
    KillSource(u64),
    /// The destination is killed so many milliseconds later.
    KillDestination(u64),
}

/// When that happens to the link: in one of its frames.
#[derive(Debug, Clone, Copy)]
pub struct OnLink {
    /// What happens.
    pub loss: Loss,
    /// In what the source says, or else the destination.
    pub of_source: bool,
    /// In a frame of this kind.
    pub kind: u64,
    /// The how many-th, from 0.
    pub number: u64,
    /// After so many thousandths of it.
    pub after: u64,
}

/// When that happens to streams.
#[derive(Debug, Clone, Copy)]
pub struct OnStreams {
    /// What happens.
    pub loss: Loss,
    /// To all of them, or only to the one that has come so far.
    pub is_all: bool,
    /// The one that has to have come so far, by the order in which they came; whichever is first if it is `None`.
    pub number: Option<usize>,
    /// In what the source says, or else the destination.
    pub of_source: bool,
    /// After so many bytes of what it says, or at once if it has said more.
    pub after: u64,
}

/// What is to happen, and how slow everything is.
#[derive(Debug, Clone, Copy, Default)]
pub struct Plan {
    /// To the link.
    pub link: Option<OnLink>,
    /// To streams.
    pub streams: Option<OnStreams>,
    /// The longest pause before a frame or a part of a stream goes on, in microseconds.
    pub pause: u64,
    /// What does not go on is taken all the same, as by a network that buffers much.
    pub swallows: bool,
}

/// A connection that goes through the relay: the end towards the source and that towards the destination.
struct Line {
    ends: [File; 2],
    /// What comes from that end does not go on any more.
    is_silent: [AtomicBool; 2],
}

impl Line {
    fn new(source: impl Into<OwnedFd>, destination: impl Into<OwnedFd>) -> Self {
        let ends = [File::from(source.into()), File::from(destination.into())];
        Self { ends, is_silent: Default::default() }
    }

    fn is_silent(&self, from: usize) -> bool {
        self.is_silent[from].load(Ordering::Acquire)
    }

    fn cut(&self) {
        for end in &self.ends {
            let _ = rustix::net::shutdown(end, rustix::net::Shutdown::Both);
        }
    }

    /// Nothing more comes from this end, or nothing more is taken at the other one. What is under way in the other
    /// direction goes on.
    fn close(&self, from: usize) {
        // Where nothing goes on, nobody hears of an end either.
        if !self.is_silent(from) {
            let _ = rustix::net::shutdown(&self.ends[from], rustix::net::Shutdown::Read);
            let _ = rustix::net::shutdown(&self.ends[1 - from], rustix::net::Shutdown::Write);
        }
    }
}

/// What all threads of a relay know.
struct Shared {
    plan: Plan,
    is_over: AtomicBool,
    link: Arc<Line>,
    streams: Mutex<Vec<Arc<Line>>>,
    /// What is to happen to streams.
    on_streams: Mutex<Option<OnStreams>>,
    /// The process of each side, once that is known.
    pids: [AtomicU32; 2],
    /// Whether it has happened.
    has_happened: AtomicBool,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The relay. It ends with this.
pub struct Relay {
    shared: Arc<Shared>,
    /// The source's end of the link, up to its start.
    source: Option<UnixStream>,
}

impl Relay {
    /// Has the two sides of a pair talk through a relay. `random` is for the pauses.
    ///
    /// # Errors
    /// There are too few descriptors.
    pub fn between(pair: &mut Pair, plan: Plan, random: &mut Random) -> Result<Self> {
        let (to_source, source) = UnixStream::pair()?;
        let to_destination = pair.sockets[0].try_clone()?;
        connect(&mut pair.source, &source);
        let shared = Arc::new(Shared {
            plan,
            is_over: AtomicBool::default(),
            link: Arc::new(Line::new(to_source, to_destination)),
            streams: Mutex::default(),
            on_streams: Mutex::new(plan.streams),
            pids: Default::default(),
            has_happened: AtomicBool::default(),
            threads: Mutex::default(),
        });
        for of_source in [true, false] {
            let mut random = Random(random.below(u64::MAX));
            shared.spawn(move |shared| shared.pass_link(of_source, &mut random));
        }
        Ok(Self { shared, source: Some(source) })
    }

    /// Both sides have been started, as these processes.
    pub fn started(&mut self, source: u32, destination: u32) {
        self.source = None;
        self.shared.pids[0].store(source, Ordering::Release);
        self.shared.pids[1].store(destination, Ordering::Release);
    }

    /// Whether what was planned has happened.
    pub fn has_happened(&self) -> bool {
        self.shared.has_happened.load(Ordering::Acquire)
    }

    /// How many streams have come.
    pub fn streams(&self) -> usize {
        self.shared.streams().len()
    }

    /// Has this happen to streams, in the place of what was planned.
    pub fn plan_streams(&self, plan: OnStreams) {
        *self.shared.on_streams.lock().expect("no panic") = Some(plan);
    }

    /// Cuts streams now: all, or the first.
    pub fn cut_streams(&self, is_all: bool) {
        let streams = self.shared.streams();
        let lines = streams.into_iter().take(if is_all { usize::MAX } else { 1 });
        self.shared.lose(Loss::Cut, 0, lines);
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.link.cut();
        // A stream may be coming still.
        loop {
            self.shared.streams().iter().for_each(|line| line.cut());
            let Some(thread) = self.shared.threads.lock().expect("no panic").pop() else { return };
            if thread.is_finished() {
                thread.join().expect("no panic");
            } else {
                self.shared.threads.lock().expect("no panic").insert(0, thread);
                std::thread::sleep(LOOK);
            }
        }
    }
}

impl Shared {
    fn spawn(self: &Arc<Self>, work: impl FnOnce(&Arc<Self>) + Send + 'static) {
        let shared = self.clone();
        let thread = std::thread::spawn(move || work(&shared));
        self.threads.lock().expect("no panic").push(thread);
    }

    fn streams(&self) -> Vec<Arc<Line>> {
        self.streams.lock().expect("no panic").clone()
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    fn pause(&self, random: &mut Random) {
        std::thread::sleep(Duration::from_micros(random.below(self.plan.pause)));
    }

    /// Passes on what one side says over the link, until there is no more.
    fn pass_link(self: &Arc<Self>, of_source: bool, random: &mut Random) {
        let _ = self.pass_frames(of_source, random);
        self.link.close(usize::from(!of_source));
    }

    fn pass_frames(self: &Arc<Self>, of_source: bool, random: &mut Random) -> io::Result<()> {
        let [number, other] = [usize::from(!of_source), usize::from(of_source)];
        let (mut from, mut to) = (&self.link.ends[number], &self.link.ends[other]);
        let plan = self.plan.link.filter(|plan| plan.of_source == of_source);
        let mut seen = 0;
        loop {
            let mut frame = next_frame(&mut from)?;
            self.pause(random);
            if self.link.is_silent(number) {
                return self.swallow(from);
            }
            if !of_source && kind(&frame) == ACCEPT {
                self.open_door(&mut frame)?;
            }
            let is_kind = plan.is_some_and(|plan| plan.kind == kind(&frame));
            seen += u64::from(is_kind);
            let Some(plan) = plan.filter(|plan| is_kind && seen == plan.number + 1) else {
                to.write_all(&frame)?;
                continue;
            };
            let (before, rest) = frame.split_at(frame.len() * plan.after as usize / 1000);
            to.write_all(before)?;
            self.lose(plan.loss, number, [self.link.clone()]);
            match plan.loss {
                Loss::Cut => return Ok(()),
                Loss::Silence | Loss::HalfOpen => return self.swallow(from),
                Loss::Stall(_) | Loss::KillSource(_) | Loss::KillDestination(_) => {
                    to.write_all(rest)?;
                }
            }
        }
    }

    /// What happens to connections, in what comes from this end, or to a side. Whoever calls stands still where the
    /// connection does.
    fn lose(self: &Arc<Self>, loss: Loss, from: usize, lines: impl IntoIterator<Item = Arc<Line>>) {
        let silence = |silent: &AtomicBool| silent.store(true, Ordering::Release);
        match loss {
            Loss::Cut => lines.into_iter().for_each(|line| line.cut()),
            Loss::Silence => {
                lines.into_iter().for_each(|line| line.is_silent.iter().for_each(silence));
            }
            Loss::HalfOpen => lines.into_iter().for_each(|line| silence(&line.is_silent[from])),
            Loss::Stall(pause) => self.wait(pause),
            Loss::KillSource(later) => self.kill(0, later),
            Loss::KillDestination(later) => self.kill(1, later),
        }
        self.has_happened.store(true, Ordering::Release);
    }

    fn wait(&self, milliseconds: u64) {
        for _ in 0..milliseconds.div_ceil(LOOK.as_millis() as u64) {
            if !self.is_over() {
                std::thread::sleep(LOOK);
            }
        }
    }

    fn kill(self: &Arc<Self>, side: usize, later: u64) {
        self.spawn(move |shared| {
            shared.wait(later);
            while !shared.is_over() {
                let pid = shared.pids[side].load(Ordering::Acquire);
                if let Some(process) = rustix::process::Pid::from_raw(pid as i32) {
                    // It may have ended by itself.
                    let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
                    return;
                }
                std::thread::sleep(LOOK);
            }
        });
    }

    /// Lets nothing on of what comes, up to the end.
    fn swallow(&self, mut from: &File) -> io::Result<()> {
        while self.plan.swallows && from.read(&mut [0; PART])? > 0 {}
        while !self.is_over() {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Has the streams come to this relay: changes the port in what the destination says.
    fn open_door(self: &Arc<Self>, accept: &mut [u8]) -> io::Result<()> {
        // Of each file whether it is there, by their number; then the port.
        let files = u32::from_le_bytes(accept[6..10].try_into().expect("4 bytes"));
        let at = 10 + files as usize;
        let port = u32::from_le_bytes(accept[at..at + 4].try_into().expect("4 bytes"));
        if port == 0 {
            return Ok(());
        }
        let door = TcpListener::bind("127.0.0.1:0")?;
        door.set_nonblocking(true)?;
        let own = u32::from(door.local_addr()?.port());
        accept[at..at + 4].copy_from_slice(&own.to_le_bytes());
        let mut random = Random(u64::from(port));
        self.spawn(move |shared| {
            while !shared.is_over() {
                match door.accept() {
                    Ok((stream, _)) => shared.pass_stream(stream, port as u16, &mut random),
                    Err(_) => std::thread::sleep(LOOK),
                }
            }
        });
        Ok(())
    }

    fn pass_stream(self: &Arc<Self>, source: TcpStream, port: u16, random: &mut Random) {
        let Ok(destination) = TcpStream::connect(("127.0.0.1", port)) else {
            let _ = source.shutdown(Shutdown::Both);
            return;
        };
        for end in [&source, &destination] {
            end.set_nonblocking(false).expect("it is a socket");
            end.set_nodelay(true).expect("it is one of TCP");
        }
        let line = Arc::new(Line::new(source, destination));
        let number = {
            let mut streams = self.streams.lock().expect("no panic");
            streams.push(line.clone());
            streams.len() - 1
        };
        for of_source in [true, false] {
            let (line, mut random) = (line.clone(), Random(random.below(u64::MAX)));
            self.spawn(move |shared| {
                let _ = shared.pass_parts(&line, number, of_source, &mut random);
                line.close(usize::from(!of_source));
            });
        }
    }

    fn pass_parts(
        self: &Arc<Self>,
        line: &Arc<Line>,
        number: usize,
        of_source: bool,
        random: &mut Random,
    ) -> io::Result<()> {
        let [end, other] = [usize::from(!of_source), usize::from(of_source)];
        let (mut from, mut to) = (&line.ends[end], &line.ends[other]);
        let (mut part, mut passed) = (vec![0; PART], 0);
        loop {
            let len = from.read(&mut part)?;
            if len == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.pause(random);
            if line.is_silent(end) {
                return self.swallow(from);
            }
            let is_due = |plan: &mut OnStreams| {
                let is_its = plan.number.is_none_or(|its| its == number);
                is_its && plan.of_source == of_source && passed + len as u64 > plan.after
            };
            let due = self.on_streams.lock().expect("no panic").take_if(is_due);
            let Some(due) = due else {
                passed += len as u64;
                to.write_all(&part[..len])?;
                continue;
            };
            let before = due.after.saturating_sub(passed) as usize;
            passed += len as u64;
            to.write_all(&part[..before])?;
            let lines = if due.is_all { self.streams() } else { vec![line.clone()] };
            self.lose(due.loss, end, lines);
            match due.loss {
                Loss::Cut => return Ok(()),
                Loss::Silence | Loss::HalfOpen => return self.swallow(from),
                Loss::Stall(_) | Loss::KillSource(_) | Loss::KillDestination(_) => {
                    to.write_all(&part[before..len])?;
                }
            }
        }
    }
}

/// A whole frame, with its length.
fn next_frame(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut frame = vec![0; 4];
    from.read_exact(&mut frame)?;
    let len = u32::from_le_bytes([frame[0], frame[1], frame[2], frame[3]]);
    frame.resize(4 + len as usize, 0);
    from.read_exact(&mut frame[4..])?;
    Ok(frame)
}

fn kind(frame: &[u8]) -> u64 {
    match frame[4] {
        0 => u64::from(frame[5]),
        1 => PIECE,
        _ => CHUNK,
    }
}
