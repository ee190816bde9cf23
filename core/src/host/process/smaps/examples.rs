//! Mappings of this process's own that have flags which few mappings have, and in which these differ.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;

use rustix::mm::{Advice, MapFlags, MlockFlags, ProtFlags};

use super::super::write_protect;

/// Bytes of a page, and of a large one.
const PAGE: usize = 4096;
const LARGE: usize = 2 << 20;
/// `MAP_DROPPABLE`, Linux 6.11.
const DROPPABLE: MapFlags = MapFlags::from_bits_retain(0x08);
/// What programs tell the kernel of their memory, and what it remembers of that.
const ADVICE: [Advice; 8] = [
    Advice::Sequential,
    Advice::Random,
    Advice::LinuxDontFork,
    Advice::LinuxDontDump,
    Advice::LinuxWipeOnFork,
    Advice::LinuxMergeable,
    Advice::LinuxHugepage,
    Advice::LinuxNoHugepage,
];

/// The mappings, which are there until this is dropped. What the kernel or this user's limits do not allow is missing.
pub(super) struct Examples {
    made: Vec<(*mut c_void, usize)>,
    _registered: Option<OwnedFd>,
}

impl Examples {
    pub(super) fn make() -> Self {
        let mut this = Self { made: Vec::new(), _registered: None };
        let (read, write) = (ProtFlags::READ, ProtFlags::READ | ProtFlags::WRITE);
        let private = MapFlags::PRIVATE;
        this.map(PAGE, ProtFlags::empty(), private);
        this.map(PAGE, read | ProtFlags::EXEC, private);
        this.map(PAGE, write, MapFlags::SHARED);
        this.map(PAGE, write, private | MapFlags::NORESERVE);
        this.map(PAGE, write, private | MapFlags::GROWSDOWN);
        this.map(PAGE, write, DROPPABLE);
        // No large page is needed for it.
        this.map(LARGE, ProtFlags::empty(), private | MapFlags::NORESERVE | MapFlags::HUGETLB);
        this.map_file();
        for advice in ADVICE {
            if let Some(at) = this.map(PAGE, write, private) {
                // SAFETY: it is about the page that was just mapped and that nothing refers to.
                let _ = unsafe { rustix::mm::madvise(at, PAGE, advice) };
            }
        }
        for when in [MlockFlags::empty(), MlockFlags::ONFAULT] {
            if let Some(at) = this.map(PAGE, write, private) {
                // SAFETY: as above.
                let _ = unsafe { rustix::mm::mlock_with(at, PAGE, when) };
            }
        }
        this._registered = this.map(PAGE, write, private).and_then(|at| register(at).ok());
        this
    }

    fn map(&mut self, len: usize, prot: ProtFlags, flags: MapFlags) -> Option<*mut c_void> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let at = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) }.ok()?;
        self.made.push((at, len));
        Some(at)
    }

    /// A file that is open for reading alone, so that its mapping can never be written.
    fn map_file(&mut self) {
        let Ok(file) = File::open("/proc/self/exe") else { return };
        let (prot, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping, at an address of the kernel's choice, that nobody reads.
        let at = unsafe { rustix::mm::mmap(ptr::null_mut(), PAGE, prot, flags, &file, 0) };
        self.made.extend(at.ok().map(|at| (at, PAGE)));
    }
}

/// Registers a page of this process as memory that is tracked is registered, until the userfaultfd is dropped.
fn register(at: *mut c_void) -> io::Result<OwnedFd> {
    let (uffd, start) = (write_protect::own()?, at.expose_provenance() as u64);
    write_protect::begin(&uffd)?;
    write_protect::register(&uffd, start, start + PAGE as u64)?;
    Ok(uffd)
}

impl Drop for Examples {
    fn drop(&mut self) {
        for (at, len) in self.made.drain(..) {
            // SAFETY: the mapping is this value's, and nothing refers to it.
            let _ = unsafe { rustix::mm::munmap(at, len) };
        }
    }
}
