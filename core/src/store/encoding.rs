//! Plain bytes into stored bytes and back: everything about how one chunk is kept.
//!
//! A chunk's address is the hash of its plain bytes and does not depend on any of this, so a
//! chunk may be stored again in another way without a change of the images that need it.

use std::io;
use std::sync::OnceLock;

use super::{ChunkId, MAX_CHUNK};

/// Whether and how hard chunks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Every chunk is stored as it is.
    None,
    /// zstd at this level; a chunk that gains less than a thirty-second is stored as it is.
    Level(i32),
}

impl Default for Compression {
    fn default() -> Self {
        Self::Level(1)
    }
}

/// How a chunk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encoding {
    /// Its plain bytes.
    Raw,
    /// One zstd frame.
    Zstd,
    /// Nothing: every byte has this value.
    Constant(u8),
}

impl Encoding {
    /// Kind and parameter, as they stand in a record of the index.
    pub(super) fn to_bytes(self) -> [u8; 2] {
        match self {
            Self::Raw => [0, 0],
            Self::Zstd => [1, 0],
            Self::Constant(value) => [2, value],
        }
    }

    /// The reverse of [`to_bytes`](Self::to_bytes); None for what it never gives.
    pub(super) fn from_bytes(bytes: [u8; 2]) -> Option<Self> {
        match bytes {
            [0, 0] => Some(Self::Raw),
            [1, 0] => Some(Self::Zstd),
            [2, value] => Some(Self::Constant(value)),
            _ => None,
        }
    }

    /// Whether a chunk that is stored in this way has bytes in a pack.
    pub(super) fn has_data(self) -> bool {
        !matches!(self, Self::Constant(_))
    }

    /// Whether a chunk of so many plain bytes can have so many stored ones, and this check.
    pub(super) fn admits(self, plain_len: u32, stored_len: u32, check: u64) -> bool {
        match self {
            Self::Raw => stored_len == plain_len && check == 0,
            Self::Zstd => stored_len < plain_len,
            Self::Constant(_) => stored_len == 0 && check == 0,
        }
    }
}

/// A chunk in the form in which it is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Encoded<'a> {
    pub(super) encoding: Encoding,
    /// What goes into the pack.
    pub(super) bytes: &'a [u8],
    /// What the index keeps beside the address to check `bytes`.
    pub(super) check: u64,
}

/// Encodes chunks, one after the other. Its buffers are used again; together they are bounded by
/// a few chunks.
pub(super) struct Encoder {
    compression: Compression,
    /// Made when first needed: it takes some memory.
    compressor: Option<zstd::bulk::Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Encoder {
    pub(super) fn new(compression: Compression) -> Self {
        Self { compression, compressor: None, buffer: Vec::new() }
    }

    /// The form in which to store `plain`, which is not constant.
    pub(super) fn encode<'a>(&'a mut self, plain: &'a [u8]) -> Encoded<'a> {
        match self.compress(plain) {
            Some(len) => {
                let bytes = &self.buffer[..len];
                Encoded { encoding: Encoding::Zstd, bytes, check: stored_check(bytes) }
            }
            None => Encoded { encoding: Encoding::Raw, bytes: plain, check: 0 },
        }
    }

    /// Compresses into `self.buffer`; the length, or None where it does not pay (or zstd fails,
    /// which raw storage makes up for).
    fn compress(&mut self, plain: &[u8]) -> Option<usize> {
        let Compression::Level(level) = self.compression else { return None };
        // The destination is the most that pays: zstd gives up as soon as it would need more.
        let most = plain.len().checked_sub(plain.len() / 32 + 1)?;
        if self.buffer.len() < most {
            self.buffer.resize(most, 0);
        }
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(level).ok();
        }
        self.compressor.as_mut()?.compress_to_buffer(plain, &mut self.buffer[..most]).ok()
    }
}

/// What is to be decoded, as the index tells it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    pub(super) encoding: Encoding,
    /// Bytes in the pack.
    pub(super) len: usize,
    pub(super) check: u64,
}

/// Why a chunk could not be decoded.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum DecodeError<E> {
    /// Its stored bytes could not be read.
    Read(E),
    /// Its stored bytes are not those that were written.
    Damaged(&'static str),
}

/// Decodes chunks, one after the other. Its buffers are used again and are bounded by a few
/// chunks.
pub(super) struct Decoder {
    stored: Vec<u8>,
    decompressor: zstd::bulk::Decompressor<'static>,
}

impl Decoder {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { stored: Vec::new(), decompressor: zstd::bulk::Decompressor::new()? })
    }

    /// Decodes a chunk into `out`, which has its plain length, and returns the address that these
    /// bytes have: the caller compares it. `read` fills a buffer with the stored bytes. Never
    /// writes beyond `out`, whatever these are. After a failure `out` holds anything.
    pub(super) fn decode<E>(
        &mut self,
        stored: Stored,
        out: &mut [u8],
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<ChunkId, DecodeError<E>> {
        match stored.encoding {
            Encoding::Constant(value) => {
                out.fill(value);
                return Ok(constant_id(value, out.len()));
            }
            Encoding::Raw => read(out).map_err(DecodeError::Read)?,
            Encoding::Zstd => {
                if self.stored.len() < stored.len {
                    self.stored.resize(stored.len, 0);
                }
                let bytes = &mut self.stored[..stored.len];
                read(bytes).map_err(DecodeError::Read)?;
                if stored_check(bytes) != stored.check {
                    let what = "its stored bytes do not match their check";
                    return Err(DecodeError::Damaged(what));
                }
                match self.decompressor.decompress_to_buffer(bytes, out) {
                    Ok(n) if n == out.len() => {}
                    Ok(_) => return Err(DecodeError::Damaged("it decompresses to too few bytes")),
                    Err(_) => return Err(DecodeError::Damaged("it does not decompress")),
                }
            }
        }
        Ok(ChunkId::of(out))
    }
}

/// The first 8 bytes of the BLAKE3 of a chunk's stored bytes.
///
/// zstd has bits that decoders ignore, so the hash of the plain bytes alone would let some
/// damage pass unseen.
fn stored_check(stored: &[u8]) -> u64 {
    let hash = blake3::hash(stored);
    u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i]))
}

/// The value of every byte of `plain`, if they are all equal and there is one.
pub(super) fn constant_byte(plain: &[u8]) -> Option<u8> {
    let (&first, rest) = plain.split_first()?;
    // Equal to itself moved by one byte: one fast comparison that stops at the first difference.
    (rest == &plain[..plain.len() - 1]).then_some(first)
}

/// The address of `len` bytes of `value`. That of a full chunk of zeros, by far the most
/// frequent, is computed once.
pub(super) fn constant_id(value: u8, len: usize) -> ChunkId {
    static ZEROS: OnceLock<ChunkId> = OnceLock::new();
    let compute = || {
        let piece = [value; 4096];
        let mut hasher = blake3::Hasher::new();
        for _ in 0..len / piece.len() {
            hasher.update(&piece);
        }
        hasher.update(&piece[..len % piece.len()]);
        ChunkId(*hasher.finalize().as_bytes())
    };
    if value == 0 && len == MAX_CHUNK { *ZEROS.get_or_init(compute) } else { compute() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::tests::{noise, text};

    /// Encodes, and returns encoding, stored bytes and check.
    fn encode(compression: Compression, plain: &[u8]) -> (Stored, Vec<u8>) {
        let mut encoder = Encoder::new(compression);
        let Encoded { encoding, bytes, check } = encoder.encode(plain);
        (Stored { encoding, len: bytes.len(), check }, bytes.to_vec())
    }

    fn decode(stored: Stored, bytes: &[u8], out: &mut [u8]) -> Result<ChunkId, DecodeError<()>> {
        Decoder::new().unwrap().decode(stored, out, |buffer| {
            buffer.copy_from_slice(bytes);
            Ok(())
        })
    }

    #[test]
    fn each_encoding_comes_back() {
        let level = Compression::Level(1);
        for (compression, plain, expected) in [
            (Compression::None, text(1, 5000), Encoding::Raw),
            (level, text(1, 5000), Encoding::Zstd),
            (level, noise(1, 5000), Encoding::Raw),
            (level, noise(1, 1), Encoding::Raw),
            (level, Vec::new(), Encoding::Raw),
            (level, text(2, MAX_CHUNK), Encoding::Zstd),
        ] {
            let (stored, bytes) = encode(compression, &plain);
            assert_eq!(stored.encoding, expected);
            let len = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap();
            assert!(stored.encoding.admits(len(&plain), len(&bytes), stored.check));
            assert!(stored.encoding.has_data());
            let mut out = vec![0xaa; plain.len()];
            assert_eq!(decode(stored, &bytes, &mut out), Ok(ChunkId::of(&plain)));
            assert!(out == plain);
        }
    }

    #[test]
    fn constants_are_known_by_their_address() {
        for len in [1, 5, 4096, 4097, MAX_CHUNK] {
            for value in [0, 7, 255] {
                let plain = vec![value; len];
                assert_eq!(constant_byte(&plain), Some(value));
                assert_eq!(constant_id(value, len), ChunkId::of(&plain));
                let mut out = vec![!value; len];
                let stored = Stored { encoding: Encoding::Constant(value), len: 0, check: 0 };
                assert_eq!(decode(stored, &[], &mut out), Ok(ChunkId::of(&plain)));
                assert!(out == plain);
            }
        }
        assert_eq!(constant_byte(&[]), None);
        assert_eq!(constant_byte(&[1, 1, 2]), None);
        assert_eq!(constant_byte(&[2, 1, 1]), None);
    }

    #[test]
    fn records_have_one_form() {
        let all = [Encoding::Raw, Encoding::Zstd, Encoding::Constant(0), Encoding::Constant(255)];
        for encoding in all {
            assert_eq!(Encoding::from_bytes(encoding.to_bytes()), Some(encoding));
        }
        let known = |kind, value| Encoding::from_bytes([kind, value]).is_some();
        assert!(!known(0, 1) && !known(1, 1) && !known(255, 0));
    }

    #[test]
    fn a_failed_read_is_told_from_damage() {
        let stored = Stored { encoding: Encoding::Zstd, len: 10, check: 0 };
        let mut decoder = Decoder::new().unwrap();
        let error = decoder.decode(stored, &mut [0; 20], |_| Err("gone")).unwrap_err();
        assert_eq!(error, DecodeError::Read("gone"));
    }

    #[test]
    fn frames_that_lie_about_their_length_are_refused() {
        let (mut stored, bytes) = encode(Compression::Level(1), &text(1, 5000));
        for len in [4999, 5001, 0] {
            let error = decode(stored, &bytes, &mut vec![0; len]).unwrap_err();
            assert!(matches!(error, DecodeError::Damaged(_)), "{len}");
        }
        stored.check ^= 1;
        assert!(decode(stored, &bytes, &mut vec![0; 5000]).is_err());
    }

    proptest! {
        /// Whatever the stored bytes are: no panic, and nothing beyond the plain length.
        #[test]
        fn any_stored_bytes_are_survived(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            plain_len in 0usize..2000,
        ) {
            let stored = Stored { encoding: Encoding::Zstd, len: bytes.len(), check: stored_check(&bytes) };
            let _ = decode(stored, &bytes, &mut vec![0; plain_len]);
        }
    }
}
