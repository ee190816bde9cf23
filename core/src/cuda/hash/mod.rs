//! Hashing device memory where it is.
//!
//! The hash of a chunk is its address in the store, so what lies on a device can be compared with
//! what was saved, and chunks that the store has need not be copied. A GPU reads its memory some
//! thirty times faster than PCIe carries it: proving that a copy is right costs a thirtieth of
//! making it.
//!
//! On a GPU a kernel does the work: `blake3.cu`, compiled to the PTX next to it. The memory of the
//! software driver is host memory, and this process's own cores hash it faster than its interpreter
//! would run the kernel.

use std::ffi::c_void;
use std::sync::Arc;

use rayon::prelude::*;

use super::context::{Context, GRANULE, SharedBlock};
use super::driver::DriverError;
use super::staging::Staging;
use super::stream::{Module, Stream};
use crate::image::DriverKind;
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
/// Bytes of a sum.
const SUM: usize = 8;
/// Bytes of a span's description: address and length.
const SPAN: usize = 16;

/// What the memory of a span holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hashed {
    /// The hash of its bytes.
    pub id: ChunkId,
    /// The bytes' [sum](Key::sum), by which a copy of them is checked.
    pub sum: u64,
}

/// Hashes memory of one device.
pub struct Hasher {
    how: How,
    key: Arc<Key>,
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
    /// Where the kernel writes their sums.
    sums: Staging,
    /// For the kernel alone, in device memory. The key follows.
    shared: SharedBlock,
}

impl Hasher {
    /// Makes everything ready, so that hashing itself allocates nothing. Compiling the kernel takes
    /// the driver some tenths of a second for the first time on a host.
    ///
    /// # Errors
    /// The driver refuses the kernel or the memory (some 250 KiB of pinned host memory, 2 MiB of the device's).
    pub fn prepare(context: &Arc<Context>) -> Result<Self, DriverError> {
        let key = Arc::new(Key::random());
        let how = match context.driver().library().kind() {
            DriverKind::Soft => How::Host,
            DriverKind::Nvidia => How::Kernel(Kernel::prepare(context, &key)?),
        };
        Ok(Self { how, key })
    }

    /// The key with which it makes its sums.
    pub fn key(&self) -> &Arc<Key> {
        &self.key
    }

    /// Hash and sum of each span, given by device address and length. Addresses are multiples of 16 and
    /// lie in memory that is mapped in this process; no length is above [`MAX_CHUNK`].
    ///
    /// Of memory that changes meanwhile it is hash and sum of what was read, which may never have been there at
    /// once: the caller has to know that it does not change, or to compare sums with what is copied of it.
    ///
    /// # Errors
    /// An error of the driver; what was hashed is lost.
    pub fn hash(&mut self, spans: &[(u64, usize)]) -> Result<Vec<Hashed>, DriverError> {
        assert!(spans.iter().all(|&(address, len)| address % 16 == 0 && len <= MAX_CHUNK));
        match &mut self.how {
            How::Kernel(kernel) => kernel.hash(spans),
            How::Host => {
                let hash = |bytes: &mut _, span: &_| hash_host(bytes, span, &self.key);
                Ok(spans.par_iter().map_init(Vec::new, hash).collect())
            }
        }
    }
}

impl Kernel {
    fn prepare(context: &Arc<Context>, key: &Key) -> Result<Self, DriverError> {
        let shared = ((BATCH * SHARED + Key::BYTES) as u64).next_multiple_of(GRANULE);
        let shared = SharedBlock::allocate(context, shared)?;
        let stream = Stream::create(context)?;
        stream.fill(shared.address(), 0, BATCH * SHARED)?;
        let mut staging = Staging::allocate(context, Key::BYTES)?;
        staging.bytes_mut().copy_from_slice(&key.to_bytes());
        stream.copy_in(&staging, shared.address() + (BATCH * SHARED) as u64, Key::BYTES)?;
        stream.synchronize()?;
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
            let shared = self.shared.address();
            let mut arguments = [0, 0, 0, shared, shared + (BATCH * SHARED) as u64];
            for (argument, array) in arguments.iter_mut().zip(arrays) {
                *argument = array.device_address()?;
            }
            let mut pointers = arguments.each_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>());
            let blocks = batch.len() as u32 * PARTS;
            // SAFETY: five pointers, to arrays with room for the batch and to the key; the kernel reads the spans,
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
fn hash_host(bytes: &mut Vec<u8>, &(address, len): &(u64, usize), key: &Key) -> Hashed {
    bytes.resize(len, 0);
    // SAFETY: the memory is mapped here. Another process may write to it: the bytes are copied by the C
    // library, of which the compiler assumes nothing, and any mixture is valid.
    unsafe {
        libc::memcpy(bytes.as_mut_ptr().cast(), address as usize as *const c_void, len);
    }
    Hashed { id: ChunkId::of(bytes), sum: key.sum(bytes) }
}

mod sum;
#[cfg(test)]
mod tests;

pub use sum::Key;
