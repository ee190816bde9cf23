//! `cargo xtask dist`: a tarball that runs from wherever it is unpacked, and a Debian package.

mod deb;
mod tree;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use self::tree::{Layout, fill, install, put_in_place};
use crate::sys;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build nothing, and pack what is in this folder
    #[arg(long, value_name = "DIR")]
    built: Option<PathBuf>,
    /// Where the archives go [default: dist/]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// In the tarball, of which each user takes what there is a use for.
const TARBALL: Layout = Layout { libraries: "lib", units: "lib/systemd/system" };

/// Builds, strips and packs. The archives do not depend on the user or the time.
///
/// # Errors
/// The build or a tool fails, or a file that belongs into the archives is missing. An older archive
/// of the same name is replaced only by a complete one.
pub(crate) fn run(args: &Args) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("gpucr is packed for x86_64 only, and this machine is {}", std::env::consts::ARCH);
    }
    let out = args.out.clone().unwrap_or_else(|| sys::root().join("dist"));
    if let Some(built) = &args.built {
        return pack(built, &out);
    }
    let packages = ["-p", "gpucr", "-p", "gpucr-c", "-p", "gpucr-intercept", "-p", "softcuda"];
    sys::run(sys::cargo().args(["build", "--release"]).args(packages))?;
    pack(&sys::target_dir()?.join("release"), &out)
}

/// Packs what was built in `built` into `dist`.
///
/// # Errors
/// As for [`run`].
fn pack(built: &Path, dist: &Path) -> Result<()> {
    let name = format!("gpucr-{}-x86_64-linux", sys::version()?);
    std::fs::create_dir_all(dist).with_context(|| format!("cannot make {}", dist.display()))?;
    let work = tempfile::tempdir_in(dist).context("cannot make a temporary folder in dist/")?;
    let tree = work.path().join(&name);
    fill(&tree, built, &TARBALL)?;
    for file in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
        install(&sys::root().join(file), &tree.join(file), "644")?;
    }

    let packed = work.path().join("packed.tar.gz");
    sys::capture(
        Command::new("tar")
            .args(["--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0"])
            .args(["--use-compress-program=gzip -9n", "-C"])
            .arg(work.path())
            .arg("-cf")
            .arg(&packed)
            .arg(&name),
    )?;
    put_in_place(&packed, &dist.join(format!("{name}.tar.gz")))?;
    if sys::on_path("dpkg-deb").is_none() {
        sys::say("dist", "no Debian package: dpkg-deb is not installed");
        return Ok(());
    }
    deb::pack(built, dist, work.path())
}

/// Builds the wheel of the Python package, with the library in it.
///
/// # Errors
/// The build fails, or there is no Python.
pub(crate) fn wheel() -> Result<()> {
    sys::run(sys::cargo().args(["build", "--release", "-p", "gpucr-c"]))?;
    let root = sys::root();
    let dist = root.join("dist");
    std::fs::create_dir_all(&dist).with_context(|| format!("cannot make {}", dist.display()))?;
    let work = tempfile::tempdir_in(&dist).context("cannot make a temporary folder in dist/")?;
    let library = work.path().join("libgpucr.so");
    std::fs::copy(sys::target_dir()?.join("release/libgpucr.so"), &library)?;
    sys::capture(Command::new("strip").arg("--strip-unneeded").arg(&library))?;
    let mut script = Command::new("python3");
    script.arg(root.join("python/build_wheel.py")).arg(&library).arg(&dist).arg(sys::version()?);
    sys::say("wheel", sys::capture(&mut script)?.trim());
    Ok(())
}
