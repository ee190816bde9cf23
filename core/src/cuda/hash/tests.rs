//! The kernel against the `blake3` crate. It runs on the software driver's interpreter here, and on
//! a GPU where there is one.

use std::sync::Arc;

use super::*;
use crate::cuda::context::SharedBlock;
use crate::cuda::tests::soft_driver;
use crate::cuda::{Driver, HostDriver, Lane};
use crate::image::DriverKind;
use crate::image::library;

fn contexts() -> Vec<Arc<Context>> {
    let soft = (DriverKind::Soft, soft_driver());
    let nvidia = library::nvidia().map(|path| (DriverKind::Nvidia, path));
    std::iter::once(soft)
        .chain(nvidia)
        .map(|(kind, path)| {
            let library = HostDriver::vouched(&path, kind).unwrap();
            let driver = Arc::new(Driver::open(&Arc::new(library)).unwrap());
            let device = driver.devices().unwrap().remove(0);
            Context::create(&driver, &device).unwrap()
        })
        .collect()
}

/// Bytes that repeat nowhere.
fn noise(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().finalize_xof().fill(&mut bytes);
    bytes
}

fn upload(context: &Arc<Context>, bytes: &[u8]) -> SharedBlock {
    let block =
        SharedBlock::allocate(context, (bytes.len() as u64).next_multiple_of(2 << 20)).unwrap();
    let mut staging = Staging::allocate(context, bytes.len()).unwrap();
    staging.bytes_mut().copy_from_slice(bytes);
    let stream = Stream::create(context).unwrap();
    stream.copy_in(&staging, block.address(), bytes.len()).unwrap();
    stream.synchronize().unwrap();
    block
}

/// `hash` gives the key too.
fn check(
    hash: impl Fn(&Arc<Context>, &[(u64, usize)]) -> (Vec<Hashed>, Arc<Key>),
    lengths: &[usize],
) {
    for context in contexts() {
        let bytes = noise(lengths.iter().max().unwrap() + 4096);
        let block = upload(&context, &bytes);
        // Each at another offset, so that a span that reads from another is found out.
        let spans: Vec<(usize, usize)> =
            lengths.iter().enumerate().map(|(i, len)| (i * 16 % 4096, *len)).collect();
        let asked: Vec<(u64, usize)> =
            spans.iter().map(|&(offset, len)| (block.address() + offset as u64, len)).collect();
        let (hashes, key) = hash(&context, &asked);
        assert_eq!(hashes.len(), spans.len());
        for ((offset, len), found) in spans.into_iter().zip(hashes) {
            let bytes = &bytes[offset..offset + len];
            let expected = Hashed { id: ChunkId::of(bytes), sum: key.sum(bytes) };
            assert_eq!(found, expected, "{len} bytes on {}", context.device().name);
        }
    }
}

fn by_kernel(context: &Arc<Context>, spans: &[(u64, usize)]) -> (Vec<Hashed>, Arc<Key>) {
    let key = Arc::new(Key::random());
    (Kernel::prepare(context, &key).unwrap().hash(spans).unwrap(), key)
}

/// Lengths around the edges of blocks (64), leaves (1024), a thread's leaves (8192), and trees whose
/// levels are odd.
const LENGTHS: &[usize] = &[
    0, 1, 3, 4, 63, 64, 65, 127, 128, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 4096, 5000, 6144,
    7168, 8191, 8192, 8193, 9216, 10_240, 16_384, 16_385, 24_576, 24_577, 32_768, 40_961, 57_344,
    65_537,
];

#[test]
fn the_kernel_agrees_with_the_host_for_any_length() {
    check(by_kernel, LENGTHS);
}

#[test]
fn the_kernel_agrees_for_a_whole_chunk() {
    check(by_kernel, &[MAX_CHUNK, MAX_CHUNK - 1, MAX_CHUNK - 1024]);
}

#[test]
fn the_hasher_agrees_with_the_host() {
    let hash = |context: &Arc<Context>, spans: &[(u64, usize)]| {
        let mut hasher = Hasher::prepare(context).unwrap();
        (hasher.hash(spans).unwrap(), hasher.key().clone())
    };
    check(hash, LENGTHS);
    check(hash, &[MAX_CHUNK; 40]);
}

#[test]
fn what_changes_on_the_device_changes_the_hash() {
    for context in contexts() {
        let lane = Lane::prepare(context.driver(), context.device(), 1).unwrap();
        let mut hasher = Hasher::prepare(lane.context()).unwrap();
        let block = upload(lane.context(), &noise(MAX_CHUNK));
        let span = [(block.address(), MAX_CHUNK)];
        let before = hasher.hash(&span).unwrap();
        let stream = Stream::create(lane.context()).unwrap();
        stream.fill(block.address() + 1_234_567, 0x5a, 1).unwrap();
        stream.synchronize().unwrap();
        assert_ne!(hasher.hash(&span).unwrap(), before);
    }
}
