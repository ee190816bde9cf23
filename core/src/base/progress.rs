//! How far long work has come, for the user who watches it.

/// Where the phases of a dump or restore are shown.
pub trait Progress: Send + Sync {
    /// A phase begins; `bytes` is how much it has to move, where that is known.
    fn phase(&self, name: &'static str, bytes: Option<u64>);
    /// So many bytes more have been moved.
    fn advance(&self, bytes: u64);
}

/// Shows nothing.
#[derive(Debug, Clone, Copy)]
pub struct Quiet;

impl Progress for Quiet {
    fn phase(&self, _: &'static str, _: Option<u64>) {}
    fn advance(&self, _: u64) {}
}
