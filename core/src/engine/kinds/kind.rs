//! What a kind of state says of itself.

use gpucr_wire::Counts;

use crate::image;

/// A kind of state.
pub trait Kind: Sync {
    /// What it is called in messages to the user.
    fn name(&self) -> &'static str;

    /// Who carries it.
    fn carrier(&self) -> Carrier;

    /// How much of it a process has, by what its agent counts.
    fn survey(&self, _: &Counts) -> Amount {
        Amount::default()
    }

    /// How the names of the driver's functions begin by which an agent tells that a process has such state. An agent
    /// tells so of what cannot be carried and is not counted.
    fn functions(&self) -> &'static [&'static str] {
        &[]
    }

    /// In which words a dump is refused because a process has so much of it.
    fn words(&self, _: Amount) -> String {
        self.name().to_owned()
    }

    /// Writes into the manifest what it says of a process that has this.
    fn describe(&self, _: &Counts, _: &mut image::Counts) {}

    /// What [`describe`](Self::describe) has written, under the name that `gpucr inspect --json` gives it.
    fn inspect(&self, _: &image::Counts) -> Option<(&'static str, u64)> {
        None
    }
}

/// Who carries a kind of state over a dump and a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carrier {
    /// gpucr itself: its bytes are in blocks.
    Gpucr,
    /// The checkpoint of the driver.
    Driver,
    /// Nobody can so far: a process that has such state is refused.
    Nobody,
}

/// How much of a kind a process has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amount {
    /// So many things.
    pub number: u64,
    /// So many bytes.
    pub bytes: u64,
}

impl Amount {
    pub(super) fn number(number: u64) -> Self {
        Self { number, bytes: 0 }
    }

    pub(super) fn bytes(bytes: u64) -> Self {
        Self { number: 0, bytes }
    }
}
