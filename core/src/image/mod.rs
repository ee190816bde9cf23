//! The image: a directory that holds a stopped program, complete and checked.
//!
//! An image has a [`Manifest`], which says what was stopped and names every chunk of its memory
//! and files by hash. The [chunks](crate::store) are in the image, or in its parent, or in a store
//! that it shares with others: see [`Destination`]. [`ImageWriter`] makes an image, [`ImageReader`]
//! reads it. `docs/image-format.md` describes the files byte by byte.
//!
//! An image exists whole or not at all: it is written in a hidden directory beside its final
//! place and renamed when everything is durable.

mod base;
mod catalogue;
mod cut;
mod destination;
pub mod diff;
mod error;
mod files;
mod layout;
pub mod library;
mod manifest;
mod parts;
mod reader;
mod recipient;
pub mod transfer;
pub mod trust;
pub mod verify;
mod writer;

pub use base::Base;
pub(crate) use base::salvage;
pub use catalogue::{Listed, Listing, Removed, gc, list, remove};
pub use cut::{Cut, FILE_CUT};
pub use destination::{Destination, NOT_EMPTY, check_name};
pub use error::ImageError;
pub use files::{Contents, HeldContents, Reused, unknown_bytes};
pub(crate) use layout::MANIFEST;
pub use layout::{MAX_CHAIN, SHARING_FILE};
pub use manifest::{
    Block, BlockKind, CarriedFile, Counts, CriuImage, CudaProcess, Device, Driver, DriverKind,
    FileChunk, FileEntry, Listener, ListenerKind, MANIFEST_VERSION, Manifest, Phase, Piece,
    Process, Protocol, RequiredFile, Section, Shim, Stdio,
};
pub(crate) use manifest::{MAX_MANIFEST, TAGS};
pub use parts::Part;
pub use reader::ImageReader;
pub use recipient::Committed;
pub(crate) use recipient::{Recipient, Written};
pub use writer::{ImageWriter, remove_unfinished};

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod gc_tests;
#[cfg(test)]
mod kinds_tests;
#[cfg(test)]
pub(crate) mod tests;
