//! Loads and stores of vectors in global memory.
//!
//! The documentation of PTX promises nothing about a vector as a whole, but hardware moves an aligned vector of a thread at
//! once, and libraries rely on that: CUB's scans publish the state of a tile and its sum as one vector, which another
//! block reads while it is written. So other threads see a vector of up to 16 bytes whole here too.

use super::memory::{extend, read, write};
use super::warp::{Warp, for_lanes};
use crate::ptx::code::{Lanes, Reg, Src, WIDTH};

/// The most bytes that a vector has, in words of eight.
const WORDS: usize = 4;

/// A vector of each lane, in words of eight bytes, the first in memory first.
type Words = [Lanes; WORDS];

/// Reads sixteen aligned bytes at once.
///
/// # Safety
/// The address must be mapped and a multiple of 16.
#[inline(always)]
pub(super) unsafe fn read_pair(address: u64) -> [u64; 2] {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_cvtsi128_si64, _mm_unpackhi_epi64};
        let pair: __m128i;
        // SAFETY: mapped and aligned by the caller's promise; not a load of Rust's, so that others may write there
        // meanwhile. Processors with AVX do this at once (Intel's manual, volume 3, 9.1.1; AMD's, volume 2, 7.3.2).
        unsafe {
            std::arch::asm!(
                "movdqa {pair}, xmmword ptr [{address}]",
                pair = lateout(xmm_reg) pair,
                address = in(reg) address,
                options(nostack, preserves_flags, readonly)
            );
        }
        // SAFETY: every x86-64 has SSE2.
        unsafe {
            let high = _mm_unpackhi_epi64(pair, pair);
            [_mm_cvtsi128_si64(pair) as u64, _mm_cvtsi128_si64(high) as u64]
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: mapped and aligned by the caller's promise.
    unsafe {
        [read(address, 8), read(address + 8, 8)]
    }
}

/// Writes sixteen aligned bytes at once.
///
/// # Safety
/// The address must be writable and a multiple of 16.
#[inline(always)]
pub(super) unsafe fn write_pair(address: u64, [low, high]: [u64; 2]) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::_mm_set_epi64x;
        // SAFETY: as for `read_pair`, and writable.
        unsafe {
            let pair = _mm_set_epi64x(high as i64, low as i64);
            std::arch::asm!(
                "movdqa xmmword ptr [{address}], {pair}",
                pair = in(xmm_reg) pair,
                address = in(reg) address,
                options(nostack, preserves_flags)
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    // SAFETY: writable and aligned by the caller's promise.
    unsafe {
        write(address, 8, low);
        write(address + 8, 8, high);
    }
}

/// Word and bit at which an element begins.
#[inline(always)]
pub(super) fn place(index: usize, size: u8) -> (usize, u32) {
    let at = index * usize::from(size);
    (at / 8, 8 * (at % 8) as u32)
}

impl Warp<'_> {
    /// Loads a vector for each lane of the mask.
    ///
    /// # Safety
    /// All of these vectors must be mapped, and aligned for their whole size.
    pub(super) unsafe fn load_vectors(
        &mut self,
        (addresses, mask): (&Lanes, u32),
        (size, signed): (u8, bool),
        to: &[Reg],
    ) {
        let mut words: Words = [[0; WIDTH]; WORDS];
        // SAFETY: by the caller's promise.
        for_lanes(mask, |lane| unsafe {
            match usize::from(size) * to.len() {
                whole @ ..=8 => words[0][lane] = read(addresses[lane], whole as u8),
                whole => {
                    for pair in 0..whole / 16 {
                        let read = read_pair(addresses[lane] + 16 * pair as u64);
                        [words[2 * pair][lane], words[2 * pair + 1][lane]] = read;
                    }
                }
            }
        });
        let rest = 64 - 8 * u32::from(size);
        for (index, &to) in to.iter().enumerate() {
            let (word, bit) = place(index, size);
            let (to, from) = (self.lanes_mut(to), &words[word]);
            for_lanes(mask, |lane| {
                to[lane] = extend(from[lane] >> bit << rest >> rest, size, signed);
            });
        }
    }

    /// Stores a vector for each lane of the mask.
    ///
    /// # Safety
    /// All of these vectors must be writable, and aligned for their whole size.
    pub(super) unsafe fn store_vectors(
        &mut self,
        (addresses, mask): (&Lanes, u32),
        size: u8,
        from: &[Src],
    ) {
        let mut words: Words = [[0; WIDTH]; WORDS];
        let rest = 64 - 8 * u32::from(size);
        for (index, &from) in from.iter().enumerate() {
            let (word, bit) = place(index, size);
            let (from, to) = (self.lanes(from), &mut words[word]);
            for_lanes(mask, |lane| to[lane] |= from[lane] << rest >> rest << bit);
        }
        // SAFETY: by the caller's promise.
        for_lanes(mask, |lane| unsafe {
            match usize::from(size) * from.len() {
                whole @ ..=8 => write(addresses[lane], whole as u8, words[0][lane]),
                whole => {
                    for pair in 0..whole / 16 {
                        let written = [words[2 * pair][lane], words[2 * pair + 1][lane]];
                        write_pair(addresses[lane] + 16 * pair as u64, written);
                    }
                }
            }
        });
    }
}
