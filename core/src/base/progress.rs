//! How far long work has come, for the user who watches it.

/// Where the phases of a dump or restore are shown.
pub trait Progress: Send + Sync {
    /// A phase begins; `bytes` is how much it has to move, where that is known.
    fn phase(&self, name: &'static str, bytes: Option<u64>);
    /// So many bytes more have been moved.
    fn advance(&self, bytes: u64);
    /// A migration begins another pass over the memory of the program.
    fn pass(&self, _: &Pass) {}
}

/// How a migration gets on with a program that runs.
#[derive(Debug, Clone, Copy, PartialEq, serde::Serialize)]
pub struct Pass {
    /// Its number, from 1.
    pub pass: u32,
    /// Bytes that have gone over the link.
    pub sent_bytes: u64,
    /// Bytes of device memory that the destination lacks.
    pub left_bytes: u64,
    /// Bytes of memory a second that go over, where that is known.
    pub bytes_per_s: Option<f64>,
    /// Bytes of device memory a second that the program changes.
    pub written_per_s: f64,
    /// How long the program would have to wait for what is left, were it stopped now, where that is known.
    pub downtime_ms: Option<f64>,
}

/// Shows nothing.
#[derive(Debug, Clone, Copy)]
pub struct Quiet;

impl Progress for Quiet {
    fn phase(&self, _: &'static str, _: Option<u64>) {}
    fn advance(&self, _: u64) {}
}
