//! The processes of a program: their tree, their files, and the agents inside them.

pub mod agent;
pub(crate) mod answers;
pub mod files;
pub mod lock;
mod memory;
mod network;
pub(crate) mod queue;
mod running;
pub mod sockets;
pub mod survey;
pub mod tree;

pub use agent::{Agent, AgentError, Guard};
pub use lock::Lock;
pub(crate) use memory::ProcessMemory;
pub(crate) use running::RunningMemory;
pub(crate) use tree::LAST_MOMENTS;
pub use tree::{MappedLibrary, ProcessInfo, Tree, TreeError};
