//! The options of `gpucr restore`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use gpucr_core::restore::{FilePolicy, MappedDevice};

use super::streams::Streams;
use crate::commands::key::TrustArgs;

/// Bring a saved program back
///
/// The program has its old pids and goes on where it was. In the foreground (the default) gpucr
/// stands in for it: it passes signals on to the program, and ends with the program's exit status.
/// The image is only read, so it can be restored any number of times.
#[derive(clap::Args)]
#[command(after_long_help = "\
With --new-pids the program sees its old pids, in a pid namespace of its own with its own /proc, and has \
others outside, which are the ones that gpucr prints and takes. So one image can be restored several times \
at once, also while the program runs that it was made of. Everything else is shared: instances that listen on \
the same port need a network of their own (--netns), and files that the program \
has open for writing are the same files (unshare --mount, or a program that writes to its standard output). \
The program has no controlling terminal; gpucr passes signals on. A small process of gpucr's stays as the \
first of the namespace: if it is killed, everything in there is.\n\n\
Examples:\n  gpucr restore image/\n  pid=$(gpucr restore --detach image/)\n  \
for i in 1 2 3; do gpucr restore --new-pids --detach image/; done")]
pub(crate) struct RestoreArgs {
    /// The image: its directory, or its name in the store of GPUCR_STORE (`latest` for the newest)
    pub(crate) image: PathBuf,
    /// Where it is, if the command outside of a namespace has found that out
    #[arg(long, hide = true, value_name = "PATH")]
    pub(crate) resolved: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
    /// Leave the program in the background and print its pid
    #[arg(short = 'd', long, alias = "restore-detached")]
    pub(crate) detach: bool,
    /// Add the program's standard output to FILE, if it was a pipe
    ///
    /// The reader of the pipe is gone. In the foreground the program gets gpucr's own output in its place, and with
    /// --detach /dev/null. What went to a file or a terminal goes there again.
    #[arg(long, value_name = "FILE")]
    pub(crate) stdout: Option<PathBuf>,
    /// The same for its standard error; with a pipe for both, either option takes both
    #[arg(long, value_name = "FILE")]
    pub(crate) stderr: Option<PathBuf>,
    /// Restore in a new pid namespace, where all pids are free
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// Restore in this network namespace: /run/netns/NAME as `ip netns add NAME` makes it, or /proc/PID/ns/net
    ///
    /// Without it the program gets the network that gpucr has. Addresses and devices that the program uses have to be
    /// there; connections within the program are there again, if the loopback device is up (ip -n NAME link set lo up).
    /// gpucr itself stays where it is, and so does what --exec-before-resume runs.
    #[arg(long, value_name = "PATH")]
    pub(crate) netns: Option<PathBuf>,
    /// The same as a descriptor, from another gpucr
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) network: Option<i32>,
    /// Run CMD in a shell when the processes are there, before any of them runs
    ///
    /// GPUCR_PID is the pid of the program's root, GPUCR_IMAGE the image. What it prints goes to stderr. If
    /// it fails, so does the restore, and nothing of the program has run. With --new-pids it runs inside
    /// the namespace.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec_before_resume: Option<OsString>,
    /// Write the program's pid and a line end to this file when the program runs
    ///
    /// The file appears with the line in it, under another name before.
    #[arg(long, value_name = "FILE")]
    pub(crate) ready_file: Option<PathBuf>,
    /// The same to a file descriptor that gpucr was started with; it is closed then
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) ready_fd: Option<i32>,
    /// Add what happens to FILE, one JSON object on a line
    ///
    /// A pipe will do, and so will /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to
    /// move), `running` (with the pid), `again` (on demand, or with shared memory: the program was ended, and is
    /// restored with all of its memory), `restored` (with the report), `ended` (with the exit code or signal of a program in
    /// the foreground) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Let the program go on on another device of the same kind
    ///
    /// OLD is a device of the image: its number in `gpucr inspect`, or its UUID. NEW is one of this host: its
    /// number as the driver counts (see nvidia-smi), or its UUID. Several pairs are separated by commas. A
    /// device that is not named keeps its place, which must be free. For an image of another host, name every
    /// GPU that the program could see there, also those that it did not use. The program goes on to know each
    /// device by its old number. What else it has noted of one (UUID, PCI bus id, index of NVML) is that of the old
    /// one, and the driver goes on to tell it the old PCI bus id: a program that hands these to NVML or NCCL after the
    /// move names the wrong device. Old and new ones are printed, and in the report (`moved`).
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub(crate) device_map: Vec<MappedDevice>,
    /// Write what the restore came to into FILE, in the text form of Prometheus (see gpucr-dump(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// What to do about files that are not as they were at the dump
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = FilesArg::Keep)]
    pub(crate) files: FilesArg,
    /// Let the program go on before its memory is loaded
    ///
    /// A launch then waits only for the device memory that its arguments point to, and a thread for the pages of host
    /// memory that it touches; the rest is loaded while the
    /// program runs, and gpucr stays until it is. If the device touches memory that nobody saw it would
    /// touch (through pointers that lie in memory), the program is ended and restored anew with all of its
    /// memory. So it is if it ends by itself before all is loaded and its exit status is not 0, since a
    /// missed access can be the reason. What it had written to files that it had open at the dump is taken back then. What it
    /// had sent or printed elsewhere in between is not: it comes twice.
    #[arg(long)]
    pub(crate) on_demand: bool,
    /// Share device memory that the program does not write with other instances of the image
    ///
    /// The first instance loads it; those that follow while one runs only map it, and start faster. All of
    /// them see it read-only. What may write some of it waits until it has a copy of its own. The image says
    /// what can be shared if its dump copied while the program ran (see --protocol), and judges by what it saw
    /// then: a kernel that writes shared memory all the same is stopped by the device. Then the program is
    /// ended and restored anew with all memory its own, however long it has run; its output is taken back as
    /// with --on-demand. So gpucr has to stay: it cannot be detached. An image of which that has happened is not
    /// shared any more, until the host is started anew or its file in /run/gpucr/unshared is removed.
    #[arg(long, conflicts_with_all = ["on_demand", "detach"])]
    pub(crate) share: bool,
    /// Tell everything that is known to be in the way of a restore, each with what to do about it, and change nothing
    ///
    /// The whole image is read and checked, as `gpucr verify` does.
    #[arg(long, conflicts_with_all = ["detach", "exec_before_resume", "ready_file", "ready_fd", "events"])]
    pub(crate) dry_run: bool,
    /// Read the image from disk, even if `gpucr warm` keeps it in memory
    #[arg(long)]
    pub(crate) no_warm: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// A socket to say on when the processes are there, and to be told on that they may run
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) hold: Option<i32>,
    /// Say on that socket why the restore has failed, and nowhere else
    #[arg(long, hide = true, requires = "hold")]
    pub(crate) tell_holder: bool,
    /// A socket through which its device memory comes, which was loaded before
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..),
          conflicts_with_all = ["on_demand", "share"])]
    pub(crate) loaded: Option<i32>,
    /// Descriptors for its standard streams that were pipes, or nothing where there is none
    #[arg(long, hide = true, num_args = 1, value_name = "IN,OUT,ERR",
          conflicts_with_all = ["stdout", "stderr", "on_demand", "share"])]
    pub(crate) streams: Option<Streams>,
    /// This is the first process of a namespace: the descriptor on which to say what becomes of the
    /// restore, the last pid to leave free, and with --share the connection with a holder
    #[arg(long, hide = true, num_args = 1, value_delimiter = ',', value_name = "FDS")]
    pub(crate) inside: Option<Vec<u32>>,
}

/// See [`FilePolicy`].
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FilesArg {
    /// Logs stay as they are, and the program goes on at their ends, also where they have grown or were cut. Any other
    /// file must have its old size
    Keep,
    /// What the program was writing is made what it was: what was added since is lost, and files that were altered or
    /// removed come back from the copies in the image, as far as it has them (see --save-files of gpucr-dump(1))
    Rewind,
    /// Every file must have its old size
    Strict,
}

impl From<FilesArg> for FilePolicy {
    fn from(arg: FilesArg) -> Self {
        match arg {
            FilesArg::Keep => Self::Keep,
            FilesArg::Rewind => Self::Rewind,
            FilesArg::Strict => Self::Strict,
        }
    }
}
