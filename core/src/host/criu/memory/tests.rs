//! Memory that is brought in in CRIU's place.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::super::pages::made;
use super::talk::SOCKET;
use super::uffd::{GROUP, PAGE};
use super::*;
use rustix::ioctl::{Updater, ioctl, opcode};
use rustix::mm::{MapFlags, ProtFlags, UserfaultfdFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

/// `struct uffdio_api` and `struct uffdio_register`.
#[repr(C)]
struct Api([u64; 3]);
#[repr(C)]
struct Register([u64; 4]);

const API: rustix::ioctl::Opcode = opcode::read_write::<Api>(GROUP, 0x3f);
const REGISTER: rustix::ioctl::Opcode = opcode::read_write::<Register>(GROUP, 0);
/// Pages of the memory that is loaded.
const PAGES: usize = 700;

/// New private memory of this process, which is never given back.
fn memory() -> u64 {
    let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let len = PAGES * PAGE as usize;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let address = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags) };
    address.unwrap() as u64
}

fn uffd() -> OwnedFd {
    uffd_that_tells(0)
}

/// With these features.
fn uffd_that_tells(features: u64) -> OwnedFd {
    let flags = UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK;
    // SAFETY: nothing is registered with it yet.
    let uffd = unsafe { rustix::mm::userfaultfd(flags) }.unwrap();
    let mut api = Api([GROUP.into(), features, 0]);
    // SAFETY: the structure that the call takes.
    unsafe { ioctl(&uffd, Updater::<API, Api>::new(&mut api)) }.unwrap();
    uffd
}

fn register(uffd: &OwnedFd, address: u64) {
    let mut register = Register([address, PAGES as u64 * PAGE, 1, 0]);
    // SAFETY: the structure that the call takes; memory that nothing refers to yet.
    unsafe { ioctl(uffd, Updater::<REGISTER, Register>::new(&mut register)) }.unwrap();
}

fn page(number: usize) -> Vec<u8> {
    vec![(number % 251 + 1) as u8; PAGE as usize]
}

/// The process whose memory it is, and which speaks as CRIU does.
fn own() -> i32 {
    std::process::id() as i32
}

/// Files of a process whose memory at `address` has all pages but every hundredth, in two mappings.
fn image(address: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let (middle, end) = (address + 350 * PAGE, address + PAGES as u64 * PAGE);
    let parts: Vec<(u64, Vec<u8>)> = (0..PAGES / 100)
        .map(|part| {
            let pages = part * 100 + 1..(part + 1) * 100;
            let address = address + pages.start as u64 * PAGE;
            (address, pages.flat_map(page).collect())
        })
        .collect();
    let runs: Vec<_> = parts.iter().map(|(at, bytes)| (*at, true, &bytes[..])).collect();
    made::write_of(own(), dir.path(), &[(address, middle), (middle, end)], &runs);
    dir
}

fn open(path: &std::path::Path) -> OwnedFd {
    std::fs::File::open(path).unwrap().into()
}

fn plan(dir: &std::path::Path) -> Option<Arc<Plan>> {
    Plan::of(open(dir).as_fd(), &|_| None, Some(open(dir).as_fd())).unwrap().map(Arc::new)
}

fn start(dir: &std::path::Path, keep: Option<Keep>) -> Loading {
    Loading::start(plan(dir).expect("what it needs"), open(dir).as_fd(), keep).unwrap()
}

/// Begins, and says what CRIU says of this process.
fn begin(dir: &std::path::Path, uffd: &OwnedFd, keep: Option<Keep>) -> (Loading, UnixStream) {
    let loading = start(dir, keep);
    let mut criu = UnixStream::connect(dir.join(SOCKET)).unwrap();
    std::io::Write::write_all(&mut criu, &(-7i32).to_ne_bytes()).unwrap();
    std::io::Write::write_all(&mut criu, &own().to_ne_bytes()).unwrap();
    let fds = [uffd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let byte = [io::IoSlice::new(&[0])];
    rustix::net::sendmsg(&criu, &byte, &mut control, SendFlags::empty()).unwrap();
    (loading, criu)
}

/// A page of this process.
fn read(address: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    // SAFETY: mapped memory of that length, which only the kernel writes.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, page.as_mut_ptr(), page.len()) };
    page
}

#[test]
fn memory_is_there_when_it_has_finished() {
    let address = memory();
    let (dir, uffd) = (image(address), uffd());
    let (mut loading, _criu) = begin(dir.path(), &uffd, None);
    std::thread::sleep(Duration::from_millis(5));
    register(&uffd, address);
    drop(uffd);
    let read = |number: usize| read(address + number as u64 * PAGE);
    // A read that comes too early waits, also where there is nothing.
    assert!(read(1) == page(1) && read(200).iter().all(|byte| *byte == 0));
    loading.finish(None).unwrap();
    for number in 0..PAGES {
        let expected = if number % 100 == 0 { vec![0; PAGE as usize] } else { page(number) };
        assert!(read(number) == expected, "page {number}");
    }
}

/// Whether a page of this process has a place in memory, as the kernel says: the one page of zeros is one.
fn is_present(address: u64) -> bool {
    let mut entry = [0; 8];
    let pagemap = std::fs::File::open("/proc/self/pagemap").unwrap();
    pagemap.read_exact_at(&mut entry, address / PAGE * 8).unwrap();
    u64::from_ne_bytes(entry) >> 63 == 1
}

#[test]
fn zeros_that_were_left_out_have_pages_when_it_has_finished() {
    let address = memory();
    let (dir, uffd) = (image(address), uffd());
    // The list goes beyond the memory at both ends; there are bytes between what it has within.
    let at = |number: u64| address + number * PAGE;
    let list =
        [at(0) - 8 * PAGE, at(1), at(100), at(101), at(200), at(201), u64::MAX - 1, u64::MAX];
    let list: Vec<u8> = list.into_iter().flat_map(u64::to_le_bytes).collect();
    std::fs::write(dir.path().join(format!("zeros-{}", own())), list).unwrap();
    // Nobody but gpucr says where zeros are: an image may have a file of that name, too.
    let images = open(dir.path());
    let without = Plan::of(images.as_fd(), &|_| None, None).unwrap().unwrap();
    assert!(without.processes()[&own()].zeros(0).is_none());
    let (mut loading, _criu) = begin(dir.path(), &uffd, None);
    register(&uffd, address);
    drop(uffd);
    loading.finish(None).unwrap();
    let present = [0, 100, 200, 300].map(|number| is_present(at(number)));
    assert_eq!(present, [true, true, true, false]);
    for number in 0..PAGES {
        let expected = if number % 100 == 0 { vec![0; PAGE as usize] } else { page(number) };
        assert!(read(at(number as u64)) == expected, "page {number}");
    }
}

fn io_error(result: Result<Option<OnDemandMemory>, OnDemandError>) -> io::Error {
    match result {
        Err(OnDemandError::Io(error)) => error,
        Err(error) => panic!("{error:?}"),
        Ok(_) => panic!("it is there"),
    }
}

#[test]
fn memory_without_a_place_is_an_error() {
    let address = memory();
    let (dir, uffd) = (image(address), uffd());
    let (mut loading, _criu) = begin(dir.path(), &uffd, None);
    assert_eq!(io_error(loading.finish(None)).raw_os_error(), Some(libc::ENOENT));
    // A process that is missing is an error too.
    let dir = image(address);
    let mut loading = start(dir.path(), None);
    let _criu = UnixStream::connect(dir.path().join(SOCKET)).unwrap();
    let error = io_error(loading.finish(None));
    assert!(error.to_string().contains(&format!("process {}", own())), "{error}");
}

#[test]
fn forked_processes_are_left_to_criu() {
    let dir = image(1 << 40);
    assert!(plan(dir.path()).is_some());
    for name in ["mm", "pagemap"] {
        let file = |pid| dir.path().join(format!("{name}-{pid}.img"));
        std::fs::copy(file(own()), file(own() + 1)).unwrap();
    }
    assert!(plan(dir.path()).is_none());
}

#[test]
fn it_can_be_given_up() {
    let address = memory();
    let (dir, uffd) = (image(address), uffd());
    let (loading, criu) = begin(dir.path(), &uffd, None);
    drop(loading);
    drop(criu);
    let dir = image(address);
    drop(start(dir.path(), None));
}

/// Held by tests with memory that comes on demand: where tests are threads of one process, each of them would be told of
/// the other's forks.
static ALONE: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

/// The features that CRIU asks for: forks, moves, and what is given up or unmapped are told.
const TELLS: u64 = 1 << 1 | 1 << 2 | 1 << 3 | 1 << 6;

/// `MADV_WIPEONFORK`, and `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of Linux 6.13.
const WIPE_ON_FORK: i32 = 18;
const GUARD: i32 = 102;
const NO_GUARD: i32 = 103;

/// Asks for something about some pages of this test.
fn advise(address: u64, pages: u64, advice: i32) {
    // SAFETY: memory of this test alone.
    let done = unsafe { libc::madvise(address as *mut _, (pages * PAGE) as usize, advice) };
    assert_eq!(done, 0, "{}", io::Error::last_os_error());
}

/// Whether a page can be read; a guard cannot.
fn is_readable(address: u64) -> bool {
    let mut byte = 0u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: 1 };
    // SAFETY: a byte of this function's is written, and what cannot be read is an error.
    unsafe { libc::process_vm_readv(own(), &raw const local, 1, &raw const remote, 1, 0) == 1 }
}

/// Begins to bring memory on demand, only what is touched for now, and counts the descriptors that are kept.
fn on_demand(address: u64) -> (Loading, UnixStream, Arc<std::sync::Mutex<Vec<OwnedFd>>>) {
    let (dir, uffd) = (image(address), uffd_that_tells(TELLS));
    let kept = Arc::<std::sync::Mutex<Vec<OwnedFd>>>::default();
    let keep: Keep = Arc::new({
        let kept = kept.clone();
        move |uffd| {
            kept.lock().unwrap().push(uffd.try_clone_to_owned()?);
            Ok(())
        }
    });
    let (loading, criu) = begin(dir.path(), &uffd, Some(keep));
    register(&uffd, address);
    drop(uffd);
    (loading, criu, kept)
}

fn expected(number: usize) -> Vec<u8> {
    if number.is_multiple_of(100) { vec![0; PAGE as usize] } else { page(number) }
}

#[test]
fn memory_comes_when_it_is_touched_and_all_of_it_in_the_end() {
    let _alone = ALONE.lock();
    let address = memory();
    let (mut loading, _criu, kept) = on_demand(address);
    let memory = loading.finish(None).unwrap().unwrap();
    for number in [5, 699, 300, 301] {
        assert!(read(address + number as u64 * PAGE) == expected(number), "page {number}");
    }
    let mut last = 0;
    memory.wait(&mut |arrived| last = arrived.bytes).unwrap();
    assert_eq!((last, memory.bytes()), (693 * PAGE, 693 * PAGE));
    let kept = std::mem::take(&mut *kept.lock().unwrap());
    assert!(kept.len() == 1 && kept.iter().all(is_alive));
    // As long as somebody has a descriptor the kernel asks about what was never there.
    assert!(read(address) == expected(0));
    drop((kept, memory));
    for number in 0..PAGES {
        assert!(read(address + number as u64 * PAGE) == expected(number), "page {number}");
    }
}

/// What becomes of memory that a program moves, gives up and shares with a child before it is there. It is a process of
/// its own, since no other thread may touch what is missing.
#[test]
fn memory_that_moves_goes_and_is_forked_is_what_it_would_be() {
    let _alone = ALONE.lock();
    let address = memory();
    let (mut loading, _criu, kept) = on_demand(address);
    let at = |number: u64| address + number * PAGE;
    let elsewhere = self::memory();
    // SAFETY: memory of this test alone: pages 10 to 20 go elsewhere, where nothing that anybody uses is mapped.
    let moved = unsafe {
        libc::mremap(
            at(10) as *mut libc::c_void,
            10 * PAGE as usize,
            10 * PAGE as usize,
            libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED,
            elsewhere as *mut libc::c_void,
        )
    };
    assert_eq!(moved as u64, elsewhere);
    // SAFETY: memory of this test alone.
    let given_up = unsafe {
        libc::madvise(at(30) as *mut libc::c_void, 10 * PAGE as usize, libc::MADV_DONTNEED)
    };
    assert_eq!(given_up, 0);
    // Nobody tells that a mapping is cut.
    for number in [51, 53, 600] {
        let page = at(number) as *mut libc::c_void;
        // SAFETY: memory of this test alone, which nobody writes.
        assert_eq!(unsafe { libc::mprotect(page, PAGE as usize, libc::PROT_READ) }, 0);
    }
    let memory = loading.finish(None).unwrap().unwrap();
    // What comes when it is touched shows that the moves above are over, however late anybody gets a turn.
    assert!(read(at(5)) == expected(5));
    // Not `fork` of libc: it holds the locks of the allocator until the kernel has forked, which waits for threads here
    // that allocate.
    // SAFETY: the child does nothing but read and end.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    assert!(child >= 0);
    if child == 0 {
        // Nothing here may allocate: other threads may have held locks.
        let is = |address: u64, byte: u8| {
            // SAFETY: mapped memory.
            (0..PAGE)
                .all(|i| unsafe { std::ptr::read_volatile((address + i) as *const u8) } == byte)
        };
        let of =
            |number: u64| if number.is_multiple_of(100) { 0 } else { (number % 251 + 1) as u8 };
        let right = (0..700).all(|number| match number {
            10..20 => is(elsewhere + (number - 10) * PAGE, of(number)),
            30..40 => is(at(number), 0),
            number => is(at(number), of(number)),
        });
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if right { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child has seen something else");
    memory.wait(&mut |_| ()).unwrap();
    for number in 0..PAGES as u64 {
        let (at, expected) = match number {
            10..20 => (elsewhere + (number - 10) * PAGE, expected(number as usize)),
            30..40 => (at(number), vec![0; PAGE as usize]),
            number => (at(number), expected(number as usize)),
        };
        assert!(read(at) == expected, "page {number}");
    }
    let kept = kept.lock().unwrap();
    assert_eq!(kept.len(), 2, "the child's as well");
    assert!(is_alive(&kept[0]) && !is_alive(&kept[1]));
}

#[test]
fn a_guard_that_is_made_of_missing_memory_stays_and_leaves_zeros() {
    let _alone = ALONE.lock();
    let address = memory();
    let (mut loading, _criu, kept) = on_demand(address);
    let at = |number: usize| address + number as u64 * PAGE;
    advise(at(120), 7, GUARD);
    // Over what was never there, and to the end of a mapping.
    advise(at(690), 10, GUARD);
    let memory = loading.finish(None).unwrap().unwrap();
    memory.wait(&mut |_| ()).unwrap();
    let is_guard = |number: usize| (120..127).contains(&number) || number >= 690;
    for number in 0..PAGES {
        if is_guard(number) {
            assert!(!is_readable(at(number)), "page {number}");
        } else {
            assert!(read(at(number)) == expected(number), "page {number}");
        }
    }
    advise(at(120), 7, NO_GUARD);
    advise(at(690), 10, NO_GUARD);
    for number in (0..PAGES).filter(|number| is_guard(*number)) {
        assert!(read(at(number)) == vec![0; PAGE as usize], "page {number}");
    }
    drop((memory, kept));
}

#[test]
fn a_guard_of_missing_memory_that_is_gone_already_is_an_error() {
    let _alone = ALONE.lock();
    let address = memory();
    let (mut loading, _criu, kept) = on_demand(address);
    advise(address + 120 * PAGE, 1, GUARD);
    advise(address + 120 * PAGE, 1, NO_GUARD);
    let memory = loading.finish(None).unwrap().unwrap();
    let result = memory.wait(&mut |_| ());
    assert!(matches!(result, Err(OnDemandError::Untold)), "{result:?}");
    drop((memory, kept));
}

/// Whether a child that is forked now finds a zero there.
fn child_finds_zero(address: u64) -> bool {
    // SAFETY: the child does nothing but read and end. See above why not `fork` of libc.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
    assert!(child >= 0);
    if child == 0 {
        // SAFETY: mapped memory; and the child ends at once.
        unsafe { libc::_exit(i32::from(std::ptr::read_volatile(address as *const u8) != 0)) };
    }
    let mut status = 0;
    // SAFETY: a child of this process.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    status == 0
}

#[test]
fn a_child_finds_zeros_where_it_is_to_find_nothing() {
    let _alone = ALONE.lock();
    let address = memory();
    // It was so when the program was dumped.
    advise(address + 600 * PAGE, 100, WIPE_ON_FORK);
    let (mut loading, _criu, kept) = on_demand(address);
    // Until it is said that the processes run, only what is touched comes.
    assert!(child_finds_zero(address + 699 * PAGE));
    assert!(!child_finds_zero(address + 599 * PAGE));
    let memory = loading.finish(None).unwrap().unwrap();
    memory.wait(&mut |_| ()).unwrap();
    assert!(read(address + 699 * PAGE) == expected(699));
    drop((memory, kept));
}

#[test]
fn whether_a_child_finds_what_was_asked_about_meanwhile_is_not_known() {
    let _alone = ALONE.lock();
    let address = memory();
    let (mut loading, _criu, kept) = on_demand(address);
    advise(address + 600 * PAGE, 100, WIPE_ON_FORK);
    let byte = 0u8;
    assert!(child_finds_zero((&raw const byte).expose_provenance() as u64));
    // It may be noticed before the processes could run, or after that.
    let result = match loading.finish(None) {
        Err(error) => Err(error),
        Ok(memory) => memory.as_ref().unwrap().wait(&mut |_| ()),
    };
    assert!(matches!(result, Err(OnDemandError::Untold)), "{result:?}");
    drop(kept);
}
