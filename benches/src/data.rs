//! Synthetic memory that compresses and repeats as the memory of real programs does.

/// Bytes of one piece of [`mixture`]: pieces of the kinds alternate.
pub const PIECE: usize = 4 << 20;

/// A sequence of numbers that look random (xorshift64*).
pub struct Sequence(u64);

impl Sequence {
    /// The sequence of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn next_number(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number from a bell-shaped distribution with mean 0 and variance 1 (nearly: none is beyond
    /// 3.5).
    fn normal(&mut self) -> f32 {
        let bits = self.next_number();
        // The sum of four 16-bit numbers is near enough to a normal distribution; the lowest bits
        // of the product below fill what would be zeros at the end of each number.
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        let fine = (bits.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as f32 / 65536.0;
        ((sum as f32 + fine) / 65536.0 - 2.0) * 1.732
    }
}

/// What numbers are like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Weights of a trained network in bf16, around 0, of about a fiftieth.
    Bf16Weights,
    /// Weights in fp16.
    Fp16Weights,
    /// Weights in fp32, as an optimizer keeps them.
    Fp32Weights,
    /// First moments of Adam in fp32: gradients of any sign, whose scale differs log-normally.
    FirstMoments,
    /// Second moments of Adam in fp32: their squares.
    SecondMoments,
    /// Activations behind GELU in bf16.
    GeluActivations,
    /// Activations behind ReLU in bf16: half of them zero.
    ReluActivations,
    /// No numbers: random bytes.
    Noise,
}

/// Fills with numbers of a kind.
pub fn fill(kind: Kind, bytes: &mut [u8], seed: u64) {
    let mut sequence = Sequence::new(seed);
    let random = &mut sequence;
    match kind {
        Kind::Bf16Weights => bf16(bytes, || random.normal() * 0.02),
        Kind::Fp16Weights => fp16(bytes, || random.normal() * 0.02),
        Kind::Fp32Weights => fp32(bytes, || random.normal() * 0.02),
        Kind::FirstMoments => fp32(bytes, || random.normal() * (random.normal() - 9.0).exp()),
        Kind::SecondMoments => fp32(bytes, || (2.0 * (random.normal() - 9.0)).exp()),
        Kind::GeluActivations => bf16(bytes, || {
            let x = random.normal() * 1.5;
            0.5 * x * (1.0 + (0.797_88 * (x + 0.044_715 * x * x * x)).tanh())
        }),
        Kind::ReluActivations => bf16(bytes, || (random.normal() * 1.5).max(0.0)),
        Kind::Noise => {
            for eight in bytes.chunks_mut(8) {
                eight.copy_from_slice(&random.next_number().to_le_bytes()[..eight.len()]);
            }
        }
    }
}

/// Fills with bf16 numbers, rounded to the nearest.
fn bf16(bytes: &mut [u8], mut next: impl FnMut() -> f32) {
    for pair in bytes.chunks_exact_mut(2) {
        let bits = next().to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
        pair.copy_from_slice(&((rounded >> 16) as u16).to_le_bytes());
    }
}

/// Fills with fp16 numbers, cut off; those too small for a normal number become 0.
fn fp16(bytes: &mut [u8], mut next: impl FnMut() -> f32) {
    for pair in bytes.chunks_exact_mut(2) {
        let bits = next().to_bits();
        let sign = (bits >> 16 & 0x8000) as u16;
        let number = match (bits >> 23 & 0xff).checked_sub(127 - 15) {
            Some(exponent @ 1..=30) => (exponent << 10 | (bits >> 13 & 0x3ff)) as u16,
            _ => 0,
        };
        pair.copy_from_slice(&(sign | number).to_le_bytes());
    }
}

fn fp32(bytes: &mut [u8], mut next: impl FnMut() -> f32) {
    for four in bytes.chunks_exact_mut(4) {
        four.copy_from_slice(&next().to_le_bytes());
    }
}

/// Fills piece `number` of a mixture: of five pieces two are bf16 weights, one is what an optimizer
/// keeps in fp32 (weights, first and second moments by turns), one zeros, and one repeats an earlier
/// piece of weights.
pub fn fill_piece(piece: &mut [u8], number: u64) {
    let optimizer = [Kind::Fp32Weights, Kind::FirstMoments, Kind::SecondMoments];
    match number % 5 {
        0 | 2 => fill(Kind::Bf16Weights, piece, number),
        1 => fill(optimizer[(number / 5 % 3) as usize], piece, number),
        3 => piece.fill(0),
        // The same for all of them.
        _ => fill(Kind::Bf16Weights, piece, u64::MAX),
    }
}

/// A mixture of `len` bytes: 40 % bf16 weights, 20 % fp32 of an optimizer, 20 % zeros, 20 %
/// repeated.
pub fn mixture(len: usize) -> Vec<u8> {
    use rayon::prelude::*;
    let mut bytes = vec![0; len];
    bytes.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| fill_piece(piece, i as u64));
    bytes
}
