//! `gpucr run`.

mod args;
mod dumping;
mod entry;
mod events;
mod failures;
mod images;
mod life;
mod listener;
mod supervisor;
mod tickets;

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use clap::ValueEnum;
use gpucr_core::{Error, library};
use gpucr_wire::{
    ABORTED, AT_BARRIERS, ENV_DRIVER, ENV_INTERRUPT_LEVEL, ENV_INTERRUPTIBLE, IN_LOOPS,
};

use self::args::SupervisionArgs;
use self::life::cannot_run;
use crate::commands::{Outcome, io_error};
use crate::failure::CliError;

/// With 0, the key-value store of PyTorch's distributed programs does not use libuv, whose io_uring CRIU cannot save. (libuv's own `UV_USE_IO_URING` does not keep it from that.) What the user sets counts.
const TORCH_LIBUV: &str = "USE_LIBUV";

/// Start a program so that it can be checkpointed fast
///
/// Sets up the environment and becomes the program, which keeps the pid. The environment gets LD_LIBRARY_PATH with
/// gpucr's libcuda.so.1 in front of the driver's, and USE_LIBUV=0 unless that is set: with libuv PyTorch's key-value
/// store uses io_uring, which CRIU cannot save. If gpucr run is the first process of a container, it instead starts
/// the program in a session of its own, passes signals on to it and exits with its exit status. Without a GPU the
/// program runs on the software driver, which executes kernels that come as PTX on the CPU; programs that need
/// NVIDIA's libraries, such as PyTorch, need a GPU.
#[derive(clap::Args)]
#[command(after_long_help = "\
With any of the options under \"Saving and restarting\", gpucr does not become the program but stays as its \
parent and watches over it: it saves the program, restores it when it fails, passes signals on to it, and exits \
with its exit status. The program is saved and restored with the privileges of the user who started gpucr run, \
which must be root. If standard output and standard error are files, gpucr and the program append to them from \
then on (O_APPEND), since a restored program writes on at the end of each file. Exit status 75 means that the \
program was saved and ended because of a signal (--on-signal). SIGHUP, SIGINT, SIGQUIT and SIGTERM ask the \
program to end; after one of them it is neither saved nor restored any more.\n\n\
Examples:\n  gpucr run -- ./train\n  \
gpucr run --store /images --every 10m --keep 3 --restart 3 -- ./train")]
pub(crate) struct RunArgs {
    /// Which driver the program gets
    #[arg(long, value_enum, default_value_t = DeviceArg::Auto)]
    pub(crate) device: DeviceArg,
    /// Give the program a pid namespace of its own, so that its pids are free whenever it is restored (needs root)
    ///
    /// With --resume this works after a reboot too, when other processes may have the pids. Standard streams that are
    /// files are reopened inside the namespace, for appending, because a program cannot be dumped with a file that
    /// was opened outside.
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// This is the first process of that namespace
    #[arg(long, hide = true)]
    pub(crate) inside: bool,
    /// Kernels that a dump may interrupt and that later continue from there: names, with `*` and `?`, or `auto` for
    /// kernels with a launch that took 20 ms. For long-running kernels only: work that the program queues behind one
    /// waits up to a second for it to end
    #[arg(long, value_name = "KERNELS", value_delimiter = ',')]
    pub(crate) interruptible: Vec<String>,
    /// Where to interrupt them. Kernels whose blocks took less than 75 ms in their last launches are interrupted between
    /// blocks, whatever the level
    #[arg(long, value_name = "LEVEL", value_enum, default_value_t = LevelArg::Block, requires = "interruptible")]
    pub(crate) interrupt_level: LevelArg,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    pub(crate) command: Vec<OsString>,
    #[command(flatten)]
    pub(crate) supervision: SupervisionArgs,
}

/// Where kernels are interrupted.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LevelArg {
    /// Between two of their blocks; costs next to nothing
    Block,
    /// At barriers in loops if blocks use shared memory or barriers, else between blocks. Meant for kernels with few,
    /// long-running blocks
    Barrier,
    /// Also in loops, if threads are independent of each other. Loops of few instructions take up to 10 %
    /// longer
    Loop,
    /// Like `loop`; where that is not possible and the launch is idempotent, blocks are aborted and later run again
    /// from their start
    Abort,
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

/// Sets up the environment, and becomes the program or watches over it.
pub(crate) fn run(args: &RunArgs) -> Outcome {
    if args.inside {
        entry::settle()?;
    } else if args.new_pids {
        return entry::in_new_namespace();
    }
    let shim = install(library::SHIM, "shim")?;
    let driver = match args.device {
        DeviceArg::Soft => install(library::SOFT_DRIVER, "soft")?,
        DeviceArg::Cuda => nvidia().ok_or_else(|| Error::NoDriver("of NVIDIA".into()))?,
        DeviceArg::Auto => match nvidia() {
            Some(driver) => driver,
            None => install(library::SOFT_DRIVER, "soft")?,
        },
    };
    let mut path = shim.parent().expect("the shim is in a directory").as_os_str().to_owned();
    if let Some(rest) = std::env::var_os("LD_LIBRARY_PATH").filter(|rest| !rest.is_empty()) {
        path.push(":");
        path.push(rest);
    }
    let program = &args.command[0];
    let mut command = Command::new(program);
    if std::env::var_os(TORCH_LIBUV).is_none() {
        command.env(TORCH_LIBUV, "0");
    }
    if !args.interruptible.is_empty() {
        command.env(ENV_INTERRUPTIBLE, args.interruptible.join(","));
        match args.interrupt_level {
            LevelArg::Block => {}
            LevelArg::Barrier => drop(command.env(ENV_INTERRUPT_LEVEL, AT_BARRIERS)),
            LevelArg::Loop => drop(command.env(ENV_INTERRUPT_LEVEL, IN_LOOPS)),
            LevelArg::Abort => drop(command.env(ENV_INTERRUPT_LEVEL, ABORTED)),
        }
    }
    command.args(&args.command[1..]).env("LD_LIBRARY_PATH", path).env(ENV_DRIVER, driver);
    let needs_session = entry::is_needed();
    if args.supervision.is_wanted() {
        if needs_session {
            entry::in_own_session(&mut command);
        }
        return supervisor::run(&args.supervision, command);
    }
    if needs_session && !entry::lead() {
        return entry::stay(command);
    }
    let error = command.exec();
    Err(cannot_run(&command, &error))
}

fn install(name: &str, kind: &str) -> Result<PathBuf, CliError> {
    let path = library::own(name)?;
    let bytes =
        std::fs::read(&path).map_err(io_error(&format!("cannot read {}", path.display())))?;
    Ok(library::install(&bytes, kind, &library::library_root())?)
}

/// NVIDIA's driver, if there is a device behind it.
fn nvidia() -> Option<PathBuf> {
    let device = ["/dev/nvidiactl", "/dev/dxg"].iter().any(|d| std::path::Path::new(d).exists());
    library::nvidia().filter(|_| device)
}
