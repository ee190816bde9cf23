//! Tests of warm images, which need root: the kernel gives file systems without a name to root alone.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags};

use super::copy::Place;
use super::*;
use crate::base::phase::Phase;
use crate::base::progress::Quiet;
use crate::cuda::SharedBlock;
use crate::cuda::tests::opened_soft_driver;
use crate::image::tests::make;
use crate::store::MAX_CHUNK;
use crate::store::tests::{noise, text};

/// A chunk that is there twice, two constant ones, and a short one.
fn memory() -> Vec<u8> {
    let twice = noise(1, MAX_CHUNK);
    [&twice[..], &vec![0; MAX_CHUNK], &twice, &vec![7; MAX_CHUNK], &text(2, 12345)].concat()
}

fn image() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, &memory(), &noise(3, 3 * MAX_CHUNK));
    (dir, path)
}

fn copy_of(image: &ImageReader) -> (OwnedFd, u64) {
    let making = Making::begin(image, WarmPlan::of(image)).unwrap();
    making.load_chunks(&Stop::new(Arc::default()), &Quiet).unwrap();
    making.extract_files().unwrap();
    making.finish().unwrap()
}

fn open(copy: OwnedFd, image: &ImageReader) -> Result<WarmCopy, Error> {
    WarmCopy::open(copy, &image.id(), image.manifest())
}

#[test]
fn a_copy_has_the_bytes_of_the_image() {
    let (_dir, path) = image();
    let image = ImageReader::open(&path).unwrap();
    let plan = WarmPlan::of(&image);
    let files = 3 * MAX_CHUNK as u64 + 2 * 4096;
    assert_eq!(plan.memory, 2 * MAX_CHUNK as u64 + files);
    assert_eq!(plan.chunk_bytes, (MAX_CHUNK + 12345) as u64);
    let limit = plan.memory;
    let (root, bytes) = copy_of(&image);
    // The table comes on top.
    assert!(bytes <= limit + 4096, "{bytes} {limit}");

    let copy = open(root, &image).unwrap();
    let block = &image.manifest().processes[0].cuda.as_ref().unwrap().blocks[0];
    let memory = memory();
    let mut kinds = Vec::new();
    for (id, bytes) in block.chunks.iter().zip(memory.chunks(MAX_CHUNK)) {
        let mut out = vec![1; bytes.len()];
        let filled = copy.get(id, &mut out).unwrap();
        if let Filled::Constant(byte) = filled {
            out.fill(byte);
        }
        assert!(out == bytes, "{filled:?}");
        kinds.push(filled);
    }
    let expected =
        [Filled::Bytes, Filled::Constant(0), Filled::Bytes, Filled::Constant(7), Filled::Bytes];
    assert_eq!(kinds, expected);
    assert!(copy.get(&ChunkId([9; 32]), &mut [0; 16]).is_err());

    let criu = copy.criu_files().unwrap();
    let read = |name: &str| {
        let file = rustix::fs::openat(&criu, name, OFlags::RDONLY, Mode::empty()).unwrap();
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut std::fs::File::from(file), &mut bytes).unwrap();
        bytes
    };
    assert_eq!(read("core-1.img"), b"registers");
    assert_eq!(read("fs.img"), b"");
    assert!(read("pages-1.img") == noise(3, 3 * MAX_CHUNK));
    assert_eq!(copy.carried(0).unwrap(), b"shim");
}

#[test]
fn nobody_can_write_a_copy() {
    let (_dir, path) = image();
    let image = ImageReader::open(&path).unwrap();
    let (root, _) = copy_of(&image);
    let open = |name: &str, flags| rustix::fs::openat(&root, name, flags, Mode::RWXU);
    for (name, flags) in [
        ("chunks", OFlags::RDWR),
        ("criu/pages-1.img", OFlags::WRONLY),
        ("criu/new", OFlags::CREATE | OFlags::WRONLY),
    ] {
        assert_eq!(open(name, flags).unwrap_err(), rustix::io::Errno::ROFS, "{name}");
    }
}

#[test]
fn a_copy_of_something_else_is_refused() {
    let (_dir, path) = image();
    let image = ImageReader::open(&path).unwrap();
    let (root, _) = copy_of(&image);
    let again = || root.as_fd().try_clone_to_owned().unwrap();
    assert!(WarmCopy::open(again(), &[5; 32], image.manifest()).is_err());
    // A chunk that it does not have.
    let mut other = image.manifest().clone();
    other.processes[0].cuda.as_mut().unwrap().blocks[0].chunks[4] = ChunkId([9; 32]);
    assert!(WarmCopy::open(again(), &image.id(), &other).is_err());
    // What can still be written is not mapped.
    let open = crate::base::scratch::lasting_file_system().unwrap();
    assert!(WarmCopy::open(open, &image.id(), image.manifest()).is_err());
    WarmCopy::open(root, &image.id(), image.manifest()).unwrap();
}

#[test]
fn a_limit_is_kept_before_anything_is_read() {
    let (_dir, path) = image();
    let options = |memory_limit| Options {
        trust: crate::image::trust::Trust::default(),
        image: path.clone(),
        memory_limit: Some(memory_limit),
        pin: false,
        foreground: true,
        stop: Arc::default(),
    };
    let needed = WarmPlan::of(&ImageReader::open(&path).unwrap()).memory;
    let failure = warm(&options(needed - 1), &Quiet).err().unwrap();
    assert!(matches!(*failure.error, Error::NoMemory { asked: true, .. }), "{failure}");
    assert_eq!((failure.phase, failure.left), (Phase::Preflight, Left::Untouched));
    // The limit is no part of what is kept.
    let (report, holder) = warm(&options(needed), &Quiet).unwrap();
    assert!(holder.is_some() && !report.already);
    assert!(available_memory().unwrap() > 0);
}

#[test]
fn a_name_is_had_once_and_gives_no_connection_before_it_is_held() {
    let id = crate::base::format::hex(blake3::hash(&std::process::id().to_le_bytes()).as_bytes());
    let name = take_name(&id).unwrap().unwrap();
    assert!(take_name(&id).unwrap().is_none());
    assert!(Client::connect(&id).unwrap().is_none());
    assert!(holder::names().unwrap().contains(&id));
    drop(name);
    assert!(!holder::names().unwrap().contains(&id));
    assert!(take_name(&id).unwrap().is_some());
}

/// An image whose block is on a device of the software driver, and the loader of a copy of it. `spoil` may change
/// what the copy has.
fn loader_of(
    memory: &[u8],
    spoil: impl FnOnce(&mut WarmPlan),
) -> (tempfile::TempDir, loader::Loader) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, memory, &noise(3, MAX_CHUNK));
    let image = ImageReader::open(&path).unwrap();
    let mut plan = WarmPlan::of(&image);
    spoil(&mut plan);
    let making = Making::begin(&image, plan).unwrap();
    making.load_chunks(&Stop::new(Arc::default()), &Quiet).unwrap();
    making.extract_files().unwrap();
    let copy = open(making.finish().unwrap().0, &image).unwrap();
    let driver = opened_soft_driver();
    let mut manifest = image.manifest().clone();
    let block = &mut manifest.processes[0].cuda.as_mut().unwrap().blocks[0];
    block.device = driver.devices().unwrap()[0].uuid;
    let loader = loader::Loader::with(&driver, manifest, copy).unwrap();
    (dir, loader)
}

/// Chunks in and out of order, one twice, and constant ones.
fn whole_chunks() -> Vec<u8> {
    let twice = noise(1, MAX_CHUNK);
    let (zeros, sevens) = (vec![0; 2 * MAX_CHUNK], vec![7; MAX_CHUNK]);
    [&twice[..], &noise(2, MAX_CHUNK), &zeros, &twice, &sevens, &noise(4, MAX_CHUNK)].concat()
}

#[test]
fn a_loader_fills_new_device_memory() {
    let memory = whole_chunks();
    let (_dir, loader) = loader_of(&memory, |_| ());
    let told = parking_lot::Mutex::new((0, 0));
    let tell = |word| {
        let mut told = told.lock();
        match word {
            loader::Told::Room => told.0 += 1,
            loader::Told::Loaded(bytes) => told.1 += bytes,
        }
        Ok(())
    };
    // The blocks can be loaded any number of times, each time into memory of its own.
    let (fds, is_short) = loader.load(&[0, 0], &tell).unwrap();
    assert!(!is_short);
    assert_eq!(*told.lock(), (1, 2 * memory.len() as u64));
    let driver = opened_soft_driver();
    let device = driver.devices().unwrap().remove(0);
    let context = crate::cuda::Context::create(&driver, &device).unwrap();
    for fd in &fds {
        let block = SharedBlock::import(&context, fd.as_fd(), memory.len() as u64).unwrap();
        // SAFETY: device memory of the software driver is memory of this process, of that length.
        let bytes = unsafe {
            std::slice::from_raw_parts(block.address() as usize as *const u8, memory.len())
        };
        assert!(bytes == memory);
    }
    assert!(loader.load(&[1], &tell).is_err(), "there is one block");
    let gone = |_: loader::Told| Err(std::io::ErrorKind::BrokenPipe.into());
    assert!(matches!(loader.load(&[0], &gone), Err(Error::Io { .. })), "nobody wants it");
}

#[test]
fn a_loader_gives_no_other_bytes_than_the_image_has() {
    let swap = |plan: &mut WarmPlan| {
        let data = |(_, place): &(ChunkId, Place)| matches!(place, Place::At(_));
        let places = &mut plan.table.places;
        let [one, other] = [places.iter().position(data), places.iter().rposition(data)];
        let (one, other) = (one.unwrap(), other.unwrap());
        (places[one].1, places[other].1) = (places[other].1, places[one].1);
    };
    let (_dir, loader) = loader_of(&whole_chunks(), swap);
    let loaded = loader.load(&[0], &|_: loader::Told| Ok(()));
    assert!(matches!(loaded, Err(Error::WrongCopy { .. })));
}

/// What a holder says about itself has had fewer words, and may have more.
#[test]
fn a_holder_of_another_version_is_listed_and_dropped() {
    use gpucr_wire::{Stream, wire_enum};

    wire_enum! {
        #[derive(Debug, PartialEq)]
        enum ToOlder {
            0 => Describe {},
            2 => Drop {},
        }
    }
    wire_enum! {
        #[derive(Debug, PartialEq)]
        enum FromOlder {
            0 => Holds { image: String, bytes: u64 },
            3 => Dropped {},
        }
    }
    impl Stream for ToOlder {}
    impl Stream for FromOlder {}

    let id = format!("{:064x}", std::process::id());
    let name = take_name(&id).unwrap().expect("nobody has it");
    name.listen().unwrap();
    let older = std::thread::spawn(move || {
        loop {
            let mut client = name.accept().unwrap();
            match client.receive().unwrap() {
                ToOlder::Describe {} => {
                    let holds = FromOlder::Holds { image: "/image".into(), bytes: 7 };
                    client.send(&holds).unwrap();
                }
                ToOlder::Drop {} => return client.send(&FromOlder::Dropped {}).unwrap(),
            }
        }
    });
    let listing = list().unwrap();
    let found = listing.kept.iter().find(|kept| kept.id == id).expect("it is listed");
    assert!(found.other_version && found.pid == std::process::id());
    assert!(!listing.silent.iter().any(|(pid, _)| *pid == std::process::id()));
    let dropped = drop_image(std::path::Path::new(&id)).unwrap();
    assert_eq!(dropped.id, id);
    older.join().unwrap();
    assert!(matches!(drop_image(std::path::Path::new(&id)), Err(Error::NotWarm { .. })));
}
