//! What is known of a process that shares memory with others.

use gpucr_wire::peers::Identity;
use gpucr_wire::{Counts, Opener};
use serde::{Deserialize, Serialize};

/// A block of another process that a process has open.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Opened {
    /// Its name in the process that has it open.
    pub id: u64,
    /// Bytes.
    pub size: u64,
    /// Where that process sees its start.
    pub address: u64,
    /// The pid of the owner.
    pub owner: u32,
    /// The owner's name for it.
    pub block: u64,
}

/// What a process said of those with whom it shares memory.
#[derive(Debug, Clone, Default)]
pub(crate) struct Sharers {
    /// What they call it; zeros if there was no need yet.
    pub(crate) identity: Identity,
    /// Whose memory it has open.
    pub(crate) owners: Vec<Identity>,
    /// Who has memory of it open.
    pub(crate) openers: Vec<Opener>,
}

impl Sharers {
    /// As its agent tells.
    pub(crate) fn of(counts: &Counts) -> Self {
        let Counts { identity, owners, openers, .. } = counts;
        Self { identity: *identity, owners: owners.clone(), openers: openers.clone() }
    }
}
