//! What a restore is asked to do.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::base::file_tree::FileTree;
use crate::engine::error::Error;
use crate::engine::sharing::Holder;
use crate::host::network::NetworkNamespace;
use crate::image::trust::Trust;

use super::at_hand::AtHand;
use super::devices::MappedDevice;
use super::files::FilePolicy;
use super::given::Given;
use super::source::Source;
use super::stdio::Outputs;

/// What to restore, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The image.
    pub image: PathBuf,
    /// Which images are restored.
    pub trust: Trust,
    /// What was found on this host before.
    pub at_hand: Arc<AtHand>,
    /// Take it from memory, if `gpucr warm` keeps it there.
    pub warm: bool,
    /// The program does not become a child of this process, and gets none of its streams.
    pub detach: bool,
    /// A shell command that is run when the processes are there and their memory is loaded, before any of
    /// them runs. If it fails the restore does.
    pub before_resume: Option<OsString>,
    /// Is asked after that whether the program may run, and may take its time. Nothing of it has run if it may not.
    pub may_run: Option<MayRun>,
    /// Devices that others of this host take the place of.
    pub device_map: Vec<MappedDevice>,
    /// Where the program gets its network; `None` for gpucr's own namespace.
    pub network: Option<NetworkNamespace>,
    /// Where a program that was in a container gets its files; `None` for this process's own root directory. This process
    /// must have mounts of its own then, which nobody else sees.
    pub root: Option<FileTree>,
    /// Where the program's output goes, if it went to pipes.
    pub outputs: Outputs,
    /// What is done about files that are not as they were at the dump.
    pub files: FilePolicy,
    /// The program goes on before its memory is there, and gets it when it asks for it.
    pub on_demand: bool,
    /// The program shares device memory that it does not write with other instances of the image: who is to
    /// hold it if this is the first. Only of a program that is not detached, and not on demand.
    pub share: Option<Holder>,
    /// All of its device memory, which was loaded for this restore. What is shared, or comes on demand, does without.
    pub given: Option<Given>,
    /// Is told the pid of the program's root when the program is about to go on; and nothing if it is ended
    /// again, which can only be on demand or if it shares memory, before it is restored once more.
    pub goes_on: Option<GoesOn>,
    /// Set by a signal handler to end the restore. Once the program goes on, that says that it was asked to
    /// end itself.
    pub stop: Arc<AtomicBool>,
}

/// See [`Options::may_run`]. It is given the flag that ends the restore.
#[derive(Clone)]
pub struct MayRun(pub Arc<Ask>);

/// What is asked, and says why the program may not run.
type Ask = dyn Fn(&AtomicBool) -> Result<(), String> + Send + Sync;

impl std::fmt::Debug for MayRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MayRun")
    }
}

/// See [`Options::goes_on`].
#[derive(Clone)]
pub struct GoesOn(pub Arc<dyn Fn(Option<u32>) + Send + Sync>);

impl std::fmt::Debug for GoesOn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GoesOn")
    }
}

impl Options {
    /// Bytes of the image's device memory that were taken already: all of it may be there where it is shared.
    pub(super) fn device_memory_there(&self, image: &Source) -> u64 {
        let blocks = image.manifest().blocks().len();
        let is_given = self.given.as_ref().is_some_and(|given| given.is_of(&image.id(), blocks));
        if is_given || self.share.is_some() { u64::MAX } else { 0 }
    }

    /// Where the paths of the program's files are.
    pub(super) fn tree(&self) -> FileTree {
        self.root.clone().unwrap_or_default()
    }

    /// Whether the program may run, which is waited for.
    pub(super) fn may_they_run(&self) -> Result<(), Error> {
        let Some(MayRun(may_run)) = &self.may_run else { return Ok(()) };
        match may_run(&self.stop) {
            Err(_) if self.stop.load(Ordering::Relaxed) => Err(Error::Interrupted),
            answer => answer.map_err(|why| Error::MayNotRun { why }),
        }
    }

    pub(super) fn tell(&self, pid: Option<u32>) {
        if let Some(GoesOn(tell)) = &self.goes_on {
            tell(pid);
        }
    }
}
