//! `gpucr dump`: from a running program to an image.
//!
//! `phases.rs` is the list of phases; [`dump`] decides whether to try again. Up to and including `attach` nothing of
//! the program is changed, and in `precopy` it runs on. From `gate` on it is stopped. From `precopy` on every failure
//! leads through `phases::go_on`, which brings it back to running. The image is committed while CRIU holds the program
//! frozen, so at every moment either the program runs or the image is complete. With protocol `cow` the program goes
//! on before that, and the image is completed while it runs. If the program writes memory before that is saved
//! (`defer.rs`), the dump stops it once more and saves everything before it goes on. What protocols do differently is
//! in `strategy.rs`.

mod attach;
mod commit;
mod copy;
mod defer;
mod describe;
mod dry_run;
mod freeze;
mod halt;
mod host;
mod inside;
mod passes;
mod phases;
mod precopy;
mod preflight;
mod report;
mod resume;
mod series;
mod setback;
mod speculate;
mod stop;
mod strategy;
mod supervisor;
mod task;
mod validate;

pub use crate::base::timeline::Misspeculation;
pub use crate::engine::memory::Validation;
pub use defer::{Deferral, Feedback};
pub(crate) use describe::option_values;
pub use dry_run::blockers;
pub use host::memory::HostMemory;
pub use report::{CriuOptions, LetThrough, Options, Report, SAVE_FILES, Target};
pub use series::{AfterFailure, Schedule, Series};
pub use supervisor::{dump, offer};
