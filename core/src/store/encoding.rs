//! Plain bytes into stored bytes and back: everything about how one chunk is kept.
//!
//! A chunk's address is the hash of its plain bytes and does not depend on any of this, so a
//! chunk may be stored again in another way without a change of the images that need it.

use std::io;
use std::sync::OnceLock;

use super::planes::{self, Choice, Splitter, Width, most_that_pays};
use super::{ChunkId, MAX_CHUNK};

/// Whether and how hard chunks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Every chunk is stored as it is.
    None,
    /// zstd at this level, or byte planes where they do better; a chunk that gains less than a
    /// thirty-second is stored as it is.
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
    /// The bytes of numbers of this width, plane by plane, each plane raw or one zstd frame.
    Planes(Width),
}

impl Encoding {
    /// Kind and parameter, as they stand in a record of the index.
    pub fn to_bytes(self) -> [u8; 2] {
        match self {
            Self::Raw => [0, 0],
            Self::Zstd => [1, 0],
            Self::Constant(value) => [2, value],
            Self::Planes(width) => [3, width.bytes() as u8],
        }
    }

    /// The reverse of [`to_bytes`](Self::to_bytes); None for what it never gives.
    pub(crate) fn from_bytes(bytes: [u8; 2]) -> Option<Self> {
        match bytes {
            [0, 0] => Some(Self::Raw),
            [1, 0] => Some(Self::Zstd),
            [2, value] => Some(Self::Constant(value)),
            [3, 2] => Some(Self::Planes(Width::Two)),
            [3, 4] => Some(Self::Planes(Width::Four)),
            _ => None,
        }
    }

    /// Whether a chunk that is stored in this way has bytes in a pack.
    pub(crate) fn has_data(self) -> bool {
        !matches!(self, Self::Constant(_))
    }

    /// Whether a chunk of so many plain bytes can have so many stored ones, and this check.
    pub(super) fn admits(self, plain_len: u32, stored_len: u32, check: u64) -> bool {
        match self {
            Self::Raw => stored_len == plain_len && check == 0,
            Self::Zstd => stored_len < plain_len,
            Self::Planes(width) => {
                stored_len < plain_len && (plain_len as usize).is_multiple_of(width.bytes())
            }
            Self::Constant(_) => stored_len == 0 && check == 0,
        }
    }
}

/// A chunk in the form in which it is stored.
#[derive(Debug, Clone, Copy)]
pub struct Encoded<'a> {
    /// How it is stored.
    pub encoding: Encoding,
    /// What goes into the pack.
    pub bytes: &'a [u8],
    /// What the index keeps besides the address to check `bytes`.
    pub check: u64,
}

impl<'a> Encoded<'a> {
    fn checked(encoding: Encoding, bytes: &'a [u8]) -> Self {
        Self { encoding, bytes, check: stored_check(bytes) }
    }
}

/// From this level of zstd on, time matters less than size: a chunk for which byte planes look
/// better is compressed both ways, and the smaller is kept.
const THOROUGH: i32 = 4;

/// Encodes chunks, one after the other. Its buffers are used again; together they are bounded by
/// a few chunks.
pub struct Encoder {
    compression: Compression,
    zstd: Zstd,
    splitter: Splitter,
}

impl Encoder {
    /// An encoder that has no buffers yet.
    pub fn new(compression: Compression) -> Self {
        Self { compression, zstd: Zstd::default(), splitter: Splitter::default() }
    }

    /// The form in which to store `plain`, which is not constant.
    pub fn encode<'a>(&'a mut self, plain: &'a [u8]) -> Encoded<'a> {
        let raw = Encoded { encoding: Encoding::Raw, bytes: plain, check: 0 };
        let Compression::Level(level) = self.compression else { return raw };
        let Self { zstd, splitter, .. } = self;
        let sample = |sample: &[u8]| {
            zstd.compress(level, sample, sample.len()).map_or(sample.len(), <[u8]>::len)
        };
        let split = Choice::of(plain, sample).and_then(|choice| splitter.split(plain, choice));
        let most = match split {
            Some((_, bytes)) if level >= THOROUGH || planes::repeats(plain) => bytes.len() - 1,
            Some(_) => 0,
            None => most_that_pays(plain.len()),
        };
        match (zstd.compress(level, plain, most), split) {
            (Some(bytes), _) => Encoded::checked(Encoding::Zstd, bytes),
            (None, Some((width, bytes))) => Encoded::checked(Encoding::Planes(width), bytes),
            (None, None) => raw,
        }
    }
}

/// zstd, with a buffer for what it makes. Takes memory only when first used.
#[derive(Default)]
struct Zstd {
    compressor: Option<zstd::bulk::Compressor<'static>>,
    buffer: Vec<u8>,
}

impl Zstd {
    /// Compresses to at most `most` bytes. None where that is not enough: zstd gives up as soon as
    /// it would need more. (Or where it fails; then another way to store a chunk makes up for it.)
    fn compress(&mut self, level: i32, plain: &[u8], most: usize) -> Option<&[u8]> {
        if most == 0 {
            return None;
        }
        if self.buffer.len() < most {
            self.buffer.resize(most, 0);
        }
        if self.compressor.is_none() {
            self.compressor = zstd::bulk::Compressor::new(level).ok();
        }
        let len = self.compressor.as_mut()?.compress_to_buffer(plain, &mut self.buffer[..most]);
        len.ok().map(|len| &self.buffer[..len])
    }
}

/// What is to be decoded, as the index tells it.
#[derive(Debug, Clone, Copy)]
pub struct Stored {
    /// How it is stored.
    pub encoding: Encoding,
    /// Bytes in the pack.
    pub len: usize,
    /// What the index keeps to check these.
    pub check: u64,
}

impl Stored {
    /// Checks the stored bytes of chunk `id` without decoding them.
    pub(super) fn check(&self, bytes: &[u8], id: &ChunkId) -> Result<(), &'static str> {
        match self.encoding {
            Encoding::Constant(_) => Ok(()),
            Encoding::Raw if ChunkId::of(bytes) == *id => Ok(()),
            Encoding::Raw => Err("its hash does not match its address"),
            Encoding::Zstd | Encoding::Planes(_) if stored_check(bytes) == self.check => Ok(()),
            Encoding::Zstd | Encoding::Planes(_) => Err(CHECK_FAILED),
        }
    }
}

/// Why a chunk could not be decoded.
#[derive(Debug, PartialEq, Eq)]
pub enum DecodeError<E> {
    /// Its stored bytes could not be read.
    Read(E),
    /// Its stored bytes are not those that were written.
    Damaged(&'static str),
}

/// Decodes chunks, one after the other. Its buffers are used again and are bounded by a few
/// chunks.
pub struct Decoder {
    stored: Vec<u8>,
    planes: Vec<u8>,
    decompressor: zstd::bulk::Decompressor<'static>,
}

impl Decoder {
    /// A decoder that has no buffers yet.
    ///
    /// # Errors
    /// zstd finds no memory.
    pub fn new() -> io::Result<Self> {
        let decompressor = zstd::bulk::Decompressor::new()?;
        Ok(Self { stored: Vec::new(), planes: Vec::new(), decompressor })
    }

    /// Decodes a chunk into `out`, which has its plain length, and returns the address that these
    /// bytes have: the caller compares it. `read` fills a buffer with the stored bytes. Never
    /// writes beyond `out`, whatever these are. After a failure `out` holds anything.
    ///
    /// # Errors
    /// `read` has failed, or the stored bytes are damaged: they do not match their check, or do not decode to so many
    /// bytes. The decoder can be used again.
    pub fn decode<E>(
        &mut self,
        stored: Stored,
        out: &mut [u8],
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<ChunkId, DecodeError<E>> {
        self.decode_unnamed(stored, out, read)?;
        Ok(match stored.encoding {
            Encoding::Constant(value) => constant_id(value, out.len()),
            Encoding::Raw | Encoding::Zstd | Encoding::Planes(_) => ChunkId::of(out),
        })
    }

    /// Decodes a chunk without computing its address: the caller has another way to find that it is the right one.
    ///
    /// # Errors
    /// The errors of [`decode`](Self::decode). Wrong bytes that are stored as they are pass unseen.
    pub fn decode_unnamed<E>(
        &mut self,
        stored: Stored,
        out: &mut [u8],
        read: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), DecodeError<E>> {
        match stored.encoding {
            Encoding::Constant(value) => out.fill(value),
            Encoding::Raw => read(out).map_err(DecodeError::Read)?,
            Encoding::Zstd | Encoding::Planes(_) => {
                if self.stored.len() < stored.len {
                    self.stored.resize(stored.len, 0);
                }
                read(&mut self.stored[..stored.len]).map_err(DecodeError::Read)?;
                self.unpack(stored, out).map_err(DecodeError::Damaged)?;
            }
        }
        Ok(())
    }

    /// Unpacks what was read.
    fn unpack(&mut self, stored: Stored, out: &mut [u8]) -> Result<(), &'static str> {
        let bytes = &self.stored[..stored.len];
        if stored_check(bytes) != stored.check {
            return Err(CHECK_FAILED);
        }
        if let Encoding::Planes(width) = stored.encoding {
            return planes::join(width, bytes, &mut self.planes, &mut self.decompressor, out);
        }
        match self.decompressor.decompress_to_buffer(bytes, out) {
            Ok(n) if n == out.len() => Ok(()),
            Ok(_) => Err("it decompresses to too few bytes"),
            Err(_) => Err("it does not decompress"),
        }
    }
}

const CHECK_FAILED: &str = "its stored bytes do not match their check";

/// The first 8 bytes of the BLAKE3 of a chunk's stored bytes.
///
/// zstd has bits that decoders ignore, so the hash of the plain bytes alone would let some
/// damage pass unseen.
pub(crate) fn stored_check(stored: &[u8]) -> u64 {
    let hash = blake3::hash(stored);
    u64::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[i]))
}

/// The value of every byte of `plain`, if they are all equal and there is one.
pub(crate) fn constant_byte(plain: &[u8]) -> Option<u8> {
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
    use crate::store::planes::tests::weights;
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
            (level, weights(1, Width::Two, MAX_CHUNK), Encoding::Planes(Width::Two)),
            (level, weights(1, Width::Four, 100_000), Encoding::Planes(Width::Four)),
            (Compression::Level(9), weights(1, Width::Two, 100_000), Encoding::Planes(Width::Two)),
            (Compression::None, weights(1, Width::Two, 100_000), Encoding::Raw),
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
    fn planes_never_lose_by_much() {
        let weights = |seed| weights(seed, Width::Two, MAX_CHUNK);
        let random = noise(5, MAX_CHUNK / 4);
        let near = random.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
        let pointers = near.flat_map(|near| (0x7f12_3456_0000 + u64::from(near)).to_le_bytes());
        let integers = (0..MAX_CHUNK as u32 / 4).flat_map(|i| (i * 7 % 50_000).to_le_bytes());
        let tile = |len: usize| weights(2)[..len].iter().copied().cycle().take(MAX_CHUNK).collect();
        let sparse = |every: u8| {
            let keep =
                move |pair: &[u8; 2]| if pair[0].is_multiple_of(every) { *pair } else { [0; 2] };
            weights(4).as_chunks::<2>().0.iter().flat_map(keep).collect::<Vec<u8>>()
        };
        for (name, plain) in [
            ("pointers", pointers.collect::<Vec<u8>>()),
            ("integers", integers.collect()),
            ("tiles of 8 KiB", tile(8 << 10)),
            ("tiles of 300 kB", tile(300_000)),
            ("half", [&weights(3)[..MAX_CHUNK / 2], &text(3, MAX_CHUNK / 2)].concat()),
            ("quarter", [&weights(3)[..MAX_CHUNK / 4], &text(3, MAX_CHUNK / 4 * 3)].concat()),
            ("sparse", sparse(2)),
            ("very sparse", sparse(16)),
        ] {
            assert_eq!(plain.len(), MAX_CHUNK);
            let zstd = zstd::bulk::compress(&plain, 1).unwrap().len().min(plain.len());
            let (stored, bytes) = encode(Compression::Level(1), &plain);
            println!("{name}: {:?} {}, zstd {zstd}", stored.encoding, bytes.len());
            assert!(bytes.len() <= zstd + plain.len() / 32, "{name}: {}, {zstd}", bytes.len());
            let mut out = vec![0; plain.len()];
            assert_eq!(decode(stored, &bytes, &mut out), Ok(ChunkId::of(&plain)), "{name}");
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
        let all = [
            Encoding::Raw,
            Encoding::Zstd,
            Encoding::Constant(0),
            Encoding::Constant(255),
            Encoding::Planes(Width::Two),
            Encoding::Planes(Width::Four),
        ];
        for encoding in all {
            assert_eq!(Encoding::from_bytes(encoding.to_bytes()), Some(encoding));
        }
        let known = |kind, value| Encoding::from_bytes([kind, value]).is_some();
        assert!(!known(0, 1) && !known(1, 1) && !known(255, 0));
        assert!(!known(3, 0) && !known(3, 1) && !known(3, 3) && !known(3, 8));
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
