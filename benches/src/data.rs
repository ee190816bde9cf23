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

    /// A weight as a trained network has it: bell-shaped around 0, of about a fiftieth.
    fn weight(&mut self) -> f32 {
        let bits = self.next_number();
        // The sum of four 16-bit numbers is near enough to a normal distribution.
        let sum: u64 = (0..4).map(|i| (bits >> (16 * i)) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 0.035
    }
}

/// Fills with bf16 weights.
pub fn fill_bf16(bytes: &mut [u8], seed: u64) {
    let mut sequence = Sequence::new(seed);
    for pair in bytes.chunks_exact_mut(2) {
        let bits = (sequence.weight().to_bits() >> 16) as u16;
        pair.copy_from_slice(&bits.to_le_bytes());
    }
}

/// Fills with fp32 weights.
pub fn fill_fp32(bytes: &mut [u8], seed: u64) {
    let mut sequence = Sequence::new(seed);
    for four in bytes.chunks_exact_mut(4) {
        // The low bits of a sum of four numbers are few; those of real weights are all used.
        let noise = 1.0 + (sequence.next_number() >> 40) as f32 / (1u64 << 26) as f32;
        four.copy_from_slice(&(sequence.weight() * noise).to_le_bytes());
    }
}

/// Fills piece `number` of a mixture: of five pieces two are bf16 weights, one fp32 weights, one
/// zeros, and one repeats an earlier piece of weights.
pub fn fill_piece(piece: &mut [u8], number: u64) {
    match number % 5 {
        0 | 2 => fill_bf16(piece, number),
        1 => fill_fp32(piece, number),
        3 => piece.fill(0),
        // The same for all of them.
        _ => fill_bf16(piece, u64::MAX),
    }
}

/// A mixture of `len` bytes: 40 % bf16 weights, 20 % fp32 weights, 20 % zeros, 20 % repeated.
pub fn mixture(len: usize) -> Vec<u8> {
    use rayon::prelude::*;
    let mut bytes = vec![0; len];
    bytes.par_chunks_mut(PIECE).enumerate().for_each(|(i, piece)| fill_piece(piece, i as u64));
    bytes
}
