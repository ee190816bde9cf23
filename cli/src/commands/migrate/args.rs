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

/// Move a running program to another host
///
/// Device memory is copied while the program runs; then the program is stopped, the remainder is sent, and the other
/// side checks that it has everything and can restore the program. Only then is the program handed over: it is ended
/// here, and the other side restores it. If anything fails before that, the program keeps running here. If anything
/// fails after that, the other side has a complete image, and `gpucr receive --resume` there brings the program back.
/// Data that the other side already has is not sent.
#[derive(clap::Args)]
#[command(after_long_help = "\
The other side is `gpucr receive`. With ssh://HOST gpucr starts it there, as root, over ssh. The other host \
needs the same driver, devices of the same kind, CRIU, the program's pids free (or --new-pids), and the files \
that the program has open or mapped, at the same paths and with the same sizes. --dry-run lists everything that \
would prevent the migration, and changes nothing. With --files copy the files that the program has open are sent \
along. A standard stream that is a file moves with the program; a pipe becomes /dev/null, and a terminal becomes \
one that nobody reads. With --relay pipes and terminals are relayed instead, and gpucr stays for as long as the \
program runs. With --stdout FILE a pipe becomes a file there.\n\n\
Both hosts record the migration in /var/lib/gpucr/migrations.\n\n\
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
    /// Reach the other side through this file descriptor, an open socket that gpucr was started with
    #[arg(long, value_name = "FD", conflicts_with = "to", value_parser = clap::value_parser!(i32).range(0..))]
    pub(crate) fd: Option<i32>,
    /// List everything known that would prevent the migration, and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// With ssh: give the program a pid namespace of its own there
    #[arg(long)]
    pub(crate) new_pids: bool,
    /// With ssh: restore the program there in the network namespace PATH, such as /run/netns/NAME
    #[arg(long, value_name = "PATH")]
    pub(crate) netns: Option<String>,
    /// With ssh: let the program continue on another device of the same kind (see gpucr-restore(1))
    #[arg(long, value_name = "OLD=NEW", value_delimiter = ',')]
    pub(crate) device_map: Vec<String>,
    /// What to do about files that the program has open
    #[arg(long, value_enum, default_value_t = FilesArg::Check)]
    pub(crate) files: FilesArg,
    /// With ssh and --files copy: files may be created there below DIR; may be repeated
    ///
    /// This becomes an option of `gpucr receive` there: whoever starts that decides what it may create.
    #[arg(long, value_name = "DIR", value_parser = plain_directory)]
    pub(crate) files_below: Vec<PathBuf>,
    /// Stay, relay the program's standard streams, and end with its exit status
    ///
    /// What the program writes to pipes or a terminal still comes out here, and what is written to the pipe that was
    /// its standard input still reaches it. Without this option pipes become /dev/null there, and nobody reads a
    /// terminal. If the connection is lost or this command is interrupted, the program continues, the other side
    /// keeps its output, and this command exits with status 255. See docs/migration.md.
    #[arg(long)]
    pub(crate) relay: bool,
    /// Run CMD in a shell here before the program is stopped
    ///
    /// In its environment GPUCR_PID is the pid of the program. What CMD prints goes to stderr. If it fails, so does the
    /// migration, and the program keeps running here.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec_before_stop: Option<OsString>,
    /// With ssh: run CMD in a shell there once the processes exist, before any of them runs
    ///
    /// This becomes an option of `gpucr receive` there; if you start that by hand, give it this option instead.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec_before_resume: Option<String>,
    /// With ssh: append the program's standard output to FILE there, if it is a pipe here
    ///
    /// Without this option such output goes to /dev/null there, unless it is relayed. If you start `gpucr receive` by
    /// hand, give it this option instead.
    #[arg(long, value_name = "FILE", conflicts_with = "relay")]
    pub(crate) stdout: Option<String>,
    /// The same for its standard error; if one pipe serves both streams, either option covers both
    #[arg(long, value_name = "FILE", conflicts_with = "relay")]
    pub(crate) stderr: Option<String>,
    /// Migrate even if the other side may have too little disk space for the image
    ///
    /// Without this option the program's memory, plus files that are sent along, must fit into the free space there.
    /// The image may well be smaller: memory that is zero or compresses well takes less, and data that is already
    /// there takes nothing.
    #[arg(long)]
    pub(crate) tight_disk: bool,
    /// With ssh: the command that connects, in shell syntax, such as `ssh -i KEY`
    ///
    /// On processors with AES instructions `ssh -c aes128-gcm@openssh.com` uses less CPU time than OpenSSH's default
    /// cipher.
    #[arg(long, value_name = "CMD", default_value = "ssh")]
    pub(crate) ssh: OsString,
    /// With ssh: the command for gpucr there, in shell syntax, such as `/opt/gpucr/gpucr` or `sudo gpucr`
    #[arg(long, value_name = "CMD", default_value = "gpucr")]
    pub(crate) remote_gpucr: String,
    /// How long the program may be stopped here; after that the migration is given up and it continues here
    #[arg(long, value_name = "DURATION", default_value = "5m", value_parser = interval)]
    pub(crate) max_stopped: Duration,
    /// Send at most this many bytes per second
    ///
    /// Units are accepted, as in 100MB or 1GiB; the minimum is 1 MiB. The limit also applies while the program is
    /// stopped.
    #[arg(long, value_name = "BYTES", value_parser = bandwidth)]
    pub(crate) bandwidth: Option<u64>,
    /// How long the program may be stopped because of the link
    ///
    /// Memory is copied in repeated passes until the remainder can be sent in this time at the rate measured on the
    /// link, or until further passes gain nothing. The time that both sides need to save and restore the processes is
    /// added to it. Without this option, passes go on for as long as each has at most half as much to copy as the one
    /// before, and until little is left.
    #[arg(long, value_name = "DURATION", value_parser = interval)]
    pub(crate) max_downtime: Option<Duration>,
    /// With --max-downtime: what to do if the program writes too fast to stay within it
    #[arg(long, value_enum, default_value_t = OnStallArg::Continue, requires = "max_downtime")]
    pub(crate) on_stall: OnStallArg,
    /// Send memory over this many connections with TLS, in addition to the link
    ///
    /// They go to the host of ssh://HOST, or to --streams-to. The other side has to permit them (--streams-at).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_STREAMS)))]
    pub(crate) streams: Option<u32>,
    /// With --streams: name or address of the other host, as seen from here
    #[arg(long, value_name = "HOST", requires = "streams")]
    pub(crate) streams_to: Option<String>,
    /// With ssh and --streams: the address at which the other side accepts streams, as for `gpucr receive`
    #[arg(long, value_name = "ADDRESS", requires = "streams", default_value = "[::]:0")]
    pub(crate) streams_at: SocketAddr,
    /// How long the other side may be silent before it is considered lost
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = interval)]
    pub(crate) silence: Duration,
    /// How to copy device memory
    #[arg(long, value_enum, default_value_t = ProtocolArg::Auto)]
    pub(crate) protocol: ProtocolArg,
    /// How long the program may take to come to a halt
    #[arg(long, value_name = "DURATION", default_value = "10s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Compression of what is sent: `none`, or a zstd level from 1 (fast) to 19 (small)
    #[arg(long, value_name = "LEVEL", default_value = "1", value_parser = compression)]
    pub(crate) compress: Compression,
    /// Append events to FILE as they happen, one JSON object per line
    ///
    /// FILE may be a pipe, or /dev/fd/3. `event` is `phase` (with the phase, and the bytes that it has to move),
    /// `pass` (one pass of the copy while the program runs: the remainder of device memory in bytes, the rates of the
    /// link and of the program's writes in bytes per second, and how long sending the remainder would stop the
    /// program), `migrated` (with the report) or `failed`; `ms` is the time since the start.
    #[arg(long, value_name = "FILE")]
    pub(crate) events: Option<PathBuf>,
    /// Write a timeline of both sides, on one clock, to FILE, for `gpucr report`
    #[arg(long, value_name = "FILE")]
    pub(crate) timeline: Option<PathBuf>,
    /// Keep a complete image in the directory IMAGE, which must be new or empty, until the other side confirms that
    /// the program runs there
    ///
    /// What is sent is also written to IMAGE, including while the program is stopped. The image is removed once the
    /// program runs, here or there. If the other side does not confirm that it runs, gpucr says where the image is:
    /// if the other host is lost for good, `gpucr restore` brings the program back from it. Never let the program run
    /// in both places.
    #[arg(long, value_name = "IMAGE")]
    pub(crate) safety_image: Option<PathBuf>,
    /// Sign the image with the private key in FILE (see gpucr-key(1))
    #[arg(long, value_name = "FILE")]
    pub(crate) sign: Option<PathBuf>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// List this host's records of migrations that are not complete
    #[arg(long, conflicts_with_all = ["pid", "to", "fd"])]
    pub(crate) list: bool,
    /// Delete the record of a migration of which this host was the source
    #[arg(long, value_name = "ID", conflicts_with_all = ["pid", "to", "fd", "list"])]
    pub(crate) forget: Option<MigrationId>,
    /// This process is in the pid namespace of the program: the pid that it has there
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) inside: Option<u32>,
    #[command(flatten)]
    pub(crate) criu: CriuArgs,
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
                (host, Some(port.parse().map_err(|_| "its port is not a number up to 65535")?))
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
    /// They must exist there, with the same sizes
    Check,
    /// Files that are missing there are sent along, except executables and libraries
    ///
    /// They are created there before the program is handed over, with the same owners and modes, and are removed
    /// again if it is not handed over. The directories must exist, and the other side has to permit it
    /// (--files-below). Files that exist there are not touched, and must have the same size. The files also stay
    /// here.
    Copy,
}

/// What to do with a program that writes too fast.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnStallArg {
    /// Stop the program anyway, for longer
    Continue,
    /// Give up the migration
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
                return Err(CliError::new(USAGE, "it is not known which host the streams go to")
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
    path.ok_or_else(|| "an absolute path without `.`, `..` and `//` is expected".into())
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
    /// Everything while the program is stopped
    Stop,
    /// Most while the program runs; what changes meanwhile is copied again while it is stopped
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
