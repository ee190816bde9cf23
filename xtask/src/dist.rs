//! `cargo xtask dist`: a tarball that runs from wherever it is unpacked, and a Debian package.

mod deb;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

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

/// Where each thing lies below the root of a tree.
struct Layout {
    /// `libgpucr.so`, which programs load that save themselves.
    libraries: &'static str,
    /// Units of systemd.
    units: &'static str,
    /// Scripts by which shells complete command lines: the shell, the folder and the file.
    completions: [(&'static str, &'static str); 3],
}

const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/gpucr"),
    ("zsh", "share/zsh/vendor-completions/_gpucr"),
    ("fish", "share/fish/vendor_completions.d/gpucr.fish"),
];
/// In the tarball, of which each user takes what there is a use for.
const TARBALL: Layout =
    Layout { libraries: "lib", units: "lib/systemd/system", completions: COMPLETIONS };

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
    install(&sys::root().join("README.md"), &tree.join("README.md"), "644")?;

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

/// Puts everything into a tree that runs from wherever it is.
fn fill(tree: &Path, built: &Path, layout: &Layout) -> Result<()> {
    let root = sys::root();
    install(&built.join("gpucr"), &tree.join("bin/gpucr"), "755")?;
    sys::capture(Command::new("strip").arg(tree.join("bin/gpucr")))?;
    let libraries = [
        ("lib/gpucr", "libgpucr_intercept.so"),
        ("lib/gpucr", "libsoftcuda.so"),
        (layout.libraries, "libgpucr.so"),
    ];
    for (place, library) in libraries {
        let installed = tree.join(place).join(library);
        install(&built.join(library), &installed, "644")?;
        // The dynamic symbols stay: they are what the libraries are for.
        sys::capture(Command::new("strip").arg("--strip-unneeded").arg(&installed))?;
    }
    install(&root.join("capi/include/gpucr.h"), &tree.join("include/gpucr.h"), "644")?;
    for page in man_pages()? {
        let section = page.extension().and_then(|extension| extension.to_str());
        let (Some(section), Some(file)) = (section, page.file_name()) else { continue };
        install(&page, &tree.join(format!("share/man/man{section}")).join(file), "644")?;
    }
    for (shell, place) in layout.completions {
        let script =
            sys::capture(Command::new(tree.join("bin/gpucr")).args(["completions", shell]))?;
        write(&tree.join(place), &script)?;
    }
    for unit in ["gpucr@.service", "gpucr-warm@.service"] {
        let from = root.join("packaging").join(unit);
        install(&from, &tree.join(layout.units).join(unit), "644")?;
    }
    Ok(())
}

/// The manual pages.
fn man_pages() -> Result<Vec<PathBuf>> {
    let all = sys::root().join("man").read_dir().context("cannot read man/")?;
    let mut pages = Vec::new();
    for entry in all {
        let page = entry?.path();
        if page.extension().is_some_and(|section| section == "1" || section == "7") {
            pages.push(page);
        }
    }
    if pages.is_empty() {
        bail!("man/ holds no page; run `cargo xtask man`");
    }
    pages.sort();
    Ok(pages)
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

/// Writes a file, making the folders on the way.
fn write(to: &Path, text: &str) -> Result<()> {
    let dir = to.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    std::fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))
}

/// Gives an archive its name, and says so.
fn put_in_place(packed: &Path, archive: &Path) -> Result<()> {
    std::fs::rename(packed, archive)
        .with_context(|| format!("cannot put {} in place", archive.display()))?;
    let kib = archive.metadata()?.len() / 1024;
    sys::say("dist", format!("{} ({kib} KiB)", archive.display()));
    Ok(())
}
