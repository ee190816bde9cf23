//! `gpucr migrate` and `gpucr receive`: a program goes from one host to another while it runs.
//!
//! A migration is a dump whose image goes to the other side in the place of a disk ([`outgoing`]), and a restore of that
//! image there ([`incoming`]). At every moment one side owns the program, and which one is [durably noted](record);
//! `docs/migration.md` says why that holds whatever fails.

mod arriving;
mod buffers;
mod cpu;
mod fit;
mod goal;
mod greeting;
mod incoming;
pub(super) mod link;
mod message;
pub(super) mod outgoing;
mod outputs;
mod placing;
mod received;
pub(super) mod record;
mod relay;
mod relayed;
mod safety;
mod source;
mod streams;

pub use super::copied_files::is_plain;
pub use goal::{Goal, OnStall};
pub use incoming::{Incoming, Place, receive};
pub use link::{Link, LinkError};
pub use outgoing::Outgoing;
pub use placing::MadeFile;
pub use received::{ReceiveFailure, Received, Remains};
pub use record::{Brought, MigrationId, Record, RelayedEnds, Restore, Side, State, directory};
pub use relay::{ProgramEnd, Relaying, Server};
pub use relayed::Relayed;
pub use source::{MigrateFailure, Migrated, Owner, Wishes, migrate};
pub use streams::{MOST as MOST_STREAMS, Wanted as WantedStreams};
