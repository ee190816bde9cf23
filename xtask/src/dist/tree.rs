//! What is packed, in the folders in which it runs.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::sys;

/// Where each thing lies below the root of a tree.
pub(super) struct Layout {
    /// `libgpucr.so`, which programs load that save themselves.
    pub(super) libraries: &'static str,
    /// Units of systemd.
    pub(super) units: &'static str,
}

/// Scripts by which shells complete command lines: the shell, and the file.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/gpucr"),
    ("zsh", "share/zsh/vendor-completions/_gpucr"),
    ("fish", "share/fish/vendor_completions.d/gpucr.fish"),
];

/// Puts everything into a tree that runs from wherever it is.
pub(super) fn fill(tree: &Path, built: &Path, layout: &Layout) -> Result<()> {
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
    for (shell, place) in COMPLETIONS {
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
pub(super) fn man_pages() -> Result<Vec<PathBuf>> {
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

/// Copies a file to its place, making the folders on the way.
pub(super) fn install(from: &Path, to: &Path, mode: &str) -> Result<()> {
    sys::capture(Command::new("install").args(["-D", "-m", mode]).arg(from).arg(to)).map(drop)
}

/// Writes a file, making the folders on the way.
pub(super) fn write(to: &Path, text: &str) -> Result<()> {
    let dir = to.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    std::fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))
}

/// Gives an archive its name, and says so.
pub(super) fn put_in_place(packed: &Path, archive: &Path) -> Result<()> {
    std::fs::rename(packed, archive)
        .with_context(|| format!("cannot put {} in place", archive.display()))?;
    let kib = archive.metadata()?.len() / 1024;
    sys::say("dist", format!("{} ({kib} KiB)", archive.display()));
    Ok(())
}
