//! How far workloads may get.

use std::io::Write;

use anyhow::Result;

/// How far a workload that was started with `--pace` may get: however slow the machine, it does not
/// end before the test wants it to.
#[derive(Debug)]
pub struct Pace(tempfile::NamedTempFile);

impl Pace {
    /// A pace that allows no step yet.
    ///
    /// # Errors
    /// No temporary file can be made.
    pub fn new() -> Result<Self> {
        Ok(Self(tempfile::NamedTempFile::new()?))
    }

    /// The value of `--pace`.
    pub fn file(&self) -> &str {
        self.0.path().to_str().expect("temporary directories have names in UTF-8")
    }

    /// Lets it go on to its end, and its children too.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn allow_all(&self) -> Result<()> {
        self.allow(1 << 20)
    }

    /// Lets it go on to its end without pauses.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn hurry(&self) -> Result<()> {
        self.allow(1 << 21)
    }

    /// Holds it up at this step, if it has not come there yet.
    ///
    /// # Errors
    /// The file cannot be changed.
    pub fn hold_at(&self, step: usize) -> Result<()> {
        Ok(self.0.as_file().set_len(step as u64)?)
    }

    /// Lets so many more steps end.
    ///
    /// # Errors
    /// The file cannot be written to.
    pub fn allow(&self, steps: usize) -> Result<()> {
        Ok(self.0.as_file().write_all(&vec![b'.'; steps])?)
    }
}
