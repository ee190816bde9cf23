//! What can go wrong in a dump or a restore, and what holds afterwards.

use std::io;
use std::path::PathBuf;

use crate::criu::CriuError;
use crate::device::TransferError;
use crate::device::driver::{DriverError, OpenError};
use crate::image::ImageError;
use crate::process::{AgentError, TreeError};
use crate::store::StoreError;

/// What happened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum Error {
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Criu(#[from] CriuError),
    #[error(transparent)]
    Image(ImageError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("process {pid}: {source}")]
    Process { pid: u32, source: DriverError },
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("checkpoint and restore need root")]
    NotRoot,
    #[error("no driver library {0} is on this host")]
    NoDriver(String),
    #[error("{name}, which belongs to gpucr, is not beside it")]
    NoLibrary { name: String },
    #[error("this gpucr is itself a descendant of process {pid}")]
    OwnTree { pid: u32 },
    #[error("process {pid} and its {others} descendants use no CUDA")]
    NoCuda { pid: u32, others: usize },
    #[error("neither process {pid} nor a descendant of it runs under gpucr and uses CUDA")]
    NoAgent { pid: u32 },
    #[error("process {pid} uses {what}, which the driver cannot checkpoint")]
    Unsupported { pid: u32, what: String },
    #[error("process {pid} is detached from its memory by a dump that has ended")]
    Detached { pid: u32 },
    #[error(
        "{count} processes use CUDA in the tree of process {pid}, and one at a time can be checked"
    )]
    SeveralProcesses { pid: u32, count: usize },
    #[error("gpucr cannot look at the device memory of process {pid}")]
    NotObserved { pid: u32 },
    #[error("another gpucr is at work on process {pid}")]
    Busy { pid: u32 },
    #[error("process {pid} is suspended")]
    Suspended { pid: u32 },
    #[error("process {pid} lives in another pid namespace")]
    OtherPidNamespace { pid: u32 },
    #[error("process {pid} belongs to a session whose leader is outside of its pid namespace")]
    OuterSession { pid: u32 },
    #[error("process {pid}: its CUDA side is {state:?}, not running")]
    NotRunning { pid: u32, state: crate::device::ProcessState },
    #[error("process {pid} changed while it was being dumped: {what}")]
    Changed { pid: u32, what: String },
    #[error("process {pid} uses the device {device}, which is not on this host")]
    NoDevice { pid: u32, device: String },
    #[error("the device {device} is not for several processes at once (its compute mode)")]
    NotShared { device: String },
    #[error("there is no such device: {what}")]
    NoSuchDevice { what: String },
    #[error("the device {device} is named twice, or has to take the place of two")]
    DeviceTwice { device: String },
    #[error("a program on {old} cannot go on on {new}")]
    OtherDevice { old: String, new: String },
    #[error("pid {pid}, which the program or a thread of it had, is in use on this host: {by}")]
    PidInUse { pid: u32, by: String },
    #[error(
        "process {pid} touched device memory that had not been loaded yet (driver error {code})"
    )]
    Missed { pid: u32, code: i32 },
    #[error(
        "process {pid} wrote device memory that it shares with other instances (driver error {code})"
    )]
    WroteShared { pid: u32, code: i32 },
    #[error("process {pid} ended before it was certain that all of its memory had come in time")]
    EndedAwaiting { pid: u32 },
    #[error("{path}, which the program had open or mapped, is not there")]
    FileMissing { path: PathBuf },
    #[error("{path} has {found} bytes now and had {expected} when the program was dumped")]
    FileChanged { path: PathBuf, found: u64, expected: u64 },
    #[error("the image needs {needed}, and this host has {found}")]
    OtherDriver { needed: String, found: String },
    #[error("the image would put a file at {path}, which is no place for one of gpucr's libraries")]
    Misplaced { path: PathBuf },
    #[error("process runs behind {path}, which is not a shim as `gpucr run` puts it in place")]
    StrangeShim { path: PathBuf },
    #[error("the image is damaged: {what}")]
    Damaged { what: String },
    #[error("this is no tar of an image: {what}")]
    BadTar { what: String },
    #[error("{path} exists")]
    Exists { path: PathBuf },
    #[error("the copying of device memory stopped early")]
    CopyIncomplete,
    #[error("{what} was copied with other bytes than the device has")]
    WrongCopy { what: String },
    #[error("{chunks} chunks of device memory were written before they were saved")]
    Misspeculated { chunks: usize },
    #[error("the program ended while it was being dumped")]
    ProgramEnded,
    #[error("the program did not come back to running: {0}")]
    NotResumed(String),
    #[error("the image takes {} MiB of memory, and {} {} MiB", needed.div_ceil(1 << 20),
        if *asked { "the limit is" } else { "this host can do without no more than" }, allowed >> 20)]
    NoMemory { needed: u64, allowed: u64, asked: bool },
    #[error("{what}; it belongs to {owners}")]
    DamagedPart { what: String, owners: String },
    #[error("another gpucr is just making {} warm", image.display())]
    BeingWarmed { image: PathBuf },
    #[error("{} is not kept warm", image.display())]
    NotWarm { image: PathBuf },
    #[error("process {pid}, which holds a warm image, does not answer: {source}")]
    Holder { pid: u32, source: io::Error },
    #[error("process {pid} of user {uid} claims to hold the image {} warm", &id[..16])]
    StrangeHolder { pid: u32, uid: u32, id: String },
    #[error("interrupted")]
    Interrupted,
    #[error("the keeper, which guards the program, did not start or has died: {0}")]
    Keeper(io::Error),
    #[error("the command to run before the program goes on failed: {command}: {how}")]
    Hook { command: String, how: String },
    #[error("fault {0} was asked for")]
    Injected(String),
}

impl From<TransferError<StoreError>> for Error {
    fn from(error: TransferError<StoreError>) -> Self {
        match error {
            TransferError::Driver(error) => Self::Driver(error),
            TransferError::Chunk(error) => Self::Store(error),
            TransferError::Altered => Self::WrongCopy { what: "a chunk".into() },
        }
    }
}

impl From<ImageError> for Error {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Store(StoreError::Interrupted) => Self::Interrupted,
            error => Self::Image(error),
        }
    }
}

impl Error {
    /// Whether the host lacks what every dump or restore of this kind needs (exit code 3).
    pub fn is_of_host(&self) -> bool {
        match self {
            Self::NotRoot
            | Self::NoDriver(_)
            | Self::NoLibrary { .. }
            | Self::Open(_)
            | Self::OtherDriver { .. } => true,
            Self::NoDevice { .. } => true,
            Self::Criu(error) => error.is_of_host(),
            _ => false,
        }
    }
}

/// What holds after a failure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Left {
    /// Nothing was changed.
    Untouched,
    /// The program runs on as if nothing had been asked; there is no image.
    RolledBack,
    /// The program ended by itself meanwhile; there is no image.
    Ended,
    /// The image is complete, but the program could not be brought back to running; what went
    /// wrong, by process.
    CompleteButLost(Vec<String>),
    /// The image is as it was; whatever had been restored of the program was ended again, before
    /// any of it had run.
    NotRestored,
    /// The same, but the program's host side had begun to run: files that it writes may have
    /// changed.
    NotRestoredButRan,
    /// The program could not be brought back to running; what went wrong, by process.
    Lost(Vec<String>),
}

/// A dump or restore that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// The phase in which it failed.
    pub phase: &'static str,
    /// What happened.
    #[source]
    pub error: Box<Error>,
    /// What holds now.
    pub left: Left,
}
