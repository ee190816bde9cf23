//! The options of `gpucr dump`.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use gpucr_core::dump::CriuOptions;
use gpucr_core::store::Compression;

use crate::failure::CliError;
use crate::stores;
use crate::values::{compression, duration, every, pids, size, tag};

/// Save a running program, and end it
///
/// Saves the processes of the tree below PID: their device memory, their CUDA state and their host
/// side. The program is ended only after the image is complete and on disk; whatever fails before
/// that leaves the program running. A program that was not started with `gpucr run` is saved too,
/// by the driver and CRIU alone, which takes longer.
#[derive(clap::Args)]
#[command(after_long_help = "\
What cannot be saved, and is named before anything is touched: managed memory (cudaMallocManaged), \
memory shared by exported or imported handles, by CUDA IPC or by multicast objects with processes outside of the tree, \
interoperation with graphics and external memory; and a process whose main thread has ended while others go \
on. What NVIDIA's driver refuses besides (MIG, MPS) rolls the dump back. The restore needs the same driver, the same devices, the pids free, and the program's \
files as they were.\n\n\
Three kinds of images: `-o IMAGE` makes a directory that holds everything. With `--parent` it holds only \
what has changed since PARENT, which must stay where it is (or move along) and unchanged. With \
`--store` the image is DIR/images/NAME and shares its data with the others there; see gpucr-ls(1), \
gpucr-rm(1) and gpucr-gc(1). All three are restored in the same way and as fast.\n\n\
Examples:\n  gpucr run -- ./train &\n  gpucr dump --pid $! -o /images/train\n  \
gpucr restore /images/train\n\n  \
gpucr dump --pid 4242 --leave-running -o monday\n  \
gpucr dump --pid 4242 --leave-running -o tuesday --parent monday\n\n  \
gpucr dump --pid 4242 --leave-running --store /images --name step-1000\n  \
gpucr restore /images/images/step-1000\n\n\
For fault tolerance, the last three states of a long job:\n  \
gpucr dump --pid 4242 --every 10m --keep 3 --store /images")]
pub(crate) struct DumpArgs {
    /// Root of the process tree
    #[arg(short = 't', long = "pid", alias = "tree", value_name = "PID", value_parser = pids())]
    pub(crate) pid: u32,
    /// Directory for the image: new, or empty [default: gpucr-PID]
    #[arg(short = 'o', long = "output", value_name = "IMAGE")]
    pub(crate) image: Option<PathBuf>,
    /// Store only what the image PARENT lacks; the new image cannot be read without it
    #[arg(long, value_name = "PARENT")]
    pub(crate) parent: Option<PathBuf>,
    /// Put the image into the store DIR, which keeps equal chunks of all its images once; made if
    /// it does not exist [default without --output and --parent: GPUCR_STORE, if it is set]
    #[arg(long, value_name = "DIR", conflicts_with_all = ["image", "parent"])]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: COMMAND-TIME-PID]
    #[arg(long, conflicts_with_all = ["image", "parent"])]
    pub(crate) name: Option<String>,
    /// Give the image this word, by which `gpucr ls` and `gpucr forget` find it; may be given more than once
    #[arg(long = "tag", value_name = "TAG", value_parser = tag)]
    pub(crate) tags: Vec<String>,
    /// Let the program run on afterwards
    #[arg(short = 'R', long)]
    pub(crate) leave_running: bool,
    /// Save the program again and again, as long as it lives, and let it run on; each image can be
    /// restored by itself. A time that passes during a dump is left out
    #[arg(long, value_name = "DURATION", value_parser = every,
          conflicts_with_all = ["name", "image", "parent"])]
    pub(crate) every: Option<Duration>,
    /// With --every: how many of its images are kept; older ones are removed [default: all]
    #[arg(long, value_name = "N", requires = "every", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) keep: Option<u32>,
    /// How device memory is copied; auto chooses the one that stops the program the least
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    pub(crate) protocol: ProtocolArg,
    /// Most memory of each device that protocol cow copies aside [default: half of what is free].
    /// Launches that may write what finds no room wait until it is saved
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) shadow_memory: Option<u64>,
    /// Most memory that protocol cow takes to copy aside host memory that was not copied ahead [default: a quarter of
    /// what is available]. What finds no room is written to disk before the program goes on
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) host_memory_limit: Option<u64>,
    /// How long the program may take to come to a halt
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Stop each process of the program behind the next call by which it waits for the device, as
    /// cudaDeviceSynchronize or a copy to the host; one that makes none within this time is stopped where it is
    #[arg(long, value_name = "DURATION", num_args = 0..=1, require_equals = true,
          default_missing_value = "10s", value_parser = duration)]
    pub(crate) at_sync: Option<Duration>,
    /// Compression of the image: `none`, or a level of zstd from 1 (fast) to 19 (small)
    #[arg(long, value_name = "LEVEL", default_value = "1", value_parser = compression)]
    pub(crate) compress: Compression,
    /// Write to FILE what happened when: phases, passes over the memory, hash passes, copies, what had
    /// changed after it was copied, and when the program stood still. `gpucr report` draws it; Perfetto
    /// opens it too
    #[arg(long, value_name = "FILE", conflicts_with = "every")]
    pub(crate) timeline: Option<PathBuf>,
    /// Add what happens to FILE, one JSON object on a line
    ///
    /// A pipe will do, and so will /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to
    /// move), `dumped` (with the report) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Keep files that the program is writing in the image, whole if they have at most so many bytes, else their
    /// last 4 KiB; `gpucr restore --files rewind` puts them back
    #[arg(long, value_name = "SIZE", default_value = "1MiB", value_parser = size)]
    pub(crate) save_files: u64,
    /// Write what the dump came to into FILE, in the text form of Prometheus: FILE.prom in the directory of the node
    /// exporter's textfile collector, say. What is there is replaced
    #[arg(long, value_name = "FILE")]
    pub(crate) metrics: Option<PathBuf>,
    /// Add what the dump did, and when, to FILE, as spans of OpenTelemetry
    ///
    /// One JSON object on a line, in the form of OTLP's file exporter; a collector reads it with its receiver
    /// otlpjsonfile. The dump is one span and each phase another. They belong to the trace of TRACEPARENT in the
    /// environment, if that is set, and to a service named by OTEL_SERVICE_NAME, or gpucr.
    #[arg(long, value_name = "FILE")]
    pub(crate) traces: Option<PathBuf>,
    /// Sign the image with the private key in FILE (see gpucr-key(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) sign: Option<PathBuf>,
    /// Tell everything that is known to be in the way of a dump, each with what to do about it, and change nothing
    #[arg(long, conflicts_with = "every")]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) criu: CriuArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// This process is in the pid namespace of the program: the pid that it has there
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) inside: Option<u32>,
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
    /// The program is a shell job: its session leader is outside (found out by itself)
    #[arg(short = 'j', long)]
    pub(crate) shell_job: bool,
    /// Save TCP connections with processes outside of the program too: the other end has to wait
    #[arg(long)]
    pub(crate) tcp_established: bool,
    /// Save TCP connections as closed ones
    #[arg(long)]
    pub(crate) tcp_close: bool,
    /// Save file locks
    #[arg(short = 'l', long)]
    pub(crate) file_locks: bool,
    /// Save Unix sockets that lead to processes outside
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
    /// Everything while the program stands still
    Stop,
    /// Most while the program runs, what has changed again while it stands still
    Recopy,
    /// With --leave-running: as recopy, but what has changed is saved after the program goes on: from
    /// copies within the device, or while launches that may write it wait
    Cow,
}
