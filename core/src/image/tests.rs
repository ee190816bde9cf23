use std::collections::HashSet;
use std::fs::{self, File};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;
use crate::base::progress::Quiet;
use crate::image::verify::verify;
use crate::store::tests::{noise, text};
use crate::store::{ChunkId, Compression, MAX_CHUNK};

pub(crate) fn manifest() -> Manifest {
    Manifest {
        created: 1_790_000_000,
        gpucr_version: "0.1.0".into(),
        hostname: "host".into(),
        kernel: "6.18".into(),
        protocol: Protocol::Stop,
        driver: Driver {
            path: "/usr/lib/libcuda.so.1".into(),
            version: 13000,
            kind: DriverKind::Soft,
            file_hash: [3; 32],
        },
        devices: vec![Device { uuid: [1; 16], name: "soft".into(), total_memory: 1 << 30 }],
        processes: vec![Process {
            pid: 42,
            ppid: 1,
            command: vec!["train".into(), "--fast".into()],
            exe: "/usr/bin/train".into(),
            cuda: None,
            stdio: [Stdio::DevNull, Stdio::Pipe { inode: 77 }, Stdio::Closed],
            listeners: vec![Listener {
                name: "gpucr-agent".into(),
                terminated: false,
                kind: ListenerKind::Stream,
                inode: 4711,
            }],
        }],
        criu: CriuImage { version: "4.2.1".into(), files: vec![], options: vec![] },
        carried: vec![],
        required: vec![RequiredFile {
            path: "/usr/bin/train".into(),
            size: 5,
            mapped: true,
            open: false,
        }],
        bulk_bytes: 0,
        phases: vec![Phase { name: "gate".into(), ms: 1.5 }],
        stopped_ms: 12.25,
        sections: Vec::new(),
    }
}

pub(crate) fn block(chunks: Vec<ChunkId>, size: u64) -> CudaProcess {
    CudaProcess {
        blocks: vec![Block {
            id: 1,
            device: [1; 16],
            size,
            kind: BlockKind::Heap,
            address: 0x7000_0000,
            allocations: 3,
            chunks,
        }],
        shim: None,
        counts: Counts::default(),
    }
}

/// An image with a block of `memory`, and a small, an empty and a big file of CRIU's.
pub(crate) fn make(path: &Path, memory: &[u8], big: &[u8]) -> (Committed, Manifest) {
    let writer = ImageWriter::create(path, Compression::Level(1)).unwrap();
    let mut manifest = manifest();
    let chunks = memory.chunks(MAX_CHUNK).map(|c| writer.chunks().put(c).unwrap()).collect();
    manifest.processes[0].cuda = Some(block(chunks, memory.len() as u64));
    let staging = writer.staging_dir();
    fs::write(staging.join("core-1.img"), b"registers").unwrap();
    fs::write(staging.join("fs.img"), b"").unwrap();
    fs::write(staging.join("pages-1.img"), big).unwrap();
    fs::write(staging.join("dump.log"), b"noise").unwrap();
    manifest.criu.files = writer.add_staged(|name| name.ends_with(".img"), |_| &[]).unwrap();
    let file = writer.add_bytes("libcuda.so.1", 0o755, b"shim").unwrap();
    manifest.carried = vec![CarriedFile { path: "/opt/shim".into(), mode: 0o755, file }];
    (writer.commit(&manifest).unwrap(), manifest)
}

pub(crate) fn tree(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(tree(&path));
        }
        found.push(path);
    }
    found.sort();
    found
}

#[test]
fn round_trip() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let memory = [noise(1, MAX_CHUNK), vec![0; MAX_CHUNK], text(2, 12345)].concat();
    let big = [text(3, MAX_CHUNK), vec![0; 3 * MAX_CHUNK], noise(4, 777)].concat();
    let (committed, written) = make(&path, &memory, &big);

    let image = ImageReader::open(&path).unwrap();
    assert_eq!(*image.manifest(), written);
    assert_eq!(image.id(), committed.id);
    assert_eq!(image.id(), *blake3::hash(&fs::read(path.join("manifest")).unwrap()).as_bytes());
    let on_disk =
        tree(&path).into_iter().filter(|p| p.is_file()).map(|p| p.metadata().unwrap().len());
    assert_eq!(committed.stored_bytes, on_disk.sum::<u64>());
    let block = &written.processes[0].cuda.as_ref().unwrap().blocks[0];
    let mut read = vec![0; memory.len()];
    for (id, out) in block.chunks.iter().zip(read.chunks_mut(MAX_CHUNK)) {
        image.chunks().get(id, out).unwrap();
    }
    assert!(read == memory);

    let out = tempfile::tempdir().unwrap();
    let fd = File::open(out.path()).unwrap();
    for file in &written.criu.files {
        image.extract_file(file, fd.as_fd()).unwrap();
        // Never over a file that is there.
        assert!(image.extract_file(file, fd.as_fd()).is_err());
    }
    let names: Vec<_> = written.criu.files.iter().map(|f| f.name.as_str()).collect();
    assert_eq!(names, ["core-1.img", "fs.img", "pages-1.img"]);
    assert_eq!(fs::read(out.path().join("core-1.img")).unwrap(), b"registers");
    assert_eq!(fs::read(out.path().join("fs.img")).unwrap(), b"");
    assert!(fs::read(out.path().join("pages-1.img")).unwrap() == big);
    assert_eq!(image.read_file(&written.carried[0].file).unwrap(), b"shim");
    image.extract_file(&written.carried[0].file, fd.as_fd()).unwrap();
    let mode = out.path().join("libcuda.so.1").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o755);

    // Only the owner gets at it, and nothing is beside it.
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
    for file in tree(&path) {
        assert_eq!(file.metadata().unwrap().permissions().mode() & 0o077, 0, "{file:?}");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Reads everything as a restore does.
fn read_all(path: &Path) -> Result<(), ImageError> {
    let image = ImageReader::open(path)?;
    let out = tempfile::tempdir().unwrap();
    let fd = File::open(out.path()).unwrap();
    for part in image.manifest().parts() {
        if let Part::Block { .. } = part {
            for piece in part.pieces() {
                image.chunks().get(&piece.id, &mut vec![0; piece.len])?;
            }
        } else if let Some(file) = part.file() {
            image.extract_file(file, fd.as_fd())?;
        }
    }
    Ok(())
}

#[test]
fn every_flipped_bit_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, &text(1, 5000), &noise(2, 300));
    let mut flips = 0;
    for file in tree(&path).into_iter().filter(|p| p.is_file()) {
        let handle = File::options().write(true).open(&file).unwrap();
        for (at, byte) in fs::read(&file).unwrap().into_iter().enumerate() {
            for bit in 0..8 {
                handle.write_all_at(&[byte ^ 1 << bit], at as u64).unwrap();
                let place = || format!("bit {bit} of byte {at} of {}", file.display());
                assert!(read_all(&path).is_err(), "{} goes unnoticed", place());
                let found = verify(&path, &Quiet).is_ok_and(|report| report.whole);
                assert!(!found, "{} is not found by verify", place());
                flips += 1;
            }
            handle.write_all_at(&[byte], at as u64).unwrap();
        }
    }
    assert!(flips > 8 * 1000);
    read_all(&path).unwrap();
    assert!(verify(&path, &Quiet).unwrap().whole);
}

#[test]
fn every_truncation_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, &text(1, 5000), &noise(2, 300));
    for file in tree(&path).into_iter().filter(|p| p.is_file()) {
        let whole = fs::read(&file).unwrap();
        for len in [0, 1, 8, 55, 56, whole.len() / 2, whole.len() - 1] {
            if len < whole.len() {
                fs::write(&file, &whole[..len]).unwrap();
                let error = ImageReader::open(&path).err().unwrap();
                assert!(matches!(error, ImageError::Truncated { .. }), "{file:?} {len}: {error}");
            }
        }
        fs::write(&file, [&whole[..], b"x"].concat()).unwrap();
        let error = ImageReader::open(&path).err().unwrap();
        assert!(matches!(error, ImageError::Damaged { .. }), "{error}");
        fs::remove_file(&file).unwrap();
        assert!(ImageReader::open(&path).is_err());
        fs::write(&file, whole).unwrap();
    }
    ImageReader::open(&path).unwrap();
}

#[test]
fn what_is_no_image_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let not =
        |path: &Path| matches!(Manifest::read(path).unwrap_err(), ImageError::NotAnImage { .. });
    assert!(not(dir.path()));
    let file = dir.path().join("manifest");
    fs::write(&file, [b'x'; 100]).unwrap();
    assert!(not(dir.path()));
    assert!(not(&file));
    let missing = Manifest::read(&dir.path().join("nothing")).unwrap_err();
    assert!(matches!(missing, ImageError::Store(_)), "{missing}");

    make(&dir.path().join("image"), b"m", b"p");
    let manifest = dir.path().join("image/manifest");
    let mut bytes = fs::read(&manifest).unwrap();
    bytes[8] = 9;
    fs::write(&manifest, bytes).unwrap();
    let newer = Manifest::read(&dir.path().join("image")).unwrap_err();
    assert!(matches!(newer, ImageError::NewerVersion { found: 9, supported: 2, .. }), "{newer}");
}

#[test]
fn create_refuses_what_is_in_the_way() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |path: &Path| match ImageWriter::create(path, Compression::None) {
        Err(ImageError::Output { .. }) => true,
        Err(error) => panic!("{error}"),
        Ok(_) => false,
    };
    fs::write(dir.path().join("file"), "").unwrap();
    assert!(refused(dir.path()));
    assert!(refused(&dir.path().join("file")));
    std::os::unix::fs::symlink("/nonexistent", dir.path().join("link")).unwrap();
    assert!(refused(&dir.path().join("link")));
    assert!(refused(Path::new("/")));
    assert!(ImageWriter::create(&dir.path().join("no/image"), Compression::None).is_err());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    // An empty directory is taken.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    make(&empty, b"m", b"p");
    ImageReader::open(&empty).unwrap();
    assert!(refused(&empty));
}

#[test]
fn without_commit_nothing_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let writer = ImageWriter::create(&path, Compression::None).unwrap();
    let partial = writer.partial_path().to_owned();
    assert_eq!(partial.metadata().unwrap().permissions().mode() & 0o7777, 0o700);
    let name = partial.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with(&format!(".image.partial-{}-", std::process::id())), "{name}");
    writer.chunks().put(b"chunk").unwrap();
    fs::write(writer.staging_dir().join("x.img"), "x").unwrap();
    drop(writer);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    // Something appears at the place during the dump: it is left alone.
    let writer = ImageWriter::create(&path, Compression::None).unwrap();
    fs::create_dir(&path).unwrap();
    fs::write(path.join("mine"), "").unwrap();
    assert!(matches!(writer.commit(&manifest()).unwrap_err(), ImageError::Output { .. }));
    assert_eq!(tree(dir.path()), [path.clone(), path.join("mine")]);
}

#[test]
fn a_manifest_with_a_missing_chunk_is_not_committed() {
    let dir = tempfile::tempdir().unwrap();
    let writer = ImageWriter::create(&dir.path().join("image"), Compression::None).unwrap();
    let mut manifest = manifest();
    manifest.processes[0].cuda = Some(block(vec![ChunkId([9; 32])], 100));
    let error = writer.commit(&manifest).unwrap_err();
    assert!(matches!(error, ImageError::MissingChunk { .. }), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_full_disk_leaves_nothing() {
    use rustix::mount::*;
    let Ok(tmpfs) = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC) else {
        crate::skip::skip("no right to make a file system that can be filled");
        return;
    };
    fsconfig_set_string(tmpfs.as_fd(), "size", "1m").unwrap();
    fsconfig_create(tmpfs.as_fd()).unwrap();
    let attributes = MountAttrFlags::empty();
    let mount = fsmount(tmpfs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes).unwrap();
    let root = PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&mount)));

    // While data is written.
    let writer = ImageWriter::create(&root.join("image"), Compression::Level(1)).unwrap();
    let error = (0..).find_map(|i| writer.chunks().put(&noise(i, 300_000)).err()).unwrap();
    let error = ImageError::from(error);
    let ImageError::NoSpace { path, .. } = error else { panic!("{error:?}") };
    assert_eq!(path.extension().unwrap(), "pack");
    assert!(writer.commit(&manifest()).is_err());
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);

    // While index and manifest are written: the data leaves a little room, less and less.
    let mut committed = HashSet::new();
    let total = rustix::fs::statvfs(&root).unwrap();
    for left in 0..=6 {
        let writer = ImageWriter::create(&root.join("image"), Compression::None).unwrap();
        let ballast = (total.f_blocks - left) * total.f_frsize;
        fs::write(root.join("ballast"), noise(0, ballast as usize)).unwrap();
        let outcome = writer
            .chunks()
            .put(&noise(1, 3000))
            .map_err(ImageError::from)
            .and_then(|_| writer.commit(&manifest()));
        match &outcome {
            Ok(_) => {
                ImageReader::open(&root.join("image")).unwrap();
                fs::remove_dir_all(root.join("image")).unwrap();
            }
            Err(ImageError::NoSpace { .. }) => {}
            Err(other) => panic!("{other:?}"),
        }
        committed.insert(outcome.is_ok());
        fs::remove_file(root.join("ballast")).unwrap();
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }
    assert_eq!(committed.len(), 2, "both outcomes must have been seen");
}

#[test]
fn hostile_manifests_are_refused() {
    let file = |name: &str| FileEntry { name: name.into(), size: 0, mode: 0o600, chunks: vec![] };
    let decode = |manifest: &Manifest| Manifest::decode(1, &postcard::to_stdvec(manifest).unwrap());
    assert!(decode(&manifest()).is_ok());
    for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "nul\0"] {
        let mut bad = manifest();
        bad.criu.files = vec![file(name)];
        assert!(decode(&bad).is_err(), "{name:?}");
    }
    let mut bad = manifest();
    bad.criu.files = vec![file("twice"), file("twice")];
    assert!(decode(&bad).is_err());
    let mut bad = manifest();
    bad.processes[0].cuda = Some(block(vec![], 1));
    assert!(decode(&bad).is_err());
    bad.processes[0].cuda = Some(block(vec![], u64::MAX));
    assert!(decode(&bad).is_err());
    let chunk = |len| FileChunk { id: ChunkId([9; 32]), len };
    for (size, lens, fits) in [
        (0, vec![], true),
        (5, vec![2, 3], true),
        (MAX_CHUNK as u64 + 1, vec![MAX_CHUNK as u32, 1], true),
        (0, vec![0], false),
        (5, vec![5, 0], false),
        (5, vec![2, 4], false),
        (5, vec![], false),
        (MAX_CHUNK as u64 + 1, vec![MAX_CHUNK as u32 + 1], false),
        // Lengths whose sum overflows 32 bits must not wrap around to the size.
        (4, vec![u32::MAX, 5], false),
        (u64::MAX, vec![], false),
    ] {
        let mut bad = manifest();
        let chunks = lens.iter().map(|&len| chunk(len)).collect();
        bad.criu.files = vec![FileEntry { size, chunks, ..file("pages-1.img") }];
        assert_eq!(decode(&bad).is_ok(), fits, "{size} {lens:?}");
    }
    for (pid, ppid, thread, fits) in [
        (2, 0, 4_194_303, true),
        (4_194_303, 4_194_303, 2, true),
        (1, 0, 2, false),
        (4_194_304, 1, 2, false),
        (1 << 31, 1, 2, false),
        (42, u32::MAX, 2, false),
        (42, 1, u32::MAX, false),
    ] {
        let mut bad = manifest();
        (bad.processes[0].pid, bad.processes[0].ppid) = (pid, ppid);
        bad.criu.files = vec![file(&format!("core-{thread}.img"))];
        assert_eq!(decode(&bad).is_ok(), fits, "{pid} {ppid} {thread}");
    }
    let mut bad = manifest();
    bad.bulk_bytes = u64::MAX;
    assert!(decode(&bad).is_err(), "sums of it would overflow");
    // Libraries are read into memory as a whole: one of 256 MiB is, and four of them.
    for (chunks, files, fits) in [(128, 4, true), (129, 1, false), (128, 5, false)] {
        let mut bad = manifest();
        let size = chunks * MAX_CHUNK as u64;
        let chunks = vec![chunk(MAX_CHUNK as u32); chunks as usize];
        let library = FileEntry { size, chunks, ..file("libcuda.so.1") };
        let carried = CarriedFile { path: "/opt/shim".into(), mode: 0o755, file: library };
        bad.carried = vec![carried; files];
        assert_eq!(decode(&bad).is_ok(), fits, "{files} of {size}");
    }
    let mut trailing = postcard::to_stdvec(&manifest()).unwrap();
    trailing.push(0);
    assert!(Manifest::decode(1, &trailing).is_err());
}

fn section(kind: &str, chunks: Vec<FileChunk>) -> Section {
    Section { kind: kind.into(), version: 3, needed: true, data: vec![1, 2, 3], chunks }
}

#[test]
fn a_manifest_with_sections_is_read_as_it_was_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let writer = ImageWriter::create(&path, Compression::None).unwrap();
    let bytes = noise(1, 100);
    let id = writer.chunks().put(&bytes).unwrap();
    let mut manifest = manifest();
    manifest.sections =
        vec![section("a-1", vec![FileChunk { id, len: 100 }]), section("b", vec![])];
    writer.commit(&manifest).unwrap();
    let reader = ImageReader::open(&path).unwrap();
    assert_eq!(*reader.manifest(), manifest);
    assert_eq!(reader.manifest().written_identity().unwrap(), reader.id());
    // Its bytes are the image's like any others.
    let parts: Vec<String> = reader.manifest().parts().map(|part| part.to_string()).collect();
    assert_eq!(parts, ["section a-1"]);
    assert!(manifest.chunk_ids().contains(&id) && reader.verify().is_empty());
    // Without sections it is what version 1 was.
    manifest.sections.clear();
    let (version, body) = manifest.body().unwrap();
    assert_eq!((version, body), (1, postcard::to_stdvec(&manifest).unwrap()));
}

#[test]
fn files_with_many_chunks_are_written_as_postcard_writes_them() {
    let chunk = |number: u32| FileChunk { id: ChunkId::of(&number.to_le_bytes()), len: number };
    // Lengths of one byte to five, and more chunks than one thread encodes at a time.
    let lens = [1, 0x7f, 0x80, 0x3fff, 0x4000, 0x1f_ffff, 0x20_0000, 0x0fff_ffff, u32::MAX];
    let file = |name: &str, chunks: Vec<FileChunk>| FileEntry {
        name: name.to_owned(),
        size: 0x1234_5678_9abc,
        mode: 0o600,
        chunks,
    };
    let mut manifest = manifest();
    manifest.criu.files = vec![
        file("pages-1.img", lens.into_iter().chain(1..40_000).map(chunk).collect()),
        file("core-1.img", Vec::new()),
        file("mm-1.img", vec![chunk(5)]),
    ];
    manifest.criu.options = vec!["--shell-job".to_owned()];
    let (_, body) = manifest.body().unwrap();
    assert!(body == postcard::to_stdvec(&manifest).unwrap());
}

#[test]
fn what_has_to_be_known_for_a_restore_is_known_or_refused_by_name() {
    let mut manifest = manifest();
    manifest.sections = vec![section("new-kind", vec![])];
    manifest.check_sections(&[("other", 3), ("new-kind", 3)]).unwrap();
    for known in [&[][..], &[("new-kind", 2)]] {
        let error = manifest.check_sections(known).unwrap_err();
        assert!(error.to_string().contains("needs `new-kind` in version 3"), "{error}");
    }
    manifest.sections[0].needed = false;
    manifest.check_sections(&[]).unwrap();
}

#[test]
fn hostile_sections_are_refused() {
    let decode = |sections: Vec<Section>| {
        let mut manifest = manifest();
        manifest.sections = sections;
        let (version, body) = manifest.body().unwrap();
        Manifest::decode(version, &body)
    };
    let chunk = |len| FileChunk { id: ChunkId([9; 32]), len };
    assert!(decode(vec![section("a", vec![chunk(1), chunk(MAX_CHUNK as u32)])]).is_ok());
    for kind in ["", "A", "a b", "a/b", "\u{1b}", &"a".repeat(65)] {
        assert!(decode(vec![section(kind, vec![])]).is_err(), "{kind:?}");
    }
    assert!(decode(vec![section("a", vec![]), section("a", vec![])]).is_err());
    let many = |count: u32| (0..count).map(|n| section(&format!("k{n}"), vec![])).collect();
    assert!(decode(many(64)).is_ok() && decode(many(65)).is_err());
    // Room for as many as the manifest says is never made.
    let short = postcard::to_stdvec(&u64::MAX).unwrap();
    let plain = postcard::to_stdvec(&manifest()).unwrap();
    assert_eq!(Manifest::decode(2, &[plain, short].concat()), Err("it has too many sections"));
    for len in [0, MAX_CHUNK as u32 + 1, u32::MAX] {
        assert!(decode(vec![section("a", vec![chunk(len)])]).is_err(), "{len}");
    }
    // A manifest has one form only: without sections it is no second version, and nothing follows them.
    let plain = postcard::to_stdvec(&manifest()).unwrap();
    assert!(Manifest::decode(2, &plain).is_err());
    assert!(Manifest::decode(2, &[&plain[..], &[0]].concat()).is_err());
    let mut manifest = manifest();
    manifest.sections = vec![section("a", vec![])];
    let (_, body) = manifest.body().unwrap();
    assert!(Manifest::decode(1, &body).is_err(), "a first version has no sections");
    assert!(Manifest::decode(2, &[&body[..], &[0]].concat()).is_err());
}

#[test]
fn a_file_whose_chunk_has_another_length_in_the_index_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let writer = ImageWriter::create(&path, Compression::None).unwrap();
    let mut manifest = manifest();
    let mut file = writer.add_bytes("core-1.img", 0o600, &noise(1, 100)).unwrap();
    file.size = 99;
    file.chunks[0].len = 99;
    manifest.criu.files = vec![file];
    writer.commit(&manifest).unwrap();
    let error = ImageReader::open(&path).err().unwrap();
    assert!(matches!(error, ImageError::MissingChunk { .. }), "{error}");
}

#[test]
fn pages_of_two_images_are_cut_alike() {
    let dir = tempfile::tempdir().unwrap();
    let before = noise(1, 5 * MAX_CHUNK + 12345);
    let (head, tail) = before.split_at(MAX_CHUNK / 2);
    let after = [head, &noise(2, 4096), tail].concat();
    let mut known = HashSet::new();
    let mut new = Vec::new();
    for (name, bytes) in [("a", &before), ("b", &after)] {
        let (_, manifest) = make(&dir.path().join(name), b"memory", bytes);
        let pages = &manifest.criu.files[2];
        assert_eq!(pages.size, bytes.len() as u64);
        let fresh = pages.chunks.iter().filter(|chunk| known.insert(chunk.id));
        new.push(fresh.map(|chunk| u64::from(chunk.len)).sum::<u64>());
    }
    assert_eq!(new[0], before.len() as u64);
    assert!(new[1] < before.len() as u64 / 10, "{new:?}");
}

proptest! {
    #[test]
    fn manifest_decoder_survives_anything(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let _ = Manifest::decode(1, &bytes);
        let _ = Manifest::decode(2, &bytes);
    }

    #[test]
    fn manifest_decoder_survives_changes(at: prop::sample::Index, value: u8, cut: prop::sample::Index) {
        let mut bytes = postcard::to_stdvec(&manifest()).unwrap();
        let at = at.index(bytes.len());
        bytes[at] = value;
        bytes.truncate(bytes.len() - cut.index(bytes.len()) / 8);
        let _ = Manifest::decode(1, &bytes);
        let _ = Manifest::decode(2, &bytes);
    }
}
