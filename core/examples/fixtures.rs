//! Makes `tests/fixtures/image-v1` and `image-v2`, images with everything in them that an image of that version can
//! have, and the seeds of `fuzz/corpus/`. Run by `cargo xtask fixtures`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpucr_core::image::*;
use gpucr_core::stop::Stop;
use gpucr_core::store::{ChunkId, Compression, MAX_CHUNK};
use gpucr_core::timeline::{Counter, Timeline, Track};
use gpucr_core::{Quiet, transfer};
use gpucr_wire::access::{Allocation, KernelUse, Operation, OperationUse, Param, SlotUse, Touched};
use gpucr_wire::{Accesses, ProcessSharing, Reply, SHARING_VERSION, Sharing, Stream};

/// Bytes before the body of manifest and index.
const FRAME_HEADER: usize = 56;

fn main() {
    let root = PathBuf::from(std::env::args_os().nth(1).expect("the root of the repository"));
    let fixtures = root.join("tests/fixtures");
    fs::create_dir_all(&fixtures).unwrap();
    let (image, newer) = (fixtures.join("image-v1"), fixtures.join("image-v2"));
    for (image, with_sections) in [(&image, false), (&newer, true)] {
        let _ = fs::remove_dir_all(image);
        make(image, true, with_sections);
    }

    // Smaller, so that truncations at every length and many changes of it take little time.
    let scratch = tempfile::tempdir().unwrap();
    let small = scratch.path().join("small");
    make(&small, false, false);
    let sectioned = scratch.path().join("sectioned");
    make(&sectioned, false, true);
    let corpus = root.join("fuzz/corpus");
    for target in gpucr_core::hostile::TARGETS {
        fs::create_dir_all(corpus.join(target)).unwrap();
    }
    for (name, from) in [("full", &image), ("small", &small), ("sections", &sectioned)] {
        for target in ["manifest", "index"] {
            let body = fs::read(from.join(target)).unwrap().split_off(FRAME_HEADER);
            fs::write(corpus.join(target).join(name), body).unwrap();
        }
    }
    let mut tar = Vec::new();
    let stop = Stop::new(Arc::default());
    transfer::export(&small, &mut tar, &stop, &Quiet).unwrap();
    fs::write(corpus.join("tar/small"), tar).unwrap();
    chunk_seeds(&image, &corpus.join("chunk"));
    let parent = [&[1][..], &[7; 32], b"\x09\0../parent", b"\x0d\0/dumps/parent"].concat();
    fs::write(corpus.join("base/parent"), parent).unwrap();
    fs::write(corpus.join("base/store"), [2]).unwrap();
    image_seeds(&small, &corpus.join("image"));
    reply_seeds(&corpus.join("reply"));
    criu_seeds(&corpus.join("criu"));
    timeline_seeds(&corpus.join("timeline"));
    code_seeds(&root, &corpus.join("code"));
}

/// One answer of each kind that has more than a number in it.
fn reply_seeds(corpus: &Path) {
    let block = |id| gpucr_wire::Block {
        id,
        device: [7; 16],
        size: 4 << 20,
        kind: gpucr_wire::BlockKind::Heap {},
        address: id << 21,
        allocations: 1,
    };
    let blocks = vec![block(1), block(2)];
    let devices = vec![[7; 16]];
    let counts = gpucr_wire::Counts { devices, bulk_bytes: 8 << 20, ..Default::default() };
    let touched = Touched { allocation: 3, low: 64, high: 128, launches: 2 };
    let slot = SlotUse { touched: vec![touched], ..SlotUse::default() };
    let kernel = KernelUse {
        id: 1,
        name: "_Z4scalePff".into(),
        known: true,
        params: vec![Param { offset: 0, size: 8 }, Param { offset: 8, size: 4 }],
        launches: 2,
        slots: vec![slot],
        ..KernelUse::default()
    };
    let operation = OperationUse {
        operation: Operation::Copy {},
        write: true,
        allocation: 3,
        count: 1,
        bytes: 64,
        low: 64,
        end: 128,
    };
    let accesses = Accesses {
        kernels: vec![kernel],
        operations: vec![operation],
        allocations: vec![Allocation { id: 3, address: 64, size: 4096 }],
        ..Accesses::default()
    };
    let failed = Reply::Failed { code: 2, message: "out of memory".into() };
    for (name, reply) in [
        ("blocks", Reply::Blocks { blocks }),
        ("counts", Reply::Counts { counts }),
        ("accesses", Reply::Accesses { accesses }),
        ("failed", failed),
    ] {
        fs::write(corpus.join(name), reply.to_bytes()).unwrap();
    }
}

/// Messages as CRIU's images/rpc.proto lays them out, and a log.
fn criu_seeds(corpus: &Path) {
    let field = |number: u8, body: &[u8]| [&[number << 3 | 2, body.len() as u8], body].concat();
    let notify = field(5, &[&field(1, b"post-dump")[..], &[16, 42]].concat());
    let notify = [&[8, 6, 16, 1][..], &notify].concat();
    let version = [&[8, 10, 16, 1][..], &field(10, &[8, 4, 16, 1, 32, 1])].concat();
    let failed = [&[8, 1, 16, 0, 56, 5][..], &field(9, b"it cannot be done")].concat();
    let log = "(00.000001) Warn  (criu/a.c:1): b\n(00.000002)  7: Error (criu/a.c:2): File exists\n\
               (00.000003) Error (criu/a.c:3): Can't open file c: No space left on device\n";
    for (name, body) in [
        ("notify", &notify[..]),
        ("version", &version),
        ("failed", &failed),
        ("log", log.as_bytes()),
    ] {
        fs::write(corpus.join(name), body).unwrap();
    }
}

/// What a dump writes with `--timeline`.
fn timeline_seeds(corpus: &Path) {
    let timeline = Timeline::recording();
    for (track, name) in [(Track::Phases, "preflight"), (Track::Phases, "gate")] {
        timeline.begin(track, || name).set_bytes(4096);
    }
    timeline.add(Counter::Copied, 1 << 20);
    fs::write(corpus.join("dump"), timeline.trace().unwrap().write()).unwrap();
}

/// PTX, machine code, and both in a container.
fn code_seeds(root: &Path, corpus: &Path) {
    for (name, from) in [
        ("sm_75", "core/src/kernels/testdata/layout.sm_75.cubin"),
        ("container", "fuzz/corpus/fatbin/both"),
        ("barriers", "fuzz/corpus/ptx/barriers"),
        ("bmsk-clamp", "fuzz/corpus/ptx/bmsk-clamp"),
    ] {
        fs::copy(root.join(from), corpus.join(name)).unwrap();
    }
}

/// An image as the target `image` reads it: alone, in a store, and without headers made for it.
fn image_seeds(image: &Path, corpus: &Path) {
    let [manifest, index] = ["manifest", "index"].map(|name| fs::read(image.join(name)).unwrap());
    let packs = fs::read_dir(image.join("packs")).unwrap();
    let packs: Vec<Vec<u8>> = packs.map(|entry| fs::read(entry.unwrap().path()).unwrap()).collect();
    let body = |file: &[u8]| file[FRAME_HEADER..].to_vec();
    let seed = |flags: u8, files: [&[u8]; 3]| {
        let mut seed = vec![flags];
        files.iter().for_each(|f| seed.extend_from_slice(&(f.len() as u32).to_le_bytes()));
        files.iter().for_each(|f| seed.extend_from_slice(f));
        seed.extend(packs.concat());
        seed
    };
    fs::write(corpus.join("alone"), seed(3, [&body(&manifest), &body(&index), b""])).unwrap();
    fs::write(corpus.join("stored"), seed(7, [&body(&manifest), &body(&index), b"\x02"])).unwrap();
    fs::write(corpus.join("headers"), seed(0, [&manifest, &index, b""])).unwrap();
}

/// The smallest chunk of each encoding, as the target `chunk` reads it.
fn chunk_seeds(image: &Path, corpus: &Path) {
    let reader = ImageReader::open(image).unwrap();
    let mut entries: Vec<_> = reader.chunks().entries().iter().collect();
    entries.sort_by_key(|entry| (entry.stored_len, entry.id));
    let mut seen = Vec::new();
    for entry in entries {
        let name = format!("{:?}", entry.encoding).to_lowercase().replace(['(', ')', ' '], "-");
        let kind = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-').to_owned();
        if seen.contains(&kind) {
            continue;
        }
        seen.push(kind);
        let mut seed = entry.encoding.to_bytes().to_vec();
        seed.extend_from_slice(&entry.plain_len.to_le_bytes());
        let mut stored = vec![0; entry.stored_len as usize];
        reader.chunks().get_stored(&entry.id, &mut stored).unwrap();
        seed.extend_from_slice(&stored);
        fs::write(corpus.join(name.trim_end_matches('-')), seed).unwrap();
    }
    seen.sort();
    // Floats must be long enough to be split.
    assert_eq!(seen, ["constant", "planes-four", "planes-two", "raw", "zstd"]);
}

/// Makes an image; a `full` one has every kind of data.
fn make(path: &Path, full: bool, with_sections: bool) {
    let writer = ImageWriter::create(path, Compression::Level(1)).unwrap();
    let put = |bytes: &[u8]| -> Vec<ChunkId> {
        bytes.chunks(MAX_CHUNK).map(|piece| writer.chunks().put(piece).unwrap()).collect()
    };
    let block = |id: u64, device: u8, kind, address, bytes: &[u8]| Block {
        id,
        device: [device; 16],
        size: bytes.len() as u64,
        kind,
        address,
        allocations: id as u32 % 3,
        chunks: put(bytes),
    };
    let file = |name: &str, mode, bytes: &[u8]| writer.add_bytes(name, mode, bytes).unwrap();
    let mut blocks = vec![
        block(1, 1, BlockKind::Heap, 0x7f00_0000_0000, &noise(1, if full { 30_000 } else { 200 })),
        block(2, 1, BlockKind::Program, 0, &text(2, 3000)),
    ];
    let mut files = vec![
        file("core-4242.img", 0o600, &text(3, 500)),
        file("empty.img", 0o600, b""),
        file("pages-1.img", 0o644, &noise(4, if full { 50_000 } else { 100 })),
    ];
    if full {
        // Chunks that are equal, of one byte, one repeated byte, floats, and more than one to a block.
        blocks.push(block(3, 2, BlockKind::Heap, 0x7f10_0000_0000, &vec![0; 2 * MAX_CHUNK + 5]));
        blocks.push(block(4, 2, BlockKind::Heap, 0x7f20_0000_0000, &text(5, MAX_CHUNK + 1)));
        blocks.push(block(5, 2, BlockKind::Heap, 0x7f30_0000_0000, &text(5, MAX_CHUNK + 1)));
        blocks.push(block(6, 2, BlockKind::Heap, 0x7f40_0000_0000, &[0xff; 4096]));
        blocks.push(block(7, 2, BlockKind::Heap, 0x7f50_0000_0000, &bf16_weights(20_000)));
        blocks.push(block(8, 2, BlockKind::Heap, 0x7f60_0000_0000, &fp32_weights(9000)));
        files.push(file("pages-2.img", 0o600, &text(6, 300_000)));
    }
    let library = file("carried-0", 0o755, &text(7, 800));
    let carried = PathBuf::from("/var/lib/gpucr/shim/00/libcuda.so.1");
    let shim = Shim { path: carried.clone(), hash: [7; 32], file: library.clone() };
    let counts =
        Counts { allocations: 11, pool_bytes: 12, arrays: 13, pinned_bytes: 14, launches: 15 };
    let process = |pid, ppid, cuda: Option<CudaProcess>, stdio| Process {
        pid,
        ppid,
        command: vec!["train".into(), format!("--rank={pid}")],
        exe: "/usr/bin/train".into(),
        listeners: if cuda.is_some() { listeners(pid) } else { Vec::new() },
        cuda,
        stdio,
    };
    let root = process(
        4242,
        1,
        Some(CudaProcess { blocks, shim: Some(shim), counts }),
        [
            Stdio::DevNull,
            Stdio::File { path: "/home/user/train.log".into() },
            Stdio::Pipe { inode: 123_456 },
        ],
    );
    let terminal = Stdio::Terminal { path: "/dev/pts/3".into(), rdev: 34819, dev: 24 };
    let child = process(
        4243,
        4242,
        Some(CudaProcess { blocks: vec![], shim: None, counts: Counts::default() }),
        [terminal, Stdio::Closed, Stdio::Other { target: "socket:[99]".into() }],
    );
    let grandchild = process(4244, 4243, None, [Stdio::Closed, Stdio::Closed, Stdio::Closed]);
    let device = |number: u8| Device {
        uuid: [number; 16],
        name: format!("Device {number}"),
        total_memory: u64::from(number) << 34,
    };
    let bulk_bytes = root.cuda.iter().flat_map(|cuda| &cuda.blocks).map(|block| block.size).sum();
    let manifest = Manifest {
        created: 1_795_000_000,
        gpucr_version: "0.1.0".into(),
        hostname: "host".into(),
        kernel: "6.12.0".into(),
        protocol: Protocol::Stop,
        driver: Driver {
            path: "/usr/lib/libcuda.so.1".into(),
            version: 13000,
            kind: DriverKind::Nvidia,
            file_hash: [9; 32],
        },
        devices: vec![device(1), device(2)],
        processes: vec![root, child, grandchild],
        criu: CriuImage {
            version: "4.2.1".into(),
            files,
            options: vec!["--shell-job".into(), "--file-locks".into()],
        },
        carried: vec![CarriedFile { path: carried, mode: 0o755, file: library }],
        required: vec![
            RequiredFile { path: "/usr/bin/train".into(), size: 5, mapped: true, open: false },
            RequiredFile { path: "/home/user/x.log".into(), size: 0, mapped: false, open: true },
        ],
        bulk_bytes,
        phases: vec![
            Phase { name: "gate".into(), ms: 1.5 },
            Phase { name: "copy".into(), ms: 0.1 },
        ],
        stopped_ms: 12.25,
        sections: if with_sections { sections(&writer) } else { Vec::new() },
    };
    writer.commit(&manifest).unwrap();
}

/// A section of each kind that gpucr writes, and one that nobody knows.
fn sections(writer: &ImageWriter) -> Vec<Section> {
    let shared = ProcessSharing { pid: 4242, blocks: vec![1, 2], summaries: Vec::new() };
    let shared = Sharing { version: SHARING_VERSION, processes: vec![shared] };
    let contexts = vec![(4242_u32, vec![([1_u8; 16], 96_u64 << 20), ([2; 16], 2 << 20)])];
    let contexts = postcard::to_stdvec(&contexts).unwrap();
    let section = |kind: &str, data: Vec<u8>, chunks: Vec<FileChunk>| Section {
        kind: kind.into(),
        version: 1,
        needed: false,
        data,
        chunks,
    };
    let chunk = |bytes: &[u8]| FileChunk {
        id: writer.chunks().put(bytes).unwrap(),
        len: bytes.len() as u32,
    };
    vec![
        section("sharing", shared.to_bytes(), vec![]),
        section("contexts", contexts, vec![]),
        section("example", vec![1, 2, 3], vec![chunk(&noise(20, 1000)), chunk(&text(21, 5000))]),
    ]
}

/// Bytes that do not compress, different for each seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Bytes that compress well.
fn text(seed: u64, len: usize) -> Vec<u8> {
    let line = format!("line {seed} of a text that repeats itself; ");
    line.bytes().cycle().take(len).collect()
}

/// Numbers around zero as trained networks have them: the sum of four uniform ones.
fn weights(count: usize) -> impl Iterator<Item = f32> {
    let bytes = noise(8, count * 8);
    (0..count).map(move |i| {
        let uniform = |j: usize| {
            f32::from(u16::from_le_bytes([bytes[8 * i + 2 * j], bytes[8 * i + 2 * j + 1]]))
        };
        ((0..4).map(uniform).sum::<f32>() / 65536.0 - 2.0) * 0.02
    })
}

fn bf16_weights(count: usize) -> Vec<u8> {
    weights(count).flat_map(|weight| weight.to_le_bytes()[2..].to_vec()).collect()
}

fn fp32_weights(count: usize) -> Vec<u8> {
    weights(count).flat_map(|weight| weight.to_le_bytes()).collect()
}

/// What listens in a process that uses NVIDIA's driver under the shim.
fn listeners(pid: u32) -> Vec<Listener> {
    let listener = |name: &str, terminated, kind, inode| Listener {
        name: name.into(),
        terminated,
        kind,
        inode,
    };
    vec![
        listener("gpucr-agent", false, ListenerKind::Stream, pid + 1),
        listener("cuda-uvmfd", true, ListenerKind::SeqPacket, pid + 2),
    ]
}
