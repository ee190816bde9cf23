//! File systems that are full soon.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, ensure};

/// A file system of the given size, unmounted on drop.
pub struct SmallDisk(PathBuf);

impl SmallDisk {
    /// Mounts it at a path where nothing is yet.
    ///
    /// # Errors
    /// Something is there, or nothing can be mounted there.
    pub fn mount(path: PathBuf, kib: u32) -> Result<Self> {
        std::fs::create_dir(&path)?;
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={kib}k"), "tmpfs"])
            .arg(&path)
            .status()?;
        ensure!(mounted.success(), "a small file system is needed for this test");
        Ok(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // At once, whatever a test that has failed leaves behind: a process on its way out, for example.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}
