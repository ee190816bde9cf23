//! What the fuzz targets share. See README.md.

use std::path::PathBuf;
use std::sync::OnceLock;

/// Gives `bytes` to a reader, see `gpucr_core::hostile` and `softcuda::hostile`.
pub fn feed(target: &str, bytes: &[u8]) {
    if softcuda::hostile::TARGETS.contains(&target) {
        return softcuda::hostile::feed(target, bytes);
    }
    if target == "rewrite" {
        let loads = |text: &str| softcuda::ptx::Module::load(text).is_ok();
        return gpucr_rewrite::hostile::feed(&String::from_utf8_lossy(bytes), loads);
    }
    static SCRATCH: OnceLock<PathBuf> = OnceLock::new();
    let scratch = SCRATCH.get_or_init(|| {
        // In memory, and one for each process: an import makes files.
        let dir = PathBuf::from(format!("/dev/shm/gpucr-fuzz-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&dir);
        std::fs::create_dir(&dir).expect("a scratch directory");
        dir
    });
    gpucr_core::hostile::feed(target, bytes, scratch);
}
