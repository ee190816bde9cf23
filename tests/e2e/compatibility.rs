//! Images of earlier versions must be readable for ever.
//!
//! `tests/fixtures/image-v1` has everything in it that an image of version 1 can have. It was made by
//! `core/examples/fixtures.rs`, and is made anew by `cargo xtask fixtures` only as long as the
//! format has not been released. `image-v1.json` is what `gpucr inspect --json` says about it.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, show};
use serde_json::Value;

const IMAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/image-v1");
const SNAPSHOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/image-v1.json");

#[test]
fn every_field_is_read_as_it_was_written() -> Result<()> {
    let lab = Lab::new();
    let output = lab.run(["inspect", "--json", IMAGE])?;
    ensure!(output.status.success(), "{}", show(&output));
    let shown: Value = serde_json::from_slice(&output.stdout)?;
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(SNAPSHOT)?)?;
    let expected = expected.as_object().context("an object")?;
    // Later versions may say more, but nothing else.
    for (key, value) in expected {
        ensure!(shown[key] == *value, "{key}: {} instead of {value}", shown[key]);
    }
    let people = lab.run(["inspect", "--all", IMAGE])?;
    ensure!(people.status.success() && people.stderr.is_empty(), "{}", show(&people));
    Ok(())
}

#[test]
fn every_chunk_is_read() -> Result<()> {
    let lab = Lab::new();
    let output = lab.run(["verify", "--json", IMAGE])?;
    ensure!(output.status.success(), "{}", show(&output));
    let report: Value = serde_json::from_slice(&output.stdout)?;
    let expected: Value = serde_json::from_str(&std::fs::read_to_string(SNAPSHOT)?)?;
    ensure!(report["whole"] == true && report["id"] == expected["id"], "{report}");
    ensure!(report["chunks"] == expected["chunks"]["count"], "{report}");
    Ok(())
}

#[test]
fn it_can_still_be_shipped() -> Result<()> {
    let lab = Lab::new();
    for args in [&["export", IMAGE, "image.tar"][..], &["import", "image.tar", "-o", "copy"]] {
        let output = lab.run(args)?;
        ensure!(output.status.success(), "{}", show(&output));
    }
    let diff = lab.run(["diff", "--json", IMAGE, "copy"])?;
    let diff: Value = serde_json::from_slice(&diff.stdout)?;
    ensure!(diff["a"] == diff["b"], "{diff}");
    Ok(())
}

#[test]
fn the_fixture_is_small() -> Result<()> {
    fn size(path: &Path) -> Result<u64> {
        let mut total = 0;
        for entry in path.read_dir()? {
            let entry = entry?;
            let meta = entry.metadata()?;
            total += if meta.is_dir() { size(&entry.path())? } else { meta.len() };
        }
        Ok(total)
    }
    let total = size(Path::new(IMAGE))?;
    ensure!(total < 200 << 10, "{total} bytes");
    Ok(())
}
