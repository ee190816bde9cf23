//! `cargo xtask man`: man/*.1 from the definition of the command line, man/*.7 from pages in Markdown.

mod markdown;

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};

use crate::sys;

/// Name, source and subject of the pages that are not about a command.
const PAGES: [(&str, &str, &str); 2] = [
    ("gpucr-image", "docs/image-format.md", "files of gpucr images and stores"),
    ("gpucr-security", "SECURITY.md", "whom gpucr trusts, and whose images it accepts"),
];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail if the pages in man/ are not current
    #[arg(long)]
    check: bool,
}

/// Writes the pages, or compares them with what would be written.
///
/// # Errors
/// `gpucr` does not build or fails, a file cannot be written, or (with `--check`) a page is not
/// current.
pub(crate) fn run(args: &Args) -> Result<()> {
    sys::run(sys::cargo().args(["build", "--package", "gpucr"]))?;
    let gpucr = sys::target_dir()?.join("debug/gpucr");
    let fresh_dir = tempfile::tempdir().context("cannot make a temporary folder")?;
    let mut command = std::process::Command::new(gpucr);
    sys::capture(command.arg("generate-man").arg(fresh_dir.path()))?;

    let mut fresh = pages(fresh_dir.path())?;
    if fresh.is_empty() {
        bail!("`gpucr generate-man` wrote no page");
    }
    for (name, file, about) in PAGES {
        let file = sys::root().join(file);
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        fresh.insert(format!("{name}.7"), markdown::page(name, 7, about, &text).into_bytes());
    }
    let man = sys::root().join("man");
    let stored = if man.exists() { pages(&man)? } else { BTreeMap::new() };

    let changed: Vec<&str> = stored
        .keys()
        .chain(fresh.keys().filter(|name| !stored.contains_key(*name)))
        .filter(|name| stored.get(*name) != fresh.get(*name))
        .map(String::as_str)
        .collect();
    if args.check && !changed.is_empty() {
        bail!("not current: man/{} (run `cargo xtask man`)", changed.join(", man/"));
    }
    std::fs::create_dir_all(&man).with_context(|| format!("cannot make {}", man.display()))?;
    for name in &changed {
        let file = man.join(name);
        match fresh.get(*name) {
            Some(page) => std::fs::write(&file, page),
            None => std::fs::remove_file(&file),
        }
        .with_context(|| format!("cannot write {}", file.display()))?;
    }
    sys::say("man", format!("{} pages current, {} changed", fresh.len(), changed.len()));
    Ok(())
}

/// The pages in a folder, by file name.
fn pages(dir: &Path) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut pages = BTreeMap::new();
    for entry in dir.read_dir().with_context(|| format!("cannot read {}", dir.display()))? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "1" || extension == "7") {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let page = std::fs::read(&path);
            pages.insert(name, page.with_context(|| format!("cannot read {}", path.display()))?);
        }
    }
    Ok(pages)
}
