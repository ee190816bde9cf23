//! The real driver library: finding it and opening it.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::{env, fs, mem};

use gpucr_wire::ENV_DRIVER;

use super::diverted;
use super::table::{COUNT, NAMES, Wrapper};
use crate::log::log;

/// Where the library lies on usual systems, after `LD_LIBRARY_PATH`.
const DIRECTORIES: &[&str] = &[
    "/usr/local/nvidia/lib64",
    "/usr/local/nvidia/lib",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64/nvidia",
    "/usr/lib64",
    "/lib64",
    "/usr/lib",
    "/lib",
    "/usr/local/lib",
    "/usr/lib/wsl/lib",
    "/run/opengl-driver/lib",
];

/// Tells one copy of this library from a driver, whatever file it lies in.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn gpucr_intercept_protocol() -> u32 {
    gpucr_wire::PROTOCOL_VERSION
}

unsafe extern "Rust" {
    /// What this library puts in the place of the driver's functions. Where two functions of the driver are one,
    /// what comes last counts.
    ///
    /// It is defined in `exports.rs`, and known here by its symbol only: the functions lie above this, and the
    /// library is opened by whatever call comes first, before anybody could hand over a list.
    safe fn gpucr_intercept_replaced() -> Vec<Wrapper>;
}

/// The opened driver library. It stays open until the process ends.
pub(crate) struct Library {
    handle: *mut c_void,
    /// The file it came from.
    pub(crate) path: PathBuf,
    /// Its functions, in the order of the table. A program that looks one up in the library from now on may find ours.
    functions: Box<[Option<*const ()>; COUNT]>,
    /// What the program is given in place of some of them.
    pub(crate) replaced: Vec<Wrapper>,
    /// Whether somebody had opened it before, and may have looked functions up then.
    pub(crate) was_open: bool,
    /// What the loader calls it, and this library.
    known: Vec<PathBuf>,
}

// SAFETY: the handle is only passed to dlsym, which any thread may call; the others are addresses of functions.
unsafe impl Send for Library {}
// SAFETY: dlsym may be called with the handle by several threads at once; the rest is not changed.
unsafe impl Sync for Library {}

impl Library {
    /// A function of the table; `None` if the library does not have it.
    pub(crate) fn function(&self, index: usize) -> Option<*const ()> {
        self.functions[index]
    }

    fn symbol(&self, name: &CStr) -> Option<*const ()> {
        // SAFETY: the handle is open and the name ends with a NUL.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const().cast())
    }

    fn open(path: PathBuf) -> Result<Self, String> {
        let name = CString::new(path.clone().into_os_string().into_vec())
            .map_err(|_| "its name holds a NUL".to_owned())?;
        let mut flags = libc::RTLD_NOW | libc::RTLD_LOCAL;
        if !binds_to_itself(&path) {
            // Its references to its own functions must not reach ours. It does not see a preloaded allocator
            // then, and what another library has allocated with that it must not free.
            flags |= libc::RTLD_DEEPBIND;
        }
        let was_open = is_open(&name);
        // SAFETY: the name ends with a NUL. The driver's constructors are the driver's matter.
        let handle = unsafe { libc::dlopen(name.as_ptr(), flags) };
        if handle.is_null() {
            // SAFETY: after a failed dlopen this is a C string, or null.
            let error = unsafe { libc::dlerror() };
            if error.is_null() {
                return Err("it cannot be opened".to_owned());
            }
            // SAFETY: not null, see above.
            return Err(unsafe { CStr::from_ptr(error) }.to_string_lossy().into_owned());
        }
        let functions = Box::new([None; COUNT]);
        let (replaced, known) = (gpucr_intercept_replaced(), Vec::new());
        let mut library = Self { handle, path, functions, replaced, was_open, known };
        if library.symbol(c"gpucr_intercept_protocol").is_some() {
            return Err("it is a shim of gpucr, not a driver".to_owned());
        }
        let init = library.symbol(c"cuInit").ok_or("it has no cuInit")?;
        let known = [loaded_as(init), loaded_as(own_file as *const ())].into_iter().flatten();
        library.known = known.map(|name| OsStr::from_bytes(name.to_bytes()).into()).collect();
        *library.functions = NAMES.map(|name| library.symbol(name));
        if let Err(error) = diverted::divert(&library.replaced, |index| library.function(index)) {
            log!("who opens the driver by its path goes past the gate: {error}");
        }
        Ok(library)
    }
}

/// Whether a library is in the process already.
fn is_open(name: &CStr) -> bool {
    let flags = libc::RTLD_NOW | libc::RTLD_LOCAL | libc::RTLD_NOLOAD;
    // SAFETY: the name ends with a NUL. Nothing is loaded, and what is there is counted down again.
    unsafe {
        let handle = libc::dlopen(name.as_ptr(), flags);
        if !handle.is_null() {
            libc::dlclose(handle);
        }
        !handle.is_null()
    }
}

/// Whether a library was linked so that it finds its own functions in itself, whatever else the process has
/// loaded (`-Bsymbolic`). NVIDIA's is. `false` if that cannot be read.
fn binds_to_itself(path: &Path) -> bool {
    const DYNAMIC: u32 = libc::PT_DYNAMIC;
    const SYMBOLIC: u64 = 16; // DT_SYMBOLIC
    const FLAGS: u64 = 30; // DT_FLAGS
    const FLAG_SYMBOLIC: u64 = 2; // DF_SYMBOLIC
    const LARGEST: usize = 1 << 16; // far more than such a segment has
    let Ok(file) = fs::File::open(path) else { return false };
    let read = |at: u64, bytes: usize| {
        let mut buffer = vec![0; bytes];
        file.read_exact_at(&mut buffer, at).ok().map(|()| buffer)
    };
    let word = |bytes: &[u8], at: usize, size: usize| {
        let mut word = [0; 8];
        word[..size].copy_from_slice(&bytes[at..at + size]);
        u64::from_le_bytes(word)
    };
    let symbolic = || {
        let header = read(0, 64)?;
        if !header.starts_with(b"\x7fELF\x02\x01") {
            return None;
        }
        let (at, each, count) = (word(&header, 32, 8), word(&header, 54, 2), word(&header, 56, 2));
        let segment = |number| read(at.checked_add(number * each)?, 56);
        let is_dynamic = |segment: &Vec<u8>| word(segment, 0, 4) == u64::from(DYNAMIC);
        let dynamic = (0..count).filter_map(segment).find(is_dynamic)?;
        let size = usize::try_from(word(&dynamic, 32, 8)).ok()?.min(LARGEST);
        let entries = read(word(&dynamic, 8, 8), size)?;
        let entries = entries.chunks_exact(16).map(|entry| (word(entry, 0, 8), word(entry, 8, 8)));
        let says = |(tag, value)| tag == SYMBOLIC || tag == FLAGS && value & FLAG_SYMBOLIC != 0;
        Some(entries.take_while(|(tag, _)| *tag != 0).any(says))
    };
    symbolic().unwrap_or(false)
}

/// The name under which the loader knows the library that has this address.
fn loaded_as(address: *const ()) -> Option<&'static CStr> {
    // SAFETY: the structure holds pointers only, for which zero is a value.
    let mut info: libc::Dl_info = unsafe { mem::zeroed() };
    // SAFETY: the structure is writable.
    let found = unsafe { libc::dladdr(address.cast(), &mut info) };
    // SAFETY: dladdr gives a C string that lives as long as the library: ours and the driver's stay.
    (found != 0 && !info.dli_fname.is_null()).then(|| unsafe { CStr::from_ptr(info.dli_fname) })
}

/// The file that this code was loaded from.
///
/// It is looked for once, by the first call of the driver: a thread that loads a library keeps the loader's lock
/// while it waits at a closed gate.
pub(crate) fn own_file() -> Option<&'static Path> {
    static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
    let find = || {
        let name = loaded_as(own_file as *const ())?;
        fs::canonicalize(OsStr::from_bytes(name.to_bytes())).ok()
    };
    FILE.get_or_init(find).as_deref()
}

/// Driver libraries that the process has loaded besides ours and the one that ours has opened.
pub(crate) fn others() -> Vec<PathBuf> {
    unsafe extern "C" fn add(info: *mut libc::dl_phdr_info, _: usize, found: *mut c_void) -> c_int {
        // SAFETY: as the loader calls it, with the place that it was given below.
        let (info, found) = unsafe { (&*info, &mut *found.cast::<Vec<PathBuf>>()) };
        if !info.dlpi_name.is_null() {
            // SAFETY: a C string of the loader's.
            let name = unsafe { CStr::from_ptr(info.dlpi_name) };
            found.push(PathBuf::from(OsStr::from_bytes(name.to_bytes())));
        }
        0
    }
    let Some(library) = library() else { return Vec::new() };
    let mut found = Vec::<PathBuf>::new();
    // SAFETY: the function takes these arguments. It does not take the lock under which libraries are loaded.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut found).cast()) };
    let is_driver = |path: &PathBuf| {
        let name = path.file_name().map(OsStr::as_bytes);
        name.is_some_and(|name| name.starts_with(b"libcuda.so"))
    };
    found.retain(|path| is_driver(path) && !library.known.contains(path));
    found
}

/// The real driver library; `None` if there is none. Opened by the first call.
pub(crate) fn library() -> Option<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    LIBRARY.get_or_init(find).as_ref()
}

fn find() -> Option<Library> {
    let own = own_file().and_then(|path| fs::metadata(path).ok()).map(|m| (m.dev(), m.ino()));
    let try_open = |path: &Path| {
        let meta = fs::metadata(path).ok()?;
        if own == Some((meta.dev(), meta.ino())) {
            return None;
        }
        match Library::open(path.to_path_buf()) {
            Ok(library) => {
                log!("driver: {}", path.display());
                Some(library)
            }
            Err(error) => {
                log!("{}: {error}", path.display());
                None
            }
        }
    };
    if let Some(path) = env::var_os(ENV_DRIVER).filter(|path| !path.is_empty()) {
        // Named explicitly: another driver in its place would be a surprise.
        let path = PathBuf::from(path);
        let library = if path.is_absolute() { try_open(&path) } else { None };
        if library.is_none() {
            log!("{ENV_DRIVER}={} is no driver library", path.display());
        }
        return library;
    }
    let listed = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = env::split_paths(&listed).filter(|dir| dir.is_absolute()).collect::<Vec<_>>();
    let usual = DIRECTORIES.iter().map(PathBuf::from);
    let found = listed.into_iter().chain(usual).find_map(|dir| try_open(&dir.join("libcuda.so.1")));
    if found.is_none() {
        log!("no driver library found");
    }
    found
}
