//! What each side of a migration has durably noted of it: a small file, in `/var/lib/gpucr/migrations`.
//!
//! The file is written under another name, synced and renamed, and then the directory is synced: it is there whole or
//! not at all. `docs/migration.md` says what follows from it.

use std::fs::{DirBuilder, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::placing::{self, MadeFile};
use super::relayed::Relayed;
use crate::base::careful;
use crate::base::io_error::IoError;
use crate::engine::error::Error;
use crate::engine::restore::{LoadedMemory, OutputFiles, stdio};
use crate::host::process::ProcessInfo;
use crate::image::{ImageReader, library};

/// Most bytes of a file.
const LARGEST: u64 = 16 << 20;

/// Names a migration: 16 random bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigrationId(pub(super) [u8; 16]);

impl MigrationId {
    pub(super) fn random() -> io::Result<Self> {
        Ok(Self(random()?))
    }
}

/// Bytes that nobody can guess.
pub(super) fn random<const LEN: usize>() -> io::Result<[u8; LEN]> {
    let mut bytes = [0; LEN];
    let mut filled = 0;
    while filled < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags)?;
    }
    Ok(bytes)
}

impl std::fmt::Display for MigrationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&crate::base::format::hex(&self.0))
    }
}

impl std::str::FromStr for MigrationId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let no_id = || "a migration is named by 32 hexadecimal digits".to_owned();
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(no_id());
        }
        let mut bytes = [0; 16];
        for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| no_id())?;
        }
        Ok(Self(bytes))
    }
}

/// Which side has written it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The program was there.
    Source,
    /// The program goes there.
    Destination,
}

/// How far a side has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The source has not decided. If it is not at work any more it never will: the program is its own.
    Undecided,
    /// The source has decided: the program belongs to the destination.
    HandedOver,
    /// The destination makes an image. The source cannot have decided.
    Preparing,
    /// The destination has an image, and the source may have decided.
    Prepared,
    /// The source has told the destination that it has decided. The program has not been restored.
    Taken,
    /// The destination restores the program, or was at that when it was killed.
    Restoring,
}

/// What a side has noted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The migration's name.
    pub id: String,
    /// Who has noted it.
    pub side: Side,
    /// How far it has come.
    pub state: State,
    /// The gpucr that is at work on it, or was: its pid, and when it was started, in ticks since the host was.
    by: (u32, u64),
    /// Of a source: the processes of the program by pid, and when each was started, in ticks since the host was.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub processes: Vec<(u32, u64)>,
    /// Of a destination: where the image is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// Of a destination: whether the program is to get a pid namespace of its own.
    #[serde(default)]
    pub new_pids: bool,
    /// Of a destination: devices that others take the place of, as the command line says it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_map: Vec<String>,
    /// Of a destination: files of the program that it makes, or has made.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<MadeFile>,
    /// Of a destination: which standard streams of the program lead to a process that reads them, if one is needed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub streams: Option<Relayed>,
    /// Of a destination: whether these are relayed, so that what cannot be is kept.
    #[serde(default)]
    pub relays: bool,
    /// Of a destination: files for outputs of the program that were pipes.
    #[serde(default, skip_serializing_if = "OutputFiles::is_empty")]
    pub outputs: OutputFiles,
}

/// What the process gets that has the other ends of a program's standard streams at the destination.
#[derive(Debug)]
pub struct RelayedEnds {
    /// The migration.
    pub id: MigrationId,
    /// Which streams.
    pub streams: Relayed,
    /// Both ends of the link, from which to read and to which to write; none if it is lost, or nothing is relayed.
    pub link: Option<[OwnedFd; 2]>,
    /// How long the other side may be silent.
    pub silence: Duration,
    /// Whether what nobody reads any more is kept.
    pub keeps: bool,
}

/// A program that was brought back.
#[derive(Debug, Clone, PartialEq)]
pub struct Brought {
    /// Its pid.
    pub pid: u32,
    /// Whether the restore has taken the device memory that it was given.
    pub was_given: bool,
    /// Its outputs, `stdout` and `stderr`, that were pipes and go nowhere now.
    pub unread: Vec<String>,
    /// The phases of the restore, which has just ended, with their milliseconds.
    pub phases: Vec<(String, f64)>,
}

/// Brings the program back that a record is of. After an error, which says why, what was made of it is gone.
pub trait Restore {
    /// Is given all of its device memory, for the processes that are being made or, if none are, that are made next.
    fn give(&mut self, memory: LoadedMemory);

    /// Has the program get standard streams that lead to a process of their own, when it is made next. Until the program
    /// runs and the source has heard that, the link is this process's.
    ///
    /// # Errors
    /// What relays cannot be started.
    fn relay(&mut self, ends: RelayedEnds) -> Result<(), String>;

    /// May start a restore that waits for the image which the record names, has opened the driver library with this hash,
    /// and has made nothing. Whether there is one is seen when the processes are [begun](Self::begin).
    fn stand_by(&mut self, record: &Record, driver: &[u8; 32]);

    /// Begins to make its processes, whose threads have the ids `threads`. `awaits_memory` says that their device memory
    /// is [given](Self::give) while that goes on; if it is not, they load it themselves.
    ///
    /// # Errors
    /// That cannot be begun.
    fn begin(
        &mut self,
        record: &Record,
        threads: &[u32],
        awaits_memory: bool,
    ) -> Result<(), String>;

    /// Waits until the processes are there that were [begun](Self::begin), with all their memory. None of them runs.
    ///
    /// # Errors
    /// They cannot be made.
    fn make(&mut self) -> Result<(), String>;

    /// Lets it run; if its processes were not [begun](Self::begin), they are made now.
    ///
    /// # Errors
    /// It cannot be made, or does not come to running.
    fn run(&mut self, record: &Record) -> Result<Brought, String>;

    /// Ends the processes that were made, and have not run, and whatever stands by; memory that was given is let go of.
    fn give_up(&mut self);
}

/// The directory.
pub fn directory() -> PathBuf {
    library::library_root().join("migrations")
}

impl Record {
    /// Begins the record of a side.
    pub(super) fn new(id: MigrationId, side: Side, state: State) -> Self {
        Self {
            id: id.to_string(),
            side,
            state,
            by: own(),
            processes: Vec::new(),
            image: None,
            new_pids: false,
            device_map: Vec::new(),
            files: Vec::new(),
            streams: None,
            relays: false,
            outputs: OutputFiles::default(),
        }
    }

    /// Where it is.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&self.id, self.side)
    }

    /// Writes it durably, in the place of the one before.
    ///
    /// # Errors
    /// It may be there or not, and may not last.
    pub fn write(&self) -> Result<(), IoError> {
        let (path, dir) = (self.path(), directory());
        let failed = |what: &str, path: &Path| {
            let what = format!("cannot {what} {}", path.display());
            move |source| IoError { what, source }
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&dir).map_err(failed("make", &dir))?;
        let hidden = dir.join(format!(".{}.{}", self.id, std::process::id()));
        let written = || -> io::Result<()> {
            let options =
                File::options().write(true).create(true).truncate(true).mode(0o600).clone();
            let mut file = options.open(&hidden)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            std::fs::rename(&hidden, &path)
        };
        written().map_err(|source| {
            let _ = std::fs::remove_file(&hidden);
            failed("write", &path)(source)
        })?;
        File::open(&dir).and_then(|dir| dir.sync_all()).map_err(failed("sync", &dir))
    }

    /// Goes on to another state, durably.
    ///
    /// # Errors
    /// The errors of [`write`](Self::write).
    pub fn enter(&mut self, state: State) -> Result<(), IoError> {
        self.state = state;
        self.write()
    }

    /// Removes the files that were made for the program, which does not come.
    ///
    /// # Errors
    /// One cannot be removed; all others are gone.
    pub fn remove_files(&self) -> Result<(), IoError> {
        placing::remove(&self.id, &self.files)
    }

    /// Removes it, so that it is gone for whoever looks from now on. After a power cut it may be there again.
    ///
    /// # Errors
    /// It is still there.
    pub fn remove(&self) -> Result<(), IoError> {
        let path = self.path();
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(IoError { what: format!("cannot remove {}", path.display()), source: error })
            }
            _ => Ok(()),
        }
    }

    /// Has outputs of the program that were pipes go to these files when it is restored, and to no others.
    ///
    /// # Errors
    /// They were no pipes, or are relayed; or the image cannot be read. The record is as it was.
    pub fn name_outputs(&mut self, outputs: &OutputFiles) -> Result<(), Error> {
        if self.relays {
            return Err(Error::RelayedToo);
        }
        let image = ImageReader::open(self.image.as_deref().unwrap_or(Path::new("")))?;
        let named = outputs.named();
        stdio::check(&image.manifest().processes, named)?;
        self.streams = Relayed::of_coming(None, image.manifest(), named)?;
        self.outputs = noted(outputs);
        Ok(())
    }

    /// Restores the program, which is this side's. The record is gone afterwards; after a failure the program is still
    /// this side's, and the restore can be tried again.
    ///
    /// # Errors
    /// The program was not restored, or that cannot be noted.
    pub fn restore(&mut self, restore: &mut dyn Restore) -> Result<Brought, Error> {
        self.by = own();
        self.enter(State::Restoring)?;
        match restore.run(self) {
            Ok(brought) => {
                if let Err(error) = self.remove() {
                    tracing::error!(%error, "the program runs, and must not be restored once more");
                }
                Ok(brought)
            }
            Err(why) => {
                self.enter(State::Taken)?;
                Err(Error::NotBack { why })
            }
        }
    }

    /// Reads that of a side; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not as this gpucr writes it.
    pub fn read(id: MigrationId, side: Side) -> Result<Option<Self>, IoError> {
        Self::read_from(&path_of(&id.to_string(), side))
    }

    pub(in crate::engine) fn read_from(path: &Path) -> Result<Option<Self>, IoError> {
        let failed = |source| IoError { what: format!("cannot read {}", path.display()), source };
        match careful::read_regular(path, LARGEST) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            read => {
                let record = serde_json::from_slice(&read.map_err(failed)?);
                record.map(Some).map_err(|error| failed(error.into()))
            }
        }
    }

    /// All that there are, in the order of their names. What cannot be read is left out.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn all() -> Result<Vec<Self>, IoError> {
        let dir = directory();
        let entries = match std::fs::read_dir(&dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(IoError::when(format!("cannot read {}", dir.display())))?,
        };
        let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
        paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
        paths.sort_unstable();
        Ok(paths.iter().filter_map(|path| Self::read_from(path).ok().flatten()).collect())
    }

    /// The gpucr that is at work on it, if that is another one than this.
    pub fn at_work(&self) -> Option<u32> {
        let (pid, start) = self.by;
        (self.by != own() && start_of(pid) == Some(start)).then_some(pid)
    }

    /// Those of its processes that there still are.
    pub fn left(&self) -> Vec<u32> {
        let is_same = |pid: u32, start| start_of(pid).is_some_and(|found| found == start);
        self.processes
            .iter()
            .filter(|(pid, start)| is_same(*pid, *start))
            .map(|(pid, _)| *pid)
            .collect()
    }

    /// Notes the processes of a program.
    pub(super) fn note<'a>(&mut self, processes: impl Iterator<Item = &'a ProcessInfo>) {
        self.processes = processes.filter_map(|p| Some((p.pid, start_of(p.pid)?))).collect();
    }
}

/// What is noted of these files: a descriptor is one of this process alone.
pub(super) fn noted(outputs: &OutputFiles) -> OutputFiles {
    let of_process = ["/dev/fd", "/dev/stdin", "/dev/stdout", "/dev/stderr", "/proc"];
    let lasts = |path: &PathBuf| !of_process.iter().any(|place| path.starts_with(place));
    let noted = |path: &Option<PathBuf>| path.clone().filter(lasts);
    OutputFiles { stdout: noted(&outputs.stdout), stderr: noted(&outputs.stderr) }
}

/// This process.
fn own() -> (u32, u64) {
    let pid = std::process::id();
    (pid, start_of(pid).unwrap_or_default())
}

/// When the process was started, in ticks since the host was; `None` if it has ended.
fn start_of(pid: u32) -> Option<u64> {
    let stat = procfs::process::Process::new(pid as i32).and_then(|process| process.stat()).ok()?;
    (!matches!(stat.state, 'Z' | 'X')).then_some(stat.starttime)
}

fn path_of(id: &str, side: Side) -> PathBuf {
    let side = match side {
        Side::Source => "source",
        Side::Destination => "destination",
    };
    directory().join(format!("{id}.{side}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_shown() {
        let id = MigrationId::random().unwrap();
        assert_eq!(id.to_string().parse(), Ok(id));
        for text in ["", "00", &"g".repeat(32), "../../../../../../../../../../../etc"] {
            assert!(text.parse::<MigrationId>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_noted_of_files_means_the_same_to_another_process() {
        let outputs = |stdout: &str, stderr: &str| OutputFiles {
            stdout: Some(stdout.into()),
            stderr: Some(stderr.into()),
        };
        let lasting = outputs("/var/log/train", "/dev/null");
        assert_eq!(noted(&lasting), lasting);
        assert!(noted(&outputs("/dev/fd/3", "/proc/self/fd/4")).is_empty());
        assert!(noted(&outputs("/dev/stdout", "/dev/stderr")).is_empty());
    }

    #[test]
    fn a_record_says_what_it_did_and_knows_its_processes() {
        if !rustix::process::geteuid().is_root() {
            return crate::skip::skip("the directory of the records is root's");
        }
        let id = MigrationId::random().unwrap();
        let mut record = Record::new(id, Side::Source, State::Undecided);
        let own = ProcessInfo::read(std::process::id()).unwrap();
        record.note([&own].into_iter());
        record.processes.push((std::process::id(), 1));
        record.write().unwrap();
        assert_eq!(Record::read(id, Side::Source).unwrap(), Some(record.clone()));
        assert_eq!(Record::read(id, Side::Destination).unwrap(), None);
        record.enter(State::HandedOver).unwrap();
        let read = Record::read(id, Side::Source).unwrap().unwrap();
        assert_eq!((read.state, read.left()), (State::HandedOver, vec![std::process::id()]));
        assert!(Record::all().unwrap().contains(&record));
        assert_eq!(read.at_work(), None, "it is this very process");
        assert_eq!(Record { by: (1, start_of(1).unwrap()), ..read }.at_work(), Some(1));
        record.remove().unwrap();
        record.remove().unwrap();
        assert_eq!(Record::read(id, Side::Source).unwrap(), None);
    }
}
