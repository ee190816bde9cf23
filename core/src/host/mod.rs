//! The processes of this host: those of a program, their agents and files, and CRIU, which saves them.

pub mod container;
pub mod criu;
pub mod namespace;
pub mod network;
mod ns;
pub mod process;
pub mod shield;
