//! `gpucr restore`: from an image to a running program.
//!
//! `phases.rs` is the list of phases, `arrival/` has the ways for device memory to arrive, and `supervisor.rs` decides
//! whether to try again. The image is only read. Whatever can fail early
//! does so before CRIU lets the processes run: from then on their host side runs, and waits only
//! where it calls the driver, until the gates open. A failure ends whatever had been restored.

pub(super) mod ahead;
mod arrival;
mod at_hand;
mod bulk;
mod criu;
mod devices;
pub(crate) mod driver;
mod extract;
mod files;
mod given;
pub(super) mod lacks;
mod late;
mod load;
mod loading;
mod memory;
mod options;
mod output;
mod phases;
mod preflight;
mod processes;
mod report;
mod room;
mod root;
mod source;
#[cfg(test)]
mod source_tests;
pub(super) mod stdio;
mod supervisor;
mod under_way;
mod unshared;
mod watch;

pub use at_hand::AtHand;
pub use devices::{Identity, MappedDevice, Moved};
pub use files::{ChangedFile, FileFate, FilePolicy};
pub use given::{Given, LoadedMemory};
pub use lacks::{blockers, leads_its_session, would_leave_network};
pub use options::{GoesOn, MayRun, Options};
pub use report::{OnDemand, Report, Shared};
pub(in crate::engine) use room::check_bytes as check_room;
pub use root::mounted_places;
pub use stdio::{OutputFiles, Outputs};
pub use supervisor::{Happened, Instance, Program, restore, restore_elsewhere};
pub use watch::Watch;
