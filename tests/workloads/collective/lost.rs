//! Ranks that have ended: a word of host memory that a thread writes and kernels look at.

use std::ffi::c_void;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, poll};

use super::links::Link;
use super::options::MOST;
use crate::cuda::{check, driver};

/// `CU_MEMHOSTREGISTER_DEVICEMAP`.
const DEVICE_MAP: u32 = 2;

/// A page of memory whose first word has a bit for each rank that has ended.
#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

static LOST: Page = Page([const { AtomicU32::new(0) }; 1024]);

/// Ranks that have ended, a bit for each.
#[derive(Debug)]
pub(crate) struct Lost(pub(super) u32);

impl Lost {
    /// Whether a rank is among them.
    pub(crate) fn has(&self, rank: u32) -> bool {
        self.0 >> rank & 1 == 1
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> =
            (0..MOST).filter(|rank| self.has(*rank)).map(|rank| rank.to_string()).collect();
        write!(f, "rank {} has ended: no operation with it comes to its end", ranks.join(", "))
    }
}

impl std::error::Error for Lost {}

/// The address by which kernels reach the word.
pub(super) fn word() -> Result<u64> {
    static ADDRESS: OnceLock<u64> = OnceLock::new();
    if let Some(address) = ADDRESS.get() {
        return Ok(*address);
    }
    let page: *mut c_void = LOST.0.as_ptr().cast_mut().cast();
    let mut address = 0;
    // SAFETY: a static of this size, all of it atomics, which stays registered as long as the process lives; a place for
    // the result.
    unsafe {
        let code = (driver().cuMemHostRegister)(page, size_of::<Page>(), DEVICE_MAP);
        check("cuMemHostRegister", code)?;
        let code = (driver().cuMemHostGetDevicePointer)(&raw mut address, page, 0);
        check("cuMemHostGetDevicePointer", code)?;
    }
    Ok(*ADDRESS.get_or_init(|| address))
}

fn note(rank: u32) {
    LOST.0[0].fetch_or(1 << rank, Ordering::SeqCst);
}

/// Starts a thread that notes who ends: the first rank has a link to each other one and tells the others, which have one to
/// the first.
pub(super) fn watch(links: Vec<(u32, Link)>) -> Result<()> {
    let watcher = std::thread::Builder::new().name("watch".to_owned());
    watcher.spawn(move || watch_all(links)).context("a thread that watches")?;
    Ok(())
}

fn watch_all(mut links: Vec<(u32, Link)>) {
    while !links.is_empty() {
        let mut ready: Vec<PollFd<'_>> =
            links.iter().map(|(_, link)| PollFd::new(link, PollFlags::IN)).collect();
        if poll(&mut ready, None).is_err() {
            // A signal, or a stop and a start again.
            continue;
        }
        let Some(at) = ready.iter().position(|link| !link.revents().is_empty()) else { continue };
        match links[at].1.receive() {
            Ok(said) => said.iter().for_each(|rank| note((*rank).into())),
            Err(_) => {
                let (rank, _) = links.remove(at);
                note(rank);
                // Who cannot be told has ended too, which its own link says.
                links.iter_mut().for_each(|(_, link)| drop(link.send(&[rank as u8])));
            }
        }
    }
}
