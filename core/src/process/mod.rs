//! The processes of a program: their tree, their files, and the agents inside them.

pub mod agent;
pub mod files;
pub mod lock;
pub mod sockets;
pub mod tree;

pub use agent::{Agent, AgentError, Guard};
pub use lock::Lock;
pub use tree::{ProcessInfo, Tree, TreeError};
