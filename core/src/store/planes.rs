//! Byte planes: numbers of 2 or 4 bytes with their first bytes together, their second ones, and so
//! on.
//!
//! In floating-point tensors signs and low mantissa bits are noise, and exponents take few values.
//! zstd sees these bytes in turns and hardly finds what can be saved. Apart from each other, the
//! noise is stored as it is, at the speed of a copy, and the exponents need a few bits each.
//!
//! Each number is first rotated left by one bit. Then the sign joins the mantissa, and the topmost
//! byte is the whole exponent of bf16 and fp32.

/// Samples that [`Choice::of`] looks at: a piece of a chunk's 128th, at least 4 KiB, in its first
/// and in its second half.
const SAMPLE_SHARE: usize = 128;
const SAMPLE_MIN: usize = 4 << 10;
/// Chunks below this are not worth the trial.
const CHUNK_MIN: usize = 32 << 10;

/// Level of zstd for planes: so far below zero that it looks for next to no repetitions. In
/// exponents these are chance, and cost more than they save.
const LEVEL: i32 = -1000;

/// Bytes of a number that is split into planes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// bf16 and fp16.
    Two,
    /// fp32.
    Four,
}

impl Width {
    /// The width in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Two => 2,
            Self::Four => 4,
        }
    }

    /// Bytes before the first plane: the stored length of each plane, as a u32.
    fn header(self) -> usize {
        4 * self.bytes()
    }
}

/// Whether something pays: it saves more than a thirty-second. This is the most that it may need.
pub(super) fn most_that_pays(len: usize) -> usize {
    len.saturating_sub(len / 32 + 1)
}

/// How a chunk would best be split, by a look at samples.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    width: Width,
    /// Which planes to compress, the lowest first; the others are stored as they are.
    compress: [bool; 4],
}

impl Choice {
    /// Looks at samples of `plain`. None where planes promise no less than zstd, whose result for
    /// a sample `zstd` tells, and for anything small.
    pub(super) fn of(plain: &[u8], mut zstd: impl FnMut(&[u8]) -> usize) -> Option<Self> {
        if plain.len() < CHUNK_MIN {
            return None;
        }
        let len = (plain.len() / SAMPLE_SHARE).max(SAMPLE_MIN) / 4 * 4;
        let quarter = plain.len() / 16 * 4;
        let samples = [&plain[quarter..quarter + len], &plain[3 * quarter..3 * quarter + len]];

        let four = Self::with(Width::Four, samples);
        let two = Self::with(Width::Two, samples);
        // bf16 looks alike in both, and is coded faster in two.
        let (choice, expected) = if four.1 < two.1 * 0.98 { four } else { two };
        let pays = |than: usize| expected < most_that_pays(than) as f64;
        let multiple = plain.len().is_multiple_of(choice.width.bytes());
        (multiple && pays(2 * len) && pays(samples.into_iter().map(&mut zstd).sum()))
            .then_some(choice)
    }

    /// The best with this width, and the bytes to which it would bring the samples.
    fn with(width: Width, samples: [&[u8]; 2]) -> (Self, f64) {
        let mut counts = [[0u32; 256]; 4];
        for sample in samples {
            match width {
                Width::Two => {
                    for number in sample.as_chunks::<2>().0 {
                        count(
                            &mut counts,
                            u16::from_le_bytes(*number).rotate_left(1).to_le_bytes(),
                        );
                    }
                }
                Width::Four => {
                    for number in sample.as_chunks::<4>().0 {
                        count(
                            &mut counts,
                            u32::from_le_bytes(*number).rotate_left(1).to_le_bytes(),
                        );
                    }
                }
            }
        }
        let plane = 2 * samples[0].len() / width.bytes();
        let (mut compress, mut expected) = ([false; 4], 0.0);
        for (counts, compress) in counts.iter().zip(&mut compress).take(width.bytes()) {
            let entropy = entropy(counts, plane);
            *compress = entropy < most_that_pays(plane) as f64;
            expected += if *compress { entropy } else { plane as f64 };
        }
        (Self { width, compress }, expected)
    }
}

/// Whether a good part of `plain` may be there twice, so that zstd could do much better than
/// planes. Samples tell nothing of what comes again only far away.
pub(super) fn repeats(plain: &[u8]) -> bool {
    // One word of 256, chosen by its value, so that equal ones are chosen together. Never zero.
    let words = plain.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let mut chosen: Vec<u64> =
        words.filter(|word| (word ^ word >> 13 ^ word >> 35) & 0xff == 0x5a).collect();
    chosen.sort_unstable();
    let equal = chosen.windows(2).filter(|pair| pair[0] == pair[1]).count();
    equal > chosen.len() / 16
}

fn count<const N: usize>(counts: &mut [[u32; 256]; 4], bytes: [u8; N]) {
    for (counts, byte) in counts.iter_mut().zip(bytes) {
        counts[usize::from(byte)] += 1;
    }
}

/// Bytes that `total` bytes with these counts need at least if each is coded by itself, with no
/// less than a bit.
fn entropy(counts: &[u32; 256], total: usize) -> f64 {
    let bits = |&count: &u32| match count {
        0 => 0.0,
        count => f64::from(count) * (total as f64 / f64::from(count)).log2(),
    };
    counts.iter().map(bits).sum::<f64>().max(total as f64) / 8.0
}

/// Splits chunks. Its buffers, of one and a half chunks, are used again.
#[derive(Default)]
pub(super) struct Splitter {
    /// What is stored: header and planes.
    form: Vec<u8>,
    plane: Vec<u8>,
    compressor: Option<zstd::bulk::Compressor<'static>>,
}

impl Splitter {
    /// Splits `plain`; what is to be stored, or None where it does not pay (or zstd fails).
    pub(super) fn split(&mut self, plain: &[u8], choice: Choice) -> Option<(Width, &[u8])> {
        let (width, header) = (choice.width, choice.width.header());
        let len = plain.len() / width.bytes();
        // All planes side by side; then they move together as they shrink, the lowest first.
        self.form.resize(header + plain.len(), 0);
        match width {
            Width::Two => split_two(plain, &mut self.form[header..]),
            Width::Four => split_four(plain, &mut self.form[header..]),
        }
        let most = most_that_pays(len);
        if self.plane.len() < most {
            self.plane.resize(most, 0);
        }
        let mut end = header;
        for number in 0..width.bytes() {
            let plane = header + number * len..header + (number + 1) * len;
            let compressed = match choice.compress[number] {
                true => {
                    if self.compressor.is_none() {
                        self.compressor = Some(plane_compressor().ok()?);
                    }
                    let compressor = self.compressor.as_mut()?;
                    let to = &mut self.plane[..most];
                    compressor.compress_to_buffer(&self.form[plane.clone()], to).ok()
                }
                false => None,
            };
            let stored = match compressed {
                Some(stored) => {
                    self.form[end..end + stored].copy_from_slice(&self.plane[..stored]);
                    stored
                }
                None => {
                    if plane.start != end {
                        self.form.copy_within(plane, end);
                    }
                    len
                }
            };
            self.form[number * 4..][..4].copy_from_slice(&(stored as u32).to_le_bytes());
            end += stored;
        }
        (end <= most_that_pays(plain.len())).then(|| (width, &self.form[..end]))
    }
}

/// A compressor that knows entropy coding and nearly nothing else.
fn plane_compressor() -> std::io::Result<zstd::bulk::Compressor<'static>> {
    use zstd::zstd_safe::{CParameter, ParamSwitch};
    let mut compressor = zstd::bulk::Compressor::new(LEVEL)?;
    // Levels below zero leave it out otherwise.
    compressor.set_parameter(CParameter::LiteralCompressionMode(ParamSwitch::Enable))?;
    Ok(compressor)
}

/// Joins the planes in `stored` into `out`, which has the chunk's plain length. `planes` is a
/// buffer that is used again. Any bytes are safe; after a failure `out` holds anything.
pub(super) fn join(
    width: Width,
    stored: &[u8],
    planes: &mut Vec<u8>,
    decompressor: &mut zstd::bulk::Decompressor<'static>,
    out: &mut [u8],
) -> Result<(), &'static str> {
    const LENGTHS: &str = "the lengths of its planes do not fit";
    if !out.len().is_multiple_of(width.bytes()) {
        return Err(LENGTHS);
    }
    let len = out.len() / width.bytes();
    let (header, mut rest) = stored.split_at_checked(width.header()).ok_or(LENGTHS)?;
    if planes.len() < out.len() {
        planes.resize(out.len(), 0);
    }
    let mut unpacked = planes[..out.len()].chunks_exact_mut(len.max(1));
    let mut sources: [&[u8]; 4] = [&[]; 4];
    for (source, stored_len) in sources.iter_mut().zip(header.as_chunks::<4>().0) {
        let stored_len = u32::from_le_bytes(*stored_len) as usize;
        let (plane, after) = rest.split_at_checked(stored_len).ok_or(LENGTHS)?;
        rest = after;
        let space = unpacked.next().ok_or(LENGTHS)?;
        *source = if stored_len == len {
            plane
        } else {
            // Writes at most `len` bytes, whatever the frame claims.
            match decompressor.decompress_to_buffer(plane, space) {
                Ok(n) if n == len => space,
                Ok(_) => return Err("a plane of it decompresses to too few bytes"),
                Err(_) => return Err("a plane of it does not decompress"),
            }
        };
    }
    if !rest.is_empty() {
        return Err(LENGTHS);
    }
    let [a, b, c, d] = sources;
    match width {
        Width::Two => join_two(a, b, out),
        Width::Four => join_four([a, b, c, d], out),
    }
    Ok(())
}

// These loops are written so that the compiler makes vector instructions of them.

fn split_two(plain: &[u8], planes: &mut [u8]) {
    let (low, high) = planes.split_at_mut(plain.len() / 2);
    for ((number, a), b) in plain.as_chunks::<2>().0.iter().zip(low).zip(high) {
        [*a, *b] = u16::from_le_bytes(*number).rotate_left(1).to_le_bytes();
    }
}

fn split_four(plain: &[u8], planes: &mut [u8]) {
    let (low, high) = planes.split_at_mut(plain.len() / 2);
    let (a, b) = low.split_at_mut(plain.len() / 4);
    let (c, d) = high.split_at_mut(plain.len() / 4);
    for ((((number, a), b), c), d) in plain.as_chunks::<4>().0.iter().zip(a).zip(b).zip(c).zip(d) {
        [*a, *b, *c, *d] = u32::from_le_bytes(*number).rotate_left(1).to_le_bytes();
    }
}

fn join_two(low: &[u8], high: &[u8], plain: &mut [u8]) {
    for ((number, a), b) in plain.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
        *number = u16::from_le_bytes([*a, *b]).rotate_right(1).to_le_bytes();
    }
}

fn join_four([a, b, c, d]: [&[u8]; 4], plain: &mut [u8]) {
    let numbers = plain.as_chunks_mut::<4>().0.iter_mut();
    for ((((number, a), b), c), d) in numbers.zip(a).zip(b).zip(c).zip(d) {
        *number = u32::from_le_bytes([*a, *b, *c, *d]).rotate_right(1).to_le_bytes();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::MAX_CHUNK;
    use crate::store::tests::{noise, text};

    /// Numbers around 0, of about a fiftieth, bell-shaped.
    pub(crate) fn weights(seed: u64, width: Width, len: usize) -> Vec<u8> {
        let random = noise(seed, len / width.bytes() * 8);
        let numbers = random.as_chunks::<8>().0.iter().map(|bytes| {
            let sum: f32 = bytes[..6].iter().map(|&byte| f32::from(byte) - 127.5).sum();
            let fine = f32::from(u16::from_le_bytes([bytes[6], bytes[7]])) / 65536.0 + 0.5;
            (sum * fine * 1e-4).to_bits().to_le_bytes()
        });
        numbers.flat_map(|number| number[4 - width.bytes()..].to_vec()).collect()
    }

    fn zstd_len(plain: &[u8]) -> usize {
        zstd::bulk::compress(plain, 1).unwrap().len().min(plain.len())
    }

    fn round_trip(plain: &[u8], choice: Choice) -> Option<usize> {
        let mut splitter = Splitter::default();
        let (width, stored) = splitter.split(plain, choice)?;
        let mut out = vec![0xaa; plain.len()];
        let mut decompressor = zstd::bulk::Decompressor::new().unwrap();
        join(width, stored, &mut Vec::new(), &mut decompressor, &mut out).unwrap();
        assert!(out == plain);
        Some(stored.len())
    }

    #[test]
    fn weights_are_split_and_come_back() {
        for width in [Width::Two, Width::Four] {
            for len in [CHUNK_MIN, 100_000, MAX_CHUNK] {
                let plain = weights(1, width, len);
                let choice = Choice::of(&plain, zstd_len).expect("weights");
                assert_eq!(choice.width, width);
                let stored = round_trip(&plain, choice).unwrap();
                let plainly = zstd_len(&plain);
                assert!(stored * 100 < plainly * 93, "{width:?} {len}: {stored}, {plainly}");
            }
        }
    }

    #[test]
    fn any_choice_comes_back() {
        for width in [Width::Two, Width::Four] {
            for set in 0..16 {
                let compress = std::array::from_fn(|i| set >> i & 1 == 1);
                let choice = Choice { width, compress };
                for plain in [vec![0; 4096], text(1, 8192), weights(1, width, 4096), noise(1, 40)] {
                    round_trip(&plain, choice);
                }
            }
        }
    }

    #[test]
    fn what_is_not_made_of_numbers_is_left_to_zstd() {
        for plain in [text(1, MAX_CHUNK), noise(1, MAX_CHUNK), vec![], noise(1, CHUNK_MIN - 1)] {
            assert!(Choice::of(&plain, zstd_len).is_none());
        }
        // An odd length is no chunk of numbers.
        let odd = weights(1, Width::Two, MAX_CHUNK);
        assert!(Choice::of(&odd[..MAX_CHUNK - 1], zstd_len).is_none());
    }

    #[test]
    fn repetitions_are_seen_across_samples() {
        let weights = weights(1, Width::Two, MAX_CHUNK);
        assert!(!repeats(&weights));
        assert!(!repeats(&noise(1, MAX_CHUNK)));
        for period in [8 << 10, 300_000, MAX_CHUNK / 2] {
            let repeated: Vec<u8> =
                weights[..period].iter().copied().cycle().take(MAX_CHUNK).collect();
            assert!(repeats(&repeated), "{period}");
        }
    }

    #[test]
    fn planes_that_lie_are_refused() {
        let plain = weights(1, Width::Four, CHUNK_MIN);
        let mut splitter = Splitter::default();
        let choice = Choice { width: Width::Four, compress: [false, false, false, true] };
        let (width, stored) = splitter.split(&plain, choice).unwrap();
        let mut decompressor = zstd::bulk::Decompressor::new().unwrap();
        let mut refused = |stored: &[u8], len: usize| {
            let mut out = vec![0; len];
            join(width, stored, &mut Vec::new(), &mut decompressor, &mut out).is_err()
        };
        assert!(!refused(stored, plain.len()));
        for len in [0, 3, plain.len() - 1, plain.len() - 4, plain.len() + 4] {
            assert!(refused(stored, len), "{len}");
        }
        assert!(refused(&stored[..stored.len() - 1], plain.len()));
        assert!(refused(&stored[..10], plain.len()));
        assert!(refused(&[stored, b"x"].concat(), plain.len()));
        for at in [0, 3, 4, 12, 15] {
            let mut lying = stored.to_vec();
            lying[at] ^= 0x40;
            assert!(refused(&lying, plain.len()), "{at}");
        }
    }

    proptest! {
        #[test]
        fn any_planes_are_survived(
            lengths: [u16; 4],
            bytes in prop::collection::vec(any::<u8>(), 0..600),
            plain_len in 0usize..600,
            four: bool,
        ) {
            let width = if four { Width::Four } else { Width::Two };
            let mut stored: Vec<u8> =
                lengths.iter().flat_map(|&len| u32::from(len % 200).to_le_bytes()).collect();
            stored.truncate(width.header());
            stored.extend(bytes);
            let mut decompressor = zstd::bulk::Decompressor::new().unwrap();
            let mut out = vec![0; plain_len];
            let _ = join(width, &stored, &mut Vec::new(), &mut decompressor, &mut out);
        }
    }
}
