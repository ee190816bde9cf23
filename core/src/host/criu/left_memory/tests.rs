//! Memory that CRIU leaves in a real process. They need root.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::*;
use crate::host::criu::tests::{criu, restore, wait_status};
use crate::host::criu::{Criu, DumpOptions, RestoreOptions, pages};

const DIR: &str = "GPUCR_TEST_MEMORY_DIR";
const LIMIT: Duration = Duration::from_secs(60);
const PAGE: usize = 4096;
/// Pages of the program's memory, in blocks of 64.
const PAGES: usize = 96 * 64;

/// What is done with a block of the program's memory.
#[derive(Clone, Copy, PartialEq)]
enum Block {
    Filled,
    /// Every other page is filled.
    Striped,
    Zeros,
    Untouched,
    /// Filled, and then nobody may read it.
    Guarded,
}

fn block(number: usize) -> Block {
    use Block::*;
    [Filled, Striped, Zeros, Untouched, Guarded, Filled, Filled, Filled][number % 8]
}

fn word(page: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// What the first bytes of a page are.
fn expected(page: usize) -> u64 {
    match block(page / 64) {
        Block::Zeros | Block::Untouched => 0,
        Block::Striped if page % 2 == 1 => 0,
        _ => word(page),
    }
}

/// Not a test: the program that is dumped. Ends with 7 if its memory is as it was, once a file `stop` appears.
#[test]
#[ignore = "a program that the other tests run in a process of its own"]
fn memory_program() {
    let Some(dir) = std::env::var_os(DIR).map(PathBuf::from) else { return };
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, anywhere.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * PAGE, access, flags, -1, 0) };
    let memory: *mut u64 = memory.cast();
    let place = |page: usize| memory.wrapping_add(page * PAGE / 8);
    let guard = |access| {
        for number in (0..PAGES / 64).filter(|number| block(*number) == Block::Guarded) {
            // SAFETY: the block lies within the mapping, and nothing refers to it.
            let changed = unsafe { libc::mprotect(place(number * 64).cast(), 64 * PAGE, access) };
            assert_eq!(changed, 0);
        }
    };
    for page in (0..PAGES).filter(|page| block(page / 64) != Block::Untouched) {
        if block(page / 64) != Block::Striped || page % 2 == 0 {
            // SAFETY: within the mapping, which can be written.
            unsafe { place(page).write_volatile(expected(page)) };
        }
    }
    guard(libc::PROT_NONE);
    fs::write(dir.join("ready"), "").unwrap();
    while !dir.join("stop").exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    guard(libc::PROT_READ);
    // SAFETY: within the mapping, which can be read.
    let is_right = (0..PAGES).all(|page| unsafe { place(page).read_volatile() } == expected(page));
    std::process::exit(if is_right { 7 } else { 8 });
}

/// The program, stopped with its memory written.
struct Stopped {
    dir: tempfile::TempDir,
    child: Child,
}

impl Stopped {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let name = "host::criu::left_memory::tests::memory_program";
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", name, "--ignored", "--nocapture"]).env(DIR, dir.path());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        // The kernel writes the number of the CPU into the memory of each thread (rseq(2)), so there is one only.
        let mut cpu = CpuSet::new();
        cpu.set(rustix::thread::sched_getcpu());
        let prepare = move || {
            rustix::process::setsid()?;
            Ok(sched_setaffinity(None, &cpu)?)
        };
        // SAFETY: both are plain system calls, allowed between fork and exec.
        unsafe { command.pre_exec(prepare) };
        let program = Self { child: command.spawn().unwrap(), dir };
        let start = Instant::now();
        while !program.dir.path().join("ready").exists() {
            assert!(start.elapsed() < LIMIT, "it does not get ready");
            std::thread::sleep(Duration::from_millis(2));
        }
        program.signal(Signal::STOP);
        program
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).unwrap();
        let _ = kill_process(pid, signal);
    }

    /// Dumps it and lets it go on; `read` is called while it is frozen.
    fn dump(
        &self,
        criu: &Criu,
        leave_memory: bool,
        read: &mut dyn FnMut(&Path),
    ) -> tempfile::TempDir {
        let images = tempfile::tempdir().unwrap();
        let dir = File::open(images.path()).unwrap();
        let mut options = DumpOptions::new(self.child.id(), dir.as_fd());
        (options.leave_running, options.leave_memory) = (true, leave_memory);
        let callback = &mut || {
            read(images.path());
            Ok::<(), String>(())
        };
        criu.dump(&options, callback).unwrap();
        images
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        let _ = self.child.wait();
    }
}

fn never() -> Arc<AtomicBool> {
    Arc::default()
}

/// Reads what is left and puts it in the place of CRIU's files, in pieces that meet the parts anywhere.
fn write_left(images: &Path) {
    let dir = File::open(images).unwrap();
    let left = LeftMemory::of(dir.as_fd(), &never()).unwrap();
    let mut files = 0;
    for contents in left.files() {
        let mut bytes = vec![0; contents.size() as usize];
        let mut at = 0;
        for piece in bytes.chunks_mut(70_001) {
            contents.read_exact_at(piece, at).unwrap();
            at += piece.len() as u64;
        }
        assert!(contents.read_exact_at(&mut [0], contents.size()).is_err());
        fs::write(images.join(contents.name()), bytes).unwrap();
        files += 1;
    }
    assert_eq!(files, 1);
}

/// The bytes of the private memory of a process in CRIU's files, by their addresses.
fn private(images: &Path, pid: u32) -> BTreeMap<u64, Vec<u8>> {
    let dir = File::open(images).unwrap();
    pages::mark(dir.as_fd(), pid as i32).unwrap();
    let mut file = None;
    let found = pages::private(dir.as_fd(), pid as i32, &mut |name| {
        let opened = pages::open_pages(dir.as_fd(), name)?;
        Ok(file.insert(opened).metadata()?.len())
    });
    let (found, file) = (found.unwrap().unwrap(), file.unwrap());
    let mut all = BTreeMap::new();
    for extent in found.extents {
        for done in (0..extent.len).step_by(PAGE) {
            let mut page = vec![0; PAGE];
            file.read_exact_at(&mut page, extent.at + done).unwrap();
            all.insert(extent.to + done, page);
        }
    }
    all
}

#[test]
fn what_is_left_and_read_is_what_criu_writes() {
    let Some(criu) = criu() else { return };
    let program = Stopped::start();
    let pid = program.child.id();
    let written = program.dump(&criu, false, &mut |_| {});
    let mut listed = 0;
    let left = program.dump(&criu, true, &mut |images| {
        let pages = fs::read_dir(images).unwrap().map(|entry| entry.unwrap());
        let is_pages = |name: &str| name.starts_with("pages-") && name != "pages-shmem";
        let pages = pages.filter(|entry| is_pages(&entry.file_name().to_string_lossy()));
        listed = pages.map(|entry| entry.metadata().unwrap().len()).sum();
        write_left(images);
    });
    assert!(listed < (PAGES / 2 * PAGE) as u64, "CRIU has written {listed} bytes itself");
    let (written, read) = (private(written.path(), pid), private(left.path(), pid));
    assert!(read.len() > PAGES / 2);
    let differ = written.iter().filter(|(at, page)| read.get(at) != Some(page)).map(|(at, _)| at);
    let differ: Vec<String> = differ.map(|at| format!("{at:x}")).collect();
    assert!(differ.is_empty() && written.len() == read.len(), "{differ:?}");

    // It is restored from there, stopped.
    drop(program.dir.path().join("ready"));
    program.signal(Signal::KILL);
    let Stopped { dir, child } = &program;
    wait_status(child.id());
    let images = File::open(left.path()).unwrap();
    let mut options = RestoreOptions::new(images.as_fd());
    options.rst_sibling = true;
    assert_eq!(restore(&criu, options, Vec::new(), false).unwrap(), pid);
    fs::write(dir.path().join("stop"), "").unwrap();
    program.signal(Signal::CONT);
    assert_eq!(wait_status(pid).code(), Some(7));
}

#[test]
fn a_callback_that_fails_leaves_a_program_with_its_memory() {
    let Some(criu) = criu() else { return };
    let mut program = Stopped::start();
    let images = tempfile::tempdir().unwrap();
    let dir = File::open(images.path()).unwrap();
    let mut options = DumpOptions::new(program.child.id(), dir.as_fd());
    options.leave_memory = true;
    assert!(criu.dump(&options, &mut || Err("no")).is_err());
    fs::write(program.dir.path().join("stop"), "").unwrap();
    program.signal(Signal::CONT);
    assert_eq!(program.child.wait().unwrap().code(), Some(7));
}

#[test]
fn reading_ends_when_it_is_to_end() {
    let Some(criu) = criu() else { return };
    let program = Stopped::start();
    program.dump(&criu, true, &mut |images| {
        let stop = never();
        let left = LeftMemory::of(File::open(images).unwrap().as_fd(), &stop).unwrap();
        let contents = left.files().next().unwrap();
        contents.read_exact_at(&mut [0; 100], 0).unwrap();
        stop.store(true, Ordering::Relaxed);
        let error = contents.read_exact_at(&mut [0; 100], 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Interrupted);
    });
}

#[test]
fn a_process_that_nobody_has_frozen_is_refused() {
    let error = frozen(std::process::id() as i32).err().unwrap();
    assert!(error.to_string().contains("is not frozen"), "{error}");
}
