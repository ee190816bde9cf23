//! The options of `gpucr migrate`.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use gpucr_core::image::Protocol;
use gpucr_core::migrate::{Goal, MOST_STREAMS, MigrationId, OnStall, WantedStreams, is_plain};
use gpucr_core::store::Compression;

use crate::commands::dump::args::CriuArgs;
use crate::failure::{CliError, USAGE};
use crate::values::{compression, duration, interval, pids, size};

/// Bring a running program to another host
///
/// Device memory is copied while the program runs; then it is stopped, the rest is sent, and the other side checks
/// that it has everything and can restore it. Only then is the program handed over, and ended here; the other side
/// restores it. Whatever fails before that leaves the program running here. Whatever fails after it leaves a complete
/// image on the other side, where `gpucr receive --resume` brings it back. What the other side has already is not sent.
#[derive(clap::Args)]
#[command(after_long_help = "\
The other side is `gpucr receive`. With ssh://HOST gpucr starts it there, as root, with ssh. The other host needs the \
same driver, devices of the same kind, CRIU, the program's pids (or --new-pids), and the files that the program has \
open or mapped, under the same paths and of the same sizes: --dry-run tells all that is in the way, and changes \
nothing. With --files copy those that the program has open are sent along. What the program has as standard streams goes with it if it is a file; a pipe becomes /dev/null, and a \
terminal one that nobody reads, unless they are relayed (--relay): then gpucr stays for as long as the program runs. \
With --stdout FILE a pipe becomes a file there.\n\n\
What was handed over is noted in /var/lib/gpucr/migrations, on both hosts.\n\n\
Examples:\n  gpucr migrate --pid 4242 --to ssh://root@other --dry-run\n  \
gpucr migrate --pid 4242 --to ssh://root@other --new-pids\n\n  \
gpucr receive --from unix:/run/next.sock &\n  gpucr migrate --pid 4242 --to unix:/run/next.sock")]
pub(crate) struct MigrateArgs {
    /// Root of the process tree
    #[arg(short = 't', long = "pid", value_name = "PID", value_parser = pids(),
          required_unless_present_any = ["list", "forget"])]
    pub(crate) pid: Option<u32>,
    /// The other side: ssh://[USER@]HOST[:PORT][/STORE], or unix:PATH where `gpucr receive` listens
    #[arg(long, value_name = "WHERE", required_unless_present_any = ["fd", "list", "forget"])]
    pub(crate) to: Option<To>,
    /// The other side is at the other end of the socket that gpucr was started with as this descriptor
    #[arg(long, value_name = "FD", conflicts_with = "to", value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) fd: Option<i32>,
    /// Only tell what is in the way; nothing is changed
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// With ssh: the program gets a pid namespace of its own there
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// With ssh: the program gets the network namespace PATH there, such as /run/netns/NAME
    #[arg(long, value_name = "PATH")]
    pub(crate) netns: Option<String>,
    /// With ssh: the program goes on on another device of the same kind (see gpucr-restore(1))
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub(crate) device_map: Vec<String>,
    /// What is done about files that the program has open
    #[arg(long, value_enum, default_value_t = FilesArg::Check)]
    pub(crate) files: FilesArg,
    /// With ssh and --files copy: files may be made there below DIR, which may be given more than once
    ///
    /// It is handed on to `gpucr receive`, which takes it from whoever has started it.
    #[arg(long, value_name = "DIR", value_parser = plain_directory)]
    pub(crate) files_below: Vec<PathBuf>,
    /// Stay, relay the program's standard streams, and end with its exit status
    ///
    /// What the program writes to pipes or a terminal comes out here, where it did before, and what is written to a pipe
    /// that is its standard input goes to it. Without it pipes are /dev/null there, and nobody reads a terminal. If the
    /// connection is lost, the program goes on, the other side keeps what it writes, and this command ends with 255; so
    /// it does if it is interrupted. See docs/migration.md.
    #[arg(long)]
    pub(crate) relay: bool,
    /// With ssh: add the program's standard output to FILE there, if it is a pipe here
    ///
    /// Without it that is /dev/null there, unless it is relayed. Where `gpucr receive` is started by hand it has this option.
    #[arg(long, value_name = "FILE", conflicts_with = "relay")]
    pub(crate) stdout: Option<String>,
    /// The same for its standard error; with a pipe for both, either option takes both
    #[arg(long, value_name = "FILE", conflicts_with = "relay")]
    pub(crate) stderr: Option<String>,
    /// Go though the other side may have too little disk space for the image
    ///
    /// Without it the memory of the program, and files that go along, have to be less than what is free there. But
    /// memory that is zero or compresses well takes less, and what is there already takes nothing.
    #[arg(long)]
    pub(crate) tight_disk: bool,
    /// With ssh: the command that connects, as a shell takes it: `ssh -i KEY`
    ///
    /// `ssh -c aes128-gcm@openssh.com` takes less of the processors than OpenSSH's first choice where these have
    /// instructions for AES.
    #[arg(long, value_name = "CMD", default_value = "ssh")]
    pub(crate) ssh: OsString,
    /// With ssh: gpucr's command there, as a shell takes it: `/opt/gpucr/gpucr`, or `sudo gpucr`
    #[arg(long, value_name = "CMD", default_value = "gpucr")]
    pub(crate) remote_gpucr: String,
    /// For how long the program may stand still here; after that it goes on here
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = interval)]
    pub(crate) max_stopped: Duration,
    /// Send at most so many bytes a second
    ///
    /// With units, as 100MB or 1GiB, at least 1 MiB. It holds while the program stands still too.
    #[arg(long, value_name = "BYTES", value_parser = bandwidth)]
    pub(crate) bandwidth: Option<u64>,
    /// For how long the link may hold the program up while it stands still
    ///
    /// Memory is copied again and again until what is left would go over in so much time at the rate that the link has
    /// shown, or until nothing is gained by that any more. The time that both sides take to save and make the processes
    /// comes on top of it. Without it passes end when each has half of the last to copy, or little is left.
    #[arg(long, value_name = "DURATION", value_parser = interval)]
    pub(crate) max_downtime: Option<Duration>,
    /// With --max-downtime: what to do with a program that writes too fast for it
    #[arg(long, value_enum, default_value_t = OnStallArg::Continue, requires = "max_downtime")]
    pub(crate) on_stall: OnStallArg,
    /// Send memory over so many connections besides the link, with TLS
    ///
    /// They go to the host of ssh://HOST, or where --streams-to says. The other side has to let them (--streams-at).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_STREAMS)))]
    pub(crate) streams: Option<u32>,
    /// With --streams: name or address of the other host, as seen from here
    #[arg(long, value_name = "HOST", requires = "streams")]
    pub(crate) streams_to: Option<String>,
    /// With ssh and --streams: where streams may come to there, as `gpucr receive` takes it
    #[arg(long, value_name = "ADDRESS", requires = "streams", default_value = "[::]:0")]
    pub(crate) streams_at: SocketAddr,
    /// How long the other side may be silent until it is taken for lost
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = interval)]
    pub(crate) silence: Duration,
    /// How device memory is copied
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    pub(crate) protocol: ProtocolArg,
    /// How long the program may take to come to a halt
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Compression of what is sent: `none`, or a level of zstd from 1 (fast) to 19 (small)
    #[arg(long, value_name = "LEVEL", default_value = "1", value_parser = compression)]
    pub(crate) compress: Compression,
    /// Add what happens to FILE, one JSON object on a line
    ///
    /// A pipe will do, and so will /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to
    /// move), `pass` (of the copy while the program runs: what is left of device memory, the rate of the link and that
    /// at which the program writes, in bytes and bytes a second, and the time for which it would have to wait for what is
    /// left), `migrated` (with the report) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Record what happens when, on both sides and on one clock, for `gpucr report`
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
    /// Keep a complete image in IMAGE, which is new or empty, until the other side says that the program runs there
    ///
    /// What is sent is written there too, while the program stands still as well. The image is removed when the program
    /// runs, here or there. If that is not heard, gpucr says where the image is: if the other host is lost for good,
    /// `gpucr restore` brings the program back from it. It must not run in two places.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) safety_image: Option<PathBuf>,
    /// Sign the image with the private key in FILE (see gpucr-key(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) sign: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) criu: CriuArgs,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// List what this host has noted of migrations that are not over
    #[arg(long, conflicts_with_all = ["pid", "to", "fd"])]
    pub(crate) list: bool,
    /// Forget a migration of which this host was the source
    #[arg(long, value_name = "ID", conflicts_with_all = ["pid", "to", "fd", "list"])]
    pub(crate) forget: Option<MigrationId>,
    /// This process is in the pid namespace of the program: the pid that it has there
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) inside: Option<u32>,
}

/// Where the other side is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum To {
    /// It listens at this socket.
    Unix(PathBuf),
    /// It is started by ssh.
    Ssh {
        /// As ssh takes it: `[USER@]HOST`.
        host: String,
        port: Option<u16>,
        /// The store there.
        store: Option<String>,
    },
}

impl std::str::FromStr for To {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Self::Unix(path.into()));
        }
        let rest = text.strip_prefix("ssh://");
        let rest = rest.ok_or("it is neither ssh://[USER@]HOST[:PORT][/STORE] nor unix:PATH")?;
        let (host, store) = match rest.find('/') {
            Some(at) => (&rest[..at], Some(rest[at..].to_owned()).filter(|store| store != "/")),
            None => (rest, None),
        };
        let (host, port) = match host.rsplit_once(':') {
            // The colons of an IPv6 address are within its brackets.
            Some((host, port)) if !port.contains(']') => {
                (host, Some(port.parse().map_err(|_| "its port is no number of 16 bits")?))
            }
            _ => (host, None),
        };
        let name = host.rsplit_once('@').map_or(host, |(_, name)| name);
        let name_is_sound = !name.is_empty() && !name.starts_with('-');
        // ssh would take it for an option.
        if !name_is_sound || host.starts_with('-') {
            return Err("it names no host".into());
        }
        let host = host.replace(['[', ']'], "");
        Ok(Self::Ssh { host, port, store })
    }
}

/// What to do about files that the program has open.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FilesArg {
    /// They have to be there, and of the same sizes
    Check,
    /// Those that are not there are sent along, but for executables and libraries
    ///
    /// They are made there before the program is handed over, with the same owners and modes, and are removed if it is
    /// not. The directories have to be there, and the other side has to permit it (--files-below). What is there already
    /// is not touched, and has to be the same size. Here they stay.
    Copy,
}

/// What to do with a program that writes too fast.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnStallArg {
    /// Stop it all the same, for longer
    Continue,
    /// Give the migration up
    Abort,
}

impl MigrateArgs {
    /// The streams that are wanted; `Err` if it is not known where they go.
    pub(super) fn wanted_streams(&self) -> Result<Option<WantedStreams>, CliError> {
        let Some(count) = self.streams else { return Ok(None) };
        let host = match (&self.streams_to, &self.to) {
            (Some(host), _) => host.clone(),
            (None, Some(To::Ssh { host, .. })) => {
                host.rsplit_once('@').map_or(host.as_str(), |(_, name)| name).to_owned()
            }
            _ => {
                return Err(CliError::new(USAGE, "nothing says where the streams go")
                    .help("name the other host: --streams-to HOST"));
            }
        };
        Ok(Some(WantedStreams { count, host }))
    }

    pub(super) fn goal(&self) -> Option<Goal> {
        let on_stall = match self.on_stall {
            OnStallArg::Continue => OnStall::Continue,
            OnStallArg::Abort => OnStall::Abort,
        };
        self.max_downtime.map(|max_downtime| Goal { max_downtime, on_stall })
    }
}

/// A directory, by a path that is the same everywhere.
pub(crate) fn plain_directory(text: &str) -> Result<PathBuf, String> {
    let is_plain = |path: &PathBuf| is_plain(path);
    let trimmed = if text.len() > 1 { text.trim_end_matches('/') } else { text };
    let path = Some(PathBuf::from(trimmed)).filter(is_plain);
    path.ok_or_else(|| "it is no absolute path without `.`, `..` and `//`".into())
}

/// A rate that lets a frame through before the other side takes this one for lost.
fn bandwidth(text: &str) -> Result<u64, String> {
    match size(text)? {
        bytes if bytes < 1 << 20 => Err("it is less than 1 MiB a second".into()),
        bytes => Ok(bytes),
    }
}

/// How device memory is copied.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ProtocolArg {
    /// The best of those below
    Auto,
    /// Everything while the program stands still
    Stop,
    /// Most while the program runs, what has changed again while it stands still
    Recopy,
}

impl ProtocolArg {
    pub(crate) fn protocol(self) -> Option<Protocol> {
        match self {
            Self::Auto => None,
            Self::Stop => Some(Protocol::Stop),
            Self::Recopy => Some(Protocol::Recopy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_side_is_named_as_ssh_does() {
        let ssh = |host: &str, port, store: Option<&str>| To::Ssh {
            host: host.into(),
            port,
            store: store.map(str::to_owned),
        };
        for (text, expected) in [
            ("ssh://other", ssh("other", None, None)),
            ("ssh://root@other:2222/big/store", ssh("root@other", Some(2222), Some("/big/store"))),
            ("ssh://other/", ssh("other", None, None)),
            ("ssh://root@[fe80::1]:22", ssh("root@fe80::1", Some(22), None)),
            ("ssh://[fe80::1]", ssh("fe80::1", None, None)),
            ("unix:/run/a", To::Unix("/run/a".into())),
        ] {
            assert_eq!(text.parse(), Ok(expected), "{text}");
        }
        for text in [
            "",
            "other",
            "unix:",
            "ssh://",
            "ssh:///store",
            "ssh://-oProxyCommand=x",
            "ssh://a:b",
            "ssh://r@-x",
        ] {
            assert!(text.parse::<To>().is_err(), "{text}");
        }
    }
}
