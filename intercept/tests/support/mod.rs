//! A program that runs behind the shim on the software driver, and a checkpointer's side of the
//! conversation with its agent.
//!
//! The program is this test binary itself, started again with an environment variable; it takes
//! commands from standard input.

// Each test uses a part of it.
#![allow(dead_code)]

use std::ffi::{CString, c_void};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use gpucr_wire::{Block, Connection, Counts, Hello, PROTOCOL_VERSION, Reply, Request};

/// Makes the test binary the program.
pub(crate) const ENV_PROGRAM: &str = "GPUCR_TEST_PROGRAM";

/// The folder of what cargo has built.
fn built() -> PathBuf {
    let exe = std::env::current_exe().expect("this test has a file");
    exe.ancestors().nth(2).expect("target/PROFILE/deps/TEST").to_path_buf()
}

/// The shim, as built together with this test.
pub(crate) fn shim() -> PathBuf {
    built().join("deps").join("libgpucr_intercept.so")
}

/// The software driver, as built together with this test.
pub(crate) fn softcuda() -> PathBuf {
    built().join("deps").join("libsoftcuda.so")
}

/// The driver that the tests run on: the software driver, or the one that `GPUCR_TEST_DRIVER`
/// names (an absolute path), for a machine with a GPU.
pub(crate) fn driver() -> PathBuf {
    std::env::var_os("GPUCR_TEST_DRIVER").map_or_else(softcuda, PathBuf::from)
}

/// Whether the file descriptors of blocks are plain memory.
pub(crate) fn is_soft() -> bool {
    std::env::var_os("GPUCR_TEST_DRIVER").is_none()
}

/// What the program says to the test, which takes it from among what libtest prints.
pub(crate) fn say(text: &str) {
    println!("@{text}");
    std::io::stdout().flush().expect("written");
}

/// A file in memory that nobody can change any more.
pub(crate) fn sealed(bytes: &[u8]) -> OwnedFd {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
    let fd = memfd_create(c"sealed", MemfdFlags::ALLOW_SEALING).expect("made");
    assert_eq!(rustix::io::pwrite(&fd, bytes, 0), Ok(bytes.len()));
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    fcntl_add_seals(&fd, seals).expect("sealed");
    fd
}

/// A library and its functions.
pub(crate) struct Library(*mut c_void);

// SAFETY: the handle is only passed to dlsym, which any thread may call.
unsafe impl Send for Library {}
// SAFETY: dlsym may be called with the handle by several threads at once.
unsafe impl Sync for Library {}

impl Library {
    pub(crate) fn open(path: &str) -> Self {
        let name = CString::new(path).expect("no NUL");
        // SAFETY: the name ends with a NUL.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path} cannot be opened");
        Self(handle)
    }

    pub(crate) fn symbol(&self, name: &str) -> *mut c_void {
        let c = CString::new(name).expect("no NUL");
        // SAFETY: the handle is open and the name ends with a NUL.
        let address = unsafe { libc::dlsym(self.0, c.as_ptr()) };
        assert!(!address.is_null(), "{name} is missing");
        address
    }

    /// Calls a function that takes up to fourteen integers.
    pub(crate) fn call(&self, name: &str, arguments: &[u64]) -> u32 {
        #[rustfmt::skip]
        type Function = unsafe extern "C" fn(
            u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64,
        ) -> u32;
        let mut a = [0; 14];
        a[..arguments.len()].copy_from_slice(arguments);
        // SAFETY: a function of the driver that takes integers; more of them than it takes are
        // left where it does not look. Pointers among them are the caller's duty.
        unsafe {
            let function: Function = std::mem::transmute(self.symbol(name));
            function(
                a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                a[13],
            )
        }
    }

    /// Calls a function, which has to succeed.
    pub(crate) fn must(&self, name: &str, arguments: &[u64]) {
        assert_eq!(self.call(name, arguments), 0, "{name} {arguments:x?}");
    }
}

/// A program behind the shim.
pub(crate) struct Program {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    _libraries: tempfile::TempDir,
}

impl Program {
    /// Starts it, and waits until it is ready.
    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// Starts the program with more in its environment.
    pub(crate) fn start_with(environment: &[(&str, &str)]) -> Self {
        Self::start_behind(&shim(), environment)
    }

    /// Starts the program on the driver alone.
    pub(crate) fn start_natively(environment: &[(&str, &str)]) -> Self {
        Self::start_behind(&driver(), environment)
    }

    fn start_behind(library: &std::path::Path, environment: &[(&str, &str)]) -> Self {
        let libraries = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(library, libraries.path().join("libcuda.so.1")).expect("a link");
        let mut child = Command::new(std::env::current_exe().expect("this test has a file"))
            .args(["program", "--exact", "--nocapture", "--test-threads=1"])
            .env(ENV_PROGRAM, "1")
            .env("LD_LIBRARY_PATH", libraries.path())
            .env(gpucr_wire::ENV_DRIVER, driver())
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                // The test harness prints too, on the same line at times.
                if let Some((_, line)) = line.split_once('@')
                    && sender.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let stdin = child.stdin.take().expect("piped");
        let program = Self { child, stdin, lines, _libraries: libraries };
        assert_eq!(program.line(20_000).as_deref(), Some("ready"));
        program
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line, if one comes within so many milliseconds.
    pub(crate) fn line(&self, ms: u64) -> Option<String> {
        self.lines.recv_timeout(Duration::from_millis(ms)).ok()
    }

    pub(crate) fn tell(&mut self, command: &str) {
        writeln!(self.stdin, "{command}").expect("the program listens");
    }

    /// Gives a command, and expects its answer.
    pub(crate) fn ask(&mut self, command: &str) -> String {
        self.tell(command);
        self.line(20_000).unwrap_or_else(|| panic!("no answer to {command}"))
    }

    /// Connects to the agent and says hello.
    pub(crate) fn agent(&self) -> (Agent, Hello) {
        let name = {
            let namespace = gpucr_wire::pid_namespace(self.pid()).expect("it runs");
            gpucr_wire::agent_socket(namespace, self.pid())
        };
        gpucr_wire::wake_agent(self.pid());
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut connection = loop {
            match Connection::connect(&name, Some(deadline), None) {
                Ok(connection) => break connection,
                Err(error) => assert!(Instant::now() < deadline, "no agent: {error}"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        // How long all that is asked takes is the machine's; the runner ends a test that hangs.
        connection.set_deadline(None);
        let mut agent = Agent(connection);
        match agent.ask(&Request::Hello { protocol: PROTOCOL_VERSION }) {
            Reply::Hello { hello } => (agent, hello),
            other => panic!("no hello: {other:?}"),
        }
    }

    /// The lowest file descriptor that it does not have.
    pub(crate) fn lowest_free_descriptor(&self) -> u32 {
        let numbers: std::collections::BTreeSet<u32> =
            std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
                .expect("it runs")
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
                .collect();
        (0..).find(|n| !numbers.contains(n)).expect("a number")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A connection to an agent.
pub(crate) struct Agent(pub(crate) Connection);

impl Agent {
    pub(crate) fn ask(&mut self, request: &Request) -> Reply {
        self.0.send(request).expect("sent");
        self.0.receive().expect("a reply")
    }

    /// A request that is to be carried out.
    pub(crate) fn must(&mut self, request: &Request) {
        let reply = self.ask(request);
        assert_eq!(reply, Reply::Done {}, "to {request:?}");
    }

    /// A request that is to fail; gives the message.
    pub(crate) fn fails(&mut self, request: &Request) -> String {
        match self.ask(request) {
            Reply::Failed { message, .. } => message,
            other => panic!("{request:?} should fail: {other:?}"),
        }
    }

    pub(crate) fn counts(&mut self) -> Counts {
        match self.ask(&Request::Counts {}) {
            Reply::Counts { counts } => counts,
            other => panic!("no counts: {other:?}"),
        }
    }

    pub(crate) fn export(&mut self) -> (Vec<Block>, Vec<OwnedFd>) {
        let (blocks, fds) = self.export_but(&[]);
        assert_eq!(blocks.len(), fds.len());
        (blocks, fds)
    }

    /// All blocks, and the file descriptors of those that are not known.
    pub(crate) fn export_but(&mut self, known: &[u64]) -> (Vec<Block>, Vec<OwnedFd>) {
        match self.ask(&Request::Export { known: known.to_vec() }) {
            Reply::Blocks { blocks } => {
                let new = blocks.iter().filter(|block| !known.contains(&block.id)).count();
                let fds = self.0.receive_fds(new).expect("file descriptors");
                (blocks, fds)
            }
            other => panic!("no blocks: {other:?}"),
        }
    }

    pub(crate) fn reattach(&mut self, blocks: &[Block], fds: &[OwnedFd]) -> Reply {
        let ids = blocks.iter().map(|block| block.id).collect();
        self.0.send(&Request::Reattach { blocks: ids }).expect("sent");
        self.0.send_fds(fds).expect("sent");
        self.0.receive().expect("a reply")
    }

    /// Takes the memory away and puts it back, as a dump does that leaves the program running.
    pub(crate) fn cycle(mut self, program: &Program) -> Self {
        self.must(&Request::CloseGate { timeout_ms: 20_000 });
        self.turn(program)
    }

    /// The same from where the gate is closed.
    pub(crate) fn turn(mut self, program: &Program) -> Self {
        let (blocks, fds) = self.export();
        self.must(&Request::Detach {});
        let (mut agent, _) = program.agent();
        assert_eq!(agent.reattach(&blocks, &fds), Reply::Done {});
        agent.must(&Request::OpenGate {});
        agent
    }

    /// Hands a chunk table over.
    pub(crate) fn guard(&mut self, request: &Request, table: &OwnedFd) -> Reply {
        self.0.send(request).expect("sent");
        self.0.send_fds(&[table]).expect("sent");
        self.0.receive().expect("a reply")
    }

    /// Asks for a userfaultfd; the kernel may refuse one.
    pub(crate) fn track(&mut self) -> Result<OwnedFd, String> {
        self.0.send(&Request::Track {}).expect("sent");
        match self.0.receive().expect("a reply") {
            Reply::Failed { message, .. } => Err(message),
            reply => {
                assert_eq!(reply, Reply::Done {});
                Ok(self.0.receive_fds(1).expect("received").remove(0))
            }
        }
    }

    pub(crate) fn stage(&mut self, fd: &OwnedFd, len: u64) {
        self.0.send(&Request::Stage { len }).expect("sent");
        self.0.send_fds(&[fd]).expect("sent");
        assert_eq!(self.0.receive::<Reply>().expect("a reply"), Reply::Done {});
    }

    /// The agent closes the connection by itself.
    pub(crate) fn closes(mut self) -> bool {
        self.0.set_deadline(Some(Instant::now() + Duration::from_secs(60)));
        self.0
            .receive::<Reply>()
            .is_err_and(|error| error.kind() == std::io::ErrorKind::UnexpectedEof)
    }
}

/// The driver's checkpoint of another process.
pub(crate) fn checkpoint(pid: u32, functions: &[&str]) {
    let driver = Library::open(driver().to_str().expect("a plain path"));
    driver.must("cuInit", &[0]);
    for function in functions {
        let zero = [0u64; 8];
        driver.must(
            &format!("cuCheckpointProcess{function}"),
            &[u64::from(pid), zero.as_ptr() as u64],
        );
    }
}
