//! Decoding of a chunk that is in memory as it is stored.

use std::cell::RefCell;

use super::encoding::{DecodeError, Decoder, Stored};
use super::{Entry, MAX_CHUNK};

/// Checks the stored bytes of a chunk as far as that can be done without decoding them: what is stored as it is has the right
/// bytes then.
pub(crate) fn check_stored(entry: &Entry, stored: &[u8]) -> Result<(), &'static str> {
    if stored.len() != entry.stored_len as usize {
        return Err("it has an impossible length");
    }
    Stored::of(entry).check(stored, &entry.id)
}

/// Decodes the stored bytes of a chunk into `plain`, which is used again, and checks them against
/// everything that `entry` says. Any bytes are safe; no more than the plain length is allocated.
pub(crate) fn decode_stored(
    entry: &Entry,
    stored: &[u8],
    plain: &mut Vec<u8>,
) -> Result<(), &'static str> {
    if stored.len() != entry.stored_len as usize || entry.plain_len as usize > MAX_CHUNK {
        return Err("it has an impossible length");
    }
    thread_local! {
        static DECODER: RefCell<Option<Decoder>> = const { RefCell::new(None) };
    }
    plain.resize(entry.plain_len as usize, 0);
    let found = DECODER.with_borrow_mut(|decoder| {
        let decoder = match decoder {
            Some(decoder) => decoder,
            none => none.insert(Decoder::new().map_err(|_| "there is no memory to decode it")?),
        };
        let read = |out: &mut [u8]| {
            // The buffer has the plain length if the chunk is raw.
            if out.len() == stored.len() {
                out.copy_from_slice(stored);
                Ok(())
            } else {
                Err("it has an impossible length")
            }
        };
        decoder.decode(Stored::of(entry), plain, read).map_err(|error| match error {
            DecodeError::Read(what) | DecodeError::Damaged(what) => what,
        })
    })?;
    if found == entry.id { Ok(()) } else { Err("its hash does not match its address") }
}
