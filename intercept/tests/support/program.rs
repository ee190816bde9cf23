//! What the program does.

use std::collections::BTreeMap;
use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use super::support::{Library, say};

pub(crate) const SMALL: u64 = 10_000;
const MIB: u64 = 1 << 20;
/// Size and content of the large allocations.
pub(crate) const LARGE: [(u64, u32); 3] =
    [(3 * MIB, 0xaaaa_0003), (20 * MIB, 0xbbbb_0014), (MIB, 7)];

struct State {
    cuda: Arc<Library>,
    context: u64,
    stop: Arc<AtomicBool>,
    busy: Vec<JoinHandle<Result<u64, String>>>,
    /// Where what ought to be: words, and how many.
    content: BTreeMap<u64, (u32, u64)>,
    /// Small allocations that are not looked into.
    rest: Vec<u64>,
    stream: u64,
}

pub(crate) fn run() {
    let cuda = Library::open("libcuda.so.1");
    cuda.must("cuInit", &[0]);
    let mut context = 0u64;
    cuda.must("cuDevicePrimaryCtxRetain", &[&raw mut context as u64, 0]);
    cuda.must("cuCtxSetCurrent", &[context]);
    let mut stream = 0u64;
    cuda.must("cuStreamCreate", &[&raw mut stream as u64, 1]);
    let mut state = State {
        cuda: Arc::new(cuda),
        context,
        stop: Arc::default(),
        busy: Vec::new(),
        content: BTreeMap::new(),
        rest: Vec::new(),
        stream,
    };
    state.set_up();
    say("ready");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("a line");
        state.obey(&line);
    }
    std::process::exit(0);
}

/// Whether one of this process's sockets is that of an agent.
fn holds_agent_socket() -> bool {
    let sockets = std::fs::read_to_string("/proc/net/unix").expect("readable");
    let agents: Vec<String> = sockets
        .lines()
        .filter(|line| line.contains("@gpucr-agent-"))
        .filter_map(|line| Some(format!("socket:[{}]", line.split_whitespace().nth(6)?)))
        .collect();
    std::fs::read_dir("/proc/self/fd")
        .expect("readable")
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok())
        .any(|link| agents.iter().any(|agent| link.as_os_str() == agent.as_str()))
}

/// Makes, fills, checks and frees memory of many sizes until it is told to stop.
fn work(cuda: &Library, context: u64, number: u32, stop: &AtomicBool) -> Result<u64, String> {
    cuda.must("cuCtxSetCurrent", &[context]);
    let mut rounds = 0;
    let mut held: Vec<(u64, u64, u32)> = Vec::new();
    while !stop.load(Ordering::SeqCst) || !held.is_empty() {
        if held.len() == 8 || stop.load(Ordering::SeqCst) {
            let (address, words, word) = held.remove(rounds as usize % held.len());
            let mut host = vec![0u32; words as usize];
            cuda.must("cuMemcpyDtoH_v2", &[host.as_mut_ptr() as u64, address, words * 4]);
            if host.iter().any(|found| *found != word) {
                return Err(format!("{address:#x} has changed"));
            }
            cuda.must("cuMemFree_v2", &[address]);
        } else {
            let (mut address, words) = (0u64, 64 << (rounds % 14));
            let word = number << 24 | rounds as u32;
            cuda.must("cuMemAlloc_v2", &[&raw mut address as u64, words * 4]);
            cuda.must("cuMemsetD32_v2", &[address, u64::from(word), words]);
            held.push((address, words, word));
        }
        rounds += 1;
    }
    Ok(rounds)
}

impl State {
    fn allocate(&self, size: u64) -> u64 {
        let mut address = 0u64;
        self.cuda.must("cuMemAlloc_v2", &[&raw mut address as u64, size]);
        address
    }

    fn fill(&mut self, address: u64, word: u32, words: u64) {
        self.cuda.must("cuMemsetD32_v2", &[address, u64::from(word), words]);
        self.content.insert(address, (word, words));
    }

    fn set_up(&mut self) {
        for i in 0..SMALL {
            let address = self.allocate(1024);
            if i % 100 == 0 {
                self.fill(address, i as u32, 256);
            } else {
                self.rest.push(address);
            }
        }
        for (size, word) in LARGE {
            let address = self.allocate(size);
            self.fill(address, word, size / 4);
        }
        let mut pinned = 0u64;
        self.cuda.must("cuMemHostAlloc", &[&raw mut pinned as u64, MIB, 0]);
        self.own_blocks();
    }

    /// One block at two addresses, and one that has no handle any more.
    fn own_blocks(&mut self) {
        // CUmemAllocationProp: pinned, no handle types, on device 0.
        let prop: [u32; 8] = [1, 0, 1, 0, 0, 0, 0, 0];
        let access: [u32; 3] = [1, 0, 3];
        let mut base = 0u64;
        self.cuda.must("cuMemAddressReserve", &[&raw mut base as u64, 16 * MIB, 0, 0, 0]);
        let (mut twice, mut once) = (0u64, 0u64);
        for handle in [&raw mut twice, &raw mut once] {
            let prop = prop.as_ptr() as u64;
            self.cuda.must("cuMemCreate", &[handle as u64, 2 * MIB, prop, 0]);
        }
        let mut seen = [0u32; 8];
        let seen_at = seen.as_mut_ptr() as u64;
        self.cuda.must("cuMemGetAllocationPropertiesFromHandle", &[seen_at, twice]);
        assert_eq!(seen[1], 0, "the shim's own handle type shows");
        for (offset, handle) in [(0, twice), (4, twice), (6, once)] {
            let address = base + offset * MIB;
            self.cuda.must("cuMemMap", &[address, 2 * MIB, 0, handle, 0]);
            self.cuda.must("cuMemSetAccess", &[address, 2 * MIB, access.as_ptr() as u64, 1]);
        }
        self.cuda.must("cuMemRelease", &[once]);
        self.fill(base, 0x1111_2222, MIB / 2);
        self.content.insert(base + 4 * MIB, (0x1111_2222, MIB / 2));
        self.fill(base + 6 * MIB, 0x3333_4444, MIB / 2);
    }

    fn check(&self) -> Result<(), String> {
        for (address, (word, words)) in &self.content {
            let mut host = vec![0u32; *words as usize];
            self.cuda.must("cuMemcpyDtoH_v2", &[host.as_mut_ptr() as u64, *address, words * 4]);
            if let Some(at) = host.iter().position(|found| found != word) {
                return Err(format!("{address:#x}+{at}: {:#x} is not {word:#x}", host[at]));
            }
        }
        Ok(())
    }

    fn obey(&mut self, command: &str) {
        match command {
            "check" => match self.check() {
                Ok(()) => say("as it was"),
                Err(error) => say(&error),
            },
            "memset" => {
                let address = *self.content.keys().next().expect("an address");
                self.fill(address, 4711, 256);
                say("set");
            }
            "questions" => say(&self.questions()),
            "block" => {
                // The device waits until the first word of the first address is 1.
                let address = *self.content.keys().next().expect("an address");
                self.fill(address, 0, 256);
                self.cuda.must("cuStreamWaitValue32_v2", &[self.stream, address, 1, 1]);
                say("blocked");
            }
            "unblock" => {
                let address = *self.content.keys().next().expect("an address");
                self.cuda.must("cuMemsetD32_v2", &[address, 1, 256]);
                self.content.insert(address, (1, 256));
                self.cuda.must("cuStreamSynchronize", &[self.stream]);
                say("unblocked");
            }
            "free" => {
                for address in self.rest.drain(..) {
                    self.cuda.must("cuMemFree_v2", &[address]);
                }
                for address in self.content.keys().copied().collect::<Vec<_>>() {
                    // What the program mapped itself is not freed like this.
                    if self.cuda.call("cuMemFree_v2", &[address]) == 0 {
                        self.content.remove(&address);
                    }
                }
                say(&format!("{} left", self.content.len()));
            }
            "busy" => {
                for number in 1..4 {
                    let (cuda, stop) = (Arc::clone(&self.cuda), Arc::clone(&self.stop));
                    let context = self.context;
                    self.busy.push(thread::spawn(move || work(&cuda, context, number, &stop)));
                }
                say("busy");
            }
            "rest" => {
                self.stop.store(true, Ordering::SeqCst);
                let rounds: Result<Vec<u64>, String> =
                    self.busy.drain(..).map(|thread| thread.join().expect("joined")).collect();
                match rounds {
                    Ok(rounds) => say(&rounds.iter().sum::<u64>().to_string()),
                    Err(error) => say(&error),
                }
            }
            "starve" => {
                // Gives memory back and asks for more than there is.
                let mut all = self.content.iter();
                let (&address, _) =
                    all.find(|(_, (word, _))| *word == LARGE[1].1).expect("the largest");
                self.content.remove(&address);
                self.cuda.must("cuMemFree_v2", &[address]);
                say("starving");
                let mut out = 0u64;
                let code = self.cuda.call("cuMemAlloc_v2", &[&raw mut out as u64, 1 << 50]);
                say(&format!("error {code}"));
            }
            "fork" => {
                assert!(holds_agent_socket(), "there is an agent");
                // SAFETY: the child does little, and ends without running anything of ours.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    let mut version = 0u64;
                    let code = self.cuda.call("cuDriverGetVersion", &[&raw mut version as u64]);
                    // A driver may also say that it is not initialised (3) after a fork.
                    let alive = (code == 0 || code == 3) && !holds_agent_socket();
                    // SAFETY: nothing is to be cleaned up.
                    unsafe { libc::_exit(if alive { 0 } else { 1 }) };
                }
                let mut status = 0;
                // SAFETY: writes the status.
                unsafe { libc::waitpid(child, &mut status, 0) };
                say(&format!("child {status}"));
            }
            other => panic!("what is {other}?"),
        }
    }

    /// Asks what programs ask about pointers.
    fn questions(&self) -> String {
        let address = self.allocate(5 * MIB + 12);
        let inside = address + 4 * MIB;
        let (mut base, mut size) = (0u64, 0u64);
        let out = [&raw mut base as u64, &raw mut size as u64];
        self.cuda.must("cuMemGetAddressRange_v2", &[out[0], out[1], inside]);
        assert_eq!((base, size), (address, 5 * MIB + 12));
        self.cuda.must("cuPointerGetAttribute", &[out[0], 11, inside]);
        self.cuda.must("cuPointerGetAttribute", &[out[1], 12, inside]);
        assert_eq!((base, size), (address, 5 * MIB + 12));
        let mut handle = 0u64;
        assert_ne!(
            self.cuda.call("cuMemRetainAllocationHandle", &[&raw mut handle as u64, address]),
            0,
            "the heap's blocks have no handle for the program"
        );
        let mut ipc = [0u64; 8];
        self.cuda.must("cuIpcGetMemHandle", &[ipc.as_mut_ptr() as u64, inside]);
        assert_eq!(self.cuda.call("cuIpcGetMemHandle", &[0, address]), 1);
        assert_eq!(self.cuda.call("cuMemFree_v2", &[inside]), 1);
        assert_eq!(self.cuda.call("cuMemUnmap", &[address, 6 * MIB]), 1);
        self.cuda.must("cuMemFree_v2", &[address]);
        assert_ne!(self.cuda.call("cuMemFree_v2", &[address]), 0, "freed twice");
        assert_ne!(self.cuda.call("cuMemAlloc_v2", &[out[0], 0]), 0, "nothing was asked for");
        assert_eq!(self.cuda.call("cuMemAlloc_v2", &[out[0], 1 << 50]), 2, "out of memory");
        let mut pitch = 0u64;
        self.cuda.must("cuMemAllocPitch_v2", &[out[0], &raw mut pitch as u64, 1000, 10, 4]);
        assert_eq!(pitch, 1024);
        self.cuda.must("cuMemFree_v2", &[base]);
        // The resolver gives out our functions, and the driver's where we have none.
        let shim = self.cuda.symbol("cuMemAlloc_v2") as u64;
        let mut found = 0u64;
        let mut ask = |name: &std::ffi::CStr| {
            let arguments = [name.as_ptr() as u64, &raw mut found as u64, 12000, 0, 0];
            self.cuda.must("cuGetProcAddress_v2", &arguments);
            found
        };
        assert_eq!(ask(c"cuMemAlloc"), shim);
        assert_eq!(ask(c"cuLaunchKernel"), self.cuda.symbol("cuLaunchKernel") as u64);
        assert_ne!(ask(c"cuDriverGetVersion"), self.cuda.symbol("cuDriverGetVersion") as u64);
        assert_eq!(ask(c"cuGetProcAddress"), self.cuda.symbol("cuGetProcAddress_v2") as u64);
        "answered".into()
    }
}
