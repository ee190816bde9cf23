//! CRIU: finding one that works on this machine, and building one where there is none.

use std::fmt::{self, Display};
use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use crate::debian::{self, Apt};
use crate::sys;

/// The oldest version that works with the kernels in use (older ones do not know the vDSO).
const OLDEST: Version = Version([4, 1, 0]);

/// The oldest one that can dump TCP sockets on Linux 6.16 or newer, where a TCP socket has no option `SO_PASSCRED` any
/// more: older ones give up at it (https://github.com/checkpoint-restore/criu/issues/2705).
const OLDEST_SINCE_6_16: Version = Version([4, 2, 0]);

/// The oldest version that serves this machine's kernel.
pub(crate) fn oldest() -> Version {
    oldest_for(&rustix::system::uname().release().to_string_lossy())
}

/// The oldest version that serves a kernel with this release, such as `6.18.5-generic`. What says no version counts as
/// old.
fn oldest_for(release: &str) -> Version {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= (6, 16) { OLDEST_SINCE_6_16 } else { OLDEST }
}

/// Where a CRIU built here is installed; `gpucr` looks there before it looks at PATH.
pub(crate) const INSTALLED: &str = "/usr/local/lib/gpucr/criu";

pub(crate) const DEBIAN_MIRROR: &str = "http://deb.debian.org/debian";

/// The suites that are asked for the source, in this order: the one that changes least first. One whose version is too
/// old for the kernel is passed over.
const SUITES: [&str; 3] = ["trixie", "sid", "forky"];

/// The upstream tarballs that are accepted: version and SHA256, as in Debian's Sources files.
const TARBALLS: [(&str, &str); 2] = [
    ("4.1.1", "f80a66cb3726bb2116266d4759ce3bcbfab7abdb6b6d430bf20dd41911717afe"),
    ("4.2.1", "29ec0ee09e296479fe7048c80980e8ef1d0684d0b0204c2b101dfea19f6725b9"),
];

/// The fourth number of the version of a CRIU that is built here, by which gpucr knows what is [`CHANGED`] in it
/// (`core/src/host/criu/find.rs`).
const CHANGES: u32 = 4;

/// What is changed in CRIU before it is built: the file, the text, which is there once, and what takes its place.
///
/// Asked to leave memory in a process (`--lazy-pages`), CRIU takes hold of all its pages with pipes, to give them to
/// whoever asks for them by the network. gpucr never asks: it reads the frozen process itself. So here CRIU only lists
/// these pages, in the way that it lists those that an earlier image has. Of what it does list for its pipes it copies
/// all that there is room for, 16 bytes for each page of private addresses: two gigabytes where a program has half a
/// terabyte of them, as CUDA's driver reserves them. Here it copies what is listed. And it asks the kernel of every page
/// whether it is there, on one thread. Here it lists a mapping that it leaves as a whole, if the kernel can tell guards
/// from pages (Linux 6.16), and gpucr finds on all cores what is there (`core/src/host/criu/pages/left.rs`); but not one
/// in which a thread has its stack, since CRIU writes that itself.
///
/// To read the flags of mappings from `smaps`, CRIU has the kernel count all pages of the program. Here it asks whoever
/// has started it, over a socket, for a file that has the same lines without the counts
/// (`core/src/host/criu/mappings.rs`), and reads `smaps` if it gets none.
///
/// All of this takes time for which the program stands still. Whoever gives this CRIU `--lazy-pages` by hand finds that it has no page for him.
const CHANGED: [(&str, &str, &str); 6] = [
    (
        "criu/mem.c",
        "ret = page_pipe_add_page(pp, vaddr, ppb_flags);",
        "ret = ppb_flags & PPB_LAZY && opts.lazy_pages ? page_pipe_add_hole(pp, vaddr, PP_HOLE_PARENT << 1) \
         : page_pipe_add_page(pp, vaddr, ppb_flags);",
    ),
    (
        "criu/mem.c",
        "if (pmc_get_map(pmc, vma))",
        "#ifdef PAGE_IS_GUARD
	if (opts.lazy_pages && !pre_dump && pmc->regs && kdat.has_pagemap_scan_guard_pages &&
	    vma_entry_can_be_lazy(vma->e)) {
		bool has_stack = false;
		int i;
		for (i = 0; i < item->nr_threads; i++) {
			uint64_t sp = dmpi(item)->thread_sp[i];
			has_stack |= sp >= vma->e->start && sp <= vma->e->end;
		}
		if (!has_stack) {
			if (page_pipe_add_hole(pp, vma->e->start, PP_HOLE_PARENT << 1))
				return -1;
			pp->holes[pp->free_hole - 1].iov_len += vma_area_len(vma) - PAGE_SIZE;
			return 0;
		}
	}
#endif
	if (pmc_get_map(pmc, vma))",
    ),
    (
        "criu/page-xfer.c",
        "if (hole_flags == PP_HOLE_PARENT)",
        "if (hole_flags == PP_HOLE_PARENT << 1) return PE_LAZY; else if (hole_flags == PP_HOLE_PARENT)",
    ),
    (
        "criu/mem.c",
        "memcpy(pargs_iovs(args), pp->iovs, sizeof(struct iovec) * pp->nr_iovs);",
        "memcpy(pargs_iovs(args), pp->iovs, sizeof(struct iovec) * pp->free_iov);",
    ),
    (
        "criu/proc_parse.c",
        "int parse_smaps(pid_t pid,",
        "#include \"common/scm.h\"

static int open_smaps(pid_t pid)
{
	const char *named = getenv(\"GPUCR_MAPPINGS\");
	int sk = named ? atoi(named) : -1;
	int fd = -1;

	if (sk > STDERR_FILENO && send(sk, &pid, sizeof(pid), MSG_NOSIGNAL) == sizeof(pid))
		fd = recv_fd(sk);
	return fd >= 0 ? fd : open_proc(pid, \"smaps\");
}

int parse_smaps(pid_t pid,",
    ),
    ("criu/proc_parse.c", "f.fd = open_proc(pid, \"smaps\");", "f.fd = open_smaps(pid);"),
];

/// What building CRIU needs.
const BUILD_PACKAGES: [&str; 17] = [
    "gcc",
    "libc6-dev",
    "make",
    "pkg-config",
    "binutils",
    "xz-utils",
    "libprotobuf-dev",
    "libprotobuf-c-dev",
    "protobuf-c-compiler",
    "protobuf-compiler",
    "libnl-3-dev",
    "libcap-dev",
    "libnet1-dev",
    "libbsd-dev",
    "libgnutls28-dev",
    "libnftables-dev",
    "uuid-dev",
];

/// Where CRIU's source comes from, should it be needed.
pub(crate) struct Source {
    /// A tarball that the user has; asked first, and then nothing is downloaded.
    pub(crate) tarball: Option<PathBuf>,
    /// The mirror of Debian's archive.
    pub(crate) mirror: String,
}

/// Makes sure that a CRIU which works here is where `gpucr` finds it.
///
/// # Errors
/// GPUCR_CRIU names one that does not work, or none can be installed or built. A CRIU at the place
/// of the installed one is replaced only by one that works.
pub(crate) fn ensure(apt: &mut Apt, source: &Source, from_source: bool) -> Result<()> {
    if is_from_before() {
        return build(apt, source).or_else(|error| {
            sys::say("criu", format!("it is not built anew: {error:#}"));
            if find()? { Ok(()) } else { Err(error) }
        });
    }
    if !from_source {
        if find()? {
            return Ok(());
        }
        if install_package(apt)? {
            return Ok(());
        }
    }
    build(apt, source)
}

/// Looks at the places where `gpucr` looks, in its order. Whether one works.
fn find() -> Result<bool> {
    if let Some(file) = std::env::var_os("GPUCR_CRIU").filter(|file| !file.is_empty()) {
        let file = PathBuf::from(file);
        let version = check(&file).with_context(|| {
            format!("GPUCR_CRIU={} (correct or unset it, then run again)", file.display())
        })?;
        sys::say("criu", format!("found {version} at {} (GPUCR_CRIU)", file.display()));
        return Ok(true);
    }
    // `gpucr` takes the first that it finds, so a broken first one is not made good by a second.
    let places =
        [Some(PathBuf::from(INSTALLED)).filter(|file| file.exists()), sys::on_path("criu")];
    let Some(file) = places.into_iter().flatten().next() else { return Ok(false) };
    match check(&file) {
        Ok(version) => {
            sys::say("criu", format!("found {version} at {}", file.display()));
            Ok(true)
        }
        Err(reason) => {
            sys::say("criu", format!("{} is of no use: {reason:#}", file.display()));
            Ok(false)
        }
    }
}

/// Whether the one in place was built here, with fewer [`CHANGES`].
fn is_from_before() -> bool {
    let named = std::env::var_os("GPUCR_CRIU").is_some_and(|file| !file.is_empty());
    let said = sys::capture(Command::new(INSTALLED).arg("--version"));
    !named && said.is_ok_and(|text| changes(&text) < CHANGES)
}

/// The fourth number of the version that CRIU says; 0 without one.
fn changes(said: &str) -> u32 {
    let version = said.lines().find_map(|line| line.strip_prefix("Version:"));
    version.and_then(|version| version.trim().split('.').nth(3)?.parse().ok()).unwrap_or(0)
}

/// Installs the distribution's package if it is new enough. Whether it works.
fn install_package(apt: &mut Apt) -> Result<bool> {
    if Path::new(INSTALLED).exists() {
        // It would hide the package from `gpucr`, so it is the one to replace.
        return Ok(false);
    }
    let Some(candidate) = apt.candidate("criu")? else {
        sys::say("criu", "the distribution has no package");
        return Ok(false);
    };
    let oldest = oldest();
    if Version::parse(&candidate).is_none_or(|version| version < oldest) {
        sys::say(
            "criu",
            format!("the package, {candidate}, is too old: this kernel needs {oldest} or newer"),
        );
        return Ok(false);
    }
    if let Err(error) = apt.install(&["criu"]) {
        sys::say("criu", format!("the package cannot be installed: {error:#}"));
        return Ok(false);
    }
    find()
}

/// Builds CRIU from its upstream tarball and installs it.
fn build(apt: &mut Apt, source: &Source) -> Result<()> {
    let start = Instant::now();
    apt.install(&BUILD_PACKAGES)?;
    let work = tempfile::tempdir().context("cannot make a temporary folder")?;
    let (tarball, version) = match &source.tarball {
        Some(file) => (file.clone(), pinned(file)?),
        None => download(source, work.path())?,
    };
    sys::say("criu", format!("building {version} from {}", tarball.display()));

    let tree = work.path().join("criu");
    std::fs::create_dir(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xf").arg(&tarball).arg("-C").arg(&tree);
    sys::capture(unpack.args(["--strip-components=1", "--no-same-owner"]))?;
    change(&tree)?;
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    // Variables of the surrounding make or cargo must not reach this build.
    sys::capture(
        Command::new("make")
            .current_dir(&tree)
            .env_remove("MAKEFLAGS")
            .env_remove("MFLAGS")
            .env_remove("CARGO_MAKEFLAGS")
            .args([
                format!("-j{jobs}"),
                format!("CRIU_VERSION_EXTRA={CHANGES}"),
                "criu".to_owned(),
            ]),
    )?;
    let built = tree.join("criu/criu");
    sys::capture(Command::new("strip").arg(&built))?;
    let version = check(&built).context(
        "CRIU was built, but does not work on this machine (in a container: run it privileged)",
    )?;
    install(&built)?;
    let seconds = start.elapsed().as_secs();
    sys::say("criu", format!("built {version} in {seconds} s, installed at {INSTALLED}"));
    Ok(())
}

/// Changes what is [`CHANGED`] in CRIU's source.
///
/// # Errors
/// A text is not there, or not just once.
fn change(tree: &Path) -> Result<()> {
    for (file, text, instead) in CHANGED {
        let file = tree.join(file);
        let source = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        if source.matches(text).count() != 1 {
            bail!("{} is not what is known of it: no one `{text}`", file.display());
        }
        std::fs::write(&file, source.replace(text, instead))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// Puts the binary in place in one step, so that a running dump keeps the file that it has.
fn install(built: &Path) -> Result<()> {
    let dir = Path::new(INSTALLED).parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut new = tempfile::NamedTempFile::new_in(dir)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    let mut from = File::open(built).with_context(|| format!("cannot read {}", built.display()))?;
    let written = std::io::copy(&mut from, new.as_file_mut())
        .and_then(|_| new.as_file().set_permissions(PermissionsExt::from_mode(0o755)))
        .and_then(|()| new.as_file().sync_all());
    written.with_context(|| format!("cannot write to {}", dir.display()))?;
    new.persist(INSTALLED).with_context(|| format!("cannot write {INSTALLED}"))?;
    Ok(())
}

/// Downloads one of the known tarballs from the first suite that has one.
fn download(source: &Source, dir: &Path) -> Result<(PathBuf, &'static str)> {
    let (mut failures, oldest) = (String::new(), oldest());
    for suite in SUITES {
        let fetched = debian::fetch_upstream_tarball("criu", suite, &source.mirror, dir);
        match fetched.and_then(|file| Ok((pinned(&file)?, file))) {
            Ok((version, _)) if Version::parse(version).is_none_or(|known| known < oldest) => {
                let needed = format!(
                    "{version} in Debian {suite} is too old: this kernel needs {oldest} or newer"
                );
                sys::say("criu", &needed);
                failures.push_str(&format!("\n  {needed}"));
            }
            Ok((version, file)) => {
                sys::say("criu", format!("source {version} from Debian {suite}, SHA256 checked"));
                return Ok((file, version));
            }
            Err(error) => {
                sys::say("criu", format!("no source from Debian {suite}"));
                failures.push_str(&format!("\n  {suite}: {error:#}"));
            }
        }
    }
    let known: Vec<String> =
        TARBALLS.iter().map(|(version, _)| format!("criu_{version}.orig.tar.xz")).collect();
    bail!(
        "no source of CRIU from {} (another mirror: --debian-mirror URL; a file: --criu-tarball \
         with {}):{failures}",
        source.mirror,
        known.join(" or "),
    )
}

/// The version of a tarball, known by its hash.
///
/// # Errors
/// The file cannot be read, or is none of the known ones.
fn pinned(file: &Path) -> Result<&'static str> {
    let sums = sys::capture(Command::new("sha256sum").arg("--").arg(file))?;
    // sha256sum puts a backslash in front where the file name holds one.
    let sum = sums.split_whitespace().next().unwrap_or_default().trim_start_matches('\\');
    TARBALLS.iter().find(|(_, known)| *known == sum).map(|(version, _)| *version).with_context(
        || format!("{} has SHA256 {sum}, which is no tarball known here", file.display()),
    )
}

/// Whether a CRIU works on this machine: new enough, content with the kernel, and able to dump and
/// restore a process.
///
/// # Errors
/// It does not; the error says at which of these, with the end of its output.
fn check(criu: &Path) -> Result<Version> {
    if !sys::is_executable(criu) {
        bail!("no executable file");
    }
    let text = sys::capture(Command::new(criu).arg("--version"))?;
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .and_then(Version::parse)
        .context("does not say a version as CRIU does")?;
    let oldest = oldest();
    if version < oldest {
        bail!("version {version}; this kernel needs {oldest} or newer");
    }
    sys::capture(Command::new(criu).arg("check"))?;
    rehearse(criu)?;
    Ok(version)
}

/// Dumps and restores a process that sleeps and has a TCP socket.
fn rehearse(criu: &Path) -> Result<()> {
    let dir = tempfile::tempdir().context("cannot make a temporary folder")?;
    let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot make a socket")?;
    // In a session of its own: CRIU refuses a process that belongs to a terminal's session.
    let mut command = Command::new("setsid");
    quiet(command.args(["sleep", "60"])).stdin(OwnedFd::from(socket));
    let mut sleeper = Started(command.spawn()?);
    // With it our copy of the socket, which would keep the restored process from its port.
    drop(command);
    let pid = sleeper.0.id();
    await_command(pid, "sleep")?;
    let dump = ["dump", "--tree", &pid.to_string()];
    finish(criu, &dump, dir.path()).context("cannot dump a process with a TCP socket")?;
    sleeper.0.wait().context("cannot wait for the dumped process")?;

    // As our child, so that nothing of it is left behind. CRIU ends once the process runs; killed
    // earlier, the process would make CRIU wait for ever.
    let restore = ["restore", "--restore-detached", "--restore-sibling"];
    finish(criu, &restore, dir.path()).context("cannot restore a process with a TCP socket")?;
    let restored = Pid::from_raw(pid.cast_signed()).context("a process without pid")?;
    kill_process(restored, Signal::KILL).context("the restored process does not run")?;
    waitpid(Some(restored), WaitOptions::empty()).context("the restored process is not ours")?;
    Ok(())
}

/// Runs CRIU to its end, with a time limit.
///
/// # Errors
/// It cannot be started, failed, or did not end; the error holds the end of its log.
fn finish(criu: &Path, words: &[&str], images: &Path) -> Result<()> {
    let mut command = Command::new(criu);
    command.args(words).args(["--log-file", "log", "--images-dir"]).arg(images);
    let mut started = Started(quiet(&mut command).spawn()?);
    let deadline = Instant::now() + Duration::from_secs(20);
    let ended = loop {
        match started.0.try_wait()? {
            Some(status) if status.success() => return Ok(()),
            Some(status) => break sys::ended(status),
            None if Instant::now() > deadline => break "not ended after 20 s".to_owned(),
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    let log = std::fs::read_to_string(images.join("log")).unwrap_or_default();
    bail!("`criu {}`: {ended}\n{}", words.join(" "), sys::tail(&log, 25))
}

/// A child that does not outlive a failure.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn quiet(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())
}

/// Waits until a process exists, runs this command, and sleeps in it.
fn await_command(pid: u32, name: &str) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while Instant::now() < deadline {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        if stat.contains(&format!("({name}) S")) {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    bail!("process {pid} does not run `{name}` after 10 s")
}

/// A version of CRIU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version([u32; 3]);

impl Version {
    /// Reads `4.1`, `4.2.1`, or a package's version such as `1:4.1.1-1+b2`.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let text = text.split_once(':').map_or(text, |(_epoch, rest)| rest);
        let upstream = text.split(['-', '+', '~', ' ']).next()?;
        let mut numbers = [0; 3];
        let mut parts = upstream.split('.');
        for (index, number) in numbers.iter_mut().enumerate() {
            match parts.next() {
                Some(part) => *number = part.parse().ok()?,
                None if index == 0 => return None,
                None => break,
            }
        }
        Some(Self(numbers))
    }
}

impl Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, patch] = self.0;
        write!(f, "{major}.{minor}")?;
        if patch != 0 { write!(f, ".{patch}") } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_criu_and_of_packages() {
        assert_eq!(Version::parse(" 4.2.1"), Some(Version([4, 2, 1])));
        assert_eq!(Version::parse("1:4.1.1-1+b2"), Some(Version([4, 1, 1])));
        assert_eq!(Version::parse("4.1~rc1-1"), Some(OLDEST));
        assert_eq!(Version::parse(""), None);
        assert_eq!(Version::parse("v4"), None);
        assert!(Version::parse("3.17.1-2+deb12u2").is_some_and(|version| version < OLDEST));
        assert!(Version::parse("4.10").is_some_and(|version| version > Version([4, 2, 1])));
    }

    #[test]
    fn what_is_changed_is_told_by_the_fourth_number() {
        assert_eq!(changes("Version: 4.2.1.2\nGitID: v4.2.1\n"), 2);
        assert_eq!(changes("Version: 4.2.1\n"), 0);
        assert_eq!(changes("Version: 4.2\n"), 0);
        assert_eq!(changes(""), 0);
    }

    #[test]
    fn newer_kernels_need_a_newer_criu() {
        for old in ["6.1.0-18-amd64", "6.15.11", "5.10", "unknown"] {
            assert_eq!(oldest_for(old), OLDEST, "{old}");
        }
        for new in ["6.16.0", "6.18.5-generic", "7.0-rc1"] {
            assert_eq!(oldest_for(new), OLDEST_SINCE_6_16, "{new}");
        }
    }

    #[test]
    fn only_known_tarballs_are_accepted() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("criu_4.2.1.orig.tar.xz");
        std::fs::write(&file, b"something else").unwrap();
        assert!(pinned(&file).unwrap_err().to_string().contains("no tarball known"));
    }

    #[test]
    fn a_program_that_is_no_criu_does_not_pass() {
        assert!(check(Path::new("/bin/true")).is_err());
        assert!(check(Path::new("/etc/passwd")).is_err());
        assert!(check(Path::new("/nonexistent")).is_err());
    }
}
