//! Host memory that is mapped, moved, hidden, and written in every way there is: by the program, by the device, by
//! another process, by direct input. Not by io_uring, with which CRIU dumps no program.

use std::ffi::c_void;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::ptr;

use anyhow::{Context as _, Result, ensure};

use crate::cuda::{check, driver};
use crate::gpu::{Buffer, Gpu, fill_at};
use crate::numbers::{Sequence, mix};
use crate::pinned::Pinned;
use crate::report::Run;

const PAGE: usize = 4096;
/// Most and fewest areas, and the pages of the largest.
const MOST: usize = 40;
const FEWEST: usize = 8;
const PAGES: u32 = 64;
/// What is done in each step.
const CHANGES: u32 = 6;
/// Pages that are read past the page cache at a time, and the file that they are read from, in the working directory.
const DIRECT: usize = 4;
const FILE: &str = "host-memory.data";
/// Pages of pinned memory, of memory shared with the other process, and of a memfd.
const OTHERS: usize = 16;
/// Pages of memory that is to be made of large pages, which have 512 of these.
const LARGE: usize = 3 * 512;
/// If this is set memory is touched before a guard is made of it. On demand, a program that makes a guard of what has not
/// come, and soon removes it, is restored again with all of its memory (docs/design.md).
const TOUCHES: &str = "WORKLOAD_TOUCHES_BEFORE_GUARD";
/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of Linux 6.13, and `MADV_COLLAPSE` of 6.1.
const GUARD: i32 = 102;
const UNGUARD: i32 = 103;
const COLLAPSE: i32 = 25;

/// Private memory.
struct Area {
    at: *mut u8,
    pages: usize,
    hidden: Option<Hidden>,
    is_locked: bool,
}

/// Pages that nobody may read now, from the first to the one behind the last.
#[derive(Clone, Copy)]
enum Hidden {
    /// What is in them is still there.
    Protected(usize, usize),
    /// By the kernel's own mark, without a mapping of their own.
    Guarded(usize, usize),
}

/// New memory at an address that the kernel chooses.
fn map(pages: usize, access: i32, flags: i32, fd: i32) -> Result<*mut u8> {
    // SAFETY: a new mapping, in nobody's place.
    let at = unsafe { libc::mmap(ptr::null_mut(), pages * PAGE, access, flags, fd, 0) };
    ensure!(at != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
    Ok(at.cast())
}

fn done(call: &str, result: i64) -> Result<usize> {
    usize::try_from(result).with_context(|| format!("{call}: {}", std::io::Error::last_os_error()))
}

const ACCESS: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

impl Area {
    fn new(pages: usize) -> Result<Self> {
        let at = map(pages, ACCESS, PRIVATE, -1)?;
        Ok(Self { at, pages, hidden: None, is_locked: false })
    }

    fn page(&self, page: usize) -> *mut u8 {
        assert!(page <= self.pages, "a page of the area");
        self.at.wrapping_add(page * PAGE)
    }

    /// All of it. Nothing of it may be hidden.
    fn words(&mut self) -> &mut [u32] {
        assert!(self.hidden.is_none(), "it would be a fault");
        // SAFETY: the area is mapped for as long as `self` lives, and belongs to it alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.pages * PAGE / 4) }
    }

    /// Some of its pages.
    fn some(&self, random: &mut Sequence) -> (usize, usize) {
        let first = random.below(self.pages as u32) as usize;
        (first, first + 1 + random.below((self.pages - first) as u32) as usize)
    }

    fn protect(&self, (first, end): (usize, usize), access: i32) -> Result<()> {
        // SAFETY: pages of the area, to which nobody has a reference.
        let result =
            unsafe { libc::mprotect(self.page(first).cast(), (end - first) * PAGE, access) };
        done("mprotect", result.into()).map(drop)
    }

    /// Gives advice on some pages. `false` if the kernel does not take it.
    fn advise(&mut self, (first, end): (usize, usize), advice: i32) -> bool {
        // SAFETY: pages of the area, to which nobody has a reference. What the advice does to them is as if the area
        // had been written.
        unsafe { libc::madvise(self.page(first).cast(), (end - first) * PAGE, advice) == 0 }
    }

    /// Makes all of it readable again.
    fn reveal(&mut self) -> Result<()> {
        match self.hidden.take() {
            None => Ok(()),
            Some(Hidden::Protected(first, end)) => self.protect((first, end), ACCESS),
            Some(Hidden::Guarded(first, end)) => {
                ensure!(self.advise((first, end), UNGUARD), "the guard stays");
                Ok(())
            }
        }
    }

    /// Changes its size, where it is or elsewhere.
    fn resize(&mut self, pages: usize) -> Result<()> {
        if self.move_to(pages, libc::MREMAP_MAYMOVE, ptr::null_mut()).is_ok() {
            return Ok(());
        }
        // What was hidden can be a mapping of its own still, and the kernel does not take several at once.
        let mut other = Self::new(pages)?;
        let words = self.words().len().min(other.words().len());
        other.words()[..words].copy_from_slice(&self.words()[..words]);
        if self.is_locked {
            other.lock(true)?;
        }
        *self = other;
        Ok(())
    }

    fn lock(&mut self, on: bool) -> Result<()> {
        let lock = if on { libc::mlock } else { libc::munlock };
        // SAFETY: the area.
        done("mlock", unsafe { lock(self.at.cast(), self.pages * PAGE) }.into())?;
        self.is_locked = on;
        Ok(())
    }

    fn move_to(&mut self, pages: usize, flags: i32, to: *mut u8) -> Result<()> {
        let (old, new) = (self.pages * PAGE, pages * PAGE);
        // SAFETY: the area is moved as a whole; what lies at `to` is the caller's.
        let at = unsafe { libc::mremap(self.at.cast(), old, new, flags, to) };
        ensure!(at != libc::MAP_FAILED, "mremap: {}", std::io::Error::last_os_error());
        (self.at, self.pages) = (at.cast(), pages);
        Ok(())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // SAFETY: the area belongs to this value.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }
}

/// Another process, which writes into the memory of this one when it is asked to.
struct Peer {
    orders: File,
    answers: File,
    /// Memory that both write.
    shared: *mut u8,
}

fn pipe() -> Result<[OwnedFd; 2]> {
    let mut fds = [0; 2];
    // SAFETY: there is room for two descriptors.
    done("pipe", unsafe { libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) }.into())?;
    // SAFETY: just made.
    Ok(fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }))
}

impl Peer {
    /// Starts it. To be called before there are threads.
    fn start() -> Result<Self> {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        let shared = map(OTHERS, ACCESS, flags, -1)?;
        let ([from, orders], [answers, to]) = (pipe()?, pipe()?);
        // SAFETY: there is one thread.
        let child = unsafe { libc::fork() };
        done("fork", child.into())?;
        if child == 0 {
            drop((orders, answers));
            let served = Self::serve(&mut File::from(from), &mut File::from(to), shared);
            // SAFETY: ends this process, without what its parent has set up.
            unsafe { libc::_exit(i32::from(served.is_err())) };
        }
        Ok(Self { orders: orders.into(), answers: answers.into(), shared })
    }

    fn serve(from: &mut File, to: &mut File, shared: *mut u8) -> Result<()> {
        let mut order = [0; 24];
        while from.read_exact(&mut order).is_ok() {
            let word = |n: usize| u64::from_le_bytes(order[n * 8..][..8].try_into().expect("8"));
            let (address, len, value) = (word(0) as usize, word(1) as usize, word(2) as u32);
            let words: Vec<u32> = (0..len as u32 / 4).map(|i| mix(value ^ i)).collect();
            let here = libc::iovec { iov_base: words.as_ptr().cast_mut().cast(), iov_len: len };
            let there =
                libc::iovec { iov_base: ptr::with_exposed_provenance_mut(address), iov_len: len };
            // SAFETY: the kernel reads `len` bytes here; what is written there waits for this.
            let written =
                unsafe { libc::process_vm_writev(libc::getppid(), &here, 1, &there, 1, 0) };
            ensure!(written == len as isize, "process_vm_writev gave {written}");
            // SAFETY: both processes have it mapped, and take turns.
            unsafe { shared.add(value as usize % (OTHERS * PAGE)).write_volatile(value as u8) };
            to.write_all(&[1])?;
        }
        Ok(())
    }

    /// Has it write.
    fn write(&mut self, at: *mut u8, len: usize, value: u32) -> Result<()> {
        let order = [at.expose_provenance() as u64, len as u64, value.into()];
        self.orders.write_all(&order.map(u64::to_le_bytes).concat())?;
        self.answers.read_exact(&mut [0]).context("the other process has ended")
    }
}

/// All memory, and who writes it.
struct Lab {
    random: Sequence,
    areas: Vec<Area>,
    /// Most of the memory of programs is not written again.
    cold: Area,
    large: Area,
    /// Without it, children look at the memory.
    peer: Option<Peer>,
    memfd: *mut u8,
    pinned: Pinned,
    device: Buffer,
    /// Whether the file system lets input pass the page cache by.
    direct: bool,
}

impl Lab {
    fn new(seed: u32, peer: Option<Peer>) -> Result<Self> {
        // SAFETY: a name that ends with a zero.
        let fd = done("memfd_create", unsafe { libc::memfd_create(c"words".as_ptr(), 1) }.into())?;
        // SAFETY: just made.
        let memfd = unsafe { File::from_raw_fd(fd as i32) };
        memfd.set_len((OTHERS * PAGE) as u64)?;
        let memfd = map(OTHERS, ACCESS, libc::MAP_SHARED, memfd.as_raw_fd())?;
        let bytes: Vec<u8> =
            (0..256 * PAGE as u32 / 4).flat_map(|i| mix(i).to_le_bytes()).collect();
        std::fs::write(FILE, bytes)?;
        let random = Sequence::new(seed);
        let pinned = Pinned::new(OTHERS * PAGE / 4, false)?;
        let device = Buffer::zeroed::<u32>(PAGES as usize * PAGE / 4)?;
        let direct = open_direct().is_ok();
        let (areas, mut cold) = (Vec::new(), Area::new(16 * PAGES as usize)?);
        cold.words().iter_mut().zip(0..).for_each(|(word, i)| *word = mix(seed ^ i));
        // Pages that are alike are merged, where the host does that.
        cold.advise((0, 16 * PAGES as usize), libc::MADV_MERGEABLE);
        let mut large = Area::new(LARGE)?;
        large.advise((0, LARGE), libc::MADV_HUGEPAGE);
        large.words().iter_mut().step_by(700).zip(0..).for_each(|(word, i)| *word = mix(seed ^ i));
        let mut lab = Self { random, areas, cold, large, peer, memfd, pinned, device, direct };
        for _ in 0..2 * FEWEST {
            lab.add()?;
        }
        Ok(lab)
    }

    fn below(&mut self, end: usize) -> usize {
        self.random.below(end as u32) as usize
    }

    /// Maps an area, and writes to some of it.
    fn add(&mut self) -> Result<()> {
        let mut area = Area::new(1 + self.below(PAGES as usize))?;
        let (first, end) = area.some(&mut self.random);
        let value = self.random.below(u32::MAX);
        let words = &mut area.words()[first * PAGE / 4..end * PAGE / 4];
        words.iter_mut().zip(0..).for_each(|(word, i)| *word = mix(value ^ i));
        self.areas.push(area);
        Ok(())
    }

    /// An area of which nothing is hidden.
    fn area(&mut self) -> Result<usize> {
        let number = self.below(self.areas.len());
        self.areas[number].reveal()?;
        Ok(number)
    }

    /// Does one thing.
    fn change(&mut self) -> Result<()> {
        let number = self.area()?;
        let value = self.random.below(u32::MAX);
        let what = self.below(18);
        let pages = self.areas[number].some(&mut self.random);
        let (count, (first, end)) = (self.areas.len(), pages);
        let area = &mut self.areas[number];
        let (at, len) = (area.page(first), (end - first) * PAGE);
        match what {
            0 | 1 => {
                let words = area.words();
                for n in 0..8 {
                    words[mix(value ^ n) as usize % words.len()] = mix(value ^ n);
                }
            }
            2 => area.words()[first * PAGE / 4..end * PAGE / 4].fill(value),
            3 if count < MOST => self.add()?,
            4 if count > FEWEST => drop(self.areas.swap_remove(number)),
            5 if area.pages < PAGES as usize => area.resize(area.pages + 3)?,
            6 if area.pages > 4 => area.resize(area.pages - 3)?,
            7 => {
                let (to, pages) = (map(area.pages, libc::PROT_NONE, PRIVATE, -1)?, area.pages);
                if area.move_to(pages, libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED, to).is_err() {
                    // SAFETY: nobody has got it.
                    unsafe { libc::munmap(to.cast(), pages * PAGE) };
                }
            }
            8 => {
                area.protect(pages, libc::PROT_NONE)?;
                area.hidden = Some(Hidden::Protected(first, end));
            }
            9 => {
                // SAFETY: pages of the area, to which nobody has a reference.
                let result = unsafe { libc::madvise(at.cast(), len, libc::MADV_DONTNEED) };
                // Locked memory stays.
                ensure!(result == 0 || area.is_locked, "madvise gave {result}");
            }
            10 => self.write_by_device(number, pages, value)?,
            11 if self.direct => self.read_directly(number, value)?,
            12 => match &mut self.peer {
                Some(peer) => peer.write(at, len.min(5 * PAGE), value)?,
                None => look_from_a_child(area.words())?,
            },
            13 => area.lock(!area.is_locked)?,
            14 => {
                // SAFETY: within the mapping, which is this thread's alone.
                unsafe { self.memfd.add(value as usize % (OTHERS * PAGE)).write_volatile(1) };
            }
            15 => {
                if std::env::var_os(TOUCHES).is_some() {
                    let words = area.words().iter().step_by(PAGE / 4);
                    words.for_each(|word| _ = std::hint::black_box(*word));
                }
                if area.advise(pages, GUARD) {
                    area.hidden = Some(Hidden::Guarded(first, end));
                }
            }
            16 => {
                let words = self.large.words();
                for n in 0..8 {
                    words[mix(value ^ n) as usize % words.len()] = mix(value ^ n);
                }
                if value.is_multiple_of(4) {
                    self.large.advise((0, LARGE), COLLAPSE);
                }
            }
            _ => {
                fill_at(self.device.address(), value, OTHERS * PAGE / 4)?;
                self.pinned.copy_from(self.device.address())?;
            }
        }
        Ok(())
    }

    /// Registers memory of an area for as long as it takes the device to write it.
    fn write_by_device(&self, number: usize, pages: (usize, usize), value: u32) -> Result<()> {
        let area = &self.areas[number];
        let len = (pages.1 - pages.0).min(PAGES as usize) * PAGE;
        let at: *mut c_void = area.page(pages.0).cast();
        fill_at(self.device.address(), value, len / 4)?;
        // SAFETY: memory of the area, which lives on.
        check("cuMemHostRegister", unsafe { (driver().cuMemHostRegister)(at, len, 0) })?;
        // SAFETY: `len` bytes there and on the device.
        let copied = unsafe { (driver().cuMemcpyDtoH)(at, self.device.address(), len) };
        check("cuMemcpyDtoH", copied)?;
        // SAFETY: registered above.
        check("cuMemHostUnregister", unsafe { (driver().cuMemHostUnregister)(at) })
    }

    fn read_directly(&mut self, number: usize, value: u32) -> Result<()> {
        let area = &mut self.areas[number];
        if area.pages < DIRECT {
            return Ok(());
        }
        let first = value as usize % (area.pages - DIRECT + 1);
        let offset = u64::from(value % 252) * PAGE as u64;
        let at = area.page(first);
        // SAFETY: pages of the area, to which nobody else has a reference.
        let bytes = unsafe { std::slice::from_raw_parts_mut(at, DIRECT * PAGE) };
        open_direct()?.read_exact_at(bytes, offset).context("a direct read")
    }

    /// Looks at some of the memory.
    fn digest(&mut self) -> Result<u32> {
        let number = self.area()?;
        let fold = |digest: u32, word: &u32| mix(digest ^ word).wrapping_add(1);
        Ok(self.areas[number].words().iter().step_by(61).fold(number as u32, fold))
    }
}

fn open_direct() -> Result<File> {
    Ok(File::options().read(true).custom_flags(libc::O_DIRECT).open(FILE)?)
}

/// A child that is made now finds what is there.
fn look_from_a_child(words: &[u32]) -> Result<()> {
    // Few bits go into an exit status.
    let digest = || words.iter().fold(0u32, |digest, word| mix(digest ^ word)) as i32 & 0x7f;
    // SAFETY: the child does nothing but read memory and end.
    let child = unsafe { libc::fork() };
    done("fork", child.into())?;
    if child == 0 {
        // SAFETY: ends the child, without what its parent has set up.
        unsafe { libc::_exit(digest()) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    done("waitpid", unsafe { libc::waitpid(child, &raw mut status, 0) }.into())?;
    ensure!(
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == digest(),
        "a child has ended with {status:#x}"
    );
    Ok(())
}

/// Runs the workload, with a process besides that writes its memory too.
pub(crate) fn run(run: &mut Run) -> Result<()> {
    // The other process is made before the driver has threads.
    let peer = Peer::start()?;
    with(run, Some(peer))
}

/// Runs the workload in one process, which has children now and then.
pub(crate) fn run_alone(run: &mut Run) -> Result<()> {
    with(run, None)
}

fn with(run: &mut Run, peer: Option<Peer>) -> Result<()> {
    let steps = run.plan(400, 1000, 4000);
    let gpu = Gpu::open()?;
    let mut lab = Lab::new(run.seed, peer)?;
    gpu.synchronize()?;
    run.ready()?;
    for step in 0..steps {
        for _ in 0..CHANGES {
            lab.change()?;
        }
        let words = lab.cold.words();
        words[mix(step) as usize % words.len()] = mix(run.seed ^ step);
        let digest = lab.digest()?;
        run.step(step, format_args!("areas {} digest {digest:08x}", lab.areas.len()))?;
    }
    for area in lab.areas.iter_mut().chain([&mut lab.cold, &mut lab.large]) {
        area.reveal()?;
        run.absorb(area.words());
    }
    for shared in [Some(lab.memfd), lab.peer.map(|peer| peer.shared)].into_iter().flatten() {
        // SAFETY: mapped, and the other process waits for orders.
        run.absorb(unsafe { std::slice::from_raw_parts(shared.cast::<u32>(), OTHERS * PAGE / 4) });
    }
    run.absorb(lab.pinned.words());
    run.finish()
}
