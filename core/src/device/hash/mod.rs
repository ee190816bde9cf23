//! Hashing device memory where it is.
//!
//! The hash of a chunk is its address in the store, so what lies on a device can be compared with
//! what was saved, and chunks that the store has need not be copied. A GPU reads its memory some
//! thirty times faster than PCIe carries it: proving that a copy is right costs a thirtieth of
//! making it.
//!
//! On a GPU a kernel does the work: `blake3.cu`, compiled to the PTX beside it. The memory of the
//! software driver is host memory, and this process's own cores hash it faster than its interpreter
//! would run the kernel.

use std::ffi::c_void;
use std::sync::Arc;

use rayon::prelude::*;

use super::context::{Context, GRANULE, Module, SharedBlock, Staging, Stream};
use super::driver::DriverError;
use crate::image::DriverKind;
use crate::library;
use crate::store::{ChunkId, MAX_CHUNK};

const PTX: &str = include_str!("blake3.ptx");
/// Threads of a block of the kernel, and blocks for a span.
const THREADS: u32 = 256;
const PARTS: u32 = 8;
/// Bytes through which these blocks tell each other what they have found.
const SHARED: usize = 384;
/// Spans that one launch hashes; 8 GiB of whole chunks, some 5 ms on a fast GPU. A launch cannot be
/// interrupted, and on a GPU that the program shares it holds the program up.
const BATCH: usize = 4096;
const HASH: usize = 32;
/// Bytes of a [`sum`].
const SUM: usize = 8;
/// Bytes of a span's description: address and length.
const SPAN: usize = 16;

/// What the memory of a span holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hashed {
    /// The hash of its bytes.
    pub id: ChunkId,
    /// Their [`sum`], for those who get a copy of them.
    pub sum: u64,
}

/// The sum of the 32-bit words of `bytes`, word *i* times 2*i* + 1, modulo 2^64; the last word is filled
/// up with zeros. It costs the host a small part of what a hash costs, and tells whether a copy has brought
/// the bytes that were hashed on the device: any change within one word changes it. It proves nothing
/// against somebody who chooses the bytes.
pub fn sum(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: this processor has what the function is compiled for.
        return unsafe { sum_with_avx2(bytes) };
    }
    sum_with(bytes)
}

/// The same, compiled for processors that multiply four words at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_with_avx2(bytes: &[u8]) -> u64 {
    sum_with(bytes)
}

#[inline(always)]
fn sum_with(bytes: &[u8]) -> u64 {
    let word = |bytes: &[u8]| u64::from(u32::from_le_bytes(std::array::from_fn(|i| bytes[i])));
    let words = bytes.chunks_exact(4);
    let rest = words.remainder();
    let mut weight = 1u32;
    let mut total = 0u64;
    for bytes in words {
        total = total.wrapping_add(word(bytes).wrapping_mul(u64::from(weight)));
        weight = weight.wrapping_add(2);
    }
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    total.wrapping_add(word(&last).wrapping_mul(u64::from(weight)))
}

/// Hashes memory of one device.
pub struct Hasher {
    how: How,
}

enum How {
    Kernel(Kernel),
    Host,
}

struct Kernel {
    stream: Stream,
    module: Module,
    /// Descriptions of the spans of a batch; the kernel reads them over PCIe.
    spans: Staging,
    /// Where the kernel writes their hashes.
    hashes: Staging,
    /// And their sums.
    sums: Staging,
    /// For the kernel alone, in device memory.
    shared: SharedBlock,
}

impl Hasher {
    /// Makes everything ready, so that hashing itself allocates nothing. Compiling the kernel takes
    /// the driver some tenths of a second for the first time on a host.
    ///
    /// # Errors
    /// The driver refuses the kernel or the memory (some 250 KiB of pinned host memory, 2 MiB of the device's).
    pub fn prepare(context: &Arc<Context>) -> Result<Self, DriverError> {
        let how = match library::kind(context.driver().path()) {
            DriverKind::Soft => How::Host,
            DriverKind::Nvidia => How::Kernel(Kernel::prepare(context)?),
        };
        Ok(Self { how })
    }

    /// Hash and sum of each span, given by device address and length. Addresses are multiples of 16 and
    /// lie in memory that is mapped in this process; no length is above [`MAX_CHUNK`].
    ///
    /// Memory that changes meanwhile gives a hash of no moment: the caller has to know that it
    /// stands still, or to take the result for a hint.
    ///
    /// # Errors
    /// Of the driver; what was hashed is lost.
    pub fn hash(&mut self, spans: &[(u64, usize)]) -> Result<Vec<Hashed>, DriverError> {
        assert!(spans.iter().all(|&(address, len)| address % 16 == 0 && len <= MAX_CHUNK));
        match &mut self.how {
            How::Kernel(kernel) => kernel.hash(spans),
            How::Host => Ok(spans.par_iter().map_init(Vec::new, hash_host).collect()),
        }
    }
}

impl Kernel {
    fn prepare(context: &Arc<Context>) -> Result<Self, DriverError> {
        let shared = ((BATCH * SHARED) as u64).next_multiple_of(GRANULE);
        let shared = SharedBlock::allocate(context, shared)?;
        let stream = Stream::create(context)?;
        stream.fill(shared.address(), 0, BATCH * SHARED)?;
        Ok(Self {
            module: Module::load(context, PTX, c"gpucr_blake3")?,
            spans: Staging::allocate(context, BATCH * SPAN)?,
            hashes: Staging::allocate(context, BATCH * HASH)?,
            sums: Staging::allocate(context, BATCH * SUM)?,
            shared,
            stream,
        })
    }

    fn hash(&mut self, spans: &[(u64, usize)]) -> Result<Vec<Hashed>, DriverError> {
        self.stream.context().enter()?;
        let mut all = Vec::with_capacity(spans.len());
        for batch in spans.chunks(BATCH) {
            for (place, (address, len)) in self.spans.bytes_mut().chunks_exact_mut(SPAN).zip(batch)
            {
                place[..8].copy_from_slice(&address.to_le_bytes());
                place[8..].copy_from_slice(&(*len as u64).to_le_bytes());
            }
            let arrays = [&self.spans, &self.hashes, &self.sums];
            let mut arguments = [0, 0, 0, self.shared.address()];
            for (argument, array) in arguments.iter_mut().zip(arrays) {
                *argument = array.device_address()?;
            }
            let mut pointers = arguments.each_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>());
            let blocks = batch.len() as u32 * PARTS;
            // SAFETY: four pointers, to arrays with room for the batch; the kernel reads the spans,
            // which the caller vouches for, and is waited for before anything is touched again.
            unsafe {
                self.module.launch(&self.stream, blocks, THREADS, &mut pointers)?;
            }
            self.stream.synchronize()?;
            let hashes = self.hashes.bytes().chunks_exact(HASH).take(batch.len());
            let sums = self.sums.bytes().chunks_exact(SUM);
            all.extend(hashes.zip(sums).map(|(hash, sum)| Hashed {
                id: ChunkId(std::array::from_fn(|i| hash[i])),
                sum: u64::from_le_bytes(std::array::from_fn(|i| sum[i])),
            }));
        }
        Ok(all)
    }
}

/// Hashes memory of the software driver, whose device addresses are addresses of this process.
fn hash_host(bytes: &mut Vec<u8>, &(address, len): &(u64, usize)) -> Hashed {
    bytes.resize(len, 0);
    // SAFETY: the memory is mapped here. Another process may write to it: the bytes are copied by the C
    // library, of which the compiler assumes nothing, and any mixture is valid.
    unsafe {
        libc::memcpy(bytes.as_mut_ptr().cast(), address as usize as *const c_void, len);
    }
    Hashed { id: ChunkId::of(bytes), sum: sum(bytes) }
}

#[cfg(test)]
mod tests;
