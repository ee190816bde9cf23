//! The processes of this host: those of a program, their agents and files, and CRIU, which saves them.

pub mod criu;
pub mod namespace;
pub mod network;
pub mod process;
