//! Host versions of what the kernels compute, bit for bit (`kernels/common.cuh`, `mixer.cu`).

/// A 32-bit bijection that scatters its input.
pub(crate) fn mix(mut x: u32) -> u32 {
    x ^= x >> 16;
    x = x.wrapping_mul(0x85eb_ca6b);
    x ^= x >> 13;
    x = x.wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// A number in [-1, 1) from a hash; exact.
pub(crate) fn unit(h: u32) -> f32 {
    (h >> 8) as f32 * (1.0 / 8_388_608.0) - 1.0
}

/// What `mixer_fill` writes into `n` words.
pub(crate) fn filled(n: usize, tag: u32) -> Vec<u32> {
    (0..n as u32).map(|i| mix(tag.wrapping_add(i))).collect()
}

/// One `mixer_round`.
pub(crate) fn mixer_round(words: &mut [u32], round: u32) {
    for (i, word) in words.iter_mut().enumerate() {
        *word = mix(word.wrapping_add(round)) ^ i as u32;
    }
}

/// What `mixer_sum` adds.
pub(crate) fn mixer_sum(words: &[u32]) -> u64 {
    let terms = words.iter().enumerate().map(|(i, &w)| u64::from(w).wrapping_mul(2 * i as u64 + 1));
    terms.fold(0, u64::wrapping_add)
}

/// A seeded sequence of numbers for decisions on the host.
pub(crate) struct Sequence {
    seed: u32,
    count: u32,
}

impl Sequence {
    /// The sequence that belongs to a seed.
    pub(crate) fn new(seed: u32) -> Self {
        Self { seed: mix(seed ^ 0x9e37_79b9), count: 0 }
    }

    /// A number below `limit`, which must not be 0.
    pub(crate) fn below(&mut self, limit: u32) -> u32 {
        self.count = self.count.wrapping_add(1);
        mix(self.seed.wrapping_add(self.count.wrapping_mul(0x9e37_79b9))) % limit
    }
}

/// The largest error of `got` against `wanted`, relative to 1 and the wanted size.
pub(crate) fn worst_error(got: &[f32], wanted: &[f64]) -> f64 {
    let error = |(&g, &w): (&f32, &f64)| (f64::from(g) - w).abs() / w.abs().max(1.0);
    // A NaN must count as wrong, and `max` would drop it.
    let worst = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
    got.iter().zip(wanted).map(error).fold(0.0, worst)
}

#[cfg(test)]
mod tests {
    use super::{mixer_sum, unit, worst_error};

    #[test]
    fn unit_stays_in_its_range_and_is_exact() {
        assert_eq!(unit(0).to_bits(), (-1.0f32).to_bits());
        assert_eq!(unit(u32::MAX).to_bits(), (1.0f32 - 1.0 / 8_388_608.0).to_bits());
        assert_eq!(unit(1 << 31).to_bits(), 0.0f32.to_bits());
    }

    #[test]
    fn a_sum_depends_on_the_order() {
        assert_ne!(mixer_sum(&[1, 2]), mixer_sum(&[2, 1]));
    }

    #[test]
    fn a_nan_is_the_worst_error() {
        assert!(worst_error(&[1.0, f32::NAN, 1.0], &[1.0; 3]).is_nan());
        assert!(worst_error(&[1.0, 1.5], &[1.0; 2]) > 0.4);
    }
}
