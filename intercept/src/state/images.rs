//! What modules and libraries were loaded from, so that the checkpointer can read there what their
//! kernels do.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr, c_char, c_void};
use std::fs::{File, Metadata, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use rustix::fs::MemfdFlags;

use crate::abi::real;
use crate::abi::types::SUCCESS;
use crate::resettable::Resettable;
use crate::state::memory::Failure;

/// An image in memory that belongs to no file is copied up to this size, bytes.
const COPY: usize = 8 << 20;
/// So much is copied in all, bytes.
const COPIES: usize = 64 << 20;
/// Larger ones are not sent, bytes.
const LARGEST: usize = 2 << 30;
/// `__fatBinC_Wrapper_t`, by which compiled programs refer to their fat binaries.
const WRAPPER_MAGIC: u32 = 0x4662_43b1;
/// The head of a fat binary.
const FATBIN_MAGIC: u32 = 0xba55_ed50;
const ELF_MAGIC: u32 = u32::from_le_bytes(*b"\x7fELF");

#[derive(Clone)]
enum Image {
    /// In a file that is mapped there, such as the program itself.
    Mapped {
        address: usize,
        len: usize,
    },
    Copied(Arc<[u8]>),
    File(PathBuf, Version),
}

/// Tells whether a file is the one that it was: device, inode, bytes, and when it was last changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version(u64, u64, u64, i64, i64);

impl Version {
    fn of(meta: &Metadata) -> Self {
        Self(meta.dev(), meta.ino(), meta.len(), meta.ctime(), meta.ctime_nsec())
    }
}

#[derive(Default)]
struct Images {
    last_id: u64,
    images: HashMap<u64, Image>,
    /// Of modules and libraries.
    by_owner: HashMap<u64, u64>,
    /// Libraries by their kernels' functions, and by their modules.
    libraries: HashMap<u64, u64>,
    copied: usize,
}

static IMAGES: Resettable<Mutex<Option<Images>>> = Resettable::new(Mutex::new(None));

fn with<T>(work: impl FnOnce(&mut Images) -> T) -> T {
    let mut images = IMAGES.get().lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    work(images.get_or_insert_default())
}

impl Images {
    fn add(&mut self, owner: u64, image: Image) {
        if let Image::Copied(bytes) = &image {
            if self.copied + bytes.len() > COPIES {
                return;
            }
            self.copied += bytes.len();
        }
        self.remove(owner);
        self.last_id += 1;
        self.images.insert(self.last_id, image);
        self.by_owner.insert(owner, self.last_id);
    }

    fn remove(&mut self, owner: u64) {
        let Some(id) = self.by_owner.remove(&owner) else { return };
        self.by_owner.retain(|_, other| *other != id);
        if let Some(Image::Copied(bytes)) = self.images.remove(&id) {
            self.copied -= bytes.len();
        }
    }
}

/// A module or library was loaded: it may have the handle of a module that went with its context.
pub(crate) fn made(owner: u64) {
    with(|images| images.libraries.remove(&owner));
}

/// A module or library was loaded from memory.
///
/// # Safety
/// The driver has just read an image at `address`.
pub(crate) unsafe fn loaded(owner: u64, address: usize) {
    // SAFETY: the caller's duty.
    let Some((address, len)) = (unsafe { extent(address) }) else { return };
    let image = if is_in_object(address) {
        Image::Mapped { address, len }
    } else if len <= COPY {
        match copied(address, len) {
            Some(bytes) => Image::Copied(bytes.into()),
            None => return,
        }
    } else {
        return;
    };
    with(|images| images.add(owner, image));
}

/// A module or library was loaded from a file.
///
/// # Safety
/// `path` is a C string.
pub(crate) unsafe fn loaded_from_file(owner: u64, path: usize) {
    // SAFETY: the caller's duty.
    let path = unsafe { CStr::from_ptr(path as *const c_char) };
    let Ok(path) = std::path::absolute(OsStr::from_bytes(path.to_bytes())) else { return };
    if let Ok(meta) = path.metadata() {
        with(|images| images.add(owner, Image::File(path, Version::of(&meta))));
    }
}

/// A module or library is about to go: it may be made again under the same handle.
pub(crate) fn unloaded(owner: u64) {
    with(|images| {
        images.remove(owner);
        images.libraries.retain(|_, library| *library != owner);
    });
}

/// `function` is the function of `kernel` in some context.
pub(crate) fn function_of_kernel(function: u64, kernel: u64) {
    let mut library = 0;
    // SAFETY: writes one value; the driver has just accepted the kernel.
    if unsafe { real::cuKernelGetLibrary(&mut library, kernel) } == SUCCESS {
        with(|images| images.libraries.insert(function, library));
    }
}

/// `module` is the module of `library` in some context.
pub(crate) fn module_of_library(module: u64, library: u64) {
    with(|images| {
        images.libraries.insert(module, library);
        if let Some(id) = images.by_owner.get(&library).copied() {
            images.by_owner.insert(module, id);
        }
    });
}

/// The library of which this is a module in some context.
pub(crate) fn library_of(module: u64) -> Option<u64> {
    with(|images| images.libraries.get(&module).copied())
}

/// The image from which the library of a function was loaded, where that is known.
pub(crate) fn of_kernel(function: u64) -> Option<u64> {
    let library = with(|images| images.libraries.get(&function).copied())?;
    of(library)
}

/// The image from which a module or library was loaded.
pub(crate) fn of(owner: u64) -> Option<u64> {
    with(|images| images.by_owner.get(&owner).copied())
}

/// A file with an image, and how many bytes of it are the image.
///
/// # Errors
/// The image is gone, has more than `limit` bytes, or cannot be read.
pub(crate) fn open(id: u64, limit: u64) -> Result<(OwnedFd, u64), Failure> {
    let failed = |error| Failure::other(format!("image {id} cannot be read: {error}"));
    let small_enough = |len: u64| match len {
        len if len <= limit => Ok(len),
        len => Err(Failure::other(format!("image {id} of {len} bytes is too large"))),
    };
    let file = |path: &PathBuf, version: Version| {
        // What is no file would perhaps wait for somebody who writes to it.
        let plain = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let file = plain.map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        if !meta.is_file() {
            return Err(Failure::other(format!("image {id} is no longer in a plain file")));
        }
        if Version::of(&meta) != version {
            return Err(Failure::other(format!("image {id} is in a file that has changed")));
        }
        Ok((file.into(), small_enough(meta.len())?))
    };
    let copy = |bytes: *const c_void, len: usize| {
        small_enough(len as u64)?;
        let mut file: File = rustix::fs::memfd_create("gpucr-image", MemfdFlags::CLOEXEC)
            .map_err(|error| failed(error.into()))?
            .into();
        write(&mut file, bytes, len).map_err(failed)?;
        Ok((file.into(), len as u64))
    };
    // Without the lock, for which launches may wait.
    match with(|images| images.images.get(&id).cloned()) {
        None => Err(Failure::other(format!("there is no image {id}"))),
        Some(Image::File(path, version)) => file(&path, version),
        Some(Image::Copied(bytes)) => copy(bytes.as_ptr().cast(), bytes.len()),
        Some(Image::Mapped { address, len }) => copy(address as *const c_void, len),
    }
}

/// The bytes of an image. `None` if it is gone, or has more than [`COPY`] bytes.
pub(crate) fn bytes(id: u64) -> Option<Vec<u8>> {
    match with(|images| images.images.get(&id).cloned())? {
        Image::Mapped { address, len } if len <= COPY => copied(address, len),
        Image::Mapped { .. } => None,
        Image::Copied(bytes) => Some(bytes.to_vec()),
        Image::File(path, version) => {
            let meta = path.metadata().ok()?;
            if !meta.is_file() || meta.len() > COPY as u64 || Version::of(&meta) != version {
                return None;
            }
            std::fs::read(path).ok()
        }
    }
}

/// A copy of memory of this process. `None` if not all of it is there: the driver need not have looked
/// at all that a head tells of.
fn copied(address: usize, len: usize) -> Option<Vec<u8>> {
    let mut bytes = Vec::<u8>::with_capacity(len);
    let to = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: len };
    let from = libc::iovec { iov_base: address as *mut c_void, iov_len: len };
    // SAFETY: the kernel reads the memory, and stops where there is none; there is room for all of it.
    let count = unsafe { libc::process_vm_readv(libc::getpid(), &to, 1, &from, 1, 0) };
    // Where a sandbox forbids this call there are no copies.
    if usize::try_from(count) != Ok(len) {
        return None;
    }
    // SAFETY: the kernel has written all of them.
    unsafe { bytes.set_len(len) };
    Some(bytes)
}

/// Writes memory that may be gone: then it is an error of the call, not a fault of the program.
fn write(file: &mut File, bytes: *const c_void, len: usize) -> std::io::Result<()> {
    use std::os::fd::AsRawFd;
    let mut done = 0;
    while done < len {
        // SAFETY: the kernel reads the memory, and refuses where there is none.
        let count =
            unsafe { libc::write(file.as_raw_fd(), bytes.byte_add(done).cast(), len - done) };
        match usize::try_from(count) {
            Ok(0) => return Err(std::io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(_) => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    file.flush()
}

/// Whether an address lies in the program or one of its libraries, as the loader has mapped them.
fn is_in_object(address: usize) -> bool {
    let mut info: libc::Dl_info = {
        // SAFETY: the structure holds pointers only, for which zero is a value.
        unsafe { std::mem::zeroed() }
    };
    // SAFETY: any address may be asked about; the structure is writable.
    unsafe { libc::dladdr(address as *const c_void, &mut info) != 0 }
}

/// Where an image begins, and its length: a fat binary (perhaps behind its wrapper), a cubin, or
/// text that ends with a NUL.
///
/// # Safety
/// The driver has just read an image at `address`.
unsafe fn extent(address: usize) -> Option<(usize, usize)> {
    // SAFETY: the heads below are part of what the driver has read; text is at least four bytes
    // with its NUL, or no module.
    unsafe {
        let word = |at: usize| ((address + at) as *const u32).read_unaligned();
        let long = |at: usize| ((address + at) as *const u64).read_unaligned();
        let half = |at: usize| u64::from(((address + at) as *const u16).read_unaligned());
        let len = match word(0) {
            WRAPPER_MAGIC => {
                // Magic, version, then the address of the fat binary.
                let data = long(8) as usize;
                let whole = data != 0 && (data as *const u32).read_unaligned() == FATBIN_MAGIC;
                return if whole { extent(data) } else { None };
            }
            // Magic, version, size of this head; size of what follows it.
            FATBIN_MAGIC => half(6).checked_add(long(8))?,
            // The section headers come last: e_shoff + e_shentsize * e_shnum, or else the program
            // headers: e_phoff + e_phentsize * e_phnum.
            ELF_MAGIC => {
                let sections = long(40).checked_add(half(58) * half(60))?;
                sections.max(long(32).checked_add(half(54) * half(56))?)
            }
            _ => libc::strlen(address as *const c_char) as u64,
        };
        let len = usize::try_from(len).ok().filter(|len| *len > 0 && *len <= LARGEST)?;
        Some((address, len))
    }
}

/// Forgets everything, in the child of a fork.
///
/// # Safety
/// No other thread exists.
pub(crate) unsafe fn reset() {
    // SAFETY: the caller's duty.
    unsafe { IMAGES.reset(Mutex::new(None)) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::io::Read;

    fn opened(id: u64) -> Vec<u8> {
        let (fd, len) = open(id, 1 << 20).expect("opened");
        let mut file = File::from(fd);
        std::io::Seek::rewind(&mut file).expect("rewound");
        let mut bytes = Vec::new();
        file.take(len).read_to_end(&mut bytes).expect("read");
        bytes
    }

    #[test]
    fn images_are_as_long_as_their_heads_say() {
        static TEXT: &CStr = c".version 8.0 in the program itself";
        let heap = c".version 8.0 on the heap".to_owned();
        let mut fat = [0u8; 40];
        fat[..4].copy_from_slice(&FATBIN_MAGIC.to_le_bytes());
        fat[6] = 16;
        fat[8] = 20;
        let mut wrapper = [0u64; 3];
        wrapper[0] = u64::from(WRAPPER_MAGIC);
        wrapper[1] = fat.as_ptr() as u64;
        let mut elf = [0u8; 200];
        elf[..4].copy_from_slice(b"\x7fELF");
        elf[40] = 70; // e_shoff
        (elf[58], elf[60]) = (64, 2);
        // SAFETY: each is an image with its head.
        unsafe {
            loaded(0xf1, TEXT.as_ptr() as usize);
            loaded(0xf2, heap.as_ptr() as usize);
            loaded(0xf3, wrapper.as_ptr() as usize);
            loaded(0xf4, elf.as_ptr() as usize);
        }
        let id = |owner| of(owner).expect("noted");
        let mapped =
            with(|images| matches!(images.images[&images.by_owner[&0xf1]], Image::Mapped { .. }));
        assert!(mapped, "the program's own memory is not copied");
        assert_eq!(opened(id(0xf1)), TEXT.to_bytes());
        drop(std::mem::take(&mut heap.into_bytes()));
        assert_eq!(opened(id(0xf2)), b".version 8.0 on the heap", "its own copy");
        assert_eq!(opened(id(0xf3)), &fat[..36]);
        assert_eq!(opened(id(0xf4)), &elf[..198]);
        assert!(open(id(0xf4), 197).is_err(), "more than was asked for");
        let gone = id(0xf2);
        unloaded(0xf2);
        assert!(of(0xf2).is_none() && open(gone, 100).is_err());
    }

    /// The driver reads section headers; a cubin need not have all the program headers that it tells of.
    #[test]
    fn an_image_that_is_shorter_than_its_head_says_is_left_out() {
        const PAGE: usize = 4096;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: new memory, of which the second page is taken away again; the first has the head.
        unsafe {
            let start = libc::mmap(std::ptr::null_mut(), 2 * PAGE, protection, flags, -1, 0);
            assert_ne!(start, libc::MAP_FAILED);
            assert_eq!(libc::munmap(start.byte_add(PAGE), PAGE), 0);
            let elf = std::slice::from_raw_parts_mut(start.cast::<u8>(), PAGE);
            elf[..4].copy_from_slice(b"\x7fELF");
            elf[32..36].copy_from_slice(&(2 * PAGE as u32).to_le_bytes()); // e_phoff
            loaded(0xd1, start as usize);
            assert!(of(0xd1).is_none());
            elf[32..36].copy_from_slice(&(PAGE as u32).to_le_bytes());
            loaded(0xd1, start as usize);
            assert_eq!(opened(of(0xd1).expect("noted")), elf);
            libc::munmap(start, PAGE);
        }
    }

    #[test]
    fn a_file_that_has_changed_is_no_image() {
        let path = std::env::temp_dir().join(format!("gpucr-changed-{}", std::process::id()));
        let name = CString::new(path.as_os_str().as_bytes()).expect("no NUL");
        std::fs::write(&path, ".version 8.0").expect("written");
        // SAFETY: a C string.
        unsafe { loaded_from_file(0xd3, name.as_ptr() as usize) };
        let id = of(0xd3).expect("noted");
        assert_eq!(opened(id), b".version 8.0");
        std::fs::write(&path, ".version 10.0").expect("written");
        let opened = open(id, 100);
        std::fs::remove_file(path).expect("removed");
        assert!(opened.expect_err("another file").message.contains("has changed"));
    }

    #[test]
    fn what_has_become_a_pipe_is_not_waited_for() {
        let pipe = std::env::temp_dir().join(format!("gpucr-images-{}", std::process::id()));
        let path = CString::new(pipe.as_os_str().as_bytes()).expect("no NUL");
        // SAFETY: a C string.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        // SAFETY: a C string.
        unsafe { loaded_from_file(0xd2, path.as_ptr() as usize) };
        let opened = open(of(0xd2).expect("noted"), 100);
        std::fs::remove_file(pipe).expect("removed");
        assert!(opened.expect_err("no image").message.contains("plain file"));
    }

    #[test]
    fn memory_that_is_gone_is_an_error() {
        let address = 0x10; // no process has memory there
        with(|images| images.add(0xe1, Image::Mapped { address, len: 100 }));
        assert!(open(of(0xe1).expect("noted"), 100).is_err());
    }
}
