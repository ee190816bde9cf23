//! Sums of bytes, by which a copy is told from what was hashed.
//!
//! A hash costs the host ten times what bringing the bytes costs. So the device, which hashes, makes a sum of the
//! same words on the way, and the host makes the sum of the copy that it gets. The numbers in it are random and nobody
//! else's, so two contents that do not depend on them hardly ever have the same sum, however they came about: a
//! chunk that was written between the two is found out, also if what was added to one word was taken from
//! another.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

/// Words of a leaf, as BLAKE3 calls a piece of 1 KiB.
const WORDS: usize = 256;
const LEAF: usize = 4 * WORDS;
/// Leaves of a part. Parts are summed from the last to the first: the thread that stores the chunk next, from its
/// beginning, finds the beginning in the core's cache. Within a part the order is upwards, as fetching ahead expects.
const PART: usize = 256;
/// How many bytes ahead of a leaf memory is fetched.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 2 * LEAF;

/// The random numbers of a sum.
///
/// A sum is that of the leaves' sums, each times an odd number, and a leaf's that of its 32-bit words, each times
/// one of 256 numbers; all modulo 2^64. The last word is filled up with zeros.
///
/// Two contents of one length, of which neither depends on the key, have the same sum with a probability of 2^-32
/// at most if they differ in one leaf. (Take a word that differs, by *d*. Whatever the numbers of the others are, at
/// most one number *k* makes the difference zero, since *d k* takes another value for each.) If they differ in
/// more, and all words by multiples of 2^*e*, it is 2^-32 and some 2^-(59-*e*), below 2^-27 in any case: words at the
/// same place of several leaves have one number *k*, and *k d M* is zero also where these have enough factors of two
/// together, *M* being the sum of the leaves' numbers, which are taken for independent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key {
    words: [u32; WORDS],
    seed: u64,
}

impl Key {
    /// Bytes of a key on the device.
    pub(super) const BYTES: usize = LEAF + 16;

    /// Another one each time.
    pub fn random() -> Self {
        // SipHash with a key of the system's randomness.
        let state = RandomState::new();
        Self {
            words: std::array::from_fn(|i| state.hash_one(i) as u32),
            seed: state.hash_one(WORDS),
        }
    }

    /// As the kernel reads it: `struct Key` of `blake3.cu`.
    pub(super) fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        for (place, word) in bytes.chunks_exact_mut(4).zip(self.words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes[LEAF..LEAF + 8].copy_from_slice(&self.seed.to_le_bytes());
        bytes
    }

    /// The sum of `bytes`.
    pub fn sum(&self, bytes: &[u8]) -> u64 {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: this processor has what the function is compiled for.
            return unsafe { self.sum_with_avx2(bytes) };
        }
        self.sum_of(bytes, |leaf| self.leaf(leaf))
    }

    /// [`sum`](Self::sum) for processors that multiply four words at a time.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn sum_with_avx2(&self, bytes: &[u8]) -> u64 {
        self.sum_of(bytes, |leaf| self.leaf_with_avx2(leaf))
    }

    #[inline(always)]
    fn sum_of(&self, bytes: &[u8], sum_of_leaf: impl Fn(&[u8; LEAF]) -> u64) -> u64 {
        let (leaves, rest) = bytes.as_chunks::<LEAF>();
        let product = |leaf: &[u8; LEAF], number: usize| {
            sum_of_leaf(leaf).wrapping_mul(self.multiplier(number as u32))
        };
        let mut total = 0u64;
        if !rest.is_empty() {
            let mut last = [0; LEAF];
            last[..rest.len()].copy_from_slice(rest);
            total = product(&last, leaves.len());
        }
        for (part, leaves) in leaves.chunks(PART).enumerate().rev() {
            for (leaf, number) in leaves.iter().zip(part * PART..) {
                total = total.wrapping_add(product(leaf, number));
            }
        }
        total
    }

    fn leaf(&self, leaf: &[u8; LEAF]) -> u64 {
        let mut sum = 0u64;
        for (bytes, number) in leaf.chunks_exact(4).zip(self.words) {
            let word = u32::from_le_bytes(std::array::from_fn(|i| bytes[i]));
            sum = sum.wrapping_add(u64::from(word).wrapping_mul(u64::from(number)));
        }
        sum
    }

    /// [`leaf`](Self::leaf) with vectors of four products. Most of the time goes by waiting for memory, so what comes
    /// next is fetched meanwhile (`docs/results/concurrent-copies.md`).
    #[cfg(target_arch = "x86_64")]
    #[inline]
    #[target_feature(enable = "avx2")]
    fn leaf_with_avx2(&self, leaf: &[u8; LEAF]) -> u64 {
        use std::arch::x86_64::*;

        const LINE: usize = 64;
        for line in (AHEAD..AHEAD + LEAF).step_by(LINE) {
            // SAFETY: a prefetch of any address does nothing but to fill a cache. (Newer compilers know that.)
            #[allow(unused_unsafe)]
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(leaf.as_ptr().wrapping_add(line).cast())
            };
        }
        let (mut even, mut odd) = (_mm256_setzero_si256(), _mm256_setzero_si256());
        for (words, numbers) in leaf.as_chunks::<32>().0.iter().zip(self.words.as_chunks::<8>().0) {
            // SAFETY: both are 32 bytes, and these loads need no alignment.
            let (words, numbers) = unsafe {
                (
                    _mm256_loadu_si256(words.as_ptr().cast()),
                    _mm256_loadu_si256(numbers.as_ptr().cast()),
                )
            };
            // A product is that of the lower halves of two 64-bit words.
            even = _mm256_add_epi64(even, _mm256_mul_epu32(words, numbers));
            let (words, numbers) =
                (_mm256_srli_epi64::<32>(words), _mm256_srli_epi64::<32>(numbers));
            odd = _mm256_add_epi64(odd, _mm256_mul_epu32(words, numbers));
        }
        let both = _mm256_add_epi64(even, odd);
        let halves =
            _mm_add_epi64(_mm256_castsi256_si128(both), _mm256_extracti128_si256::<1>(both));
        let low = _mm_cvtsi128_si64(halves) as u64;
        low.wrapping_add(_mm_extract_epi64::<1>(halves) as u64)
    }

    /// By what a leaf is multiplied: an odd number, by SplitMix64 (Steele, Lea and Flood, 2014).
    #[inline(always)]
    fn multiplier(&self, leaf: u32) -> u64 {
        let z = self.seed.wrapping_add(u64::from(leaf).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) | 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::MAX_CHUNK;

    #[test]
    fn it_is_the_sum_of_the_leaves_by_their_numbers() {
        let key = Key::random();
        assert_eq!(key.sum(&[]), 0);
        let mut bytes = vec![0; 2 * LEAF + 3];
        bytes[0] = 1;
        bytes[8] = 2;
        bytes[LEAF + 4] = 3;
        bytes[2 * LEAF + 2] = 1;
        let number = |word: usize| u64::from(key.words[word]);
        let leaves = [number(0) + 2 * number(2), 3 * number(1), (1 << 16) * number(0)];
        let expected = leaves
            .iter()
            .zip(0..)
            .fold(0u64, |sum, (leaf, at)| sum.wrapping_add(leaf.wrapping_mul(key.multiplier(at))));
        assert_eq!(key.sum(&bytes), expected);
        assert_eq!(key.sum_of(&bytes, |leaf| key.leaf(leaf)), expected);

        // In several parts.
        let mut bytes = vec![0; (2 * PART + 5) * LEAF];
        let expected = [0, PART - 1, PART, 2 * PART, 2 * PART + 4].map(|leaf| {
            bytes[leaf * LEAF + 8] = 3;
            (3 * number(2)).wrapping_mul(key.multiplier(leaf as u32))
        });
        assert_eq!(key.sum(&bytes), expected.into_iter().fold(0, u64::wrapping_add));
    }

    /// Of many lengths, with words and numbers as large as they can be among them.
    #[test]
    fn it_is_the_same_on_all_processors() {
        let mut key = Key::random();
        key.words[..40].fill(u32::MAX);
        let bytes: Vec<u8> =
            (0..3 * LEAF).map(|i| if i < 999 { 255 } else { ((i * i) >> 7) as u8 }).collect();
        for begin in [0, 1, 4, 31] {
            for len in (0..bytes.len() - begin).step_by(37) {
                let bytes = &bytes[begin..begin + len];
                assert_eq!(
                    key.sum(bytes),
                    key.sum_of(bytes, |leaf| key.leaf(leaf)),
                    "{begin} {len}"
                );
            }
        }
    }

    /// Where words are moved or rotated their sum is the same before and after, and of most that are moved also the
    /// sum of words times places. Signs add a multiple of 2^31 only.
    #[test]
    fn changes_that_cancel_are_found_out() {
        let key = Key::random();
        let mut words = vec![0u32; MAX_CHUNK / 4];
        words.iter_mut().zip(0..).for_each(|(word, i)| *word = 0x1000 + 16 * (i % 5000));
        let sum = |words: &[u32]| {
            key.sum(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>())
        };
        let before = sum(&words);
        let far = MAX_CHUNK / 8;
        for (a, b, c) in [(0, 1, 2), (7, 1031, 2055), (100, 101, far), (255, 256, 257)] {
            let mut rotated = words.clone();
            (rotated[a], rotated[b], rotated[c]) = (words[b], words[c], words[a]);
            assert_ne!(sum(&rotated), before, "rotated {a} {b} {c}");
            let mut moved = words.clone();
            moved[a] += 1;
            moved[b] -= 2;
            moved[c] += 1;
            assert_ne!(sum(&moved), before, "moved {a} {b} {c}");
        }
        for at in (0..far).step_by(9973) {
            let mut signs = words.clone();
            signs[at] ^= 1 << 31;
            signs[at + far] ^= 1 << 31;
            assert_ne!(sum(&signs), before, "signs {at}");
        }
    }

    #[test]
    fn no_two_keys_are_alike() {
        assert_ne!(Key::random(), Key::random());
    }
}
