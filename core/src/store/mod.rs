//! The chunk store: bytes named by their BLAKE3 hash, kept in packs with an index.
//!
//! An image has chunks of its own in `index` and `packs/`, or shares those of a [`SharedStore`].
//! They are written once, by a [`ChunkWriter`], and afterwards only read, by any number of
//! [`ChunkReader`]s. `docs/image-format.md` describes the files byte by byte.
//!
//! What copies chunks in or out does not know all that: it puts them into a [`ChunkSink`], of which the writer is one,
//! and gets them from a [`ChunkSource`].
//!
//! A chunk is at most [`MAX_CHUNK`] bytes. Equal chunks are stored once; a chunk of one repeated
//! byte takes an index entry and no data.

mod chunk;
mod decode;
pub(crate) mod disk;
mod encoding;
mod error;
pub(crate) mod gc;
pub(crate) mod index;
mod lock;
mod planes;
mod reader;
pub(crate) mod shared;
mod sink;
mod source;
mod stored_chunks;
mod writer;

#[cfg(test)]
pub(crate) mod doubles;
#[cfg(test)]
pub(crate) mod power;
#[cfg(test)]
pub(crate) mod tests;

pub use chunk::{ChunkId, MAX_CHUNK, STORE_VERSION, Stats};
pub use encoding::{Compression, DecodeError, Decoder, Encoded, Encoder, Encoding, Stored};
pub(crate) use encoding::{constant_byte, stored_check};
pub use error::StoreError;
pub(crate) use error::io_error;
pub use gc::GcReport;
pub use index::{Entry, PackId};
pub use planes::Width;
pub use reader::{ChunkReader, Damage};
pub use shared::SharedStore;
pub use sink::ChunkSink;
pub use source::{ChunkSource, Filled};
pub use writer::ChunkWriter;

pub(crate) use decode::{check_stored, decode_stored};
pub(crate) use index::{INDEX, PACKS};
pub(crate) use reader::{Source, Trust};
pub(crate) use stored_chunks::StoredChunks;
pub(crate) use writer::{Compared, Place};
