//! Settings from the environment, and which devices there are by them.

use std::path::PathBuf;
use std::sync::{Once, OnceLock};
use std::time::Duration;

use crate::drivers::Driver;
use crate::models::Model;
use crate::status::{Code, Outcome};

/// The most devices that `SOFTCUDA_DEVICES` can ask for.
pub(crate) const MAX_DEVICES: usize = 16;

/// Settings, read once from the environment; see the README for their meaning.
pub(crate) struct Settings {
    /// The driver that this one presents itself as.
    pub(crate) driver: Driver,
    /// Whether the process belongs to a job of `cuda-checkpoint --launch-job`.
    pub(crate) in_job: bool,
    /// What is wrong with the settings; nothing can be initialised then.
    pub(crate) mistake: Option<String>,
    /// Number of devices.
    pub(crate) devices: usize,
    /// What the devices are; the last one stands for all beyond the list, which is not empty.
    models: Vec<Model>,
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
    /// Whether devices that can have multicast objects have them.
    multicast: bool,
    /// Whether there are functions that are newer than all headers.
    pub(crate) newer: bool,
    /// A file that tells of each kernel whether running it a second time changes anything.
    pub(crate) twice: Option<PathBuf>,
    /// Whether kernels of a process that was restored make no room for other processes.
    pub(crate) switching: Option<Switching>,
    /// Whether to name refused calls on standard error.
    pub(crate) log: bool,
    /// Whether to name all calls by private tables there, too.
    pub(crate) log_tables: bool,
}

impl Settings {
    /// What a device is.
    pub(crate) fn model(&self, ordinal: usize) -> &Model {
        &self.models[ordinal.min(self.models.len() - 1)]
    }

    /// Whether a device can be part of a multicast object.
    pub(crate) fn has_multicast(&self, ordinal: usize) -> bool {
        self.multicast && self.vmm > Vmm::None && self.model(ordinal).generation.has_multicast()
    }

    /// Whether a checkpoint carries memory that is shared through IPC handles.
    pub(crate) fn carries_ipc_memory(&self) -> bool {
        self.in_job && self.driver.carries_ipc_memory()
    }
}

/// What happens to a kernel that makes no room for another process.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Switching {
    /// How long it may run on.
    pub(crate) time: Duration,
    /// Has a byte for each context that a process has made.
    pub(crate) file: PathBuf,
}

impl Switching {
    /// From `MS@FILE`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (time, file) = text.split_once('@')?;
        Some(Self { time: Duration::from_millis(time.parse().ok()?), file: file.into() })
    }
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
        let named = text("SOFTCUDA_DRIVER").map_or(Ok(Driver::R580), |name| Driver::parse(&name));
        let memory = text("SOFTCUDA_MEMORY").and_then(|v| parse_size(&v)).unwrap_or(8 << 30);
        let listed = text("SOFTCUDA_DEVICE").map(|list| Model::parse_list(&list, parse_size));
        let mistake = named.as_ref().err().or(listed.as_ref().and_then(|list| list.as_ref().err()));
        let mistake = mistake.cloned();
        let models = listed.and_then(Result::ok);
        let models = models.unwrap_or_else(|| vec![Model::of_this_machine(memory)]);
        Settings {
            driver: named.unwrap_or(Driver::R580),
            in_job: text("CUDA_CHECKPOINT_JOB_FILE").is_some(),
            mistake,
            devices: text("SOFTCUDA_DEVICES")
                .and_then(|v| v.parse().ok())
                .map_or(models.len(), |n: usize| n)
                .min(MAX_DEVICES),
            models,
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
            multicast: text("SOFTCUDA_MULTICAST").is_none_or(|v| v != "none"),
            newer: text("SOFTCUDA_NEWER").is_some_and(|v| v != "0"),
            twice: text("SOFTCUDA_TWICE").map(PathBuf::from),
            switching: text("SOFTCUDA_SWITCH").and_then(|text| Switching::parse(&text)),
            log: text("SOFTCUDA_LOG").is_some_and(|v| v != "0"),
            log_tables: text("SOFTCUDA_LOG").is_some_and(|v| v == "tables"),
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

/// Refuses settings that mean nothing. What is wrong is said on standard error, once.
///
/// # Errors
/// `INVALID_VALUE`.
pub(crate) fn check() -> Outcome {
    static SAID: Once = Once::new();
    let Some(mistake) = &settings().mistake else { return Ok(()) };
    SAID.call_once(|| eprintln!("softcuda: {mistake}"));
    Err(Code::INVALID_VALUE)
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
