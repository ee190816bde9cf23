//! Images of earlier versions must be readable for ever.
//!
//! `tests/fixtures/image-v1` has everything in it that an image of version 1 can have, and `image-v2` also what one of
//! version 2 can. They were made by `core/examples/fixtures.rs`, and are made anew by `cargo xtask fixtures` only as
//! long as the format has not been released. `image-v1.json` is what `gpucr inspect --json` says about the first.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use gpucr_tests::{Lab, finish, refused, show};
use serde_json::Value;

const FIXTURES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures");
const IMAGES: [&str; 2] = ["image-v1", "image-v2"];

fn fixture(name: &str) -> PathBuf {
    Path::new(FIXTURES).join(name)
}

fn snapshot(name: &str) -> Result<Value> {
    Ok(serde_json::from_str(&std::fs::read_to_string(fixture(name).with_extension("json"))?)?)
}

#[test]
fn every_field_is_read_as_it_was_written() -> Result<()> {
    let lab = Lab::new();
    for name in IMAGES {
        let image = fixture(name);
        let output = finish(lab.gpucr().args(["inspect", "--json"]).arg(&image))?;
        ensure!(output.status.success(), "{name}: {}", show(&output));
        let shown: Value = serde_json::from_slice(&output.stdout)?;
        // Later versions may say more, but nothing else.
        for (key, value) in snapshot(name)?.as_object().context("an object")? {
            ensure!(shown[key] == *value, "{name}: {key}: {} instead of {value}", shown[key]);
        }
        let people = finish(lab.gpucr().args(["inspect", "--all"]).arg(&image))?;
        ensure!(people.status.success() && people.stderr.is_empty(), "{name}: {}", show(&people));
    }
    Ok(())
}

#[test]
fn every_chunk_is_read() -> Result<()> {
    let lab = Lab::new();
    for name in IMAGES {
        let output = finish(lab.gpucr().args(["verify", "--json"]).arg(fixture(name)))?;
        ensure!(output.status.success(), "{name}: {}", show(&output));
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let expected = snapshot(name)?;
        ensure!(report["whole"] == true && report["id"] == expected["id"], "{name}: {report}");
        ensure!(report["chunks"] == expected["chunks"]["count"], "{name}: {report}");
    }
    Ok(())
}

#[test]
fn they_can_still_be_shipped() -> Result<()> {
    let lab = Lab::new();
    for name in IMAGES {
        let (tar, copy) = (format!("{name}.tar"), format!("copy-{name}"));
        let exported = finish(lab.gpucr().arg("export").arg(fixture(name)).arg(&tar))?;
        ensure!(exported.status.success(), "{name}: {}", show(&exported));
        let imported = lab.run(["import", &tar, "-o", &copy])?;
        ensure!(imported.status.success(), "{name}: {}", show(&imported));
        let diff = finish(lab.gpucr().args(["diff", "--json"]).arg(fixture(name)).arg(&copy))?;
        let diff: Value = serde_json::from_slice(&diff.stdout)?;
        ensure!(diff["a"] == diff["b"] && diff["a"] == snapshot(name)?["id"], "{name}: {diff}");
    }
    Ok(())
}

/// A later version says something in its manifest without which a restore would be wrong.
#[test]
fn what_an_image_needs_and_nobody_knows_is_refused_by_name() -> Result<()> {
    let lab = Lab::new();
    let mut copy = Command::new("cp");
    let copied = finish(copy.arg("-r").arg(fixture("image-v2")).arg(lab.path("image")))?;
    ensure!(copied.status.success(), "{}", show(&copied));
    gpucr_core::hostile::forge(&lab.path("image"), |manifest| {
        manifest.sections[2].needed = true;
    });
    let words = ["needs `example` in version 1", "Nothing was changed", "newer gpucr"];
    refused(&lab.run(["restore", "image"])?, 1, &words)?;
    refused(&lab.run(["restore", "--new-pids", "image"])?, 1, &words[..1])?;
    refused(&lab.run(["warm", "image"])?, 1, &words[..1])?;
    // A command that does not restore it need not know it.
    for args in [&["verify", "image"][..], &["inspect", "image"], &["export", "image", "image.tar"]]
    {
        let output = lab.run(args)?;
        ensure!(output.status.success(), "{args:?}: {}", show(&output));
    }
    Ok(())
}

#[test]
fn the_fixtures_are_small() -> Result<()> {
    fn size(path: &Path) -> Result<u64> {
        let mut total = 0;
        for entry in path.read_dir()? {
            let entry = entry?;
            let meta = entry.metadata()?;
            total += if meta.is_dir() { size(&entry.path())? } else { meta.len() };
        }
        Ok(total)
    }
    let total = size(Path::new(FIXTURES))?;
    ensure!(total < 400 << 10, "{total} bytes");
    Ok(())
}
