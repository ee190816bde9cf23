//! What the end-to-end tests share: programs that are started, dumped and restored, in a folder of
//! their own, with everything they print in a file.

mod command;
mod disk;
mod dumped;
mod lab;
pub mod migration;
mod nvcc;
mod pace;
mod paused;
mod program;
mod skip;
mod squatter;
mod started;
pub mod warm;
pub mod watched;
mod workloads;

pub use command::{binary, exists, finish, in_own_session, refused, show, until};
pub use disk::SmallDisk;
pub use dumped::{Dumped, Piped, last_step};
pub use lab::{Lab, undisturbed};
pub use nvcc::Nvcc;
pub use pace::Pace;
pub use paused::{PausedDump, PausedRestore, child_named, kill};
pub use program::Program;
pub use skip::skip;
pub use squatter::Squatter;
pub use started::Started;
pub use workloads::{ADVERSARIES, DEVICES, GROUPS, HOST, INTERRUPTED, LARGE, REFUSED};

/// Numbers that look random and are the same in every run; the seed is in the name of a failure.
pub struct Random(pub u64);

impl Random {
    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}
