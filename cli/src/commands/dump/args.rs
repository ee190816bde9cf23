//! The options of `gpucr dump`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use gpucr_core::dump::CriuOptions;
use gpucr_core::store::Compression;

use crate::failure::CliError;
use crate::stores;
use crate::values::{compression, duration, every, pids, size, tag};

/// Checkpoint a running program and stop it
///
/// Saves PID and all its descendants: their device memory, their CUDA state and their host side. The program is ended
/// only once the image is complete and on disk; if anything fails before that, the program keeps running. A program
/// that was not started with `gpucr run` can be saved too, through the driver and CRIU alone, which takes longer.
#[derive(clap::Args)]
#[command(after_long_help = "\
Some programs cannot be saved, which is reported before anything is changed: those that use managed memory \
(cudaMallocManaged), graphics interoperation or external memory; those that share memory with processes outside \
the tree, by exported or imported handles, CUDA IPC or multicast objects; and those with a process whose main \
thread has ended while other threads continue. If NVIDIA's driver refuses anything else (MIG, MPS), the dump is \
undone. The restore needs the same driver and the same devices, the program's pids must be free, and its \
files must be as they were.\n\n\
A program in a container is dumped from outside by the pid that it has there; podman and docker print that of the \
container's first process (podman inspect --format '{{.State.Pid}}'), and `gpucr ps` those of programs under gpucr. \
Name the program, not the first process of the container: with `gpucr run` as entry point, its child. Such an image \
is restored with --root (see gpucr-restore(1)).\n\n\
There are three kinds of images. `-o IMAGE` makes a directory that holds everything. With `--parent` it holds \
only what has changed since PARENT, which must stay unchanged and where it is (or be moved together with the \
image). With `--store` the image is DIR/images/NAME and shares its data with the other images there; see \
gpucr-ls(1), gpucr-rm(1) and gpucr-gc(1). All three are restored in the same way and equally fast.\n\n\
Examples:\n  gpucr run -- ./train &\n  gpucr dump --pid $! -o /images/train\n  \
gpucr restore /images/train\n\n  \
gpucr dump --pid 4242 --leave-running -o monday\n  \
gpucr dump --pid 4242 --leave-running -o tuesday --parent monday\n\n  \
gpucr dump --pid 4242 --leave-running --store /images --name step-1000\n  \
gpucr restore /images/images/step-1000\n\n\
For fault tolerance, keep the last three states of a long job:\n  \
gpucr dump --pid 4242 --every 10m --keep 3 --store /images")]
pub(crate) struct DumpArgs {
    /// Root of the process tree
    #[arg(short = 't', long = "pid", alias = "tree", value_name = "PID", value_parser = pids())]
    pub(crate) pid: u32,
    /// Directory for the image: new, or empty [default: gpucr-PID]
    #[arg(short = 'o', long = "output", value_name = "IMAGE")]
    pub(crate) image: Option<PathBuf>,
    /// Store only what the image PARENT lacks; the new image cannot be read without PARENT
    #[arg(long, value_name = "PARENT")]
    pub(crate) parent: Option<PathBuf>,
    /// Put the image into the store DIR, which keeps chunks that its images have in common only once; created if it
    /// does not exist [default without --output and --parent: GPUCR_STORE, if set]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["image", "parent"])]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: COMMAND-TIME-PID]
    #[arg(long, conflicts_with_all = ["image", "parent"])]
    pub(crate) name: Option<String>,
    /// Tag the image with this word, by which `gpucr ls` and `gpucr forget` select it; may be repeated
    #[arg(long = "tag", value_name = "TAG", value_parser = tag)]
    pub(crate) tags: Vec<String>,
    /// Let the program continue afterwards
    #[arg(short = 'R', long)]
    pub(crate) leave_running: bool,
    /// Save the program at this interval for as long as it lives, and let it continue each time; each image can be
    /// restored by itself. A dump that would be due during another one is skipped
    #[arg(long, value_name = "DURATION", value_parser = every,
          conflicts_with_all = ["name", "image", "parent"])]
    pub(crate) every: Option<Duration>,
    /// With --every: how many of its images to keep; older ones are removed [default: all]
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
    /// How to copy device memory; `auto` picks the way that stops the program for the shortest time
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    pub(crate) protocol: ProtocolArg,
    /// Maximum memory on each device for the copies that protocol cow makes [default: half of what is free]. When it
    /// is used up, launches that may write unsaved memory wait until it is saved
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) shadow_memory: Option<u64>,
    /// Maximum host memory for the copies that protocol cow makes of host memory not copied in advance
    /// [default: a quarter of what is available]. What does not fit is written to disk before the program continues
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) host_memory_limit: Option<u64>,
    /// Run CMD in a shell before the program is stopped, such as one that takes a server out of a load balancer
    ///
    /// In its environment GPUCR_PID is the pid of the program and GPUCR_IMAGE the image that is being made. What CMD
    /// prints goes to stderr. If it fails, so does the dump, and the program keeps running. It runs before
    /// each dump of --every, and again when a dump starts over.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec_before_stop: Option<OsString>,
    /// How long the program may take to come to a halt
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Stop each process of the program right after its next call that waits for the device, such as
    /// cudaDeviceSynchronize or a copy to the host; a process that makes no such call within this time is stopped
    /// where it is
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true,
          default_missing_value = "10s", value_parser = duration)]
    pub(crate) at_sync: Option<Duration>,
    /// Compression of the image: `none`, or a zstd level from 1 (fast) to 19 (small)
    #[arg(long, value_name = "LEVEL", default_value = "1", value_parser = compression)]
    pub(crate) compress: Compression,
    /// Write a timeline to FILE: phases, passes over the memory, hash passes, copies, memory that changed after it
    /// was copied, and when the program was stopped. `gpucr report` draws it; Perfetto opens it too
    #[arg(long, value_name = "FILE", conflicts_with = "every")]
    pub(crate) timeline: Option<PathBuf>,
    /// Append events to FILE as they happen, one JSON object per line
    ///
    /// FILE may be a pipe, or /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to move),
    /// `dumped` (with the report) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Keep a copy in the image of each file that the program is writing: the whole file up to this size, the last 4
    /// KiB of a larger one; `gpucr restore --files rewind` puts them back
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = size)]
    pub(crate) save_files: u64,
    /// Write metrics of the dump to FILE in Prometheus's text format, replacing what is there; for the node exporter's
    /// textfile collector, use a name in its directory that ends in .prom
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Append what the dump did, and when, to FILE as OpenTelemetry spans
    ///
    /// One JSON object per line, in the format of OTLP's file exporter; a collector reads it with its otlpjsonfile
    /// receiver. The dump is one span and each of its phases another. They belong to the trace that TRACEPARENT in the
    /// environment names, if it is set, and to the service OTEL_SERVICE_NAME, or gpucr.
    #[arg(long, value_name = "FILE")]
    pub(crate) traces: Option<PathBuf>,
    /// Sign the image with the private key in FILE (see gpucr-key(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) sign: Option<PathBuf>,
    /// List everything known that would prevent a dump, each with what to do about it, and change nothing
    #[arg(long, conflicts_with = "every")]
    pub(crate) dry_run: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// This process is in the pid namespace of the program: the pid that it has there
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) inside: Option<u32>,
    /// The same in a container: a socket on which to ask that the first process of that is held up
    #[arg(long, hide = true, value_name = "FD", value_parser = clap::value_parser!(i32).range(3..))]
    pub(crate) first_process: Option<i32>,
    #[command(flatten)]
    pub(crate) criu: CriuArgs,
}

impl DumpArgs {
    /// The store that the image goes to, if it goes to one.
    ///
    /// # Errors
    /// One is needed and none is named; the settings cannot be read.
    pub(crate) fn store(&self) -> Result<Option<PathBuf>, CliError> {
        if self.store.is_some() || self.image.is_some() || self.parent.is_some() {
            return Ok(self.store.clone());
        }
        if self.name.is_some() || self.every.is_some() {
            return stores::store(None).map(Some);
        }
        stores::default_store()
    }

    /// The pid of the program's root as this process sees it.
    pub(crate) fn own_pid(&self) -> u32 {
        self.inside.unwrap_or(self.pid)
    }
}

#[derive(clap::Args)]
#[command(next_help_heading = "Options of CRIU")]
pub(crate) struct CriuArgs {
    /// The program is a shell job: its session leader is outside the tree (detected automatically)
    #[arg(short = 'j', long)]
    pub(crate) shell_job: bool,
    /// Save TCP connections to processes outside the program as open ones: the other end must keep them open until
    /// the restore
    #[arg(long)]
    pub(crate) tcp_established: bool,
    /// Save TCP connections as closed ones: the restored program finds them closed
    #[arg(long)]
    pub(crate) tcp_close: bool,
    /// Save file locks
    #[arg(short = 'l', long)]
    pub(crate) file_locks: bool,
    /// Save Unix sockets that are connected to processes outside the program
    #[arg(short = 'x', long)]
    pub(crate) ext_unix_sk: bool,
}

impl CriuArgs {
    /// The options that go to CRIU as they are.
    pub(crate) fn options(&self) -> CriuOptions {
        let Self { tcp_established, tcp_close, file_locks, ext_unix_sk, .. } = *self;
        CriuOptions { tcp_established, tcp_close, file_locks, ext_unix_sk }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtocolArg {
    /// The best of those below
    Auto,
    /// Everything while the program is stopped
    Stop,
    /// Most while the program runs; what changes meanwhile is copied again while it is stopped
    Recopy,
    /// With --leave-running: like recopy, but what has changed is saved after the program continues, from copies on
    /// the device or while launches that may write it wait
    Cow,
}
