//! What can go wrong in a dump or a restore, and what holds afterwards.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

use crate::base::faults::Injected;
use crate::base::io_error::IoError;
use crate::base::limits::TooFewDescriptors;
use crate::base::phase::Phase;
use crate::cuda::TransferError;
use crate::cuda::driver::{DriverError, OpenError};
use crate::engine::device_state::StateError;
use crate::engine::extract::error::ExtractError;
use crate::engine::migrate::link::LinkError;
use crate::host::container::ContainerError;
use crate::host::criu::CriuError;
use crate::host::namespace::EntryError;
use crate::host::network::NetworkError;
use crate::host::process::{AgentError, TreeError};
use crate::image::ImageError;
use crate::image::library::LibraryError;
use crate::image::transfer::TarError;
use crate::image::trust::TrustError;
use crate::store::StoreError;

/// What happened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say what each field is
pub enum Error {
    #[error(transparent)]
    Tree(#[from] TreeError),
    #[error(transparent)]
    Agent(AgentError),
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Criu(CriuError),
    #[error(transparent)]
    Image(ImageError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Trust(#[from] TrustError),
    #[error("process {pid}: {source}")]
    Process { pid: u32, source: StateError },
    #[error("{what}: {source}")]
    Io { what: String, source: io::Error },
    #[error("checkpoint and restore need root")]
    NotRoot,
    #[error("process {pid} uses the driver library {path}, which is not one of this host's")]
    StrangeDriver { pid: u32, path: PathBuf },
    #[error("process {pid} runs under gpucr but has no driver library mapped")]
    NoDriverMapped { pid: u32 },
    #[error("this host has no driver library {0}")]
    NoDriver(String),
    #[error(transparent)]
    Library(LibraryError),
    #[error("this gpucr is itself a descendant of process {pid}")]
    OwnTree { pid: u32 },
    #[error("neither process {pid} nor any of its descendants uses CUDA")]
    NoCuda { pid: u32 },
    #[error("neither process {pid} nor a descendant of it runs under gpucr and uses CUDA")]
    NoAgent { pid: u32 },
    #[error("process {pid} uses {what}, which the driver cannot checkpoint")]
    Unsupported { pid: u32, what: String },
    #[error("process {pid} has a TCP connection from {local} to {remote}, outside of the program")]
    Connected { pid: u32, local: SocketAddr, remote: SocketAddr },
    #[error("process {pid} shares device memory with {with}")]
    SharedOutside { pid: u32, with: String },
    #[error("process {pid} cannot be stopped for a dump: {what}")]
    Ungated { pid: u32, what: String },
    #[error("process {pid} is detached from its memory by a dump that has ended")]
    Detached { pid: u32 },
    #[error(
        "{count} processes use CUDA in the tree of process {pid}, but only one can be checked at a time"
    )]
    SeveralProcesses { pid: u32, count: usize },
    #[error("gpucr cannot look at the device memory of process {pid}")]
    NotObserved { pid: u32 },
    #[error("another gpucr is at work on process {pid}")]
    Busy { pid: u32 },
    #[error("process {pid} is suspended")]
    Suspended { pid: u32 },
    #[error("the main thread of process {pid} has ended, but other threads have not")]
    Headless { pid: u32 },
    #[error(
        "process {pid} is process {inner} of a container that has users of its own, or mounts that another user may make"
    )]
    OtherPidNamespace { pid: u32, inner: u32 },
    #[error("process {pid} belongs to a session whose leader is outside of its pid namespace")]
    OuterSession { pid: u32 },
    #[error("process {pid}: its CUDA state is {state:?}, not running")]
    NotRunning { pid: u32, state: crate::cuda::ProcessState },
    #[error("process {pid} changed while it was being dumped: {what}")]
    Changed { pid: u32, what: String },
    #[error("process {pid} uses the device {device}, which is not on this host")]
    NoDevice { pid: u32, device: String },
    #[error("the compute mode of the device {device} does not allow several processes at once")]
    NotShared { device: String },
    #[error("there is no such device: {what}")]
    NoSuchDevice { what: String },
    #[error("the device {device} is named twice, or would have to replace two")]
    DeviceTwice { device: String },
    #[error("a program on {old} cannot continue on {new}")]
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
    #[error(
        "process {pid} ended before it was certain that all of its memory had been loaded in time"
    )]
    EndedAwaiting { pid: u32 },
    #[error(
        "a process changed its mappings while its memory was being loaded, in a way that gpucr cannot follow"
    )]
    MovedAwaiting,
    #[error(transparent)]
    OpenFiles(#[from] TooFewDescriptors),
    #[error("{path}, which the program had open or mapped, does not exist")]
    FileMissing { path: PathBuf },
    #[error("{path} has {found} bytes now and had {expected} when the program was dumped")]
    FileChanged { path: PathBuf, found: u64, expected: u64 },
    #[error(
        "{path} has changed since the program was dumped, and the image has no complete copy of it"
    )]
    FileAltered { path: PathBuf },
    #[error(
        "{path}, which the program has open, does not exist there and may not be created: --files-below DIR \
        permits it below DIR (an option of `gpucr receive`, and with ssh of `gpucr migrate`)"
    )]
    FileNotPermitted { path: PathBuf },
    #[error(
        "{path} exists there with {found} bytes, and is not the file that the program has open"
    )]
    FileInPlace { path: PathBuf, found: u64 },
    #[error("the program's {stream} was not a pipe but {now}")]
    NoPipe { stream: &'static str, now: String },
    #[error("process {pid} is in a user namespace of its own, in which CRIU can restore nothing")]
    OtherUsers { pid: u32 },
    #[error(
        "process {pid} is another user's, and this gpucr lacks CAP_SYS_RESOURCE, which CRIU needs for that"
    )]
    OtherUser { pid: u32 },
    #[error(
        "process {pid} is in another network namespace than process {root}, the root of the program"
    )]
    OtherNetwork { pid: u32, root: u32 },
    #[error(
        "process {pid} is in another {kind} namespace than process {root}, the root of the program"
    )]
    OtherNamespace { pid: u32, root: u32, kind: &'static str },
    #[error(
        "process {pid} has other mounts than process {root}, the root of the program, which is in a container"
    )]
    OtherMounts { pid: u32, root: u32 },
    #[error("process {pid} is the first process of a container, which no restore can make")]
    FirstOfContainer { pid: u32 },
    #[error("process {pid} is in a container, and cannot be migrated from outside of it")]
    ContainerStays { pid: u32 },
    #[error("the program was in a container, and needs a root directory")]
    NoRoot,
    #[error("the program was in no container, and cannot be given a root directory")]
    NoContainer,
    #[error(transparent)]
    Container(#[from] ContainerError),
    #[error(transparent)]
    Entry(#[from] EntryError),
    #[error(transparent)]
    Network(#[from] NetworkError),
    #[error("the loopback device of the network namespace is down, and CRIU cannot do without it")]
    NoLoopback { of: Option<u32> },
    #[error("process {pid} has its controlling terminal open as /dev/tty, which CRIU cannot save")]
    UnnamedTerminal { pid: u32 },
    #[error("process {pid} has {what}")]
    Held { pid: u32, what: String, options: &'static [&'static str] },
    #[error("the image needs {needed}, but this host has {found}")]
    OtherDriver { needed: String, found: String },
    #[error("the program has loaded {path}, which is not a shim that `gpucr run` put in place")]
    StrangeShim { path: PathBuf },
    #[error("the image is damaged: {what}")]
    Damaged { what: String },
    #[error(transparent)]
    Extract(#[from] ExtractError),
    #[error(transparent)]
    Tar(TarError),
    #[error("the copying of device memory stopped early")]
    CopyIncomplete,
    #[error("the copy of {what} differs from what the device has")]
    WrongCopy { what: String },
    #[error("{chunks} chunks of device memory were written before they were saved")]
    Misspeculated { chunks: usize },
    #[error(
        "calls of the program waited for {seconds} s while none of its memory could be stored; they were let through"
    )]
    Stalled { seconds: u64 },
    #[error("the program ended while it was being dumped")]
    ProgramEnded,
    #[error("the program could not be brought back to running: {0}")]
    NotResumed(String),
    #[error("the image takes {} MiB of memory, and {} {} MiB", needed.div_ceil(1 << 20),
        if *asked { "the limit is" } else { "there is room for no more than" }, allowed >> 20)]
    NoMemory { needed: u64, allowed: u64, asked: bool },
    #[error("the program takes at least {} MiB of the host's memory, and there is room for {} MiB",
        needed.div_ceil(1 << 20), allowed >> 20)]
    NoRoom { needed: u64, allowed: u64 },
    #[error("the program's image takes up to {} MiB, and {} MiB are free in {} (`gpucr migrate --tight-disk` goes on \
        all the same)", needed.div_ceil(1 << 20), free >> 20, place.display())]
    DiskFull { place: PathBuf, needed: u64, free: u64 },
    #[error("the program has {} MiB of memory on {device}, and {} MiB are free there", needed.div_ceil(1 << 20), free >> 20)]
    DeviceFull { device: String, needed: u64, free: u64 },
    #[error("{what}; it belongs to {owners}")]
    DamagedPart { what: String, owners: String },
    #[error("another gpucr is currently making {} warm", image.display())]
    BeingWarmed { image: PathBuf },
    #[error("{} is not kept warm", image.display())]
    NotWarm { image: PathBuf },
    #[error("process {pid}, which holds a warm image, does not answer: {source}")]
    Holder { pid: u32, source: io::Error },
    #[error("process {pid} keeps the image {} warm for another version of gpucr", &id[..16])]
    OtherHolder { pid: u32, id: String },
    #[error("process {pid} of user {uid} claims to hold the image {} warm", &id[..16])]
    StrangeHolder { pid: u32, uid: u32, id: String },
    #[error(
        "the program is dumped with CRIU {needed} and needs that or a newer one, but this host has {found}"
    )]
    OlderCriu { needed: String, found: String },
    #[error(transparent)]
    Link(LinkError),
    #[error("the program cannot continue at the destination: {}", reasons.join("; "))]
    Refused { reasons: Vec<String> },
    #[error("the other side has failed: {why}")]
    OtherSide { why: String },
    #[error("the program was not restored: {why}")]
    NotBack { why: String },
    #[error("the program's standard streams cannot be relayed: {why}")]
    NotRelayed { why: String },
    #[error(
        "the program's standard streams are relayed (--relay), and so cannot go to files (--stdout, --stderr)"
    )]
    RelayedToo,
    #[error(
        "the program has a terminal and is in the session of a shell, which is not there in a pid namespace of its own \
        (--new-pids): leave that out, or start the program with setsid or without a terminal"
    )]
    TerminalLost,
    #[error("the source gave up the migration: {why}")]
    GivenUp { why: String },
    #[error(
        "the program writes too fast: sending the remainder of its memory ({left} bytes) would take {seconds:.1} \
        s, and it must not be stopped for more than {most} s for that"
    )]
    TooFast { left: u64, seconds: f64, most: f64 },
    #[error("the program must not be started: {why}")]
    MayNotRun { why: String },
    #[error("interrupted")]
    Interrupted,
    #[error("the watchdog, which guards the program, did not start or has died: {0}")]
    Watchdog(io::Error),
    #[error("the command to run before the program is stopped or goes on failed: {command}: {how}")]
    Hook { command: String, how: String },
    #[error(transparent)]
    Injected(#[from] Injected),
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

impl From<IoError> for Error {
    fn from(IoError { what, source }: IoError) -> Self {
        Self::Io { what, source }
    }
}

impl From<LinkError> for Error {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Interrupted => Self::Interrupted,
            LinkError::Refused(why) => Self::OtherSide { why },
            LinkError::GivenUp(why) => Self::GivenUp { why },
            error => Self::Link(error),
        }
    }
}

impl From<LibraryError> for Error {
    fn from(error: LibraryError) -> Self {
        match error {
            LibraryError::Io(error) => error.into(),
            error => Self::Library(error),
        }
    }
}

impl From<TarError> for Error {
    fn from(error: TarError) -> Self {
        match error {
            TarError::Image(error) => error.into(),
            TarError::Store(error) => Self::Store(error),
            TarError::Trust(error) => Self::Trust(error),
            TarError::Io(error) => error.into(),
            TarError::Interrupted => Self::Interrupted,
            error => Self::Tar(error),
        }
    }
}

impl From<AgentError> for Error {
    fn from(error: AgentError) -> Self {
        match error {
            AgentError::Interrupted => Self::Interrupted,
            error => Self::Agent(error),
        }
    }
}

impl Error {
    /// Why the host memory of processes cannot be brought in. An error of the store is in `source` if it comes from there.
    pub(super) fn of_memory(source: io::Error) -> Self {
        match source.downcast::<StoreError>() {
            Ok(error) => error.into(),
            Err(source) => Self::Criu(CriuError::Memory { source }),
        }
    }
}

impl From<CriuError> for Error {
    fn from(error: CriuError) -> Self {
        match error {
            CriuError::Interrupted => Self::Interrupted,
            CriuError::Memory { source } => Self::of_memory(source),
            CriuError::Untold => Self::MovedAwaiting,
            error => Self::Criu(error),
        }
    }
}

impl From<ImageError> for Error {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Store(StoreError::Interrupted) => Self::Interrupted,
            ImageError::Trust(error) => Self::Trust(error),
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
            | Self::Library(LibraryError::Missing { .. })
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
    /// The image is as it was and the program was ended, but its host side had begun to run: files
    /// that it writes may have changed.
    NotRestoredButRan,
    /// The program could not be brought back to running; what went wrong, by process.
    Lost(Vec<String>),
}

/// A dump or restore that failed.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// The phase in which it failed.
    pub phase: Phase,
    /// What happened.
    #[source]
    pub error: Box<Error>,
    /// What holds now.
    pub left: Left,
}
