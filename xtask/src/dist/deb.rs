//! The Debian package.
//!
//! dpkg puts each new file next to the old one and renames it, so whoever has the old one open or mapped keeps it. A
//! program that runs under gpucr has its shim from a directory with the shim's hash in its name anyway, which no
//! package owns.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use super::tree::{Layout, fill, install, put_in_place, write};
use crate::{criu, sys};

const LAYOUT: Layout = Layout { libraries: "lib/x86_64-linux-gnu", units: "lib/systemd/system" };

/// Scripts that dpkg runs.
const SCRIPTS: [&str; 3] = ["postinst", "prerm", "postrm"];

/// Packs what was built in `built` into `dist`, by way of the folder `work`.
///
/// # Errors
/// A tool fails or is missing.
pub(super) fn pack(built: &Path, dist: &Path, work: &Path) -> Result<()> {
    let version = sys::version()?;
    let tree = work.join("deb");
    let (usr, control) = (tree.join("usr"), tree.join("DEBIAN"));
    fill(&usr, built, &LAYOUT)?;
    compress_pages(&usr.join("share/man"))?;
    let packaging = sys::root().join("packaging/debian");
    let documents = usr.join("share/doc/gpucr");
    install(&packaging.join("copyright"), &documents.join("copyright"), "644")?;
    install(&sys::root().join("README.md"), &documents.join("README.md"), "644")?;
    for script in SCRIPTS {
        install(&packaging.join(script), &control.join(script), "755")?;
    }
    // For the units: what they start, and its output.
    for dir in ["etc/gpucr/programs", "var/log/gpucr"] {
        std::fs::create_dir_all(tree.join(dir)).with_context(|| format!("cannot make {dir}"))?;
    }
    let criu = Path::new(criu::INSTALLED);
    let has_criu = criu.exists();
    if has_criu {
        install(criu, &usr.join("lib/gpucr/criu"), "755")?;
    } else {
        sys::say("dist", "the package has no CRIU: `cargo xtask setup --from-source` builds one");
    }
    let text = control_file(&version, &depends(&usr, work, has_criu)?, size(&usr)?, has_criu);
    write(&control.join("control"), &text)?;
    write(&control.join("triggers"), "activate-noawait ldconfig\n")?;
    let packed = work.join("packed.deb");
    sys::capture(
        Command::new("dpkg-deb")
            .args(["--build", "--root-owner-group", "-Zxz"])
            .arg(&tree)
            .arg(&packed)
            // No file is newer than this in the archive.
            .env("SOURCE_DATE_EPOCH", "0"),
    )?;
    put_in_place(&packed, &dist.join(format!("gpucr_{version}_amd64.deb")))
}

fn control_file(version: &str, depends: &str, kib: u64, has_criu: bool) -> String {
    let criu = if has_criu { "" } else { ", criu (>= 4.1)" };
    format!(
        "Package: gpucr\n\
         Version: {version}\n\
         Architecture: amd64\n\
         Maintainer: the authors of gpucr <gpucr@localhost>\n\
         Section: utils\n\
         Priority: optional\n\
         Installed-Size: {kib}\n\
         Depends: {depends}{criu}\n\
         Recommends: iptables\n\
         Description: Checkpoint and restore of running CUDA programs\n \
         gpucr checkpoints a running CUDA program to disk and restores it later. It works from\n \
         outside: the program needs no changes.\n"
    )
}

/// The packages that have the libraries which the package's programs are linked with, as dpkg's own tool finds them.
fn depends(usr: &Path, work: &Path, has_criu: bool) -> Result<String> {
    // It asks for the source's description.
    let source = work.join("source");
    write(
        &source.join("debian/control"),
        "Source: gpucr\n\nPackage: gpucr\nArchitecture: amd64\n",
    )?;
    let mut command = Command::new("dpkg-shlibdeps");
    command.args(["-O", "--ignore-missing-info"]).current_dir(&source);
    let libraries = ["lib/gpucr/libgpucr_intercept.so", "lib/gpucr/libsoftcuda.so"];
    for file in [&["bin/gpucr"][..], &libraries].concat() {
        command.arg(usr.join(file));
    }
    if has_criu {
        command.arg(usr.join("lib/gpucr/criu"));
    }
    let said = sys::capture(&mut command).context(
        "the package's dependencies are found by dpkg-shlibdeps: apt-get install dpkg-dev",
    )?;
    let depends = said.lines().find_map(|line| line.strip_prefix("shlibs:Depends="));
    depends.map(str::to_owned).context("dpkg-shlibdeps has named no dependencies")
}

/// KiB that the installed files take, as dpkg counts.
fn size(tree: &Path) -> Result<u64> {
    let said = sys::capture(Command::new("du").args(["-sk", "--apparent-size"]).arg(tree))?;
    said.split_whitespace().next().and_then(|kib| kib.parse().ok()).context("du said no number")
}

/// Debian's manual pages are compressed.
fn compress_pages(man: &Path) -> Result<()> {
    for section in ["man1", "man7"] {
        for entry in man.join(section).read_dir().with_context(|| format!("no {section}"))? {
            sys::capture(Command::new("gzip").arg("-9n").arg(entry?.path()))?;
        }
    }
    Ok(())
}
