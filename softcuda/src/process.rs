//! What belongs to the process as a whole: initialisation, settings from the environment, the
//! devices, and what happens after `fork`.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::device_memory;
use crate::exclusive;
use crate::service;
use crate::shared_events;
use crate::status::{Code, Outcome};
use crate::virtual_memory;

/// The most devices that `SOFTCUDA_DEVICES` can ask for.
pub(crate) const MAX_DEVICES: usize = 16;

/// Settings, read once from the environment; see the README for their meaning.
pub(crate) struct Settings {
    /// Number of devices.
    pub(crate) devices: usize,
    /// Memory of each device in bytes.
    pub(crate) memory: u64,
    /// A file system whose room is the memory that is left on the devices, for all processes together.
    pub(crate) memory_dir: Option<PathBuf>,
    /// Memory of the device that each context takes, in bytes.
    pub(crate) context_memory: u64,
    /// Limit of each copy direction in bytes per second.
    pub(crate) copy_rate: Option<f64>,
    /// Rate of the driver's own checkpoint and restore in bytes per second.
    pub(crate) checkpoint_rate: Option<f64>,
    /// Whether a restore that finds too little memory is the last.
    pub(crate) restores_once: bool,
    /// Whether only one process may have contexts on a device.
    pub(crate) exclusive: bool,
    /// What virtual memory management can do.
    pub(crate) vmm: Vmm,
    /// Whether there are functions that are newer than all headers.
    pub(crate) newer: bool,
    /// Whether to name refused calls on standard error.
    pub(crate) log: bool,
}

/// What virtual memory management can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Vmm {
    /// There is none.
    None,
    /// Its memory cannot be handed to another process.
    Private,
    /// All of it.
    Full,
}

/// The settings of this process.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let text = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let rate = |name: &str| {
            let rate = text(name)?.parse::<f64>().ok()?;
            (rate.is_finite() && rate > 0.0).then_some(rate * 1e9)
        };
        Settings {
            devices: text("SOFTCUDA_DEVICES")
                .and_then(|v| v.parse().ok())
                .map_or(1, |n: usize| n.min(MAX_DEVICES)),
            memory: text("SOFTCUDA_MEMORY").and_then(|v| parse_size(&v)).unwrap_or(8 << 30),
            memory_dir: text("SOFTCUDA_MEMORY_DIR").map(PathBuf::from),
            context_memory: text("SOFTCUDA_CONTEXT_MEMORY")
                .and_then(|v| parse_size(&v))
                .unwrap_or_default(),
            copy_rate: rate("SOFTCUDA_PCIE_GBPS"),
            checkpoint_rate: rate("SOFTCUDA_CHECKPOINT_GBPS"),
            restores_once: text("SOFTCUDA_RESTORE").is_some_and(|v| v == "once"),
            exclusive: text("SOFTCUDA_COMPUTE_MODE").is_some_and(|v| v == "exclusive"),
            vmm: match text("SOFTCUDA_VMM").as_deref() {
                Some("none") => Vmm::None,
                Some("private") => Vmm::Private,
                _ => Vmm::Full,
            },
            newer: text("SOFTCUDA_NEWER").is_some_and(|v| v != "0"),
            log: text("SOFTCUDA_LOG").is_some_and(|v| v != "0"),
        }
    })
}

/// Bytes from a number with an optional suffix `K`, `M`, `G` or `T` (powers of 1024).
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => 0,
        "K" | "KIB" => 10,
        "M" | "MIB" => 20,
        "G" | "GIB" => 30,
        "T" | "TIB" => 40,
        _ => return None,
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift).filter(|size| *size > 0)
}

static INITIALISED: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn before_fork() {
    virtual_memory::before_fork();
}

extern "C" fn in_parent() {
    virtual_memory::after_fork();
}

extern "C" fn in_child() {
    // Only the forking thread lives on here, and locks may be held for ever: from now on every
    // call is refused before it takes one.
    FORKED.store(true, Ordering::SeqCst);
    virtual_memory::close_in_child();
    device_memory::close_in_child();
    shared_events::close_in_child();
    exclusive::close_in_child();
    service::close_after_fork();
}

/// What `cuInit` does. Calling it again is harmless.
///
/// # Errors
/// `NOT_INITIALIZED` in the child of an initialised process, `NO_DEVICE` without devices,
/// `OPERATING_SYSTEM` when the service thread cannot be started; the process is then not
/// initialised.
pub(crate) fn initialise() -> Outcome {
    static STARTING: Mutex<()> = Mutex::new(());
    if FORKED.load(Ordering::SeqCst) {
        return Err(Code::NOT_INITIALIZED);
    }
    let _guard = STARTING.lock();
    if INITIALISED.load(Ordering::SeqCst) {
        return Ok(());
    }
    if settings().devices == 0 {
        return Err(Code::NO_DEVICE);
    }
    service::start()?;
    // SAFETY: in the child, the handlers wait for no lock but the allocator's, which the C library
    // itself keeps usable there, and give none back.
    let handlers =
        unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
    if handlers != 0 {
        return Err(Code::OPERATING_SYSTEM);
    }
    INITIALISED.store(true, Ordering::SeqCst);
    Ok(())
}

/// Whether this process is the child of an initialised one.
pub(crate) fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Fails unless `cuInit` has succeeded in this very process.
pub(crate) fn check_initialised() -> Outcome {
    if INITIALISED.load(Ordering::Relaxed) && !is_forked() {
        Ok(())
    } else {
        Err(Code::NOT_INITIALIZED)
    }
}

/// Checks a device ordinal.
///
/// # Errors
/// `INVALID_DEVICE` when there is none with this number.
pub(crate) fn device(ordinal: i32) -> Outcome<usize> {
    usize::try_from(ordinal)
        .ok()
        .filter(|ordinal| *ordinal < settings().devices)
        .ok_or(Code::INVALID_DEVICE)
}

#[cfg(test)]
mod tests {
    use super::parse_size;

    #[test]
    fn sizes() {
        assert_eq!(parse_size("8G"), Some(8 << 30));
        assert_eq!(parse_size("512m"), Some(512 << 20));
        assert_eq!(parse_size("4096"), Some(4096));
        assert_eq!(parse_size("64 KiB"), Some(64 << 10));
        assert_eq!(parse_size("0"), None);
        assert_eq!(parse_size("G"), None);
        assert_eq!(parse_size("8X"), None);
    }
}
