//! Stream-ordered memory: the driver's rules hold, and it is bulk memory.

mod support;

use std::ffi::c_void;
use std::io::BufRead;

use support::{ENV_PROGRAM, Library, Program, is_soft, say};

const MIB: u64 = 1 << 20;
const INVALID_VALUE: u32 = 1;
const OUT_OF_MEMORY: u32 = 2;
/// `CU_MEMPOOL_ATTR_*`
const THRESHOLD: u64 = 4;
const RESERVED: u64 = 5;
const USED: u64 = 7;
const USED_HIGH: u64 = 8;
/// `CU_POINTER_ATTRIBUTE_*`
const IS_LEGACY_IPC_CAPABLE: u64 = 10;
const RANGE_START: u64 = 11;
const RANGE_SIZE: u64 = 12;
const POOL: u64 = 17;

/// Not a test: the program that the other one starts.
#[test]
fn program() {
    if std::env::var_os(ENV_PROGRAM).is_some() {
        run();
    }
}

struct Cuda(Library);

impl Cuda {
    fn ask(&self, name: &str, arguments: &[u64]) -> u64 {
        let mut value = 0_u64;
        let all = [&[&raw mut value as u64], arguments].concat();
        self.0.must(name, &all);
        value
    }

    fn attribute(&self, pool: u64, attribute: u64) -> u64 {
        let mut value = 0_u64;
        self.0.must("cuMemPoolGetAttribute", &[pool, attribute, &raw mut value as u64]);
        value
    }

    fn set(&self, pool: u64, attribute: u64, value: u64) {
        self.0.must("cuMemPoolSetAttribute", &[pool, attribute, &raw const value as u64]);
    }

    fn allocate(&self, size: u64, stream: u64) -> u64 {
        self.ask("cuMemAllocAsync", &[size, stream])
    }

    fn free(&self, address: u64, stream: u64) {
        self.0.must("cuMemFreeAsync", &[address, stream]);
    }

    fn synchronize(&self, stream: u64) {
        self.0.must("cuStreamSynchronize", &[stream]);
    }

    #[track_caller]
    fn holds(&self, address: u64, word: u32, count: usize) {
        let mut words = vec![0_u32; count];
        self.0.must("cuMemcpyDtoH_v2", &[words.as_mut_ptr() as u64, address, count as u64 * 4]);
        assert!(words.iter().all(|found| *found == word), "{:x?} and so on", &words[..8]);
    }
}

/// A word of host memory that a stream can wait for.
struct Word {
    host: *mut u32,
    address: u64,
}

impl Word {
    fn new(cuda: &Cuda) -> Self {
        let (mut host, mut address) = (std::ptr::null_mut::<c_void>(), 0u64);
        cuda.0.must("cuMemHostAlloc", &[&raw mut host as u64, 4096, 2]);
        cuda.0.must("cuMemHostGetDevicePointer_v2", &[&raw mut address as u64, host as u64, 0]);
        Self { host: host.cast(), address }
    }

    fn set(&self, value: u32) {
        // SAFETY: mapped and aligned; volatile, as the device looks at it.
        unsafe { self.host.write_volatile(value) };
    }
}

fn run() {
    let cuda = Cuda(Library::open("libcuda.so.1"));
    cuda.0.must("cuInit", &[0]);
    let context = cuda.ask("cuDevicePrimaryCtxRetain", &[0]);
    cuda.0.must("cuCtxSetCurrent", &[context]);
    let (one, two) = (cuda.ask("cuStreamCreate", &[1]), cuda.ask("cuStreamCreate", &[1]));
    let pool = cuda.ask("cuDeviceGetDefaultMemPool", &[0]);
    cuda.set(pool, THRESHOLD, u64::MAX);
    let word = Word::new(&cuda);

    order_and_reuse(&cuda, &word, pool, [one, two]);
    what_is_told(&cuda, pool, one);
    own_pools(&cuda, one);
    captures(&cuda, one);
    default_streams(&cuda);

    // What stays: seen by a checkpointer, and still there after that.
    let kept = cuda.allocate(3 * MIB, two);
    cuda.0.must("cuMemsetD32Async", &[kept, 0x1234, 3 * MIB / 4, two]);
    let freed = cuda.allocate(5 * MIB, two);
    cuda.free(freed, two);
    cuda.synchronize(two);
    say("ready");
    for line in std::io::stdin().lock().lines() {
        match line.expect("a line").as_str() {
            "check" => {
                cuda.holds(kept, 0x1234, 3 << 18);
                assert_eq!(cuda.allocate(5 * MIB, two), freed);
                cuda.free(freed, two);
                cuda.free(kept, two);
                cuda.set(pool, THRESHOLD, 0);
                cuda.synchronize(two);
                assert_eq!(cuda.attribute(pool, RESERVED), 0);
                say("as it should be");
            }
            other => panic!("what is {other}?"),
        }
    }
    std::process::exit(0);
}

fn order_and_reuse(cuda: &Cuda, word: &Word, pool: u64, [one, two]: [u64; 2]) {
    for size in [3 * MIB, 1000] {
        word.set(0);
        let first = cuda.allocate(size, one);
        cuda.0.must("cuStreamWaitValue32_v2", &[one, word.address, 1, 1]);
        cuda.0.must("cuMemsetD32Async", &[first, 7, size / 4, one]);
        cuda.free(first, one);
        assert_eq!(cuda.0.call("cuMemFreeAsync", &[first, one]), INVALID_VALUE, "freed twice");
        let other = cuda.allocate(size, two);
        assert_ne!(other, first, "the first stream is about to fill it");
        assert_eq!(cuda.allocate(size, one), first, "the first stream may have it at once");
        cuda.0.must("cuMemsetD32Async", &[first, 8, size / 4, one]);
        word.set(1);
        cuda.synchronize(one);
        cuda.holds(first, 8, size as usize / 4);
        cuda.free(first, one);
        cuda.synchronize(one);
        assert_eq!(cuda.allocate(size, two), first, "all is over that used it");
        cuda.free(first, two);
        cuda.free(other, two);
        cuda.synchronize(two);
        assert!(cuda.attribute(pool, RESERVED) >= 2 * size);
        cuda.0.must("cuMemPoolTrimTo", &[pool, 0]);
        // NVIDIA's driver (580) still counts one of them as used.
        if is_soft() {
            assert_eq!(cuda.attribute(pool, USED), 0);
            assert_eq!(cuda.attribute(pool, RESERVED), 0);
        }
        // The other way of freeing waits.
        let memory = cuda.allocate(size, one);
        cuda.0.must("cuMemFree_v2", &[memory]);
        assert_eq!(cuda.0.call("cuMemFreeAsync", &[memory, one]), INVALID_VALUE);
    }
    cuda.set(pool, USED_HIGH, 0);
    assert_eq!(cuda.attribute(pool, USED_HIGH), 0);
}

fn what_is_told(cuda: &Cuda, pool: u64, stream: u64) {
    let memory = cuda.allocate(3 * MIB + 5, stream);
    let told = |attribute| cuda.ask("cuPointerGetAttribute", &[attribute, memory + 9]);
    assert_eq!(told(POOL), pool);
    assert_eq!((told(RANGE_START), told(RANGE_SIZE)), (memory, 3 * MIB + 5));
    assert_eq!(told(IS_LEGACY_IPC_CAPABLE) as u32, 0);
    let mut handle = [0_u8; 64];
    let code = cuda.0.call("cuIpcGetMemHandle", &[handle.as_mut_ptr() as u64, memory]);
    assert_eq!(code, INVALID_VALUE);
    cuda.free(memory, stream);
    let plain = cuda.ask("cuMemAlloc_v2", &[3 * MIB]);
    assert_eq!(cuda.ask("cuPointerGetAttribute", &[POOL, plain]), 0);
    // Plain memory may be freed in a stream too.
    cuda.free(plain, stream);
    assert_eq!(cuda.allocate(0, stream), 0);
    cuda.free(0, stream);
    assert_eq!(cuda.0.call("cuMemAllocAsync", &[0, MIB, stream]), INVALID_VALUE);
}

/// `CUmemPoolProps` of plain memory of device 0.
fn properties(most: u64) -> [u64; 11] {
    let mut words = [0; 11];
    // Pinned memory, which nobody else can be given, on the device 0.
    (words[0], words[1], words[3]) = (1, 1, most);
    words
}

fn own_pools(cuda: &Cuda, stream: u64) {
    let wanted = properties(4 * MIB);
    let pool = cuda.ask("cuMemPoolCreate", &[wanted.as_ptr() as u64]);
    let from = |size| cuda.ask("cuMemAllocFromPoolAsync", &[size, pool, stream]);
    let first = from(2 * MIB);
    let mut out = 0_u64;
    let over = [&raw mut out as u64, 3 * MIB, pool, stream];
    assert_eq!(cuda.0.call("cuMemAllocFromPoolAsync", &over), OUT_OF_MEMORY);
    cuda.0.must("cuMemsetD32Async", &[first, 3, MIB / 2, stream]);
    cuda.synchronize(stream);
    // What it has given stays when it is destroyed, and goes when it is freed.
    cuda.0.must("cuMemPoolDestroy", &[pool]);
    cuda.holds(first, 3, 1 << 19);
    cuda.free(first, stream);
    cuda.synchronize(stream);
    // The device's pool may be another one.
    let pool = cuda.ask("cuMemPoolCreate", &[properties(0).as_ptr() as u64]);
    cuda.0.must("cuDeviceSetMemPool", &[0, pool]);
    let memory = cuda.allocate(MIB, stream);
    assert_eq!(cuda.ask("cuPointerGetAttribute", &[POOL, memory]), pool);
    assert!(cuda.attribute(pool, USED) >= MIB);
    cuda.free(memory, stream);
    // It keeps nothing by itself.
    cuda.synchronize(stream);
    assert_eq!(cuda.attribute(pool, RESERVED), 0);
    cuda.0.must("cuMemPoolDestroy", &[pool]);
}

/// In a capture an allocation becomes a part of the graph, and others go on beside it.
fn captures(cuda: &Cuda, stream: u64) {
    let outside = cuda.allocate(MIB, stream);
    let beside = cuda.ask("cuStreamCreate", &[1]);
    cuda.0.must("cuStreamBeginCapture_v2", &[stream, 0]);
    let inside = cuda.allocate(MIB, stream);
    cuda.free(inside, stream);
    assert_eq!(cuda.0.call("cuMemFreeAsync", &[outside, stream]), INVALID_VALUE);
    let other = cuda.allocate(3 * MIB, beside);
    cuda.free(other, beside);
    let graph = cuda.ask_last("cuStreamEndCapture", stream);
    cuda.0.must("cuGraphDestroy", &[graph]);
    cuda.free(outside, stream);
    cuda.0.must("cuStreamDestroy_v2", &[beside]);
}

impl Cuda {
    /// For a function that writes what it gives behind its argument.
    fn ask_last(&self, name: &str, argument: u64) -> u64 {
        let mut value = 0_u64;
        self.0.must(name, &[argument, &raw mut value as u64]);
        value
    }
}

fn default_streams(cuda: &Cuda) {
    for names in
        [["cuMemAllocAsync", "cuMemFreeAsync"], ["cuMemAllocAsync_ptsz", "cuMemFreeAsync_ptsz"]]
    {
        let memory = cuda.ask(names[0], &[MIB, 0]);
        cuda.0.must(names[1], &[memory, 0]);
        assert_eq!(cuda.ask(names[0], &[MIB, 0]), memory);
        cuda.0.must(names[1], &[memory, 0]);
    }
}

#[test]
fn pools_keep_the_drivers_rules_and_are_bulk_memory() {
    let mut program = Program::start();
    let mut agent = program.agent().0;
    let counts = agent.counts();
    assert_eq!(counts.pool_bytes, 0, "the driver has nothing to carry");
    assert!(counts.bulk_bytes >= 10 * MIB, "{counts:?}");
    let agent = agent.cycle(&program);
    assert_eq!(program.ask("check"), "as it should be");
    drop(agent);
}

/// What the program expects is what it gets without the shim.
#[test]
fn the_drivers_own_pools_do_the_same() {
    assert_eq!(Program::start_natively(&[]).ask("check"), "as it should be");
}
