use std::os::unix::fs::{MetadataExt, symlink};

use super::*;
use crate::engine::migrate::record::{MigrationId, Record, Side, State};
use crate::image::tests::manifest;
use crate::image::{ImageWriter, RequiredFile};
use crate::store::Compression;

/// A folder with an image that brings files along.
struct Made {
    dir: tempfile::TempDir,
    coming: Coming,
    record: Record,
}

impl Made {
    /// Of files in `data`, with these bytes.
    fn new(files: &[(&str, Vec<u8>)]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let dir_path = dir.path().canonicalize().expect("it is there");
        std::fs::create_dir(dir_path.join("data")).expect("made");
        let writer = ImageWriter::create(&dir_path.join("image"), Compression::None).unwrap();
        let mut chunks = Vec::new();
        let mut copied = Vec::new();
        for (name, bytes) in files {
            chunks.extend(writer.add_bytes("file", 0o600, bytes).unwrap().chunks);
            let (path, size) = (dir_path.join("data").join(name), bytes.len() as u64);
            copied.push(CopiedFile { path, size, mode: 0o640, uid: 7, gid: 8 });
        }
        let mut manifest = manifest();
        manifest.processes.iter_mut().for_each(|process| process.cuda = None);
        manifest.criu.files.clear();
        manifest.carried.clear();
        manifest.sections.clear();
        manifest.sections.extend(sections::copied_files(&copied, chunks));
        let coming = Coming::of(&manifest, &[dir_path.join("data")]).unwrap().expect("files");
        writer.commit(&manifest).unwrap();
        let id = MigrationId::random().unwrap();
        let mut record = Record::new(id, Side::Destination, State::Preparing);
        record.files = coming.to_note();
        Self { dir, coming, record }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().expect("it is there").join(name)
    }

    fn make(&mut self) -> Result<(), Error> {
        let image = self.path("image");
        let (hidden, made) = self.coming.write(&image, &self.record.id)?;
        self.record.files = made;
        self.record.write()?;
        hidden.show()
    }

    /// The names in `data`.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path("data")).expect("it is there");
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort_unstable();
        names
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        let _ = self.record.remove();
    }
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        crate::skip::skip("only root makes files for others");
    }
    is_root
}

#[test]
fn files_are_made_as_they_were_and_removed_again() {
    if !is_root() {
        return;
    }
    let large: Vec<u8> = (0..5u32 << 20).map(|n| (n >> 9) as u8).collect();
    let files = [("a", large.clone()), ("b", Vec::new()), ("c", vec![0; 9 << 20])];
    let mut made = Made::new(&files);
    made.make().unwrap();
    assert_eq!(made.names(), ["a", "b", "c"]);
    for (name, bytes) in &files {
        let path = made.path("data").join(name);
        assert!(std::fs::read(&path).unwrap() == *bytes, "{name}");
        let meta = std::fs::metadata(&path).unwrap();
        assert_eq!((meta.uid(), meta.gid(), meta.mode() & 0o7777), (7, 8, 0o640), "{name}");
    }
    assert_eq!(std::fs::metadata(made.path("data/c")).unwrap().blocks(), 0, "zeros are a hole");
    // What was put in the place of one is another file, whatever is in it.
    std::fs::write(made.path("data/new"), &large).unwrap();
    std::fs::rename(made.path("data/new"), made.path("data/a")).unwrap();
    // It is known by what was written, as after a crash.
    let id = made.record.id.parse().unwrap();
    let noted = Record::read(id, Side::Destination).unwrap().expect("it was noted");
    noted.remove_files().unwrap();
    assert_eq!(made.names(), ["a"]);
    noted.remove_files().unwrap();
    std::fs::remove_dir_all(made.path("data")).unwrap();
    noted.remove_files().unwrap();
}

#[test]
fn what_is_there_is_not_touched() {
    if !is_root() {
        return;
    }
    let mut made = Made::new(&[("a", vec![1; 10]), ("b", vec![2; 10])]);
    std::fs::write(made.path("data/b"), "mine").unwrap();
    assert!(made.make().is_err());
    assert_eq!(std::fs::read(made.path("data/b")).unwrap(), b"mine");
    made.record.remove_files().unwrap();
    assert_eq!(made.names(), ["b"], "the other, and what was hidden, is gone");
    assert_eq!(std::fs::read(made.path("data/b")).unwrap(), b"mine");
}

#[test]
fn a_link_leads_nowhere() {
    if !is_root() {
        return;
    }
    let mut made = Made::new(&[("a", vec![1; 10])]);
    std::fs::rename(made.path("data"), made.path("else")).unwrap();
    symlink("else", made.path("data")).unwrap();
    assert!(made.make().is_err());
    assert_eq!(std::fs::read_dir(made.path("else")).unwrap().count(), 0);
    assert!(check_place(&made.path("data/a"), &[made.path("")]).is_err());
    assert!(check_place(&made.path("else/a"), &[made.path("")]).is_ok());
}

#[test]
fn only_what_was_permitted_is_made_and_what_is_there_is_compared() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let file = |name: &str, size| {
        let path = root.join(name);
        CopiedFile { path, size, mode: 0o600, uid: 0, gid: 0 }
    };
    std::fs::write(root.join("short"), "1234").unwrap();
    std::fs::write(root.join("same"), "1234").unwrap();
    std::fs::create_dir(root.join("data")).unwrap();
    let files = [
        file("data/new", 5),
        file("data-not/new", 5),
        file("new", 5),
        file("short", 5),
        file("same", 4),
    ];
    let mut outline = manifest();
    let required = |file: &CopiedFile| {
        let (path, size) = (file.path.clone(), file.size);
        RequiredFile { path, size, mapped: false, open: true }
    };
    outline.required = files.iter().map(required).collect();
    outline.sections.extend(sections::copied_files(&files, Vec::new()));
    let Looked { there, lacking, reasons } = look(&mut outline, &[root.join("data")]).unwrap();
    assert_eq!(there, [false, false, false, true, true]);
    assert_eq!(lacking, 15, "bytes of those that are not there");
    assert_eq!(reasons.len(), 3, "{reasons:?}");
    assert!(reasons[0].contains("data-not/new") && reasons[0].contains("--files-below"));
    assert!(reasons[2].contains("short exists there with 4 bytes"), "{reasons:?}");
    let left: Vec<_> = outline.required.iter().map(|file| file.path.clone()).collect();
    assert_eq!(left, [root.join("short"), root.join("same")]);
    // The manifest is no offer: what has come to be in it is looked at once more.
    let manifest = outline;
    assert!(Coming::of(&manifest, &[root.join("data")]).is_err());
    // Nothing was offered.
    let mut outline = crate::image::tests::manifest();
    assert_eq!(look(&mut outline, &[]).unwrap().there, [false; 0]);
    // A path that goes a roundabout way is no offer at all.
    let around = [file("data/../x", 1)];
    outline.sections.extend(sections::copied_files(&around, Vec::new()));
    assert!(look(&mut outline, &[root]).is_err());
}
