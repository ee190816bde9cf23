//! The processes of a program: their tree, their files, and the agents inside them.

pub mod agent;
pub(crate) mod answers;
pub mod closed;
pub mod connections;
pub(crate) mod farewell;
pub mod files;
pub mod held;
pub mod lock;
mod memory;
pub(crate) mod network;
pub(crate) mod pagemap;
pub(crate) mod queue;
mod running;
pub(crate) mod smaps;
pub mod sockets;
pub mod survey;
mod tracking;
pub mod tree;
mod write_protect;
mod writers;

pub use agent::{Agent, AgentError, Guard};
pub use lock::Lock;
pub(crate) use memory::{Place, ProcessMemory};
pub(crate) use pagemap::{Run, State, filled, mapped_privately};
pub(crate) use running::RunningMemory;
pub use tracking::why_untracked;
pub(crate) use tracking::{Look, Tracking, obstacle as why_not_to_track};
pub(crate) use tree::{LAST_MOMENTS, kill_trees};
pub use tree::{
    MappedLibrary, ProcessInfo, Tree, TreeError, descends_from, environment, has_in_tree, identity,
    kill_descendants,
};
pub(crate) use writers::wait_for_writers;
