//! The bulk memory of the programs, as gpucr sees it: hashing it, and copying it into a
//! [sink](crate::store::ChunkSink). Dumps and traces use it.
//!
//! | file | contents |
//! |---|---|
//! | `chunks.rs` | what is known of each chunk |
//! | `bulk.rs` | [`Bulk`]: the memory of all programs, mapped here |
//! | `hash_pass.rs` | hash passes, and the validation of what was copied |
//! | `questions.rs` | what others ask of chunks, by address |
//! | `plan.rs` | which chunks are copied, and in which order |
//! | `shadow.rs` | copies of chunks within the device |
//! | `deferred.rs` | chunks that are saved while the programs run |
//! | `transfer.rs` | the one way of chunks from the devices into a sink |
//! | `save.rs` | what is transferred when: ahead, and what is left |

mod bulk;
mod chunks;
mod deferred;
mod hash_pass;
mod plan;
mod questions;
mod save;
mod shadow;
mod transfer;

#[cfg(test)]
mod save_tests;
#[cfg(test)]
mod sink_tests;
#[cfg(test)]
mod tests;

pub(crate) use bulk::Bulk;
pub(crate) use chunks::{Compared, Extent, Miss};
pub(crate) use deferred::{Deferred, PutOff};
pub use hash_pass::Validation;
pub(crate) use questions::Laid;
pub(crate) use save::Saved;

pub(crate) use crate::base::threads::joined;
