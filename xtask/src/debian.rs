//! Debian's package tools: installing packages, and fetching an upstream tarball from Debian's
//! archive without touching the machine's apt configuration.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::sys;

/// The keyring that Debian's archive is checked with. Ubuntu does not have it.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The machine's own apt. Refreshes the package lists once, and only if something is installed.
#[derive(Default)]
pub(crate) struct Apt {
    refreshed: bool,
}

impl Apt {
    /// Installs packages that are not installed yet.
    ///
    /// # Errors
    /// There is no apt, or it fails; the error holds the end of its output.
    pub(crate) fn install(&mut self, packages: &[&str]) -> Result<()> {
        let missing: Vec<&str> = packages.iter().copied().filter(|name| !installed(name)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        self.refresh(&missing)?;
        sys::say("apt", format!("installing {}", missing.join(" ")));
        sys::capture(
            Command::new("apt-get")
                .env("DEBIAN_FRONTEND", "noninteractive")
                .args(["-y", "-q", "-o", "DPkg::Lock::Timeout=300"])
                .args(["install", "--no-install-recommends"])
                .args(&missing),
        )
        .with_context(|| {
            format!("cannot install {} (install by hand, then run again)", missing.join(" "))
        })?;
        Ok(())
    }

    /// The version of a package that apt would install, or `None` if it knows none.
    ///
    /// # Errors
    /// There is no apt.
    pub(crate) fn candidate(&mut self, package: &str) -> Result<Option<String>> {
        self.refresh(&[package])?;
        let policy =
            sys::capture(Command::new("apt-cache").env("LC_ALL", "C").args(["policy", package]))?;
        let candidate = policy.lines().find_map(|line| line.trim().strip_prefix("Candidate: "));
        Ok(candidate.filter(|version| *version != "(none)").map(str::to_owned))
    }

    /// Brings the package lists up to date, once. A repository that does not answer is no failure
    /// as long as what is needed can be installed.
    fn refresh(&mut self, wanted: &[&str]) -> Result<()> {
        if self.refreshed {
            return Ok(());
        }
        if sys::on_path("apt-get").is_none() {
            bail!(
                "apt-get not found: this set-up knows Debian and Ubuntu only. Install {} by hand, \
                 and CRIU {} or newer (name it in GPUCR_CRIU if it is not on PATH)",
                wanted.join(" "),
                crate::criu::oldest(),
            );
        }
        let mut update = Command::new("apt-get");
        update.args(["-q", "-o", "DPkg::Lock::Timeout=300", "update"]);
        match sys::capture(&mut update) {
            Ok(_) => sys::say("apt", "package lists refreshed"),
            Err(error) => sys::say("apt", format!("package lists not refreshed: {error:#}")),
        }
        self.refreshed = true;
        Ok(())
    }
}

fn installed(package: &str) -> bool {
    let mut query = Command::new("dpkg-query");
    let status = sys::capture(query.args(["-W", "-f=${db:Status-Status}\n", package]));
    status.is_ok_and(|status| status.lines().any(|line| line == "installed"))
}

/// Fetches the upstream tarball of a source package from one suite of Debian's archive into `dir`,
/// with sources, lists and caches of its own inside `dir`.
///
/// Only the tarball is fetched: the packaging files are not needed. Where the machine has Debian's
/// keyring the suite's signature is checked; where it has not, the caller's check of the tarball
/// against a hash that it knows is all there is, so the result must never be used without.
///
/// # Errors
/// The suite cannot be reached or does not have the package; the error holds the end of apt's
/// output.
pub(crate) fn fetch_upstream_tarball(
    package: &str,
    suite: &str,
    mirror: &str,
    dir: &Path,
) -> Result<PathBuf> {
    let dir = dir.join(suite);
    std::fs::create_dir_all(dir.join("lists/partial"))
        .with_context(|| format!("cannot make {}", dir.display()))?;
    let trust = match Path::new(KEYRING).exists() {
        true => format!("signed-by={KEYRING}"),
        false => "trusted=yes".to_owned(),
    };
    let sources = dir.join("sources.list");
    std::fs::write(&sources, format!("deb-src [{trust}] {mirror} {suite} main\n"))
        .with_context(|| format!("cannot write {}", sources.display()))?;

    let apt = |words: &[&str]| {
        let mut command = Command::new("apt-get");
        command.current_dir(&dir).env("LC_ALL", "C").arg("-q");
        for (option, value) in [
            ("Dir::Etc::SourceList", sources.as_path()),
            ("Dir::Etc::SourceParts", Path::new("/dev/null")),
            ("Dir::State::Lists", &dir.join("lists")),
            // Else apt would write the machine's caches from these sources.
            ("Dir::Cache::pkgcache", Path::new("")),
            ("Dir::Cache::srcpkgcache", Path::new("")),
            // Its unprivileged user cannot write into a private temporary folder.
            ("APT::Sandbox::User", Path::new("root")),
            // The caller knows the tarball's hash, so a mirror that lags behind does no harm.
            ("Acquire::Check-Valid-Until", Path::new("false")),
        ] {
            command.arg("-o").arg(format!("{option}={}", value.display()));
        }
        sys::capture(command.args(words))
    };
    // apt may call a partial failure a success; then the next command fails.
    apt(&["update"])?;
    apt(&["source", "--download-only", "--tar-only", package])?;

    let prefix = format!("{package}_");
    for entry in dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with(&prefix) && name.contains(".orig.tar.") && !name.ends_with(".asc") {
            return Ok(path);
        }
    }
    bail!("apt-get source {package} left no tarball")
}
