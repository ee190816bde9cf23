//! One dump of the program, by a `gpucr dump` of its own: whatever becomes of that, this process goes on.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal};
use serde_json::Value;

use super::args::How;
use super::events::EventPipe;
use crate::commands::note_folded;
use crate::{display, stores};

/// How long a dump may go on when its program has ended, or gpucr was asked to end.
const LAST: Duration = Duration::from_secs(20);
/// How long it may take to end when it was asked to.
const ENDING: Duration = Duration::from_secs(10);
/// How often it is looked.
const POLL: Duration = Duration::from_millis(20);

/// What a dump is of, and where its image goes.
pub(super) struct Wanted<'w> {
    pub(super) pid: u32,
    pub(super) store: &'w Path,
    /// The name of the image; none for one that is made up.
    pub(super) name: Option<&'w str>,
    pub(super) how: How,
    pub(super) args: &'w [OsString],
}

/// A dump under way.
pub(super) struct Dumping {
    child: Child,
    store: PathBuf,
    said: File,
    errors: File,
    was_asked_to_end: bool,
}

/// What came of it.
pub(super) enum Dumped {
    /// The image.
    Image(PathBuf),
    /// There is none, and why, for people.
    Failed(String),
}

impl Dumping {
    /// Starts it. What it says meanwhile can be listened to.
    ///
    /// # Errors
    /// It cannot be started.
    pub(super) fn start(wanted: &Wanted<'_>) -> io::Result<(Self, EventPipe)> {
        // What it says is read when it has ended, however much that is.
        let file = |name| rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).map(File::from);
        let (said, errors) = (file("said")?, file("errors")?);
        let mut command = Command::new("/proc/self/exe");
        command.args(["dump", "--json", "--pid", &wanted.pid.to_string()]);
        command.arg("--store").arg(wanted.store).args(wanted.args);
        if let Some(name) = wanted.name {
            command.args(["--name", name]);
        }
        command.args(match wanted.how {
            How::Now => &["--leave-running"][..],
            How::Sync => &["--leave-running", "--at-sync"],
            How::End => &[],
        });
        command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(errors.try_clone()?);
        let (events, theirs) = EventPipe::of(&mut command)?;
        let (child, store) = (command.spawn()?, wanted.store.to_owned());
        drop(theirs);
        Ok((Self { child, store, said, errors, was_asked_to_end: false }, events))
    }

    /// The process that makes it.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What came of it, if it is over.
    pub(super) fn end(&mut self) -> Option<Dumped> {
        match self.child.try_wait() {
            Ok(None) => None,
            Ok(Some(status)) => Some(self.came_to(status)),
            Err(error) => Some(Dumped::Failed(format!("it cannot be waited for: {error}"))),
        }
    }

    /// Asks it to end, once: it takes back what it has done, and the program runs on.
    pub(super) fn ask_to_end(&mut self) {
        if !std::mem::replace(&mut self.was_asked_to_end, true)
            && let Some(pid) = Pid::from_raw(self.child.id() as i32)
        {
            // It was not waited for, so the pid is its own.
            let _ = rustix::process::kill_process(pid, Signal::TERM);
        }
    }

    /// Waits for its end, which comes soon since its program has ended.
    pub(super) fn wait(&mut self) -> Dumped {
        let begin = Instant::now();
        loop {
            if let Some(dumped) = self.end() {
                return dumped;
            }
            if begin.elapsed() > LAST {
                self.ask_to_end();
            }
            if begin.elapsed() > LAST + ENDING {
                // Its watchdog settles the rest.
                let _ = self.child.kill();
            }
            std::thread::sleep(POLL);
        }
    }

    fn came_to(&mut self, status: ExitStatus) -> Dumped {
        let report = read(&mut self.said).ok();
        let report = report.and_then(|said| serde_json::from_slice::<Value>(&said).ok());
        let image = report.as_ref().and_then(|report| report["image"].as_str());
        let name = image.and_then(|image| Path::new(image).file_name());
        match (status.success(), name) {
            (true, Some(name)) => {
                if let Some(report) = &report {
                    self.tell(report);
                }
                Dumped::Image(stores::in_store(&self.store, name))
            }
            _ => Dumped::Failed(match read(&mut self.errors) {
                Ok(words) if !words.is_empty() => String::from_utf8_lossy(&words).into_owned(),
                _ => format!("it ended with {status}"),
            }),
        }
    }

    /// For who waits at a terminal.
    fn tell(&self, report: &Value) {
        if std::io::IsTerminal::is_terminal(&std::io::stderr()) {
            let ms = |name: &str| display::time(report[name].as_f64().unwrap_or_default());
            let (image, stopped) = (report["image"].as_str().unwrap_or_default(), ms("stopped_ms"));
            note_folded!(
                "gpucr: {image}: the program was stopped for {stopped}, {} in all",
                ms("total_ms")
            );
        }
    }
}

/// All that was written to a file.
fn read(file: &mut File) -> io::Result<Vec<u8>> {
    /// More is no report and no error of gpucr's.
    const MOST: u64 = 64 << 20;
    let mut bytes = Vec::new();
    file.rewind()?;
    file.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}
