//! The private memory of restored processes, which gpucr brings in in CRIU's place.
//!
//! CRIU reads the memory of a process on one thread, and a page of it at a time becomes the process's: 1.6 GB/s
//! were measured, which is most of what CRIU's part of a restore takes. It can also leave private memory to
//! somebody else, who brings it in when it is touched (`criu lazy-pages`). That is gpucr: [`Plan`] says which
//! memory it is and where its bytes are, and [`Loading`] brings it, in one of two ways. All of it is loaded before
//! any process runs, on several threads (`eager.rs`); or the processes run, and it comes when they touch it
//! (`on_demand.rs`, and `server.rs` for each process).

mod ahead;
mod eager;
mod follow;
mod missing;
mod on_demand;
mod plan;
mod server;
mod stage;
mod talk;
mod trace;
mod uffd;

#[cfg(test)]
mod tests;

pub(super) use follow::why_not_late;
pub(crate) use on_demand::OnDemandMemory;
pub(crate) use plan::{PagesFile, Part, Plan};
pub(crate) use server::{Keep, OnDemandError};
pub(super) use talk::Loading;
pub(crate) use uffd::is_alive;
