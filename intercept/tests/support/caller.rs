//! A program whose threads make the calls of the driver that the test tells them to, one after the other.

use std::collections::{HashMap, VecDeque};
use std::io::BufRead;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use super::support::{Library, Program, say};

/// Words in the program's memory for what calls read and write.
const WORDS: usize = 1 << 10;

/// Such a program, as the test sees it.
pub(crate) struct Caller {
    pub(crate) program: Program,
    words: u64,
    answers: HashMap<u32, VecDeque<u64>>,
}

impl Caller {
    /// Starts it with more in its environment. The primary context of device 0 is current on all of its
    /// threads.
    pub(crate) fn start_with(environment: &[(&str, &str)]) -> Self {
        Self::of(Program::start_with(environment))
    }

    /// The same without the shim.
    #[allow(dead_code)]
    pub(crate) fn start_natively() -> Self {
        Self::start_natively_with(&[])
    }

    /// The same with more in its environment.
    #[allow(dead_code)]
    pub(crate) fn start_natively_with(environment: &[(&str, &str)]) -> Self {
        Self::of(Program::start_natively(environment))
    }

    fn of(program: Program) -> Self {
        let words = program.line(20_000).and_then(|line| line.parse().ok()).expect("an address");
        Self { program, words, answers: HashMap::new() }
    }

    #[allow(dead_code)]
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// The address of a word in the program's memory.
    pub(crate) fn at(&self, word: usize) -> u64 {
        assert!(word < WORDS);
        self.words + 8 * word as u64
    }

    /// Has a thread, which begins with its first call, call a function.
    pub(crate) fn begin(&mut self, thread: u32, function: &str, arguments: &[u64]) {
        let arguments: String = arguments.iter().map(|argument| format!(" {argument}")).collect();
        self.program.tell(&format!("{thread} {function}{arguments}"));
    }

    /// The next answer of a thread, if it comes within so many milliseconds: what its function gave back.
    pub(crate) fn answer(&mut self, thread: u32, ms: u64) -> Option<u64> {
        loop {
            if let Some(answer) = self.answers.entry(thread).or_default().pop_front() {
                return Some(answer);
            }
            let line = self.program.line(ms)?;
            let (from, answer) = line.split_once(' ').expect("thread and answer");
            let from = from.parse().expect("a thread");
            self.answers.entry(from).or_default().push_back(answer.parse().expect("a number"));
        }
    }

    /// Has a thread call a function, and waits for what it gives back.
    pub(crate) fn call_on(&mut self, thread: u32, function: &str, arguments: &[u64]) -> u64 {
        self.begin(thread, function, arguments);
        self.answer(thread, 20_000).unwrap_or_else(|| panic!("no answer to {function}"))
    }

    pub(crate) fn call(&mut self, function: &str, arguments: &[u64]) -> u64 {
        self.call_on(0, function, arguments)
    }

    /// Calls a function that has to succeed.
    pub(crate) fn must(&mut self, function: &str, arguments: &[u64]) {
        assert_eq!(self.call(function, arguments), 0, "{function} {arguments:x?}");
    }

    /// Calls a function that writes to its first argument, and gives what it has written.
    pub(crate) fn made(&mut self, function: &str, arguments: &[u64]) -> u64 {
        let out = self.at(WORDS - 1);
        self.poke(WORDS - 1, 0);
        self.must(function, &[&[out], arguments].concat());
        self.peek(WORDS - 1)
    }

    /// The code that a function gives which would write to its first argument; [`Self::written`] is what it wrote.
    #[allow(dead_code)]
    pub(crate) fn code(&mut self, function: &str, arguments: &[u64]) -> u64 {
        let out = self.at(WORDS - 1);
        self.call(function, &[&[out], arguments].concat())
    }

    #[allow(dead_code)]
    pub(crate) fn written(&mut self) -> u64 {
        self.peek(WORDS - 1)
    }

    pub(crate) fn peek(&mut self, word: usize) -> u64 {
        let address = self.at(word);
        self.call("peek", &[address])
    }

    pub(crate) fn poke(&mut self, word: usize, value: u64) {
        let address = self.at(word);
        self.call("poke", &[address, value]);
    }
}

/// What the program does.
pub(crate) fn run() {
    let cuda = Arc::new(Library::open("libcuda.so.1"));
    cuda.must("cuInit", &[0]);
    let mut context = 0u64;
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    let words: &'static mut [u64] = Vec::leak(vec![0; WORDS]);
    say("ready");
    say(&(words.as_ptr() as u64).to_string());
    let mut threads: HashMap<u32, Sender<(String, Vec<u64>)>> = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        let mut parts = line.split(' ');
        let thread = parts.next().and_then(|part| part.parse().ok()).expect("a thread");
        let function = parts.next().expect("a function").to_owned();
        let arguments = parts.map(|part| part.parse().expect("a number")).collect();
        let commands = threads.entry(thread).or_insert_with(|| {
            let (commands, told) = channel::<(String, Vec<u64>)>();
            let cuda = Arc::clone(&cuda);
            thread::spawn(move || {
                cuda.must("cuCtxSetCurrent", &[context]);
                for (function, arguments) in told {
                    let answer = obey(&cuda, &function, &arguments);
                    say(&format!("{thread} {answer}"));
                }
            });
            commands
        });
        commands.send((function, arguments)).expect("the thread lives");
    }
    std::process::exit(0);
}

fn obey(cuda: &Library, function: &str, arguments: &[u64]) -> u64 {
    match (function, arguments) {
        // SAFETY: the test names words of `run`.
        ("peek", [address]) => unsafe { (*address as *const u64).read() },
        ("poke", [address, value]) => {
            // SAFETY: the test names words of `run`.
            unsafe { (*address as *mut u64).write(*value) };
            0
        }
        // A descriptor of another process, as if that had sent it.
        ("take", [pid, fd]) => {
            let path = format!("/proc/{pid}/fd/{fd}");
            let taken = std::fs::File::options().read(true).write(true).open(path);
            taken.map_or(u64::MAX, |file| file.into_raw_fd() as u64)
        }
        // Another file under the number of a descriptor.
        ("replace", [fd]) => {
            let file = std::fs::File::open("/dev/null").expect("it is there");
            // SAFETY: the test names a descriptor that nothing but the library uses.
            unsafe { libc::dup2(file.as_raw_fd(), *fd as i32) as u64 }
        }
        _ => cuda.call(function, arguments).into(),
    }
}
