//! `gpucr check`.

use std::process::ExitCode;
use std::sync::Arc;

use gpucr_core::criu::Criu;
use gpucr_core::cuda::{Device, Driver, HostDriver};
use gpucr_core::image::DriverKind;
use gpucr_core::{library, process};

use crate::commands::{Outcome, print_json, say_folded};
use crate::failure::HOST;
use crate::paint::Paint;
use crate::say;

/// The column at which what was found begins.
const FOUND: usize = "MISSING  ".len() + 16 + 1;
/// Before what to do.
const ARROW: &str = "-> ";

/// Check whether this host can dump and restore
///
/// Prints one line for each requirement, with what to do about those that are not met. Exit code 3 if one is not met.
#[derive(clap::Args)]
pub(crate) struct CheckArgs {
    /// Print a JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(serde::Serialize)]
struct Row {
    name: &'static str,
    /// Whether it is met; `null` for something that only some programs need.
    met: Option<bool>,
    found: String,
    /// What to do, where it is not met.
    mend: Option<String>,
}

impl Row {
    fn met(name: &'static str, found: impl Into<String>) -> Self {
        Self { name, met: Some(true), found: found.into(), mend: None }
    }

    fn missing(name: &'static str, found: impl Into<String>, mend: impl Into<String>) -> Self {
        Self { name, met: Some(false), found: found.into(), mend: Some(mend.into()) }
    }
}

#[derive(serde::Serialize)]
struct Summary {
    /// Whether everything is met.
    ready: bool,
    /// `cuda` or `soft`: what `gpucr run` would use.
    device: &'static str,
    requirements: Vec<Row>,
}

pub(crate) fn run(args: &CheckArgs) -> Outcome {
    let driver = driver();
    let device = if driver.met == Some(true) { "cuda" } else { "soft" };
    let requirements = vec![
        root(),
        kernel(),
        criu_version(),
        criu_check(),
        criu_cache(),
        tcp_sockets(),
        other_users(),
        host_memory(),
        late_memory(),
        library_row("shim", library::SHIM),
        library_row("software driver", library::SOFT_DRIVER),
        driver,
    ];
    let ready = requirements.iter().all(|row| row.met != Some(false));
    let summary = Summary { ready, device, requirements };
    if args.json {
        print_json(&summary)?;
    } else {
        for row in &summary.requirements {
            let (paint, mark) = match row.met {
                Some(true) => (Paint::Good, "ok"),
                Some(false) => (Paint::Bad, "MISSING"),
                None => (Paint::Warning, "limited"),
            };
            let space = " ".repeat("MISSING".len() - mark.len());
            let rest = format!("{space}  {:<16} {}", row.name, row.found);
            say::painted_folded(FOUND, &[(paint, mark), (Paint::Plain, &rest)]);
            if let Some(mend) = &row.mend {
                say_folded!(FOUND + ARROW.len(), "{:FOUND$}{ARROW}{mend}", "");
            }
        }
    }
    Ok(if ready { ExitCode::SUCCESS } else { ExitCode::from(HOST) })
}

fn root() -> Row {
    if rustix::process::geteuid().is_root() {
        return Row::met("root", "running as root");
    }
    Row::missing("root", "running as another user", "dump and restore need root: use sudo")
}

fn kernel() -> Row {
    const NAME: &str = "kernel";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    // pidfd_open came with 5.3 and fsmount with 5.2; CRIU asks for features one by one.
    if version >= (5, 9) {
        return Row::met(NAME, format!("Linux {release}"));
    }
    Row::missing(NAME, format!("Linux {release}"), "Linux 5.9 or newer is needed")
}

fn criu_version() -> Row {
    const NAME: &str = "CRIU";
    match Criu::find(None) {
        Ok(criu) => Row::met(NAME, format!("{} at {}", criu.version(), criu.path().display())),
        Err(error) => Row::missing(
            NAME,
            error.to_string(),
            "install CRIU 4.1 or newer, 4.2 on Linux 6.16 or newer; `cargo xtask setup` in gpucr's source tree does it",
        ),
    }
}

fn criu_check() -> Row {
    const NAME: &str = "CRIU and kernel";
    let Ok(criu) = Criu::find(None) else {
        return Row { name: NAME, met: None, found: "needs CRIU".into(), mend: None };
    };
    match criu.check() {
        Ok(()) => Row::met(NAME, "criu check finds everything"),
        Err(error) => Row::missing(
            NAME,
            error.to_string(),
            "run gpucr as root, in a container with --privileged, on a kernel with CONFIG_CHECKPOINT_RESTORE",
        ),
    }
}

/// CRIU keeps what it has found out about the kernel in /run, if that is gone after a boot.
fn criu_cache() -> Row {
    const NAME: &str = "CRIU's cache";
    /// `TMPFS_MAGIC` of statfs(2).
    const TMPFS: u64 = 0x0102_1994;
    if rustix::fs::statfs("/run").is_ok_and(|run| run.f_type as u64 == TMPFS) {
        return Row::met(NAME, "CRIU remembers in /run what this kernel can do");
    }
    Row {
        name: NAME,
        met: None,
        found: "/run is not a tmpfs, so CRIU probes the kernel each time: programs are stopped some hundredths of \
                a second longer"
            .into(),
        mend: Some("mount a tmpfs at /run, as systemd does".into()),
    }
}

/// Only some programs have one: without it the host is ready all the same.
fn tcp_sockets() -> Row {
    const NAME: &str = "TCP sockets";
    let none = |found: String, mend| Row { name: NAME, met: None, found, mend };
    match Criu::find(None) {
        Err(_) => none("needs CRIU".into(), None),
        Ok(criu) if criu.dumps_tcp_sockets() => {
            Row::met(NAME, "programs with TCP sockets can be dumped")
        }
        Ok(criu) => none(
            format!("CRIU {} cannot dump programs with TCP sockets on this kernel", criu.version()),
            Some(
                "install CRIU 4.2 or newer; `cargo xtask setup` in gpucr's source tree does it"
                    .into(),
            ),
        ),
    }
}

/// CRIU asks for the limits of each process by prlimit(2), which for another user's needs CAP_SYS_RESOURCE.
fn other_users() -> Row {
    /// `CAP_SYS_RESOURCE` of capabilities(7).
    const NUMBER: u32 = 24;
    const NAME: &str = "other users";
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok()).unwrap_or(0);
    if set >> NUMBER & 1 == 1 {
        return Row::met(NAME, "their programs can be dumped");
    }
    Row {
        name: NAME,
        met: None,
        found: "their programs cannot be dumped: CAP_SYS_RESOURCE is missing".into(),
        mend: Some(
            "run gpucr with all capabilities; a container may have been denied this one".into(),
        ),
    }
}

/// Dumps work without it, and stop programs with much host memory for longer.
fn host_memory() -> Row {
    const NAME: &str = "host memory";
    match process::why_untracked() {
        None => Row::met(NAME, "is tracked by userfaultfd, and copied while programs run"),
        Some(why) => Row {
            name: NAME,
            met: None,
            found: format!(
                "is not tracked ({why}): all of it is copied while programs are stopped"
            ),
            mend: Some(
                "run gpucr as root, on Linux 6.7 or newer, where userfaultfd(2) is permitted"
                    .into(),
            ),
        },
    }
}

/// Restores work without it, and programs with much host memory go on later.
fn late_memory() -> Row {
    const NAME: &str = "late memory";
    match Criu::why_no_late_memory() {
        None => Row::met(NAME, "host memory can be loaded while a program runs (--on-demand)"),
        Some(why) => Row {
            name: NAME,
            met: None,
            found: format!(
                "host memory is loaded before a program runs, --on-demand or not ({why})"
            ),
            mend: Some(
                "run gpucr as root, where userfaultfd(2), perf_event_open(2) and tracefs are permitted"
                    .into(),
            ),
        },
    }
}

fn library_row(name: &'static str, file: &str) -> Row {
    match library::own(file) {
        Ok(path) => Row::met(name, path.display().to_string()),
        Err(error) => Row::missing(
            name,
            error.to_string(),
            "build all of gpucr (`cargo build --workspace`), or set GPUCR_LIB_DIR",
        ),
    }
}

/// NVIDIA's driver. Without one gpucr serves programs on the software driver.
fn driver() -> Row {
    const NAME: &str = "NVIDIA's driver";
    let none = |found: String| Row { name: NAME, met: None, found, mend: None };
    let Some(path) = library::nvidia() else {
        return none("no libcuda.so.1; programs run on the software driver".into());
    };
    let library = match HostDriver::vouched(&path, DriverKind::Nvidia) {
        Ok(library) => Arc::new(library),
        Err(error) => return none(format!("{} cannot be opened: {error}", path.display())),
    };
    let described = Driver::open(&library).and_then(|driver| {
        let named = |device: &Device| {
            let private = driver.is_exportable(device).is_ok_and(|exportable| !exportable);
            // Such as those of WSL, and of some virtual GPUs.
            let note = " (slow to dump: its memory cannot be shared with another process)";
            format!("{}{}", device.name, if private { note } else { "" })
        };
        let names: Vec<String> = driver.devices()?.iter().map(named).collect();
        let version = driver.version()?;
        Ok(format!(
            "CUDA {}.{} at {}: {}",
            version / 1000,
            version % 1000 / 10,
            path.display(),
            names.join(", ")
        ))
    });
    match described {
        Ok(found) => Row::met(NAME, found),
        Err(error) if !std::path::Path::new("/dev/nvidiactl").exists() => {
            none(format!("no device: {error}"))
        }
        Err(error) => Row::missing(NAME, error.to_string(), "install driver 570 or newer"),
    }
}
