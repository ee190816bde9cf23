use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::*;
use crate::base::progress::Quiet;
use crate::base::stop::Stop;
use crate::image::tests::{make, manifest, tree};
use crate::image::trust::Trust;
use crate::image::verify::verify;
use crate::image::{Destination, ImageReader, ImageWriter};
use crate::store::index::{Index, PackInfo, WriterId};
use crate::store::tests::{noise, text};
use crate::store::{Compression, MAX_CHUNK};

fn stop() -> Stop {
    Stop::new(Arc::new(AtomicBool::new(false)))
}

fn alone(path: &Path) -> Destination {
    Destination::Alone(path.to_owned())
}

fn lab() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let memory = [noise(1, MAX_CHUNK), vec![0; MAX_CHUNK], text(2, 12345)].concat();
    let big = [text(3, MAX_CHUNK), noise(4, 777), vec![7; 100_000]].concat();
    make(&path, &memory, &big);
    (dir, path)
}

fn exported(image: &Path) -> Vec<u8> {
    let mut tar = Vec::new();
    let report = export(image, &mut tar, &stop(), &Quiet).unwrap();
    assert_eq!(report.tar_bytes, tar.len() as u64);
    tar
}

fn refused(dir: &Path, tar: &[u8]) -> String {
    let error = import(&mut &tar[..], &alone(&dir.join("bad")), &Trust::default(), &stop(), &Quiet)
        .unwrap_err();
    assert!(matches!(error, TarError::BadTar { .. }), "{error:?}");
    assert!(!dir.join("bad").exists() && hidden(dir).is_empty(), "{error}");
    error.to_string()
}

fn hidden(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.filter(|e| e.file_name().as_encoded_bytes()[0] == b'.').map(|e| e.path()).collect()
}

/// Where the header of each member begins, with its name.
fn members(tar: &[u8]) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    let mut at = 0;
    while tar[at] != 0 {
        let header = tar::Header::from_byte_slice(&tar[at..at + 512]);
        let size = header.entry_size().unwrap() as usize;
        found.push((String::from_utf8(header.path_bytes().into_owned()).unwrap(), at, size));
        at += 512 + size.next_multiple_of(512);
    }
    found
}

/// Changes the header at `at`, whose sum is put right again.
fn reheader(tar: &mut [u8], at: usize, change: impl FnOnce(&mut tar::Header)) {
    let mut header = tar::Header::from_byte_slice(&tar[at..at + 512]).clone();
    change(&mut header);
    header.set_cksum();
    tar[at..at + 512].copy_from_slice(header.as_bytes());
}

#[test]
fn there_and_back() {
    let (dir, path) = lab();
    let image = ImageReader::open(&path).unwrap();
    let tar = exported(&path);
    let names: Vec<_> = members(&tar).into_iter().map(|(name, ..)| name).collect();
    assert_eq!(names[..2], ["manifest", "index"]);

    let copy = dir.path().join("copy");
    let report = import(&mut &tar[..], &alone(&copy), &Trust::default(), &stop(), &Quiet).unwrap();
    assert_eq!(report.id, crate::base::format::hex(&image.id()));
    let back = ImageReader::open(&copy).unwrap();
    assert_eq!((back.id(), back.manifest()), (image.id(), image.manifest()));
    assert!(verify(&copy, &Quiet).unwrap().whole);
    let files = tree(&copy).into_iter().filter(|file| file.is_file());
    let on_disk: u64 = files.map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(report.stored_bytes, on_disk);
    // However its chunks lie, an image gives the same tar.
    assert!(exported(&copy) == tar);
    // A tar may have the zeros that tar(1) appends.
    let padded = [&tar[..], &[0; 10240]].concat();
    import(
        &mut &padded[..],
        &alone(&dir.path().join("padded")),
        &Trust::default(),
        &stop(),
        &Quiet,
    )
    .unwrap();
}

#[test]
fn tar_itself_makes_an_image_of_it() {
    let (dir, path) = lab();
    let file = dir.path().join("image.tar");
    export_to_file(&path, &file, &stop(), &Quiet).unwrap();
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert!(hidden(dir.path()).is_empty());
    let out = dir.path().join("out");
    fs::create_dir(&out).unwrap();
    let status = std::process::Command::new("tar").arg("-xf").arg(&file).current_dir(&out).status();
    assert!(status.unwrap().success());
    let report = verify(&out, &Quiet).unwrap();
    assert!(report.whole && report.id == Some(ImageReader::open(&path).unwrap().id()));

    // Nothing is written over, and nothing left.
    let error = export_to_file(&path, &file, &stop(), &Quiet).unwrap_err();
    assert!(matches!(error, TarError::Exists { .. }), "{error}");
    assert!(hidden(dir.path()).is_empty());
}

#[test]
fn only_what_the_manifest_needs_is_exported() {
    let (dir, path) = lab();
    // A chunk more than the manifest names.
    let fat = dir.path().join("fat");
    let writer = crate::image::ImageWriter::create(&fat, crate::store::Compression::None).unwrap();
    writer.chunks().put(&noise(77, 50_000)).unwrap();
    let lean = ImageReader::open(&path).unwrap();
    for entry in lean.chunks().entries() {
        let mut plain = vec![0; entry.plain_len as usize];
        lean.chunks().get(&entry.id, &mut plain).unwrap();
        writer.chunks().put(&plain).unwrap();
    }
    let committed = writer.commit(lean.manifest()).unwrap();
    assert_eq!(committed.id, lean.id());
    let tar = exported(&fat);
    let copy = dir.path().join("copy");
    import(&mut &tar[..], &alone(&copy), &Trust::default(), &stop(), &Quiet).unwrap();
    let copy = ImageReader::open(&copy).unwrap();
    assert_eq!(copy.chunks().entries().len(), lean.chunks().entries().len());
    assert_eq!(copy.id(), lean.id());
}

#[test]
fn a_damaged_image_is_not_exported() {
    let (dir, path) = lab();
    let pack = tree(&path).into_iter().rfind(|file| file.extension().is_some()).unwrap();
    let mut bytes = fs::read(&pack).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&pack, bytes).unwrap();
    let file = dir.path().join("image.tar");
    let error = export_to_file(&path, &file, &stop(), &Quiet).unwrap_err();
    assert!(error.to_string().contains("is damaged"), "{error}");
    assert!(!file.exists() && hidden(dir.path()).is_empty());
}

/// Two dumps at once store everything twice. The first copy of each chunk is damaged: what is exported is the
/// other one, also where that is stored in another form.
#[test]
fn of_two_copies_the_sound_one_is_exported() {
    for other in [Compression::Level(1), Compression::None] {
        let dir = tempfile::tempdir().unwrap();
        let store = dir.path().join("store");
        let writers = [("a", Compression::Level(1)), ("b", other)].map(|(name, compression)| {
            let to = Destination::Stored { store: store.clone(), name: name.into() };
            (ImageWriter::begin(&to, compression).unwrap(), name)
        });
        let chunks = [noise(1, MAX_CHUNK), text(2, MAX_CHUNK), vec![0; 777]];
        for (writer, _) in writers {
            let ids = chunks.each_ref().map(|chunk| writer.chunks().put(chunk).unwrap());
            let mut manifest = manifest();
            let block = crate::image::tests::block(ids.to_vec(), 2 * MAX_CHUNK as u64 + 777);
            manifest.processes[0].cuda = Some(block);
            writer.commit(&manifest).unwrap();
        }
        let image = store.join("images/a");
        let before = ImageReader::open(&image).unwrap();
        for entry in before.chunks().entries().iter().filter(|entry| entry.stored_len > 0) {
            let pack = before.chunks().pack_path(entry);
            let mut bytes = fs::read(&pack).unwrap();
            bytes[entry.offset as usize] ^= 1;
            fs::write(pack, bytes).unwrap();
        }
        let file = dir.path().join("image.tar");
        export_to_file(&image, &file, &stop(), &Quiet).unwrap();
        let copy = dir.path().join("copy");
        import(
            &mut &fs::read(&file).unwrap()[..],
            &alone(&copy),
            &Trust::default(),
            &stop(),
            &Quiet,
        )
        .unwrap();
        assert_eq!(ImageReader::open(&copy).unwrap().id(), before.id());
        assert!(verify(&copy, &Quiet).unwrap().whole);
    }
}

#[test]
fn a_stop_leaves_nothing() {
    let (dir, path) = lab();
    let tar = exported(&path);
    let stop = Stop::new(Arc::new(AtomicBool::new(true)));
    let file = dir.path().join("image.tar");
    let error = export_to_file(&path, &file, &stop, &Quiet).unwrap_err();
    assert!(matches!(error, TarError::Interrupted), "{error}");
    let error =
        import(&mut &tar[..], &alone(&dir.path().join("copy")), &Trust::default(), &stop, &Quiet)
            .unwrap_err();
    assert!(matches!(error, TarError::Interrupted), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn a_writer_that_fails_ends_the_export() {
    struct Full(usize);
    impl io::Write for Full {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::BrokenPipe)?;
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let (_dir, path) = lab();
    for room in [0, 600, 5000, 1 << 20, 2 << 20] {
        let error = export(&path, &mut Full(room), &stop(), &Quiet).unwrap_err();
        assert!(matches!(error, TarError::Io(..)), "{error}");
    }
}

#[test]
fn nothing_is_imported_over_something() {
    let (dir, path) = lab();
    let tar = exported(&path);
    let error =
        import(&mut &tar[..], &alone(&path), &Trust::default(), &stop(), &Quiet).unwrap_err();
    assert!(error.to_string().contains("not empty"), "{error}");
    assert!(verify(&path, &Quiet).unwrap().whole && hidden(dir.path()).is_empty());
}

#[test]
fn truncations_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, &text(1, 3000), &noise(2, 100));
    let tar = exported(&path);
    for len in 0..tar.len() {
        if len % 37 == 0 || len % 512 < 2 {
            assert!(refused(dir.path(), &tar[..len]).contains("ends too early"), "{len}");
        }
    }
}

#[test]
fn every_flipped_bit_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    make(&path, &text(1, 300), &noise(2, 30));
    let mut tar = exported(&path);
    let whole = tar.clone();
    // A digit of a header's sum may become a space, which means the same.
    let sum = |at: usize| members(&whole).iter().any(|m| (m.1 + 148..m.1 + 156).contains(&at));
    for at in (0..tar.len()).step_by(3) {
        tar[at] ^= 1 << (at % 8);
        let target = dir.path().join("flipped");
        match import(&mut &tar[..], &alone(&target), &Trust::default(), &stop(), &Quiet) {
            Err(TarError::BadTar { .. }) => {}
            Err(other) => panic!("{at}: {other:?}"),
            Ok(_) if sum(at) => fs::remove_dir_all(&target).unwrap(),
            Ok(_) => panic!("byte {at} goes unnoticed"),
        }
        tar[at] = whole[at];
    }
}

#[test]
fn strange_members_are_refused() {
    let (dir, path) = lab();
    let tar = exported(&path);
    let members = members(&tar);
    let (_, pack, size) = members[2].clone();
    let with = |change: &dyn Fn(&mut tar::Header)| {
        let mut tar = tar.clone();
        reheader(&mut tar, pack, change);
        refused(dir.path(), &tar)
    };
    for name in ["../escape", "packs/../../escape", "packs/9999.pack", "manifest", "x"] {
        let said = with(&|header| {
            let field = &mut header.as_mut_bytes()[..100];
            field.fill(0);
            field[..name.len()].copy_from_slice(name.as_bytes());
        });
        assert!(said.contains("where packs/"), "{said}");
    }
    let said = with(&|header| header.as_mut_bytes()[..4].copy_from_slice(b"/etc"));
    assert!(said.contains("where packs/"), "{said}");
    use tar::EntryType;
    for kind in [
        EntryType::Symlink,
        EntryType::Link,
        EntryType::Char,
        EntryType::Block,
        EntryType::Fifo,
        EntryType::Directory,
        EntryType::GNULongName,
        EntryType::GNUSparse,
        EntryType::XHeader,
        EntryType::XGlobalHeader,
    ] {
        let said = with(&|header| header.set_entry_type(kind));
        assert!(said.contains("not a regular file"), "{kind:?}: {said}");
    }
    for len in [0, size as u64 - 1, size as u64 + 1, u64::MAX, 1 << 62] {
        let said = with(&|header| header.set_size(len));
        assert!(said.contains("length"), "{len}: {said}");
    }
    // Lengths of the first two, which nothing says beforehand.
    for (at, limit) in [(members[0].1, 256 << 20), (members[1].1, 1 << 30)] {
        let mut huge = tar.clone();
        reheader(&mut huge, at, |header| header.set_size(limit + 1024));
        assert!(refused(dir.path(), &huge).contains("more than the format allows"));
    }
    // Twice the same, another order, one too many, one missing, garbage after the end.
    let end = tar.len() - 1024;
    let piece = |i: usize| {
        let (_, at, size) = members[i];
        &tar[at..at + 512 + size.next_multiple_of(512)]
    };
    refused(dir.path(), &[piece(0), piece(0), piece(1), &tar[pack..]].concat());
    refused(dir.path(), &[piece(1), piece(0), &tar[pack..]].concat());
    let twice = [&tar[..end], piece(2), &tar[end..]].concat();
    assert!(refused(dir.path(), &twice).contains("further members"));
    refused(dir.path(), &[piece(0), piece(1), &tar[end..]].concat());
    let trailing = [&tar[..], &[0; 700], b"x"].concat();
    assert!(refused(dir.path(), &trailing).contains("further members"));
    refused(dir.path(), b"");
    refused(dir.path(), &noise(5, 5000));
    refused(dir.path(), &[0; 10240]);
    let endless = [&tar[..], &vec![0; 17 << 20]].concat();
    assert!(refused(dir.path(), &endless).contains("does not end"));
}

#[test]
fn whatever_an_image_shares_its_tar_is_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let stored = |name: &str| Destination::Stored { store: at("store"), name: name.to_owned() };
    fill(&alone(&at("parent")), 0..4);
    let on_parent = |name: &str| Destination::Incremental { path: at(name), parent: at("parent") };
    fill(&stored("other"), 3..9);
    let kinds = [alone(&at("alone")), on_parent("incremental"), stored("stored")];
    let ids: Vec<_> = kinds.iter().map(|to| fill(to, 0..6)).collect();
    assert!(ids.iter().all(|id| *id == ids[0]));
    let tar = exported(&at("alone"));
    for to in &kinds {
        assert!(verify(&to.path(), &Quiet).unwrap().whole, "{to:?}");
        assert!(exported(&to.path()) == tar, "{to:?}");
    }
    // The image goes back into every kind of place; what is there already is not stored again.
    for (to, lacks) in [(alone(&at("back")), 6), (on_parent("back-2"), 2), (stored("back"), 0)] {
        let report = import(&mut &tar[..], &to, &Trust::default(), &stop(), &Quiet).unwrap();
        assert_eq!((report.id, report.image), (crate::base::format::hex(&ids[0]), to.path()));
        assert_eq!(report.new_bytes / 5000, lacks, "{to:?}");
        let report = verify(&to.path(), &Quiet).unwrap();
        assert!(report.whole && report.id == Some(ids[0]), "{to:?}");
    }
    assert!(hidden(dir.path()).is_empty());
    assert!(hidden(&at("store/images")).is_empty());
}

/// Makes an image with these files, each of 5000 bytes that do not compress.
fn fill(to: &Destination, seeds: std::ops::Range<u64>) -> [u8; 32] {
    let writer = ImageWriter::begin(to, Compression::Level(1)).unwrap();
    let mut manifest = manifest();
    for seed in seeds {
        let file = writer.add_bytes(&format!("{seed}.img"), 0o600, &noise(seed, 5000)).unwrap();
        manifest.criu.files.push(file);
    }
    writer.commit(&manifest).unwrap().id
}

#[test]
fn an_index_that_claims_endless_packs_is_refused() {
    let (dir, path) = lab();
    let tar = exported(&path);
    let (_, at, size) = members(&tar)[1].clone();
    let entries = Index::read(&path.join("index")).unwrap().entries;
    let writer = WriterId([1; 12]);
    let huge = |number| PackInfo { id: writer.pack(number), len: i64::MAX as u64 };
    let index = Index { packs: (0..40).map(huge).collect(), entries }.encode_file().unwrap();
    let mut header = tar[at..at + 512].to_vec();
    reheader(&mut header, 0, |header| header.set_size(index.len() as u64));
    let mut hostile = [&tar[..at], &header, &index].concat();
    hostile.resize(hostile.len().next_multiple_of(512), 0);
    hostile.extend_from_slice(&tar[at + 512 + size.next_multiple_of(512)..]);
    assert!(refused(dir.path(), &hostile).contains("where packs/"));
}
