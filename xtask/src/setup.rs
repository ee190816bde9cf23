//! `cargo xtask setup`: what a fresh Debian or Ubuntu machine lacks.

use std::path::PathBuf;

use anyhow::{Result, bail};

use crate::debian::Apt;
use crate::{criu, sys};

/// Programs that building needs, and the packages that bring them.
const TOOLS: [(&str, &[&str]); 5] = [
    ("cc", &["gcc", "libc6-dev"]),
    ("make", &["make"]),
    ("pkg-config", &["pkg-config"]),
    ("strip", &["binutils"]),
    ("xz", &["xz-utils"]),
];

#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Build CRIU from source even if a working one is there
    #[arg(long, hide = true)]
    from_source: bool,
    /// CRIU's upstream tarball, for a machine that cannot reach Debian's archive
    #[arg(long, value_name = "FILE")]
    criu_tarball: Option<PathBuf>,
    /// The mirror of Debian's archive to take CRIU's source from
    #[arg(long, value_name = "URL", default_value = criu::DEBIAN_MIRROR)]
    debian_mirror: Option<String>,
}

/// Makes the machine ready to build, test and run gpucr. Does nothing where nothing is missing.
///
/// # Errors
/// Not root, no apt where something is missing, a package that cannot be installed, or no CRIU that
/// works here. What was installed before the failure stays installed; running it again goes on
/// from there.
pub(crate) fn run(args: &Args) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "set-up, tests and demo need root, because CRIU does: become root with cargo on PATH \
             (sudo -E env \"PATH=$PATH\" cargo xtask ...)"
        );
    }
    let mut apt = Apt::default();
    build_tools(&mut apt)?;
    pids();
    let source = criu::Source {
        tarball: args.criu_tarball.clone(),
        mirror: args.debian_mirror.clone().unwrap_or_else(|| criu::DEBIAN_MIRROR.to_owned()),
    };
    criu::ensure(&mut apt, &source, args.from_source)
}

/// Sees to it that pids last a while: a program is restored with its own, and while tests run these would be given to
/// others within minutes. On hosts with systemd there are as many already. Where that may not be set nothing is.
fn pids() {
    const HIGHEST: &str = "/proc/sys/kernel/pid_max";
    const WANTED: u32 = 1 << 22;
    let now = std::fs::read_to_string(HIGHEST).ok().and_then(|text| text.trim().parse().ok());
    if now.is_none_or(|now: u32| now < WANTED) {
        match std::fs::write(HIGHEST, WANTED.to_string()) {
            Ok(()) => sys::say("pids", format!("kernel.pid_max is {WANTED} until the next boot")),
            Err(error) => sys::say("pids", format!("kernel.pid_max stays as it is: {error}")),
        }
    }
}

fn build_tools(apt: &mut Apt) -> Result<()> {
    let missing: Vec<_> = TOOLS.iter().filter(|(tool, _)| sys::on_path(tool).is_none()).collect();
    if missing.is_empty() {
        sys::say("build tools", "found cc, make, pkg-config");
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().flat_map(|(_, packages)| *packages).copied().collect();
    apt.install(&packages)?;
    sys::say("build tools", format!("installed {}", packages.join(" ")));
    Ok(())
}
