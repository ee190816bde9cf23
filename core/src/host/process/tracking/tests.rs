use std::fs::File;
use std::ptr;

use super::*;

const PAGE: usize = 4096;

/// Memory of this process.
struct Memory {
    at: *mut u8,
    pages: usize,
}

impl Memory {
    fn new(pages: usize) -> Self {
        Self::at(ptr::null_mut(), pages, 0)
    }

    fn at(at: *mut u8, pages: usize, flags: i32) -> Self {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | flags;
        // SAFETY: a new mapping, anywhere or in the place of one that is this test's.
        let at = unsafe { libc::mmap(at.cast(), pages * PAGE, access, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        // SAFETY: no large page is to hold what was not written.
        unsafe { libc::madvise(at, pages * PAGE, libc::MADV_NOHUGEPAGE) };
        Self { at: at.cast(), pages }
    }

    fn page(&self, page: usize) -> *mut u8 {
        assert!(page < self.pages);
        self.at.wrapping_add(page * PAGE)
    }

    fn write(&self, pages: &[usize]) {
        for page in pages {
            // SAFETY: within the mapping.
            unsafe { self.page(*page).write_volatile(1) };
        }
    }

    fn range(&self) -> Ranges {
        let start = self.at.expose_provenance() as u64;
        [(start, start + (self.pages * PAGE) as u64)].into_iter().collect()
    }

    /// The numbers of its pages that are clean.
    fn clean(&self, tracking: &Tracking) -> Vec<usize> {
        let clean = tracking.clean().unwrap();
        let is_clean = |page: &usize| {
            let start = self.page(*page).expose_provenance() as u64;
            clean.cover(start, start + PAGE as u64)
        };
        (0..self.pages).filter(is_clean).collect()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this test's.
        unsafe { libc::munmap(self.at.cast(), self.pages * PAGE) };
    }
}

/// Tracks this process; `None` where that cannot be done.
fn tracked() -> Option<Tracking> {
    if let Some(why) = why_untracked() {
        crate::skip::skip(&format!("memory cannot be tracked: {why}"));
        return None;
    }
    let uffd = write_protect::own().unwrap();
    Some(Tracking::begin(std::process::id() as i32, uffd).unwrap())
}

/// Takes up only this memory: the whole process would be slow.
fn take_up(tracking: &mut Tracking, memory: &Memory) {
    let (start, end) = memory.range().iter().next().unwrap();
    let mapping = Mapping { start, end, is_left: true, is_watched: false };
    assert_eq!(tracking.take_up(&mapping), Some((start, end)));
    tracking.ours = tracking.ours.all(&memory.range());
}

#[test]
fn pages_are_clean_until_they_are_written() {
    let Some(mut tracking) = tracked() else { return };
    let memory = Memory::new(16);
    memory.write(&[0, 1, 2, 5, 9]);
    take_up(&mut tracking, &memory);
    assert_eq!(memory.clean(&tracking), [0; 0]);
    tracking.protect(&memory.range()).unwrap();
    assert_eq!(memory.clean(&tracking), [0, 1, 2, 5, 9]);
    memory.write(&[1, 7]);
    // By the kernel, on behalf of the process.
    let zeros = File::open("/dev/zero").unwrap();
    let place: *mut u8 = memory.page(5);
    // SAFETY: within the mapping.
    let bytes = unsafe { std::slice::from_raw_parts_mut(place, 1) };
    io::Read::read_exact(&mut &zeros, bytes).unwrap();
    assert_eq!(memory.clean(&tracking), [0, 2, 9]);
    // SAFETY: within the mapping.
    unsafe { libc::madvise(memory.page(2).cast(), PAGE, libc::MADV_DONTNEED) };
    // SAFETY: as before.
    unsafe { memory.page(2).read_volatile() };
    assert_eq!(memory.clean(&tracking), [0, 9]);
    tracking.protect(&memory.range()).unwrap();
    assert!(memory.clean(&tracking).starts_with(&[0, 1]));
}

#[test]
fn memory_that_is_mapped_anew_or_moved_is_not_clean() {
    let Some(mut tracking) = tracked() else { return };
    let (first, second) = (Memory::new(8), Memory::new(8));
    first.write(&[0, 1, 2, 3, 4, 5, 6, 7]);
    second.write(&[0, 1, 2, 3, 4, 5, 6, 7]);
    take_up(&mut tracking, &first);
    take_up(&mut tracking, &second);
    tracking.protect(&first.range()).unwrap();
    tracking.protect(&second.range()).unwrap();
    // Its pages come to be where others were.
    // SAFETY: both are this test's.
    let moved = unsafe {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        libc::mremap(second.page(2).cast(), PAGE, PAGE, flags, first.page(3))
    };
    assert_eq!(moved, first.page(3).cast());
    let anew = Memory::at(first.page(5), 1, libc::MAP_FIXED);
    anew.write(&[0]);
    std::mem::forget(anew);
    assert_eq!(first.clean(&tracking), [0, 1, 2, 4, 6, 7]);
    assert_eq!(second.clean(&tracking), [0, 1, 3, 4, 5, 6, 7]);
    // Access may change without that.
    // SAFETY: within the mapping.
    unsafe { libc::mprotect(first.page(0).cast(), PAGE, libc::PROT_NONE) };
    assert_eq!(first.clean(&tracking), [0, 1, 2, 4, 6, 7]);
}

#[test]
fn what_hides_writes_is_an_obstacle() {
    let own = std::process::id() as i32;
    assert_eq!(obstacle(own).unwrap(), None);
    let dir = tempfile::tempdir().unwrap();
    let mut options = File::options();
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_DIRECT);
    // Some file systems refuse it.
    if let Ok(file) = options.write(true).create(true).open(dir.path().join("direct")) {
        assert_eq!(obstacle(own).unwrap(), Some("it has a file open for direct input and output"));
        drop(file);
    }
    if let Some(tracking) = tracked() {
        assert_eq!(obstacle(own).unwrap(), Some("it has a userfaultfd of its own"));
        drop(tracking);
    }
    assert_eq!(obstacle(own).unwrap(), None);
}
