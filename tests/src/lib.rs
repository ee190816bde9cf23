//! What the end-to-end tests share: programs that are started, dumped and restored, in a folder of
//! their own, with everything they print in a file.

mod command;
mod disk;
mod dumped;
mod lab;
pub mod migrated;
pub mod migration;
mod network;
mod nvcc;
mod pace;
mod paused;
mod pipes;
mod program;
mod random;
pub mod relay;
mod skip;
pub mod sockets;
mod squatter;
mod started;
pub mod warm;
pub mod watched;
mod workloads;

pub use command::{binary, exists, finish, in_own_session, refused, show, until};
pub use disk::SmallDisk;
pub use dumped::{Dumped, Piped, last_step};
pub use lab::{Lab, undisturbed};
pub use network::Network;
pub use nvcc::Nvcc;
pub use pace::Pace;
pub use paused::{PausedDump, PausedRestore, child_named, kill};
pub use pipes::Pipes;
pub use program::Program;
pub use random::{Random, at_random, number};
pub use skip::skip;
pub use squatter::Squatter;
pub use started::Started;
pub use workloads::{
    ADVERSARIES, DEVICES, GROUPS, HOST, INTERRUPTED, LARGE, MAY_FALL_BACK, MULTICAST, REFUSED,
};
