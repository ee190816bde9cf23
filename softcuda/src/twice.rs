//! Running each kernel a second time, to see whether that changes anything (`SOFTCUDA_TWICE`).
//!
//! The second time leaves no trace: what it writes is undone, and its output and what it launches are dropped. Meanwhile
//! no other kernel, copy or fill runs; what a stream writes by `cuStreamWriteValue` is let through, since kernels may wait
//! for that, and may be lost if it is device memory. Memory of the host, which the program may use at the same time, and
//! memory behind multicast objects is not written the second time: of kernels that would, nothing is known.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::address_space;
use crate::ptx::{AddressSpace, Replicas};
use crate::settings::settings;
use crate::virtual_memory;

/// Held while a kernel, a copy or a fill runs.
static ALONE: Mutex<()> = Mutex::new(());

/// Waits until no other work runs; `None`, and at once, if kernels run only once.
pub(crate) fn alone() -> Option<MutexGuard<'static, ()>> {
    settings().twice.as_ref().map(|_| ALONE.lock())
}

/// The address space as a kernel sees it the second time: it does not write to memory of the host, nor to multicast
/// objects, since other processes may use what is behind these.
#[derive(Default)]
pub(crate) struct SecondView {
    /// It would have written there.
    others: AtomicBool,
}

impl AddressSpace for SecondView {
    fn is_mapped(&self, addr: u64, len: usize) -> bool {
        address_space::is_accessible(addr, len as u64)
    }

    fn is_writable(&self, addr: u64, len: usize) -> bool {
        let is_device = address_space::in_window(addr);
        if !is_device {
            self.others.store(true, Ordering::Relaxed);
        }
        is_device && address_space::is_writable(addr, len as u64)
    }

    fn replicas(&self, addr: u64, written: bool) -> Option<Replicas> {
        if written {
            self.others.store(true, Ordering::Relaxed);
            return None;
        }
        virtual_memory::replicas(addr, false)
    }
}

/// Runs a kernel a second time by `run`, which says whether it came to its end, and notes whether it changed any
/// device memory.
pub(crate) fn check(kernel: &str, run: impl FnOnce(&SecondView) -> bool) {
    let Some(path) = &settings().twice else { return };
    let before = Snapshot::take();
    let view = SecondView::default();
    let ended = run(&view);
    let what = match (before.put_back(), ended) {
        (true, true) => "same",
        (_, false) if view.others.load(Ordering::Relaxed) => "unknown",
        _ => "differs",
    };
    static FILE: OnceLock<Option<Mutex<File>>> = OnceLock::new();
    let opened = || {
        let file = OpenOptions::new().create(true).append(true).open(path);
        file.inspect_err(|error| eprintln!("softcuda: SOFTCUDA_TWICE: {error}"))
            .ok()
            .map(Mutex::new)
    };
    if let Some(file) = FILE.get_or_init(opened) {
        // In one call: several processes may write to the file.
        let line = format!("{kernel} {what}\n");
        let _ = file.lock().write_all(line.as_bytes());
    }
}

/// A copy of all device memory that may be written.
struct Snapshot {
    pieces: Vec<(u64, Vec<u8>)>,
}

impl Snapshot {
    fn take() -> Snapshot {
        let copy = |(address, size): (u64, u64)| {
            let mut bytes = vec![0; size as usize];
            // SAFETY: the memory is there as long as work that may touch it runs, which is now.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    address as *const u8,
                    bytes.as_mut_ptr(),
                    bytes.len(),
                );
            }
            (address, bytes)
        };
        Snapshot { pieces: address_space::writable_ranges().into_iter().map(copy).collect() }
    }

    /// Puts back what has changed; says whether nothing has.
    fn put_back(&self) -> bool {
        const PIECE: usize = 4096;
        let mut same = true;
        for (address, bytes) in &self.pieces {
            for (at, old) in bytes.chunks(PIECE).enumerate() {
                let place = (*address as usize + at * PIECE) as *mut u8;
                // SAFETY: as in `take`; no kernel runs.
                let now = unsafe { std::slice::from_raw_parts(place, old.len()) };
                if now == old {
                    continue;
                }
                same = false;
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(old.as_ptr(), place, old.len()) };
            }
        }
        same
    }
}
