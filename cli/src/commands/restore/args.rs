//! The options of `gpucr restore`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ValueEnum;
use gpucr_core::restore::{FilePolicy, MappedDevice};

use super::streams::Streams;
use crate::commands::key::TrustArgs;

/// Restore a program from an image
///
/// The program gets its old pids back and resumes where it left off. In the foreground (the default) gpucr stays in
/// the program's place: it passes signals on to the program, and exits with the program's exit status. The image is
/// only read, so it can be restored any number of times.
#[derive(clap::Args)]
#[command(after_long_help = "\
With --new-pids the program runs in a pid namespace of its own, with its own /proc. There it has its old pids; \
outside it has others, which are the ones that gpucr prints and accepts. One image can thus be restored several \
times at once, even while the program it was made from still runs. Everything else is shared. Instances that \
listen on the same port each need a network of their own (--netns). Files that the \
program has open for writing are the same files in all instances; to avoid that, use unshare --mount, or a \
program that writes to its standard output. The program has no controlling terminal; gpucr passes signals on. A \
small gpucr process remains as the first of the namespace: if it is killed, so is everything in the namespace.\n\n\
Examples:\n  gpucr restore image/\n  pid=$(gpucr restore --detach image/)\n  \
for i in 1 2 3; do gpucr restore --new-pids --detach image/; done")]
pub(crate) struct RestoreArgs {
    /// The image: its directory, or its name in the default store (`latest` for the newest)
    pub(crate) image: PathBuf,
    /// Where it is, if the command outside of a namespace has found that out
    #[arg(long, hide = true, value_name = "PATH")]
    pub(crate) resolved: Option<PathBuf>,
    /// Leave the program running in the background and print its pid
    #[arg(short = 'd', long, alias = "restore-detached")]
    pub(crate) detach: bool,
    /// Append the program's standard output to FILE, if it was a pipe
    ///
    /// The reader of the pipe is gone. Without this option the program gets gpucr's own output instead, or /dev/null
    /// with --detach. Output that went to a file or a terminal goes there again.
    #[arg(long, value_name = "FILE")]
    pub(crate) stdout: Option<PathBuf>,
    /// The same for its standard error; if one pipe served both streams, either option covers both
    #[arg(long, value_name = "FILE")]
    pub(crate) stderr: Option<PathBuf>,
    /// Restore into a new pid namespace, where all pids are free
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// Restore a program that was in a container with DIR as its root directory, in a new pid namespace
    ///
    /// DIR has the container's files, such as the `rootfs` of a bundle or what `podman mount` prints: whatever the
    /// program had open or mapped must be there as it was. Where a volume was mounted in the container, or something
    /// else from outside, the same must be mounted in DIR, or given by --mount. What the container had made for itself
    /// (/proc, a tmpfs with its contents) is made again. Two programs can be restored into one DIR, and then share its files.
    /// DIR must not be a path through /proc. Limits of a container runtime (control groups, seccomp of new processes) are
    /// not set up: root of the restored container is root of the host unless its device control group etc. are made
    /// again by other means. See gpucr-security(7).
    #[arg(long, value_name = "DIR")]
    pub(crate) root: Option<PathBuf>,
    /// What to mount at PLACE in the restored container, if something from outside was mounted there
    #[arg(long, value_name = "PLACE=PATH", requires = "root", value_parser = mount)]
    pub(crate) mount: Vec<(PathBuf, PathBuf)>,
    /// Restore in this network namespace: /run/netns/NAME as `ip netns add NAME` makes it, or /proc/PID/ns/net
    ///
    /// Without this option the program gets the network in which gpucr runs. Addresses and devices that the program uses
    /// must exist there. Connections within the program are restored if the loopback device is up (ip -n NAME link set
    /// lo up). gpucr itself stays in its own network, and so does the command of --exec-before-resume.
    #[arg(long, value_name = "PATH")]
    pub(crate) netns: Option<PathBuf>,
    /// The same as a descriptor, from another gpucr
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) network: Option<i32>,
    /// Run CMD in a shell once the processes exist, before any of them runs
    ///
    /// In its environment GPUCR_PID is the pid of the program's root process and GPUCR_IMAGE the image. What CMD
    /// prints goes to stderr. If it fails, so does the restore, and no part of the program has run. With --new-pids
    /// it runs inside the namespace.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec_before_resume: Option<OsString>,
    /// Write the program's pid and a newline to this file once the program runs
    ///
    /// The file appears only when it is complete: it is written under another name and renamed.
    #[arg(long, value_name = "FILE")]
    pub(crate) ready_file: Option<PathBuf>,
    /// The same, but to a file descriptor that gpucr was started with; it is closed afterwards
    #[arg(long, value_name = "FD", value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) ready_fd: Option<i32>,
    /// Append events to FILE as they happen, one JSON object per line
    ///
    /// FILE may be a pipe, or /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to move),
    /// `running` (with the pid), `again` (with --on-demand or --share: the program was ended, and is being restored
    /// with all of its memory), `restored` (with the report), `ended` (with the exit code or signal of a program in
    /// the foreground) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Let the program continue on another device of the same kind
    ///
    /// OLD is a device of the image: its number in `gpucr inspect`, or its UUID. NEW is a device of this host: its
    /// number as the driver counts (see nvidia-smi), or its UUID. Separate several pairs by commas. A device that is
    /// not named keeps its place, which must be free. For an image from another host, name every GPU that the program
    /// could see there, including those that it did not use. The program continues to address each device by its old
    /// number. Whatever else it has stored about a device (UUID, PCI bus id, NVML index) still describes the old one,
    /// and the driver keeps reporting the old PCI bus id: a program that passes these to NVML or NCCL after the move
    /// names the wrong device. The old and new devices are printed, and are in the report (`moved`).
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub(crate) device_map: Vec<MappedDevice>,
    /// Write metrics of the restore to FILE, in Prometheus's text format (see gpucr-dump(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Append what the restore did, and when, to FILE as OpenTelemetry spans (see gpucr-dump(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) traces: Option<PathBuf>,
    /// What to do about files that have changed since the dump
    #[arg(long, value_enum, value_name = "POLICY", default_value_t = FilesArg::Keep)]
    pub(crate) files: FilesArg,
    /// Let the program continue before its memory is loaded
    ///
    /// A launch then waits only for the device memory that its arguments point to, and a thread only for the pages of
    /// host memory that it touches. The rest is loaded while the program runs, and gpucr stays until that is done. If
    /// the device touches memory that could not be foreseen (through pointers stored in memory) and is not loaded
    /// yet, the program is ended and restored again with all of its memory. The same happens if the program exits
    /// with a status other than 0 before everything is loaded, since a missed access may be the reason. What it wrote
    /// meanwhile to files that it had open at the dump is then undone. What it sent or printed elsewhere is not: that
    /// happens twice.
    #[arg(long)]
    pub(crate) on_demand: bool,
    /// Share device memory that the program does not write with other instances of the image
    ///
    /// The first instance loads the memory; instances that start while another one runs only map it, and start
    /// faster. All of them map it read-only. A launch or copy that may write some of it waits until the instance has
    /// its own copy of that part. If the image's dump copied memory while the program ran (see --protocol), it
    /// recorded which memory the program did not write, and that is what can be shared. A kernel that writes shared
    /// memory all the same is stopped by the device; the program is then ended and restored again with all memory its
    /// own, however long it has run, and its output is undone as with --on-demand. gpucr therefore has to stay:
    /// --detach cannot be used. After this has happened, the image is not shared any more until the host is rebooted
    /// or the image's file in /run/gpucr/unshared is removed.
    #[arg(long, conflicts_with_all = ["on_demand", "detach"])]
    pub(crate) share: bool,
    /// List everything known that would prevent a restore, each with what to do about it, and change nothing
    ///
    /// The whole image is read and checked, as `gpucr verify` does.
    #[arg(long, conflicts_with_all = ["exec_before_resume", "ready_file", "ready_fd", "events"])]
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
    /// A socket through which it is told when its image is there
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..),
          requires_all = ["hold", "loaded"], conflicts_with_all = ["new_pids", "root"])]
    pub(crate) stand_by: Option<i32>,
    /// Descriptors for its standard streams that were pipes, or nothing where there is none
    #[arg(long, hide = true, num_args = 1, value_name = "IN,OUT,ERR",
          conflicts_with_all = ["stdout", "stderr", "on_demand", "share"])]
    pub(crate) streams: Option<Streams>,
    /// This is the first process of a namespace: the descriptor on which to say what becomes of the
    /// restore, the last pid to leave free, and with --share the connection with a holder
    #[arg(long, hide = true, num_args = 1, value_delimiter = ',', value_name = "FDS")]
    pub(crate) inside: Option<Vec<u32>>,
    #[command(flatten)]
    pub(crate) trust: TrustArgs,
}

fn mount(text: &str) -> Result<(PathBuf, PathBuf), String> {
    match text.split_once('=') {
        Some((place, path)) if place.starts_with('/') && !path.is_empty() => {
            Ok((place.into(), path.into()))
        }
        _ => Err("it has the form /PLACE=PATH".to_owned()),
    }
}

/// See [`FilePolicy`].
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FilesArg {
    /// Logs stay as they are, and the program writes on at the end of each, even if they have grown or were truncated.
    /// Any other file must have its old size
    Keep,
    /// Files that the program was writing are put back as they were: what was appended since is lost, and files that
    /// were altered or removed are restored from their copies in the image, if it has them (see --save-files in
    /// gpucr-dump(1))
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
