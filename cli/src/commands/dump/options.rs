//! What the command line asks of a dump.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::SystemTime;

use gpucr_core::Error;
use gpucr_core::dump::{Feedback, Options, Target};
use gpucr_core::image::{Destination, Protocol};
use gpucr_core::timeline::Timeline;
use gpucr_core::trust::PrivateKey;

use super::args::{DumpArgs, ProtocolArg};
use crate::failure::{CliError, USAGE};

/// The key that signs the image, if one is named.
///
/// # Errors
/// It cannot be read.
pub(super) fn signer(args: &DumpArgs) -> Result<Option<PrivateKey>, CliError> {
    let key = args.sign.as_deref().map(PrivateKey::read).transpose();
    key.map_err(|error| CliError::from(Error::from(error)).state("Nothing was changed."))
}

/// The options of a dump, which ends early once `stop` is set.
///
/// # Errors
/// The arguments contradict each other.
pub(super) fn options(
    args: &DumpArgs,
    signer: Option<PrivateKey>,
    stop: Arc<AtomicBool>,
) -> Result<Options, CliError> {
    let leave_running = args.leave_running || args.every.is_some();
    let protocol = match args.protocol {
        ProtocolArg::Auto => None,
        ProtocolArg::Stop => Some(Protocol::Stop),
        ProtocolArg::Recopy => Some(Protocol::Recopy),
        ProtocolArg::Cow if !leave_running => {
            return Err(CliError::new(USAGE, "protocol cow needs a program that keeps running")
                .help("add --leave-running, or use --protocol recopy"));
        }
        ProtocolArg::Cow => Some(Protocol::Cow),
    };
    Ok(Options {
        pid: args.own_pid(),
        target: Target::Image(destination(args)?),
        leave_running,
        protocol,
        shadow_memory: args.shadow_memory,
        host_memory_limit: args.host_memory_limit,
        before_stop: args.exec_before_stop.clone(),
        timeout: args.timeout,
        at_sync: args.at_sync,
        compression: args.compress,
        shell_job: args.criu.shell_job,
        criu: args.criu.options(),
        tags: args.tags.clone(),
        save_files: args.save_files,
        timeline: match args.timeline {
            Some(_) => Timeline::recording(),
            None => Timeline::default(),
        },
        feedback: Feedback::default(),
        sign: signer.map(Arc::new),
        stop,
    })
}

/// Where the image is made. An image in a store that was given no name has a new one each time.
///
/// # Errors
/// A store is needed and none is named.
pub(super) fn destination(args: &DumpArgs) -> Result<Destination, CliError> {
    if let Some(store) = args.store()? {
        let default = || default_name(args.own_pid(), args.pid, SystemTime::now());
        let name = args.name.clone().unwrap_or_else(default);
        return Ok(Destination::Stored { store, name });
    }
    let path = args.image.clone().unwrap_or_else(|| PathBuf::from(format!("gpucr-{}", args.pid)));
    Ok(match &args.parent {
        Some(parent) => Destination::Incremental { path, parent: parent.clone() },
        None => Destination::Alone(path),
    })
}

/// A name that tells what was saved and when, to the millisecond, since a process may be dumped more than
/// once in a second: `train-20261121T083053.120Z-4242`. Here the process may have its `own` pid.
fn default_name(own: u32, pid: u32, now: SystemTime) -> String {
    let comm = std::fs::read_to_string(format!("/proc/{own}/comm")).unwrap_or_default();
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    let command: String = comm.trim().chars().map(|c| if fits(c) { c } else { '_' }).collect();
    let command = match command.trim_start_matches('.') {
        "" => "process",
        command => command,
    };
    let time = humantime::format_rfc3339_millis(now).to_string().replace(['-', ':'], "");
    format!("{command}-{time}-{pid}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_names_are_readable() {
        let now = std::time::UNIX_EPOCH + std::time::Duration::from_millis(1_790_000_000_120);
        let name = default_name(0, 0, now);
        assert_eq!(name, "process-20260921T141320.120Z-0");
        let own = default_name(std::process::id(), std::process::id(), now);
        assert!(own.ends_with(&format!("-20260921T141320.120Z-{}", std::process::id())), "{own}");
        assert!(!own.contains('/') && !own.starts_with('.'), "{own}");
    }
}
