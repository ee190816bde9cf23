//! For tests: a disk that remembers the order of every change, so that the power can be cut after
//! any of them, and that can be full at any of them.
//!
//! Changes are made for real and written down. [`Journal::after_cut`] then makes what a disk may hold
//! after a power cut: everything that was synced, and any part of what was not. Directories lose
//! single names, files lose single writes or [parts](Kept) of them; a rename is never half done.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::disk::{Disk, DiskFile, RealDisk};

/// A change, or a sync.
#[derive(Debug, Clone)]
enum Change {
    Create(PathBuf, usize),
    MakeDir(PathBuf, usize),
    Write {
        node: usize,
        offset: u64,
        bytes: Vec<u8>,
    },
    SyncFile(usize),
    Rename(PathBuf, PathBuf),
    Remove(PathBuf),
    SyncDir(PathBuf),
    /// No change of the disk: the test has seen a success.
    Note(String),
}

/// What reaches the disk of a change that was not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kept {
    Nothing,
    All,
    /// The beginning of a write: so many of 256 parts.
    Beginning(u8),
    /// A write's share in any of the file's sectors of 512 bytes: that of number `n` if bit
    /// `n % 64` is set. Before a later one a lost one is zeros.
    Sectors(u64),
    /// Only the file's new length of a write: zeros.
    Length,
}

impl Kept {
    /// A part of a write, which `random` chooses.
    pub(crate) fn torn(random: u64) -> Self {
        match random % 5 {
            0 | 1 => Self::Beginning((random >> 8) as u8),
            2 | 3 => Self::Sectors(random >> 3),
            _ => Self::Length,
        }
    }

    /// Whether a change of names, which is never half done, reaches the disk.
    fn has_name(self) -> bool {
        match self {
            Self::Nothing | Self::Length => false,
            Self::All => true,
            Self::Beginning(part) => part % 2 == 1,
            Self::Sectors(set) => set % 2 == 1,
        }
    }

    fn write(self, file: &mut Vec<u8>, at: u64, bytes: &[u8]) {
        match self {
            Self::Nothing => {}
            Self::All => write_at(file, at, bytes),
            Self::Beginning(part) => {
                let len = bytes.len() * usize::from(part) / 256;
                write_at(file, at, &bytes[..len]);
            }
            Self::Sectors(set) => {
                let mut done = 0;
                while done < bytes.len() {
                    let start = at + done as u64;
                    let len = ((512 - start % 512) as usize).min(bytes.len() - done);
                    if set >> (start / 512 % 64) & 1 == 1 {
                        write_at(file, start, &bytes[done..done + len]);
                    }
                    done += len;
                }
            }
            Self::Length => {
                let end = at as usize + bytes.len();
                file.resize(file.len().max(end), 0);
            }
        }
    }
}

/// What was done to a disk, in order.
#[derive(Debug, Clone, Default)]
pub(crate) struct Journal {
    changes: Vec<Change>,
    nodes: usize,
}

/// What the disk does when it is asked for change number `at`, and later.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fault {
    /// Only this change fails for lack of space.
    FullOnce(usize),
    /// This and every later one that needs space fails.
    FullFrom(usize),
}

#[derive(Default)]
struct State {
    journal: Journal,
    fault: Option<Fault>,
    /// Changes that were asked for.
    asked: usize,
    hit: bool,
}

/// The disk; clones are the same one.
#[derive(Clone, Default)]
pub(crate) struct Recorder(Arc<Mutex<State>>);

impl Recorder {
    pub(crate) fn failing(fault: Fault) -> Self {
        let recorder = Self::default();
        recorder.0.lock().fault = Some(fault);
        recorder
    }

    /// Notes that the test has seen a success.
    pub(crate) fn note(&self, text: impl Into<String>) {
        self.0.lock().journal.changes.push(Change::Note(text.into()));
    }

    pub(crate) fn journal(&self) -> Journal {
        self.0.lock().journal.clone()
    }

    /// Whether the fault came to pass.
    pub(crate) fn was_hit(&self) -> bool {
        self.0.lock().hit
    }

    /// Makes a change and writes it down, unless it is to fail. Freeing needs no space.
    fn change<T>(
        &self,
        needs_space: bool,
        make: impl FnOnce() -> io::Result<T>,
        entry: impl FnOnce(&mut Journal) -> Change,
    ) -> io::Result<T> {
        let mut state = self.0.lock();
        let number = state.asked;
        state.asked += 1;
        let fails = match state.fault {
            Some(Fault::FullOnce(at)) => at == number,
            Some(Fault::FullFrom(at)) => at <= number && needs_space,
            None => false,
        };
        if fails {
            state.hit = true;
            return Err(io::Error::from(io::ErrorKind::StorageFull));
        }
        let made = make()?;
        let entry = entry(&mut state.journal);
        state.journal.changes.push(entry);
        Ok(made)
    }
}

impl Journal {
    fn node(&mut self) -> usize {
        self.nodes += 1;
        self.nodes
    }

    /// Number of changes.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }

    /// What the test had seen before change number `cut`.
    pub(crate) fn notes(&self, cut: usize) -> Vec<&str> {
        let mut notes = Vec::new();
        for change in &self.changes[..cut] {
            if let Change::Note(text) = change {
                notes.push(text.as_str());
            }
        }
        notes
    }

    /// What there was to sync, each by the name of its directory or the kind of its file.
    pub(crate) fn syncs(&self) -> BTreeSet<String> {
        (0..self.len()).filter_map(|at| self.synced(at)).collect()
    }

    /// The changes without the syncs of one kind, as if the code had forgotten them.
    pub(crate) fn forgetting(&self, kind: &str) -> Self {
        let mut forgetful = self.clone();
        let mut at = 0;
        forgetful.changes.retain(|_| {
            at += 1;
            self.synced(at - 1).is_none_or(|synced| synced != kind)
        });
        forgetful
    }

    /// The kind of what change `at` syncs.
    fn synced(&self, at: usize) -> Option<String> {
        let name = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            // Random parts are left out.
            let kind = ["pack", "index", "partial-"].iter().find(|part| name.contains(**part));
            kind.map_or(name.clone(), |kind| kind.trim_end_matches('-').to_owned())
        };
        match &self.changes[at] {
            Change::SyncDir(path) => Some(format!("directory {}", name(path))),
            Change::SyncFile(node) => self.changes.iter().find_map(|change| match change {
                Change::Create(path, created) if created == node => {
                    Some(format!("file {}", name(path)))
                }
                _ => None,
            }),
            _ => None,
        }
    }

    /// Number of the changes that were not synced if the power goes before change number `cut`.
    pub(crate) fn pending(&self, from: &Path, cut: usize) -> usize {
        let mut count = 0;
        self.replay(from, cut).lose(&mut || {
            count += 1;
            Kept::Nothing
        });
        count
    }

    /// Makes in `to` what a disk may hold if the power goes before change number `cut`; all changes
    /// were made below `from`. `keep` is asked for each change that was not synced what of it reached
    /// the disk.
    pub(crate) fn after_cut(
        &self,
        from: &Path,
        to: &Path,
        cut: usize,
        mut keep: impl FnMut() -> Kept,
    ) {
        let mut disk = self.replay(from, cut);
        disk.lose(&mut keep);
        disk.write_out(Model::ROOT, to);
    }

    fn replay(&self, from: &Path, cut: usize) -> Model {
        let mut disk = Model::new(from);
        self.changes[..cut].iter().for_each(|change| disk.apply(change));
        disk
    }
}

#[derive(Clone)]
enum Node {
    File { durable: Vec<u8>, pending: Vec<(u64, Vec<u8>)> },
    Dir { durable: BTreeMap<String, usize>, now: BTreeMap<String, usize>, pending: Vec<Names> },
}

/// A change of the names in one directory: these vanish, and then these appear.
#[derive(Clone)]
struct Names {
    gone: Option<String>,
    new: Option<(String, usize)>,
}

impl Names {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        if let Some(name) = &self.gone {
            names.remove(name);
        }
        if let Some((name, node)) = &self.new {
            names.insert(name.clone(), *node);
        }
    }
}

/// What is on the disk, and what will be.
struct Model {
    root: PathBuf,
    nodes: HashMap<usize, Node>,
}

impl Model {
    const ROOT: usize = 0;

    fn new(root: &Path) -> Self {
        let dir = Node::Dir { durable: BTreeMap::new(), now: BTreeMap::new(), pending: Vec::new() };
        Self { root: root.to_owned(), nodes: HashMap::from([(Self::ROOT, dir)]) }
    }

    fn find(&self, path: &Path) -> Option<usize> {
        let path = path.strip_prefix(&self.root).ok()?;
        path.components().try_fold(Self::ROOT, |node, part| match &self.nodes[&node] {
            Node::Dir { now, .. } => now.get(part.as_os_str().to_str()?).copied(),
            Node::File { .. } => None,
        })
    }

    /// Changes names in the directory of `path`.
    fn names(&mut self, path: &Path, change: impl FnOnce(String) -> Names) {
        let dir = path.parent().and_then(|dir| self.find(dir)).expect("its directory is known");
        let name = path.file_name().and_then(|name| name.to_str()).expect("it has a name");
        let Some(Node::Dir { now, pending, .. }) = self.nodes.get_mut(&dir) else {
            panic!("{} is no directory", path.display())
        };
        let names = change(name.to_owned());
        names.apply(now);
        pending.push(names);
    }

    fn apply(&mut self, change: &Change) {
        match change {
            Change::Create(path, node) => {
                self.nodes.insert(*node, Node::File { durable: Vec::new(), pending: Vec::new() });
                self.names(path, |name| Names { gone: None, new: Some((name, *node)) });
            }
            Change::MakeDir(path, node) => {
                let names = BTreeMap::new();
                let dir = Node::Dir { durable: names.clone(), now: names, pending: Vec::new() };
                self.nodes.insert(*node, dir);
                self.names(path, |name| Names { gone: None, new: Some((name, *node)) });
            }
            Change::Write { node, offset, bytes } => {
                if let Some(Node::File { pending, .. }) = self.nodes.get_mut(node) {
                    pending.push((*offset, bytes.clone()));
                }
            }
            Change::SyncFile(node) => {
                if let Some(Node::File { durable, pending }) = self.nodes.get_mut(node) {
                    pending.drain(..).for_each(|(at, bytes)| write_at(durable, at, &bytes));
                }
            }
            Change::Rename(from, to) => {
                assert_eq!(from.parent(), to.parent(), "renames stay in their directory");
                let node = self.find(from).expect("it is there");
                let gone = from.file_name().and_then(|name| name.to_str()).map(str::to_owned);
                self.names(to, |name| Names { gone, new: Some((name, node)) });
            }
            Change::Remove(path) => {
                self.names(path, |name| Names { gone: Some(name), new: None });
            }
            Change::SyncDir(path) => {
                // Above the root nothing is modelled.
                let Some(node) = self.find(path) else { return };
                if let Some(Node::Dir { durable, now, pending }) = self.nodes.get_mut(&node) {
                    durable.clone_from(now);
                    pending.clear();
                }
            }
            Change::Note(_) => {}
        }
    }

    /// The power goes: of what was not synced, only what `keep` says is on the disk.
    fn lose(&mut self, keep: &mut impl FnMut() -> Kept) {
        let mut numbers: Vec<usize> = self.nodes.keys().copied().collect();
        numbers.sort_unstable();
        for number in numbers {
            match self.nodes.get_mut(&number) {
                Some(Node::File { durable, pending }) => {
                    for (at, bytes) in pending.drain(..) {
                        keep().write(durable, at, &bytes);
                    }
                }
                Some(Node::Dir { durable, now, pending }) => {
                    for names in pending.drain(..).filter(|_| keep().has_name()) {
                        names.apply(durable);
                    }
                    now.clone_from(durable);
                }
                None => {}
            }
        }
    }

    fn write_out(&self, node: usize, to: &Path) {
        match &self.nodes[&node] {
            Node::File { durable, .. } => std::fs::write(to, durable).unwrap(),
            Node::Dir { durable, .. } => {
                std::fs::create_dir_all(to).unwrap();
                for (name, node) in durable {
                    self.write_out(*node, &to.join(name));
                }
            }
        }
    }
}

fn write_at(file: &mut Vec<u8>, at: u64, bytes: &[u8]) {
    let (start, end) = (at as usize, at as usize + bytes.len());
    if file.len() < end {
        file.resize(end, 0);
    }
    file[start..end].copy_from_slice(bytes);
}

impl Disk for Recorder {
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        let mut node = 0;
        let file = self.change(
            true,
            || RealDisk.create(path),
            |journal| {
                node = journal.node();
                Change::Create(path.to_owned(), node)
            },
        )?;
        Ok(Box::new(RecordedFile { disk: self.clone(), node, file }))
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.change(
            true,
            || RealDisk.make_dir(path),
            |journal| Change::MakeDir(path.to_owned(), journal.node()),
        )
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let entry = |_: &mut Journal| Change::Rename(from.to_owned(), to.to_owned());
        self.change(true, || RealDisk.rename(from, to), entry)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.change(false, || RealDisk.remove_file(path), |_| Change::Remove(path.to_owned()))
    }

    fn remove_tree(&self, path: &Path) -> io::Result<()> {
        // Entries go one by one, from below, as with `std::fs::remove_dir_all`.
        for entry in std::fs::read_dir(path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                self.remove_tree(&entry.path())?;
            } else {
                self.remove_file(&entry.path())?;
            }
        }
        let remove = || std::fs::remove_dir(path);
        self.change(false, remove, |_| Change::Remove(path.to_owned()))
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.change(true, || Ok(()), |_| Change::SyncDir(path.to_owned()))
    }
}

struct RecordedFile {
    disk: Recorder,
    node: usize,
    file: Box<dyn DiskFile>,
}

impl DiskFile for RecordedFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let node = self.node;
        self.disk.change(
            true,
            || self.file.write_all_at(bytes, offset),
            |_| Change::Write { node, offset, bytes: bytes.to_vec() },
        )
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.change(true, || Ok(()), |_| Change::SyncFile(self.node))
    }
}

#[test]
fn writes_are_torn() {
    let dir = tempfile::tempdir().unwrap();
    let (root, lost) = (dir.path().join("root"), dir.path().join("lost"));
    std::fs::create_dir(&root).unwrap();
    let recorder = Recorder::default();
    let file = recorder.create(&root.join("file")).unwrap();
    file.write_all_at(&[1; 300], 0).unwrap();
    recorder.sync_dir(&root).unwrap();
    file.sync().unwrap();
    file.write_all_at(&[2; 1000], 300).unwrap();
    let journal = recorder.journal();
    let after = |kept: Kept| {
        journal.after_cut(&root, &lost, journal.len(), || kept);
        let file = std::fs::read(lost.join("file")).unwrap();
        let runs = file.chunk_by(|a, b| a == b);
        runs.map(|run| (run[0], run.len())).collect::<Vec<_>>()
    };
    assert_eq!(journal.pending(&root, journal.len()), 1);
    assert_eq!(after(Kept::Nothing), [(1, 300)]);
    assert_eq!(after(Kept::All), [(1, 300), (2, 1000)]);
    assert_eq!(after(Kept::Beginning(64)), [(1, 300), (2, 250)]);
    assert_eq!(after(Kept::Sectors(0b001)), [(1, 300), (2, 212)]);
    assert_eq!(after(Kept::Sectors(0b110)), [(1, 300), (0, 212), (2, 788)]);
    assert_eq!(after(Kept::Length), [(1, 300), (0, 1000)]);
    let torn = |random| std::mem::discriminant(&Kept::torn(random));
    assert_eq!((0..10).map(torn).collect::<std::collections::HashSet<_>>().len(), 3);
}
