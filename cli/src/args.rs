//! The command line. Flags that CRIU has too carry its names.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use gpucr_core::restore::MappedDevice;
use gpucr_core::store::Compression;

/// Checkpoint and restore running CUDA programs.
///
/// Start a program with `gpucr run`, save it with `gpucr dump` while it runs, and bring it back
/// with `gpucr restore`: it goes on as if nothing had happened. `gpucr check` tells whether this
/// host can do that.
#[derive(Parser)]
#[command(name = "gpucr", version, arg_required_else_help = true)]
#[command(after_help = "\
Exit codes: 0 done; 1 failed, and the program runs on or the image is as it was; 2 wrong usage; \
3 this host cannot do it (see gpucr check).\n\n\
Environment: GPUCR_LOG=debug tells each step; GPUCR_CRIU names another CRIU; GPUCR_LIB_DIR names \
the directory of gpucr's own libraries.")]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Dump(DumpArgs),
    Restore(RestoreArgs),
    Warm(WarmArgs),
    Ps(PsArgs),
    Trace(TraceArgs),
    Inspect(InspectArgs),
    Verify(VerifyArgs),
    Report(ReportArgs),
    Diff(DiffArgs),
    Export(ExportArgs),
    Import(ImportArgs),
    Ls(LsArgs),
    Rm(RmArgs),
    Gc(GcArgs),
    Check(CheckArgs),
    Completions(CompletionsArgs),
    #[command(hide = true)]
    GenerateMan(GenerateManArgs),
    #[command(hide = true)]
    Keeper,
    #[command(hide = true)]
    Init(InitArgs),
    #[command(hide = true)]
    WarmHolder,
    #[command(hide = true)]
    SharingHolder,
}

/// Start a program so that it can be dumped fast
///
/// Sets up the environment (LD_LIBRARY_PATH with gpucr's libcuda.so.1 in front of the driver's)
/// and becomes the program: it keeps the pid. Without a GPU the program runs on the software
/// driver, which executes programs of the CUDA driver API on the CPU; programs of the CUDA runtime
/// API, PyTorch among them, need a GPU.
#[derive(clap::Args)]
pub(crate) struct RunArgs {
    /// Which driver the program gets
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub(crate) device: DeviceArg,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceArg {
    /// The GPU if there is one, else the software driver
    Auto,
    /// NVIDIA's driver
    Cuda,
    /// The software driver
    Soft,
}

/// Save a running program, and end it
///
/// Saves the processes of the tree below PID: their device memory, their CUDA state and their host
/// side. The program is ended only after the image is complete and on disk; whatever fails before
/// that leaves the program running. A program that was not started with `gpucr run` is saved too,
/// by the driver and CRIU alone, which takes longer.
#[derive(clap::Args)]
#[command(after_long_help = "\
What cannot be saved, and is named before anything is touched: managed memory (cudaMallocManaged), \
memory shared with other processes (CUDA IPC, exported or imported handles), multicast objects, \
interoperation with graphics and external memory. What NVIDIA's driver refuses besides (MIG, MPS) \
rolls the dump back. The restore needs the same driver, the same devices, the pids free, and the program's \
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
    #[arg(short = 't', long = "pid", alias = "tree", value_name = "PID")]
    pub(crate) pid: u32,
    /// Directory for the image: new, or empty [default: gpucr-PID]
    #[arg(short = 'o', long = "output", value_name = "IMAGE")]
    pub(crate) image: Option<PathBuf>,
    /// Store only what the image PARENT lacks; the new image cannot be read without it
    #[arg(long, value_name = "PARENT")]
    pub(crate) parent: Option<PathBuf>,
    /// Put the image into the store DIR, which keeps equal chunks of all its images once; made if
    /// it does not exist
    #[arg(long, value_name = "DIR", conflicts_with_all = ["image", "parent"])]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: COMMAND-TIME-PID]
    #[arg(long, requires = "store")]
    pub(crate) name: Option<String>,
    /// Let the program run on afterwards
    #[arg(short = 'R', long)]
    pub(crate) leave_running: bool,
    /// Save the program again and again, as long as it lives, and let it run on; each image can be
    /// restored by itself. A time that passes during a dump is left out
    #[arg(long, value_name = "DURATION", value_parser = interval, requires = "store",
          conflicts_with = "name")]
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
    /// How long the program may take to come to a halt
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Compression of the image: `none`, or a level of zstd from 1 (fast) to 19 (small)
    #[arg(long, value_name = "LEVEL", default_value = "1", value_parser = compression)]
    pub(crate) compress: Compression,
    /// Write to FILE what happened when: phases, passes over the memory, looks at it, copies, what had
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
    #[command(flatten)]
    pub(crate) criu: CriuArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(clap::Args)]
#[command(next_help_heading = "Options of CRIU")]
pub(crate) struct CriuArgs {
    /// The program is a shell job: its session leader is outside (found out by itself)
    #[arg(short = 'j', long)]
    pub(crate) shell_job: bool,
    /// Save established TCP connections
    #[arg(long)]
    pub(crate) tcp_established: bool,
    /// Save established TCP connections as closed ones
    #[arg(long)]
    pub(crate) tcp_close: bool,
    /// Save file locks
    #[arg(short = 'l', long)]
    pub(crate) file_locks: bool,
    /// Save Unix sockets that lead to processes outside
    #[arg(short = 'x', long)]
    pub(crate) ext_unix_sk: bool,
    /// Link deleted files that are open back into the file system
    #[arg(long)]
    pub(crate) link_remap: bool,
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

/// Bring a saved program back
///
/// The program has its old pids and goes on where it was. In the foreground (the default) gpucr
/// stands in for it: it passes signals on to the program, and ends with the program's exit status.
/// The image is only read, so it can be restored any number of times.
#[derive(clap::Args)]
#[command(after_long_help = "\
With --new-pids the program sees its old pids, in a pid namespace of its own with its own /proc, and has \
others outside, which are the ones that gpucr prints and takes. So one image can be restored several times \
at once, also beside the program that it was made of. Everything else is shared: instances that listen on \
the same port need a network of their own (ip netns exec NAME gpucr restore …), and files that the program \
has open for writing are the same files (unshare --mount, or a program that writes to its standard output). \
The program has no controlling terminal; gpucr passes signals on. A small process of gpucr's stays as the \
first of the namespace: if it is killed, everything in there is.\n\n\
Examples:\n  gpucr restore image/\n  pid=$(gpucr restore --detach image/)\n  \
for i in 1 2 3; do gpucr restore --new-pids --detach image/; done")]
pub(crate) struct RestoreArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// Leave the program in the background and print its pid
    #[arg(short = 'd', long, alias = "restore-detached")]
    pub(crate) detach: bool,
    /// Restore in a new pid namespace, where all pids are free
    #[arg(long)]
    pub(crate) new_pids: bool,
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
    /// GPU that the program could see there, also those that it did not use.
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub(crate) device_map: Vec<MappedDevice>,
    /// Let the program go on before its device memory is loaded
    ///
    /// A launch then waits only for the memory that its arguments point to; the rest is loaded beside the
    /// running program, and gpucr stays until it is. If the device touches memory that nobody saw it would
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
    /// with --on-demand. So gpucr has to stay: it cannot be detached.
    #[arg(long, conflicts_with_all = ["on_demand", "detach"])]
    pub(crate) share: bool,
    /// Read the image from disk, even if `gpucr warm` keeps it in memory
    #[arg(long)]
    pub(crate) no_warm: bool,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// This is the first process of a namespace: the descriptor on which to say what becomes of the
    /// restore, the last pid to leave free, and with --share the connection with a holder
    #[arg(long, hide = true, num_args = 1, value_delimiter = ',', value_name = "FDS")]
    pub(crate) inside: Option<Vec<u32>>,
}

/// Stand in for init in the pid namespace of a restored program
#[derive(clap::Args)]
pub(crate) struct InitArgs {
    /// The program
    pub(crate) pid: u32,
    /// The descriptor on which to say how it ends
    pub(crate) report: i32,
    /// What it shares, if it does
    pub(crate) watch: Vec<String>,
}

/// Keep an image ready in host memory
///
/// Reads, checks and decompresses an image once. A process in the background then keeps the result in
/// memory, where every `gpucr restore` of the image finds it by itself: it reads only the manifest from
/// disk, and does without reading the rest, decompressing and checking. Any number of restores may use it,
/// one after the other or at once. It is kept until it is dropped, or its process or the host ends.
#[derive(clap::Args)]
#[command(after_long_help = "\
The memory is as large as the image was before it was compressed; equal chunks count once, chunks of one \
repeated byte (most often zeros) not at all. It is not swapped out (Linux 6.4 or newer), and where the \
host runs out of memory the kernel ends the process first. Nothing is read if the image needs more than \
--memory-limit.\n\n\
If the image's devices are here, the process that keeps it opens them, pins the memory, and loads device \
memory for restores, which is faster than what a restore can do that has to open the device first. A context \
takes 260 to 530 MiB of each device's memory; it is given back where a restore leaves less than 2 GiB free. \
--list shows which images are pinned. --unpinned does without.\n\n\
--drop takes the directory of the image, or the first 8 or more digits of the identity that --list shows. \
A restore that is at work with it goes on to its end, and its memory is freed then.\n\n\
The directory with the manifest must stay where it is for restores; the data in it need not. No lock of a \
store is held: a gc may remove what the image needs, if the image was removed there.\n\n\
Restores find it in the network namespace that it was made warm in, and trust only processes of root.\n\n\
Examples:\n  gpucr warm /images/model\n  gpucr restore /images/model\n  gpucr warm --list\n  \
gpucr warm --drop /images/model\n\n\
As a systemd service (Type=notify), which ends with it:\n  \
ExecStart=gpucr warm --foreground /images/model")]
pub(crate) struct WarmArgs {
    /// The image
    #[arg(required_unless_present_any = ["list", "all"], conflicts_with_all = ["list", "all"])]
    pub(crate) image: Option<PathBuf>,
    /// Most memory that it may take [default: what is available, less 4 GiB or a sixteenth of all memory]
    #[arg(long, value_name = "SIZE", value_parser = size, conflicts_with_all = ["list", "drop"])]
    pub(crate) memory_limit: Option<u64>,
    /// Only keep it in memory: do not pin it, and do not open the image's devices
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) unpinned: bool,
    /// Keep it in this process, until it gets SIGTERM or SIGINT
    #[arg(long, conflicts_with_all = ["list", "drop"])]
    pub(crate) foreground: bool,
    /// List what is kept: identity, memory, since when, by which process, how often it was restored
    #[arg(long, conflicts_with = "drop")]
    pub(crate) list: bool,
    /// Drop the image from memory; what is on disk stays
    #[arg(long)]
    pub(crate) drop: bool,
    /// With --drop: all images
    #[arg(long, requires = "drop")]
    pub(crate) all: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the programs that run under gpucr
#[derive(clap::Args)]
pub(crate) struct PsArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show what a running program does with its device memory
///
/// Watches the kernels, copies and fills that a program launches for a while, and tells for each kernel
/// which allocations it reads and which it may write. The program must have been started with `gpucr
/// run`; it runs on all the time, and is left as it was. Recording costs it a fraction of a microsecond
/// for each launch.
#[derive(clap::Args)]
#[command(after_long_help = "\
READS and WRITES are how many allocations the arguments of a kernel have pointed to, and the bytes of \
those: a pointer stands for its whole allocation. The kernels that may write most come first.\n\n\
FROM says how it is known what is read and what is written: `code` is the kernel's PTX; `name` its C++ \
name, which tells pointers to const; `observed` means that the memory did not change while the kernel was \
launched; `assumed` that nothing is known, so that it counts as read and written. Copies and fills are \
`exact`.\n\n\
IDEMPOTENT is yes if doing it twice is the same as doing it once: it writes nothing that it reads, as far \
as its arguments tell; no if it reads and writes through the same pointer.\n\n\
CHECKED, with --check, counts launches of which was right, before they were made, which chunks of 2 MiB \
would change; of which more chunks were expected to change; and of which others changed.\n\n\
To observe, gpucr hashes all device memory at the beginning and the end. That takes a context of its own \
on the device and, for a short time, half of the device's speed; --no-observe leaves it out.\n\n\
Example:\n  gpucr run -- ./train &\n  gpucr trace --pid $! --for 5s\n  \
gpucr trace --pid $! --json | jq '.processes[].kernels[] | {name, launches, writes}'")]
pub(crate) struct TraceArgs {
    /// Root of the process tree
    #[arg(short = 't', long = "pid", alias = "tree", value_name = "PID")]
    pub(crate) pid: u32,
    /// How long to watch; Ctrl-C ends it early, with what there is
    #[arg(long = "for", value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) time: Duration,
    /// Do not hash the device memory
    #[arg(long, conflicts_with = "check")]
    pub(crate) no_observe: bool,
    /// Stop the program after each launch, and compare what changed in device memory with what the launch
    /// was thought to write. The program gets some hundreds of launches done in a second
    #[arg(long)]
    pub(crate) check: bool,
    /// Show every kernel, not only the 20 that may write most
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON object, with every argument of every kernel
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show what is in an image
///
/// Its identity, where it comes from, the processes as a tree, the devices, the blocks of device
/// memory, and the files. Nothing but manifest and index is read: `gpucr verify` tells whether the
/// data is whole.
#[derive(clap::Args)]
#[command(after_long_help = "\
SIZE is what the program sees, STORED what it takes up in the image: equal chunks are stored once, and \
count for each block and file that has them.\n\n\
The identity is the hash of the manifest, which names every chunk by its own hash: two images with one \
identity are the same, wherever they are.")]
pub(crate) struct InspectArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// Show every block and file, not only the 20 largest
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON object, with everything
    #[arg(long)]
    pub(crate) json: bool,
}

/// Read everything of an image and tell whether it is whole
///
/// Decompresses every chunk and checks it against its hash, on all cores. Goes on after damage: each
/// damaged chunk is named, with the process, block and address range or the file that it belongs to.
/// The image is only read. Exit code 0 if it is whole, 1 if not.
#[derive(clap::Args)]
#[command(after_long_help = "\
A damaged image is not restored: a restore checks the same and ends before anything runs. What can be \
done is to copy the image again from where it came from; the names of damaged files tell which ones.\n\n\
Example:\n  gpucr verify /images/train && echo fine\n  \
gpucr verify --json /images/train | jq '.damage[].owners[]'")]
pub(crate) struct VerifyArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Draw the timeline of a dump as a web page
///
/// Reads what `gpucr dump --timeline` wrote, and makes one HTML file that needs nothing else: a picture
/// of the phases, the passes of the pre-copy, the looks at the memory, the copies and the time for which
/// the program stood still, with bytes copied and bytes found changed over time; the same in a table; and
/// what had changed after it was copied, with the kernels that may have done it.
#[derive(clap::Args)]
#[command(after_long_help = "\
The timeline is in Chrome's trace event format: https://ui.perfetto.dev opens it as it is, to zoom in. A \
look hashes all device memory where it is; what changed between two of them is counted as found \
changed. `ahead` names copies made while the program ran, `what is left` those made while it stood still, \
`shadows` those made when it ran again, of copies aside within the device. Calls are held where they \
may write memory that is saved while the program runs again.\n\n\
Example:\n  gpucr dump --pid 4242 --leave-running -o image --timeline dump.json\n  \
gpucr report dump.json -o dump.html")]
pub(crate) struct ReportArgs {
    /// The timeline
    #[arg(value_name = "TIMELINE")]
    pub(crate) timeline: PathBuf,
    /// The page; `-` for stdout. What is there is replaced
    #[arg(short = 'o', long = "output", value_name = "FILE.html")]
    pub(crate) output: PathBuf,
}

/// Show what changed from one image to another
///
/// Compares the processes, each block of device memory, and each file, by the hashes of their chunks:
/// no data is read. What changed the most comes first; what did not change is left out. The last lines
/// tell what image B costs beside image A where both share chunks.
#[derive(clap::Args)]
#[command(after_long_help = "\
Blocks are compared place by place, in chunks of 2 MiB: a chunk with one changed byte counts whole. Of a \
file, what counts is the chunks that the other image's file of that name does not have, because CRIU \
may write the same pages in another order.\n\n\
Example:\n  gpucr diff /images/step-1000 /images/step-2000")]
pub(crate) struct DiffArgs {
    /// The image to start from
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// The image to compare with it
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// Show every block and file that changed, not only the 20 with the most changes
    #[arg(long)]
    pub(crate) all: bool,
    /// Print a JSON object, with what did not change too
    #[arg(long)]
    pub(crate) json: bool,
}

/// Write an image to one file, to ship it
///
/// The file is an uncompressed tar that holds the whole image and nothing else, whatever other images
/// or stores it shares chunks with. Chunks are copied as they are stored, and checked by the way.
/// `gpucr import` makes the same image of it again, with the same identity; so does `tar xf` in an
/// empty directory.
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr export /images/train train.tar\n  \
gpucr export /images/train - | ssh host gpucr import - -o /images/train")]
pub(crate) struct ExportArgs {
    /// The image
    pub(crate) image: PathBuf,
    /// The file, which must not exist; `-` for stdout
    #[arg(value_name = "FILE.tar")]
    pub(crate) file: PathBuf,
    /// Print the result as one JSON object (on stderr, if the tar goes to stdout)
    #[arg(long)]
    pub(crate) json: bool,
}

/// Make an image of a file that `gpucr export` wrote
///
/// Every chunk is decompressed and checked before the image appears in its place; whatever fails before
/// that leaves nothing behind. The file may come from anywhere: members that do not belong to an image,
/// links, and names that lead elsewhere are refused. (A restore runs the programs in it: that takes trust
/// in whoever made the image.)
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr import train.tar -o /images/train\n  \
ssh host gpucr export /images/train - | gpucr import - -o /images/train")]
pub(crate) struct ImportArgs {
    /// The file; `-` for stdin
    #[arg(value_name = "FILE.tar")]
    pub(crate) file: PathBuf,
    /// Directory for the image: new, or empty
    #[arg(short = 'o', long = "output", value_name = "IMAGE", required_unless_present = "store")]
    pub(crate) image: Option<PathBuf>,
    /// Put the image into the store DIR instead, which keeps equal chunks of all its images once
    #[arg(long, value_name = "DIR", conflicts_with = "image")]
    pub(crate) store: Option<PathBuf>,
    /// Name of the image in the store [default: that of the file, without .tar]
    #[arg(long, requires = "store")]
    pub(crate) name: Option<String>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the images of a store
///
/// For each image: bytes of device memory and of the host side as they were in the program; bytes
/// stored for it; and its own bytes, which no other image of the store needs, so that removing it
/// and a `gpucr gc` free about that much. Exit code 1 if an image cannot be read; the others are
/// listed all the same.
#[derive(clap::Args)]
#[command(after_long_help = "\
Example:\n  gpucr dump --pid 4242 --leave-running --store /images --name before\n  gpucr ls /images\n  \
gpucr restore /images/images/before")]
pub(crate) struct LsArgs {
    /// The store, as given to dump --store
    pub(crate) store: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Remove images
///
/// Each image is gone at once or there whole, whatever happens. What an image in a store shares with
/// others stays; what no image needs any more is freed by `gpucr gc`. An image that incremental images
/// in the same directory build on is not removed without --force.
#[derive(clap::Args)]
#[command(after_long_help = "\
Images elsewhere that build on a removed one (dump --parent) are not looked for. They cannot be \
restored without it.\n\n\
Examples:\n  gpucr rm monday tuesday\n  gpucr rm /images/images/step-1000 && gpucr gc /images")]
pub(crate) struct RmArgs {
    /// The images
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<PathBuf>,
    /// Also remove an image that others build on
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

/// Free what no image of a store needs
///
/// Safe beside running dumps and restores, and at any time after a crash: nothing that an image needs
/// is removed. It reads all manifests, moves what is needed out of files that are mostly not, merges
/// small files, and then waits until no dump or restore uses the store, for a short moment in which it
/// removes the rest. An image that cannot be read ends it, since that might need anything: restore its
/// files or remove it with `gpucr rm`.
#[derive(clap::Args)]
#[command(after_long_help = "\
It needs free space for what it moves: at most half of what it frees, and 1 GiB for small files \
that it merges. If it runs out of that, or is interrupted, or gives up waiting, nothing is lost; the \
next gc does the rest. Dumps into the store that begin while it waits go after it.\n\n\
Example:\n  gpucr rm /images/images/step-1000\n  gpucr gc /images")]
pub(crate) struct GcArgs {
    /// The store, as given to dump --store
    pub(crate) store: PathBuf,
    /// How long to wait for dumps and restores to end
    #[arg(long, value_name = "DURATION", default_value = "10m", value_parser = duration)]
    pub(crate) wait: Duration,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Tell whether this host can dump and restore
///
/// One line for each requirement, with what to do about those that are not met. Exit code 3 if one
/// is not.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print a completion script for a shell
#[derive(clap::Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Write the manual pages
#[derive(clap::Args)]
pub(crate) struct GenerateManArgs {
    /// Where to
    pub(crate) dir: PathBuf,
}

fn duration(text: &str) -> Result<Duration, String> {
    if let Ok(seconds) = text.parse::<f64>() {
        return Duration::try_from_secs_f64(seconds).map_err(|e| e.to_string());
    }
    humantime::parse_duration(text).map_err(|e| e.to_string())
}

fn interval(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("an interval has to be longer than nothing".into()),
        interval => Ok(interval),
    }
}

fn size(text: &str) -> Result<u64, String> {
    text.parse::<bytesize::ByteSize>().map(|size| size.as_u64())
}

fn compression(text: &str) -> Result<Compression, String> {
    match text.parse::<i32>() {
        _ if text == "none" => Ok(Compression::None),
        Ok(level @ 1..=19) => Ok(Compression::Level(level)),
        _ => Err("`none` or a number from 1 to 19 is expected".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn durations_and_levels() {
        assert_eq!(duration("1.5"), Ok(Duration::from_millis(1500)));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(duration("soon").is_err() && duration("-1").is_err());
        assert_eq!((size("4096"), size("8 GiB")), (Ok(4096), Ok(8 << 30)));
        assert!(size("much").is_err() && size("-1").is_err());
        assert_eq!(compression("none"), Ok(Compression::None));
        assert_eq!(compression("19"), Ok(Compression::Level(19)));
        assert!(compression("0").is_err() && compression("20").is_err());
    }
}
