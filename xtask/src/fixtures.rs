//! `cargo xtask fixtures`: the images that every later gpucr must be able to read, what `gpucr inspect`
//! says about them, and the inputs that the fuzz targets start from.

use anyhow::{Context, Result};

use crate::sys;

/// Writes `tests/fixtures/` and the seeds in `fuzz/corpus/`.
///
/// # Errors
/// Something does not build or fails, or a file cannot be written.
pub(crate) fn run() -> Result<()> {
    let make = ["run", "--quiet", "--package", "gpucr-core", "--example", "fixtures"];
    sys::run(sys::cargo().args(make).arg("--").arg(sys::root()))?;
    sys::run(sys::cargo().args(["build", "--package", "gpucr"]))?;
    let gpucr = sys::target_dir()?.join("debug/gpucr");
    let fixtures = sys::root().join("tests/fixtures");
    for image in ["image-v1", "image-v2"] {
        let mut inspect = std::process::Command::new(&gpucr);
        inspect.args(["inspect", "--json"]).arg(fixtures.join(image));
        let shown = sys::capture(&mut inspect)?;
        let snapshot = fixtures.join(image).with_extension("json");
        std::fs::write(&snapshot, shown.trim_end().to_owned() + "\n")
            .with_context(|| format!("cannot write {}", snapshot.display()))?;
    }
    sys::say("fixtures", "tests/fixtures and the seeds in fuzz/corpus are new");
    Ok(())
}
