//! From an error of the library to what the user reads: what happened, what state things are in,
//! what to do; and the exit code.

use std::io::Write;
use std::process::ExitCode;

use gpucr_core::criu::{CriuError, Hint};
use gpucr_core::cuda::driver::code;
use gpucr_core::image::ImageError;
use gpucr_core::library::LibraryError;
use gpucr_core::limits::TooFewDescriptors;
use gpucr_core::process::{AgentError, TreeError};
use gpucr_core::store::StoreError;
use gpucr_core::transfer::TarError;
use gpucr_core::trust::TrustError;
use gpucr_core::{Error, Failure, Left};

use crate::say;

/// Failed; the program runs on, or the image is as it was.
pub(crate) const FAILED: u8 = 1;
/// Wrong usage.
pub(crate) const USAGE: u8 = 2;
/// This host cannot do it.
pub(crate) const HOST: u8 = 3;

/// An error as the user sees it.
#[derive(Debug)]
pub(crate) struct CliError {
    /// What happened.
    message: String,
    /// In which state things are.
    state: Option<String>,
    /// What to do.
    help: Option<String>,
    code: u8,
}

impl CliError {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Self {
        Self { message: message.into(), state: None, help: None, code }
    }

    pub(crate) fn state(mut self, state: impl Into<String>) -> Self {
        self.state = Some(state.into());
        self
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)?;
        match &self.state {
            Some(state) => write!(f, "\n{state}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for CliError {}

impl miette::Diagnostic for CliError {
    fn help<'a>(&'a self) -> Option<Box<dyn std::fmt::Display + 'a>> {
        self.help.as_ref().map(|help| Box::new(help) as Box<dyn std::fmt::Display>)
    }
}

impl From<Error> for CliError {
    fn from(error: Error) -> Self {
        let code = if error.is_of_host() { HOST } else { FAILED };
        Self { message: error.to_string(), state: None, help: help(&error), code }
    }
}

/// Those of a part of the checkpointer, as the whole of it would say them.
macro_rules! of_parts {
    ($($part:ty),*) => {
        $(impl From<$part> for CliError {
            fn from(error: $part) -> Self {
                Error::from(error).into()
            }
        })*
    };
}
of_parts!(ImageError, LibraryError, TarError);

impl From<Failure> for CliError {
    fn from(failure: Failure) -> Self {
        let state = match failure.left {
            Left::Untouched => "Nothing was changed.".to_owned(),
            Left::RolledBack => format!(
                "The dump was rolled back in phase {}: the program runs on, and there is no image.",
                failure.phase
            ),
            Left::Ended => "The program has ended by itself, and there is no image.".to_owned(),
            Left::NotRestored => format!(
                "The restore failed in phase {}; what it had made was ended before any of it ran. \
                 The image is as it was.",
                failure.phase
            ),
            Left::NotRestoredButRan => format!(
                "The restore failed in phase {}; what it had made was ended again. The image is \
                 as it was, but the program's host side had begun to run, and files that it \
                 writes may have changed.",
                failure.phase
            ),
            Left::CompleteButLost(ref processes) => format!(
                "The image is complete. The program was not brought back to running: {}. The \
                 keeper holds its memory and goes on trying.",
                processes.join("; ")
            ),
            Left::Lost(ref processes) => format!(
                "There is no image, and the program was not brought back to running: {}. The \
                 keeper holds its memory and goes on trying.",
                processes.join("; ")
            ),
        };
        Self { state: Some(state), ..Self::from(*failure.error) }
    }
}

/// What to do about an error, where something can be said.
fn help(error: &Error) -> Option<String> {
    let text = match error {
        Error::NotRoot => "run it as root, for example with sudo",
        Error::NoCuda { .. } => {
            "a program shows up once it has called cuInit; `criu dump` alone serves programs \
             without CUDA"
        }
        Error::NoAgent { .. } => {
            "start the program with `gpucr run`; it shows up once it has called cuInit (see gpucr ps)"
        }
        Error::Busy { .. } | Error::Detached { .. } => {
            "try again when the other gpucr, or the keeper that it left behind, has ended"
        }
        Error::Hook { .. } => "gpucr has started it with /bin/sh -c; what it said is above",
        Error::NotObserved { .. } => {
            "it needs a context of its own on the device, which takes some memory there, and a compute \
             mode that admits more than one process"
        }
        Error::SeveralProcesses { .. } => "name one of them: `gpucr ps` lists them",
        Error::Suspended { pid } => return Some(format!("let it run first: kill -CONT {pid}")),
        Error::Headless { .. } => {
            "CRIU cannot save it; let the main thread wait for the others instead (pthread_join)"
        }
        Error::OtherPidNamespace { .. } => "run gpucr inside that namespace, with its own /proc",
        Error::OuterSession { .. } => {
            "CRIU cannot save it; start the program in a session of its own: setsid gpucr run -- …"
        }
        Error::Changed { .. } => "try again",
        Error::OwnTree { .. } => "dump the program itself, not the shell or job that runs gpucr",
        Error::Tree(TreeError::NoProcess(_)) => "`gpucr ps` lists the programs under gpucr",
        Error::Agent(AgentError::Version { .. }) => {
            "use the gpucr of the version that the program was started with"
        }
        Error::Agent(AgentError::Broken { .. }) => {
            "another gpucr may be at work on the program; try again when it has ended"
        }
        Error::Agent(AgentError::Failed { code: code::OUT_OF_MEMORY, .. }) => {
            "free memory of the device (nvidia-smi lists who has it), or use one with more"
        }
        Error::Agent(AgentError::Failed { .. }) => {
            "a program that computes for long in one kernel needs a longer --timeout"
        }
        Error::Unsupported { .. } => {
            "free these before the dump; gpucr(1) lists what the driver cannot checkpoint"
        }
        Error::Ungated { .. } => {
            "the program runs on; a newer gpucr may know the function, and who asks for libcuda.so.1 by \
             that name finds gpucr's"
        }
        Error::Criu(CriuError::Failed { hints, .. }) if !hints.is_empty() => {
            let hints: Vec<String> = hints.iter().map(|hint| criu_help(*hint)).collect();
            return Some(hints.join("\n"));
        }
        Error::Criu(CriuError::NotFound { .. } | CriuError::TooOld { .. }) => {
            "install CRIU 4.1 or newer; `cargo xtask setup` in gpucr's source tree does it"
        }
        Error::Trust(TrustError::OtherImage { .. }) => {
            "it is another image than you meant, or was changed: get it again from where you know it to be"
        }
        Error::Trust(TrustError::Unsigned { .. } | TrustError::Untrusted { .. }) => {
            "sign images when they are made (gpucr dump --sign KEY), and name the public key of whoever you trust"
        }
        Error::Trust(TrustError::BadSignatures(_)) => {
            "the file `signatures` beside its manifest was changed: get the image again"
        }
        Error::Trust(TrustError::OpenKey { path }) => {
            return Some(format!("chmod 600 {}", crate::say::shell_word(path)));
        }
        Error::Trust(TrustError::NoPublicKey { .. } | TrustError::NoPrivateKey { .. }) => {
            "`gpucr key FILE` makes a pair of keys: FILE to sign with, FILE.pub to trust"
        }
        Error::StrangeDriver { .. } => {
            "gpucr loads only the driver library that this host's loader finds, and the software driver that \
             came with it; one that you know to be sound you can name: GPUCR_HOST_DRIVER=PATH gpucr …"
        }
        Error::Library(LibraryError::Misplaced { .. }) => {
            "put the file back as the program had it: `gpucr run` of the user who has started the program, and \
             of the same version, does that"
        }
        Error::NoDriver(_) => {
            "on a host without a GPU use `gpucr run --device soft`; else install NVIDIA's driver \
             570 or newer"
        }
        Error::Library(LibraryError::Missing { .. }) => {
            "build or install gpucr as a whole, or set GPUCR_LIB_DIR"
        }
        Error::PidInUse { .. } => {
            "end the process that has it (the dumped program itself, if it was left running), or \
             give the program a pid namespace of its own: gpucr restore --new-pids …"
        }
        Error::OpenFiles(TooFewDescriptors { own: true, blocks, .. }) => {
            return Some(format!("raise the limit: ulimit -n {}", most_open_files(*blocks)));
        }
        Error::OpenFiles(TooFewDescriptors { pid, own: false, blocks, .. }) => {
            let files = most_open_files(*blocks);
            return Some(format!(
                "raise the limit, of the program before it starts (ulimit -Hn {files}) or now: prlimit --pid {pid} \
                 --nofile=:{files}"
            ));
        }
        Error::FileChanged { path, found, expected } if found > expected => {
            return Some(format!(
                "if it is a log that went on after the dump: truncate -s {expected} {}",
                say::shell_word(path)
            ));
        }
        Error::FileMissing { .. } | Error::FileChanged { .. } => {
            "put the file back as it was at the time of the dump"
        }
        Error::OtherDriver { .. } => "restore on a host with the driver that the image names",
        Error::NoMemory { asked: true, .. } => "give a higher --memory-limit",
        Error::NoMemory { asked: false, .. } => {
            "drop another image (gpucr warm --list), or give a --memory-limit that you know there is \
             room for"
        }
        Error::NoRoom { .. } => {
            "free memory, or give the control group that gpucr runs in a higher limit"
        }
        Error::BeingWarmed { .. } => {
            "wait for it; `gpucr warm --list` shows the image when it is warm"
        }
        Error::NotWarm { .. } => "`gpucr warm --list` shows what is kept",
        Error::Holder { pid, .. } => {
            return Some(format!("end it, which frees its memory, and try again: kill {pid}"));
        }
        Error::Stalled { .. } => {
            "see to the disk that the image was to be written to, and try again"
        }
        Error::OtherHolder { .. } => {
            "`gpucr warm --drop IMAGE` first; its restores read from disk until then"
        }
        Error::StrangeHolder { .. } => {
            "it is not trusted: find out what that process is; restores read the image from disk"
        }
        Error::DamagedPart { .. }
        | Error::Store(StoreError::DamagedChunk { .. })
        | Error::Image(
            ImageError::Damaged { .. }
            | ImageError::Truncated { .. }
            | ImageError::MissingChunk { .. }
            | ImageError::Store(StoreError::DamagedChunk { .. }),
        ) => "`gpucr verify` lists everything that is damaged, and what it belongs to",
        Error::Image(ImageError::UnknownSection { .. }) => "restore it with a newer gpucr",
        Error::Tar(TarError::BadTar { .. }) => {
            "make it again with `gpucr export`; a tar that was compressed must be unpacked first, \
             for example zstd -dc FILE | gpucr import - -o IMAGE"
        }
        Error::Tar(TarError::Exists { .. }) => "give another name, or remove it first",
        Error::NoDevice { .. } | Error::NoSuchDevice { .. } => {
            "name the device that is to take its place: gpucr restore --device-map OLD=NEW …"
        }
        Error::DeviceTwice { .. } => {
            "give each device of the image another one: --device-map 0=1,1=0 swaps two"
        }
        Error::OtherDevice { .. } => "the driver moves programs only to a device of the same kind",
        Error::Image(error) => return image_help(error),
        _ => return None,
    };
    Some(text.to_owned())
}

/// A limit of open files that is enough for so many blocks of memory, and all else.
fn most_open_files(blocks: u64) -> u64 {
    blocks.saturating_mul(2).saturating_add(4096)
}

/// What to do about an image or a store.
fn image_help(error: &ImageError) -> Option<String> {
    let text = match error {
        ImageError::ParentMissing { .. } => {
            "put the parent back: it is looked for beside the image as it was at the dump, then \
             under that path"
        }
        ImageError::ParentChanged { .. } => {
            "put the parent back; `gpucr inspect` prints the identity of an image"
        }
        ImageError::ParentInStore { .. } => {
            "dump into the store too, with --store: what its images have is shared by itself"
        }
        ImageError::ChainTooLong { .. } => "make a full image: dump without --parent",
        ImageError::NoSpace { .. } => {
            "free space, and try again; in a store `gpucr gc` frees what no image needs"
        }
        ImageError::Store(StoreError::NoSpace { .. }) => {
            "nothing was lost; free some space and try again"
        }
        ImageError::Store(StoreError::NotAStoreDir { .. }) => {
            "give a new or empty directory, or one that `gpucr dump --store` has made"
        }
        ImageError::HasChildren { .. } => {
            "remove those first, or use --force if they are not needed any more"
        }
        ImageError::Store(StoreError::Busy { path }) if path.ends_with("gc.lock") => {
            "another gc is at work on the store; nothing is left to do for this one"
        }
        ImageError::Store(StoreError::Busy { .. }) => {
            "a dump, restore or gc uses the store; try again when it has ended (gc: --wait)"
        }
        _ => return None,
    };
    Some(text.to_owned())
}

/// What to do about a cause that CRIU's log names.
fn criu_help(hint: Hint) -> String {
    if let Some(option) = hint.option() {
        return format!("try again with {option} (see criu(8))");
    }
    let text = match hint {
        Hint::FileChanged => "put the file that CRIU names back as it was at the time of the dump",
        Hint::PidInUse => {
            "end what has the pid, be it as a process group or session, or give the program a pid \
             namespace of its own: gpucr restore --new-pids …"
        }
        Hint::Permission => "run it as root, with all capabilities",
        Hint::Device => "the program has a device open that CRIU cannot save: close it first",
        Hint::GhostLimit => "the program holds a large deleted file open: close it first",
        Hint::NoSpace => "free space on the file system of the image",
        Hint::InFlight => "others keep connecting to a socket of the program; try again",
        _ => "see criu(8)",
    };
    text.to_owned()
}

/// Prints an error to stderr.
pub(crate) fn show(error: CliError) {
    let CliError { message, state, help, code } = error;
    let shown = CliError {
        message: say::escaped_list(&message),
        state: state.map(|state| say::escaped(&state).into_owned()),
        help: help.map(|help| say::escaped_lines(&help).into_owned()),
        code,
    };
    // That nobody can be told this is nothing that could be told.
    let _ = writeln!(std::io::stderr().lock(), "{:?}", miette::Report::new(shown));
}

/// Prints an error to stderr and gives its exit code.
pub(crate) fn report(error: CliError) -> ExitCode {
    let code = error.code;
    show(error);
    ExitCode::from(code)
}
