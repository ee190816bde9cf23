//! `cargo xtask dist`: a tarball that runs from wherever it is unpacked.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::sys;

/// Builds, strips and packs. The archive does not depend on the user or the time.
///
/// # Errors
/// The build or a tool fails, or a file that belongs into the archive is missing. An older archive
/// of the same name is replaced only by a complete one.
pub(crate) fn run() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!("gpucr is packed for x86_64 only, and this machine is {}", std::env::consts::ARCH);
    }
    let packages = ["-p", "gpucr", "-p", "gpucr-c", "-p", "gpucr-intercept", "-p", "softcuda"];
    sys::run(sys::cargo().args(["build", "--release"]).args(packages))?;

    let root = sys::root();
    let release = sys::target_dir()?.join("release");
    let name = format!("gpucr-{}-x86_64-linux", sys::version()?);
    let dist = root.join("dist");
    std::fs::create_dir_all(&dist).with_context(|| format!("cannot make {}", dist.display()))?;
    let work = tempfile::tempdir_in(&dist).context("cannot make a temporary folder in dist/")?;
    let tree = work.path().join(&name);

    install(&release.join("gpucr"), &tree.join("bin/gpucr"), "755")?;
    sys::capture(Command::new("strip").arg(tree.join("bin/gpucr")))?;
    let libraries = [
        ("lib/gpucr", "libgpucr_intercept.so"),
        ("lib/gpucr", "libsoftcuda.so"),
        // For programs that save themselves.
        ("lib", "libgpucr.so"),
    ];
    for (place, library) in libraries {
        let installed = tree.join(place).join(library);
        install(&release.join(library), &installed, "755")?;
        // The dynamic symbols stay: they are what the libraries are for.
        sys::capture(Command::new("strip").arg("--strip-unneeded").arg(&installed))?;
    }
    install(&root.join("capi/include/gpucr.h"), &tree.join("include/gpucr.h"), "644")?;
    let mut man_pages = 0;
    for entry in root.join("man").read_dir().context("cannot read man/")? {
        let page = entry?.path();
        let section = page.extension().and_then(|extension| extension.to_str());
        let (Some(section @ ("1" | "7")), Some(file)) = (section, page.file_name()) else {
            continue;
        };
        install(&page, &tree.join(format!("share/man/man{section}")).join(file), "644")?;
        man_pages += 1;
    }
    if man_pages == 0 {
        bail!("man/ holds no page; run `cargo xtask man`");
    }
    install(&root.join("README.md"), &tree.join("README.md"), "644")?;

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
    let archive = dist.join(format!("{name}.tar.gz"));
    std::fs::rename(&packed, &archive)
        .with_context(|| format!("cannot put {} in place", archive.display()))?;
    let kib = archive.metadata()?.len() / 1024;
    sys::say("dist", format!("{} ({kib} KiB)", archive.display()));
    Ok(())
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

/// Copies a file to its place, making the folders on the way.
fn install(from: &Path, to: &Path, mode: &str) -> Result<()> {
    sys::capture(Command::new("install").args(["-D", "-m", mode]).arg(from).arg(to)).map(drop)
}
